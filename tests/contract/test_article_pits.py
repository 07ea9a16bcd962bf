"""The four pits of the article's prototype, as regressions, and its own scenario."""

from __future__ import annotations

import random
from collections import OrderedDict

import numpy as np
import pytest
from levels import seed
from storekit import BLOCK, KIB, MIB, cache_block, canon, check_idle, payload, settle

import asynckv


async def test_pit_1_the_data_is_counted_not_the_48_bytes_of_the_object(tmp_path):
    async with asynckv.open(tmp_path / "kv", memory="4MiB", disk=0) as cache:
        big = asynckv.CacheBlock(0, np.ones(200_000, np.float32), np.ones(50_000, np.float32))
        await cache.put(1, big)
        assert MIB * 0.95 <= cache.stats().memory_used <= MIB * 1.05
        small = asynckv.CacheBlock(0, np.ones(10, np.float32), np.ones(5, np.float32))
        before = cache.stats().memory_used
        for key in range(100):
            await cache.put(f"small {key}", small)
        assert 60 * 100 <= cache.stats().memory_used - before <= 172 * 100


async def test_pit_1_the_pool_cannot_hold_more_data_than_its_size(tmp_path):
    async with asynckv.open(tmp_path / "kv", memory="1MiB", disk=0) as cache:
        for key in range(500):
            await cache.put(key, payload(key, 0, 10_000))
            stats = cache.stats()
            assert stats.memory_used <= MIB
            assert stats.memory_blocks * 10_000 <= MIB
        assert cache.stats().memory_blocks >= 90


@pytest.mark.parametrize("way", ["delete", "overwrite", "evict", "refuse"])
async def test_pit_2_what_is_freed_is_what_was_taken_padding_included(tmp_path, way):
    async with asynckv.open(tmp_path / "kv", memory="256KiB", disk=0, room_timeout=0.01) as cache:
        rng = random.Random(seed("padding"))
        for step in range(2000):
            key = rng.randrange(20)
            size = rng.choice([1, 3, 61, 63, 65, 127, 1000, 4095, 4097, 32_769, 33_001])
            if way == "refuse" and step % 10 == 0:
                with pytest.raises(asynckv.BlockTooLargeError):
                    await cache.put(key, bytes(256 * KIB + 1))
            await cache.put(key if way != "evict" else step, payload(key, step, size))
            if way == "delete":
                await cache.delete(rng.randrange(20))
        stats = check_idle(cache)
        assert 0 < stats.memory_used <= 256 * KIB
        await cache.clear()
        stats = check_idle(cache)
        assert (stats.memory_used, stats.memory_free, stats.memory_blocks) == (0, 256 * KIB, 0)
        assert await cache.put("all", bytes(256 * KIB)), "one hole as large as the pool"


async def test_pit_3_an_evicted_block_leaves_no_entry_in_the_recency_order(tmp_path):
    async with asynckv.open(tmp_path / "kv", memory=4 * BLOCK, disk=0) as cache:
        for key in (0, 1, 2, 3, 4):  # evicts 0
            await cache.put(key, payload(key))
        assert await cache.get(0) is None
        await cache.put(0, payload(0, 1))  # evicts 1; a stale entry for 0 would evict it again
        for key in (5, 6, 7):
            await cache.put(key, payload(key))
        assert sorted(cache.keys()) == [0, 5, 6, 7]
        assert bytes(await cache.get(0)) == payload(0, 1)


@pytest.mark.parametrize("policy", ["lru", "fifo"])
async def test_pit_3_the_order_equals_that_of_an_ordered_dict(tmp_path, policy):
    rng = random.Random(seed("order"))
    model: OrderedDict[int, int] = OrderedDict()
    evictions = 0
    async with asynckv.open(tmp_path / "kv", memory=8 * BLOCK, disk=0, policy=policy) as cache:
        for step in range(1500):
            key = rng.randrange(16)
            choice = rng.random()
            if choice < 0.5:
                found = await cache.get(key)
                assert (found is not None) == (key in model), step
                if key in model:
                    assert bytes(found[:100]) == payload(key, model[key])[:100]
                    if policy == "lru":
                        model.move_to_end(key)
                else:
                    assert await cache.put(key, payload(key, step))
                    if len(model) == 8:
                        model.popitem(last=False)
                        evictions += 1
                    model[key] = step
                del found
            elif choice < 0.55:
                assert await cache.delete(key) == (key in model)
                model.pop(key, None)
            elif policy == "lru":
                cache.touch([key])
                if key in model:
                    model.move_to_end(key)
            assert sorted(cache.keys()) == sorted(model), step
        assert cache.stats().evictions == evictions > 100


async def test_pit_4_the_article_workload_evicts_and_reads_back_from_disk(tmp_path):
    count = 20_000
    async with asynckv.open(tmp_path / "kv", memory="512KiB", disk="64MiB") as cache:
        for token in range(count):
            assert await cache.put(token, cache_block(token))
        stats = cache.stats()
        assert stats.evictions > 10_000, "a workload that never evicts shows nothing"
        assert stats.memory_used <= 512 * KIB
        for token in range(20):
            assert canon(await cache.get(token)) == canon(cache_block(token))
        after = cache.stats()
        assert after.memory_hits - stats.memory_hits == 0
        assert after.disk_hits - stats.disk_hits == 20
        assert after.misses == 0
        assert after.disk_load_seconds_mean > 0
        await settle(cache)
        check_idle(cache)


async def test_pit_4_evictions_are_what_the_pool_could_not_keep(tmp_path):
    async with asynckv.open(tmp_path / "kv", memory=8 * BLOCK, disk=0) as cache:
        for key in range(100):
            await cache.put(key, payload(key))
        assert cache.stats().evictions == 92
        assert sorted(cache.keys()) == list(range(92, 100))
