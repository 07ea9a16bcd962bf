"""Streams: blocks in order while later ones load, at most a quarter of the pool ahead, nothing kept when left."""

from __future__ import annotations

import asyncio
import contextlib
import gc

import pytest
from storekit import BLOCK, blocks, check_idle, fill, find_payload, flip, payload, settle, until

import asynckv

SMALL = {"memory": "1MiB", "disk": "16MiB", "room_timeout": 0.3}


@pytest.fixture
async def cold(tmp_path):
    """A store whose 40 blocks are on disk only; the pool holds 16."""
    await fill(tmp_path / "kv", blocks(40), **SMALL)
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        yield cache


async def test_a_stream_yields_every_block_in_order(cold):
    seen = []
    async for key, block in cold.stream(range(40)):
        assert bytes(block) == payload(key)
        seen.append(key)
        del block
    assert seen == list(range(40))
    stats = check_idle(cold)
    assert (stats.disk_hits, stats.misses, stats.no_room) == (40, 0, 0)


async def test_a_stream_mixes_tiers_and_repeats_keys(cold):
    for key in (1, 3):
        await cold.get(key)
    await cold.put("new", b"in memory only")
    seen = [(key, bytes(block)) async for key, block in cold.stream([0, 1, 2, "new", 3, 1])]
    assert [key for key, _ in seen] == [0, 1, 2, "new", 3, 1]
    assert all(data == (b"in memory only" if key == "new" else payload(key)) for key, data in seen)


async def test_a_stream_stops_at_the_first_miss_and_counts_it_once(cold):
    seen = [key async for key, _ in cold.stream([0, 1, 999, 2, 3])]
    assert seen == [0, 1]
    await settle(cold)
    stats = check_idle(cold)
    assert stats.misses == 1
    assert stats.memory_hits + stats.disk_hits == 2, "blocks read ahead and never delivered are no hits"


async def test_an_empty_stream_ends_at_once(cold):
    assert [each async for each in cold.stream([])] == []


async def test_a_stream_stops_at_damage(tmp_path):
    await fill(tmp_path / "kv", blocks(6), **SMALL)
    flip(*find_payload(tmp_path / "kv", payload(3)))
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        assert [key async for key, _ in cache.stream(range(6))] == [0, 1, 2]
        await settle(cache)
        assert cache.stats().corrupt_blocks == 1


async def test_a_stream_reads_ahead_at_most_a_quarter_of_the_pool(cold):
    stream = cold.stream(range(40))
    key, block = await anext(stream)
    await settle(cold)
    assert key == 0
    assert 2 <= cold.stats().loaded_blocks <= 1 + 4, "the first one and a quarter of 16"
    assert cold.stats().pinned_bytes <= 5 * BLOCK
    for expected in range(1, 8):
        del block
        key, block = await anext(stream)
        assert key == expected
        await settle(cold)
        assert cold.stats().loaded_blocks <= expected + 1 + 4
    del block, stream


async def test_later_blocks_load_while_an_earlier_one_is_used(cold):
    async for key, block in cold.stream(range(20)):
        del block
        if key == 5:
            await until(lambda: cold.tier(6) == "memory")  # nobody asks for it but the stream
            break


async def test_breaking_out_of_a_stream_frees_everything(cold):
    async for key, block in cold.stream(range(40)):
        del block
        if key == 3:
            break
    gc.collect()
    await settle(cold)
    check_idle(cold)


async def test_dropping_a_stream_frees_everything(cold):
    stream = cold.stream(range(40))
    await anext(stream)
    del stream
    gc.collect()
    await asyncio.sleep(0)
    await settle(cold)
    check_idle(cold)


async def test_a_stream_that_is_never_started_holds_nothing(cold):
    stream = cold.stream(range(40))
    await settle(cold)
    assert check_idle(cold).loaded_blocks == 0
    del stream


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5, 8, 13])
async def test_cancelling_a_consumer_frees_everything(cold, turns):
    async def consume() -> None:
        async for key, block in cold.stream(range(40)):
            assert bytes(block) == payload(key)
            del block
            await asyncio.sleep(0)

    task = asyncio.create_task(consume())
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    del task
    gc.collect()
    await settle(cold)
    check_idle(cold)


async def test_a_stream_keeps_ending_once_it_ended(cold):
    stream = cold.stream([0])
    await anext(stream)
    for _ in range(3):
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


async def test_a_stream_checks_its_keys_at_once(cold):
    with pytest.raises(TypeError):
        async for _ in cold.stream([0, 1.5]):
            pass


async def test_many_streams_at_once_share_the_pool_and_all_end(cold):
    async def consume(start: int) -> int:
        count = 0
        async for key, block in cold.stream(range(start, start + 10)):
            assert bytes(block) == payload(key)
            del block
            count += 1
        return count

    async with asyncio.timeout(20):
        counts = await asyncio.gather(*(consume(start) for start in (0, 10, 20, 30, 5, 15)))
    assert counts == [10] * 6
    await settle(cold)
    check_idle(cold)


async def test_a_stream_over_blocks_that_are_overwritten_meanwhile_yields_whole_values(cold):
    async for key, block in cold.stream(range(20)):
        assert bytes(block) in (payload(key), payload(key, 1))
        del block
        if key + 2 < 20:
            await cold.put(key + 2, payload(key + 2, 1))


async def test_reading_on_after_close_raises(tmp_path):
    await fill(tmp_path / "kv", blocks(8), **SMALL)
    cache = await asynckv.open(tmp_path / "kv", **SMALL)
    stream = cache.stream(range(8))
    _, block = await anext(stream)
    await cache.close()
    with pytest.raises((asynckv.ClosedError, StopAsyncIteration)):
        await anext(stream)
    assert bytes(block) == payload(0)
    del block, stream
    assert cache.stats().pinned_blocks >= 0
