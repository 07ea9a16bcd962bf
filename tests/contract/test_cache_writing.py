"""Writing: when bytes are copied, in which order puts take effect, what a refused put leaves behind."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from storekit import BLOCK, KIB, MIB, blocks, canon, check_idle, crash_image, fill, payload, settle

import asynckv

SMALL = {"memory": "1MiB", "disk": "16MiB", "room_timeout": 0.3}


async def fill_and_pin(cache: asynckv.Cache, count: int, start: int = 1000) -> list[memoryview]:
    """Occupy `count` blocks of the pool with pinned data."""
    held = []
    for key, block in blocks(count, start=start).items():
        assert await cache.put(key, block)
        held.append(await cache.get(key))
    return held


async def test_put_replaces_the_value_kind_and_shape(tmp_path):
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        for value in (b"first", np.arange(10), np.zeros((3, 0)), b"", asynckv.CacheBlock(1, np.ones(2), np.ones(3))):
            assert await cache.put("k", value) is True
            assert canon(await cache.get("k")) == canon(value)
        assert len(cache) == 1


async def test_the_caller_may_reuse_its_array_as_soon_as_put_returned(tmp_path):
    # Fault kind WRONG: a copy that starts after the caller was told it may write.
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        array = np.empty(BLOCK, np.uint8)
        for key in range(60):  # several times the pool: some of these puts wait for a spill
            array[:] = key
            assert await cache.put(key, array)
            array[:] = 255
        await cache.flush()
        for key in range(60):
            found = await cache.get(key)
            assert found is not None
            assert (found == key).all()


async def test_a_put_that_waits_copies_when_there_is_room_in_one_step(tmp_path):
    # Fault kind TORN: the caller changes its buffer during the call.
    async with asynckv.open(tmp_path / "kv", memory=4 * BLOCK, disk=0, room_timeout=5.0) as cache:
        held = await fill_and_pin(cache, 4)
        array = np.full(BLOCK, 1, np.uint8)
        put = asyncio.create_task(cache.put(1, array))
        await asyncio.sleep(0.01)
        assert not put.done()
        array[:] = 2
        held.pop()
        assert await put
        array[:] = 3
        assert (await cache.get(1) == 2).all()
        held.clear()


async def test_puts_on_one_key_take_effect_in_call_order(tmp_path):
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        for key, block in blocks(15, start=1000).items():
            await cache.put(key, block)
        sizes = [BLOCK, 10, 3 * BLOCK, 100, 2 * BLOCK, 24] * 6
        results = await asyncio.gather(*(cache.put(1, payload(1, v, size)) for v, size in enumerate(sizes)))
        assert all(results)
        assert bytes(await cache.get(1)) == payload(1, len(sizes) - 1, sizes[-1])


async def test_a_small_put_does_not_overtake_a_waiting_one_on_its_key(tmp_path):
    async with asynckv.open(tmp_path / "kv", memory=4 * BLOCK, disk=0, room_timeout=5.0) as cache:
        held = await fill_and_pin(cache, 3)
        first = asyncio.create_task(cache.put(1, payload(1, 1, 2 * BLOCK)))
        await asyncio.sleep(0)
        second = asyncio.create_task(cache.put(1, payload(1, 2, 100)))
        await asyncio.sleep(0.01)
        assert not first.done()
        held.clear()
        assert await first
        assert await second
        assert bytes(await cache.get(1)) == payload(1, 2, 100)


async def test_arguments_are_checked_before_the_first_suspension(tmp_path):
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        for key, block in ((True, b"x"), (1, "text"), (1.5, b"x"), (1, object())):
            call = cache.put(key, block)
            with pytest.raises(TypeError):
                call.send(None)


@pytest.mark.parametrize(
    "bad", [object(), "text", 5, None, [1, 2], np.float32(3), np.array(["a"]), np.array([object()])]
)
async def test_a_block_of_a_wrong_type_changes_nothing(tmp_path, bad):
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        await cache.put(1, b"old")
        before = cache.stats()
        with pytest.raises(TypeError):
            await cache.put(1, bad)
        assert cache.stats() == before
        assert bytes(await cache.get(1)) == b"old"


async def test_a_put_without_room_is_false_counted_and_removes_the_key(tmp_path):
    async with asynckv.open(tmp_path / "kv", memory=4 * BLOCK, disk="16MiB", room_timeout=0.05) as cache:
        await cache.put(1, payload(1, 0, 100))
        await cache.flush()
        held = await fill_and_pin(cache, 3)
        assert await cache.put(1, payload(1, 1, 2 * BLOCK)) is False
        assert 1 not in cache
        assert await cache.get(1) is None
        assert cache.stats().rejected_puts == 1
        held.clear()
        await cache.flush()
        image = crash_image(tmp_path / "kv", tmp_path / "image")
    async with asynckv.open(image, **SMALL) as cache:
        assert await cache.get(1) is None, "the old value came back after a refused put and a flush"


async def test_a_block_that_could_never_fit_raises_names_no_key_and_removes_it(tmp_path):
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        await cache.put("secret", b"old")
        await cache.flush()
        with pytest.raises(asynckv.BlockTooLargeError) as caught:
            await cache.put("secret", bytes(MIB + 1))
        assert isinstance(caught.value, ValueError)
        assert isinstance(caught.value, asynckv.AsyncKVError)
        assert caught.value.key == "secret"
        assert "secret" not in str(caught.value)
        assert "secret" not in cache
        assert await cache.get("secret") is None
        assert cache.stats().rejected_puts == 1
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        assert await cache.get("secret") is None


async def test_the_largest_block_fits_one_byte_more_and_ten_times_more_do_not(tmp_path):
    # Fault kind LIMIT: input above the limit kills the service.
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        assert await cache.put(1, bytes(MIB))
        for size in (MIB + 1, 10 * MIB):
            with pytest.raises(asynckv.BlockTooLargeError):
                await cache.put(2, bytes(size))
        assert await cache.put(3, b"still alive")
        assert bytes(await cache.get(3)) == b"still alive"


@pytest.mark.parametrize("turns", range(6))
async def test_a_cancelled_put_leaves_the_old_value_or_the_new_one(tmp_path, turns):
    async with asynckv.open(tmp_path / "kv", memory=4 * BLOCK, disk=0, room_timeout=5.0) as cache:
        held = await fill_and_pin(cache, 3)
        await cache.put(1, payload(1, 0, 1000))
        put = asyncio.create_task(cache.put(1, payload(1, 1, BLOCK)))
        for _ in range(turns):
            await asyncio.sleep(0)
        if turns == 4:
            held.pop()
            await asyncio.sleep(0)
        put.cancel()
        await asyncio.wait([put])
        found = await cache.get(1)
        assert bytes(found) in (payload(1, 0, 1000), payload(1, 1, BLOCK))
        del found
        held.clear()
        check_idle(cache)


async def test_a_cancelled_waiting_put_lets_the_next_one_through(tmp_path):
    async with asynckv.open(tmp_path / "kv", memory=4 * BLOCK, disk=0, room_timeout=5.0) as cache:
        held = await fill_and_pin(cache, 3)
        big = asyncio.create_task(cache.put(1, payload(1, 0, 3 * BLOCK)))
        await asyncio.sleep(0.01)
        small = asyncio.create_task(cache.put(2, payload(2, 0, BLOCK)))
        await asyncio.sleep(0.01)
        assert not big.done()
        big.cancel()
        assert await asyncio.wait_for(small, 1.0)
        held.clear()


async def test_everything_put_is_accepted_for_five_times_memory_and_disk_together(tmp_path):
    # Fault kind SPACE: writes fail when full.
    async with asynckv.open(tmp_path / "kv", memory="1MiB", disk="4MiB") as cache:
        count = 5 * 5 * MIB // BLOCK
        for key in range(count):
            assert await cache.put(key, payload(key))
            if key >= 8:
                last = await cache.get(key - 1)
                assert bytes(last) == payload(key - 1), "the newest blocks are never the first to go"
                del last
        await settle(cache)
        stats = check_idle(cache)
        assert stats.rejected_puts == 0
        assert stats.puts == count
        assert stats.dropped_blocks > 0, "this workload has to overflow the disk, else it shows nothing"


async def test_non_contiguous_arrays_are_stored_as_their_c_contiguous_copy(tmp_path):
    base = np.arange(6 * 8 * 10, dtype=np.int32).reshape(6, 8, 10)
    forms = {
        "step": base[::2, :, ::3],
        "reverse": base[::-1, ::-1],
        "transposed": base.T,
        "fortran": np.asfortranarray(base),
        "broadcast": np.broadcast_to(base[0, 0], (4, 10)),
    }
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        for key, array in forms.items():
            assert await cache.put(key, array)
            found = await cache.get(key)
            assert found.flags.c_contiguous
            np.testing.assert_array_equal(found, array)
            assert found.dtype == array.dtype


async def test_a_spilled_block_may_be_overwritten_before_during_and_after_its_spill(tmp_path):
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        for version in range(30):
            flush = asyncio.create_task(cache.flush())
            for _ in range(version % 7):
                await asyncio.sleep(0)
            assert await cache.put(1, payload(1, version, 40 * KIB))
            found = await cache.get(1)
            assert bytes(found) == payload(1, version, 40 * KIB)
            del found
            await flush
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        assert bytes(await cache.get(1)) == payload(1, 29, 40 * KIB)


async def test_persist_after_writes_without_pressure(tmp_path):
    async with asynckv.open(tmp_path / "kv", **SMALL, persist_after=0.05) as cache:
        await cache.put(1, payload(1))
        assert cache.stats().spilled_blocks == 0
        await asyncio.sleep(0.4)
        await settle(cache)
        stats = cache.stats()
        assert stats.spilled_blocks == 1
        assert stats.spilled_bytes >= BLOCK
        assert cache.tier(1) == "memory"


async def test_without_persist_after_nothing_is_written_without_pressure(tmp_path):
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        await cache.put(1, payload(1))
        await asyncio.sleep(0.2)
        assert cache.stats().spilled_blocks == 0


async def test_values_put_before_and_after_a_restart_do_not_mix(tmp_path):
    await fill(tmp_path / "kv", blocks(10, version=1), **SMALL)
    await fill(tmp_path / "kv", blocks(5, version=2), **SMALL)
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        for key in range(10):
            assert bytes(await cache.get(key)) == payload(key, 2 if key < 5 else 1)


async def test_a_refused_put_takes_its_turn_behind_a_waiting_one(tmp_path):
    async with asynckv.open(tmp_path / "kv", memory=4 * BLOCK, disk=0, room_timeout=10) as cache:
        for key in range(4):
            await cache.put(key, payload(key))
        views = [await cache.get(key) for key in range(4)]
        first = asyncio.create_task(cache.put("k", payload(9)))
        await asyncio.sleep(0)
        second = asyncio.create_task(cache.put("k", bytes(5 * BLOCK)))
        await asyncio.sleep(0)
        views.clear()
        assert await first is True
        with pytest.raises(asynckv.BlockTooLargeError):
            await second
        assert "k" not in cache
