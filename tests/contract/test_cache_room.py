"""Room: exact fits, pins in the way, pools of one block, hot pools, full stores. Nothing hangs."""

from __future__ import annotations

import asyncio
import time

import pytest
from storekit import BLOCK, KIB, MIB, Lag, blocks, check_idle, fill, payload, settle

import asynckv

SMALL = {"memory": "1MiB", "disk": "16MiB", "room_timeout": 0.3}
LAG_SECONDS_MAX = 0.05
LARGE, OTHER = 1000, 1001


@pytest.mark.parametrize("size", [32 * KIB, 36 * KIB, 64 * KIB, MIB])
@pytest.mark.parametrize("count", [1, 2, 7, 16])
async def test_n_equal_blocks_fit_a_pool_made_for_n(tmp_path, size, count):
    async with asynckv.open(tmp_path / "kv", memory=count * size, disk=0) as cache:
        for round_ in range(3):
            for key in range(count):
                assert await cache.put(key, payload(key, round_, size))
            stats = cache.stats()
            assert (stats.memory_blocks, stats.evictions, stats.memory_free) == (count, 0, 0)
            await cache.clear()
        for key in range(3 * count):
            assert await cache.put(key, payload(key, 0, size))
        stats = check_idle(cache)
        assert stats.memory_blocks == count
        assert stats.evictions == 2 * count


async def test_small_blocks_pack_tightly(tmp_path):
    async with asynckv.open(tmp_path / "kv", memory="1MiB", disk=0) as cache:
        for key in range(1000):
            await cache.put(key, bytes(60))
        assert cache.stats().memory_used <= 1000 * 96


async def test_with_every_block_pinned_put_and_disk_get_end_in_time(tmp_path):
    # Fault kind HANG: waits for an eviction that cannot happen.
    await fill(tmp_path / "kv", blocks(4, start=100), memory="1MiB", disk="16MiB")
    async with asynckv.open(tmp_path / "kv", memory="1MiB", disk="16MiB", room_timeout=0.2) as cache:
        held = []
        for key, block in blocks(16).items():
            assert await cache.put(key, block)
            held.append(await cache.get(key))
        async with Lag() as lag:
            started = time.perf_counter()
            assert await cache.put(50, payload(50)) is False
            assert await cache.get(100) is None
            assert await cache.get_many([101, 102]) == [None, None]
            assert cache.prefetch([103]) == 0
            assert time.perf_counter() - started < 3.0
        assert lag.worst < LAG_SECONDS_MAX
        stats = cache.stats()
        assert (stats.misses, stats.no_room, stats.rejected_puts) == (0, 3, 1)
        assert all(bytes(view) == payload(key) for key, view in enumerate(held))
        held.clear()
        assert bytes(await cache.get(100)) == payload(100), "full capacity is usable again"
        assert await cache.put(50, payload(50)) is True
        await settle(cache)
        check_idle(cache)


async def test_a_dropped_view_wakes_a_waiting_get(tmp_path):
    await fill(tmp_path / "kv", blocks(1, start=100), memory="256KiB", disk="16MiB")
    async with asynckv.open(tmp_path / "kv", memory=4 * BLOCK, disk="16MiB", room_timeout=10.0) as cache:
        held = []
        for key, block in blocks(4).items():
            assert await cache.put(key, block)
            held.append(await cache.get(key))
        waiting = asyncio.create_task(cache.get(100))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        started = time.perf_counter()
        held.pop(1)
        assert bytes(await waiting) == payload(100)
        assert time.perf_counter() - started < 2.0
        held.clear()


async def test_a_batch_that_waits_its_turn_is_in_nobody_s_way(tmp_path):
    """The hits of a batch behind a call for a large block are all that lies where that block could go."""
    options = {"memory": 16 * BLOCK, "disk": "32MiB", "segment": "4MiB", "room_timeout": 60.0}
    await fill(tmp_path / "kv", {LARGE: payload(LARGE, 0, 12 * BLOCK), OTHER: payload(OTHER)}, **options)
    async with asynckv.open(tmp_path / "kv", **options) as cache:
        assert all(await cache.put_many(blocks(16).items()))
        await cache.flush()
        held = await cache.get_many([0, 4, 8, 12])
        first = asyncio.ensure_future(cache.get(LARGE))
        await asyncio.sleep(0.01)
        keys = [2, 6, 10, 14, OTHER]
        batch = asyncio.ensure_future(cache.get_many(keys))
        await asyncio.sleep(0.01)
        assert not first.done()
        held.clear()
        async with asyncio.timeout(30):
            assert bytes(await first) == payload(LARGE, 0, 12 * BLOCK)
            del first
            found = await batch
        assert [bytes(block) for block in found] == [payload(key) for key in keys]
        del found, batch
        await asyncio.sleep(0)  # the loop holds the task whose end it has just told
        stats = check_idle(cache)
        assert stats.memory_hits + stats.disk_hits == 4 + 1 + len(keys)
        assert stats.misses == stats.no_room == 0


