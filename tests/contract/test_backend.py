"""Every engine keeps the promises of `asynckv.backends.base`, alone and inside the test wrappers.

Below the contract: what is particular to the ``threads`` engine, with faults under it.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import threading
import weakref
from contextlib import asynccontextmanager

import pytest
import uvloop
from storekit import ring_refusal

from asynckv.backends import ShortTransferError, ThreadsBackend, create_backend
from asynckv.backends import transfer as transfer_module
from asynckv.backends.aio import AiofilesBackend
from asynckv.backends.files import Files
from asynckv.clock import MonotonicClock
from asynckv.errors import DiskError
from asynckv.testing import (
    FaultyBackend,
    FaultyFiles,
    ManualClock,
    RecordingBackend,
    Script,
    SimulatedBackend,
    corrupt,
    error,
    hang,
    short,
)
from asynckv.testing.contract import BackendContract
from asynckv.testing.fakering import FakeRing
from asynckv.testing.tools import PAGE, Ends, aligned, pattern, turns


class TestThreads(BackendContract):
    def make(self, **options):
        return ThreadsBackend(**options)


class TestThreadsNarrow(BackendContract):
    """One worker in each lane: nothing may depend on a second one."""

    def make(self, **options):
        return ThreadsBackend(readers=1, writers=1, **options)


class TestAiofiles(BackendContract):
    def make(self, **options):
        return AiofilesBackend(**options)


NO_RING = ring_refusal()


class RingContract(BackendContract):
    """The ring; skipped, loudly, where there is none."""

    @pytest.fixture(autouse=True)
    def _ring(self):
        if NO_RING:
            pytest.skip(f"NO RING HERE ({NO_RING}): the io_uring engine is NOT checked in this run")

    def make(self, **options):
        from asynckv.backends.uring import UringBackend

        return UringBackend(**options)


class TestUring(RingContract):
    pass


class TestUringWorkers(RingContract):
    """Nothing is verified or prepared on the loop."""

    def make(self, **options):
        return super().make(inline_bytes=0, readers=1, writers=1, **options)


class TestUringNarrow(RingContract):
    """Two entries, registered files."""

    def make(self, **options):
        return super().make(entries=2, registered_files=True, **options)


class TestUringRefusedLater(RingContract):
    """The ring is refused at its first real use, and everything happens in threads."""

    def make(self, **options):
        backend = super().make(ring_factory=self.refusing, **options)
        return backend

    @staticmethod
    def refusing(entries):
        return FakeRing(entries, script=Script().add("enter", error(errno.EPERM), nth=2, sticky=True))


class TestFakeRing(RingContract):
    def make(self, **options):
        return super().make(ring_factory=FakeRing, **options)


class TestFaultyUring(RingContract):
    def make(self, **options):
        return FaultyBackend(super().make(**options), clock=options.get("clock"))


class TestFaultyWithoutFaults(BackendContract):
    def make(self, **options):
        return FaultyBackend(ThreadsBackend(**options), clock=options.get("clock"))


class TestSimulated(BackendContract):
    """On a real directory and a real loop. Left out is what blocks a worker or asks for its thread: there is none."""

    test_verify_runs_in_a_worker_and_its_answer_is_the_result = None
    test_prepare_runs_once_in_a_worker_and_gives_the_result = None
    test_cancelling_a_running_operation_keeps_its_buffer = None
    test_a_cancelled_operation_that_has_not_started_never_runs = None
    test_the_deadline_of_a_running_operation = None
    test_the_deadline_of_an_operation_that_has_not_started = None
    test_deadlines_of_their_own = None
    test_a_lane_full_of_hung_work_leaves_the_others_alone = None
    test_closing_a_file_waits_for_its_operations = None
    test_close_counts_what_is_stuck = None
    test_a_cancelled_close_goes_on = None
    test_a_read_that_was_given_up_is_only_released = None
    test_a_deadline_is_told_before_the_release = None

    def make(self, *, clock=None, **options):
        clock = MonotonicClock() if clock is None else clock
        return SimulatedBackend(files=Files(), clock=clock, seconds=lambda kind: 1e-4, **options)


class TestRecording(BackendContract):
    def make(self, **options):
        return RecordingBackend(ThreadsBackend(**options))


@asynccontextmanager
async def faulty(directory, **options):
    files = FaultyFiles()
    backend = ThreadsBackend(files=files, **{"timeout": 30.0, **options})
    await backend.start(directory)
    try:
        yield backend, files.script
    finally:
        files.script.clear()
        files.release_all()
        await backend.close()


@pytest.fixture(params=[False, "auto"], ids=["buffered", "direct"])
def direct(request):
    return request.param


async def until_hanging(files, count):
    for _ in range(10_000):
        if files.hanging >= count:
            return
        await asyncio.sleep(0.001)
    raise AssertionError("nothing hangs")


# short transfers


@pytest.mark.parametrize("fraction", [0.0, 0.0001, 0.3, 0.5, 0.99])
async def test_short_transfers_are_resumed(tmp_path, direct, fraction):
    data = pattern(16 * PAGE)
    pieces = [aligned(4 * PAGE, data[at : at + 4 * PAGE]) for at in range(0, len(data), 4 * PAGE)]
    async with faulty(tmp_path, direct=direct) as (backend, script):
        file = await backend.open("data", create=True)
        script.add("pwritev", short(fraction), every=2)
        if fraction:  # nothing at all reads as the end of the file
            script.add("preadv", short(fraction), every=2)
        for _ in range(4):
            await backend.write(file, 0, pieces)
            target = aligned(16 * PAGE)
            assert await backend.read(file, 0, target) is True
            assert target == data
    assert script.injected["pwritev", "short"] >= 1


async def test_a_write_that_never_moves_ends(tmp_path, direct):
    async with faulty(tmp_path, direct=direct) as (backend, script):
        file = await backend.open("data", create=True)
        script.add("pwritev", short(0.0), sticky=True)
        with pytest.raises(OSError, match="progress"):
            await backend.write(file, 0, [aligned(PAGE)])


async def test_resume_is_at_an_aligned_boundary(tmp_path, monkeypatch):
    offsets = []

    class Watched(FaultyFiles):
        def pwritev(self, fd, buffers, offset):
            offsets.append(offset)
            return super().pwritev(fd, buffers, offset)

        def preadv(self, fd, buffers, offset):
            offsets.append(offset)
            return super().preadv(fd, buffers, offset)

    files = Watched()
    backend = ThreadsBackend(files=files)
    await backend.start(tmp_path)
    if backend.direct:
        file = await backend.open("data", create=True)
        files.script.add("pwritev", short(0.7)).add("preadv", short(0.7))
        await backend.write(file, 0, [aligned(3 * PAGE, b"x")])
        assert await backend.read(file, 0, aligned(3 * PAGE))
        assert files.script.injected.total() == 2
        assert not any(offset % backend.alignment for offset in offsets)
    await backend.close()


async def test_calls_stay_below_the_limit_of_the_kernel(tmp_path, direct):
    sizes = []

    class Watched(Files):
        def pwritev(self, fd, buffers, offset):
            assert len(buffers) <= transfer_module.IOV_MAX
            sizes.append(sum(map(len, buffers)))
            return os.pwritev(fd, buffers, offset)

        def preadv(self, fd, buffers, offset):
            sizes.append(sum(map(len, buffers)))
            return os.preadv(fd, buffers, offset)

    backend = ThreadsBackend(files=Watched(), direct=direct)
    await backend.start(tmp_path)
    assert backend.transfers.call_bytes <= 1 << 30
    backend.transfers.call_bytes = 4 * PAGE
    file = await backend.open("data", create=True)
    data = pattern(23 * PAGE)
    await backend.write(file, 0, [aligned(10 * PAGE, data[: 10 * PAGE]), aligned(13 * PAGE, data[10 * PAGE :])])
    target = aligned(23 * PAGE)
    await backend.read(file, 0, target)
    assert target == data
    assert max(sizes) <= 4 * PAGE
    await backend.close()


# errors of the system


@pytest.mark.parametrize("number", [errno.EINTR, errno.EAGAIN])
async def test_transient_errors_are_retried(tmp_path, direct, number):
    data = pattern(4 * PAGE)
    async with faulty(tmp_path, direct=direct) as (backend, script):
        file = await backend.open("data", create=True)
        for nth in (1, 2, 3):
            script.add("pwritev", error(number), nth=nth).add("preadv", error(number), nth=nth)
        await backend.write(file, 0, [aligned(4 * PAGE, data)])
        target = aligned(4 * PAGE)
        assert await backend.read(file, 0, target)
        assert target == data
        assert script.injected.total() == 6


async def test_transient_errors_end(tmp_path, direct):
    async with faulty(tmp_path, direct=direct) as (backend, script):
        file = await backend.open("data", create=True, size=PAGE)
        script.add("preadv", error(errno.EINTR), sticky=True)
        with pytest.raises(InterruptedError):
            await backend.read(file, 0, aligned(PAGE))


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EBADF, errno.ENOMEM, errno.EROFS])
async def test_errors_arrive_with_errno_and_workers_survive(tmp_path, direct, number):
    async with faulty(tmp_path, direct=direct) as (backend, script):
        file = await backend.open("data", create=True, size=PAGE)
        for operation in ("preadv", "pwritev", "fdatasync", "open", "rename", "unlink", "sync_directory", "allocate"):
            script.add(operation, error(number), sticky=True)
        ends = Ends()
        buffer = aligned(PAGE)
        for submit in (
            lambda: backend.read(file, 0, buffer, released=ends),
            lambda: backend.write(file, 0, [buffer], released=ends),
            lambda: backend.sync(file),
            lambda: backend.open("other", create=True),
            lambda: backend.rename("data", "other"),
            lambda: backend.unlink("data"),
            lambda: backend.sync_directory(),
            lambda: backend.allocate(file, PAGE),
        ):
            for _ in range(8):
                with pytest.raises(OSError) as caught:
                    await submit()
                assert caught.value.errno == number
        assert ends.released == 16
        script.clear()
        await backend.write(file, 0, [buffer])
        await backend.sync(file)
        assert await backend.read(file, 0, buffer)
        assert file.direct == backend.direct


async def test_a_failed_sync_is_not_tried_again(tmp_path):
    async with faulty(tmp_path) as (backend, script):
        file = await backend.open("data", create=True)
        script.add("fdatasync", error(errno.EIO))
        with pytest.raises(OSError):
            await backend.sync(file)
        assert script.calls["fdatasync"] == 1


async def test_a_failed_whole_file_leaves_the_old_one(tmp_path):
    async with faulty(tmp_path) as (backend, script):
        await backend.write_file("whole", b"old")
        for operation in ("pwritev", "fsync", "rename"):
            script.add(operation, error(errno.ENOSPC))
            with pytest.raises(OSError):
                await backend.write_file("whole", b"new")
            assert await backend.read_file("whole", 10) == b"old"
            assert [name for name, _, _ in await backend.list()] == ["whole"]


async def test_corruption_is_what_verify_is_for(tmp_path):
    data = pattern(PAGE)
    async with faulty(tmp_path) as (backend, script):
        file = await backend.open("data", create=True)
        await backend.write(file, 0, [aligned(PAGE, data)])
        script.add("preadv", corrupt())
        assert await backend.read(file, 0, aligned(PAGE), verify=lambda view: view == data) is False
        assert await backend.read(file, 0, aligned(PAGE), verify=lambda view: view == data) is True


# direct I/O


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
@pytest.mark.parametrize("kind", ["read", "write"])
async def test_refused_direct_io_falls_back_once_and_warns_once(tmp_path, caplog, number, kind):
    data = pattern(4 * PAGE)
    async with faulty(tmp_path) as (backend, script):
        if not backend.direct:
            pytest.skip("NO DIRECT I/O IN THE TEMPORARY DIRECTORY: the fallback is NOT checked in this run")
        file = await backend.open("data", create=True)
        other = await backend.open("other", create=True, size=4 * PAGE)
        await backend.write(file, 0, [aligned(4 * PAGE, data)])
        # twice: straight and through the bounce buffer; the third try is buffered
        operation = "preadv" if kind == "read" else "pwritev"
        script.add(operation, error(number), nth=1).add(operation, error(number), nth=2)
        target = aligned(4 * PAGE)
        with caplog.at_level(logging.WARNING):
            if kind == "write":
                await backend.write(file, 0, [aligned(4 * PAGE, data)])
            assert await backend.read(file, 0, target)
            assert not backend.direct
            assert not file.direct
            await backend.write(other, 100, [b"odd"])
            assert not other.direct
        assert target == data
        assert len(caplog.records) == 1
        assert (await backend.open("third", create=True)).direct is False


async def test_one_refused_address_is_bounced_without_a_fallback(tmp_path):
    data = pattern(4 * PAGE)
    async with faulty(tmp_path) as (backend, script):
        file = await backend.open("data", create=True)
        was = backend.direct
        script.add("pwritev", error(errno.EINVAL) if was else corrupt(), nth=1 if was else 99)
        await backend.write(file, 0, [aligned(4 * PAGE, data)])
        script.add("preadv", error(errno.EINVAL) if was else corrupt(), nth=1 if was else 99)
        target = aligned(4 * PAGE)
        assert await backend.read(file, 0, target)
        assert target == data
        assert backend.direct is was


async def test_an_error_on_a_buffered_file_stays_an_error(tmp_path):
    async with faulty(tmp_path, direct=False) as (backend, script):
        file = await backend.open("data", create=True, size=PAGE)
        script.add("preadv", error(errno.EINVAL))
        with pytest.raises(OSError) as caught:
            await backend.read(file, 0, aligned(PAGE))
        assert caught.value.errno == errno.EINVAL


async def test_direct_demanded_and_not_possible(tmp_path, monkeypatch):
    class Refusing(FaultyFiles):
        pass

    for wanted in (True, "on"):
        files = Refusing(Script().add("pwritev", error(errno.EINVAL)))
        backend = ThreadsBackend(files=files, direct=wanted)
        with pytest.raises(DiskError) as caught:
            await backend.start(tmp_path)
        assert caught.value.errno == errno.EINVAL
        assert await backend.close() == 0
    backend = ThreadsBackend(files=Refusing(Script().add("pwritev", error(errno.EINVAL))))
    await backend.start(tmp_path)
    assert backend.direct is False
    await backend.close()


async def test_a_full_disk_does_not_stop_the_start(tmp_path):
    backend = ThreadsBackend(files=FaultyFiles(Script().add("pwritev", error(errno.ENOSPC))))
    await backend.start(tmp_path)
    assert await backend.close() == 0


async def test_direct_off(tmp_path):
    for wanted in (False, "off"):
        backend = ThreadsBackend(direct=wanted)
        await backend.start(tmp_path)
        assert backend.direct is False
        assert (await backend.open("data", create=True)).direct is False
        await backend.close()


async def test_memory_file_systems_are_called_buffered():
    if not os.path.isdir("/dev/shm"):
        pytest.skip("NO /dev/shm: the page-cache probe is NOT checked in this run")
    backend = ThreadsBackend()
    await backend.start("/dev/shm")
    assert backend.direct is False
    await backend.close()


@pytest.mark.parametrize("options", [{"direct": "maybe"}, {"timeout": 0}, {"readers": 0}, {"writers": 0}])
def test_bad_options(options):
    with pytest.raises(ValueError):
        ThreadsBackend(**options)


def test_engines_by_name():
    for name in ("threads", "aiofiles", "io_uring", "auto"):
        assert create_backend(name).name == name
    with pytest.raises(ValueError, match="engine"):
        create_backend("steam")


# hung calls


async def test_a_hung_system_call_keeps_its_buffer_and_its_file(tmp_path):
    clock = ManualClock()
    files = FaultyFiles()
    backend = ThreadsBackend(files=files, timeout=5.0, clock=clock, direct=False)
    await backend.start(tmp_path)
    file = await backend.open("data", create=True, size=PAGE)
    files.script.add("preadv", hang())
    ends = Ends()
    future = backend.read(file, 0, aligned(PAGE), released=ends)
    await until_hanging(files, 1)
    clock.advance(5.1)
    with pytest.raises(TimeoutError):
        await future
    closing = backend.close_file(file)
    clock.advance(5.1)
    with pytest.raises(TimeoutError):
        await closing
    assert file.fd >= 0
    assert ends.released == 0
    close = asyncio.ensure_future(backend.close())
    await turns()
    clock.advance(5.1)
    assert await close == 1
    files.release_all()
    await ends.wait()
    await turns()
    assert file.fd == -1
    assert ends.released == 1


async def test_one_timer_serves_all_operations(tmp_path):
    clock = ManualClock()
    async with faulty(tmp_path, clock=clock) as (backend, _):
        file = await backend.open("data", create=True, size=PAGE)
        await asyncio.gather(*(backend.read(file, 0, aligned(PAGE)) for _ in range(100)))
        assert clock.pending == 1
        clock.advance(31.0)  # finds nothing, and is not set again
        assert clock.pending == 0


# life and death


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_completions_after_the_loop_is_closed_are_dropped(tmp_path, new_loop):
    files = FaultyFiles()
    backend = ThreadsBackend(files=files)
    released = []

    async def main(backend):
        await backend.start(tmp_path)
        file = await backend.open("data", create=True, size=PAGE)
        files.script.add("preadv", hang()).add("open", hang())
        backend.read(file, 0, aligned(PAGE), released=lambda: released.append(1))
        backend.open("data")
        await until_hanging(files, 2)

    loop = new_loop()
    loop.run_until_complete(main(backend))
    loop.close()
    files.release_all()
    while files.hanging:
        threading.Event().wait(0.001)
    watch = weakref.ref(backend)
    with pytest.warns(ResourceWarning, match="never closed"):
        del backend
        for _ in range(200):
            gc.collect()
            if watch() is None:
                break
            threading.Event().wait(0.005)
    assert watch() is None
    assert not released


async def test_an_idle_engine_is_collected_with_a_warning(tmp_path):
    backend = ThreadsBackend()
    await backend.start(tmp_path)
    file = await backend.open("data", create=True)
    await backend.sync(file)
    del file
    await turns()
    if backend._timer is not None:  # the loop holds it until it fires
        backend._timer.cancel()
    watch = weakref.ref(backend)
    with pytest.warns(ResourceWarning, match="never closed"):
        del backend
        for _ in range(100):
            gc.collect()
            if watch() is None:
                break
            await asyncio.sleep(0.001)


async def test_start_twice(tmp_path):
    async with faulty(tmp_path) as (backend, _):
        with pytest.raises(RuntimeError):
            await backend.start(tmp_path)


async def test_a_short_read_says_how_much_there_was(tmp_path, direct):
    (tmp_path / "data").write_bytes(b"x" * 5000)
    async with faulty(tmp_path, direct=direct) as (backend, _):
        file = await backend.open("data")
        with pytest.raises(ShortTransferError) as caught:
            await backend.read(file, 0, aligned(2 * PAGE))
        assert (caught.value.transferred, caught.value.wanted) == (5000, 2 * PAGE)


async def test_rounds_of_open_and_close(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        backend = ThreadsBackend()
        await backend.start(tmp_path)
        await backend.open("data", create=True)
        assert await backend.close() == 0
    assert len(os.listdir("/proc/self/fd")) <= before
