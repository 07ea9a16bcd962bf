"""The ring itself, a real one: every corner that needs no script.

Reads of an empty pipe stand for requests that the kernel keeps.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import mmap
import os
import resource
import threading
import time
import weakref

import pytest
from signalkit import alarms
from storekit import little_ring_memory, ring_refusal

from asynckv.testing.tools import PAGE, aligned, pattern

if ring_refusal():
    pytest.skip(f"NO RING HERE ({ring_refusal()}): the engine is NOT checked in this run", allow_module_level=True)

from asynckv import _uring


@pytest.fixture
def ring():
    made = _uring.Ring(4)
    yield made
    made.close(0.2)


@pytest.fixture
def fd(tmp_path):
    number = os.open(tmp_path / "data", os.O_RDWR | os.O_CREAT)
    yield number
    os.close(number)


@pytest.fixture
def pipe():
    ends = os.pipe2(os.O_CLOEXEC)
    yield ends
    for end in ends:
        os.close(end)


def descriptors():
    """The open descriptors and what they are."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return found


def drain(ring, count, seconds=10.0):
    """Submit and reap until so many completions are there."""
    found = []
    until = time.monotonic() + seconds
    while len(found) < count:
        ring.submit()
        ring.acknowledge()
        found += ring.reap()
        if len(found) < count:
            assert time.monotonic() < until, f"{len(found)} of {count}"
            ring.wait_for_one(10_000_000)
    return found


# the ring


def test_write_sync_read(ring, fd):
    data = pattern(3 * PAGE)
    ring.write("w", fd, [data[:PAGE], data[PAGE:]], PAGE)
    assert drain(ring, 1) == [("w", 3 * PAGE)]
    ring.fsync("s", fd)
    ring.fsync("t", fd, datasync=False)
    assert sorted(drain(ring, 2)) == [("s", 0), ("t", 0)]
    target = bytearray(4 * PAGE)
    ring.read("r", fd, target, 0)
    assert drain(ring, 1) == [("r", 4 * PAGE)]
    assert target == bytes(PAGE) + data
    ring.read("end", fd, target, 100 * PAGE)
    ring.read("bad", 9999, target, 0)
    assert sorted(drain(ring, 2)) == [("bad", -errno.EBADF), ("end", 0)]
    assert ring.in_flight == ring.queued == ring.stale == ring.lost == 0
    assert ring.room == ring.capacity


def test_probe():
    found = _uring.probe()
    assert set(_uring.OPCODES.values()) <= found["opcodes"]
    assert found["cq_entries"] == 2 * found["sq_entries"] == 8


