"""Cancellation: calls cancelled at every await and at random ones leave no pin, no lost room, no torn block."""

from __future__ import annotations

import asyncio
import gc
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from levels import count, scale, seed, tally
from storekit import BLOCK, KIB, blocks, check_idle, check_payload, fill, payload, settle

import asynckv

POOL = 16 * BLOCK
CANARIES = 4
KEYS = 48
DRIVERS = 8

_versions = iter(range(1, 1 << 40))


async def _get(cache: asynckv.Cache, rng: random.Random) -> None:
    key = rng.randrange(KEYS)
    found = await cache.get(key)
    assert found is None or check_payload(key, found)


async def _get_many(cache: asynckv.Cache, rng: random.Random) -> None:
    keys = [rng.randrange(KEYS) for _ in range(5)]
    for key, found in zip(keys, await cache.get_many(keys), strict=True):
        assert found is None or check_payload(key, found)


async def _get_into(cache: asynckv.Cache, rng: random.Random) -> None:
    key = rng.randrange(KEYS)
    out = bytearray(BLOCK)
    written = await cache.get_into(key, out)
    assert written is None or check_payload(key, out[:written])


async def _put(cache: asynckv.Cache, rng: random.Random) -> None:
    key = rng.randrange(KEYS)
    await cache.put(key, payload(key, next(_versions), rng.choice([100, 5000, 33_000, BLOCK])))


async def _put_many(cache: asynckv.Cache, rng: random.Random) -> None:
    keys = [rng.randrange(KEYS) for _ in range(4)]
    await cache.put_many([(key, payload(key, next(_versions), rng.choice([100, 33_000]))) for key in keys])


async def _stream(cache: asynckv.Cache, rng: random.Random) -> None:
    start = rng.randrange(KEYS)
    async for key, found in cache.stream(range(start, start + 6)):
        check_payload(key, found)
        del found
        await asyncio.sleep(0)


