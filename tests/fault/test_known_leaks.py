"""Leaks that other stores had: leases never used, quotas never given back, threads and descriptors of each life."""

from __future__ import annotations

import asyncio
import errno
import gc
import json
import os
import shutil
import tempfile
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
from levels import count, rounds, tally
from sickkit import SMALL, sick
from storekit import BLOCK, KIB, blocks, check_idle, fill, find_payload, flip, payload, python, settle, until

import asynckv
from asynckv.testing import Script, error, hang, short

NOBODY = 65534


async def whole(cache: asynckv.Cache, pool_blocks: int = 16) -> None:
    """Nothing is held, and the full capacity can be used again."""
    gc.collect()
    await settle(cache)
    check_idle(cache)
    await cache.clear()
    await settle(cache)  # a batch composed before may still be on its way, and holds its blocks until then
    stats = check_idle(cache)
    assert (stats.memory_used, stats.memory_blocks) == (0, 0)
    for key in range(9000, 9000 + pool_blocks):
        assert await cache.put(key, payload(key))
    assert sum(cache.tier(key) == "memory" for key in range(9000, 9000 + pool_blocks)) == pool_blocks


async def test_leases_that_are_never_used_hold_nothing(tmp_path):
    # Fault kind LEAK: a look-up pins, and the request that was to load never comes.
    await fill(tmp_path / "kv", blocks(24), **SMALL)
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        for round_ in range(20):
            cache.request(range(24))
            async with cache.request(range(24)):
                pass
            cache.reserve("never", (BLOCK,), np.uint8)
            cache.stream(range(24))
            async for _ in cache.stream(range(24)):
                break
            cache.match_prefix(range(24))
            cache.prefetch(range(round_, 24))
            tasks = [
                asyncio.create_task(cache.get_many(range(8))),
                asyncio.create_task(cache.get(round_)),
                asyncio.create_task(cache.reserve("never", (BLOCK,), np.uint8).__aenter__()),
                asyncio.create_task(cache.put(100, payload(100))),
            ]
            for _ in range(round_ % 5):
                await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            tasks.clear()
            del task, _
        await whole(cache)


async def test_what_was_put_is_referred_to_by_nobody(tmp_path):
    # Fault kind LEAK: a reference more, taken on the way to a lower tier.
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        sources = []
        for key in range(160):  # ten times the pool
            array = np.full(BLOCK, key & 0xFF, np.uint8)
            sources.append(weakref.ref(array))
            assert await cache.put(key, array)
            del array
        assert all(source() is None for source in sources)
        await cache.flush()
        assert (await cache.get(0) == 0).all()
        await whole(cache)


async def test_what_is_released_twice_is_counted_once(tmp_path):
    # Fault kind RACE: pins below zero.
    await fill(tmp_path / "kv", blocks(8), **SMALL)
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        view, other = await cache.get(1), await cache.get(2)
        part = view[10:20]
        view.release()
        view.release()
        assert cache.stats().pinned_blocks == 2, "a part of it lives"
        part.release()
        part.release()
        del view, part
        assert cache.stats().pinned_blocks == 1
        del other

        reservation = cache.reserve("r", (100,), np.uint8)
        array = await reservation.__aenter__()
        array[:] = 7
        del array
        with pytest.raises(RuntimeError, match="once"):
            await reservation.__aenter__()
        for _ in range(3):
            await reservation.__aexit__(None, None, None)
        assert bytes(await cache.get("r")) == b"\x07" * 100

        request = cache.request([1, 2])
        await request.__aenter__()
        for _ in range(3):
            await request.__aexit__(None, None, None)
        with pytest.raises(RuntimeError, match="inside"):
            await request.get_many()

        stream = cache.stream(range(8))
        await anext(stream)
        for _ in range(3):
            await stream.aclose()

        task = asyncio.create_task(cache.get_many(range(8)))
        await asyncio.sleep(0)
        for _ in range(3):
            task.cancel()
        await asyncio.wait([task])
        del task
        await whole(cache)


