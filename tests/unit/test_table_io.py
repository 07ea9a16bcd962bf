"""Spills, reloads, carry-over, segments that go: who owns the bytes, and what the key reads as."""

import numpy as np
import pytest

from asynckv._core import Table
from asynckv.errors import InternalError

K1 = (1).to_bytes(8, "little")


def one(size=100, capacity=1 << 18, key=1, **options):
    table = Table(capacity, backed=True, **options)
    assert table.put(key, table.draft(b"v" * size))
    return table


def on_disk(table, key, slot=0, offset=4096):
    spill = next(s for s in table.take_dirty(1 << 40, 1 << 20) if s.stored)
    assert table.finish_spill(spill, True, slot, offset, 77)


def evict_all(table):
    size = table.capacity
    room = table.room(size)
    while room.step() == 0:
        pass
    assert room.done
    room.cancel()


def load(table, key):
    room = table.room(table.where(key)[2])
    assert room.step() == 1
    return table.begin_load(key, room)


def test_spill_and_reload():
    table = one(40_000)
    spill = table.take_dirty(1, 10)[0]
    assert (spill.kind, spill.key, spill.stored, spill.desc, spill.sealed_checksum) == (0, K1, 40_000, b"\0", None)
    assert len(spill.view) == 40_960
    assert spill.view.readonly
    saved = bytes(spill.view)
    assert table.state(1) == 1
    assert table.dirty_blocks == 0
    table.check()
    assert table.finish_spill(spill, True, 3, 8192, 77)
    with pytest.raises(InternalError):
        table.finish_spill(spill, True, 3, 8192, 77)
    assert table.segment_live(3) == (1, 40_000)
    evict_all(table)
    assert table.where(1) == (3, 8192, 40_000, 77)
    assert (table.memory_blocks, table.disk_blocks, table.length) == (0, 1, 1)
    assert table.get(1) is None
    loading = load(table, 1)
    assert (loading.slot, loading.offset, loading.checksum, loading.stored) == (3, 8192, 77, 40_000)
    assert table.state(1) == 3
    assert table.where(1) is None
    assert table.is_current(loading)
    assert table.get(1) is None
    assert len(loading.view) == 40_960
    loading.view[:] = saved
    table.check()
    assert table.finish_load(loading, True)
    assert not table.is_current(loading)
    assert bytes(table.block(loading)) == b"v" * 40_000
    assert table.state(1) == 1
    assert table.memory_hits == 0
    evict_all(table)
    assert table.block(loading) is None
    table.check()


def test_small_views_have_the_stored_length():
    table = one(100)
    spill = table.take_dirty(1 << 20, 1)[0]
    assert len(spill.view) == 100
    table.release_spill(spill)
    assert table.dirty_blocks == 1


def test_take_dirty_limits():
    table = Table(1 << 16, backed=True)
    for key in range(10):
        table.put(key, table.draft(b"x" * 64))
    assert table.take_dirty(1 << 20, 0) == []
    spills = table.take_dirty(128, 10)
    assert [s.key[0] for s in spills] == [0, 1]
    spills += table.take_dirty(1, 10)
    assert len(spills) == 3
    for spill in reversed(spills):
        table.finish_spill(spill, False)
    assert [s.key[0] for s in table.take_dirty(1 << 40, 100)] == list(range(10))
    table.check()


@pytest.mark.parametrize("change", ["remove", "replace", "clear"])
def test_a_change_during_the_spill(change):
    table = one()
    spill = table.take_dirty(1 << 20, 1)[0]
    if change == "remove":
        assert table.remove(1) == 2
    elif change == "replace":
        table.put(1, table.draft(b"new"))
    else:
        table.clear()
    assert bytes(spill.view) == b"v" * 100
    assert table.used == 128 + (64 if change == "replace" else 0)
    table.check()
    assert not table.finish_spill(spill, True, 0, 4096, 1)
    assert table.disk_blocks == 0
    assert table.used == (64 if change == "replace" else 0)
    if change == "replace":
        assert bytes(table.get(1)) == b"new"
        assert table.dirty_blocks == 1
    table.check()


