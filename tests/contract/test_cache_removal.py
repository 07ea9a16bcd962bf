"""Removal: gone from every tier when the call returns, durable, and never back."""

from __future__ import annotations

import asyncio

import pytest
from storekit import BLOCK, blocks, check_idle, crash_image, fill, payload, settle

import asynckv

SMALL = {"memory": "1MiB", "disk": "16MiB", "room_timeout": 0.3}


@pytest.mark.parametrize("disk", [0, "16MiB"])
async def test_delete_removes_and_says_whether_there_was_one(tmp_path, disk):
    async with asynckv.open(tmp_path / "kv", memory="1MiB", disk=disk) as cache:
        await cache.put(1, payload(1))
        assert await cache.delete(1) is True
        assert await cache.get(1) is None
        assert 1 not in cache
        assert cache.tier(1) is None
        assert len(cache) == 0
        assert await cache.delete(1) is False
        assert cache.stats().memory_used == 0


async def test_delete_finds_blocks_that_are_on_disk_only(tmp_path):
    await fill(tmp_path / "kv", blocks(2), **SMALL)
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        assert cache.tier(0) == "disk"
        assert await cache.delete(0) is True
        assert await cache.get(0) is None
        assert bytes(await cache.get(1)) == payload(1)
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        assert await cache.get(0) is None


async def test_a_returned_delete_survives_a_crash_right_after_it(tmp_path):
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        for key, block in blocks(4).items():
            await cache.put(key, block)
        await cache.flush()
        await cache.delete(2)
        image = crash_image(tmp_path / "kv", tmp_path / "image")
    async with asynckv.open(image, **SMALL) as cache:
        assert await cache.get(2) is None
        for key in (0, 1, 3):
            assert bytes(await cache.get(key)) == payload(key)


async def test_a_key_put_again_after_delete_is_new_after_a_crash(tmp_path):
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        await cache.put(1, payload(1, 1))
        await cache.flush()
        await cache.delete(1)
        await cache.put(1, payload(1, 2))
        await cache.flush()
        image = crash_image(tmp_path / "kv", tmp_path / "image")
    async with asynckv.open(image, **SMALL) as cache:
        assert bytes(await cache.get(1)) == payload(1, 2)


@pytest.mark.parametrize("turns", range(8))
async def test_a_key_deleted_while_its_write_is_pending_stays_away(tmp_path, turns):
    # Fault kind PHANTOM: deleted key resurrected by a pending write.
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        for key, block in blocks(8).items():
            await cache.put(key, block)
        flush = asyncio.create_task(cache.flush())
        for _ in range(turns):
            await asyncio.sleep(0)
        assert await cache.delete(3)
        assert await cache.get(3) is None
        await flush
        await settle(cache)
        assert await cache.get(3) is None, "back after the drain"
        image = crash_image(tmp_path / "kv", tmp_path / "image")
    for directory in (image, tmp_path / "kv"):
        async with asynckv.open(directory, **SMALL) as cache:
            assert await cache.get(3) is None, "back after the restart"
            assert bytes(await cache.get(4)) == payload(4)


@pytest.mark.parametrize("turns", range(8))
async def test_a_delete_during_a_reload_gives_a_miss_or_the_value_and_then_a_miss(tmp_path, turns):
    await fill(tmp_path / "kv", blocks(2), **SMALL)
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        read = asyncio.create_task(cache.get(0))
        for _ in range(turns):
            await asyncio.sleep(0)
        assert await cache.delete(0)
        found = await read
        assert found is None or bytes(found) == payload(0)
        del found, read
        assert await cache.get(0) is None
        await settle(cache)
        check_idle(cache)


@pytest.mark.parametrize("turns", range(8))
async def test_a_put_during_a_reload_wins(tmp_path, turns):
    await fill(tmp_path / "kv", blocks(2), **SMALL)
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        read = asyncio.create_task(cache.get(0))
        for _ in range(turns):
            await asyncio.sleep(0)
        assert await cache.put(0, payload(0, 9))
        found = await read
        assert bytes(found) in (payload(0), payload(0, 9))
        del found, read
        await settle(cache)
        assert bytes(await cache.get(0)) == payload(0, 9)