async def test_pins_of_every_namespace_are_given_back():
    # Fault kind KEY: what was locked under one key is unlocked under another.
    caches = [
        await asynckv.open("unused", memory="256KiB", disk=0, namespace=namespace)
        for namespace in [
            asynckv.Namespace(model=model, dtype=dtype, lora=lora, salt=salt)
            for model in (None, "m")
            for dtype in (None, "float16")
            for lora in (None, "sql")
            for salt in (None, "tenant", b"tenant")
        ]
    ]
    for number, cache in enumerate(caches):
        await cache.put(1, payload(1, number))
    held = [await cache.get(1) for cache in caches]
    for number, (cache, view) in enumerate(zip(caches, held, strict=True)):
        assert bytes(view) == payload(1, number)
        assert cache.stats().pinned_blocks == 1
    del view
    held.clear()
    for cache in caches:
        check_idle(cache)
        await cache.close()
    assert not Path("unused").exists()


STAGES = (
    "absent",
    "no room",
    "refused",
    "read error",
    "short read",
    "damage",
    "late",
    "deleted",
    "cleared",
    "disk off",
)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("stage", STAGES)
async def test_prefetches_that_fail_at_any_stage_give_their_quota_back(tmp_path, stage):
    # Fault kind LEAK: an error path that keeps what a prefetch had taken, until none is left.
    await fill(tmp_path / "kv", blocks(48), **SMALL)
    if stage == "damage":
        for key in range(8):
            flip(*find_payload(tmp_path / "kv", payload(key)))
    script = Script()
    timeout = 0.5 if stage == "late" else 5.0
    async with sick(tmp_path / "kv", script, io_timeout=timeout) as (cache, backend):
        held = []
        if stage == "no room":
            for key in range(100, 116):
                await cache.put(key, payload(key))
                held.append(await cache.get(key))
        submit = cache._tier.read
        for number in rounds("prefetches that fail at each stage"):
            key = number % 8
            if stage == "absent":
                assert cache.prefetch([1000 + number]) == 0
            elif stage == "no room":
                assert cache.prefetch([key]) == 0
            elif stage == "refused":
                cache._tier.read = _refuse
                assert cache.prefetch([key]) == 1
                await settle(cache)
                cache._tier.read = submit
            elif stage in ("read error", "short read"):
                script.add("read", short() if stage == "short read" else error(errno.EIO), sticky=True)
                assert cache.prefetch([key]) == (key in cache), "a block that failed twice is forgotten"
                await settle(cache)
                script.clear()
                other = 8 + number % 40  # more than the pool: read each time, and the disk stays on
                assert bytes(await cache.get(other)) == payload(other)
            elif stage == "disk off":
                script.add("read", error(errno.EIO), sticky=True)
                assert cache.prefetch([key]) == (cache.stats().disk_state == "ok")
                await settle(cache)
            elif stage == "late":
                script.add("read", hang(), nth=1)
                assert cache.prefetch([key]) == 1
                await until(lambda: cache.stats().io_timeouts)
                backend.release_all()
                script.clear()
                await settle(cache)
                break
            else:
                assert cache.prefetch([key]) == (cache.tier(key) == "disk")
                if stage == "deleted" and number < 8:
                    await cache.delete(key)
                elif stage == "cleared" and number == 0:
                    await cache.clear()
                await settle(cache)
            assert cache.stats().reads_in_flight <= 1
        held.clear()
        await settle(cache)
        stats = check_idle(cache)
        if stage == "damage":
            assert stats.corrupt_blocks == 8
        if stage in ("read error", "short read", "disk off"):
            assert stats.io_errors + stats.corrupt_blocks >= 3
        script.clear()
        await until(lambda: cache.stats().disk_state == "ok")
        if stage != "cleared":
            assert cache.prefetch(range(16, 24)) == sum(cache.tier(key) == "disk" for key in range(16, 24))
            await until(lambda: all(cache.tier(key) == "memory" for key in range(16, 24)))
        await whole(cache)


