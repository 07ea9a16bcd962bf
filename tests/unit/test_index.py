"""Keys and the index: what is a key, exact comparison, growth, removal, ghosts, recovery."""

import enum
import random

import numpy as np
import pytest

from asynckv._core import Table
from asynckv.errors import ClosedError

GOOD = [
    0,
    5,
    -1,
    2**63 - 1,
    -(2**63),
    b"5",
    "5",
    b"\0",
    b"\5\0\0\0\0\0\0\0",
    b"12345678",
    "12345678",
    b"123456789",
    "123456789",
    b"x" * 32,
    b"x" * 128,
    b"x" * 129,
    b"x" * 1024,
    "é" * 512,
    "x" * 1024,
    b"\0" * 8,
    b"\0" * 9,
]


@pytest.mark.parametrize("mask", [2**64 - 1, 0, 0xF])
def test_kinds_of_keys_are_apart(mask):
    table = Table(1 << 20, hash_mask=mask)
    for i, key in enumerate(GOOD):
        assert table.state(key) == 0
        table.put(key, table.draft(b"%d" % i))
    table.check()
    for i, key in enumerate(GOOD):
        assert bytes(table.get(key)) == b"%d" % i
    assert table.keys() == GOOD
    assert table.length == len(GOOD)
    assert [type(k) for k in list(table.keys())] == [type(k) for k in GOOD]
    for i, key in enumerate(GOOD):
        assert table.remove(key) == 1
        assert table.remove(key) == 0
        assert table.get(key) is None
        assert table.length == len(GOOD) - i - 1
        table.check()


class Five:
    def __index__(self):
        return 5


class Number(enum.IntEnum):
    FIVE = 5


@pytest.mark.parametrize("key", [Five(), np.int64(5), np.uint8(5), Number.FIVE, np.array(5)])
def test_index_keys(key):
    table = Table(4096)
    table.put(5, table.draft(b"v"))
    assert bytes(table.get(key)) == b"v"


@pytest.mark.parametrize(
    "key", [True, False, np.bool_(True), None, 1.0, bytearray(b"x"), memoryview(b"x"), (1,), np.arange(3), object()]
)
def test_type_errors(key):
    table = Table(4096)
    for call in (
        table.get,
        table.peek,
        table.state,
        table.remove,
        table.touch,
        table.check_key,
        table.payload_size,
        lambda k: table.put(k, table.draft(b"")),
        lambda k: table.match_prefix([k]),
    ):
        with pytest.raises(TypeError):
            call(key)
    table.check()


@pytest.mark.parametrize(
    "key", [2**63, -(2**63) - 1, np.uint64(2**63), b"", "", b"S" * 1025, "S" * 1025, "é" * 513, "secret\ud800", 10**400]
)
def test_value_errors_without_the_key(key):
    table = Table(4096)
    with pytest.raises(ValueError) as caught:
        table.get(key)
    assert not isinstance(caught.value, UnicodeError)
    assert "S" not in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(("mask", "count"), [(2**64 - 1, 30_000), (0xFFF, 3000), (0, 700), (0xFFFFF000, 6000)])