async def test_delete_many_counts_what_there_was(tmp_path):
    await fill(tmp_path / "kv", blocks(3), **SMALL)
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        await cache.put("in memory", b"x")
        assert await cache.delete_many([0, 2, "in memory", "absent"]) == 3
        assert cache.keys() == [1]
        assert await cache.delete_many([]) == 0
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        assert cache.keys() == [1]


async def test_delete_many_with_a_bad_key_removes_nothing(tmp_path):
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        await cache.put(1, b"x")
        with pytest.raises(TypeError):
            await cache.delete_many([1, 2.5])
        assert 1 in cache


@pytest.mark.parametrize("disk", [0, "16MiB"])
async def test_clear_leaves_nothing_in_any_tier(tmp_path, disk):
    options = {"memory": "1MiB", "disk": disk}
    async with asynckv.open(tmp_path / "kv", **options) as cache:
        for key, block in blocks(12).items():
            await cache.put(key, block)
        if disk:
            await cache.flush()
        await cache.clear()
        assert len(cache) == 0
        assert cache.keys() == []
        assert [await cache.get(key) for key in range(12)] == [None] * 12
        stats = check_idle(cache)
        assert (stats.memory_used, stats.memory_blocks, stats.disk_blocks) == (0, 0, 0)


async def test_a_returned_clear_survives_a_crash_right_after_it(tmp_path):
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        for key, block in blocks(30).items():
            await cache.put(key, block)
        await cache.flush()
        await cache.clear()
        await cache.put(3, payload(3, 2))
        await cache.flush()
        image = crash_image(tmp_path / "kv", tmp_path / "image")
    async with asynckv.open(image, **SMALL) as cache:
        assert [key for key in range(30) if await cache.get(key) is not None] == [3]
        assert bytes(await cache.get(3)) == payload(3, 2)


async def test_clear_racing_puts_evictions_and_views_loses_no_room(tmp_path):
    # Fault kind LEAK: a double free in clear broke the bookkeeping of free room.
    async with asynckv.open(tmp_path / "kv", memory="1MiB", disk="4MiB", segment="256KiB") as cache:
        stop = False

        async def put_and_get(start: int) -> None:
            key = start
            while not stop:
                key += 1
                await cache.put(start + key % 20, payload(start + key % 20, key, 20_000 + key % 3 * 20_000))
                found = await cache.get(start + key * 7 % 20)
                if found is not None:
                    assert len(found) >= 20_000
                del found
                await asyncio.sleep(0)

        workers = [asyncio.create_task(put_and_get(start)) for start in (0, 1000, 2000)]
        for _ in range(60):
            await cache.clear()
            await asyncio.sleep(0)
        stop = True
        await asyncio.gather(*workers)
        await cache.clear()
        await settle(cache)
        stats = check_idle(cache)
        assert stats.memory_used == 0
        for key, block in blocks(16).items():
            assert await cache.put(key, block)
        assert cache.stats().memory_blocks <= 16


async def test_deleting_a_pinned_block_gives_its_room_back_with_the_last_view(tmp_path):
    async with asynckv.open(tmp_path / "kv", memory=4 * BLOCK, disk=0, room_timeout=5.0) as cache:
        for key, block in blocks(4).items():
            await cache.put(key, block)
        views = [await cache.get(key) for key in range(4)]
        await cache.clear()
        waiting = asyncio.create_task(cache.put(9, payload(9)))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        assert bytes(views[1]) == payload(1)
        views.pop()
        assert await waiting
        views.clear()
        assert bytes(await cache.get(9)) == payload(9)


async def test_deletes_survive_while_old_segments_are_reclaimed(tmp_path):
    # Fault kind PHANTOM: a tombstone reclaimed before the record it buries.
    options = {"memory": "512KiB", "disk": "2MiB", "segment": "128KiB"}
    async with asynckv.open(tmp_path / "kv", **options) as cache:
        gone = list(range(100, 130))
        for key in gone:
            await cache.put(key, payload(key, 0, 8000))
        await cache.flush()
        await cache.delete_many(gone)
        for round_ in range(6):
            for key in range(8):
                assert await cache.put(key, payload(key, round_, 30_000))
            await cache.flush()
            image = crash_image(tmp_path / "kv", tmp_path / f"image{round_}")
            async with asynckv.open(image, **options) as other:
                assert [key for key in gone if await other.get(key) is not None] == []
                for key in range(8):
                    found = await other.get(key)
                    assert found is not None
                    assert bytes(found) == payload(key, round_, 30_000)