def _refuse(*args: object, **named: object) -> None:
    raise MemoryError


async def test_one_view_of_a_large_batch_pins_one_block_and_the_stats_say_so(tmp_path):
    # Fault kind LEAK: a small view keeps all it came with alive.
    await fill(tmp_path / "kv", blocks(12), **SMALL)
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        found = await cache.get_many(range(12))
        assert cache.stats().pinned_blocks == 12
        kept = found[5][:64]
        del found
        gc.collect()
        stats = cache.stats()
        assert (stats.pinned_blocks, stats.pinned_bytes) == (1, BLOCK)
        del kept
        await whole(cache)


LOOPS = """
import asyncio, gc, json, os, resource, sys, asynckv
directory, rounds, engine, user = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
async def once(number, directory=directory):
    async with asynckv.open(directory, memory="256KiB", disk="4MiB", engine=engine) as cache:
        await cache.put(number % 16, bytes(4000))
        assert number < 16 or await cache.get((number + 1) % 16) is not None
        return cache.stats().engine
def look():
    gc.collect()
    maps = open("/proc/self/maps").read()
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), maps.count("io_uring")
asyncio.run(once(0, directory + "-first"))  # what is imported late
if user:
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
seen = []
for number in range(rounds):
    engine_used = asyncio.run(once(number))
    if number >= 2:
        seen.append(look())
print(json.dumps([engine_used, seen]))
"""


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("engine", ["auto", "threads", "aiofiles"])
def test_loops_one_after_the_other_leave_nothing_in_a_process_with_little_to_lock(engine, monkeypatch):
    # Fault kind LEAK: what belongs to a loop is freed late or never.
    monkeypatch.delenv("ASYNCKV_ENGINE", raising=False)
    root = os.geteuid() == 0
    folder = Path(tempfile.mkdtemp(prefix="asynckv-loops-"))
    try:
        if root:
            os.chown(folder, NOBODY, NOBODY)
        lives = count("loops one after the other")
        result = python(LOOPS, folder / "kv", lives, engine, NOBODY if root else 0, timeout=3000)
        used, seen = json.loads(result.stdout)
        assert engine in ("auto", used)
        files, threads, rings = zip(*seen, strict=True)
        assert len(seen) == lives - 2
        tally("loops one after the other", lives)
        assert max(files) <= files[0]
        assert max(rings) <= rings[0]
        assert max(threads) <= threads[0] + 8, "the kernel ends a ring's threads a little later"
        assert "Error" not in result.stderr
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize("engine", ["auto", "threads", "aiofiles"])
async def test_a_thousand_buffered_reads_start_a_bounded_number_of_threads(tmp_path, engine):
    # Fault kind PERF: one thread, of ours or of the kernel, for each operation.
    options = {"memory": "8MiB", "disk": "16MiB", "engine": engine, "direct": False}
    await fill(tmp_path / "kv", blocks(1000, 4 * KIB), **options)
    before = len(os.listdir("/proc/self/task"))
    worst, stop = 0, threading.Event()

    def sample() -> None:
        nonlocal worst
        while not stop.is_set():
            worst = max(worst, len(os.listdir("/proc/self/task")) - 1)  # this one
            time.sleep(0.0005)

    sampler = threading.Thread(target=sample)
    async with asynckv.open(tmp_path / "kv", **options) as cache:
        sampler.start()
        try:
            outs = [bytearray(4 * KIB) for _ in range(1000)]
            assert await asyncio.gather(*map(cache.get_into, range(1000), outs)) == [4 * KIB] * 1000
            await cache.put_many(blocks(1000, 4 * KIB, version=1).items())
            await cache.flush()
        finally:
            stop.set()
            sampler.join()
        assert cache.stats().direct is False
    assert all(out == payload(key, 0, 4 * KIB) for key, out in enumerate(outs))
    assert worst - before <= 20, "4 readers, 2 writers, sync, control, pages; of the kernel 8 and 2"
