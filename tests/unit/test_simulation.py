"""The parts of a simulation: a loop with a time of its own, files in memory, an engine whose workers are timers."""

from __future__ import annotations

import asyncio
import errno
import math
import os
import threading
import time
from contextlib import contextmanager

import pytest

from asynckv.backends.files import O_DIRECT
from asynckv.testing import MemoryDisk, MemoryFiles, SimulatedBackend, SimulatedClock, SimulatedLoop
from asynckv.testing.loop import StuckError
from asynckv.testing.tools import PAGE, Ends, aligned, pattern, raises_errno


@contextmanager
def simulated(**options):
    loop = SimulatedLoop(**options)
    try:
        yield loop
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.call_soon(loop.stop)
        loop.run_forever()
        loop.close()


# the loop


def test_time_stands_still_while_something_can_run_and_then_jumps():
    seen = []

    async def sleep(seconds):
        await asyncio.sleep(seconds)
        seen.append((seconds, asyncio.get_running_loop().time()))

    async def main():
        for _ in range(1000):
            await asyncio.sleep(0)
        assert loop.time() == 0.0
        await asyncio.gather(*map(sleep, (3e6, 0.25, 7.0)))

    with simulated() as loop:
        loop.run_until_complete(main())
        assert seen == [(0.25, 0.25), (7.0, 7.0), (3e6, 3e6)]
        assert loop.time() == 3e6
        assert loop.turns > 1000


def test_a_wait_that_nothing_can_end_is_told():
    with simulated() as loop, pytest.raises(StuckError, match="nothing is left"):
        loop.run_until_complete(asyncio.Event().wait())


def test_a_loop_that_turns_for_ever_is_told():
    def again():
        loop.call_soon(again)

    with simulated(turns_max=100) as loop:
        again()
        with pytest.raises(StuckError, match="101 times"):
            loop.run_forever()
        loop.turns = 0


def test_calls_of_other_threads_come_in_order_behind_what_was_ready():
    seen = []

    async def main():
        for name in "cd":
            loop.call_soon_threadsafe(seen.append, name)
        for name in "ab":
            loop.call_soon(seen.append, name)
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    with simulated() as loop:
        loop.run_until_complete(main())
        assert seen == ["a", "b", "c", "d"]
    with pytest.raises(RuntimeError, match="closed"):
        loop.call_soon_threadsafe(seen.append, "late")


def test_no_time_passes_while_a_thread_of_ours_works():
    async def main():
        done = asyncio.Event()

        def work():
            time.sleep(0.02)
            loop.call_soon_threadsafe(done.set)

        threading.Thread(target=work, name="asynckv-test").start()
        async with asyncio.timeout(1e-6):
            await done.wait()

    with simulated() as loop:
        loop.run_until_complete(main())
        assert loop.time() == 0.0


def test_the_clock_is_the_loops():
    with simulated() as loop:
        clock, seen = SimulatedClock(loop), []
        clock.call_later(loop, 5.0, lambda: seen.append(clock.monotonic()))
        clock.call_later(loop, -5.0, lambda: seen.append(clock.monotonic()))
        clock.call_later(loop, 1.0, lambda: seen.append("cancelled")).cancel()
        loop.run_until_complete(asyncio.sleep(10))
        assert seen == [0.0, 5.0]
        assert clock.monotonic() == 10.0


# files in memory


def test_names():
    files = MemoryFiles(MemoryDisk({"b": b"bbb"}))
    for call in (lambda: files.open("a", os.O_RDWR), lambda: files.unlink("a"), lambda: files.rename("a", "c")):
        with pytest.raises(FileNotFoundError):
            call()
    a = files.open("a", os.O_RDWR | os.O_CREAT)
    with raises_errno(errno.EEXIST):
        files.open("b", os.O_RDWR | os.O_CREAT | os.O_EXCL)
    assert files.list() == [("a", 0, 0), ("b", 3, PAGE)]
    assert (files.stat("b"), files.links(a)) == ((3, PAGE), 1)
    files.pwritev(a, [b"new"], 2)
    files.rename("a", "b")
    assert files.disk.content() == {"b": b"\0\0new"}
    assert files.links(a) == 1
    files.open("b", os.O_RDWR | os.O_TRUNC)
    assert files.size(a) == 0
    with pytest.raises(FileNotFoundError):
        files.stat("a")


