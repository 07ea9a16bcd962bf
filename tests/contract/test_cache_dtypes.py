"""What was put is what comes back: every dtype, shape and size, from memory and from disk."""

from __future__ import annotations

import array
import mmap

import numpy as np
import pytest
from storekit import BLOCK, KIB, canon, crash_image, fill, payload, python, read_all

import asynckv

SMALL = {"memory": "1MiB", "disk": "16MiB", "room_timeout": 0.3}

PLAIN = "? i1 u1 i2 u2 i4 u4 i8 u8 f2 f4 f8 c8 c16".split()
NUMPY = [*PLAIN, *(">" + each for each in PLAIN if each not in ("?", "i1", "u1")), "longdouble", "clongdouble"]


def sample(dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """An array with arbitrary bit patterns, NaNs included."""
    count = int(np.prod(shape))
    if dtype == np.bool_:
        return (np.arange(count) % 3 == 0).reshape(shape)
    if dtype.itemsize > 16 or dtype.char in "gG":
        return np.arange(count).astype(dtype).reshape(shape)
    raw = np.random.default_rng(5).bytes(count * dtype.itemsize)
    return np.frombuffer(raw, np.uint8).view(dtype).reshape(shape)


@pytest.mark.parametrize("name", NUMPY)
async def test_a_numpy_dtype_in_either_byte_order_comes_back_from_both_tiers(tmp_path, name):
    dtype = np.dtype(name)
    value = sample(dtype, (3, 4, 5))
    items = {"array": value, "block": asynckv.CacheBlock(1, value, value[:1])}
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        for key, block in items.items():
            assert await cache.put(key, block)
        found = await cache.get("array")
        assert found.dtype == dtype
        assert found.dtype.byteorder == dtype.byteorder
        assert found.flags.aligned
        del found
        assert await read_all(cache, items) == {key: canon(block) for key, block in items.items()}
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        found = await cache.get("array")
        assert found.dtype == dtype
        assert found.flags.aligned
        del found
        assert await read_all(cache, items) == {key: canon(block) for key, block in items.items()}


@pytest.mark.parametrize(
    "name", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e4m3b11fnuz"]
)
async def test_an_ml_dtype_comes_back_from_both_tiers(tmp_path, name):
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes IS NOT INSTALLED: its dtypes are NOT checked")
    dtype = np.dtype(getattr(ml_dtypes, name))
    value = np.random.default_rng(1).standard_normal((8, 16)).astype(dtype)
    items = {"array": value, "block": asynckv.CacheBlock(2, value, value.reshape(16, 8))}
    await fill(tmp_path / "kv", items, **SMALL)
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        for _ in range(2):  # from disk, then from memory
            found = await cache.get("array")
            assert found.dtype == dtype
            assert not found.flags.writeable
            assert (found.astype(np.float32) == value.astype(np.float32)).all()
            del found
            assert await read_all(cache, items) == {key: canon(block) for key, block in items.items()}
        out = np.zeros((8, 16), dtype)
        assert await cache.get_into("array", out) == value.nbytes
        assert out.tobytes() == value.tobytes()


WITHOUT_ML_DTYPES = """
import sys, asyncio, logging
sys.modules["ml_dtypes"] = None
import asynckv
logging.basicConfig()

async def main():
    async with asynckv.open(sys.argv[1], memory="1MiB", disk="16MiB") as cache:
        print(await cache.get("array"), bytes(await cache.get("bytes")), len(cache))
        await cache.delete("deleted")

asyncio.run(main())
"""


@pytest.mark.parametrize("clean", [True, False])
async def test_a_block_of_a_dtype_unknown_to_this_process_is_a_miss_that_is_told_of(tmp_path, clean):
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes IS NOT INSTALLED: its dtypes are NOT checked")
    value = np.ones((8, 16), ml_dtypes.bfloat16)
    async with asynckv.open(tmp_path / "alive", **SMALL) as cache:
        await cache.put_many({"array": value, "deleted": value, "bytes": b"whole"})
        await cache.flush()
        store = tmp_path / "alive" if clean else crash_image(tmp_path / "alive", tmp_path / "kv")
    result = python(WITHOUT_ML_DTYPES, store)
    assert result.stdout == "None b'whole' 1\n"
    told = "2 blocks are misses, of dtypes that are unknown here: is ml_dtypes installed?"
    assert result.stderr.count(told) == 1
    async with asynckv.open(store, **SMALL) as cache:
        assert (await cache.get("array")).tobytes() == value.tobytes()
        assert await cache.get("deleted") is None


@pytest.mark.parametrize(
    "shape", [(), (0,), (1,), (7,), (0, 5), (5, 0), (1, 1, 1, 1, 1, 1, 1, 1), (2, 1, 3, 1, 2, 1, 1, 2), (1000, 3)]
)
async def test_a_shape_comes_back_from_both_tiers(tmp_path, shape):
    value = np.arange(int(np.prod(shape)), dtype=np.float32).reshape(shape)
    items = {"array": value, "block": asynckv.CacheBlock(0, value, np.zeros((2, 0), np.int8))}
    await fill(tmp_path / "kv", items, **SMALL)
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        for _ in range(2):
            found = await cache.get("array")
            assert isinstance(found, np.ndarray)
            assert found.shape == shape
            del found
            assert await read_all(cache, items) == {key: canon(block) for key, block in items.items()}


async def test_key_and_value_of_a_block_may_differ_in_shape_and_dtype(tmp_path):
    items = {}
    for number, (first, second) in enumerate([("u1", "c16"), ("f2", "f8"), ("?", ">i8"), ("f8", "u1")]):
        key = sample(np.dtype(first), (3, number + 1))
        value = sample(np.dtype(second), (number + 2,))
        items[number] = asynckv.CacheBlock(number - 2, key, value)
    await fill(tmp_path / "kv", items, **SMALL)
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        for number in items:
            found = await cache.get(number)
            assert found.value.flags.aligned
            assert found.key.flags.aligned
            out = bytearray(1000)
            written = await cache.get_into(number, out)
            assert out[:written] == items[number].key.tobytes() + items[number].value.tobytes()
            del found
        assert await read_all(cache, items) == {key: canon(block) for key, block in items.items()}


@pytest.mark.parametrize("layer_id", [0, -1, 1, -(2**31), 2**31 - 1])
async def test_a_layer_id_of_32_bits_comes_back(tmp_path, layer_id):
    await fill(tmp_path / "kv", {1: asynckv.CacheBlock(layer_id, np.ones(2), np.ones(2))}, **SMALL)
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        assert (await cache.get(1)).layer_id == layer_id


@pytest.mark.parametrize("layer_id", [2**31, -(2**31) - 1, 2**70])
def test_a_layer_id_beyond_32_bits_is_refused(layer_id):
    with pytest.raises((ValueError, OverflowError)):
        asynckv.CacheBlock(layer_id, np.ones(2), np.ones(2))


@pytest.mark.parametrize("bad", [[1.0], b"bytes", None, 5, np.float32(1)])
def test_a_cache_block_of_anything_but_arrays_is_a_type_error(bad):
    with pytest.raises(TypeError):
        asynckv.CacheBlock(1, bad, np.ones(2))
    with pytest.raises(TypeError):
        asynckv.CacheBlock(1, np.ones(2), bad)


REFUSED = {
    "object": np.array([None, 1], object),
    "structured": np.zeros(3, "i4,f4"),
    "record": np.zeros(3, "i4,f4").view(np.recarray),
    "datetime": np.zeros(3, "M8[s]"),
    "timedelta": np.zeros(3, "m8[s]"),
    "unicode": np.array(["a", "b"]),
    "bytes string": np.array([b"a", b"b"]),
    "void": np.zeros(3, "V4"),
    "masked": np.ma.masked_array([1, 2], [True, False]),
    "scalar": np.float64(1),
    "int scalar": np.int32(1),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_an_array_that_is_not_plain_numbers_is_a_type_error_and_changes_nothing(tmp_path, name):
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        await cache.put(1, b"old")
        with pytest.raises(TypeError):
            await cache.put(1, REFUSED[name])
        if isinstance(REFUSED[name], np.ndarray):
            with pytest.raises(TypeError):
                await cache.put(1, asynckv.CacheBlock(1, np.ones(2), REFUSED[name]))
        assert bytes(await cache.get(1)) == b"old"
        assert cache.stats().puts == 1


async def test_nine_dimensions_are_refused(tmp_path):
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        with pytest.raises((TypeError, ValueError)):
            await cache.put(1, np.zeros((1,) * 9))
        assert 1 not in cache


async def test_every_kind_of_bytes_like_object_comes_back_as_its_bytes(tmp_path):
    anonymous = mmap.mmap(-1, 4096)
    anonymous[:5] = b"hello"
    items = {
        "bytes": b"abc",
        "bytearray": bytearray(b"abc"),
        "memoryview": memoryview(b"xabcx")[1:4],
        "array": array.array("d", [1.5, 2.5]),
        "mmap": anonymous,
        "two dimensions": memoryview(bytes(range(12))).cast("B", (3, 4)),
    }
    expected = {key: bytes(memoryview(block).tobytes()) for key, block in items.items()}
    await fill(tmp_path / "kv", items, **SMALL)
    anonymous.close()
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        for key, data in expected.items():
            found = await cache.get(key)
            assert isinstance(found, memoryview)
            assert (found.format, found.readonly, bytes(found)) == ("B", True, data)
            del found


async def test_every_size_from_nothing_to_three_blocks_comes_back_exactly(tmp_path):
    # Fault kind LIMIT: sizes that are no multiple of the block.
    sizes = list(range(3 * KIB + 1))
    async with asynckv.open(tmp_path / "kv", memory="1MiB", disk="32MiB") as cache:
        for size in sizes:
            assert await cache.put(size, payload(size, 0, size))
        assert cache.stats().evictions > 0
    async with asynckv.open(tmp_path / "kv", memory="1MiB", disk="32MiB") as cache:
        for size in sizes:
            found = await cache.get(size)
            assert found is not None, size
            assert bytes(found) == payload(size, 0, size), size
            del found


@pytest.mark.parametrize("around", [4096, 8192, 32 * KIB, 36 * KIB, BLOCK, 128 * KIB, 256 * KIB])
async def test_sizes_around_alignment_and_segment_edges_come_back_exactly(tmp_path, around):
    # Fault kind LIMIT: a condition that is off by an edge.
    deltas = (-4097, -64, -17, -1, 0, 1, 15, 16, 63, 64, 65, 4095, 4096)
    sizes = [around + delta for delta in deltas if around + delta > 0]
    options = {"memory": "1MiB", "disk": "16MiB", "segment": "512KiB"}
    async with asynckv.open(tmp_path / "kv", **options) as cache:
        for number, size in enumerate(sizes * 2):
            assert await cache.put(number, payload(number, 0, size))
        await cache.flush()
    async with asynckv.open(tmp_path / "kv", **options) as cache:
        for number, size in enumerate(sizes * 2):
            found = await cache.get(number)
            assert found is not None, size
            assert bytes(found) == payload(number, 0, size), size
            del found


async def test_the_tail_of_a_reused_extent_never_shows(tmp_path):
    async with asynckv.open(tmp_path / "kv", memory=BLOCK, disk=0) as cache:
        await cache.put(1, b"\xff" * BLOCK)
        for size in (0, 1, 63, 100, 40_000):
            await cache.put(2, bytes(size))
            found = await cache.get(2)
            assert found.nbytes == size
            assert not any(found)
            del found
            await cache.put(1, b"\xff" * BLOCK)


async def test_bytes_of_freed_blocks_never_reach_the_disk_as_padding(tmp_path):
    async with asynckv.open(tmp_path / "kv", memory="256KiB", disk="4MiB") as cache:
        secret = b"SECRET-OF-A-DELETED-BLOCK!" * 2000
        await cache.put(1, secret)
        await cache.delete(1)
        for key in range(20):
            await cache.put(key, bytes(33_000))
        await cache.flush()
    for path in (tmp_path / "kv").iterdir():
        assert b"SECRET-OF" not in path.read_bytes()
