"""Batches: one submission, results per key in order, room granted to a batch as a whole; requests."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from storekit import BLOCK, KIB, MIB, blocks, cache_block, canon, check_idle, fill, payload, settle

import asynckv

SMALL = {"memory": "1MiB", "disk": "16MiB", "room_timeout": 0.3}


async def test_get_many_answers_in_order_from_every_tier_with_duplicates(tmp_path):
    await fill(tmp_path / "kv", blocks(4, 1000), **SMALL)
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        await cache.put("m", b"memory")
        found = await cache.get_many([3, "m", "absent", 0, 3, "m"])
        assert [canon(each) and canon(each)[1] for each in found] == [
            payload(3, size=1000), b"memory", None, payload(0, size=1000), payload(3, size=1000), b"memory",
        ]  # fmt: skip
        stats = cache.stats()
        assert stats.memory_hits + stats.disk_hits == 5
        assert stats.misses == 1
        assert stats.loaded_blocks == 2


async def test_get_many_of_nothing_is_an_empty_list(tmp_path):
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        assert await cache.get_many([]) == []
        assert await cache.put_many([]) == []
        assert await cache.get_many_into([], []) == []


async def test_get_many_takes_any_iterable(tmp_path):
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        assert await cache.put_many((key, b"%d" % key) for key in range(3)) == [True] * 3
        assert [bytes(each) for each in await cache.get_many(key for key in range(3))] == [b"0", b"1", b"2"]


async def test_a_bad_key_in_a_batch_raises_and_pins_nothing(tmp_path):
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        await cache.put(1, b"x")
        for bad in (True, 1.5, None, bytearray(b"k")):
            with pytest.raises(TypeError):
                await cache.get_many([1, bad])
            with pytest.raises(TypeError):
                await cache.put_many([(2, b"y"), (bad, b"z")])
        assert 2 not in cache, "nothing of a refused batch is stored"
        check_idle(cache)


async def test_a_batch_with_mixed_errors_stores_the_rest(tmp_path):
    # Fault kind SILENT: one bad item aborts the whole batch.
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        await cache.put("present", b"old")
        await cache.put("big", b"old")
        items = [
            ("first", b"1"),
            ("present", b"new"),
            ("big", bytes(2 * MIB)),
            ("twice", b"a"),
            ("twice", b"b"),
            ("last", b"9"),
        ]
        assert await cache.put_many(items) == [True, True, False, True, True, True]
        assert await cache.get("big") is None, "a refused put removes its key"
        for key, expected in {"first": b"1", "present": b"new", "twice": b"b", "last": b"9"}.items():
            assert bytes(await cache.get(key)) == expected
        assert cache.stats().rejected_puts == 1
        assert cache.stats().puts == 7


async def test_put_many_larger_than_the_pool_spills_as_it_goes(tmp_path):
    items = blocks(64)
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        assert all(await cache.put_many(items.items()))
        for key, expected in items.items():
            assert bytes(await cache.get(key)) == expected
        assert cache.stats().disk_hits > 0


async def test_when_not_all_can_be_pinned_the_leading_ones_are_served(tmp_path):
    await fill(tmp_path / "kv", blocks(40), **SMALL)
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        found = await cache.get_many(range(40))
        served = sum(each is not None for each in found)
        assert served == 16, "as many as the pool holds"
        assert [each is not None for each in found] == [True] * 16 + [False] * 24
        assert all(bytes(each) == payload(key) for key, each in enumerate(found[:16]))
        stats = cache.stats()
        assert (stats.disk_hits, stats.no_room, stats.misses) == (16, 24, 0)
        del found
        await settle(cache)
        check_idle(cache)


async def test_a_leading_disk_hit_goes_before_memory_hits_behind_it(tmp_path):
    await fill(tmp_path / "kv", blocks(4, start=100), **SMALL)
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        for key, block in blocks(16).items():
            await cache.put(key, block)
        await cache.flush()
        in_memory = [key for key in range(16) if cache.tier(key) == "memory"]
        assert len(in_memory) == 16
        found = await cache.get_many([100, *in_memory])
        assert bytes(found[0]) == payload(100)
        served = [each is not None for each in found]
        assert served == sorted(served, reverse=True), "a hole in front of what was served"
        assert sum(served) == 16


async def test_two_batches_that_each_need_most_of_the_pool_both_end(tmp_path):
    # Fault kind HANG: each holds what the other waits for.
    await fill(tmp_path / "kv", blocks(40), memory="1MiB", disk="16MiB")
    async with asynckv.open(tmp_path / "kv", memory="1MiB", disk="16MiB", room_timeout=5.0) as cache:

        async def read(keys: range) -> int:
            found = await cache.get_many(keys)
            for key, each in zip(keys, found, strict=True):
                assert each is None or bytes(each) == payload(key)
            return sum(each is not None for each in found)

        async with asyncio.timeout(4.0):
            for _ in range(5):
                counts = await asyncio.gather(*(read(range(start, start + 12)) for start in (0, 12, 24)))
                assert counts == [12, 12, 12]


async def test_room_is_granted_in_order_of_arrival(tmp_path):
    async with asynckv.open(tmp_path / "kv", memory=4 * BLOCK, disk=0, room_timeout=5.0) as cache:
        held = []
        for key, block in blocks(4).items():
            await cache.put(key, block)
            held.append(await cache.get(key))
        ended = []

        async def put(key: int, size: int) -> None:
            assert await cache.put(key, payload(key, 0, size))
            ended.append(key)

        tasks = []
        for key, size in ((10, 2 * BLOCK), (11, 100), (12, BLOCK), (13, 100)):
            tasks.append(asyncio.create_task(put(key, size)))
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        assert ended == []
        held.clear()
        await asyncio.gather(*tasks)
        assert ended == [10, 11, 12, 13]


async def test_get_many_into_returns_one_count_per_key(tmp_path):
    await fill(tmp_path / "kv", blocks(3, 5000), **SMALL)
    block = cache_block(8, floats=20)
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        await cache.put("m", block)
        outs = [bytearray(6000) for _ in range(4)]
        assert await cache.get_many_into([2, "m", "absent", 0], outs) == [5000, 120, None, 5000]
        assert outs[0][:5000] == payload(2, size=5000)
        assert outs[1][:120] == block.key.tobytes() + block.value.tobytes()
        assert outs[2] == bytes(6000)
        assert outs[3][:5000] == payload(0, size=5000)
        check_idle(cache)


async def test_get_many_into_reads_batches_larger_than_the_pool(tmp_path):
    await fill(tmp_path / "kv", blocks(60), **SMALL)
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        out = np.zeros((60, BLOCK), np.uint8)
        assert await cache.get_many_into(range(60), list(out)) == [BLOCK] * 60
        assert all(out[key].tobytes() == payload(key) for key in range(60))


async def test_get_many_into_with_a_bad_buffer_writes_nothing_at_all(tmp_path):
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        await cache.put_many([(0, b"a" * 100), (1, b"b" * 100)])
        good = bytearray(100)
        for bad in (bytearray(99), bytes(100)):
            with pytest.raises(ValueError):
                await cache.get_many_into([0, 1], [good, bad])
            assert good == bytes(100)
        with pytest.raises(ValueError):
            await cache.get_many_into([0, 1], [good])


async def test_a_cancelled_batch_leaves_no_pin(tmp_path):
    await fill(tmp_path / "kv", blocks(40), **SMALL)
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        for turns in range(12):
            batch = asyncio.create_task(cache.get_many(range(turns, turns + 20)))
            for _ in range(turns):
                await asyncio.sleep(0)
            batch.cancel()
            await asyncio.wait([batch])
            del batch
        await settle(cache)
        check_idle(cache)
        assert bytes(await cache.get(39)) == payload(39)


@pytest.mark.parametrize("change", ["delete", "overwrite"])
async def test_a_key_that_goes_while_its_batch_waits_for_room_does_not_spoil_the_rest(tmp_path, change):
    items = {100: payload(100, 0, 3 * BLOCK), 101: payload(101, 0, 5000), 102: payload(102, 0, BLOCK)}
    await fill(tmp_path / "kv", items, **SMALL)
    async with asynckv.open(tmp_path / "kv", memory=4 * BLOCK, disk="16MiB", room_timeout=5.0) as cache:
        held = []
        for key, block in blocks(2).items():
            await cache.put(key, block)
            held.append(await cache.get(key))
        batch = asyncio.create_task(cache.get_many([100, 101, 102]))
        await asyncio.sleep(0.02)
        assert not batch.done()
        if change == "delete":
            assert await cache.delete(100)
        else:
            assert await cache.put(100, b"small")
        await asyncio.sleep(0.02)
        held.clear()
        async with asyncio.timeout(5):
            first, second, third = await batch
        assert first is None if change == "delete" else bytes(first) == b"small"
        assert bytes(second) == items[101]
        assert bytes(third) == items[102]
        del first, second, third, batch
        await settle(cache)
        check_idle(cache)


async def test_a_request_reads_its_keys_and_stores_what_is_missing(tmp_path):
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        await cache.put_many([(key, payload(key, 0, 4 * KIB)) for key in range(3)])
        keys = list(range(6))
        async with cache.request(keys) as request:
            found = await request.get_many()
            assert [each is not None for each in found] == [True] * 3 + [False] * 3
            missing = [key for key, each in zip(keys, found, strict=True) if each is None]
            assert await request.put_many([(key, payload(key, 0, 4 * KIB)) for key in missing]) == [True] * 3
        found = await cache.get_many(keys)
        assert [bytes(each) for each in found] == [payload(key, 0, 4 * KIB) for key in keys]


async def test_an_exception_inside_a_request_leaves_it_without_a_trace(tmp_path):
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        await cache.put(1, b"x")
        with pytest.raises(ZeroDivisionError):
            async with cache.request([1]) as request:
                await request.get_many()
                raise ZeroDivisionError
        check_idle(cache)
        assert bytes(await cache.get(1)) == b"x"


async def test_a_request_checks_its_keys_at_once(tmp_path):
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        with pytest.raises(TypeError):
            async with cache.request([1, 2.5]):
                pass


async def test_batches_and_single_calls_count_the_same(tmp_path):
    await fill(tmp_path / "kv", blocks(8, 100), **SMALL)
    counts = []
    for batched in (False, True):
        async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
            keys = [0, 1, 2, 50, 51, 7]
            if batched:
                await cache.get_many(keys)
            else:
                for key in keys:
                    await cache.get(key)
            stats = cache.stats()
            counts.append((stats.memory_hits, stats.disk_hits, stats.misses, stats.no_room, stats.loaded_blocks))
    assert counts[0] == counts[1] == (0, 4, 2, 0, 4)
