"""What can be stored and comes back; descriptors, also hostile ones; copies."""

import array
import ctypes
import mmap
import random

import ml_dtypes
import numpy as np
import pytest

from asynckv._core import CacheBlock, Table

DTYPES = [
    "?",
    "i1",
    "u1",
    "<i2",
    ">i2",
    "<u4",
    ">u4",
    "<i8",
    ">u8",
    "<f2",
    ">f2",
    "<f4",
    ">f4",
    "<f8",
    ">f8",
    "<c8",
    ">c8",
    "<c16",
    ">c16",
    np.longdouble,
    np.clongdouble,
    ml_dtypes.bfloat16,
    ml_dtypes.float8_e4m3fn,
    ml_dtypes.float8_e5m2,
    ml_dtypes.float8_e4m3b11fnuz,
]


def round_trip(block, capacity=1 << 20):
    table = Table(capacity)
    draft = table.draft(block)
    assert table.put(1, draft)
    table.check()
    return table.get(1)


def values(shape, dtype, seed=0):
    dtype = np.dtype(dtype)
    size = int(np.prod(shape, dtype=np.int64))
    if dtype.kind == "b":
        return (np.arange(size) % 3 == 0).reshape(shape)
    return (np.arange(size) % 7).astype(dtype).reshape(shape)


def same(a, b):
    assert a.dtype == b.dtype
    assert a.dtype.byteorder == b.dtype.byteorder
    assert a.shape == b.shape
    assert a.tobytes() == b.tobytes()
    assert a.flags.c_contiguous
    assert a.flags.aligned
    assert not a.flags.writeable


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 4), (2, 0, 3), (1, 2, 1, 2, 1, 2, 1, 2)])
def test_arrays(dtype, shape):
    block = values(shape, dtype)
    same(round_trip(block), block)


@pytest.mark.parametrize("a", ["u1", "<f2", "<c16", np.clongdouble, ml_dtypes.bfloat16])
@pytest.mark.parametrize("b", ["u1", ">f8", np.longdouble, ml_dtypes.float8_e5m2])
@pytest.mark.parametrize("shape", [(0,), (1,), (3,), (5, 7)])
def test_cache_blocks(a, b, shape):
    key, value = values(shape, a), values((2, *shape), b)
    block = round_trip(CacheBlock(-7, key, value))
    assert type(block) is CacheBlock
    assert block.layer_id == -7
    same(block.key, key)
    same(block.value, value)


def test_sizes_of_a_cache_block():
    table = Table(1 << 20)
    draft = table.draft(CacheBlock(0, np.zeros(3, "u1"), np.zeros(2, "<f8")))
    assert (draft.payload, draft.stored, draft.extent) == (19, 24, 64)


@pytest.mark.parametrize(
    "block",
    [
        b"",
        b"hello",
        bytearray(b"hello"),
        memoryview(b"hello"),
        memoryview(b"hello")[::-2],
        array.array("d", [1, 2, 3]),
        memoryview(array.array("i", [5, 6])),
        (ctypes.c_int * 3)(1, 2, 3),
        memoryview(np.arange(12).reshape(3, 4).T),
    ],
)
def test_bytes_likes(block):
    view = round_trip(block)
    assert type(view) is memoryview
    assert (view.format, view.readonly, view.ndim) == ("B", True, 1)
    assert view.tobytes() == memoryview(block).tobytes()


def test_mmap_and_released_memoryview():
    with mmap.mmap(-1, 4096) as m:
        m[:5] = b"hello"
        assert round_trip(m)[:5] == b"hello"
    view = memoryview(b"x")
    view.release()
    with pytest.raises(ValueError):
        Table(4096).draft(view)


@pytest.mark.parametrize(
    "make",
    [
        lambda a: a[::2],
        lambda a: a[:, ::-1],
        lambda a: a.T,
        lambda a: a[:, :, 1],
        lambda a: a.transpose(1, 0, 2),
        lambda a: np.broadcast_to(a[:1], (6, *a.shape[1:])),
        lambda a: a[..., None][:, ::3],
        lambda a: a[::-1, ::-1, ::-1],
        lambda a: np.asfortranarray(a),
        lambda a: a[1:1],
        lambda a: a.swapaxes(0, 2)[1:],
    ],
)
@pytest.mark.parametrize("dtype", ["u1", "<f2", ">i4", "<f8", "<c16", np.clongdouble])
def test_non_contiguous(make, dtype):
    block = make(values((6, 7, 5), dtype))
    same(round_trip(block), np.ascontiguousarray(block))


