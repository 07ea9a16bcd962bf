"""A file system that others fill, make read-only or pull away from under a store: memory serves, the rest is told."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import random
import shutil
import subprocess

import pytest
from sickkit import PACE, SMALL, FastClock, sick
from storekit import (
    BLOCK,
    MIB,
    allocated,
    blocks,
    check_idle,
    crash_image,
    fill,
    payload,
    read_all,
    ring_refusal,
    settle,
    until,
)

import asynckv
from asynckv.testing import Script, error

LOG_LINES_MAX = 40  # of a disk that is gone for good, however often it is tried


FAST = {"_clock": FastClock(), "io_timeout": 2.0 * PACE, "room_timeout": 0.3 * PACE}


@pytest.fixture
def volume(tmp_path):
    """A file system of 8 MiB of our own."""
    place = tmp_path / "volume"
    place.mkdir()
    try:
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=8m,nr_inodes=64,mode=0700", "tmpfs", place],
            check=True,
            capture_output=True,
        )
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("NO FILE SYSTEM CAN BE MOUNTED HERE: a disk that is really full is NOT checked in this run")
    yield place
    subprocess.run(["umount", "-l", place], check=True, capture_output=True)


@pytest.fixture(params=["threads", "io_uring"])
def engine(request):
    if request.param == "io_uring" and ring_refusal():
        pytest.skip(f"NO RING WORKS HERE ({ring_refusal()}): the io_uring engine is NOT checked in this run")
    return request.param


def stuff(volume):
    """Another program takes every block that is left."""
    assert volume.is_mount(), "unmounted meanwhile: what is behind it is not ours to fill"
    with (volume / "others").open("ab", buffering=0) as file:
        chunk = MIB
        while chunk >= 4096:
            try:
                file.write(bytes(chunk))
            except OSError:
                chunk //= 2
    assert os.statvfs(volume).f_bavail == 0


async def serves_from_memory(cache, start, count=30):
    for key in range(start, start + count):
        assert await cache.put(key, payload(key))
        found = await cache.get(key)
        assert bytes(found) == payload(key)
        del found


async def back_to_normal(cache, key):
    await until(lambda: cache.stats().disk_state == "ok", seconds=15)
    for _ in range(10):
        assert await cache.put(key, payload(key))
        with contextlib.suppress(asynckv.DiskError):  # of a write that was under way
            await cache.flush()
            break
        await asyncio.sleep(0.05)
    else:
        raise AssertionError("there is room again, and yet nothing reaches the disk")
    await settle(cache)
    check_idle(cache)


async def test_others_fill_the_disk_and_leave_it_again(volume, engine):
    directory = volume / "kv"
    async with asynckv.open(directory, **SMALL | FAST, engine=engine) as cache:
        for start in range(0, 60, 10):
            await cache.put_many(blocks(10, start=start).items())
            await cache.flush()
        stuff(volume)
        on_disk = cache.stats().disk_blocks
        failed = 0
        for start in range(100, 180, 10):
            await serves_from_memory(cache, start, 10)
            try:
                await cache.flush()
            except asynckv.DiskError:
                failed += 1
        stats = cache.stats()
        assert stats.dropped_blocks > 0, "the oldest segments made room"
        assert failed == 0 or stats.io_errors > 0
        assert cache.stats().disk_blocks > on_disk // 4, "not everything was given up for nothing"
        assert stats.disk_used >= allocated(directory), "bytes that nobody accounts for"
        (volume / "others").unlink()
        await back_to_normal(cache, 1000)
    async with asynckv.open(directory, **SMALL) as cache:
        assert bytes(await cache.get(1000)) == payload(1000)
        assert await cache.get(0) is None


async def test_without_room_for_anything_memory_serves_and_nothing_more_is_given_up(volume):
    """What makes room for others is lost again to them: that must not go on until the store is empty."""
    directory = volume / "kv"
    async with asynckv.open(directory, **SMALL | FAST) as cache:
        for start in range(0, 60, 10):
            await cache.put_many(blocks(10, start=start).items())
            await cache.flush()
        async with _greedy(volume):
            for start in range(100, 160, 10):
                await serves_from_memory(cache, start, 10)
                with contextlib.suppress(asynckv.DiskError):
                    await cache.flush()
        left = cache.stats().disk_blocks
        for start in range(200, 240, 10):
            await serves_from_memory(cache, start, 10)
            await asyncio.sleep(0.1)  # some probes
        stats = cache.stats()
        assert stats.disk_used >= allocated(directory)
        assert stats.memory_blocks > 10
        assert left > 0
        (volume / "others").unlink()
        await back_to_normal(cache, 1000)
    async with asynckv.open(directory, **SMALL) as cache:
        assert bytes(await cache.get(1000)) == payload(1000)


@contextlib.asynccontextmanager
async def _greedy(volume):
    """Whatever becomes free meanwhile is taken at once."""

    async def take():
        while True:
            stuff(volume)
            await asyncio.sleep(0.001)

    task = asyncio.create_task(take())
    try:
        yield
    finally:
        task.cancel()


async def test_a_store_on_a_full_disk_opens_serves_what_it_has_and_recovers(volume):
    directory = volume / "kv"
    await fill(directory, blocks(20), **SMALL)
    stuff(volume)
    async with asynckv.open(directory, **SMALL | FAST) as cache:
        assert bytes(await cache.get(19)) == payload(19)
        await serves_from_memory(cache, 100)
        with contextlib.suppress(asynckv.DiskError):
            await cache.flush()
        assert bytes(await cache.get(129)) == payload(129)
        (volume / "others").unlink()
        await back_to_normal(cache, 1000)
    async with asynckv.open(directory, **SMALL) as cache:
        assert bytes(await cache.get(1000)) == payload(1000)


async def test_a_new_store_on_a_full_disk_is_a_clean_error_or_works(volume):
    stuff(volume)
    directory = volume / "kv"
    with pytest.raises(asynckv.DiskError) as caught:
        async with asynckv.open(directory, **SMALL):
            pass
    assert caught.value.errno == errno.ENOSPC
    (volume / "others").unlink()
    async with asynckv.open(directory, **SMALL) as cache:
        await back_to_normal(cache, 1)
    assert not [name for name in os.listdir(directory) if name.endswith(".tmp")]


async def test_a_disk_without_one_more_file_is_used_as_far_as_it_goes(volume):
    directory = volume / "kv"
    await fill(directory, blocks(20), **SMALL)
    for number in range(100):
        try:
            (volume / f"other-{number}").touch()
        except OSError:
            break
    else:
        pytest.skip("THE NUMBER OF FILES HAS NO LIMIT HERE: a disk without inodes is NOT checked in this run")
    async with asynckv.open(directory, **SMALL | FAST) as cache:
        assert bytes(await cache.get(3)) == payload(3)
        await serves_from_memory(cache, 100)
        for path in volume.glob("other-*"):
            path.unlink()
        await back_to_normal(cache, 1000)


async def test_a_disk_that_is_read_only_at_open_is_a_clean_error(volume):
    directory = volume / "kv"
    await fill(directory, blocks(20), **SMALL)
    subprocess.run(["mount", "-o", "remount,ro", volume], check=True, capture_output=True)
    with pytest.raises(asynckv.DiskError) as caught:
        async with asynckv.open(directory, **SMALL):
            pass
    assert caught.value.errno == errno.EROFS
    subprocess.run(["mount", "-o", "remount,rw", volume], check=True, capture_output=True)
    async with asynckv.open(directory, **SMALL) as cache:
        assert await read_all(cache, range(20)) == {key: ("bytes", payload(key)) for key in range(20)}


WRITES = ("write", "sync", "allocate", "truncate", "rename", "unlink", "sync_directory", "write_file")


async def test_a_disk_that_becomes_read_only_while_it_is_used(tmp_path, caplog):
    await fill(tmp_path / "kv", blocks(20), **SMALL)
    script = Script()
    async with sick(tmp_path / "kv", script, **FAST) as (cache, _):
        for operation in WRITES:
            script.add(operation, error(errno.EROFS), sticky=True)
        assert bytes(await cache.get(3)) == payload(3)
        await serves_from_memory(cache, 100, 40)
        await until(lambda: cache.stats().disk_state == "off")
        with pytest.raises(asynckv.DiskError):
            await cache.flush()
        await asyncio.sleep(0.5)
        assert len(caplog.records) < LOG_LINES_MAX
        script.clear()
        await back_to_normal(cache, 1000)
        assert bytes(await cache.get(19)) == payload(19)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("operation", ["open", "write"])
async def test_one_refusal_for_space_costs_the_oldest_segment_at_most(tmp_path, number, operation):
    script = Script()
    async with sick(tmp_path / "kv", script, **FAST) as (cache, _):
        for start in range(0, 60, 10):
            await cache.put_many(blocks(10, start=start).items())
            await cache.flush()
        assert cache.stats().dropped_blocks == 0
        script.add(operation, error(number), nth=1)
        for start in range(100, 150, 10):
            await cache.put_many(blocks(10, start=start).items())
            with contextlib.suppress(asynckv.DiskError):
                await cache.flush()
        assert script.injected[operation, "error"] == 1
        await cache.flush()
        stats = cache.stats()
        assert stats.dropped_blocks <= 16, "one segment, not more"
        assert stats.disk_state == "ok"
        if operation == "open":  # a batch beside the refused one may have been written, which says that there is room
            assert stats.dropped_blocks
        assert (await cache.get(0) is None) == bool(stats.dropped_blocks)
        image = crash_image(tmp_path / "kv", tmp_path / "image")
    async with asynckv.open(image, **SMALL) as cache:
        found = await read_all(cache, range(100, 150))
        assert found == {key: ("bytes", payload(key)) for key in range(100, 150)}


async def test_a_lasting_refusal_for_space_gives_up_two_segments_at_most(tmp_path):
    script = Script()

    def segments():
        return sum(path.stat().st_size > 8 * BLOCK for path in (tmp_path / "kv").iterdir())

    async with sick(tmp_path / "kv", script, **FAST) as (cache, _):
        for start in range(0, 100, 10):
            await cache.put_many(blocks(10, start=start).items())
            await cache.flush()
        before = segments()
        script.add("write", error(errno.ENOSPC), sticky=True)
        for start in range(100, 130, 10):
            await serves_from_memory(cache, start, 10)
            with pytest.raises(asynckv.DiskError):
                await cache.flush()
        await until(lambda: cache.stats().disk_state == "off")
        tried = script.calls["write"]
        await until(lambda: script.calls["write"] >= tried + 3)  # by probes
        assert before - 2 <= segments() < before
        assert cache.stats().io_errors >= 3
        script.clear()
        await back_to_normal(cache, 1000)


@pytest.mark.parametrize("again", [False, True], ids=["gone", "made by somebody else"])
async def test_somebody_removes_the_directory_of_a_running_store(tmp_path, caplog, engine, again):
    directory = tmp_path / "kv"
    await fill(directory, blocks(20), **SMALL)
    caplog.set_level(logging.INFO)
    cache = await asynckv.open(directory, **SMALL | FAST, engine=engine)
    assert bytes(await cache.get(1)) == payload(1)
    shutil.rmtree(directory)
    if again:
        directory.mkdir(0o700)
        (directory / "theirs").write_bytes(b"keep")
    for start in range(100, 200, 20):
        await serves_from_memory(cache, start, 20)
        with contextlib.suppress(asynckv.DiskError):
            await cache.flush()
        await asyncio.sleep(0.05)
    for key in range(20):
        found = await cache.get(key)
        assert found is None or bytes(found) == payload(key)
        del found
    assert cache.stats().disk_state == "off"
    with pytest.raises(asynckv.DiskError):
        await cache.flush()
    await settle(cache)
    check_idle(cache)
    async with asyncio.timeout(10):
        await cache.close()
    assert len(caplog.records) < LOG_LINES_MAX, "\n".join(record.getMessage() for record in caplog.records)
    if again:
        assert os.listdir(directory) == ["theirs"]
    async with asynckv.open(directory, **SMALL) as cache:
        assert cache.keys() == []
        await back_to_normal(cache, 1000)
    assert not again or (directory / "theirs").read_bytes() == b"keep"


def spoil(path, how):
    if how == "truncated":
        os.truncate(path, 8192)
        return
    path.unlink()
    if how == "fifo":
        os.mkfifo(path)
    elif how == "symlink":
        path.symlink_to("/etc/hostname")


@pytest.mark.parametrize("opened", [False, True], ids=["not yet opened", "opened"])
@pytest.mark.parametrize("how", ["deleted", "truncated", "fifo", "symlink"])
async def test_somebody_spoils_a_segment_of_a_running_store(tmp_path, how, opened):
    directory = tmp_path / "kv"
    await fill(directory, blocks(60), **SMALL)
    async with asynckv.open(directory, **SMALL | FAST) as cache:
        if opened:
            for key in random.Random(1).sample(range(60), 60):
                assert await cache.get(key) is not None
        first = min(path for path in directory.iterdir() if path.stat().st_size > 8 * BLOCK)
        spoil(first, how)
        misses = 0
        for _ in range(2):
            async with asyncio.timeout(10):
                for key in range(60):
                    found = await cache.get(key)
                    assert found is None or bytes(found) == payload(key)
                    misses += found is None
                    del found
        stats = cache.stats()
        assert stats.disk_state == "ok", "the others are well"
        assert stats.misses == misses
        if how == "truncated" or not opened:
            assert stats.corrupt_blocks > 0
            assert 0 < misses < 60
        for start in range(100, 300, 10):  # until that segment is reclaimed
            await cache.put_many(blocks(10, start=start).items())
            await cache.flush()
        await settle(cache)
        check_idle(cache)
    async with asynckv.open(directory, **SMALL) as cache:
        assert bytes(await cache.get(299)) == payload(299)