def test_the_eventfd_does_not_block_and_is_not_inherited(ring):
    assert os.get_blocking(ring.eventfd) is False
    assert fcntl.fcntl(ring.eventfd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    assert ring.acknowledge() is False  # nothing posted
    ring.nop("n")
    ring.submit()
    assert ring.ready
    assert ring.acknowledge() is True
    assert ring.acknowledge() is False
    assert ring.reap() == [("n", 0)]


def test_the_rings_are_not_mapped_in_children(ring):
    with open("/proc/self/smaps") as maps:
        text = maps.read()
    found = 0
    for part in text.split("anon_inode:[io_uring]")[1:]:
        flags = part.partition("VmFlags:")[2].partition("\n")[0].split()
        assert "dc" in flags, "mapped without MADV_DONTFORK"
        found += 1
    assert found >= 2


def test_a_batch_larger_than_the_ring_goes_in_parts(ring, fd):
    os.truncate(fd, 64 * PAGE)
    targets = [bytearray(PAGE) for _ in range(ring.capacity)]
    for at, target in enumerate(targets):
        ring.read(at, fd, target, at * PAGE)
    assert ring.room == 0
    with pytest.raises(RuntimeError, match="no room"):
        ring.read("more", fd, bytearray(1), 0)
    assert ring.sq_entries < len(targets)
    assert ring.submit() == ring.sq_entries
    assert ring.queued == len(targets) - ring.sq_entries
    assert sorted(tag for tag, _ in drain(ring, len(targets))) == list(range(len(targets)))


def test_there_are_never_more_in_flight_than_the_completion_queue_takes(ring, pipe):
    for number in range(ring.capacity):
        ring.read(number, pipe[0], bytearray(1), 0)
        ring.submit()
    assert ring.in_flight == ring.capacity < ring.cq_entries
    os.write(pipe[1], b"x" * ring.capacity)
    assert len(drain(ring, ring.capacity)) == ring.capacity
    assert ring.lost == ring.backlogs == 0


def test_what_the_kernel_has_not_taken_comes_back(ring, fd):
    tags = [object() for _ in range(ring.capacity)]
    buffers = [bytearray(PAGE) for _ in tags]
    for tag, buffer in zip(tags, buffers, strict=True):
        ring.read(tag, fd, buffer, 0)
    assert ring.take_back() == tags
    assert ring.room == ring.capacity
    assert ring.submit() == 0
    for buffer in buffers:
        buffer.append(0)  # BufferError while somebody holds it
    ring.nop("still works")
    assert drain(ring, 1) == [("still works", 0)]


def test_buffers_and_tags_are_held_until_the_completion(ring, pipe):
    class Tag:
        pass

    buffer, tag = bytearray(8), Tag()
    ring.read(tag, pipe[0], buffer, 0)
    ring.submit()
    with pytest.raises(BufferError):
        buffer.append(0)
    watch = weakref.ref(tag)
    del tag
    gc.collect()
    assert watch() is not None
    os.write(pipe[1], b"12345678")
    ((back, count),) = drain(ring, 1)
    assert (back, count) == (watch(), 8)
    del back
    assert watch() is None
    assert buffer == b"12345678"
    buffer.append(0)


def test_buffers_that_cannot_be_are_refused(ring, fd):
    with pytest.raises(BufferError):
        ring.read("r", fd, b"constant", 0)
    with pytest.raises(BufferError):
        ring.read("r", fd, memoryview(bytearray(10))[::2], 0)
    with pytest.raises(TypeError):
        ring.write("w", fd, [b"x", "text"], 0)
    with pytest.raises(ValueError, match="pieces"):
        ring.write("w", fd, [], 0)
    with pytest.raises(ValueError, match="pieces"):
        ring.write("w", fd, [b"x"] * 1025, 0)
    assert ring.room == ring.capacity
    assert ring.take_back() == []


def test_stale_and_unknown_completions_are_counted_and_ignored(ring, fd, pipe):
    token = ring.read("old", fd, bytearray(1), 0)
    drain(ring, 1)
    waiting = bytearray(1)
    now = ring.read("now", pipe[0], waiting, 0)
    ring.submit()
    assert now & 0xFFFFFFFF == token & 0xFFFFFFFF  # the same slot
    for forged in (token, now + (1 << 32), 77 << 32 | 0, 1 << 32 | 5, 1 << 32 | 500, 2**64 - 2):
        ring.forge(forged)
        ring.submit()
        assert ring.reap() == []
    assert ring.stale == 6
    assert ring.in_flight == 1
    os.write(pipe[1], b"!")
    assert drain(ring, 1) == [("now", 1)]
    ring.forge(now)  # a second completion of the same operation
    ring.submit()
    assert ring.reap() == []
    assert ring.stale == 7


def test_generations_wrap(fd):
    ring = _uring.Ring(2, generation=2**32 - 3)
    seen = set()
    for number in range(20):
        token = ring.nop(number)
        assert token >> 32
        seen.add(token)
        assert drain(ring, 1) == [(number, 0)]
    assert ring.stale == 0
    assert len(seen) == 20
    assert ring.close() == 0


def test_cancelling(ring, pipe):
    buffer = bytearray(1)
    token = ring.read("r", pipe[0], buffer, 0)
    ring.submit()
    assert ring.cancel(token)
    assert drain(ring, 1) == [("r", -errno.ECANCELED)]
    assert ring.cancel(token)  # too late: nothing happens
    ring.submit()
    assert ring.reap() == []
    for number in range(3):
        ring.read(number, pipe[0], bytearray(1), 0)
    ring.submit()
    assert ring.cancel_all()
    assert {result for _, result in drain(ring, 3)} == {-errno.ECANCELED}
    assert ring.stale == 0


def test_close_with_requests_in_flight_gets_them_back(pipe):
    ring = _uring.Ring(4)
    buffers = [bytearray(1) for _ in range(5)]
    for number, buffer in enumerate(buffers):
        ring.read(number, pipe[0], buffer, 0)
    ring.submit()
    assert ring.in_flight == 4
    assert ring.close(5.0) == 0
    assert ring.closed
    for buffer in buffers:
        buffer.append(0)
    assert ring.close() == 0
    for call in (ring.submit, ring.reap, ring.acknowledge, ring.take_back, lambda: ring.nop(0), lambda: ring.ready):
        with pytest.raises(RuntimeError, match="closed"):
            call()


def test_a_ring_that_is_let_go_warns(pipe):
    before = descriptors()
    ring = _uring.Ring(2)
    ring.read("r", pipe[0], bytearray(1), 0)
    ring.submit()
    with pytest.warns(ResourceWarning, match="never closed"):
        del ring
        gc.collect()
    for left in list(_uring._leaked):  # only when the kernel did not give it back at once
        assert left.close(5.0) == 0
    assert descriptors() == before


@pytest.mark.skipif(little_ring_memory(), reason="LITTLE LOCKED MEMORY: many rings are NOT checked in this run")
def test_descriptors_stay_flat():
    _uring.Ring(4).close()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(200):
        ring = _uring.Ring(4)
        ring.nop(0)
        ring.submit()
        assert ring.close() == 0
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("options", [{"entries": 0}, {"entries": 1 << 20}, {"generation": 0}])
def test_bad_ring_options(options):
    with pytest.raises(ValueError):
        _uring.Ring(**options)


def test_a_limit_below_what_the_queue_takes_holds(pipe):
    ring = _uring.Ring(8, limit=2)
    target = bytearray(10)
    ring.read("a", pipe[0], target, 0)
    ring.read("b", pipe[0], target, 0)
    with pytest.raises(RuntimeError, match="no room"):
        ring.read("c", pipe[0], target, 0)
    assert sorted(ring.take_back()) == ["a", "b"]
    ring.close()


def test_another_thread_is_refused_while_one_waits(ring):
    def refused():
        try:
            ring.take_back()
        except RuntimeError as error:
            return "one thread" in str(error)
        return False

    waiting = threading.Thread(target=ring.wait_for_one, args=(300_000_000,))
    waiting.start()
    until = time.monotonic() + 10
    while not refused():
        assert time.monotonic() < until
    waiting.join()
    ring.nop("x")
    assert drain(ring, 1) == [("x", 0)]


def test_transfers_beyond_what_one_call_moves_are_refused(ring, fd):
    huge = mmap.mmap(-1, 1 << 31)  # never touched
    with pytest.raises(ValueError, match="one read moves at most"):
        ring.read("r", fd, huge, 0)
    with pytest.raises(ValueError, match="one write moves at most"):
        ring.write("w", fd, [huge, huge], 0)
    assert ring.in_flight == ring.queued == 0
    huge.close()  # no buffer of it is held


@pytest.mark.parametrize(("left", "what"), [(0, "io_uring_setup"), (1, "eventfd")])
def test_without_its_descriptors_there_is_no_ring(left, what):
    before = descriptors()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = next(number for number in range(soft) if number not in before)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + left, hard))
    try:
        with pytest.raises(OSError, match=what) as caught:
            _uring.Ring(4)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert caught.value.errno == errno.EMFILE
    assert descriptors() == before


