"""The operations of the ``threads`` engine, and what a worker does with them."""

from __future__ import annotations

import contextlib
import inspect
import math
from typing import TYPE_CHECKING, Any

from asynckv.backends.transfer import STEPS, Scratch

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
    requests = 1  # that may be stuck
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
        future: Any = None,
    ) -> None:
        self.engine = engine
        self.lane = lane
        self.file = file
        self.released = released
        self.future = engine.loop.create_future() if future is None else future
        self.claim = [True]
        self.deadline = math.inf
        self.result = None
        self.error = None

    def run(self, scratch: Scratch) -> Any:
        """Do it, in a worker."""
        raise NotImplementedError

    def serve(self, scratch: Scratch) -> None:
        """Do a worker's part of it: everything from the claim to the way back to the loop."""
        if self.perform(scratch):
            self.engine.hand_over(self)

    def perform(self, scratch: Scratch) -> bool:
        """Claim and run it, keeping the result or the error; False when it was given up before."""
        try:
            self.claim.pop()
        except IndexError:  # given up on the loop before it started
            return False
        if self.must_run or not self.future.done():
            self.execute(scratch)
        return True

    def execute(self, scratch: Scratch) -> None:
        """Run it, keeping the result or the error."""
        try:
            self.result = self.run(scratch)
        except BaseException as error:
            _clear_frames(error)
            trace = error.__traceback__  # without this frame, which holds the operation and its engine
            self.error = error.with_traceback(trace.tb_next if trace is not None else None)

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
        op.serve(scratch)
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
            code = entry.tb_frame.f_code
            if not code.co_flags & _SUSPENDS or code in STEPS:
                with contextlib.suppress(RuntimeError):  # it is still running: the worker itself
                    entry.tb_frame.clear()
            entry = entry.tb_next
        seen = seen.__cause__ or seen.__context__