def test_growth_and_removal(mask, count):
    rng = random.Random(1)
    table = Table(64 * count, hash_mask=mask)
    draft = table.draft(b"")
    keys = [rng.choice([i, b"key-%d" % i, f"{i:040d}"]) for i in range(count)]
    for key in keys:
        table.put(key, draft)
    table.check()
    rng.shuffle(keys)
    for key in keys[: count // 2]:
        assert table.remove(key) == 1
    table.check()
    assert all(table.state(key) == 0 for key in keys[: count // 2])
    assert all(table.state(key) == 1 for key in keys[count // 2 :])
    for key in keys[: count // 2]:
        table.put(key, draft)
    table.check()
    assert table.length == count


def test_clear_and_use_again():
    table = Table(1 << 20)
    for i in range(3000):
        table.put(i, table.draft(b"x"))
    view = table.get(3)
    assert table.clear() == 3000
    assert table.length == 0
    assert table.keys() == []
    table.check()
    assert bytes(view) == b"x"
    assert table.used == 64
    del view
    assert table.used == 0
    for i in range(3000):
        table.put(i, table.draft(b"y"))
    table.check()


def test_match_prefix_and_disk_readable():
    table = Table(4096)
    desc = table.intern(b"\0")
    for i in range(3):
        table.put(i, table.draft(b"x"))
    for i in range(3, 5):
        table.recover_block(0, i.to_bytes(8, "little"), 0, i * 4096, 10, 9, desc)
    table.release_desc(desc)
    assert table.match_prefix(range(10)) == 5
    assert table.match_prefix([9, 0]) == 0
    assert table.length == 5
    assert table.where(3) == (0, 3 * 4096, 10, 9)
    assert table.where(0) is None
    assert table.payload_size(3) == 10
    assert table.state(3) == 2
    table.disk_readable = False
    assert table.match_prefix(range(10)) == 3
    assert table.length == 3
    assert table.state(3) == 0
    assert table.payload_size(3) == -1
    assert sorted(table.keys()) == [0, 1, 2]
    assert table.where(3) is None
    table.check()


def test_first_sight_is_final():
    table = Table(4096)
    table.recovering = True
    desc = table.intern(b"\0")
    assert table.recover_block(1, b"k", 1, 0, 10, 1, desc) == 1
    assert table.recover_block(1, b"k", 0, 0, 11, 2, desc) == 0
    table.recover_tombstone(1, b"k")
    assert table.where(b"k")[:3] == (1, 0, 10)
    table.recover_tombstone(2, b"gone")
    assert table.recover_block(2, b"gone", 0, 0, 10, 1, desc) == 0
    assert table.state("gone") == 0
    table.put(7, table.draft(b"new"))
    assert table.recover_block(0, (7).to_bytes(8, "little"), 0, 0, 10, 1, desc) == 0
    assert table.remove(7) == 2
    assert table.remove(7) == 2
    assert table.remove(8) == 2
    for key in (7, 8):
        assert table.recover_block(0, key.to_bytes(8, "little"), 0, 0, 10, 1, desc) == 0
    assert table.length == 1
    table.check()
    table.recovering = False
    table.check()
    assert table.remove(8) == 0
    assert table.keys() == [b"k"]
    table.release_desc(desc)


def test_a_put_over_a_ghost():
    table = Table(4096)
    table.recovering = True
    table.recover_tombstone(1, b"k")
    table.put(b"k", table.draft(b"v"))
    table.check()
    table.recovering = False
    assert bytes(table.get(b"k")) == b"v"
    assert table.remove(b"k") == 2  # the tombstone's record says that older ones may exist


def test_clear_while_recovering_lets_nothing_older_in():
    table = Table(4096)
    table.recovering = True
    desc = table.intern(b"\0")
    table.recover_block(1, b"a", 0, 0, 10, 1, desc)
    assert table.clear() == 1
    assert table.recover_block(1, b"b", 0, 0, 10, 1, desc) == 0
    table.recovering = False
    assert table.length == 0
    assert table.recover_block(1, b"b", 0, 0, 10, 1, desc) == 1
    table.check()


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        (0, b"1234567"),
        (3, b"x"),
        (-1, b"x"),
        (1, b""),
        (1, b"x" * 1025),
        (2, b"\xed\xa0\x80"),
        (2, b"\xc0\x80"),
        (2, b"\xff"),
        (2, b"\xe2\x82"),
        (2, b"\xf4\x90\x80\x80"),
    ],
)
def test_hostile_keys_are_ignored(kind, key):
    table = Table(4096)
    table.recovering = True
    assert table.recover_block(kind, key, 0, 0, 10, 1, table.intern(b"\0")) == 0
    table.recover_tombstone(kind, key)
    table.check()
    assert table.keys() == []


def test_a_block_that_disagrees_with_its_descriptor_blocks_older_ones():
    table = Table(4096)
    table.recovering = True
    desc = table.intern(b"\1\3<f2\1\5")
    assert table.recover_block(1, b"k", 3, 0, 11, 1, desc) == 0
    assert table.recover_block(1, b"k", 2, 0, 10, 1, desc) == 0
    assert table.recover_block(1, b"j", 2, 0, 10, 1, desc) == 1
    assert table.state(b"k") == 0
    table.check()


def test_walks_for_snapshots():
    table = Table(4096)
    desc = table.intern(b"\0")
    for i in range(100):
        table.recover_block(1, b"key-number-%d" % i, i % 3, i * 16, 16, i, desc)
    at, found = table.disk_entries(0, 30)
    while True:
        at, more = table.disk_entries(at, 30)
        if not more:
            break
        found += more
    assert {k: (kind, slot, off, n, c, table.desc_bytes(d)) for kind, k, slot, off, n, c, d in found} == {
        b"key-number-%d" % i: (1, i % 3, i * 16, 16, i, b"\0") for i in range(100)
    }
    assert table.segment_live(0) == (34, 34 * 16)
    assert table.segment_live(500) == (0, 0)


def test_calls_after_close():
    table = Table(4096)
    table.put(1, table.draft(b"x"))
    draft = table.draft(b"x")
    table.close()
    table.close()
    for call in (
        lambda: table.get(1),
        lambda: table.put(1, draft),
        lambda: table.room(1),
        table.clear,
        table.keys,
        table.check,
        lambda: table.state(1),
        lambda: table.take_dirty(1, 1),
    ):
        with pytest.raises(ClosedError):
            call()
    assert table.memory_blocks == 1
    assert table.capacity == 4096
