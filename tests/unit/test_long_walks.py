"""The table where it is crowded: colliding hashes beyond one piece, and thousands of pinned blocks before a victim."""

from __future__ import annotations

import pytest

from asynckv._core import Table


@pytest.mark.parametrize("mask", [0xFFF, 0xFF00000000000FFF])
def test_a_piece_whose_keys_collide_grows_instead_of_being_split(mask):
    count = 9000
    table = Table(64 * count, hash_mask=mask)
    draft = table.draft(b"")
    for key in range(count):
        assert table.put(key, draft)
    table.check()
    assert table.length == count
    for key in range(0, count, 2):
        assert table.remove(key) == 1
    table.check()
    assert all(table.state(key) == key % 2 for key in range(count))
    table.close()


def room_for(table, draft):
    """Room, and how often it had to be asked again."""
    room = table.room(draft)
    again = 0
    while True:
        step = room.step()
        if step == 1:
            return room, again
        assert step == 0
        again += 1


def test_a_victim_behind_thousands_of_pinned_blocks():
    table = Table(64 * 6000, policy="fifo")
    draft = table.draft(b"")
    for key in range(6000):
        assert table.put(key, draft)
    views = {key: table.peek(key) for key in range(5000)}
    room, again = room_for(table, draft)
    assert again > 0, "the walk over so many pins takes more than one turn"
    table.fill(room, "new", draft)
    assert table.state(5000) == 0
    assert all(table.state(key) == 1 for key in range(5000))
    table.check()
    # Those that are let go of are the oldest again; one that is pinned once more is passed over once more.
    for key in (30, 10, 20):
        del views[key]
    views[30] = table.peek(30)
    table.check()
    for number in range(2):
        room, _ = room_for(table, draft)
        table.fill(room, f"new {number}", draft)
        table.check()
    assert {key for key in range(100) if table.state(key) == 0} == {10, 20}
    assert table.state(30) == 1
    del views[30]
    room, _ = room_for(table, draft)
    table.fill(room, "last", draft)
    assert table.state(30) == 0
    table.check()
    views.clear()
    table.check()
    table.close()


def test_a_large_block_behind_thousands_of_pinned_ones():
    table = Table(64 * 6000, policy="fifo")
    draft = table.draft(b"")
    for key in range(6000):
        assert table.put(key, draft)
    views = [table.peek(key) for key in range(4600)]
    large = table.draft(b"x" * 64 * 900)
    room, _ = room_for(table, large)
    table.fill(room, "large", large)
    assert bytes(table.get("large")) == b"x" * 64 * 900
    assert all(table.state(key) == 1 for key in range(4600))
    del views
    table.check()
    table.close()
