"""The engine on a real ring; what needs a script is in tests/fault/test_fakering.py."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import threading
import time
import warnings
import weakref
from collections import Counter
from contextlib import asynccontextmanager

import pytest
from signalkit import alarms
from storekit import ring_refusal

from asynckv.backends import ShortTransferError
from asynckv.backends.base import File
from asynckv.testing.clock import ManualClock
from asynckv.testing.tools import PAGE, Ends, aligned, pattern, turns

if ring_refusal():
    pytest.skip(f"NO RING HERE ({ring_refusal()}): the engine is NOT checked in this run", allow_module_level=True)

from asynckv import _uring
from asynckv.backends.uring import UringBackend


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
    async with opened(tmp_path) as backend:
        file = await backend.open("data", create=True, size=64 * PAGE)
        with alarms() as seen:
            until = time.monotonic() + 1.0
            while time.monotonic() < until:
                reads = [backend.read(file, at * PAGE, aligned(PAGE)) for at in range(64)]
                assert await asyncio.gather(*reads) == [True] * 64
                await backend.sync(file)
    assert len(seen) > 20


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
        watch = weakref.ref(backend)
        del backend
        for _ in range(1000):
            gc.collect()
            if watch() is None and len(os.listdir("/proc/self/fd")) <= before:
                break
            time.sleep(0.005)  # a worker is on its way back to its queue
    assert watch() is None
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
