"""The part of the engines' contract about reads whose end is told to a sink instead of a future."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from asynckv.backends.base import ShortTransferError
from asynckv.errors import ClosedError
from asynckv.testing.clock import ManualClock
from asynckv.testing.tools import PAGE, Gate, aligned, pattern, turns

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from asynckv.backends.base import Backend

__all__ = ["Log", "SinkContract"]


class Log:
    """A sink that keeps what it is told, in order: "released", then (result, error)."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self._more = asyncio.Event()

    def on_released(self) -> None:
        """The engine has let go."""
        self.told.append("released")
        self._more.set()

    def on_ended(self, result: bool, error: BaseException | None) -> None:
        """The end."""
        self.told.append((result, error))
        self._more.set()

    async def until(self, count: int) -> None:
        """Wait until it was told so many things, then see that there are no more."""
        async with asyncio.timeout(30):
            while len(self.told) < count:
                self._more.clear()
                await self._more.wait()
        await turns()
        assert len(self.told) == count


class SinkContract:
    """`Backend.read_for` keeps what `Backend.read` promises."""

    def opened(self, directory: Path, **options: Any) -> AbstractAsyncContextManager[Backend]:
        """A started backend, closed with nothing stuck at the end."""
        raise NotImplementedError

    async def test_a_sink_is_told_of_the_release_and_then_of_the_result(self, tmp_path: Path) -> None:
        data = pattern(8 * PAGE)
        (tmp_path / "data").write_bytes(data)
        async with self.opened(tmp_path) as backend:
            file = await backend.open("data")
            logs = [Log() for _ in range(40)]
            buffers = [aligned(PAGE) for _ in logs]
            for at, (log, buffer) in enumerate(zip(logs, buffers, strict=True)):
                verdict = None if at % 3 == 0 else (lambda view, good=at % 3 == 1: good)
                backend.read_for(file, at % 8 * PAGE, buffer, log, verdict)
                assert not log.told, "not before the call returned"
            for at, (log, buffer) in enumerate(zip(logs, buffers, strict=True)):
                await log.until(2)
                assert log.told == ["released", (at % 3 != 2, None)]
                assert buffer == data[at % 8 * PAGE :][:PAGE]
            assert backend.reads_in_flight == 0

    async def test_errors_reach_the_sink(self, tmp_path: Path) -> None:
        (tmp_path / "data").write_bytes(pattern(PAGE))
        async with self.opened(tmp_path) as backend:
            file = await backend.open("data")
            short, broken = Log(), Log()
            backend.read_for(file, PAGE, aligned(PAGE), short, None)
            backend.read_for(file, 0, aligned(PAGE), broken, lambda view: bool(1 / 0))
            for log, kind in ((short, ShortTransferError), (broken, ZeroDivisionError)):
                await log.until(2)
                assert log.told[0] == "released"
                assert log.told[1][0] is False
                assert type(log.told[1][1]) is kind
            await backend.close()
            late = Log()
            backend.read_for(file, 0, aligned(PAGE), late, None)
            await late.until(2)
            assert type(late.told[1][1]) is ClosedError

    async def test_a_read_that_was_given_up_is_only_released(self, tmp_path: Path) -> None:
        (tmp_path / "data").write_bytes(pattern(PAGE))
        async with self.opened(tmp_path) as backend:
            file = await backend.open("data")
            gate, running, unstarted = Gate(), Log(), Log()
            first = backend.read_for(file, 0, aligned(PAGE), running, gate)
            await gate.blocked()
            first.cancel()
            backend.read_for(file, 0, aligned(PAGE), unstarted, None).cancel()
            await turns()
            assert not running.told, "the engine still has its buffer"
            gate.open()
            for log in (running, unstarted):
                await log.until(1)
                assert log.told == ["released"]
            assert backend.reads_in_flight == 0

    async def test_a_deadline_is_told_before_the_release(self, tmp_path: Path) -> None:
        clock = ManualClock()
        (tmp_path / "data").write_bytes(pattern(PAGE))
        async with self.opened(tmp_path, clock=clock, timeout=5.0) as backend:
            file = await backend.open("data")
            gate, log = Gate(), Log()
            backend.read_for(file, 0, aligned(PAGE), log, gate)
            await gate.blocked()
            clock.advance(5.1)
            await log.until(1)
            assert isinstance(log.told[0][1], TimeoutError)
            assert backend.reads_in_flight == 1
            gate.open()
            await log.until(2)
            assert log.told[1] == "released"
            assert backend.reads_in_flight == 0

    async def test_a_sink_that_raises_spoils_nothing(self, tmp_path: Path) -> None:
        class Bad(Log):
            def on_ended(self, result: bool, error: BaseException | None) -> None:
                super().on_ended(result, error)
                raise ZeroDivisionError

        caught: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: caught.append(context["exception"]))
        (tmp_path / "data").write_bytes(pattern(PAGE))
        async with self.opened(tmp_path) as backend:
            file = await backend.open("data")
            logs = [(Bad if at % 2 else Log)() for at in range(8)]
            for log in logs:
                backend.read_for(file, 0, aligned(PAGE), log, None)
            for log in logs:
                await log.until(2)
                assert log.told == ["released", (True, None)]
        assert [type(error) for error in caught] == [ZeroDivisionError] * 4
