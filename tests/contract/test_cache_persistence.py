"""Persistence: flush, clean restart, restart after a crash, the cap on disk bytes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from storekit import (
    BLOCK,
    KIB,
    MIB,
    allocated,
    blocks,
    cache_block,
    canon,
    check_idle,
    child_environment,
    crash_image,
    fill,
    payload,
    read_all,
    recovered,
    settle,
    until,
)

import asynckv
import asynckv.tiers.segment
from asynckv.testing import ManualClock

SMALL = {"memory": "1MiB", "disk": "16MiB", "room_timeout": 0.3}


async def test_a_clean_restart_finds_every_block_of_every_kind(tmp_path):
    items = {
        1: b"bytes",
        "array": np.arange(24, dtype=">i2").reshape(2, 3, 4),
        b"block": cache_block(1, layer_id=-5),
        -(2**63): b"",
        2**63 - 1: np.zeros((0, 3), np.complex64),
        "large": payload(9, 0, 100_001),
    }
    await fill(tmp_path / "kv", items, **SMALL)
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        assert set(cache.keys()) == set(items)
        assert await read_all(cache, items) == {key: canon(block) for key, block in items.items()}
        assert cache.stats().disk_hits == len(items)


async def test_close_flushes_what_was_never_flushed(tmp_path):
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        await cache.put_many(blocks(12).items())
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        assert await read_all(cache, range(12)) == {key: canon(block) for key, block in blocks(12).items()}


async def test_what_flush_acknowledged_survives_a_crash(tmp_path):
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        for key, block in blocks(60).items():
            await cache.put(key, block)
        await cache.flush()
        image = crash_image(tmp_path / "kv", tmp_path / "image")
    async with asynckv.open(image, **SMALL) as cache:
        assert await read_all(cache, range(60)) == {key: canon(block) for key, block in blocks(60).items()}


async def test_after_a_crash_a_key_gives_its_last_flushed_value_or_a_later_one(tmp_path):
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        for version in range(3):
            await cache.put_many(blocks(10, version=version).items())
            await cache.flush()
        for version in range(3, 9):  # spilled in part, never flushed
            await cache.put_many(blocks(10, version=version).items())
        image = crash_image(tmp_path / "kv", tmp_path / "image")
    async with asynckv.open(image, **SMALL) as cache:
        for key in range(10):
            found = await cache.get(key)
            assert found is not None
            assert bytes(found) in [payload(key, version) for version in range(2, 9)]
            del found


async def test_values_of_one_key_never_go_back_in_time_after_two_crashes(tmp_path):
    directory = tmp_path / "kv0"
    newest = 0
    for crash in range(4):
        async with asynckv.open(directory, **SMALL) as cache:
            if crash:
                found = await cache.get(1)
                assert bytes(found) == payload(1, newest, 30_000)
                del found
            for _ in range(5):
                newest += 1
                await cache.put(1, payload(1, newest, 30_000))
                await cache.flush()
            image = crash_image(directory, tmp_path / f"kv{crash + 1}")
        directory = image


async def test_flush_of_nothing_and_flush_without_a_disk_return(tmp_path):
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        await cache.flush()
        assert cache.stats().spilled_blocks == 0
    async with asynckv.open(tmp_path / "m", memory="1MiB", disk=0) as cache:
        await cache.put(1, b"x")
        await cache.flush()


async def test_flushes_at_once_all_return_and_write_each_block_once(tmp_path):
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        await cache.put_many(blocks(8).items())
        async with asyncio.timeout(10):
            await asyncio.gather(*(cache.flush() for _ in range(10)))
        assert cache.stats().spilled_blocks == 8


async def test_flush_covers_every_put_that_returned_before_the_call(tmp_path):
    async with asynckv.open(tmp_path / "kv", memory="4MiB", disk="64MiB") as cache:
        for round_ in range(6):
            flushing = asyncio.create_task(cache.flush())  # an earlier one under way
            await asyncio.sleep(0)
            await cache.put_many(blocks(10, start=round_ * 10).items())
            await cache.flush()
            image = crash_image(tmp_path / "kv", tmp_path / f"image{round_}")
            async with asynckv.open(image, memory="4MiB", disk="64MiB") as other:
                for key in range((round_ + 1) * 10):
                    assert bytes(await other.get(key)) == payload(key)
            await flushing


async def test_a_cancelled_flush_does_not_spoil_the_next_one(tmp_path):
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        for turns in range(10):
            await cache.put(turns, payload(turns))
            flushing = asyncio.create_task(cache.flush())
            for _ in range(turns):
                await asyncio.sleep(0)
            flushing.cancel()
            await asyncio.wait([flushing])
        await cache.flush()
        image = crash_image(tmp_path / "kv", tmp_path / "image")
    async with asynckv.open(image, **SMALL) as cache:
        await recovered(cache)
        assert sorted(cache.keys()) == list(range(10))


async def test_flush_of_a_set_that_cannot_fit_the_disk_raises_an_os_error(tmp_path):
    async with asynckv.open(tmp_path / "kv", memory="8MiB", disk="1MiB", segment="64KiB") as cache:
        await cache.put_many(blocks(200, 32 * KIB - 64).items())
        with pytest.raises(OSError) as caught:
            async with asyncio.timeout(20):
                await cache.flush()
        assert isinstance(caught.value, asynckv.AsyncKVError)
        assert await cache.put(1, b"alive")
        assert bytes(await cache.get(1)) == b"alive"


TINY = {"memory": "8MiB", "disk": "1MiB", "segment": "64KiB", "room_timeout": 0.3}


async def test_flush_writes_again_what_lost_its_segment_meanwhile(tmp_path):
    """Blocks that stay in memory, while others are overwritten until the log has gone round."""
    old = blocks(30, 8 * KIB)
    async with asynckv.open(tmp_path / "alive", **TINY) as cache:
        await cache.put_many(old.items())
        for version in range(8):
            new = blocks(30, 8 * KIB, start=100, version=version)
            await cache.put_many(new.items())
            await cache.flush()
        store = crash_image(tmp_path / "alive", tmp_path / "kv")
    async with asynckv.open(store, **TINY) as cache:
        assert await read_all(cache, old | new) == {key: canon(block) for key, block in (old | new).items()}


@pytest.mark.parametrize("used", [False, True])
async def test_flush_of_what_fits_only_one_after_the_other_raises(tmp_path, used):
    async with asynckv.open(tmp_path / "kv", **TINY) as cache:
        await cache.put_many(blocks(60, 8 * KIB).items())
        await cache.flush()
        if used:
            await cache.get_many(range(60))
        await cache.put_many(blocks(60, 8 * KIB, start=100).items())
        with pytest.raises(asynckv.DiskError, match="do not fit the disk together"):
            await cache.flush()
        await cache.delete_many(range(60))
        await cache.flush()


async def test_blocks_that_lost_their_segment_are_written_again_after_persist_after(tmp_path):
    clock = ManualClock()
    async with asynckv.open(tmp_path / "kv", **TINY, persist_after=10, _clock=clock) as cache:
        await cache.put_many(blocks(30, 8 * KIB).items())
        for version in range(8):
            await cache.put_many(blocks(30, 8 * KIB, start=100, version=version).items())
            await cache._scheduler.writer._write_all()
        assert cache.stats().disk_blocks < 60
        clock.advance(10)
        await until(lambda: cache.stats().disk_blocks == 60)


async def test_many_short_lives_lose_nothing_while_there_is_room(tmp_path, monkeypatch):
    """Each leaves a segment of its own, and there are only so many."""
    monkeypatch.setattr(asynckv.tiers.segment, "SEGMENTS_MAX", 8)
    for life in range(20):
        async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
            await cache.put(life, payload(life))
            assert len(list((tmp_path / "kv").glob("*.seg"))) <= 8
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        assert await read_all(cache, range(20)) == {key: canon(block) for key, block in blocks(20).items()}


async def test_a_disk_of_more_segments_than_there_may_be_is_told_of(tmp_path, caplog):
    async with asynckv.open(tmp_path / "kv", memory="1MiB", disk="128MiB", segment="64KiB"):
        assert "of disk=128.0 MiB at most 64.0 MiB will be used, in 1024 segments" in caplog.text


async def test_flush_with_a_block_larger_than_a_segment_raises_and_memory_serves_it(tmp_path):
    async with asynckv.open(tmp_path / "kv", memory="4MiB", disk="1MiB", segment="64KiB") as cache:
        assert await cache.put(1, payload(1, 0, MIB))
        with pytest.raises(OSError):
            await cache.flush()
        assert bytes(await cache.get(1)) == payload(1, 0, MIB)


@pytest.mark.parametrize("segment", [None, "256KiB"])
async def test_allocated_bytes_never_pass_the_cap(tmp_path, segment):
    # Fault kind SPACE: the disk fills without bound. Sampled all the time, by another thread.
    cap = 4 * MIB
    options = {"memory": "1MiB", "disk": cap, **({"segment": segment} if segment else {})}
    worst, stop = 0, threading.Event()

    def sample() -> None:
        nonlocal worst
        while not stop.is_set():
            worst = max(worst, allocated(tmp_path / "kv"))
            time.sleep(0.002)

    sampler = threading.Thread(target=sample)
    async with asynckv.open(tmp_path / "kv", **options) as cache:
        sampler.start()
        try:
            for key in range(40 * MIB // BLOCK):
                assert await cache.put(key, payload(key))
                if key % 50 == 0:
                    assert cache.stats().disk_used <= cap
            await cache.flush()
            stats = cache.stats()
        finally:
            await cache.close()
            stop.set()
            sampler.join()
    assert 2 * MIB < worst <= cap
    assert stats.disk_bytes_written >= 30 * MIB
    assert allocated(tmp_path / "kv") <= cap
    async with asynckv.open(tmp_path / "kv", **options) as cache:
        assert len(cache) > 20
        for key in list(cache.keys()):
            assert bytes(await cache.get(key)) == payload(key)


async def test_a_block_dropped_with_its_segment_is_absent_at_once_and_counted(tmp_path):
    # Fault kind PHANTOM: the index says hit, the disk has evicted.
    async with asynckv.open(tmp_path / "kv", memory="512KiB", disk="1MiB", segment="128KiB") as cache:
        for key in range(100):
            assert await cache.put(key, payload(key, 0, 30_000))
        await settle(cache)
        before = cache.stats()
        assert before.dropped_blocks > 0
        for key in range(100):
            known, dropped = key in cache, cache.stats().dropped_blocks
            found = await cache.get(key)
            if known and found is None:  # room for it was made by a spill, and that by dropping its segment
                assert key not in cache
                assert cache.stats().dropped_blocks > dropped
            else:
                assert known == (found is not None)
                assert found is None or bytes(found) == payload(key, 0, 30_000)
            del found
        assert cache.stats().corrupt_blocks == 0


async def test_blocks_in_use_outlive_the_reclaim_of_their_segment(tmp_path):
    async with asynckv.open(tmp_path / "kv", memory="512KiB", disk="2MiB", segment="128KiB") as cache:
        hot = list(range(8))
        for key in hot:
            await cache.put(key, payload(key, 0, 30_000))
        lost = 0
        for key in range(100, 400):
            assert await cache.put(key, payload(key, 0, 30_000))
            if key % 5 == 0:
                for each in hot:
                    found = await cache.get(each)
                    lost += found is None
                    assert found is None or bytes(found) == payload(each, 0, 30_000)
                    del found
        assert lost == 0


async def test_a_smaller_cap_than_last_time_holds_from_the_start(tmp_path):
    await fill(tmp_path / "kv", blocks(120), memory="1MiB", disk="16MiB", segment="256KiB")
    async with asynckv.open(tmp_path / "kv", memory="1MiB", disk="4MiB", segment="256KiB") as cache:
        assert allocated(tmp_path / "kv") <= 4 * MIB
        assert cache.stats().disk_used <= 4 * MIB
        found = [key for key in range(120) if await cache.get(key) is not None]
        assert found, "not everything had to go"
        assert found == list(range(120))[-len(found) :], "the oldest go first"


async def test_a_larger_cap_than_last_time_keeps_everything(tmp_path):
    await fill(tmp_path / "kv", blocks(40), memory="1MiB", disk="4MiB")
    async with asynckv.open(tmp_path / "kv", memory="2MiB", disk="32MiB") as cache:
        for key in range(40):
            assert bytes(await cache.get(key)) == payload(key)


async def test_memory_only_leaves_the_files_of_a_store_alone(tmp_path):
    await fill(tmp_path / "kv", blocks(10), **SMALL)
    before = {path.name: path.read_bytes() for path in (tmp_path / "kv").iterdir()}
    async with asynckv.open(tmp_path / "kv", memory="1MiB", disk=0) as cache:
        assert len(cache) == 0
        assert await cache.get(1) is None
        await cache.put(1, b"other")
        await cache.clear()
    assert {path.name: path.read_bytes() for path in (tmp_path / "kv").iterdir()} == before
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        assert bytes(await cache.get(1)) == payload(1)


async def test_recover_none_starts_empty_and_stays_so(tmp_path):
    await fill(tmp_path / "kv", blocks(10), **SMALL)
    async with asynckv.open(tmp_path / "kv", **SMALL, recover="none") as cache:
        assert len(cache) == 0
        assert [await cache.get(key) for key in range(10)] == [None] * 10
        await cache.put(3, payload(3, 2))
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        assert bytes(await cache.get(3)) == payload(3, 2)
        for key in range(10):
            found = await cache.get(key)
            assert key == 3 or found is None, "dropped data came back"


async def test_a_get_right_after_open_waits_for_the_scan(tmp_path):
    async with asynckv.open(tmp_path / "kv", memory="1MiB", disk="64MiB", segment="256KiB") as cache:
        for key in range(2000):
            await cache.put(key, payload(key, 0, 8 * KIB))
        await cache.flush()
        image = crash_image(tmp_path / "kv", tmp_path / "image")
    for key in (0, 1999, 1000):
        cache = await asynckv.open(image, memory="1MiB", disk="64MiB", segment="256KiB")
        found = await cache.get(key)
        assert found is not None
        assert bytes(found) == payload(key, 0, 8 * KIB)
        del found
        assert cache.stats().misses == 0
        assert await cache.get(5000) is None
        await cache.close()


async def test_values_put_while_the_store_recovers_win(tmp_path):
    async with asynckv.open(tmp_path / "kv", memory="1MiB", disk="64MiB", segment="256KiB") as cache:
        for key in range(1000):
            await cache.put(key, payload(key, 0, 8 * KIB))
        await cache.flush()
        image = crash_image(tmp_path / "kv", tmp_path / "image")
    async with asynckv.open(image, memory="1MiB", disk="64MiB", segment="256KiB") as cache:
        for key in range(50):
            await cache.put(key, payload(key, 1, 8 * KIB))
        for key in range(50, 60):
            await cache.delete(key)
        for key in range(100):
            found = await cache.get(key)
            if key < 50:
                assert bytes(found) == payload(key, 1, 8 * KIB)
            elif key < 60:
                assert found is None
            else:
                assert bytes(found) == payload(key, 0, 8 * KIB)
            del found
    async with asynckv.open(image, memory="1MiB", disk="64MiB", segment="256KiB") as cache:
        assert [key for key in range(50, 60) if await cache.get(key) is not None] == []
        assert bytes(await cache.get(3)) == payload(3, 1, 8 * KIB)


async def test_clear_while_the_store_recovers_clears_what_was_not_found_yet(tmp_path):
    async with asynckv.open(tmp_path / "kv", memory="1MiB", disk="64MiB", segment="256KiB") as cache:
        for key in range(1000):
            await cache.put(key, payload(key, 0, 8 * KIB))
        await cache.flush()
        image = crash_image(tmp_path / "kv", tmp_path / "image")
    async with asynckv.open(image, memory="1MiB", disk="64MiB", segment="256KiB") as cache:
        await cache.clear()
        await cache.put(7, payload(7, 1, 8 * KIB))
        await asyncio.sleep(0.1)
        assert [key for key in range(1000) if await cache.get(key) is not None] == [7]
    async with asynckv.open(image, memory="1MiB", disk="64MiB", segment="256KiB") as cache:
        await recovered(cache)
        assert cache.keys() == [7]
        assert bytes(await cache.get(7)) == payload(7, 1, 8 * KIB)


WRITER = """
import asyncio, sys, asynckv
sys.path.insert(0, sys.argv[2])
from storekit import payload
async def main():
    async with asynckv.open(sys.argv[1], memory="1MiB", disk="32MiB", segment="512KiB") as cache:
        version = int(sys.argv[3])
        while True:
            version += 1
            for key in range(24):
                assert await cache.put(key, payload(key, version, 40000))
            await cache.flush()
            print(version, flush=True)