@pytest.mark.parametrize("call", ["get", "get_many", "get_many_into"])
async def test_a_cancelled_call_pins_nothing_however_far_it_got(tmp_path, call):
    """Its error keeps the frames of the call, which had the blocks already when it let the loop turn."""
    calls = {
        "get": lambda cache: cache.get(0),
        "get_many": lambda cache: cache.get_many([0, 1]),
        "get_many_into": lambda cache: cache.get_many_into([0, 1], [bytearray(BLOCK), bytearray(BLOCK)]),
    }
    async with asynckv.open(tmp_path / "kv", memory="1MiB", disk=0) as cache:
        assert all(await cache.put_many(blocks(4).items()))
        cancelled = 0
        for _ in range(40):
            cache._run_length, cache._run_started = 1000, 0.0  # the loop has waited long
            task = asyncio.ensure_future(calls[call](cache))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            cancelled += task.cancelled()
            assert cache.stats().pinned_blocks == (
                0 if task.cancelled() or call == "get_many_into" else 2 - (call == "get")
            )
            del task
        assert cancelled > 10


async def test_a_view_dropped_on_another_thread_wakes_a_waiting_put(tmp_path):
    async with asynckv.open(tmp_path / "kv", memory=4 * BLOCK, disk=0, room_timeout=10.0) as cache:
        held = []
        for key, block in blocks(4).items():
            assert await cache.put(key, block)
            held.append(await cache.get(key))
        waiting = asyncio.create_task(cache.put(9, payload(9)))
        await asyncio.sleep(0.02)
        started = time.perf_counter()
        await asyncio.to_thread(held.pop)
        assert await waiting
        assert time.perf_counter() - started < 2.0
        held.clear()


async def test_disk_hits_load_into_a_pool_that_is_hot_but_unpinned(tmp_path):
    # Fault kind HANG: the hot cache ate the pool that loads need.
    await fill(tmp_path / "kv", blocks(40, start=100), **SMALL)
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        for key, block in blocks(16).items():
            assert await cache.put(key, block)
        for _ in range(3):
            for key in range(16):
                await cache.get(key)
        for key in range(100, 140):
            found = await cache.get(key)
            assert found is not None
            assert bytes(found) == payload(key)
            del found
        assert cache.stats().no_room == 0


async def test_disk_hits_load_while_every_block_in_memory_is_freshly_written(tmp_path):
    await fill(tmp_path / "kv", blocks(64, start=100), **SMALL)
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        for step in range(64):
            assert await cache.put(step % 24, payload(step % 24, step))
            found = await cache.get(100 + step)
            assert found is not None
            assert bytes(found) == payload(100 + step)
            del found


@pytest.mark.parametrize("disk", [0, "16MiB"])
async def test_a_pool_of_one_block_alternates_between_a_byte_and_a_full_block(tmp_path, disk):
    # Fault kind PERF: a recycled block refuses bigger objects.
    async with asynckv.open(tmp_path / "kv", memory=BLOCK, disk=disk) as cache:
        for step in range(300):
            assert await cache.put(0, b"x")
            assert bytes(await cache.get(0)) == b"x"
            assert await cache.put(1, payload(1, step))
            assert bytes(await cache.get(1)) == payload(1, step)
        if disk:
            assert bytes(await cache.get(0)) == b"x"
        await settle(cache)
        check_idle(cache)


async def test_one_large_put_over_many_small_blocks_does_not_stall_the_loop(tmp_path):
    async with asynckv.open(tmp_path / "kv", memory="4MiB", disk=0) as cache:
        for key in range(40_000):
            await cache.put(key, bytes(60))
        async with Lag() as lag:
            assert await cache.put(LARGE, bytes(2 * MIB))
        assert lag.worst < LAG_SECONDS_MAX
        assert cache.stats().evictions > 10_000
        assert len(await cache.get(LARGE)) == 2 * MIB


async def test_scattered_pins_end_in_false_not_in_a_hang(tmp_path):
    async with asynckv.open(tmp_path / "kv", memory="1MiB", disk=0, room_timeout=0.1) as cache:
        for key in range(64):
            assert await cache.put(key, payload(key, 0, 16 * KIB - 64))
        held = [await cache.get(key) for key in list(cache.keys()) if key % 4 == 0]
        assert len(held) >= 10
        async with asyncio.timeout(5):
            assert await cache.put(LARGE, bytes(512 * KIB)) is False
        assert await cache.put("small", bytes(16 * KIB)) is True
        held.clear()
        assert await cache.put(LARGE, bytes(512 * KIB)) is True


