"""The ring itself, and the engine on a real one: every corner that needs no script.

Reads of an empty pipe stand for requests that the kernel keeps.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import gc
import os
import signal
import threading
import time
import warnings
import weakref
from collections import Counter
from contextlib import asynccontextmanager

import pytest

from asynckv.backends import ShortTransferError
from asynckv.backends.base import File
from asynckv.testing.clock import ManualClock
from asynckv.testing.tools import PAGE, Ends, aligned, pattern, turns

_uring = pytest.importorskip(
    "asynckv._uring", reason="THE RING IS NOT BUILT: the io_uring engine is NOT checked in this run"
)
try:
    _uring.probe()
except OSError as refusal:
    pytest.skip(f"NO RING HERE ({refusal}): the io_uring engine is NOT checked in this run", allow_module_level=True)

from asynckv.backends.uring import UringBackend  # noqa: E402  (it is only there where the ring is)


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


@asynccontextmanager
async def opened(directory, **options):
    backend = UringBackend(**{"timeout": 30.0, **options})
    await backend.start(directory)
    try:
        yield backend
    finally:
        assert await backend.close() == 0


def descriptors():
    """The open descriptors and what they are."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return found


def rings_open():
    """How many rings there are; libuv may have its own."""
    return sum("io_uring" in name for name in descriptors().values())


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
    hits = Counter()
    old = signal.signal(signal.SIGALRM, lambda *_: hits.update("a"))
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        done = 0
        targets = [bytearray(PAGE) for _ in range(4)]
        until = time.monotonic() + 1.0
        while time.monotonic() < until:
            for at, target in enumerate(targets):
                ring.read(at, fd, target, at * PAGE)
            ring.fsync("s", fd)
            results = drain(ring, 5)
            assert sum(result for _, result in results) == 4 * PAGE
            done += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    assert done > 20
    assert hits["a"] > 20


# the engine


async def test_ten_thousand_operations_over_a_ring_of_four(tmp_path):
    pages = 64
    async with opened(tmp_path, entries=4) as backend:
        file = await backend.open("data", create=True)
        data = pattern(pages * PAGE)
        await backend.write(file, 0, [data])
        targets = [aligned(PAGE) for _ in range(10_000)]
        ends = Ends()
        results = await asyncio.gather(
            *(backend.read(file, at % pages * PAGE, page, released=ends) for at, page in enumerate(targets))
        )
        assert results == [True] * 10_000
        assert ends.released == 10_000
        for at, page in enumerate(targets):
            assert page == data[at % pages * PAGE : (at % pages + 1) * PAGE]
        assert backend.name == "io_uring"


async def test_one_turn_is_one_system_call(tmp_path):
    rings = []

    def factory(entries):
        rings.append(_uring.Ring(entries))
        return rings[-1]

    async with opened(tmp_path, ring_factory=factory, direct=False) as backend:
        file = await backend.open("data", create=True, size=64 * PAGE)
        before = rings[0].enters
        await asyncio.gather(*(backend.read(file, at * PAGE, aligned(PAGE)) for at in range(64)))
        assert rings[0].enters == before + 1


async def test_a_turn_submits_a_bounded_number_of_bytes(tmp_path):
    taken = []


    class Watched:
        def __init__(self, entries):
            self._ring = _uring.Ring(entries)
            self.bytes = 0

        def __getattr__(self, name):
            return getattr(self._ring, name)

        def read(self, tag, fd, buffer, offset):
            self.bytes += len(buffer)
            return self._ring.read(tag, fd, buffer, offset)

        def submit(self):
            taken.append(self.bytes)
            self.bytes = 0
            return self._ring.submit()

    async with opened(tmp_path, ring_factory=Watched, direct=False) as backend:
        file = await backend.open("data", create=True, size=64 << 20)
        target = aligned(16 << 20)
        await asyncio.gather(*(backend.read(file, at << 20, target[at << 20 : (at + 1) << 20]) for at in range(16)))
        await backend.read(file, 0, target)
    assert sum(taken) >= 32 << 20
    assert max(taken) <= 3 << 20