def test_an_expired_spill():
    table = one()
    spill = table.take_dirty(1 << 20, 1)[0]
    table.expire_spill(spill)
    assert (table.dirty_blocks, table.quarantined) == (1, 0)
    again = table.take_dirty(1 << 20, 1)[0]
    table.check()
    assert table.finish_spill(again, True, 0, 4096, 1)
    assert not table.put(2, table.draft(b"x" * (1 << 18)))  # the first write still owns the bytes
    table.remove(1)
    assert table.quarantined == 128
    assert table.used == 0
    table.check()
    assert not table.finish_spill(spill, True, 0, 0, 0)
    assert table.quarantined == 0
    table.check()
    assert table.put(2, table.draft(b"x" * (1 << 18)))


def test_a_failed_reload_keeps_the_entry():
    table = one()
    on_disk(table, 1)
    evict_all(table)
    loading = load(table, 1)
    assert not table.finish_load(loading, False)
    assert table.state(1) == 2
    assert table.used == 0
    assert table.block(loading) is None
    table.check()


def test_an_expired_reload():
    table = one()
    on_disk(table, 1)
    evict_all(table)
    loading = load(table, 1)
    table.expire_load(loading)
    assert (table.state(1), table.quarantined, table.used) == (2, 128, 0)
    again = load(table, 1)
    table.check()
    assert not table.finish_load(loading, True)
    assert table.quarantined == 0
    again.view[:] = b"v" * 100
    assert table.finish_load(again, True)
    assert bytes(table.get(1)) == b"v" * 100
    table.check()


@pytest.mark.parametrize("change", ["remove", "replace", "clear", "drop", "segment", "revert"])
def test_a_change_during_the_reload(change):
    table = one()
    on_disk(table, 1)
    evict_all(table)
    loading = load(table, 1)
    if change == "remove":
        table.remove(1)
    elif change == "replace":
        table.put(1, table.draft(b"new"))
    elif change == "clear":
        table.clear()
    elif change == "drop":
        table.drop(loading)
    elif change == "segment":
        assert table.drop_segment(0) == 1
    else:
        assert table.revert_segment(0, 0) == 1
    assert not table.is_current(loading)
    table.check()
    assert not table.finish_load(loading, True)
    assert table.state(1) == (1 if change == "replace" else 0)
    assert table.used == (64 if change == "replace" else 0)
    assert table.dropped_blocks == (1 if change in ("drop", "segment", "revert") else 0)
    table.check()


def test_drop_by_key_and_after_the_load():
    table = one()
    on_disk(table, 1)
    table.drop(1)
    table.drop(1)
    # Damage may have been transient: the record on disk is buried, or a later delete would leave it to come back.
    assert (table.state(1), table.dropped_blocks, table.owed) == (0, 1, 1)
    table.put(1, table.draft(b"v" * 100))
    on_disk(table, 1)
    evict_all(table)
    loading = load(table, 1)
    table.finish_load(loading, False)
    table.put(1, table.draft(b"new"))
    table.drop(loading)
    assert table.state(1) == 1
    table.check()


def test_a_segment_goes():
    table = Table(1 << 16, backed=True)
    for key in range(6):
        table.put(key, table.draft(b"%d" % key * 50))
    for n, spill in enumerate(table.take_dirty(1 << 20, 100)):
        table.finish_spill(spill, True, 0 if n < 5 else 1, n * 64, n)
    view = table.peek(2)
    table.touch(1)
    table.touch(2)
    for key in (3, 4):
        table.drop(key)
    assert table.drop_segment(0, 1) == 1
    assert table.drop_segment(0) == 2
    assert table.drop_segment(0) == 0
    assert (table.dirty_blocks, table.unbacked_blocks, table.unbacked_bytes) == (2, 1, 64)
    assert [table.state(k) for k in range(6)] == [1, 1, 1, 0, 0, 1]
    table.check()
    spills = table.take_dirty(1 << 20, 100)
    assert [s.key[0] for s in spills] == [1, 2]
    assert table.take_dirty(1 << 20, 100) == []
    assert table.requeue_unbacked() == 1
    assert table.requeue_unbacked() == 0
    spills += table.take_dirty(1 << 20, 100)
    assert [s.key[0] for s in spills] == [1, 2, 0]
    for spill in spills:
        table.finish_spill(spill, True, 1, 0, 0)
    assert table.unbacked_blocks == 0
    assert table.segment_live(1)[0] == 4
    table.check()
    del view


