"""Extents: exact fits, alignment, splitting and merging, rooms, accounting."""

import gc
import random

import numpy as np
import pytest

from asynckv._core import Table
from asynckv.errors import InternalError


def put(table, key, size):
    return table.put(key, table.draft(bytes([key % 251]) * size))


def take(table, size):
    room = table.room(size)
    while (state := room.step()) == 0:
        pass
    return room if state == 1 else None


@pytest.mark.parametrize("size", [1, 60, 64, 65, 1000, 4096, 32767, 32768, 40000, 65536, 1 << 20])
@pytest.mark.parametrize("count", [1, 2, 7])
def test_equal_blocks_fit_a_pool_made_for_them(size, count):
    extent = Table(1 << 22).draft(b"x" * size).extent
    table = Table(extent * count, backed=True)
    for turn in range(3):
        for key in range(count):
            assert put(table, key, size)
        table.check()
        assert table.used == table.capacity == extent * count
        assert not put(table, 99, size)
        for key in random.Random(turn).sample(range(count), count):
            table.remove(key)
        assert table.used == 0


def test_holes_of_equal_blocks_are_found_again():
    table = Table(64 * 100, backed=True)
    for key in range(100):
        assert put(table, key, 60)
    for key in range(0, 100, 3):
        table.remove(key)
    for key in range(200, 234):
        assert put(table, key, 64)
    table.check()
    assert table.used == table.capacity


def test_an_exact_hole_is_preferred_to_a_larger_one():
    table = Table(64 * 1000, backed=True)
    for key, size in enumerate([40, 17, 40, 20, 40]):
        put(table, key, size * 64)
    table.remove(1)
    table.remove(3)
    put(table, 10, 17 * 64)
    put(table, 11, 20 * 64)
    table.check()
    assert table.used == 64 * (40 * 3 + 17 + 20)


@pytest.mark.parametrize(
    ("size", "extent"),
    [
        (0, 64),
        (1, 64),
        (64, 64),
        (65, 128),
        (32704, 32704),
        (32767, 32768),
        (32768, 32768),
        (32769, 36864),
        (100_000, 102_400),
    ],
)
def test_accounted_sizes(size, extent):
    table = Table(1 << 20)
    draft = table.draft(b"x" * size)
    assert (draft.stored, draft.payload, draft.extent) == (size, size, extent)
    assert table.put(1, draft)
    assert table.used == extent


def test_large_extents_are_page_aligned_and_their_tail_is_zeroed():
    table = Table(1 << 20)
    table.put(0, table.draft(b"\xff" * 1000_000))
    table.remove(0)
    put(table, 1, 100)
    table.put(2, table.draft(b"\x11" * 40_000))
    spill = table.take_dirty(1 << 30, 10)[1]
    view = np.frombuffer(spill.view, np.uint8)
    assert view.ctypes.data % 4096 == 0
    assert view.size == 40_960
    assert view[:40_000].min() == 0x11
    assert not view[40_000:].any()


def test_an_unaligned_capacity_is_kept_exact():
    table = Table(100_001)
    assert table.capacity == 100_001
    table.check()
    assert put(table, 1, 32768)
    assert put(table, 2, 32768)
    table.check()


@pytest.mark.parametrize("capacity", [1, 63])
def test_a_pool_below_one_granule_holds_nothing(capacity):
    table = Table(capacity)
    draft = table.draft(b"")
    assert not table.fits(draft)
    assert not table.put(1, draft)
    table.check()


@pytest.mark.parametrize("capacity", [0, -1, 1 << 60])
def test_bad_capacity(capacity):
    with pytest.raises(ValueError, match="capacity"):
        Table(capacity)


def test_fits_means_an_empty_pool():
    table = Table(1 << 16)
    assert table.fits(table.draft(b"x" * (1 << 16)))
    assert not table.fits(table.draft(b"x" * ((1 << 16) + 1)))
    with pytest.raises(ValueError, match="larger"):
        table.room((1 << 16) + 1)


def test_oversize_is_refused_before_anything_is_allocated():
    table = Table(1 << 16)
    for size in (2**31, 2**32 - 65536, 2**32, 2**62, 2**63 - 1):
        draft = table.draft(np.broadcast_to(np.uint8(0), (size,)))
        assert draft.stored == size
        assert not table.fits(draft)
        assert not table.put(1, draft)
        with pytest.raises(ValueError):
            table.room(draft)


def test_freed_space_merges_whatever_the_order():
    rng = random.Random(5)
    table = Table(1 << 20, backed=True)
    for _ in range(20):
        keys = []
        while put(table, len(keys), rng.choice([10, 64, 200, 5000, 33_000])):
            keys.append(len(keys))
        rng.shuffle(keys)
        for i, key in enumerate(keys):
            table.remove(key)
            if i % 50 == 0:
                table.check()
        assert table.used == 0
        assert put(table, 0, 1 << 20)
        table.remove(0)


def test_a_cancelled_room_gives_its_space_back():
    table = Table(1 << 16)
    room = take(table, 1 << 16)
    assert room.done
    assert room.bytes == 1 << 16
    assert table.used == 1 << 16
    room.cancel()
    room.cancel()
    assert table.used == 0
    with pytest.raises(InternalError):
        room.step()
    table.check()


def test_a_dropped_room_gives_its_space_back():
    table = Table(1 << 16)
    room = take(table, 1 << 16)
    unused = table.room(10)
    del room, unused
    gc.collect()
    assert table.used == 0
    table.check()


def test_a_room_is_for_one_size_and_one_use():
    table = Table(1 << 16)
    room = take(table, 100)
    with pytest.raises(InternalError):
        table.fill(room, 1, table.draft(b"x" * 500))
    table.fill(room, 1, table.draft(b"x" * 100))
    assert bytes(table.get(1)) == b"x" * 100
    with pytest.raises(InternalError):
        table.fill(room, 1, table.draft(b"x" * 100))
    room.cancel()
    assert table.state(1) == 1
    table.check()


def test_a_failed_fill_leaves_the_room():
    table = Table(1 << 16)
    room = take(table, 100)
    with pytest.raises(TypeError):
        table.fill(room, None, table.draft(b"x" * 100))
    assert room.done
    room.cancel()
    assert table.used == 0


def test_reserve_publish():
    table = Table(1 << 16)
    put(table, 5, 100)
    draft = table.draft_like((4, 5), "<f4")
    room = take(table, draft.stored)
    array = table.reserve(room, draft)
    assert array.shape == (4, 5)
    assert not array.any()
    array[:] = 7
    assert bytes(table.get(5)) == b"\5" * 100
    table.publish(room, 5, draft, 123)
    assert (table.get(5) == 7).all()
    assert not table.get(5).flags.writeable
    assert table.take_dirty(1 << 20, 5)[0].sealed_checksum == 123
    table.check()


def test_reserve_discard_frees_with_the_last_array():
    table = Table(1 << 16)
    draft = table.draft_block(2, (3,), 5, np.float16)
    room = take(table, draft.stored)
    block = table.reserve(room, draft)
    part = block.key[1:]
    room.cancel()
    del block
    assert table.used > 0
    table.check()
    del part
    assert table.used == 0
    table.check()


def test_extent_is_the_stored_bytes():
    table = Table(1 << 16)
    room = take(table, 100)
    table.extent(room)[:] = b"q" * 100
    assert len(table.extent(room)) == 100
    room.cancel()
