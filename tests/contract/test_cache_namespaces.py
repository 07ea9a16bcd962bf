"""Namespaces: blocks of another one are never returned, stay on disk, count, and are reclaimed like any."""

from __future__ import annotations

import itertools

import pytest
from storekit import BLOCK, blocks, fill, payload, recovered

import asynckv

SMALL = {"memory": "1MiB", "disk": "16MiB", "room_timeout": 0.3}
A = asynckv.Namespace(model="m", salt="tenant a")
B = asynckv.Namespace(model="m", salt="tenant b")

EVERY = [
    None,
    asynckv.Namespace(model="m"),
    asynckv.Namespace(revision="m"),
    asynckv.Namespace(dtype="m"),
    asynckv.Namespace(layout="m"),
    asynckv.Namespace(lora="m"),
    asynckv.Namespace(salt="m"),
    asynckv.Namespace(salt=b"m"),
    asynckv.Namespace(block_tokens=16),
    asynckv.Namespace(block_tokens=32),
    asynckv.Namespace(tp_rank=0, tp_size=2),
    asynckv.Namespace(tp_rank=1, tp_size=2),
    asynckv.Namespace(model="m", revision="x"),
    asynckv.Namespace(model="mx"),
    asynckv.Namespace(model="m", lora="x"),
    asynckv.Namespace(model="m", salt="x"),
]


def test_any_two_namespaces_differ_in_their_prefix_keys():
    keys = []
    for namespace in EVERY:
        size = (namespace.block_tokens if namespace else None) or 16
        keys.append(set(asynckv.prefix_keys(range(32), size, namespace=namespace)))
    for first, second in itertools.combinations(range(len(EVERY)), 2):
        assert not keys[first] & keys[second], (EVERY[first], EVERY[second])


async def test_no_namespace_sees_the_blocks_of_another_after_a_restart(tmp_path):
    # Fault kind KEY: tenant B served tenant A's blocks.
    for number, namespace in enumerate(EVERY):
        await fill(tmp_path / "kv", {1: payload(1, number, 500), "own": b"%d" % number}, **SMALL, namespace=namespace)
    for number, namespace in enumerate(EVERY):
        async with asynckv.open(tmp_path / "kv", **SMALL, namespace=namespace) as cache:
            await recovered(cache)
            assert len(cache) == 2
            assert bytes(await cache.get(1)) == payload(1, number, 500)
            assert bytes(await cache.get("own")) == b"%d" % number


async def test_an_equal_namespace_of_another_run_finds_its_blocks(tmp_path):
    def namespace() -> asynckv.Namespace:
        return asynckv.Namespace(model="m", revision="r", block_tokens=16, tp_rank=1, tp_size=4, salt=b"\0s", lora="l")

    await fill(tmp_path / "kv", blocks(4), **SMALL, namespace=namespace())
    async with asynckv.open(tmp_path / "kv", **SMALL, namespace=namespace()) as cache:
        assert bytes(await cache.get(2)) == payload(2)


async def test_look_ups_tell_nothing_about_another_namespace(tmp_path):
    await fill(tmp_path / "kv", blocks(4), **SMALL, namespace=A)
    async with asynckv.open(tmp_path / "kv", **SMALL, namespace=B) as cache:
        assert 1 not in cache
        assert cache.tier(1) is None
        assert len(cache) == 0
        assert cache.keys() == []
        assert cache.match_prefix([0, 1]) == 0
        assert cache.prefetch([0, 1]) == 0
        assert await cache.get_many([0, 1]) == [None, None]
        assert await cache.delete(1) is False
    async with asynckv.open(tmp_path / "kv", **SMALL, namespace=A) as cache:
        assert bytes(await cache.get(1)) == payload(1)


async def test_blocks_of_another_namespace_count_in_disk_used(tmp_path):
    await fill(tmp_path / "kv", blocks(60), **SMALL, namespace=A)
    async with asynckv.open(tmp_path / "kv", **SMALL, namespace=B) as cache:
        stats = cache.stats()
        assert stats.disk_used >= 60 * BLOCK
        assert stats.disk_blocks == 0


async def test_clear_touches_its_own_namespace_only(tmp_path):
    await fill(tmp_path / "kv", blocks(10, version=1), **SMALL, namespace=A)
    await fill(tmp_path / "kv", blocks(10, version=2), **SMALL, namespace=B)
    async with asynckv.open(tmp_path / "kv", **SMALL, namespace=B) as cache:
        await cache.clear()
        assert len(cache) == 0
    async with asynckv.open(tmp_path / "kv", **SMALL, namespace=B) as cache:
        assert len(cache) == 0
        assert await cache.get(1) is None
    async with asynckv.open(tmp_path / "kv", **SMALL, namespace=A) as cache:
        for key in range(10):
            assert bytes(await cache.get(key)) == payload(key, 1)


async def test_deletes_touch_their_own_namespace_only(tmp_path):
    await fill(tmp_path / "kv", blocks(4, version=1), **SMALL, namespace=A)
    await fill(tmp_path / "kv", blocks(4, version=2), **SMALL, namespace=None)
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        assert await cache.delete_many(range(4)) == 4
    async with asynckv.open(tmp_path / "kv", **SMALL, namespace=A) as cache:
        await recovered(cache)
        assert sorted(cache.keys()) == [0, 1, 2, 3]


async def test_room_held_by_another_namespace_is_reclaimed(tmp_path):
    options = {"memory": "1MiB", "disk": "4MiB", "segment": "256KiB"}
    await fill(tmp_path / "kv", blocks(50, version=1), **options, namespace=A)
    async with asynckv.open(tmp_path / "kv", **options, namespace=B) as cache:
        for key in range(200):
            assert await cache.put(key, payload(key, 2))
        await cache.flush()
        stats = cache.stats()
        assert stats.disk_used <= stats.disk_capacity
        assert stats.disk_blocks > 40
    async with asynckv.open(tmp_path / "kv", **options, namespace=A) as cache:
        for key in range(50):
            found = await cache.get(key)
            assert found is None or bytes(found) == payload(key, 1)
            del found


async def test_an_old_namespace_opened_in_between_keeps_its_newest_values(tmp_path):
    for version in range(3):
        await fill(tmp_path / "kv", blocks(5, version=version), **SMALL, namespace=A)
        await fill(tmp_path / "kv", blocks(5, version=100 + version), **SMALL, namespace=B)
    async with asynckv.open(tmp_path / "kv", **SMALL, namespace=A) as cache:
        assert [bytes(await cache.get(key)) for key in range(5)] == [payload(key, 2) for key in range(5)]


def test_a_namespace_of_a_wrong_type_is_refused(tmp_path):
    with pytest.raises(TypeError, match="namespace"):
        asynckv.open(tmp_path / "kv", namespace="model")
