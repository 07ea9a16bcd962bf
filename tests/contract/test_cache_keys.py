"""Keys: int, bytes and str are three kinds, each with its limits; collisions of the index hash change nothing."""

from __future__ import annotations

import asyncio
import functools

import numpy as np
import pytest
from storekit import BLOCK, fill, payload

import asynckv

SMALL = {"memory": "1MiB", "disk": "16MiB", "room_timeout": 0.3}

DISTINCT = [
    5, "5", b"5", 0, -1, -5, "", 2**63 - 1, -(2**63), 2**31, 2**32, "a", b"a", "\0", b"\0", b"\0\0", "é", "é".encode(),
    "e\u0301", b"\x05", b"\x05\0\0\0\0\0\0\0", (5).to_bytes(8, "big"), "x" * 1024, b"x" * 1024, b"x" * 1023, "é" * 512,
    "../../etc/passwd", b"/", "a/b", "nul\0inside", " ", "\n", "🦉", b"\xff" * 32, b"\0" * 32,
]  # fmt: skip
KEYS = [key for key in DISTINCT if key != ""]


class Index:
    """An object that is an int by `__index__` only."""

    def __init__(self, value: int) -> None:
        self._value = value

    def __index__(self) -> int:
        return self._value


async def test_no_two_keys_share_a_block_in_either_tier(tmp_path):
    items = {key: b"value of %r" % number for number, key in enumerate(KEYS)}
    assert len(items) == len(KEYS)
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        for key, block in items.items():
            assert await cache.put(key, block)
        assert len(cache) == len(KEYS)
        for key, block in items.items():
            assert bytes(await cache.get(key)) == block
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        assert {(type(key), key) for key in list(cache.keys())} == {(type(key), key) for key in KEYS}
        for key, block in items.items():
            assert bytes(await cache.get(key)) == block
        for number, key in enumerate(KEYS):
            assert await cache.delete(key) is True
            assert len(cache) == len(KEYS) - number - 1


@pytest.mark.parametrize("key", [np.int64(7), np.int8(7), np.uint64(7), Index(7)])
async def test_anything_with_index_is_that_int(tmp_path, key):
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        await cache.put(key, b"seven")
        assert bytes(await cache.get(7)) == b"seven"
        assert key in cache
        assert cache.keys() == [7]
        assert cache.match_prefix([key]) == 1
        await cache.put_many([(key, b"again")])
        assert bytes((await cache.get_many([key]))[0]) == b"again"
        assert await cache.delete(key)


class Text(str):
    """A subclass of str."""


async def test_a_subclass_of_str_or_bytes_is_the_same_key(tmp_path):
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        await cache.put(Text("k"), b"v")
        assert bytes(await cache.get("k")) == b"v"
        await cache.put(np.bytes_(b"raw"), b"w")
        assert bytes(await cache.get(b"raw")) == b"w"


class Folded(str):
    """Equal whatever the case, and with other bytes of its own."""

    __slots__ = ()

    def __eq__(self, other):
        return isinstance(other, str) and self.lower() == other.lower()

    def __hash__(self):
        return hash(self.lower())

    def encode(self, *args, **named):  # type: ignore[override]
        return b"other"


class Tens(int):
    """Equal when the last digit is."""

    def __eq__(self, other):
        return isinstance(other, int) and int(self) % 10 == int(other) % 10

    def __hash__(self):
        return int(self) % 10


@pytest.mark.parametrize(("first", "second"), [(Folded("KEY"), Folded("key")), (Tens(1), Tens(11))], ids=["str", "int"])
async def test_a_subclass_with_an_equality_of_its_own_changes_nothing(tmp_path, first, second):
    await fill(tmp_path / "kv", {first: payload(1)}, **SMALL)
    await fill(tmp_path / "kv", {second: payload(2)}, **SMALL)
    keys = [first, second, first, second]
    right = [payload(1), payload(2)] * 2
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        assert [bytes(block) for block in await asyncio.gather(*map(cache.get, keys))] == right
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        assert [bytes(block) for block in await cache.get_many(keys)] == right
        assert await cache.put("other", b"stays")
        assert await cache.delete_many([first, second]) == 2
        assert await cache.get_many(keys) == [None] * 4
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        assert await cache.get_many(keys) == [None] * 4
        assert bytes(await cache.get("other")) == b"stays"