async def _reserve(cache: asynckv.Cache, rng: random.Random) -> None:
    key = rng.randrange(KEYS)
    size = rng.choice([100, 33_000, BLOCK])
    try:
        async with cache.reserve(key, (size,), np.uint8) as array:
            data = np.frombuffer(payload(key, next(_versions), size), np.uint8)
            array[: size // 2] = data[: size // 2]
            await asyncio.sleep(0)
            array[size // 2 :] = data[size // 2 :]
    except asynckv.NoRoomError:
        return


MIX: list[Callable[[asynckv.Cache, random.Random], Coroutine[Any, Any, None]]] = [
    _get, _get, _get_many, _get_into, _put, _put, _put_many, _stream, _stream, _reserve, _reserve,
]  # fmt: skip


async def _warm(cache: asynckv.Cache) -> dict[int, memoryview]:
    """Fill the store and pin some known blocks all over the pool: the canaries."""
    for key in range(KEYS):
        await cache.put(key, payload(key, next(_versions), BLOCK))
    canaries = {}
    for number in range(CANARIES):
        key = 1000 + number
        assert await cache.put(key, payload(key))
        canaries[key] = await cache.get(key)
        for other in range(number * 5, number * 5 + 3):
            await cache.put(other, payload(other, next(_versions), BLOCK))
    return canaries


def _check_canaries(canaries: dict[int, memoryview]) -> None:
    for key, view in canaries.items():
        assert bytes(view) == payload(key), "a canary extent was written to"


async def _drive(cache: asynckv.Cache, rng: random.Random, cancelled: int, ends: Counter[str]) -> None:
    while ends["cancelled"] < cancelled:
        call = rng.choice(MIX)
        task = asyncio.ensure_future(call(cache, rng))
        patience = rng.random()
        if patience < 0.6:
            for _ in range(rng.randrange(1, 8)):  # one turn at least: the call has begun
                await asyncio.sleep(0)
        elif patience < 0.95:
            await asyncio.sleep(rng.random() * 0.001)
        else:
            await asyncio.wait([task], timeout=1.0)
        task.cancel()
        await asyncio.wait([task])
        if task.cancelled():
            ends["cancelled"] += 1
            ends[f"{call.__name__} cancelled"] += 1
        else:
            task.result()
            ends[f"{call.__name__} ended"] += 1
        del task


async def _check_whole(cache: asynckv.Cache, canaries: dict[int, memoryview]) -> None:
    """Nothing is pinned but the canaries; every byte of the pool is accounted for and can be used again."""
    gc.collect()
    await settle(cache)
    _check_canaries(canaries)
    check_idle(cache, pinned=len(canaries))
    canaries.clear()
    check_idle(cache)
    for key in range(KEYS):
        found = await cache.get(key)
        assert found is None or check_payload(key, found)
        del found
    await cache.clear()
    stats = check_idle(cache)
    assert (stats.memory_used, stats.memory_free, stats.memory_blocks) == (0, POOL, 0)
    assert all(await cache.put_many(blocks(16, start=5000).items()))
    for key in range(5000, 5016):
        assert bytes(await cache.get(key)) == payload(key)
    assert check_idle(cache).corrupt_blocks == 0


@pytest.mark.slow
@pytest.mark.parametrize("disk", ["16MiB", 0])
async def test_calls_cancelled_at_random_awaits_leave_no_pin_and_no_lost_byte(tmp_path, disk):
    first = seed("cancel")
    wanted = int(count("cancelled calls") * (0.5 if disk else 0.05))  # on each loop; memory alone seldom waits
    ends: Counter[str] = Counter()
    async with asynckv.open(tmp_path / "kv", memory=POOL, disk=disk, room_timeout=0.05) as cache:
        canaries = await _warm(cache)
        await asyncio.gather(*(_drive(cache, random.Random(first + n), wanted, ends) for n in range(DRIVERS)))
        await _check_whole(cache, canaries)
    print(dict(ends))
    assert ends["cancelled"] >= wanted
    tally("cancelled calls", ends["cancelled"])
    for call in set(MIX):
        assert ends[f"{call.__name__} ended"] > 0
        under_way = ends[f"{call.__name__} cancelled"]
        assert not disk or under_way > 50 * min(1, scale()), "seldom cancelled under way: shows little"


CALLS: dict[str, Callable[[asynckv.Cache], Coroutine[Any, Any, Any]]] = {
    "get from memory": lambda cache: cache.get(100),
    "get from disk": lambda cache: cache.get(3),
    "get with a timeout": lambda cache: cache.get(3, timeout=5.0),
    "get_into": lambda cache: cache.get_into(3, bytearray(BLOCK)),
    "get_many": lambda cache: cache.get_many(range(8)),
    "get_many_into": lambda cache: cache.get_many_into(range(20), [bytearray(BLOCK) for _ in range(20)]),
    "put": lambda cache: cache.put(3, payload(3, 1)),
    "put_many": lambda cache: cache.put_many(blocks(24, version=1).items()),
    "delete": lambda cache: cache.delete(3),
    "delete_many": lambda cache: cache.delete_many(range(4)),
    "flush": lambda cache: cache.flush(),
    "clear": lambda cache: cache.clear(),
    "stream": lambda cache: _consume(cache),
    "reserve": lambda cache: _fill_in(cache),
}


async def _consume(cache: asynckv.Cache) -> None:
    async for key, found in cache.stream(range(12)):
        assert check_payload(key, found) in (0, 1)
        del found


async def _fill_in(cache: asynckv.Cache) -> None:
    async with cache.reserve(3, (BLOCK,), np.uint8) as array:
        array[:] = np.frombuffer(payload(3, 1), np.uint8)


@pytest.mark.parametrize("name", CALLS)
async def test_a_call_cancelled_after_every_number_of_turns_leaves_nothing(tmp_path, name):
    options = {"memory": POOL, "disk": "16MiB", "room_timeout": 1.0}
    await fill(tmp_path / "kv", blocks(24), **options)
    async with asynckv.open(tmp_path / "kv", **options) as cache:
        turns, finished = 0, 0
        while finished < 3 and turns < 70:
            await cache.put_many(blocks(12, start=100).items())
            task = asyncio.ensure_future(CALLS[name](cache))
            for _ in range(turns):
                await asyncio.sleep(0.0005 if turns > 30 else 0)
            if turns > 60:  # slow today: it has to end, however long it takes
                await asyncio.wait([task], timeout=10)
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                task.result()
                finished += 1
            del task
            await settle(cache)
            check_idle(cache)
            turns += 1
        assert finished == 3, "it never ended by itself"
        for key in [*range(24), *range(100, 112)]:
            found = await cache.get(key)
            assert found is None or check_payload(key, found) in (0, 1)
            del found
        await cache.clear()
        assert check_idle(cache).memory_used == 0
        assert all(await cache.put_many(blocks(16).items()))


async def test_reads_cancelled_at_once_never_write_into_room_given_to_others(tmp_path):
    # Fault kind UAF: an engine that still writes into memory its caller gave up.
    options = {"memory": POOL, "disk": "16MiB", "room_timeout": 1.0}
    await fill(tmp_path / "kv", blocks(40), **options)
    async with asynckv.open(tmp_path / "kv", **options) as cache:
        for round_ in range(int(25 * scale())):
            reads = [asyncio.ensure_future(cache.get(key)) for key in range(round_ % 25, round_ % 25 + 15)]
            for _ in range(round_ % 4):
                await asyncio.sleep(0)
            reads = [read for read in reads if read.cancel()]  # one that was done by now would keep its block
            held = {}
            for number in range(12):
                key = 1000 + number
                assert await cache.put(key, payload(key, round_))
                held[key] = await cache.get(key)
            await asyncio.gather(*reads, return_exceptions=True)
            reads.clear()
            await settle(cache)
            for key, view in held.items():
                assert bytes(view) == payload(key, round_)
            del view
            held.clear()
        check_idle(cache)


async def test_opens_and_closes_cancelled_at_random_leave_a_store_that_opens(tmp_path: Path):
    rng = random.Random(seed("open"))
    options = {"memory": "256KiB", "disk": "4MiB"}
    await fill(tmp_path / "kv", blocks(8, 8 * KIB), **options)
    for _ in range(int(30 * scale())):
        task = asyncio.ensure_future(_open_and_use(tmp_path / "kv", options))
        await asyncio.sleep(rng.random() * 0.02)
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            task.result()
        del task
    async with asynckv.open(tmp_path / "kv", **options) as cache:
        for key in range(8):
            assert bytes(await cache.get(key)) == payload(key, 0, 8 * KIB)


async def _open_and_use(directory: Path, options: dict[str, Any]) -> None:
    async with asynckv.open(directory, **options) as cache:
        for key in range(8):
            assert bytes(await cache.get(key)) == payload(key, 0, 8 * KIB)
        await cache.put(100, payload(100, 0, 8 * KIB))
        await cache.flush()
