"""The operations of the ``threads`` engine, and what a worker does with them."""

from __future__ import annotations

import contextlib
import inspect
import math
from typing import TYPE_CHECKING, Any

from asynckv.backends.transfer import Scratch

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable
    from queue import SimpleQueue

    from asynckv.backends.base import File, Prepare
    from asynckv.backends.portable import ThreadsBackend

__all__ = ["Call", "Close", "Op", "Open", "Read", "Stop", "Sync", "Write", "work"]

_SUSPENDS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


class Op:
    """One operation. Subclasses say what a worker runs."""

    __slots__ = (
        "__weakref__", "claim", "deadline", "engine", "error", "file", "future", "lane", "released", "result",
    )  # fmt: skip
    must_run = False  # even when nobody waits any more
    kind = ""
    file: Any
    future: asyncio.Future[Any]
    result: Any
    error: BaseException | None

    def __init__(
        self,
        engine: ThreadsBackend,
        lane: SimpleQueue[Any],
        file: Any,
        released: Callable[[], object] | None,
    ) -> None:
        self.engine = engine
        self.lane = lane
        self.file = file
        self.released = released
        self.future = engine.loop.create_future()
        self.claim = [True]
        self.deadline = math.inf
        self.result = None
        self.error = None

    def run(self, scratch: Scratch) -> Any:
        """Do it, in a worker."""
        raise NotImplementedError

    def forget(self) -> None:
        """Let go of buffers and callables: a traceback may keep the operation itself alive."""
        self.released = None
        self.result = None
        self.error = None

    def discard(self) -> None:
        """The result reaches nobody."""


class Read(Op):
    """Fill a buffer and verify it."""

    __slots__ = ("buffer", "offset", "verify")
    kind = "read"
    file: File
    offset: int
    buffer: memoryview | None
    verify: Callable[[memoryview], bool] | None

    def run(self, scratch: Scratch) -> bool:
        buffer = self.buffer
        assert buffer is not None
        self.engine.transfers.read(self.file, self.offset, buffer, scratch)
        return True if self.verify is None else self.verify(buffer)

    def forget(self) -> None:
        super().forget()
        self.buffer = self.verify = None


class Write(Op):
    """Prepare pieces and write them."""

    __slots__ = ("offset", "prepare")
    kind = "write"
    file: File
    offset: int
    prepare: Prepare | None

    def run(self, scratch: Scratch) -> Any:
        prepare = self.prepare
        assert prepare is not None
        pieces, result = prepare() if callable(prepare) else (prepare, None)
        self.engine.transfers.write(self.file, self.offset, pieces, scratch)
        return result

    def forget(self) -> None:
        super().forget()
        self.prepare = None


class Sync(Op):
    """Make a file durable."""

    __slots__ = ()
    kind = "sync"
    file: File

    def run(self, scratch: Scratch) -> None:
        self.engine.transfers.sync(self.file)


class Call(Op):
    """A cold file function."""

    __slots__ = ("args", "function")
    kind = "call"
    function: Callable[..., Any]
    args: tuple[Any, ...]

    def run(self, scratch: Scratch) -> Any:
        return self.function(*self.args)

    def forget(self) -> None:
        super().forget()
        self.args = ()


class Close(Call):
    """The close of a file, which happens whoever waits."""

    __slots__ = ()
    must_run = True


class Open(Call):
    """The open of a file, whose result must not get lost."""

    __slots__ = ()

    def discard(self) -> None:
        if self.result is not None:
            self.engine.drop_file(self.result)


class Stop:
    """Ends the worker that takes it."""

    __slots__ = ("engine",)

    def __init__(self, engine: ThreadsBackend) -> None:
        self.engine = engine


def work(lane: SimpleQueue[Any]) -> None:
    """A worker thread: runs what its lane gives it, and survives everything that goes wrong in it."""
    scratch = Scratch()
    while True:
        op = lane.get()
        if type(op) is Stop:
            op.engine.thread_ended()
            return
        if op is None:
            return
        try:
            op.claim.pop()
        except IndexError:  # given up on the loop before it started
            del op
            continue
        if op.must_run or not op.future.done():
            try:
                op.result = op.run(scratch)
            except BaseException as error:
                _clear_frames(error)
                op.error = error
        op.engine.hand_over(op)
        del op  # an idle worker keeps nothing alive


def _clear_frames(error: BaseException) -> None:
    """Drop the locals of the functions an error went through: they hold buffers of the pool.

    Not `traceback.clear_frames`: an error raised a second time still has its first traceback, and clearing the frame of
    a suspended coroutine closes that coroutine.
    """
    seen: BaseException | None = error
    for _ in range(8):
        if seen is None:
            return
        entry = seen.__traceback__
        while entry is not None:
            if not entry.tb_frame.f_code.co_flags & _SUSPENDS:
                with contextlib.suppress(RuntimeError):  # it is still running: the worker itself
                    entry.tb_frame.clear()
            entry = entry.tb_next
        seen = seen.__cause__ or seen.__context__
