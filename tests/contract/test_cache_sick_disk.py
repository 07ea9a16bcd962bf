"""A slow, failing or hanging disk: counted, switched off, tried again; memory serves on, the loop never stalls."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import shutil
import time
from typing import Any

import pytest
from sickkit import SMALL, FastClock, sick
from storekit import BLOCK, Lag, blocks, check_idle, crash_image, fill, payload, read_all, recovered, settle, until

import asynckv
from asynckv.backends import create_backend
from asynckv.testing import FaultyBackend, ManualClock, Script, corrupt, error, hang, slow

LAG_SECONDS_MAX = 0.1  # half the delays below, and what a busy machine adds


async def well_again(cache, backend, script):
    """End the faults; the disk is tried and used again, and everything is accounted for."""
    script.clear()
    backend.release_all()
    await until(lambda: cache.stats().disk_state == "ok", seconds=15)
    await cache.flush()
    await settle(cache)
    check_idle(cache)


async def test_a_block_read_while_it_is_slowly_written_is_whole(tmp_path):
    # Fault kind TORN: visible before complete.
    script = Script()
    async with sick(tmp_path / "kv", script) as (cache, _):
        await cache.put(1, payload(1))
        script.add("write", slow(0.2), sticky=True)
        flushing = asyncio.create_task(cache.flush())
        reads = 0
        while not flushing.done():
            assert cache.tier(1) == "memory"
            assert bytes(await cache.get(1)) == payload(1)
            reads += 1
            await asyncio.sleep(0.001)
        await flushing
        assert reads > 50
        assert cache.stats().memory_hits == reads


async def test_a_block_overwritten_during_its_write_never_mixes_with_it(tmp_path):
    # Fault kind UAF: a block reused while a transfer still reads it.
    script = Script()
    async with sick(tmp_path / "kv", script) as (cache, backend):
        await cache.put_many(blocks(4, version=1).items())
        script.add("write", hang(), nth=1)
        flushing = asyncio.create_task(cache.flush())
        await until(lambda: backend.held)
        for version in (2, 3):
            await cache.put_many(blocks(4, version=version).items())
        for key in range(200, 206):
            await cache.put(key, payload(key))
        backend.release_all()
        await flushing
        image = crash_image(tmp_path / "kv", tmp_path / "image")
        await cache.flush()
        last = crash_image(tmp_path / "kv", tmp_path / "last")
    async with asynckv.open(image, **SMALL) as cache:
        for key in range(4):
            assert bytes(await cache.get(key)) in [payload(key, version) for version in (1, 2, 3)]
    async with asynckv.open(last, **SMALL) as cache:
        for key in range(4):
            assert bytes(await cache.get(key)) == payload(key, 3)


@pytest.mark.parametrize("again", [False, True])
async def test_a_key_deleted_during_its_write_is_a_miss_now_and_after_restart(tmp_path, again):
    # Fault kind PHANTOM: deleted key resurrected by a pending write.
    script = Script()
    async with sick(tmp_path / "kv", script) as (cache, backend):
        await cache.put_many(blocks(4).items())
        script.add("write", hang(), nth=1)
        flushing = asyncio.create_task(cache.flush())
        await until(lambda: backend.held)
        deleting = asyncio.create_task(cache.delete(2))
        await asyncio.sleep(0.01)
        assert await cache.get(2) is None
        if again:
            await cache.put(2, payload(2, 7))
        backend.release_all()
        assert await deleting is True
        await flushing
        await settle(cache)
        image = crash_image(tmp_path / "kv", tmp_path / "image")
        found = await cache.get(2)
        assert bytes(found) == payload(2, 7) if again else found is None
        del found
    async with asynckv.open(image, **SMALL) as cache:
        found = await cache.get(2)
        assert found is None or (again and bytes(found) == payload(2, 7))
        del found
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        found = await cache.get(2)
        assert bytes(found) == payload(2, 7) if again else found is None


async def test_clear_during_a_write_leaves_nothing(tmp_path):
    script = Script()
    async with sick(tmp_path / "kv", script) as (cache, backend):
        await cache.put_many(blocks(4).items())
        script.add("write", hang(), nth=1)
        flushing = asyncio.create_task(cache.flush())
        await until(lambda: backend.held)
        clearing = asyncio.create_task(cache.clear())
        await asyncio.sleep(0.01)
        assert len(cache) == 0
        backend.release_all()
        await clearing
        await flushing
        await settle(cache)
        assert check_idle(cache).memory_used == 0
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        assert cache.keys() == []


async def test_a_clear_that_finds_no_disk_gets_its_answer_although_the_store_closes(tmp_path):
    script = Script()
    async with sick(tmp_path / "kv", script) as (cache, _):
        script.add("open", error(errno.ENOSPC), sticky=True)
        clearing = asyncio.create_task(cache.clear())
        await asyncio.sleep(0)
        await cache.close()
        async with asyncio.timeout(10):
            with pytest.raises(asynckv.DiskError):
                await clearing


async def test_a_key_on_its_way_from_disk_is_in_tier_disk_and_its_read_is_shared(tmp_path):
    await fill(tmp_path / "kv", blocks(2), **SMALL)
    script = Script()
    async with sick(tmp_path / "kv", script) as (cache, backend):
        script.add("read", hang(), nth=1)
        before = script.calls["read"]
        gets = [asyncio.create_task(cache.get(0)) for _ in range(32)]
        await until(lambda: backend.held)
        assert cache.tier(0) == "disk"
        assert cache.stats().reads_in_flight == 1
        assert cache.prefetch([0]) == 1, "joined"
        backend.release_all()
        assert all(bytes(view) == payload(0) for view in await asyncio.gather(*gets))
        assert script.calls["read"] - before == 1
        gets.clear()


async def test_a_put_during_a_slow_reload_wins_and_the_old_bytes_reach_nobody(tmp_path):
    await fill(tmp_path / "kv", blocks(2), **SMALL)
    script = Script()
    async with sick(tmp_path / "kv", script) as (cache, backend):
        script.add("read", hang(), nth=1)
        get = asyncio.create_task(cache.get(0))
        await until(lambda: backend.held)
        await cache.put(0, payload(0, 5))
        assert bytes(await cache.get(0)) == payload(0, 5)
        backend.release_all()
        assert bytes(await get) == payload(0, 5)
        del get
        await settle(cache)
        assert bytes(await cache.get(0)) == payload(0, 5)
        check_idle(cache)


@pytest.mark.parametrize("how", ["cancel", "timeout"])
async def test_a_reader_that_leaves_a_hanging_read_frees_nothing_the_read_still_writes(tmp_path, how):
    # Fault kind UAF: the engine writes into an extent that was given to somebody else.
    await fill(tmp_path / "kv", blocks(20), **SMALL)
    script = Script()
    async with sick(tmp_path / "kv", script) as (cache, backend):
        script.add("read", hang(), sticky=True)
        if how == "cancel":
            gets = [asyncio.create_task(cache.get(key)) for key in range(4)]
            await until(lambda: backend.held == 4)
            for get in gets:
                get.cancel()
            await asyncio.wait(gets)
            gets.clear()
        else:
            started = time.perf_counter()
            assert await asyncio.gather(*(cache.get(key, timeout=0.05) for key in range(4))) == [None] * 4
            assert time.perf_counter() - started < 1.0
            assert cache.stats().misses == 4
        script.clear()
        canaries = {}
        for key in range(100, 112):
            assert await cache.put(key, payload(key))
            canaries[key] = await cache.get(key)
        backend.release_all()
        await settle(cache)
        for key, view in canaries.items():
            assert bytes(view) == payload(key)
        del view
        canaries.clear()
        check_idle(cache)
        assert bytes(await cache.get(1)) == payload(1)


async def test_a_hanging_read_is_a_counted_miss_after_io_timeout(tmp_path):
    await fill(tmp_path / "kv", blocks(20), **SMALL)
    script = Script()
    async with sick(tmp_path / "kv", script, io_timeout=0.2) as (cache, backend):
        await cache.put(100, payload(100))
        script.add("read", hang(), nth=1)
        async with Lag() as lag:
            started = time.perf_counter()
            assert await cache.get(3) is None
            assert 0.15 < time.perf_counter() - started < 2.0
        assert lag.worst < LAG_SECONDS_MAX
        stats = cache.stats()
        assert (stats.io_timeouts, stats.misses) == (1, 1)
        assert stats.memory_quarantined >= BLOCK
        assert stats.memory_used + stats.memory_free + stats.memory_quarantined == stats.memory_capacity
        assert bytes(await cache.get(100)) == payload(100)
        backend.release_all()
        await settle(cache)
        await until(lambda: cache.stats().memory_quarantined == 0)
        check_idle(cache)
        assert bytes(await cache.get(3)) == payload(3), "a late disk is not a lost block"


async def test_one_read_error_is_one_counted_miss_and_others_are_unaffected(tmp_path):
    await fill(tmp_path / "kv", blocks(6), **SMALL)
    script = Script()
    async with sick(tmp_path / "kv", script) as (cache, _):
        script.add("read", error(errno.EIO), nth=1)
        assert await cache.get(0) is None
        stats = cache.stats()
        assert (stats.io_errors, stats.misses, stats.disk_state) == (1, 1, "ok")
        for key in range(1, 6):
            assert bytes(await cache.get(key)) == payload(key)
        await settle(cache)
        check_idle(cache)


async def test_failures_reported_equal_failures_injected(tmp_path):
    # Fault kind SILENT: a failure that is dropped.
    await fill(tmp_path / "kv", blocks(60), **SMALL)
    script = Script()
    async with sick(tmp_path / "kv", script) as (cache, _):
        script.add("read", error(errno.EIO), every=7)
        failed = 0
        for key in range(60):
            found = await cache.get(key)
            failed += found is None
            assert found is None or bytes(found) == payload(key)
            del found
        injected = script.injected["read", "error"]
        assert injected >= 8
        stats = cache.stats()
        assert stats.io_errors == injected == failed == stats.misses


@pytest.mark.parametrize("every", [3, 11])
async def test_errors_that_opening_and_recovery_meet_are_counted(tmp_path, every):
    # Fault kind SILENT: a failure that is dropped.
    async with asynckv.open(tmp_path / "alive", **SMALL) as cache:
        await cache.put_many(blocks(30).items())
        await cache.flush()
        crash_image(tmp_path / "alive", tmp_path / "kv")
    script = Script()
    script.add("read", error(errno.EIO), every=every)
    async with sick(tmp_path / "kv", script) as (cache, _):
        await until(lambda: not cache.stats().recovering)
        assert script.injected["read", "error"] >= 3
        assert cache.stats().io_errors == script.injected["read", "error"]


async def test_one_flawed_read_is_read_again_and_is_a_hit(tmp_path):
    # Fault kind PERF: good records dropped on a transient mismatch.
    await fill(tmp_path / "kv", blocks(2), **SMALL)
    script = Script()
    async with sick(tmp_path / "kv", script) as (cache, _):
        script.add("read", corrupt(), nth=1)
        assert bytes(await cache.get(0)) == payload(0)
        assert script.injected["read", "corrupt"] == 1
        assert cache.stats().disk_hits == 1
        assert cache.stats().misses == 0


async def test_a_flawed_read_costs_a_recovery_nothing(tmp_path):
    # Fault kind STALE: bytes that could be torn, and were whole, made way for those of before.
    async with asynckv.open(tmp_path / "alive", **SMALL) as cache:
        await cache.put_many(blocks(6, version=1).items())
        await cache.flush()
        await cache.put_many(blocks(6, version=2).items())
        await cache.put_many(blocks(12, start=100).items())  # which need the room
        await until(lambda: cache.stats().spilled_blocks >= 12)
        crash_image(tmp_path / "alive", tmp_path / "kv")
    flawed = 0
    while True:
        store = tmp_path / str(flawed)
        shutil.copytree(tmp_path / "kv", store)
        store.chmod(0o700)
        script = Script()
        script.add("read", corrupt(), nth=flawed + 1)
        async with sick(store, script) as (cache, _):
            await until(lambda: not cache.stats().recovering)
            if not script.injected["read", "corrupt"]:
                break
            flawed += 1
            for key in range(6):
                assert bytes(await cache.get(key)) == payload(key, 2)
    assert flawed >= 5


async def test_two_flawed_reads_are_a_miss_counted_once_as_corrupt(tmp_path):
    await fill(tmp_path / "kv", blocks(2), **SMALL)
    script = Script()
    async with sick(tmp_path / "kv", script) as (cache, _):
        script.add("read", corrupt(), sticky=True)
        assert await cache.get(0) is None
        assert cache.stats().corrupt_blocks == 1
        assert script.injected["read", "corrupt"] == 2
        script.clear()
        assert await cache.get(0) is None, "dropped, not retried for ever"
        assert bytes(await cache.get(1)) == payload(1)


@pytest.mark.parametrize("operation", ["read", "write"])
async def test_a_disk_that_keeps_failing_is_switched_off_and_tried_again(tmp_path, operation):
    await fill(tmp_path / "kv", blocks(30), **SMALL)
    script = Script()
    async with sick(tmp_path / "kv", script) as (cache, _):
        await cache.put(100, payload(100))
        script.add(operation, error(errno.EIO), sticky=True)
        async with Lag() as lag:
            for key in range(10):
                if operation == "read":
                    await cache.get(key)
                else:
                    with pytest.raises(OSError):
                        await cache.flush()
                if cache.stats().disk_state == "off":
                    break
            assert cache.stats().disk_state == "off"
            assert cache.stats().io_errors >= 3
            # Off: disk-only blocks are misses at once, memory serves, puts are taken, flush says no.
            started = time.perf_counter()
            assert await cache.get(25) is None
            assert time.perf_counter() - started < 0.2
            assert 25 not in cache
            assert bytes(await cache.get(100)) == payload(100)
            for key in range(200, 240):
                assert await cache.put(key, payload(key))
                assert bytes(await cache.get(key)) == payload(key)
            with pytest.raises(OSError) as caught:
                await cache.flush()
            assert isinstance(caught.value, asynckv.DiskError)
        assert lag.worst < LAG_SECONDS_MAX
        script.clear()
        await until(lambda: cache.stats().disk_state == "ok", seconds=15)
        assert bytes(await cache.get(25)) == payload(25), "on again: what is on disk can be read"
        await cache.flush()
        await settle(cache)
        check_idle(cache)


async def test_a_failed_sync_fails_the_flush_and_the_next_one_writes_again(tmp_path):
    script = Script()
    async with sick(tmp_path / "kv", script) as (cache, _):
        await cache.put_many(blocks(6).items())
        script.add("sync", error(errno.EIO), nth=1)
        with pytest.raises(OSError):
            await cache.flush()
        assert cache.stats().io_errors >= 1
        await cache.flush()
        image = crash_image(tmp_path / "kv", tmp_path / "image")
    async with asynckv.open(image, **SMALL) as cache:
        for key in range(6):
            assert bytes(await cache.get(key)) == payload(key)


async def test_a_delete_that_cannot_be_made_durable_raises(tmp_path):
    script = Script()
    async with sick(tmp_path / "kv", script) as (cache, _):
        await cache.put(1, payload(1))
        await cache.flush()
        script.add("write", error(errno.EIO), nth=1)
        with pytest.raises(OSError):
            await cache.delete(1)
        assert await cache.get(1) is None
        await cache.flush()
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        assert await cache.get(1) is None


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
async def test_a_disk_without_space_is_counted_and_memory_serves_on(tmp_path, number):
    # Fault kind SPACE: writes refused although our own count says free.
    script = Script()
    async with sick(tmp_path / "kv", script) as (cache, _):
        for operation in ("write", "allocate"):
            script.add(operation, error(number), sticky=True)
        for key in range(60):
            assert await cache.put(key, payload(key))
            found = await cache.get(key)
            assert bytes(found) == payload(key)
            del found
        assert cache.stats().io_errors > 0
        script.clear()
        await until(lambda: cache.stats().disk_state == "ok", seconds=15)
        await cache.put(1000, payload(1000))
        await cache.flush()
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        assert bytes(await cache.get(1000)) == payload(1000)


async def test_a_disk_with_two_hundred_milliseconds_of_delay_never_stalls_the_loop(tmp_path):
    # Fault kind PERF: disk I/O on the thread that answers heartbeats.
    await fill(tmp_path / "kv", blocks(8), **SMALL)
    script = Script()
    script.add("*", slow(0.2), sticky=True)
    started = time.perf_counter()
    async with Lag() as lag, sick(tmp_path / "kv", script) as (cache, _):
        assert bytes(await cache.get(1)) == payload(1)
        await cache.put(9, payload(9))
        await cache.flush()
        script.clear()
    assert time.perf_counter() - started > 0.6, "the delay was there"
    assert lag.worst < LAG_SECONDS_MAX


async def test_a_stream_reads_ahead_while_its_first_block_is_slow(tmp_path):
    await fill(tmp_path / "kv", blocks(12), **SMALL)
    script = Script()
    async with sick(tmp_path / "kv", script) as (cache, _):
        script.add("read", slow(0.1), sticky=True)
        started = time.perf_counter()
        count = 0
        async for key, block in cache.stream(range(12)):
            assert bytes(block) == payload(key)
            del block
            count += 1
        assert count == 12
        assert time.perf_counter() - started < 0.8, "twelve reads of 0.1 s, one after the other, take 1.2 s"


async def test_close_ends_in_time_although_a_read_hangs_for_good(tmp_path):
    await fill(tmp_path / "kv", blocks(4), **SMALL)
    script = Script()
    made = []

    def factory(engine: str, **settings: Any) -> FaultyBackend:
        made.append(FaultyBackend(create_backend(engine, **settings), script, clock=settings["clock"]))
        return made[-1]

    cache = await asynckv.open(tmp_path / "kv", **SMALL, io_timeout=0.3, _backend_factory=factory)
    await cache.put(9, payload(9))
    script.add("read", hang(), sticky=True)
    get = asyncio.create_task(cache.get(1))
    await until(lambda: made[0].held)
    async with asyncio.timeout(5):
        await cache.close()
        assert await get is None
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        assert bytes(await cache.get(9)) == payload(9)
        assert bytes(await cache.get(1)) == payload(1)


async def test_an_engine_named_by_option_or_environment_shows_in_the_stats(tmp_path, monkeypatch):
    monkeypatch.delenv("ASYNCKV_ENGINE", raising=False)
    async with asynckv.open(tmp_path / "kv", **SMALL, engine="threads") as cache:
        assert cache.stats().engine == "threads"
    monkeypatch.setenv("ASYNCKV_ENGINE", "threads")
    async with asynckv.open(tmp_path / "kv", **SMALL, engine="auto") as cache:
        assert cache.stats().engine == "threads"
    monkeypatch.setenv("ASYNCKV_ENGINE", "warp")
    with pytest.raises(ValueError, match="ASYNCKV_ENGINE"):
        asynckv.open(tmp_path / "kv", **SMALL)


@pytest.mark.parametrize("direct", [False, "off"])
async def test_direct_off_is_buffered_and_says_so(tmp_path, direct):
    async with asynckv.open(tmp_path / "kv", **SMALL, direct=direct) as cache:
        await cache.put_many(blocks(30).items())
        await cache.flush()
        assert cache.stats().direct is False
        for key in range(30):
            assert bytes(await cache.get(key)) == payload(key)


@pytest.mark.parametrize("operation", ["write", "sync"])
@pytest.mark.parametrize("then", ["flush", "clear", "close"])
async def test_a_clear_that_cannot_be_made_durable_raises_and_the_next_call_makes_up_for_it(tmp_path, operation, then):
    script = Script()
    async with sick(tmp_path / "kv", script) as (cache, _):
        await cache.put_many(blocks(4).items())
        await cache.flush()
        script.add(operation, error(errno.EIO), sticky=True)
        with pytest.raises(asynckv.DiskError):
            await cache.clear()
        assert cache.keys() == []
        assert await cache.get(1) is None
        await until(lambda: cache.stats().disk_state == "off")
        script.clear()
        await until(lambda: cache.stats().disk_state == "ok", seconds=15)
        if then != "clear":
            assert await cache.put(2, payload(2, 5))
        if then != "close":
            await getattr(cache, then)()
            image = crash_image(tmp_path / "kv", tmp_path / "image")
    if then == "close":
        image = tmp_path / "kv"
    async with asynckv.open(image, **SMALL) as cache:
        found = await read_all(cache, range(4))
        assert found == {0: None, 1: None, 2: None if then == "clear" else ("bytes", payload(2, 5)), 3: None}


@pytest.mark.parametrize("healthy", ["read", "write"])
async def test_what_still_works_does_not_hide_what_does_not(tmp_path, healthy):
    """Reads that succeed between failing writes, or the other way round, must not keep a half-dead disk on."""
    await fill(tmp_path / "kv", blocks(30), **SMALL)
    script = Script()
    async with sick(tmp_path / "kv", script) as (cache, _):
        script.add("write" if healthy == "read" else "read", error(errno.EIO), sticky=True)
        for key in range(12):
            await cache.get(key)
            await cache.put(100 + key, payload(100 + key))
            with contextlib.suppress(asynckv.DiskError):
                await cache.flush()
        assert cache.stats().disk_state == "off"
        failed = cache.stats().io_errors
        started = time.perf_counter()
        for key in range(200, 240):  # more than the pool holds
            assert await cache.put(key, payload(key))
        assert time.perf_counter() - started < 0.3 * 40, "no put waits for a disk that takes nothing"
        await asyncio.sleep(1.3)
        stats = cache.stats()
        assert stats.disk_state == "off", "the probe asks for both"
        assert stats.io_errors == failed


async def test_a_disk_that_is_off_is_tried_again_after_somebody_cancelled_all_tasks(tmp_path):
    script = Script()
    async with sick(tmp_path / "kv", script, _clock=FastClock()) as (cache, _):
        await cache.put_many(blocks(4).items())
        script.add("*", error(errno.EIO), sticky=True)
        while cache.stats().disk_state == "ok":
            with contextlib.suppress(asynckv.DiskError):
                await cache.flush()
        script.clear()
        script.add("*", slow(0.05), sticky=True)
        for _ in range(40):  # before the probe, while it runs, after it
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
            await asyncio.sleep(0.005)
        script.clear()
        await until(lambda: cache.stats().disk_state == "ok")


@pytest.mark.parametrize("engine", ["threads", "io_uring"])
async def test_a_loop_that_stood_still_is_no_sick_disk(tmp_path, engine):
    """All reads end while nothing can hear of it, long before it does."""
    options = {**SMALL, "memory": "16MiB", "engine": engine, "io_timeout": 0.3}
    try:
        async with asynckv.open(tmp_path / "kv", **options) as cache:
            await cache.put_many(blocks(12).items())
            await cache.flush()
    except OSError as reason:
        pytest.skip(f"no {engine} here: {reason}")
    items = blocks(400, 8000, start=1000)
    await fill(tmp_path / "kv", items, **options)
    async with asynckv.open(tmp_path / "kv", **options) as cache:
        await recovered(cache)
        reads = [asyncio.create_task(cache.get(key)) for key in items]
        while cache.stats().reads_in_flight < 200:  # noqa: ASYNC110 - turn by turn
            await asyncio.sleep(0)
        time.sleep(1.0)
        found = await asyncio.gather(*reads)
        assert [bytes(block) for block in found] == list(items.values())
        stats = cache.stats()
        assert (stats.io_timeouts, stats.disk_state) == (0, "ok")


async def test_a_block_that_fills_a_segment_is_written_beside_many_deletes(tmp_path):
    """Beside tombstones it finds no room, in no segment."""
    options = {"memory": "16MiB", "disk": "64MiB", "segment": "64KiB"}
    async with asynckv.open(tmp_path / "kv", **options) as cache:
        keys = [b"%08d" % number * 120 for number in range(6000)]
        for start in range(0, len(keys), 1000):
            await cache.put_many((key, b"v" * 16) for key in keys[start : start + 1000])
        await cache.flush()
        left, flushed = iter(keys), False

        async def delete():
            for key in left:
                if flushed:
                    return
                await cache.delete(key)

        deleting = [asyncio.create_task(delete()) for _ in range(64)]
        await asyncio.sleep(0.05)
        segments = cache._tier._set
        first = segments.next_number
        await cache.put("large", bytes(cache._tier.max_block))
        await cache.flush()
        flushed = True
        assert segments.next_number - first < 40
        await asyncio.gather(*deleting)


async def test_a_disk_that_fools_the_probe_is_asked_less_and_less_often(tmp_path):
    await fill(tmp_path / "kv", blocks(30), **SMALL)
    script, clock = Script(), ManualClock()
    async with sick(tmp_path / "kv", script, _clock=clock) as (cache, _):
        waits = []
        for _ in range(4):
            script.clear()
            script.add("read", error(errno.EIO), sticky=True)
            for key in range(6):
                await cache.get(key)
            assert cache.stats().disk_state == "off"
            script.clear()
            waited = 0.0
            while cache.stats().disk_state == "off":
                clock.advance(0.5)
                waited += 0.5
                for _ in range(20):
                    await asyncio.sleep(0.001)
            waits.append(waited)
        assert waits == sorted(waits)
        assert waits[-1] >= 4 * waits[0], "each relapse doubles the pause"
        assert bytes(await cache.get(20)) == payload(20)
        await settle(cache)


async def test_a_disk_that_goes_off_while_a_flush_waits_ends_the_flush(tmp_path):
    await fill(tmp_path / "kv", blocks(8), **SMALL)
    script = Script()
    async with sick(tmp_path / "kv", script, io_timeout=2.0) as (cache, backend):
        await cache.put(100, payload(100))
        script.add("write", hang(), nth=1)
        flushing = asyncio.create_task(cache.flush())
        await until(lambda: backend.held)
        script.add("read", error(errno.EIO), sticky=True)
        for key in range(4):
            assert await cache.get(key) is None
        assert cache.stats().disk_state == "off"
        async with asyncio.timeout(0.5):
            with pytest.raises(asynckv.DiskError):
                await flushing
        await well_again(cache, backend, script)


async def test_a_probe_that_hangs_ends_by_its_deadline_and_is_tried_again(tmp_path):
    await fill(tmp_path / "kv", blocks(8), **SMALL)
    script = Script()
    async with sick(tmp_path / "kv", script, io_timeout=0.2) as (cache, backend):
        script.add("read", error(errno.EIO), sticky=True)
        for key in range(4):
            await cache.get(key)
        assert cache.stats().disk_state == "off"
        script.clear()
        script.add("*", hang(), sticky=True)
        await until(lambda: backend.held, seconds=5)
        started = time.perf_counter()
        assert await cache.get(5) is None
        assert await cache.put(100, payload(100))
        assert bytes(await cache.get(100)) == payload(100)
        assert time.perf_counter() - started < 0.15
        await well_again(cache, backend, script)


async def test_a_disk_that_goes_off_during_close_does_not_hold_the_close(tmp_path):
    script = Script()
    async with sick(tmp_path / "kv", script, io_timeout=0.3) as (cache, backend):
        await cache.put_many(blocks(8).items())
        await cache.flush()
        await cache.put_many(blocks(4, start=100).items())
        script.add("*", hang(), sticky=True)
        async with asyncio.timeout(5):
            await cache.close()
        assert cache.stats().io_timeouts >= 1
        script.clear()
        backend.release_all()
        await until(lambda: not backend.held)
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        assert await read_all(cache, range(8)) == {key: ("bytes", payload(key)) for key in range(8)}


async def test_a_disk_that_goes_off_during_recovery_serves_what_it_can_and_forgets_nothing(tmp_path):
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        await cache.put_many(blocks(60).items())
        await cache.flush()
        image = crash_image(tmp_path / "kv", tmp_path / "image")
    script = Script()
    async with sick(image, script, io_timeout=0.2) as (cache, backend):
        assert cache.stats().recovering
        script.add("read", hang(), sticky=True)
        await cache.put(100, payload(100))
        assert bytes(await cache.get(100)) == payload(100)
        for key in range(8):
            async with asyncio.timeout(2):
                found = await cache.get(key)
            assert found is None or bytes(found) == payload(key)
            del found
        await until(lambda: not cache.stats().recovering)
        assert cache.stats().io_timeouts + cache.stats().io_errors >= 1
        script.clear()
        backend.release_all()
        await until(lambda: cache.stats().disk_state == "ok", seconds=15)
        await cache.flush()
        await settle(cache)
    async with asynckv.open(image, **SMALL) as cache:
        assert bytes(await cache.get(100)) == payload(100)
        for key in range(60):
            found = await cache.get(key)
            assert found is not None, "a disk that hung is not a damaged one"
            assert bytes(found) == payload(key)
            del found