@pytest.mark.parametrize(
    "key",
    [
        True, False, None, 1.0, 1.5, (1,), [1], bytearray(b"k"), memoryview(b"k"), object(), np.float64(1),
        np.array([1]), 2**63, -(2**63) - 1, 2**200, np.uint64(2**63), "", b"", "x" * 1025, b"x" * 1025, "é" * 513,
        "\ud800", np.bool_(True),
    ],
    ids=lambda key: repr(key).partition(" at 0x")[0],  # the same in each process
)  # fmt: skip
async def test_anything_else_is_a_type_or_value_error_in_every_call(tmp_path, key):
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        calls = [
            lambda: cache.put(key, b"x"), lambda: cache.get(key), lambda: cache.get_into(key, bytearray(9)),
            lambda: cache.get_many([key]), lambda: cache.put_many([(key, b"x")]), lambda: cache.delete(key),
            lambda: cache.delete_many([key]), lambda: cache.get_many_into([key], [bytearray(9)]),
        ]  # fmt: skip
        for call in calls:
            with pytest.raises((TypeError, ValueError)):
                await call()
        plain = [
            lambda: key in cache, lambda: cache.tier(key), lambda: cache.prefetch([key]), lambda: cache.touch([key]),
            lambda: cache.match_prefix([key]), lambda: cache.stream([key]), lambda: cache.request([key]),
            lambda: cache.reserve(key, (1,), "u1"),
        ]  # fmt: skip
        for call in plain:
            with pytest.raises((TypeError, ValueError)):
                call()
        assert len(cache) == 0
        assert cache.stats().misses == 0


async def test_an_error_text_never_names_the_key(tmp_path):
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        for key in ("secret" * 200, b"secret" * 200):
            with pytest.raises(ValueError) as caught:
                await cache.get(key)
            assert "secret" not in str(caught.value)


async def test_keys_that_all_collide_in_the_index_give_their_own_value_or_a_miss(tmp_path, monkeypatch):
    # Fault kind KEY: a 64-bit hash trusted alone.
    import asynckv.cache as module

    monkeypatch.setattr(module, "Table", functools.partial(module.Table, hash_mask=0))
    keys = [key for number in range(50) for key in (number, f"{number}", b"%d" % number)]
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        for number, key in enumerate(keys):
            assert await cache.put(key, payload(number, 0, 10_000))
        for number, key in enumerate(keys):
            assert bytes(await cache.get(key)) == payload(number, 0, 10_000)
        for key in keys[::3]:
            assert await cache.delete(key)
        for number, key in enumerate(keys):
            found = await cache.get(key)
            assert found is None if number % 3 == 0 else bytes(found) == payload(number, 0, 10_000)
            del found
        assert await cache.get(99_999) is None
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        for number, key in enumerate(keys):
            found = await cache.get(key)
            assert found is None if number % 3 == 0 else bytes(found) == payload(number, 0, 10_000)
            del found


async def test_a_key_of_32_bytes_never_equals_a_digest_of_another_key(tmp_path):
    from hashlib import sha256

    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        await cache.put(5, b"five")
        await cache.put("name", b"name")
        await cache.flush()
        for data in (b"5", b"name", (5).to_bytes(8, "little"), b"\0" + (5).to_bytes(8, "little")):
            assert await cache.get(sha256(data).digest()) is None


async def test_prefix_keys_work_as_keys_across_a_restart(tmp_path):
    tokens = list(range(100, 164))
    keys = asynckv.prefix_keys(tokens, 16)
    await fill(tmp_path / "kv", {key: payload(number) for number, key in enumerate(keys)}, **SMALL)
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        again = asynckv.prefix_keys([*tokens[:48], *range(16)], 16)
        assert cache.match_prefix(again) == 3
        assert len(await cache.get(again[2])) == BLOCK