async def test_small_verifies_run_on_the_loop_within_a_budget(tmp_path):
    here = threading.get_ident()
    where = []
    async with opened(tmp_path, inline_bytes=4 * PAGE) as backend:
        file = await backend.open("data", create=True, size=64 * PAGE)
        verify = lambda _: bool(where.append(threading.get_ident())) or True  # noqa: E731
        assert await backend.read(file, 0, aligned(PAGE), verify=verify)
        assert where == [here]
        assert await backend.read(file, 0, aligned(8 * PAGE), verify=verify)
        assert where[1] != here
        where.clear()
        reads = [backend.read(file, at * PAGE, aligned(PAGE), verify=verify) for at in range(32)]
        most = before = 0
        while not all(read.done() for read in reads):
            await asyncio.sleep(0)
            most, before = max(most, len(where) - before), len(where)
        assert len(where) == 32
        assert set(where) == {here}
        assert most <= 8  # two turns of the loop may lie between two of ours


async def test_short_preparations_run_on_the_loop(tmp_path):
    where = []

    def prepare():
        where.append(threading.get_ident())
        return [aligned(PAGE, b"p")], "result"

    async with opened(tmp_path, inline_bytes=PAGE) as backend:
        file = await backend.open("data", create=True)
        assert await backend.write(file, 0, prepare) == "result"
        prepare.nbytes = PAGE
        results = await asyncio.gather(*(backend.write(file, 0, prepare) for _ in range(20)))
        assert results == ["result"] * 20
        assert where[0] != threading.get_ident()
        assert set(where[1:]) == {threading.get_ident()}

        def fail():
            raise KeyError("k")

        fail.nbytes = 0
        with pytest.raises(KeyError):
            await backend.write(file, 0, fail)


async def test_threads_are_started_when_they_are_needed(tmp_path):
    async with opened(tmp_path, readers=3) as backend:
        names = lambda: {thread.name for thread in threading.enumerate() if thread.name.startswith("asynckv")}  # noqa: E731
        before = names()
        file = await backend.open("data", create=True, size=4 << 20)
        await asyncio.gather(*(backend.read(file, 0, aligned(PAGE)) for _ in range(50)))
        await backend.write(file, 0, [aligned(PAGE)])
        await backend.sync(file)
        assert names() == before
        big = [aligned(1 << 20) for _ in range(20)]
        assert all(await asyncio.gather(*(backend.read(file, 0, each, verify=lambda _: True) for each in big)))
        assert len(names() - before) == 3


async def test_more_odd_reads_than_bounce_buffers(tmp_path):
    size = 1 << 20
    data = pattern(2 * size)
    (tmp_path / "data").write_bytes(data)
    async with opened(tmp_path) as backend:
        file = await backend.open("data")
        targets = [memoryview(bytearray(size - 100)) for _ in range(40)]
        reads = [backend.read(file, 3 + at, target) for at, target in enumerate(targets)]
        small = [memoryview(bytearray(77)) for _ in range(300)]
        reads += [backend.read(file, 5 + at, target) for at, target in enumerate(small)]
        reads[7].cancel()
        await asyncio.sleep(0)
        assert backend.bounces.used <= backend.bounces.limit
        done = await asyncio.gather(*reads, return_exceptions=True)
        assert sum(each is True for each in done) == 339
        assert backend.bounces.used == 0
        for at, target in enumerate(targets):
            assert at == 7 or target == data[3 + at : 3 + at + size - 100]
        for at, target in enumerate(small):
            assert target == data[5 + at : 82 + at]


