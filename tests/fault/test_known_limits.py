"""Limits that other stores had: alignment, edges of segments, 2 and 4 GiB, many small files, disks that fill."""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from levels import count, seed, tally
from sickkit import SMALL
from storekit import BLOCK, KIB, MIB, allocated, blocks, check_idle, files_of, fill, payload, ring_refusal, settle

import asynckv
from asynckv.backends import Backend, create_backend
from asynckv.testing.tools import PAGE, aligned

GIB = 1 << 30
REFUSED = ring_refusal()


def address(view: object) -> int:
    return np.frombuffer(view, np.uint8).ctypes.data


@pytest.mark.parametrize("memory", [BLOCK, BLOCK + 1, 100_000, MIB - 64, MIB + 4097, 3 * MIB + 12_345, 5_000_001])
async def test_large_blocks_begin_on_a_page_whatever_the_size_of_the_pool(tmp_path, memory):
    # Fault kind FALLBACK: the pool's base is less aligned than direct I/O wants.
    async with asynckv.open(tmp_path / "kv", memory=memory, disk=0) as cache:
        await cache.put("small", b"x")  # moves what comes behind it
        for size in (BLOCK // 2, BLOCK - 4095, BLOCK):
            for key in range(2 * memory // size):
                if not await cache.put(key, bytes(size)):
                    continue
                assert address(await cache.get(key)) % PAGE == 0
            await cache.clear()
    backend = create_backend("threads")
    assert PAGE % backend.alignment == 0
    assert await backend.close() == 0


@pytest.mark.parametrize("size", [2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**63 - 1, 2**63, 2**64, 2**64 + 64])
async def test_sizes_beyond_32_and_64_bits_are_refused_before_anything_is_allocated(tmp_path, size):
    # Fault kind LIMIT: sizes that are summed in too few bits.
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        await cache.put(1, b"old")
        for shape in ((size,), (size, 1), (1, size), (size, size), (2, size // 2 + 1)):
            with pytest.raises(ValueError):
                async with cache.reserve(1, shape, np.uint8):
                    pytest.fail("entered")
            with pytest.raises(ValueError):
                async with cache.reserve_block(1, 0, (4,), shape, np.uint8):
                    pytest.fail("entered")
            with pytest.raises(ValueError):
                async with cache.reserve_block(1, 0, shape, shape, np.float32):
                    pytest.fail("entered")
        assert check_idle(cache).memory_used <= 64 + KIB
    for option in ("memory", "segment"):
        with pytest.raises(ValueError, match=option):
            asynckv.open(tmp_path / "other", **{**SMALL, option: size if size > 2**62 else size * 2**20})
    if size >= 2**63:
        with pytest.raises(ValueError, match="disk"):
            asynckv.open(tmp_path / "other", memory="1MiB", disk=size)
    assert not (tmp_path / "other").exists()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("engine", ["io_uring", "threads", "aiofiles"])
async def test_a_transfer_larger_than_one_call_may_be_is_complete(tmp_path, engine):
    # Fault kind LIMIT: the kernel moves at most 2 GiB less a page in one call, and 32-bit counts less.
    pages = count("pages of one large transfer")
    if engine == "io_uring":
        if REFUSED:
            pytest.skip(f"NO RING HERE ({REFUSED}): its large transfers are NOT checked in this run")
        from asynckv.backends.uring import UringBackend

        backend: Backend = UringBackend(timeout=300.0)
    else:
        backend = create_backend(engine, timeout=300.0)
    await backend.start(tmp_path)
    if pages * PAGE < GIB:
        backend.transfers.call_bytes = 64 * KIB
    file = await backend.open("data", create=True)
    data = aligned(pages * PAGE)
    marks = np.frombuffer(data, np.uint64)[:: PAGE // 8]
    marks[:] = np.arange(1, pages + 1)  # each page its own number
    marks = None
    await backend.write(file, 0, [data])
    assert os.stat(tmp_path / "data").st_size == pages * PAGE
    data[:] = bytes(PAGE) * pages if pages * PAGE < GIB else memoryview(bytearray(pages * PAGE))
    assert await backend.read(file, 0, data)
    marks = np.frombuffer(data, np.uint64)
    assert (marks[:: PAGE // 8] == np.arange(1, pages + 1)).all()
    assert np.count_nonzero(marks) == pages
    assert await backend.close() == 0


async def test_blocks_that_end_around_the_end_of_a_segment_come_back_exactly(tmp_path):
    # Fault kind LIMIT: a split that is off by an edge at the end of a region.
    options = {"memory": "2MiB", "disk": "4MiB", "segment": "256KiB"}
    async with asynckv.open(tmp_path / "probe", **options) as cache:
        largest = cache._tier.max_block
    deltas = (-PAGE - 1, -PAGE, -65, -64, -17, -16, -1, 0, 1, 16, 64, PAGE)
    items = {}
    for number, delta in enumerate(deltas):  # pairs: the second ends a little before, at or behind the end
        first = (1000, 40_000, 100_000)[number % 3]
        items[2 * number] = payload(2 * number, 0, first)
        items[2 * number + 1] = payload(2 * number + 1, 0, largest - -(-first // PAGE) * PAGE + delta)
    async with asynckv.open(tmp_path / "kv", **options) as cache:
        for key, data in items.items():
            assert await cache.put(key, data)
            await cache.flush()
        for key in (100, 101, 102):
            delta = key - 101
            assert await cache.put(key, payload(key, 0, largest + delta)) is True
            if delta <= 0:
                await cache.flush()
            else:
                with pytest.raises(OSError):
                    await cache.flush()
                await cache.delete(key)
    items[100], items[101] = payload(100, 0, largest - 1), payload(101, 0, largest)
    async with asynckv.open(tmp_path / "kv", **options, recover="strict") as cache:
        dropped = 0
        for key, data in items.items():
            found = await cache.get(key)
            dropped += found is None
            assert found is None or bytes(found) == data, key
            del found
        assert dropped < len(items) // 2, "the oldest make room, no more"
        assert cache.stats().corrupt_blocks == 0


@pytest.mark.timeout(3600)
async def test_many_small_blocks_need_few_files_and_no_look_up_lists_a_directory(tmp_path, monkeypatch):
    # Fault kind SPACE: a file for each block, and a scan of the directory for each look-up.
    number = count("small blocks in one store")
    options = {"memory": number * 32, "disk": max(64 * MIB, number * 300)}
    listed: list[object] = []

    def watched(name: str) -> Callable[..., Any]:
        plain = getattr(os, name)

        def call(*arguments: Any) -> Any:
            listed.append(arguments)
            return plain(*arguments)

        return call

    async with asynckv.open(tmp_path / "kv", **options) as cache:
        for start in range(0, number, 1000):
            assert all(await cache.put_many((key, b"%08d" % key * 8) for key in range(start, start + 1000)))
        await cache.flush()
        tally("small blocks in one store", number)
        assert len(os.listdir(tmp_path / "kv")) < 1000
        rng = random.Random(seed("small"))
        for name in ("listdir", "scandir", "walk"):
            monkeypatch.setattr(os, name, watched(name))
        for key in rng.sample(range(number), 2000):
            assert key in cache
            assert bytes(await cache.get(key)) == b"%08d" % key * 8
            assert key + number not in cache
            assert await cache.get(key + number) is None
        assert cache.match_prefix(range(number)) == number
        monkeypatch.undo()
        assert listed == []
        assert cache.stats().disk_hits > 0
    assert len(files_of(tmp_path / "kv")) < 1000


@pytest.mark.timeout(3600)
async def test_ten_times_the_cap_is_written_and_the_cap_holds(tmp_path):
    # Fault kind SPACE: no eviction below. Sampled from beside the loop all the time.
    cap = 64 * MIB
    worst, samples, stop = 0, 0, threading.Event()

    def sample() -> None:
        nonlocal worst, samples
        while not stop.wait(0.005):
            worst = max(worst, allocated(tmp_path / "kv"))
            samples += 1

    data = random.Random(seed("cap")).randbytes(MIB)
    sampler = threading.Thread(target=sample)
    async with asynckv.open(tmp_path / "kv", memory="16MiB", disk=cap) as cache:
        sampler.start()
        try:
            for key in range(count("times the cap that is written") * cap // MIB):
                assert await cache.put(key, data)
            await cache.flush()
            assert cache.stats().disk_used <= cap
        finally:
            stop.set()
            sampler.join()
    assert cap // 2 < worst <= cap
    assert samples > 20
    assert allocated(tmp_path / "kv") <= cap


async def test_the_newest_segment_is_never_the_one_that_goes(tmp_path):
    # Fault kind PERF: the newest data evicted first.
    options = {"memory": "1MiB", "disk": "4MiB", "segment": "256KiB"}
    async with asynckv.open(tmp_path / "kv", **options) as cache:
        for key in range(200):
            assert await cache.put(key, payload(key, 0, 60_000))
            await cache.flush()
            if key >= 60:  # full long since: each new segment makes an old one go
                assert all(cache.tier(newest) for newest in range(key - 30, key + 1))
        assert 0 not in cache
        present = [key for key in range(200) if key in cache]
        assert present == list(range(present[0], 200)), "strictly the oldest first"
    async with asynckv.open(tmp_path / "kv", **options) as cache:
        for key in range(170, 200):
            assert bytes(await cache.get(key)) == payload(key, 0, 60_000)


async def test_a_hot_and_a_cold_store_take_everything_for_many_times_their_size(tmp_path):
    # Fault kind SPACE: writes fail once a tier is full. Replacements, one large block, and blocks that are read.
    options = {"memory": "1MiB", "disk": "2MiB", "segment": "128KiB"}
    async with asynckv.open(tmp_path / "kv", **options) as cache:
        started = time.monotonic()
        for step in range(400):
            key = (step, step % 7, "hot")[step % 3]
            size = (100, 9000, 60_000, 33_000)[step % 4]
            assert await cache.put(key, payload(step, 0, size))
            found = await cache.get(key)
            assert bytes(found) == payload(step, 0, size)
            del found
        async with asyncio.timeout(30):
            await cache.flush()
        await settle(cache)
        stats = check_idle(cache)
        assert (stats.rejected_puts, stats.no_room, stats.io_errors) == (0, 0, 0)
        assert stats.dropped_blocks > 0
        assert time.monotonic() - started < 60


async def test_one_block_too_large_for_a_segment_leaves_the_others_their_room(tmp_path):
    await fill(tmp_path / "kv", blocks(8), **SMALL, segment="256KiB")
    async with asynckv.open(tmp_path / "kv", **SMALL, segment="256KiB") as cache:
        assert await cache.put("large", bytes(300 * KIB))
        with pytest.raises(OSError):
            await cache.flush()
        for key in range(100, 140):
            assert await cache.put(key, payload(key))
        await cache.delete("large")
        await cache.flush()
        for key in [*range(8), *range(100, 140)]:
            assert bytes(await cache.get(key)) == payload(key)