def test_a_file_without_a_name_lives_while_it_is_open():
    disk = MemoryDisk(capacity=8 * PAGE)
    files, others = MemoryFiles(disk), MemoryFiles(disk)
    fd = files.open("a", os.O_RDWR | os.O_CREAT)
    also = others.open("a", os.O_RDWR)
    files.pwritev(fd, [b"x" * PAGE], 0)
    files.unlink("a")
    unnamed = files.temporary(0)
    files.allocate(unnamed, 2 * PAGE)
    assert (files.list(), disk.used, disk.free) == ([], 3 * PAGE, 5 * PAGE)
    assert files.links(fd) == files.links(unnamed) == 0
    files.close(unnamed)
    files.close(fd)
    assert disk.used == PAGE, "somebody else has it open"
    target = bytearray(PAGE)
    assert others.preadv(also, [target], 0) == PAGE
    assert target == b"x" * PAGE
    others.close(also)
    assert disk.used == 0
    for call in (lambda: files.size(fd), lambda: files.close(fd), lambda: files.fdatasync(fd)):
        with raises_errno(errno.EBADF):
            call()


def test_what_does_not_fit_changes_nothing():
    disk = MemoryDisk({"a": b"a"}, capacity=4 * PAGE)
    files = MemoryFiles(disk)
    fd = files.open("b", os.O_RDWR | os.O_CREAT)
    files.pwritev(fd, [b"b" * PAGE, b"b"], 0)
    assert files.free_bytes() == PAGE
    disk.others = PAGE
    before = disk.content()
    for call in (
        lambda: files.pwritev(fd, [b"x"], 2 * PAGE),
        lambda: files.allocate(fd, 3 * PAGE),
        lambda: files.truncate(fd, 3 * PAGE),
    ):
        with raises_errno(errno.ENOSPC):
            call()
    assert (disk.content(), disk.used) == (before, 3 * PAGE)
    files.pwritev(fd, [b"y" * PAGE], PAGE)
    files.truncate(fd, 1)
    assert (disk.content(), disk.used) == ({"a": b"a", "b": b"b"}, 2 * PAGE)
    disk.others = 100 * PAGE
    assert files.free_bytes() == 0


def test_direct_transfers_have_to_be_aligned():
    files = MemoryFiles(MemoryDisk())
    fd = files.open("a", os.O_RDWR | os.O_CREAT | O_DIRECT)
    files.pwritev(fd, [bytes(512), b"x" * 512], 512)
    for offset, size in ((1, 512), (0, 511), (256, 512)):
        with raises_errno(errno.EINVAL):
            files.pwritev(fd, [bytes(size)], offset)
        with raises_errno(errno.EINVAL):
            files.preadv(fd, [bytearray(size)], offset)
    files.set_direct(fd, False)
    target = bytearray(1000)
    assert files.preadv(fd, [target[:0], target], 1001) == 535, "short at the end of the file"
    assert target.count(b"x") == 512
    assert files.probe_direct() == (True, PAGE, "")
    buffered = MemoryFiles(files.disk, direct=False)
    with raises_errno(errno.EINVAL):
        buffered.open("a", os.O_RDWR | O_DIRECT)
    assert buffered.probe_direct()[0] is False
    assert files.disk.content().keys() == {"a"}


# the engine


def engine(loop, seconds, **options):
    disk = MemoryDisk()
    return disk, SimulatedBackend(files=MemoryFiles(disk), clock=SimulatedClock(loop), seconds=seconds, **options)


def test_operations_take_as_long_as_they_are_told_to():
    data, target = aligned(PAGE, pattern(PAGE)), aligned(PAGE)

    async def main():
        await backend.start("anywhere")
        file = await backend.open("a", create=True)
        started = loop.time()
        writing = backend.write(file, 0, [data])
        assert disk.content()["a"] == pattern(PAGE), "it is in the file when a worker begins"
        assert not writing.done()
        await writing
        assert loop.time() - started == 2.0
        reads = [backend.read(file, 0, target) for _ in range(3)]
        await asyncio.sleep(0.5)
        assert bytes(target) == bytes(PAGE), "a read fills its buffer when it ends"
        assert await asyncio.gather(*reads) == [True] * 3
        assert loop.time() - started == 4.0, "two workers, three reads"
        assert bytes(target) == pattern(PAGE)
        assert await backend.close() == 0

    with simulated() as loop:
        disk, backend = engine(loop, {"read": 1.0, "write": 2.0, "call": 0.0, "sync": 0.0}.__getitem__, readers=2)
        loop.run_until_complete(main())


def test_what_is_late_or_never_ends_keeps_its_buffer():
    seconds = {"read": 3.0, "call": 0.0}
    target = aligned(PAGE)

    async def main():
        await backend.start("anywhere")
        file = await backend.open("a", create=True, size=PAGE)
        ends = Ends()
        with pytest.raises(TimeoutError):
            await backend.read(file, 0, target, released=ends)
        assert (loop.time(), ends.released) == (1.0, 0)
        await ends.wait()
        assert loop.time() == 3.0
        seconds["read"] = math.inf
        never = Ends()
        reading = backend.read(file, 0, target, released=never)
        assert await backend.close() == 1
        with pytest.raises(TimeoutError):
            await reading
        assert never.released == 0

    with simulated() as loop:
        _, backend = engine(loop, seconds.__getitem__, timeout=1.0)
        loop.run_until_complete(main())
