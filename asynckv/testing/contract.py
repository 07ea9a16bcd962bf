"""The suite that every I/O engine passes, on every event loop.

Subclass `BackendContract` in a test module, give it `make`, and run it with pytest and pytest-asyncio in auto mode::

    class TestThreads(BackendContract):
        def make(self, **options):
            return ThreadsBackend(**options)

`make` gets the keyword arguments ``direct``, ``timeout`` and ``clock`` and returns a backend that is not started.
"""

from __future__ import annotations

import asyncio
import errno
import math
import mmap
import os
import random
import threading
import weakref
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from asynckv.backends.base import ShortTransferError
from asynckv.errors import ClosedError
from asynckv.testing.clock import ManualClock
from asynckv.testing.sinks import SinkContract
from asynckv.testing.tools import PAGE, Ends, Gate, aligned, pattern, raises_errno, threads_gone, turns

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from asynckv.backends.base import Backend

__all__ = ["BackendContract"]


class BackendContract(SinkContract):
    """The promises of `asynckv.backends.base`, one test each."""

    def make(self, **options: Any) -> Backend:
        """Return a new backend, not started."""
        raise NotImplementedError

    @asynccontextmanager
    async def opened(self, directory: Path, **options: Any) -> AsyncIterator[Backend]:
        """A started backend, closed with nothing stuck at the end."""
        options.setdefault("timeout", 30.0)
        backend = self.make(**options)
        await backend.start(directory)
        try:
            yield backend
        finally:
            assert await backend.close() == 0

    # whole transfers

    @pytest.mark.parametrize("direct", [False, "auto"])
    async def test_round_trip(self, tmp_path: Path, direct: Any) -> None:
        async with self.opened(tmp_path, direct=direct) as backend:
            file = await backend.open("data", create=True, size=64 * PAGE)
            data = pattern(16 * PAGE)
            source = aligned(16 * PAGE, data)
            assert await backend.write(file, PAGE, [source[: 3 * PAGE], source[3 * PAGE :]]) is None
            await backend.sync(file)
            target = aligned(16 * PAGE)
            assert await backend.read(file, PAGE, target) is True
            assert target == data
            assert backend.reads_in_flight == backend.writes_in_flight == 0
        assert (tmp_path / "data").read_bytes()[PAGE : 17 * PAGE] == data

    @pytest.mark.parametrize("direct", [False, "auto"])
    @pytest.mark.parametrize(("offset", "size"), [(0, 1), (1, 1), (511, 2), (4095, 4098), (5000, 3_000_001), (12, 0)])
    async def test_reads_of_any_place_and_length(self, tmp_path: Path, direct: Any, offset: int, size: int) -> None:
        data = pattern(1024 * PAGE)
        (tmp_path / "data").write_bytes(data)
        async with self.opened(tmp_path, direct=direct) as backend:
            file = await backend.open("data")
            assert file.size == len(data)
            target = memoryview(bytearray(size + 1))[1:]  # an odd address, too
            assert await backend.read(file, offset, target) is True
            assert target == data[offset : offset + size]

    @pytest.mark.parametrize("direct", [False, "auto"])
    async def test_the_last_unaligned_bytes_of_a_file(self, tmp_path: Path, direct: Any) -> None:
        data = pattern(2 * PAGE + 100)
        (tmp_path / "data").write_bytes(data)
        async with self.opened(tmp_path, direct=direct) as backend:
            file = await backend.open("data")
            target = memoryview(bytearray(200))
            assert await backend.read(file, len(data) - 200, target)
            assert target == data[-200:]

    @pytest.mark.parametrize("direct", [False, "auto"])
    @pytest.mark.parametrize("offset", [0, PAGE, 100 * PAGE])
    async def test_a_read_past_the_end_is_short(self, tmp_path: Path, direct: Any, offset: int) -> None:
        (tmp_path / "data").write_bytes(pattern(PAGE + 100))
        async with self.opened(tmp_path, direct=direct) as backend:
            file = await backend.open("data")
            with pytest.raises(ShortTransferError) as caught:
                await backend.read(file, offset, aligned(2 * PAGE))
            assert caught.value.errno == errno.EIO

    @pytest.mark.parametrize("direct", [False, "auto"])
    async def test_more_pieces_than_one_call_takes(self, tmp_path: Path, direct: Any) -> None:
        data = pattern(2500 * 64)
        size = len(data) // PAGE * PAGE
        pieces = [data[at : min(at + 64, size)] for at in range(0, size, 64)] + [b""]
        async with self.opened(tmp_path, direct=direct) as backend:
            file = await backend.open("data", create=True)
            await backend.write(file, 0, pieces)
            target = aligned(size)
            await backend.read(file, 0, target)
            assert target == data[:size]

    async def test_unaligned_pieces_and_addresses_in_a_direct_write(self, tmp_path: Path) -> None:
        data = pattern(600 * PAGE)
        odd = memoryview(bytearray(b"x" + data))[1:]
        async with self.opened(tmp_path) as backend:
            file = await backend.open("data", create=True)
            await backend.write(file, 0, [odd[:100], odd[100:5000], odd[5000:]])
            await backend.write(file, len(data), [odd])
            if file.direct:
                with pytest.raises(ValueError, match="multiples"):
                    await backend.write(file, 0, [odd[:100]])
        assert (tmp_path / "data").read_bytes() == data + data

    async def test_empty_write(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as backend:
            file = await backend.open("data", create=True)
            await backend.write(file, 0, [])
            await backend.write(file, 0, [b"", b""])
            assert (await backend.stat("data"))[0] == 0

    async def test_many_operations_at_once_in_any_order(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as backend:
            file = await backend.open("data", create=True, size=256 * PAGE)
            pages = [aligned(PAGE, pattern(PAGE, seed)) for seed in range(256)]
            await asyncio.gather(*(backend.write(file, at * PAGE, [page]) for at, page in enumerate(pages)))
            ends = Ends()
            targets = [aligned(PAGE) for _ in pages]
            results = await asyncio.gather(
                *(backend.read(file, at * PAGE, page, released=ends) for at, page in enumerate(targets))
            )
            assert results == [True] * 256
            assert ends.released == 256
            assert targets == pages

    # verify and prepare

    async def test_verify_runs_in_a_worker_and_its_answer_is_the_result(self, tmp_path: Path) -> None:
        (tmp_path / "data").write_bytes(pattern(PAGE))
        async with self.opened(tmp_path) as backend:
            file = await backend.open("data")
            seen: list[Any] = []

            def verify(view: memoryview) -> bool:
                seen.append((threading.get_ident(), bytes(view)))
                return False

            verify.nbytes = math.inf  # type: ignore[attr-defined]
            assert await backend.read(file, 0, aligned(PAGE), verify=verify) is False
            assert seen[0][0] != threading.get_ident()
            assert seen[0][1] == pattern(PAGE)

    async def test_prepare_runs_once_in_a_worker_and_gives_the_result(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as backend:
            file = await backend.open("data", create=True)
            threads: list[int] = []

            def prepare() -> tuple[list[memoryview], str]:
                threads.append(threading.get_ident())
                return [aligned(PAGE, b"p")], "result"

            assert await backend.write(file, 0, prepare) == "result"
            assert len(threads) == 1
            assert threads[0] != threading.get_ident()

    @pytest.mark.parametrize("reason", [KeyError("k"), MemoryError(), StopIteration(), SystemExit(3)])
    async def test_exceptions_of_callables_reach_the_future(self, tmp_path: Path, reason: BaseException) -> None:
        def fail(*_: Any) -> Any:
            raise reason

        wanted = RuntimeError if isinstance(reason, StopIteration) else type(reason)
        async with self.opened(tmp_path) as backend:
            file = await backend.open("data", create=True, size=PAGE)
            if isinstance(reason, Exception):
                with pytest.raises(wanted):
                    await backend.read(file, 0, aligned(PAGE), verify=fail)
                with pytest.raises(wanted):
                    await backend.write(file, 0, fail)
            else:
                future = backend.read(file, 0, aligned(PAGE), verify=fail)
                await asyncio.wait([future])
                assert type(future.exception()) is wanted
            for _ in range(16):  # every worker survived
                assert await backend.read(file, 0, aligned(PAGE))

    async def test_a_kept_exception_keeps_no_buffer(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as backend:
            file = await backend.open("data", create=True)
            memory = mmap.mmap(-1, PAGE)
            view = memoryview(memory)
            future = backend.read(file, 0, view)
            await asyncio.wait([future])
            reason = future.exception()
            assert isinstance(reason, ShortTransferError)
            watch = weakref.ref(view)
            del future, view
            for _ in range(100):
                if watch() is None:
                    break
                await asyncio.sleep(0.002)  # the worker is on its way back to its queue
            assert watch() is None
            memory.close()  # BufferError while anybody holds a part of the view

    # ownership of buffers

    async def test_released_comes_once_on_the_loop_before_the_result(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as backend:
            file = await backend.open("data", create=True, size=PAGE)
            for submit in (
                lambda ends: backend.read(file, 0, aligned(PAGE), released=ends),
                lambda ends: backend.write(file, 0, [aligned(PAGE)], released=ends),
                lambda ends: backend.read(file, 0, aligned(PAGE), released=ends, verify=lambda _: 1 / 0 > 0),
                lambda ends: backend.read(file, 99 * PAGE, aligned(PAGE), released=ends),
            ):
                ends = Ends()
                future = submit(ends)
                assert ends.released == 0
                future.add_done_callback(partial(_note, ends.order))
                await asyncio.wait([future])
                future.exception()
                await turns()
                assert ends.order == ["released", "result"]
                assert ends.thread == threading.get_ident()

    async def test_a_failing_released_spoils_nothing(self, tmp_path: Path) -> None:
        caught: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: caught.append(context["exception"]))
        async with self.opened(tmp_path) as backend:
            file = await backend.open("data", create=True, size=PAGE)
            futures = [backend.read(file, 0, aligned(PAGE), released=lambda: 1 / 0) for _ in range(8)]
            assert await asyncio.gather(*futures) == [True] * 8
        assert [type(error) for error in caught] == [ZeroDivisionError] * 8

    async def test_cancelling_a_running_operation_keeps_its_buffer(self, tmp_path: Path) -> None:
        (tmp_path / "data").write_bytes(pattern(PAGE))
        async with self.opened(tmp_path) as backend:
            file = await backend.open("data")
            gate, ends = Gate(), Ends()
            future = backend.read(file, 0, aligned(PAGE), verify=gate, released=ends)
            await gate.blocked()
            future.cancel()
            await turns()
            assert ends.released == 0
            assert backend.reads_in_flight == 1
            gate.open()
            await ends.wait()
            await turns()
            assert ends.released == 1
            assert backend.reads_in_flight == 0

    async def test_nothing_touches_a_buffer_after_its_release(self, tmp_path: Path) -> None:
        (tmp_path / "data").write_bytes(b"d" * 16 * PAGE)
        chance = random.Random(5)
        async with self.opened(tmp_path) as backend:
            file = await backend.open("data")
            released: dict[int, int] = {}
            buffers = [aligned(4 * PAGE) for _ in range(400)]

            def release(at: int) -> None:
                released[at] = released.get(at, 0) + 1
                buffers[at][:] = b"c" * (4 * PAGE)  # somebody else's data from now on

            reads = []
            for at, buffer in enumerate(buffers):
                offset = chance.randrange(12 * PAGE)
                reads.append(backend.read(file, offset, buffer, released=partial(release, at)))
                if chance.random() < 0.5:
                    chance.choice(reads).cancel()
                if chance.random() < 0.1:
                    await asyncio.sleep(0)
            await asyncio.wait(reads)
            for _ in range(1000):
                if len(released) == len(buffers):
                    break
                await asyncio.sleep(0.002)
            assert released == dict.fromkeys(range(len(buffers)), 1)
            assert all(buffer == b"c" * (4 * PAGE) for buffer in buffers)
            assert backend.reads_in_flight == 0

    async def test_a_cancelled_operation_that_has_not_started_never_runs(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as backend:
            file = await backend.open("data", create=True, size=PAGE)
            gates = [Gate(([b""], None)) for _ in range(64)]
            futures = [backend.write(file, 0, gate) for gate in gates]
            await gates[0].blocked()
            ends, late = Ends(), Gate(([b""], None))
            last = backend.write(file, 0, late, released=ends)
            last.cancel()
            for gate in gates:
                gate.open()
            await asyncio.gather(*futures)
            await ends.wait()
            assert late.calls == 0
            assert ends.released == 1

    # deadlines

    async def test_the_deadline_of_a_running_operation(self, tmp_path: Path) -> None:
        clock = ManualClock()
        (tmp_path / "data").write_bytes(pattern(PAGE))
        async with self.opened(tmp_path, clock=clock, timeout=5.0) as backend:
            file = await backend.open("data")
            gate, ends = Gate(), Ends()
            future = backend.read(file, 0, aligned(PAGE), verify=gate, released=ends)
            await gate.blocked()
            clock.advance(4.9)
            await turns()
            assert not future.done()
            clock.advance(0.2)
            with pytest.raises(TimeoutError):
                await future
            assert ends.released == 0
            assert backend.reads_in_flight == 1
            gate.open()
            await ends.wait()
            await turns()
            assert ends.released == 1
            assert backend.reads_in_flight == 0
            assert await backend.read(file, 0, aligned(PAGE)) is True

    async def test_the_deadline_of_an_operation_that_has_not_started(self, tmp_path: Path) -> None:
        clock = ManualClock()
        async with self.opened(tmp_path, clock=clock, timeout=5.0) as backend:
            file = await backend.open("data", create=True, size=PAGE)
            gates = [Gate(([b""], None)) for _ in range(64)]
            futures = [backend.write(file, 0, gate, timeout=math.inf) for gate in gates]
            await gates[0].blocked()
            ends, late = Ends(), Gate(([b""], None))
            last = backend.write(file, 0, late, released=ends, timeout=1.0)
            clock.advance(1.1)
            with pytest.raises(TimeoutError):
                await last
            assert ends.released == 1  # at once: nobody will ever touch the buffer
            for gate in gates:
                gate.open()
            await asyncio.gather(*futures)
            assert late.calls == 0
            assert ends.released == 1

    async def test_deadlines_of_their_own(self, tmp_path: Path) -> None:
        clock = ManualClock()
        (tmp_path / "data").write_bytes(pattern(PAGE))
        async with self.opened(tmp_path, clock=clock, timeout=5.0) as backend:
            file = await backend.open("data")
            gate = Gate()
            seconds = (7.0, None, 1.0)
            reads = [backend.read(file, 0, aligned(PAGE), verify=gate, timeout=some) for some in seconds]
            passed = []
            for _ in range(8):
                clock.advance(1.0)
                await turns()
                passed.append([future.done() for future in reads])
            assert [row.count(True) for row in passed] == [1, 1, 1, 1, 2, 2, 3, 3]
            for future in reads:
                assert isinstance(future.exception(), TimeoutError)
            gate.open()

    async def test_a_lane_full_of_hung_work_leaves_the_others_alone(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as backend:
            file = await backend.open("data", create=True, size=PAGE)
            gate = Gate(([b""], None))
            writes = [backend.write(file, 0, gate) for _ in range(16)]
            await gate.blocked()
            assert await backend.read(file, 0, aligned(PAGE)) is True
            await backend.sync(file)
            assert [name for name, _, _ in await backend.list()] == ["data"]
            gate.open()
            await asyncio.gather(*writes)

    # the cold calls

    async def test_files_by_name(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as backend:
            with pytest.raises(FileNotFoundError):
                await backend.open("a")
            file = await backend.open("a", create=True, size=8 * PAGE)
            assert file.size == 8 * PAGE
            assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600
            size, allocated = await backend.stat("a")
            assert size == 8 * PAGE <= allocated
            await backend.allocate(file, 16 * PAGE)
            assert file.size == 16 * PAGE
            await backend.settle(file)
            assert file.size == (await backend.stat("a"))[0] == 16 * PAGE
            await backend.truncate(file, 2 * PAGE)
            assert file.size == (await backend.stat("a"))[0] == 2 * PAGE
            await backend.rename("a", "b")
            await backend.sync_directory()
            assert [(name, size) for name, size, _ in await backend.list()] == [("b", 2 * PAGE)]
            assert await backend.read(file, 0, aligned(PAGE)) is True
            await backend.close_file(file)
            assert file.fd == -1
            with raises_errno(errno.EBADF):
                await backend.read(file, 0, aligned(PAGE))
            await backend.unlink("b")
            assert await backend.list() == []
            assert await backend.free_bytes() > 0

    async def test_a_file_without_a_name_touches_no_other(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as backend:
            file = await backend.temporary(4 * PAGE)
            assert file.size == 4 * PAGE
            assert await backend.links(file) == 0
            assert await backend.list() == []
            data, target = aligned(PAGE), aligned(PAGE)
            data[:] = pattern(PAGE)
            await backend.write(file, PAGE, [data])
            await backend.read(file, PAGE, target)
            assert bytes(target) == pattern(PAGE)
            await backend.close_file(file)

    async def test_names_of_a_file_are_counted(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as backend:
            file = await backend.open("a", create=True)
            assert await backend.links(file) == 1
            os.link(tmp_path / "a", tmp_path / "b")
            assert await backend.links(file) == 2
            await backend.unlink("a")
            await backend.unlink("b")
            assert await backend.links(file) == 0

    async def test_settle_changes_nothing(self, tmp_path: Path) -> None:
        (tmp_path / "sparse").touch()
        os.truncate(tmp_path / "sparse", 64 * PAGE)
        async with self.opened(tmp_path) as backend:
            file = await backend.open("sparse")
            await backend.settle(file)
            size, allocated = await backend.stat("sparse")
            assert size == 64 * PAGE
            assert allocated <= 4 * PAGE
            data = aligned(PAGE)
            data[:] = pattern(PAGE)
            await backend.write(file, 0, [data])
            await backend.settle(file)
            await backend.read(file, 0, data)
            assert bytes(data) == pattern(PAGE)

    async def test_whole_files(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as backend:
            for data in (b"", b"one", pattern(3_000_000)):
                await backend.write_file("whole", data)
                assert await backend.read_file("whole", 4_000_000) == data
                assert [name for name, _, _ in await backend.list()] == ["whole"]
            with raises_errno(errno.EFBIG):
                await backend.read_file("whole", 1000)
            with pytest.raises(FileNotFoundError):
                await backend.read_file("none", 10)

    async def test_what_is_no_regular_file_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "target").write_bytes(b"secret")
        (tmp_path / "link").symlink_to(tmp_path / "target")
        (tmp_path / "folder").mkdir()
        os.mkfifo(tmp_path / "pipe")
        async with self.opened(tmp_path) as backend:
            for name in ("link", "folder", "pipe"):
                with raises_errno(errno.ELOOP, errno.EISDIR, errno.EINVAL, errno.ENXIO):
                    await backend.open(name)
                with raises_errno(errno.ELOOP, errno.EISDIR, errno.EINVAL):
                    await backend.read_file(name, 100)
            assert [name for name, _, _ in await backend.list()] == ["target"]

    async def test_unknown_functions_are_a_mistake(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as backend:
            with pytest.raises(ValueError, match="no such"):
                backend.call("format")

    async def test_closing_a_file_waits_for_its_operations(self, tmp_path: Path) -> None:
        (tmp_path / "data").write_bytes(pattern(PAGE))
        async with self.opened(tmp_path) as backend:
            file = await backend.open("data")
            gate = Gate()
            future = backend.read(file, 0, aligned(PAGE), verify=gate)
            await gate.blocked()
            closing = backend.close_file(file)
            await asyncio.sleep(0.02)
            assert file.fd >= 0
            with raises_errno(errno.EBADF):
                await backend.read(file, 0, aligned(PAGE))
            gate.open()
            assert await future is True
            await closing
            assert file.fd == -1

    async def test_cancelling_open_and_close_leaks_no_descriptor(self, tmp_path: Path) -> None:
        (tmp_path / "data").write_bytes(b"")
        async with self.opened(tmp_path) as backend:
            before = len(os.listdir("/proc/self/fd"))
            for attempt in range(50):
                future = backend.open("data", create=True)
                await turns(attempt % 3)
                future.cancel()  # also of a future that has its file already, which nobody takes
            del future
            files = await asyncio.gather(*(backend.open("data") for _ in range(20)))
            for file in files:
                backend.close_file(file).cancel()
            del file, files
            for _ in range(200):
                await backend.list()
                if len(os.listdir("/proc/self/fd")) <= before:
                    break
            assert len(os.listdir("/proc/self/fd")) <= before

    # life

    async def test_close_is_idempotent_and_closes_the_files(self, tmp_path: Path) -> None:
        before = len(os.listdir("/proc/self/fd"))
        backend = self.make(direct="auto", timeout=30.0)
        await backend.start(tmp_path)
        files = [await backend.open(f"data{number}", create=True) for number in range(3)]
        assert set(await asyncio.gather(backend.close(), backend.close())) == {0}
        assert await backend.close() == 0
        assert {file.fd for file in files} == {-1}
        assert len(os.listdir("/proc/self/fd")) <= before
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("asynckv")]

    async def test_close_before_start(self) -> None:
        assert await self.make(direct="auto", timeout=30.0).close() == 0

    async def test_after_close_the_future_says_so(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as backend:
            file = await backend.open("data", create=True)
        for submit, releases in (
            (lambda ends: backend.read(file, 0, aligned(PAGE), released=ends), 1),
            (lambda ends: backend.write(file, 0, [aligned(PAGE)], released=ends), 1),
            (lambda ends: backend.list(), 0),
            (lambda ends: backend.sync(file), 0),
        ):
            ends = Ends()
            with pytest.raises(ClosedError):
                await submit(ends)
            assert ends.released == releases

    async def test_close_waits_for_what_is_in_flight(self, tmp_path: Path) -> None:
        backend = self.make(direct="auto", timeout=30.0)
        await backend.start(tmp_path)
        file = await backend.open("data", create=True, size=64 * PAGE)
        writes = [backend.write(file, at * PAGE, [aligned(PAGE, b"w")]) for at in range(64)]
        assert await backend.close() == 0
        assert all(write.done() and write.exception() is None for write in writes)
        assert (tmp_path / "data").read_bytes() == b"w" * 64 * PAGE

    async def test_close_counts_what_is_stuck(self, tmp_path: Path) -> None:
        clock = ManualClock()
        (tmp_path / "data").write_bytes(pattern(PAGE))
        backend = self.make(direct="auto", timeout=5.0, clock=clock)
        await backend.start(tmp_path)
        file = await backend.open("data")
        gate, ends = Gate(), Ends()
        future = backend.read(file, 0, aligned(PAGE), verify=gate, released=ends)
        await gate.blocked()
        closing = asyncio.ensure_future(backend.close())
        await turns()
        assert not closing.done()
        clock.advance(5.1)
        assert await asyncio.wait_for(closing, 30) == 1
        with pytest.raises(TimeoutError):
            await future
        assert ends.released == 0
        gate.open()
        await ends.wait()
        assert ends.released == 1
        await threads_gone()

    async def test_a_cancelled_close_goes_on(self, tmp_path: Path) -> None:
        (tmp_path / "data").write_bytes(pattern(PAGE))
        backend = self.make(direct="auto", timeout=30.0)
        await backend.start(tmp_path)
        file = await backend.open("data")
        gate = Gate()
        future = backend.read(file, 0, aligned(PAGE), verify=gate)
        await gate.blocked()
        closing = asyncio.ensure_future(backend.close())
        await turns()
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        gate.open()
        assert await backend.close() == 0
        assert await future is True

    async def test_start_needs_a_real_directory(self, tmp_path: Path) -> None:
        (tmp_path / "link").symlink_to(tmp_path)
        (tmp_path / "file").write_bytes(b"")
        for name in ("none", "file", "link"):
            backend = self.make(direct="auto", timeout=30.0)
            with raises_errno(errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                await backend.start(tmp_path / name)
            assert await backend.close() == 0

    async def test_start_takes_a_descriptor(self, tmp_path: Path) -> None:
        descriptor = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
        backend = self.make(direct="auto", timeout=30.0)
        await backend.start(descriptor)
        os.close(descriptor)
        await backend.write_file("name", b"data")
        assert await backend.close() == 0
        assert (tmp_path / "name").read_bytes() == b"data"

    async def test_start_leaves_nothing_behind(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as backend:
            assert await backend.list() == []
            assert backend.name
            assert backend.alignment & (backend.alignment - 1) == 0


def _note(order: list[str], future: asyncio.Future[Any]) -> None:
    order.append("result")
