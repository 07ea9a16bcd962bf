"""Views: read-only, valid whatever happens to the block, released from anywhere."""

import contextlib
import gc
import os
import threading
import weakref

import numpy as np
import pytest

from asynckv._core import CacheBlock, Table


def table_with(block, capacity=1 << 16, **options):
    table = Table(capacity, **options)
    assert table.put(1, table.draft(block))
    return table


def test_views_are_read_only():
    table = table_with(CacheBlock(1, np.arange(4), np.arange(4)))
    block = table.get(1)
    for a in (block.key, block.value, block.key[1:], block.key.view("u1"), block.key.reshape(2, 2)):
        assert not a.flags.writeable
        assert not a.flags.owndata
        with pytest.raises(ValueError):
            a[0] = 1
        with pytest.raises(ValueError):
            a.setflags(write=True)
    table = table_with(b"abc")
    view = table.get(1)
    with pytest.raises(TypeError):
        view[0] = 1
    assert not np.frombuffer(view, "u1").flags.writeable
    with pytest.raises(ValueError):
        np.frombuffer(view, "u1").setflags(write=True)


def test_pins_are_counted_by_block():
    table = table_with(np.arange(4))
    views = [table.get(1) for _ in range(5)]
    assert (table.pinned_blocks, table.pinned_bytes) == (1, 64)
    part = views[0][1:]
    del views
    assert table.pinned_blocks == 1
    del part
    assert (table.pinned_blocks, table.pinned_bytes) == (0, 0)


@pytest.mark.parametrize("what", ["remove", "replace", "clear", "evict"])
def test_bytes_stay(what):
    table = table_with(b"a" * 1000, capacity=1 << 12)
    view = table.get(1)
    if what == "remove":
        table.remove(1)
    elif what == "replace":
        assert table.put(1, table.draft(b"b" * 1000))
        assert bytes(table.get(1)) == b"b" * 1000
    elif what == "clear":
        table.clear()
    for key in range(10, 40):
        table.put(key, table.draft(b"c" * 500))
    assert table.pinned_blocks == 1
    table.check()
    assert bytes(view) == b"a" * 1000
    del view
    assert table.pinned_blocks == 0
    table.check()


def test_bytes_stay_after_close_and_without_the_table():
    table = table_with(b"a" * 1000)
    view = table.get(1)
    table.close()
    assert bytes(view) == b"a" * 1000
    del table
    gc.collect()
    assert bytes(view) == b"a" * 1000


def test_more_pins_than_sixteen_bits():
    table = table_with(b"x")
    views = [table.get(1) for _ in range(70_000)]
    table.check()
    table.remove(1)
    assert table.pinned_blocks == 1
    del views[1:]
    assert table.pinned_blocks == 1
    assert table.used == 64
    table.check()
    assert bytes(views[0]) == b"x"
    del views
    assert table.used == 0
    table.check()


def test_release_on_other_threads():
    table = Table(1 << 20)
    for key in range(1000):
        table.put(key, table.draft(b"x" * 100))
    stop = threading.Event()
    queue = []

    def release():
        while not stop.is_set() or queue:
            with contextlib.suppress(IndexError):
                queue.pop()

    threads = [threading.Thread(target=release) for _ in range(3)]
    for thread in threads:
        thread.start()
    for turn in range(30_000):
        view = table.get(turn % 1000)
        if view is None:
            table.put(turn % 1000, table.draft(b"x" * 100))
        else:
            queue.append(view)
            del view
        if turn % 7 == 0:
            table.remove(turn % 1000)
    stop.set()
    for thread in threads:
        thread.join()
    queue.clear()
    assert table.pinned_blocks == 0
    table.check()


def test_wake_once_per_burst_and_only_while_waiting():
    calls = []
    table = table_with(b"x")
    table.wake = lambda: calls.append(threading.get_ident())
    view = table.get(1)
    del view
    assert calls == []
    assert table.pinned_blocks == 0
    table.waiting = True
    views = [table.get(1) for _ in range(5)]
    del views
    assert len(calls) == 1
    assert table.pinned_blocks == 0
    view = table.get(1)
    thread = threading.Thread(target=views_drop, args=([view],))
    del view
    thread.start()
    thread.join()
    assert len(calls) == 2


def views_drop(views):
    views.clear()


def test_a_failing_wake_harms_nobody():
    table = table_with(b"x")
    table.wake = lambda: 1 / 0
    table.waiting = True
    view = table.get(1)
    del view
    assert table.pinned_blocks == 0


def test_release_inside_garbage_collection():
    class Node:
        pass

    table = table_with(b"x")
    for _ in range(100):
        node = Node()
        node.me, node.view = node, table.get(1)
    del node
    gc.collect()
    assert table.pinned_blocks == 0
    table.check()


def test_a_forked_child_may_drop_views_but_not_call(capfd):
    table = table_with(np.arange(4), capacity=1 << 20)
    view = table.get(1)
    room = table.room(10)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            try:
                table.get(1)
            except RuntimeError:
                code = 0
            table.waiting = True
            table.wake = lambda: os._exit(3)
            del view, room
            table.close()
            del table
            gc.collect()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert view.tolist() == [0, 1, 2, 3]
    assert table.pinned_blocks == 1
    table.check()


def mapped(address):
    with open("/proc/self/maps") as f:
        ranges = [[int(x, 16) for x in line.split()[0].split("-")] for line in f]
    return any(start <= address < end for start, end in ranges)


def test_the_mapping_goes_with_its_last_view():
    table = table_with(np.arange(4), capacity=37 << 20)
    view = table.get(1)[1:]
    address = view.ctypes.data
    spill = table.take_dirty(100, 1)[0]
    window = spill.view
    table.finish_spill(spill, True, 0, 0, 0)
    table.close()
    del table, spill
    gc.collect()
    assert view.tolist() == [1, 2, 3]
    del view
    assert mapped(address)
    del window
    assert not mapped(address)


def test_closing_under_io_leaks_the_mapping():
    table = table_with(b"x", capacity=41 << 20)
    spill = table.take_dirty(100, 1)[0]
    address = np.frombuffer(spill.view, "u1").ctypes.data
    table.close()
    del table, spill
    gc.collect()
    assert mapped(address)


def test_the_table_is_freed():
    class Wake:
        def __call__(self):
            pass

    wake = Wake()
    table = table_with(b"x")
    table.wake = wake
    wake.table = table
    gone = weakref.ref(wake)
    del wake, table
    gc.collect()
    assert gone() is None