asyncio.run(main())
"""


async def test_kill_9_in_the_middle_of_writing_keeps_every_flushed_block(tmp_path):
    here = os.path.dirname(os.path.dirname(__file__))
    flushed = 0
    for round_ in range(4):
        child = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path / "kv"), here, str(flushed + 1000 * round_)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=child_environment(),
        )  # fmt: skip
        try:
            line = child.stdout.readline()
            assert line, child.stderr.read()
            time.sleep(0.05 + 0.06 * round_)
        finally:
            child.send_signal(signal.SIGKILL)
            rest, _ = child.communicate()
        flushed = int((line + rest).split()[-1])
        async with asynckv.open(tmp_path / "kv", memory="1MiB", disk="32MiB", segment="512KiB") as cache:
            for key in range(24):
                found = await cache.get(key)
                assert found is not None, (round_, key)
                assert bytes(found) in [payload(key, version, 40_000) for version in (flushed, flushed + 1)]
                del found
            await settle(cache)
            check_idle(cache)


async def test_a_block_larger_than_a_segment_costs_only_itself(tmp_path):
    options = {"memory": "1MiB", "disk": "1MiB"}
    async with asynckv.open(tmp_path / "kv", **options) as cache:
        await cache.put(1, payload(1, 0, 100))
        await cache.put(2, payload(2, 0, 64 * KIB))
        with pytest.raises(asynckv.DiskError):
            await cache.flush()
        await cache.put(3, payload(3, 0, 100))
    async with asynckv.open(tmp_path / "kv", **options) as cache:
        assert sorted(cache.keys()) == [1, 3]
        assert bytes(await cache.get(1)) == payload(1, 0, 100)