def test_what_cannot_be_registered_is_left_as_it_is(ring, fd):
    assert not ring.register_files(1 << 30 >> 2), "more places than a process may have files"
    assert not ring.fix_file(fd)
    assert not ring.register_buffers([])
    assert not ring.register_buffers([mmap.mmap(-1, (1 << 30) + PAGE)]), "the kernel takes 1 GiB at most"
    assert ring.register_buffers([aligned(PAGE)])
    assert not ring.register_buffers([aligned(PAGE)]), "once is enough"
    ring.read("r", fd, bytearray(PAGE), 0)
    assert drain(ring, 1) == [("r", 0)]


def test_there_is_room_for_a_few_requests_without_a_slot(ring):
    """Of the real kind are cancellations; the completion queue has places kept for them."""
    asked = [ring.cancel(number) for number in range(10)]
    assert any(asked)
    assert not all(asked)
    assert not ring.cancel_all()
    assert not ring.forge(1)
    ring.take_back()
    ring.nop("x")
    assert drain(ring, 1) == [("x", 0)]


def test_registered_buffers_and_files(ring, fd, tmp_path):
    data = pattern(4 * PAGE)
    os.pwrite(fd, data, 0)
    region = aligned(8 * PAGE)
    if not ring.register_buffers([region]):
        pytest.skip("THE KERNEL REGISTERS NO BUFFERS (memlock?): this is NOT checked in this run")
    assert ring.register_buffers([region]) is False  # once
    assert ring.register_files(2)
    assert ring.fix_file(fd)
    assert ring.fix_file(fd)
    ring.read("inside", fd, region[: 2 * PAGE], 0)
    outside = bytearray(2 * PAGE)
    ring.read("outside", fd, outside, 0)
    assert sorted(drain(ring, 2)) == [("inside", 2 * PAGE), ("outside", 2 * PAGE)]
    assert region[: 2 * PAGE] == outside == data[: 2 * PAGE]
    region[4 * PAGE :] = bytes(reversed(data))
    ring.write("one", fd, [region[4 * PAGE :]], 0)
    assert drain(ring, 1) == [("one", 4 * PAGE)]
    ring.fsync("sync", fd)
    assert drain(ring, 1) == [("sync", 0)]
    assert (tmp_path / "data").read_bytes() == bytes(reversed(data))
    more = [os.open(tmp_path / "data", os.O_RDONLY) for _ in range(2)]
    assert ring.fix_file(more[0])
    assert not ring.fix_file(more[1])  # two places
    ring.unfix_file(fd)
    assert ring.fix_file(more[1])
    ring.read("again", fd, outside, 0)  # no longer registered, works as before
    assert drain(ring, 1) == [("again", 2 * PAGE)]
    for each in more:
        ring.unfix_file(each)
        os.close(each)


def test_a_signal_every_millisecond(ring, fd):
    os.truncate(fd, 16 * PAGE)
    done = 0
    with alarms() as seen:
        targets = [bytearray(PAGE) for _ in range(4)]
        until = time.monotonic() + 1.0
        while time.monotonic() < until:
            for at, target in enumerate(targets):
                ring.read(at, fd, target, at * PAGE)
            ring.fsync("s", fd)
            results = drain(ring, 5)
            assert sum(result for _, result in results) == 4 * PAGE
            done += 1
    assert done > 20
    assert len(seen) > 20