async def test_sixty_four_putters_on_a_full_store_all_make_progress(tmp_path):
    # Fault kind HANG: livelock when callers spin on what reclaim needs.
    async with asynckv.open(tmp_path / "kv", memory="1MiB", disk="4MiB", segment="256KiB") as cache:
        for key, block in blocks(100).items():
            assert await cache.put(key, block)
        slowest = 0.0

        async def putter(number: int) -> None:
            nonlocal slowest
            for step in range(8):
                key = 1000 + number * 8 + step
                started = time.perf_counter()
                assert await cache.put(key, payload(key, step, 32 * KIB)) is True
                slowest = max(slowest, time.perf_counter() - started)

        async with asyncio.timeout(30):
            await asyncio.gather(*map(putter, range(64)))
        assert slowest < 5.0
        await settle(cache)
        stats = check_idle(cache)
        assert stats.rejected_puts == 0
        assert stats.dropped_blocks > 0


async def test_resident_look_ups_all_hit_while_others_write(tmp_path):
    # Fault kind RACE: a resident entry measured as a miss under writes.
    async with asynckv.open(tmp_path / "kv", memory="8MiB", disk="32MiB") as cache:
        resident = blocks(64, 4 * KIB)
        assert all(await cache.put_many(resident.items()))

        async def look_up(key: int) -> None:
            for _ in range(30):
                found = await cache.get(key)
                assert found is not None
                assert bytes(found) == resident[key]
                del found
                await asyncio.sleep(0)

        async def write(number: int) -> None:
            for step in range(15):
                key = 1000 + number * 15 + step
                assert await cache.put(key, payload(key, 0, 2 * KIB))
                await asyncio.sleep(0)

        await asyncio.gather(*map(look_up, range(64)), *map(write, range(64)))
        stats = cache.stats()
        assert (stats.memory_hits, stats.misses, stats.evictions) == (64 * 30, 0, 0)


async def test_a_run_of_immediate_hits_lets_the_loop_turn(tmp_path):
    async with asynckv.open(tmp_path / "kv", memory="1MiB", disk=0) as cache:
        await cache.put(1, b"x")
        turns = 0

        async def tick() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        ticker = asyncio.create_task(tick())
        await asyncio.sleep(0)
        turns = 0
        started = time.perf_counter()
        while time.perf_counter() - started < 0.1:
            await cache.get(1)
        seen = turns
        ticker.cancel()
        assert seen >= 25, "at least every 4 ms; every 0.5 ms or so is promised"


async def test_room_timeout_zero_never_waits(tmp_path):
    async with asynckv.open(tmp_path / "kv", memory=4 * BLOCK, disk=0, room_timeout=0) as cache:
        held = []
        for key, block in blocks(4).items():
            assert await cache.put(key, block)
            held.append(await cache.get(key))
        started = time.perf_counter()
        assert await cache.put(9, payload(9)) is False
        assert time.perf_counter() - started < 0.2
        held.clear()


@pytest.mark.parametrize("policy", ["lru", "fifo"])
async def test_the_policy_chooses_the_victim(tmp_path, policy):
    async with asynckv.open(tmp_path / "kv", memory=4 * BLOCK, disk=0, policy=policy) as cache:
        for key, block in blocks(4).items():
            await cache.put(key, block)
        await cache.get(0)
        await cache.put(4, payload(4))
        assert sorted(cache.keys()) == ([0, 2, 3, 4] if policy == "lru" else [1, 2, 3, 4])


async def test_room_timeout_counts_waiting_for_room_not_the_turns_of_a_large_batch(tmp_path):
    async with asynckv.open(tmp_path / "kv", memory="16MiB", disk=0, room_timeout=0) as cache:
        assert all(await cache.put_many((key, bytes(100)) for key in range(5000)))
        assert all(block is not None for block in await cache.get_many(range(5000)))


async def test_a_read_that_needs_no_room_does_not_wait_behind_one_that_does(tmp_path):
    options = {"memory": 4 * BLOCK, "disk": "16MiB", "room_timeout": 30}
    async with asynckv.open(tmp_path / "kv", **options) as cache:
        for key in range(8):
            await cache.put(key, payload(key))
        await cache.flush()
        views = [await cache.get(key) for key in range(4)]
        waiting = asyncio.create_task(cache.get(6))
        await asyncio.sleep(0)
        async with asyncio.timeout(5):
            assert await cache.get("absent") is None
            found = await cache.get_many([0, 1, "absent"])
        assert [block is not None for block in found] == [True, True, False]
        assert cache.stats().no_room == 0
        assert not waiting.done()
        del views, found
        assert await waiting is not None
        del waiting


async def test_a_block_larger_than_the_pool_is_no_room_at_once(tmp_path):
    async with asynckv.open(tmp_path / "kv", memory="8MiB", disk="64MiB") as cache:
        await cache.put("big", bytes(3 << 20))
        await cache.put("small", bytes(1000))
    async with asynckv.open(tmp_path / "kv", memory="1MiB", disk="64MiB", room_timeout=30) as cache:
        view = await cache.get("small")
        async with asyncio.timeout(5):
            assert await cache.get("big") is None
        assert cache.stats().no_room == 1
        del view
