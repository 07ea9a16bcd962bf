"""Statistics: every counter of the contract, gauges equal to a recount, a snapshot that stays as it is."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import time

import pytest
from levels import seed
from storekit import BLOCK, KIB, allocated, blocks, check_gauges, check_idle, fill, payload, settle, until

import asynckv

SMALL = {"memory": "1MiB", "disk": "16MiB", "room_timeout": 0.3}

FIELDS = """
memory_hits disk_hits misses no_room puts rejected_puts evictions spilled_blocks spilled_bytes loaded_blocks
loaded_bytes dropped_blocks corrupt_blocks io_errors io_timeouts memory_blocks memory_used memory_free
memory_quarantined memory_capacity pinned_blocks pinned_bytes disk_blocks disk_used disk_live disk_capacity
disk_bytes_written disk_state recovering reads_in_flight writes_in_flight disk_load_seconds_mean
disk_load_seconds_p50 disk_load_seconds_p99 disk_load_seconds_max engine direct
""".split()


def recount(cache: asynckv.Cache) -> dict[str, int]:
    """Blocks per tier, counted by asking for every key."""
    tiers = [cache.tier(key) for key in list(cache.keys())]
    return {"memory": tiers.count("memory"), "disk": tiers.count("disk"), "length": len(tiers)}


async def test_the_snapshot_has_every_field_of_the_contract(tmp_path):
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        stats = cache.stats()
    assert isinstance(stats, asynckv.Stats)
    assert [name for name in FIELDS if not hasattr(stats, name)] == []
    assert stats.hit_ratio == 0.0


async def test_a_snapshot_is_frozen_and_does_not_follow_the_store(tmp_path):
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        before = cache.stats()
        await cache.put(1, b"x")
        assert before.puts == 0
        with pytest.raises(dataclasses.FrozenInstanceError):
            before.puts = 5


async def test_its_text_is_a_table_of_names_and_values(tmp_path):
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        await cache.put(1, b"x")
        lines = str(cache.stats()).splitlines()
    assert len(lines) >= len(FIELDS)
    assert [name for name in FIELDS if not any(name in line for line in lines)] == []


async def test_hit_ratio_is_hits_over_hits_and_misses(tmp_path):
    await fill(tmp_path / "kv", blocks(1), **SMALL)
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        for key in (0, 0, 0, 1):
            await cache.get(key)
        stats = cache.stats()
        assert (stats.disk_hits, stats.memory_hits, stats.misses) == (1, 2, 1)
        assert stats.hit_ratio == 0.75


async def test_every_way_to_read_counts_once_per_key(tmp_path):
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        await cache.put_many(blocks(4, 100).items())
        out = bytearray(100)
        await cache.get(0)
        await cache.get(99)
        await cache.get_into(0, out)
        await cache.get_into(99, out)
        await cache.get_many([0, 1, 99])
        await cache.get_many_into([0, 1, 99], [out, bytearray(100), bytearray(100)])
        async for _ in cache.stream([0, 1, 99]):
            pass
        async with cache.request([0, 99]) as request:
            await request.get_many()
        stats = cache.stats()
        assert (stats.memory_hits, stats.disk_hits, stats.misses, stats.no_room) == (9, 0, 6, 0)


async def test_memory_only_stores_say_so(tmp_path):
    async with asynckv.open(tmp_path / "kv", memory="1MiB", disk=0) as cache:
        await cache.put(1, b"x")
        stats = cache.stats()
        assert stats.disk_state == "none"
        assert (stats.disk_used, stats.disk_capacity, stats.disk_blocks, stats.disk_bytes_written) == (0, 0, 0, 0)
        assert stats.memory_capacity == 1 << 20


async def test_capacities_are_what_was_asked_to_the_byte(tmp_path):
    async with asynckv.open(tmp_path / "kv", memory=1_000_000, disk=20_000_001) as cache:
        stats = cache.stats()
        assert stats.memory_capacity == 1_000_000
        assert stats.memory_free == 1_000_000
        assert stats.disk_capacity == 20_000_001
        assert stats.disk_state == "ok"
        assert stats.engine in ("threads", "io_uring", "aiofiles")


async def test_spills_and_loads_are_counted_in_blocks_and_bytes(tmp_path):
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        await cache.put_many(blocks(4).items())
        await cache.flush()
        stats = cache.stats()
        assert (stats.spilled_blocks, stats.spilled_bytes) == (4, 4 * BLOCK)
        assert stats.disk_bytes_written >= 4 * BLOCK
        assert stats.disk_live >= 4 * BLOCK
        assert stats.disk_blocks == 4
        await cache.flush()
        assert cache.stats().spilled_blocks == 4, "clean blocks are not written again"
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        await cache.get_many(range(4))
        stats = cache.stats()
        assert (stats.loaded_blocks, stats.loaded_bytes) == (4, 4 * BLOCK)
        assert 0 < stats.disk_load_seconds_p50 <= stats.disk_load_seconds_p99 <= stats.disk_load_seconds_max < 10
        assert 0 < stats.disk_load_seconds_mean <= stats.disk_load_seconds_max


async def test_disk_used_is_what_the_file_system_has_allocated(tmp_path):
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        for key, block in blocks(60).items():
            await cache.put(key, block)
        await cache.flush()
        await settle(cache)
        # A segment that is being sealed is cut first and counted anew then.
        await until(lambda: abs(cache.stats().disk_used - allocated(tmp_path / "kv")) <= 64 * KIB)
        assert allocated(tmp_path / "kv") <= cache.stats().disk_capacity


async def test_evictions_of_memory_only_blocks_count_as_dropped_blocks_too(tmp_path):
    async with asynckv.open(tmp_path / "kv", memory=4 * BLOCK, disk=0) as cache:
        for key, block in blocks(10).items():
            await cache.put(key, block)
        stats = cache.stats()
        assert (stats.evictions, stats.dropped_blocks) == (6, 6)


async def test_an_overwrite_is_no_eviction(tmp_path):
    async with asynckv.open(tmp_path / "kv", memory=4 * BLOCK, disk=0) as cache:
        for version in range(10):
            await cache.put(1, payload(1, version))
        stats = cache.stats()
        assert (stats.puts, stats.evictions, stats.dropped_blocks, stats.memory_blocks) == (10, 0, 0, 1)


@pytest.mark.parametrize("disk", [0, "2MiB"])
async def test_gauges_equal_a_recount_after_any_sequence_of_calls_and_a_restart(tmp_path, disk):
    # Fault kind METRIC: a counter that went below zero and wrapped.
    options = {"memory": "512KiB", "disk": disk, "room_timeout": 0.1}
    if disk:
        options["segment"] = "128KiB"
    rng = random.Random(seed("recount"))
    for _ in range(3):
        async with asynckv.open(tmp_path / "kv", **options) as cache:
            held = []
            for _ in range(400):
                key = rng.randrange(60)
                choice = rng.random()
                if choice < 0.5:
                    size = rng.choice([0, 1, 60, 3000, 20_000, 40_000])
                    await cache.put(key, payload(key, 0, size))
                elif choice < 0.75:
                    found = await cache.get(key)
                    if found is not None and rng.random() < 0.1 and len(held) < 3:
                        held.append(found)
                    del found
                elif choice < 0.85:
                    await cache.delete(key)
                elif choice < 0.87:
                    await cache.clear()
                elif choice < 0.9:
                    held.clear()
                elif choice < 0.93:
                    await cache.flush()
                else:
                    cache.prefetch([key, key + 1])
                check_gauges(cache.stats())
            held.clear()
            await settle(cache)
            stats = check_idle(cache)
            counted = recount(cache)
            assert counted["length"] == len(cache)
            assert counted["memory"] == stats.memory_blocks
            if not disk:
                assert counted["length"] == stats.memory_blocks
            await cache.clear()
            assert check_idle(cache).memory_used == 0
            await cache.put_many(blocks(3, 3000).items())


async def test_after_a_restart_every_block_counts_as_on_disk_and_none_as_in_memory(tmp_path):
    await fill(tmp_path / "kv", blocks(30), **SMALL)
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        stats = check_idle(cache)
        assert (stats.disk_blocks, stats.memory_blocks, stats.memory_used, len(cache)) == (30, 0, 0, 30)
        assert stats.disk_live >= 30 * BLOCK
        assert stats.puts == 0


async def test_an_idle_store_uses_no_processor_time(tmp_path):
    # Fault kind PERF: 100 % CPU while nothing happens.
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        await cache.put_many(blocks(8).items())
        await cache.flush()
        await cache.get_many(range(8))
        await settle(cache)
        await asyncio.sleep(0.05)
        before = time.process_time()
        await asyncio.sleep(2.0)
        assert time.process_time() - before < 0.04, "more than 2 % of one core"