def test_random_strides_against_numpy():
    rng = random.Random(3)
    base = np.arange(5**6, dtype=np.int32).reshape((5,) * 6)
    for _ in range(100):
        axes = list(range(6))
        rng.shuffle(axes)
        cut = tuple(slice(rng.randrange(3), None, rng.choice([1, 2, -1])) for _ in range(6))
        block = base.transpose(axes)[cut]
        same(round_trip(block, 1 << 17), np.ascontiguousarray(block))


class Sub(np.ndarray):
    pass


def test_subclasses_come_back_plain():
    block = round_trip(np.arange(4).view(Sub))
    assert type(block) is np.ndarray
    assert block.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "block",
    [
        None,
        "text",
        5,
        1.5,
        [1],
        np.float32(1),
        np.int64(1),
        np.bool_(True),
        np.bytes_(b"x"),
        object(),
        np.array([None]),
        np.zeros(2, "M8[s]"),
        np.zeros(2, "m8[s]"),
        np.zeros(2, "S3"),
        np.zeros(2, "U3"),
        np.zeros(2, "V4"),
        np.zeros(2, [("a", "i4")]),
        np.ma.masked_array([1, 2]),
        np.zeros(2, ml_dtypes.int4),
        memoryview(np.array([None])),
    ],
)
def test_refused_types(block):
    table = Table(4096)
    with pytest.raises(TypeError):
        table.draft(block)
    if isinstance(block, np.ndarray):
        with pytest.raises(TypeError):
            table.draft(CacheBlock(0, np.zeros(1), block))


def test_nine_dimensions():
    with pytest.raises(ValueError, match="8 dimensions"):
        Table(4096).draft(np.zeros((1,) * 9))
    with pytest.raises(ValueError, match="8 dimensions"):
        Table(4096).draft_like((1,) * 9, "f4")


def test_cache_block_constructor():
    a = np.zeros(3)
    assert CacheBlock(layer_id=np.int16(4), key=a, value=a).layer_id == 4
    assert CacheBlock(-(2**31), a, a).layer_id == -(2**31)
    for layer in (2**31, -(2**31) - 1, 10**30):
        with pytest.raises(ValueError, match="32 bit"):
            CacheBlock(layer, a, a)
    for arguments in ((True, a, a), ("1", a, a), (1.0, a, a), (1, [1], a), (1, a, None), (1, b"x", a)):
        with pytest.raises(TypeError):
            CacheBlock(*arguments)
    block = CacheBlock(1, a, a)
    with pytest.raises(AttributeError):
        block.layer_id = 5
    assert "layer_id=1" in repr(block)
    assert "0." not in repr(block)


def test_the_source_may_change_after_the_put():
    table = Table(4096)
    source = np.arange(10)
    table.put(1, table.draft(source))
    source[:] = 0
    assert table.get(1).tolist() == list(range(10))


def test_shape_set_between_draft_and_copy():
    table = Table(4096)
    source = np.arange(12).reshape(3, 4)[:, ::-1]
    draft = table.draft(source)
    expected = source.copy()
    table.put(1, draft)
    assert (table.get(1) == expected).all()
    plain = np.arange(12)
    draft = table.draft(plain)
    plain.resize((1000,), refcheck=False)
    with pytest.raises(ValueError, match="resized"):
        table.put(2, draft)
    assert table.state(2) == 0
    table.check()


def test_gap_is_zeroed():
    table = Table(4096)
    table.put(0, table.draft(b"\xff" * 4000))
    table.remove(0)
    table.put(1, table.draft(CacheBlock(0, np.full(1, 255, "u1"), np.full(1, 1.0, "<c16"))))
    spill = table.take_dirty(1 << 20, 1)[0]
    assert bytes(spill.view[:16]) == b"\xff" + b"\0" * 15


def test_descriptors_are_shared_and_freed():
    table = Table(1 << 20)
    for i in range(50):
        table.put(i, table.draft(np.zeros((i + 1,), np.uint8)))
        table.put(100 + i, table.draft(np.zeros((i + 1,), np.uint8)))
    table.check()
    for i in range(50):
        table.remove(i)
        table.remove(100 + i)
    desc = table.intern(b"\1\3|u1\1\5")
    assert desc < 51
    assert table.intern(b"\1\3|u1\1\5") == desc
    table.release_desc(desc)
    assert table.desc_bytes(desc) == b"\1\3|u1\1\5"
    table.release_desc(desc)