async def test_a_read_only_buffer_is_the_callers_mistake(tmp_path):
    async with opened(tmp_path) as backend:
        file = await backend.open("data", create=True, size=PAGE)
        ends = Ends()
        with pytest.raises(BufferError):
            await backend.read(file, 0, memoryview(bytes(PAGE)), released=ends)
        assert ends.released == 1
        with pytest.raises(TypeError):
            await backend.write(file, 0, ["text"])
        assert await backend.read(file, 0, aligned(PAGE))


async def test_a_short_read_says_how_much_there_was(tmp_path):
    (tmp_path / "data").write_bytes(b"x" * 5000)
    for direct in (False, "auto"):
        async with opened(tmp_path, direct=direct) as backend:
            file = await backend.open("data")
            with pytest.raises(ShortTransferError) as caught:
                await backend.read(file, 0, aligned(2 * PAGE))
            assert (caught.value.transferred, caught.value.wanted) == (5000, 2 * PAGE)


async def test_the_deadline_of_a_request_in_the_kernel(tmp_path, pipe):
    clock = ManualClock()
    async with opened(tmp_path, clock=clock, timeout=5.0) as backend:
        file = File("pipe", os.dup(pipe[0]), direct=False, size=0)
        ends = Ends()
        future = backend.read(file, 0, aligned(PAGE), released=ends)
        await turns()
        clock.advance(5.1)
        with pytest.raises(TimeoutError):
            await future
        await ends.wait()  # a pipe can be cancelled: its buffer comes back
        assert ends.released == 1
        assert backend.reads_in_flight == 0
        assert file.busy == 0


async def test_close_cancels_what_is_in_flight(tmp_path, pipe):
    backend = UringBackend(timeout=0.1)
    await backend.start(tmp_path)
    file = File("pipe", os.dup(pipe[0]), direct=False, size=0)
    ends = Ends()
    futures = [backend.read(file, 0, aligned(PAGE), timeout=60.0, released=ends) for _ in range(8)]
    assert await backend.close() == 0
    assert ends.released == 8
    for future in futures:
        assert isinstance(future.exception(), TimeoutError)


async def test_descriptors_stay_flat_over_many_backends(tmp_path):
    before = None
    for round_ in range(201):
        async with opened(tmp_path) as backend:
            file = await backend.open("data", create=True)
            await backend.write(file, 0, [b"x" * PAGE])
        if round_ == 0:
            before = len(os.listdir("/proc/self/fd"))
    assert len(os.listdir("/proc/self/fd")) == before
    assert not _uring._leaked


