"""Many tasks at once: single flight, spills under readers, batches, random mixes on self-describing values."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest
from levels import scale, seed
from storekit import BLOCK, KIB, Lag, blocks, check_idle, check_payload, fill, payload, settle

import asynckv

SMALL = {"memory": "1MiB", "disk": "16MiB", "room_timeout": 1.0}


async def test_a_get_during_a_spill_is_served_from_memory(tmp_path):
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        await cache.put_many(blocks(12).items())
        flushing = asyncio.create_task(cache.flush())
        gets = 0
        while not flushing.done():
            for key in range(12):
                assert cache.tier(key) == "memory"
                assert bytes(await cache.get(key)) == payload(key)
                gets += 1
            await asyncio.sleep(0)
        await flushing
        assert gets > 0
        stats = cache.stats()
        assert (stats.memory_hits, stats.disk_hits, stats.misses) == (gets, 0, 0)


async def test_thirty_two_tasks_load_one_key_while_others_put_evict_and_delete_it(tmp_path):
    # Fault kind RACE: single flight broken by a short-lived entry.
    await fill(tmp_path / "kv", blocks(40), **SMALL)
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        rounds = int(12 * scale())

        async def read() -> None:
            for _ in range(rounds):
                found = await cache.get(0)
                if found is not None:
                    check_payload(0, found)
                del found
                await asyncio.sleep(0)

        async def disturb() -> None:
            for round_ in range(rounds):
                await cache.put(0, payload(0, round_ + 1))
                await cache.flush()
                for key in range(1 + round_ % 3, 40, 3):  # push it out of memory
                    await cache.get(key)
                if round_ % 4 == 3:
                    await cache.delete(0)

        async with asyncio.timeout(60):
            await asyncio.gather(*(read() for _ in range(32)), disturb())
        await settle(cache)
        stats = check_idle(cache)
        assert stats.corrupt_blocks == 0
        asked = rounds * 32
        assert stats.loaded_blocks < asked, "reads are shared"


async def test_reads_of_many_keys_at_once_all_end_and_all_are_right(tmp_path):
    # Fault kind LIMIT: requests above the depth of the engine fail.
    await fill(tmp_path / "kv", blocks(400, 4 * KIB), **SMALL)
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:

        async def read(key: int) -> None:
            out = bytearray(4 * KIB)
            assert await cache.get_into(key, out) == 4 * KIB
            assert out == payload(key, 0, 4 * KIB)

        async with asyncio.timeout(60):
            await asyncio.gather(*(read(key * 7 % 400) for key in range(3000)))
        assert cache.stats().misses == 0


async def test_in_flight_operations_are_bounded(tmp_path):
    await fill(tmp_path / "kv", blocks(200, 4 * KIB), **SMALL)
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        gets = [asyncio.create_task(cache.get(key)) for key in range(200)]
        worst = 0
        while not all(get.done() for get in gets):
            stats = cache.stats()
            assert stats.memory_used <= stats.memory_capacity
            worst = max(worst, stats.reads_in_flight)
            await asyncio.sleep(0)
        assert worst <= 256
        for key, get in enumerate(gets):
            assert bytes(get.result()) == payload(key, 0, 4 * KIB)
        gets.clear()


async def test_the_loop_turns_while_many_large_blocks_load_and_spill(tmp_path):
    await fill(tmp_path / "kv", blocks(24, 512 * KIB), memory="16MiB", disk="64MiB")
    async with asynckv.open(tmp_path / "kv", memory="4MiB", disk="64MiB") as cache:
        await cache.get(0)
        data = payload(100, 0, 512 * KIB)
        async with Lag() as lag:
            for key in range(24):
                found = await cache.get(key)
                assert found is not None
                assert len(found) == 512 * KIB
                del found
                await cache.put(100 + key, data)
        assert lag.worst < 0.15


@pytest.mark.parametrize("disk", [0, "4MiB"])
async def test_a_random_mix_of_every_call_from_many_tasks_yields_no_wrong_byte(tmp_path, disk):
    options = {"memory": "1MiB", "disk": disk, "room_timeout": 0.2}
    if disk:
        options["segment"] = "256KiB"
    first = seed("mix")
    versions = iter(range(1, 1 << 40))
    async with asynckv.open(tmp_path / "kv", **options) as cache:

        async def work(number: int) -> None:
            rng = random.Random(first + number)
            held = []
            for _ in range(int(120 * scale())):
                key = rng.randrange(48)
                size = rng.choice([24, 100, 5000, 33_000, BLOCK, 100_000])
                choice = rng.randrange(10)
                if choice < 3:
                    await cache.put(key, payload(key, next(versions), size))
                elif choice < 5:
                    found = await cache.get(key)
                    if found is not None:
                        check_payload(key, found)
                        if len(held) < 2 and rng.random() < 0.2:
                            held.append((key, found))
                    del found
                elif choice == 5:
                    keys = [rng.randrange(48) for _ in range(6)]
                    for each, found in zip(keys, await cache.get_many(keys), strict=True):
                        assert found is None or check_payload(each, found)
                    found = None
                elif choice == 6:
                    async for each, found in cache.stream(range(key, key + 5)):
                        check_payload(each, found)
                        del found
                elif choice == 7:
                    try:
                        async with cache.reserve(key, (size,), np.uint8) as array:
                            data = payload(key, next(versions), size)
                            array[:] = np.frombuffer(data, np.uint8)
                        del array
                    except asynckv.NoRoomError:
                        pass
                elif choice == 8:
                    await cache.delete(key)
                else:
                    cache.prefetch(range(key, key + 4))
                    cache.touch([key])
                    await asyncio.sleep(0)
                for each, view in held:
                    check_payload(each, view)
                if rng.random() < 0.3:
                    held.clear()

        async with asyncio.timeout(90):
            await asyncio.gather(*map(work, range(12)))
        await settle(cache)
        stats = check_idle(cache)
        assert stats.corrupt_blocks == 0
        assert stats.io_errors == 0
        assert stats.evictions > 0
        for key in range(48):
            found = await cache.get(key)
            assert found is None or check_payload(key, found)
            del found
        await cache.clear()
        assert check_idle(cache).memory_used == 0