def test_two_drafts_of_one_new_shape():
    table = Table(1 << 20)
    first, second = (
        table.draft(np.zeros((3, 3), ">f4")),
        table.draft(np.zeros((3, 3), np.dtype(">f4").newbyteorder(">"))),
    )
    table.put(1, first)
    table.put(2, second)
    table.remove(1)
    table.put(3, first)
    table.check()
    assert table.get(3).shape == (3, 3)


def test_descriptor_bytes():
    table = Table(1 << 20)
    block = CacheBlock(-3, np.zeros((2, 300), "<f2"), np.zeros((), ml_dtypes.bfloat16))
    table.put(1, table.draft(block))
    assert table.take_dirty(1 << 20, 1)[0].desc == b"\2\5\3<f2\2\2\xac\2\x08bfloat16\0"


GOOD_DESC = b"\2\5\3<f2\2\2\xac\2\x08bfloat16\0"


def test_hostile_descriptors():
    table = Table(4096)
    good = table.intern(GOOD_DESC)
    bad = [
        b"",
        b"\3",
        b"\0\0",
        b"\1",
        b"\1\3<f2",
        b"\1\3<f2\1",
        b"\1\3<f2\x09" + b"\1" * 9,
        b"\1\3|O8\1\1",
        b"\1\3<M8\1\1",
        b"\1\3<f3\1\1",
        b"\1\3=f4\1\1",
        b"\1\3<f2\1\x80\0",
        b"\1\3<f2\1\1\0",
        b"\1\3<f8\2" + b"\xff\xff\xff\xff\xff\xff\xff\xff\x7f" * 2,
        b"\1\3<f8\1" + b"\xff" * 9 + b"\x01",
        b"\1\3<f8\3\0" + b"\xff\xff\xff\xff\xff\xff\xff\xff\x7f" * 2,
        b"\1\x0afloat8_xyz\0",
        b"\1\4int4\0",
        b"\2" + b"\xff" * 5 + GOOD_DESC[2:],
        b"\1\xff<f2\1\1",
        b"\1\3\xff\xfe\xfd\0",
        GOOD_DESC + b"\0",
        b"\0" * 600,
    ]
    bad += [GOOD_DESC[:n] for n in range(1, len(GOOD_DESC))]
    for raw in bad:
        with pytest.raises(ValueError):
            table.intern(raw)
    rng = random.Random(2)
    for _ in range(20_000):
        raw = bytearray(GOOD_DESC)
        for _ in range(rng.randrange(1, 4)):
            raw[rng.randrange(len(raw))] = rng.randrange(256)
        try:
            table.release_desc(table.intern(bytes(raw)))
        except ValueError:
            continue
    assert table.desc_bytes(good) == GOOD_DESC
    table.check()


def test_copy_into():
    table = Table(1 << 16)
    key, value = np.arange(3, dtype="u1"), np.arange(2, dtype="<f8")
    payload = key.tobytes() + value.tobytes()
    table.put(1, table.draft(CacheBlock(0, key, value)))
    table.put(2, table.draft(b"hello"))
    out = bytearray(30)
    assert table.copy_into(1, out) == 19
    assert out[:19] == payload
    assert out[19:] == bytes(11)
    assert table.copy_into(2, out) == 5
    assert table.copy_into(9, out) == -1
    assert table.payload_size(1) == 19
    assert table.payload_size(2) == 5
    assert table.payload_size(9) == -1
    target = np.zeros(19, ml_dtypes.float8_e5m2)
    assert table.copy_into(1, target) == 19
    assert target.tobytes() == payload
    hits = table.memory_hits
    out = bytearray(18)
    frozen = np.zeros(30, "u1")
    frozen.flags.writeable = False
    for bad in (out, b"x" * 30, frozen, np.zeros((30, 2), "u1")[:, 0], memoryview(bytearray(60))[::2]):
        with pytest.raises(ValueError):
            table.copy_into(1, bad)
    assert out == bytes(18)
    for bad in (None, 5, np.array([None] * 30), "x"):
        with pytest.raises(TypeError):
            table.copy_into(1, bad)
    assert table.memory_hits == hits