def test_no_foreign_descriptor_is_ever_closed(tmp_path):
    """Open and close stores while another thread opens files: none of its descriptors vanishes."""
    stop = threading.Event()
    troubles = []

    def churn():
        while not stop.is_set():
            fds = [os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC) for _ in range(8)]
            time.sleep(0.0005)
            for number in fds:
                try:
                    assert os.readlink(f"/proc/self/fd/{number}") == os.devnull
                    os.close(number)
                except (OSError, AssertionError) as error:
                    troubles.append(error)

    thread = threading.Thread(target=churn)
    thread.start()
    try:

        async def main():
            for _ in range(5):
                async with opened(tmp_path) as backend:
                    file = await backend.open("data", create=True)
                    await backend.write(file, 0, [b"x" * PAGE])

        for _ in range(20):
            asyncio.run(main())
    finally:
        stop.set()
        thread.join()
    assert not troubles


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
async def test_fork_while_the_ring_is_busy(tmp_path):
    async with opened(tmp_path, entries=8) as backend:
        file = await backend.open("data", create=True)
        data = pattern(64 * PAGE)
        await backend.write(file, 0, [data])
        reads = [backend.read(file, at % 64 * PAGE, aligned(PAGE)) for at in range(5_000)]
        await asyncio.sleep(0)
        assert backend.reads_in_flight
        ring, rings = backend._ring, rings_open()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                refused = 0
                for call in (ring.submit, ring.reap, ring.acknowledge, lambda: ring.nop(0), ring.take_back):
                    try:
                        call()
                    except RuntimeError as error:
                        refused += "forked" in str(error)
                inherited = rings_open() >= rings
                mine = _uring.Ring(2)  # one of its own
                mine.nop("n")
                mine.submit()
                own = mine.reap() == [("n", 0)] and mine.close() == 0
                if refused == 5 and ring.closed and ring.close() == 0 and own:
                    code = 2 if inherited else 0
            finally:
                os._exit(code)
        more = [backend.read(file, at % 64 * PAGE, aligned(PAGE)) for at in range(5_000)]
        assert await asyncio.gather(*reads, *more) == [True] * 10_000
        _, status = await asyncio.to_thread(os.waitpid, child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        target = aligned(64 * PAGE)
        assert await backend.read(file, 0, target)
        assert target == data


async def test_signals_during_operations(tmp_path):
    hits = Counter()
    old = signal.signal(signal.SIGALRM, lambda *_: hits.update("a"))
    try:
        async with opened(tmp_path) as backend:
            file = await backend.open("data", create=True, size=64 * PAGE)
            signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
            until = time.monotonic() + 1.0
            while time.monotonic() < until:
                reads = [backend.read(file, at * PAGE, aligned(PAGE)) for at in range(64)]
                assert await asyncio.gather(*reads) == [True] * 64
                await backend.sync(file)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    assert hits["a"] > 20


async def test_callbacks_that_submit(tmp_path):
    """Submitting from `released` and from done callbacks, inside a reap."""
    async with opened(tmp_path, entries=4) as backend:
        file = await backend.open("data", create=True, size=8 * PAGE)
        left = 500
        done = asyncio.get_running_loop().create_future()
        finished = Counter()

        def once_more(*_):
            nonlocal left
            finished["n"] += 1
            if left:
                left -= 1
                backend.read(file, 0, aligned(PAGE), released=once_more)
            elif not backend.reads_in_flight and not done.done():
                done.set_result(None)

        for _ in range(10):
            backend.read(file, 0, aligned(PAGE), released=once_more)
        await asyncio.wait_for(done, 30)
        assert finished["n"] == 510


def test_an_idle_engine_is_collected_with_a_warning(tmp_path):
    async def main():
        backend = UringBackend()
        await backend.start(tmp_path)
        file = await backend.open("data", create=True)
        await backend.sync(file)
        del file
        await turns()
        for timer in (backend._timer, backend._watcher):
            if timer is not None:  # the loop holds the engine until it fires
                timer.cancel()
        watch = weakref.ref(backend)
        with pytest.warns(ResourceWarning, match="never closed"):
            del backend
            for _ in range(100):
                gc.collect()
                if watch() is None:
                    break
                await asyncio.sleep(0.001)
        await turns()

    before = len(os.listdir("/proc/self/fd"))
    asyncio.run(main())
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_loop_that_ends_without_a_close(tmp_path):
    async def main():
        backend = UringBackend()
        await backend.start(tmp_path)
        await backend.open("data", create=True)
        return backend

    before = len(os.listdir("/proc/self/fd"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        backend = asyncio.run(main())
        del backend
        gc.collect()
    for _ in range(200):
        if len(os.listdir("/proc/self/fd")) <= before:
            break
        time.sleep(0.005)
    assert len(os.listdir("/proc/self/fd")) <= before


async def test_registered_files_and_buffers_of_the_engine(tmp_path):
    async with opened(tmp_path, registered_files=True) as backend:
        pool = aligned(16 * PAGE)
        registered = backend.register_buffers([pool])
        for number in range(3):
            file = await backend.open(f"data{number}", create=True)
            pool[:PAGE] = pattern(PAGE, number)
            await backend.write(file, 0, [pool[:PAGE]])
            assert await backend.read(file, 0, pool[PAGE : 2 * PAGE])
            assert pool[:PAGE] == pool[PAGE : 2 * PAGE]
            await backend.close_file(file)  # the number is used again by the next one
        assert registered in (True, False)
