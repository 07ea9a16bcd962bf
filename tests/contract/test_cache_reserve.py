"""Reservations: arrays inside the pool that their user fills, published on normal exit only."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest
from storekit import BLOCK, KIB, MIB, blocks, canon, check_idle, payload, settle, until

import asynckv
from asynckv.checksum import checksum

SMALL = {"memory": "1MiB", "disk": "16MiB", "room_timeout": 0.3}


async def test_a_reserved_array_is_published_on_exit(tmp_path):
    expected = np.arange(2000, dtype=np.float32).reshape(40, 50)
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        async with cache.reserve(1, (40, 50), np.float32) as array:
            assert (array.shape, array.dtype, array.flags.writeable) == ((40, 50), np.dtype(np.float32), True)
            assert 1 not in cache
            assert cache.tier(1) is None
            assert await cache.get(1) is None
            array[:] = expected
        found = await cache.get(1)
        assert canon(found) == canon(expected)
        assert not found.flags.writeable
        assert cache.stats().puts == 1
        assert np.shares_memory(found, array)


async def test_a_reserved_block_has_two_arrays_and_a_layer(tmp_path):
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        async with cache.reserve_block("k", 7, (3, 5), (2,), np.float64) as block:
            assert isinstance(block, asynckv.CacheBlock)
            assert (block.key.shape, block.value.shape) == ((3, 5), (2,))
            block.key[:] = 1.5
            block.value[:] = 2.5
        found = await cache.get("k")
        assert canon(found) == canon(asynckv.CacheBlock(7, np.full((3, 5), 1.5), np.full(2, 2.5)))


async def test_a_reserved_value_survives_spill_and_restart(tmp_path):
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        for key in range(40):
            async with cache.reserve(key, (BLOCK,), np.uint8) as array:
                array[:] = np.frombuffer(payload(key), np.uint8)
            del array
        await settle(cache)
        assert cache.stats().evictions > 0
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        for key in range(40):
            assert (await cache.get(key)).tobytes() == payload(key)


async def test_the_old_value_stays_readable_until_publication(tmp_path):
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        await cache.put(1, b"old")
        async with cache.reserve(1, (4,), np.uint8) as array:
            array[:] = 9
            assert bytes(await cache.get(1)) == b"old"
        assert (await cache.get(1)).tolist() == [9] * 4


async def test_an_exception_discards_the_reservation_and_keeps_the_old_value(tmp_path):
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        await cache.put(1, b"old")
        used = cache.stats().memory_used
        with pytest.raises(ZeroDivisionError):
            async with cache.reserve(1, (BLOCK,), np.uint8) as array:
                array[:] = 1
                raise ZeroDivisionError
        del array
        assert bytes(await cache.get(1)) == b"old"
        assert check_idle(cache).memory_used == used
        assert cache.stats().puts == 1


async def test_cancelling_inside_a_reservation_discards_it(tmp_path):
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:

        async def write() -> None:
            async with cache.reserve(1, (BLOCK,), np.uint8) as array:
                array[:] = 1
                await asyncio.sleep(60)

        task = asyncio.create_task(write())
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait([task])
        del task
        assert 1 not in cache
        assert check_idle(cache).memory_used == 0


@pytest.mark.parametrize("turns", range(6))
async def test_cancelling_a_waiting_reservation_leaks_no_room(tmp_path, turns):
    async with asynckv.open(tmp_path / "kv", memory=4 * BLOCK, disk=0, room_timeout=5.0) as cache:
        held = []
        for key, block in blocks(4).items():
            await cache.put(key, block)
            held.append(await cache.get(key))

        async def write() -> None:
            async with cache.reserve(9, (BLOCK,), np.uint8) as array:
                array[:] = 1

        task = asyncio.create_task(write())
        await asyncio.sleep(0.005)
        held.clear()
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        del task
        await cache.clear()
        assert check_idle(cache).memory_used == 0
        assert all(await cache.put_many(blocks(4).items()))
        assert cache.stats().memory_blocks == 4


async def test_without_room_a_reservation_raises_and_names_no_key(tmp_path):
    async with asynckv.open(tmp_path / "kv", memory=4 * BLOCK, disk=0, room_timeout=0.05) as cache:
        held = []
        for key, block in blocks(4).items():
            await cache.put(key, block)
            held.append(await cache.get(key))
        with pytest.raises(asynckv.NoRoomError) as caught:
            async with cache.reserve("secret", (BLOCK,), np.uint8):
                raise AssertionError("there is no room")
        assert caught.value.key == "secret"
        assert "secret" not in str(caught.value)
        held.clear()
        check_idle(cache)


@pytest.mark.parametrize("shape", [(2 * MIB,), (2**31,), (2**32 + 1,), (2**62,), (2**40, 2**40), (2**63,)])
async def test_a_reservation_that_could_never_fit_is_refused_before_allocating(tmp_path, shape):
    # Fault kind LIMIT: sizes summed in 32 bits.
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        with pytest.raises(ValueError):
            async with cache.reserve(1, shape, np.float64):
                raise AssertionError("nothing of that size fits")
        assert check_idle(cache).memory_used == 0
        assert await cache.put(1, b"alive")


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [(bad, "f4") for bad in ((-1,), (1,) * 9, (1.5,), None)] + [((2,), bad) for bad in ("O", "U4", "M8[s]", "i4,f4")],
)
async def test_a_reservation_of_a_bad_shape_or_dtype_is_refused(tmp_path, shape, dtype):
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        with pytest.raises((TypeError, ValueError)):
            async with cache.reserve(1, shape, dtype):
                pass
        assert check_idle(cache).memory_used == 0


async def test_an_empty_reservation_is_fine(tmp_path):
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        async with cache.reserve(1, (0, 4), np.int16) as array:
            assert array.size == 0
        assert (await cache.get(1)).shape == (0, 4)


async def test_two_reservations_of_one_key_publish_in_order_of_exit(tmp_path):
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        outer = cache.reserve(1, (8,), np.uint8)
        inner = cache.reserve(1, (8,), np.uint8)
        first, second = await outer.__aenter__(), await inner.__aenter__()
        first[:], second[:] = 1, 2
        del first, second
        await inner.__aexit__(None, None, None)
        assert (await cache.get(1)).tolist() == [2] * 8
        await outer.__aexit__(None, None, None)
        assert (await cache.get(1)).tolist() == [1] * 8
        check_idle(cache)


async def test_a_write_after_publication_reads_as_damage_once_it_came_from_disk(tmp_path):
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        async with cache.reserve(1, (BLOCK,), np.uint8) as array:
            array[:] = 1
        array[5] = 2
        del array
        await cache.flush()
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        assert await cache.get(1) is None
        assert cache.stats().corrupt_blocks == 1


async def test_a_reservation_waits_for_room_like_a_put(tmp_path):
    async with asynckv.open(tmp_path / "kv", memory=4 * BLOCK, disk=0, room_timeout=5.0) as cache:
        held = []
        for key, block in blocks(4).items():
            await cache.put(key, block)
            held.append(await cache.get(key))

        async def write() -> None:
            async with cache.reserve(9, (60 * KIB,), np.uint8) as array:
                array[:] = 7

        task = asyncio.create_task(write())
        await asyncio.sleep(0.01)
        assert not task.done()
        held.pop()
        await task
        assert ((await cache.get(9)) == 7).all()
        held.clear()


@pytest.mark.parametrize("end", ["published", "cancelled", "closed"])
async def test_the_checksum_of_a_large_reservation_is_taken_beside_the_loop(tmp_path, monkeypatch, end):
    size = 8 * MIB
    entered, go_on = threading.Event(), threading.Event()

    def slow(data):
        entered.set()
        assert go_on.wait(10)
        return checksum(data)

    monkeypatch.setattr("asynckv.sessions.checksum", slow)
    cache = await asynckv.open(tmp_path / "kv", memory="16MiB", disk="64MiB", segment="16MiB")

    async def reserve():
        async with cache.reserve(1, (size,), np.uint8) as array:
            array[:] = 7

    task = asyncio.create_task(reserve())
    assert await asyncio.to_thread(entered.wait, 10)
    assert await cache.put(2, b"meanwhile")  # the loop goes on
    assert 1 not in cache
    if end == "cancelled":
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert cache.stats().memory_used > size  # the worker still reads it
        go_on.set()
        await until(lambda: cache.stats().memory_used < size)
        assert 1 not in cache
    elif end == "closed":
        closing = asyncio.create_task(cache.close())
        await asyncio.sleep(0)
        go_on.set()
        with pytest.raises(asynckv.ClosedError):
            await task
        await closing
    else:
        go_on.set()
        await task
        await cache.flush()
        assert await cache.put(3, bytes(12 * MIB))
        assert cache.tier(1) == "disk"
        assert bytes(await cache.get(1)) == b"\7" * size
        assert cache.stats().corrupt_blocks == 0
    await cache.close()