def test_unbacked_blocks_are_dropped_for_room():
    table = Table(64, backed=True)
    table.put(1, table.draft(b"x"))
    on_disk(table, 1)
    table.drop_segment(0)
    assert table.put(2, table.draft(b"y"))
    assert (table.state(1), table.dropped_blocks) == (0, 1)
    assert table.take_owed() == [(0, K1)]
    table.check()


def test_revert_from_an_offset():
    table = Table(1 << 16, backed=True)
    for key in range(6):
        table.put(key, table.draft(b"x" * 64))
    for n, spill in enumerate(table.take_dirty(1 << 20, 100)):
        table.finish_spill(spill, True, 0, n * 64, n)
    assert table.revert_segment(0, 3 * 64) == 3
    assert table.dirty_blocks == 3
    assert table.segment_live(0) == (3, 192)
    assert table.dropped_blocks == 0
    table.check()


def test_carry_over():
    table = Table(1 << 16, backed=True)
    for key in range(6):
        table.put(key, table.draft(np.full(5, key)))
    for n, spill in enumerate(table.take_dirty(1 << 20, 100)):
        table.finish_spill(spill, True, 0, n * 64, n)
    evict_all(table)
    for key in (1, 3, 5):
        table.touch(key)
    carries = table.segment_candidates(0, 90)
    assert [(c.key[0], c.slot, c.offset, c.stored, c.checksum) for c in carries] == [
        (1, 0, 64, 40, 1),
        (3, 0, 192, 40, 3),
    ]
    assert carries[0].desc == b"\1\3<i8\1\5"
    assert table.carry_current(carries[0])
    assert table.finish_carry(carries[0], 2, 4096)
    assert not table.carry_current(carries[0])
    assert not table.finish_carry(carries[0], 2, 8192)
    assert table.where(1)[:2] == (2, 4096)
    table.put(3, table.draft(np.full(5, 9)))
    assert not table.finish_carry(carries[1], 2, 8192)
    assert table.segment_live(2) == (1, 40)
    assert table.drop_segment(0) == 4
    assert sorted(table.keys()) == [1, 3]
    table.check()


def test_carry_moves_a_block_that_is_loading():
    table = one()
    on_disk(table, 1)
    evict_all(table)
    table.touch(1)
    carry = table.segment_candidates(0, 1000)[0]
    loading = load(table, 1)
    assert table.finish_carry(carry, 1, 0)
    assert table.is_current(loading)
    loading.view[:] = b"v" * 100
    assert table.finish_load(loading, True)
    assert table.block(loading) is not None
    assert table.segment_live(1) == (1, 100)
    table.check()


def test_ghosts_of_blocks_dropped_while_recovering():
    table = Table(1 << 16, backed=True)
    table.recovering = True
    desc = table.intern(b"\0")
    table.recover_block(0, K1, 0, 0, 10, 1, desc)
    table.drop(1)
    assert table.recover_block(0, K1, 1, 0, 10, 1, desc) == 0
    table.check()
    table.recovering = False
    table.check()


def test_requests_are_numbered():
    table = Table(4096)
    first, second = table.request_begin(), table.request_begin()
    assert first != second
    table.request_end(first)


def test_a_key_put_while_recovering_counts_as_logged():
    table = Table(1 << 16, backed=True)
    table.recovering = True
    table.put(1, table.draft(b"new"))
    assert table.recover_block(0, K1, 0, 4096, 3, 7, table.intern(b"\0")) == 0, "the put is newer"
    table.recovering = False
    assert table.remove(1) == 2, "the older record on disk needs a tombstone"


def test_many_at_once_are_found_as_one_by_one():
    table = one(key=1)
    on_disk(table, 1)
    evict_all(table)
    assert table.state(1) == 2
    assert table.put("two", table.draft(b"w"))
    before = table.memory_hits
    with pytest.raises(TypeError):
        table.get_many(["two", 2.5])
    assert table.memory_hits == before, "all keys are looked at before any is read"
    blocks, absent = table.get_many(["two", 1, b"three", "two"])
    assert absent == [1, 2]
    assert [block if block is None else bytes(block) for block in blocks] == [b"w", None, None, b"w"]
    assert table.memory_hits == before + 2
    assert table.pinned_blocks == 1
    del blocks
    table.check()
    assert table.pinned_blocks == 0
    assert table.get_many([]) == ([], [])
