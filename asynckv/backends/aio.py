"""The ``aiofiles`` engine: the plain reference, every operation one awaited job of the aiofiles package.

What a careful user of aiofiles would write, and therefore the baseline that the other engines are measured against: a
task for each operation, which awaits a blocking function that `aiofiles.os.wrap` sends to an executor. The functions
are positional (preadv, pwritev). A file object of aiofiles would need two jobs for a read, seek and readinto, and one
open handle for each read in flight; one job is the best that package can do, and a baseline should be.

Ownership of buffers, deadlines, lanes and bounce buffers are those of the ``threads`` engine. The executors are its
lanes, not `ThreadPoolExecutor`: their threads are daemons, so that a system call that never ends cannot hold the
interpreter at exit.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from concurrent.futures import Executor, Future, InvalidStateError
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from aiofiles.os import wrap

from asynckv.backends.portable import ThreadsBackend
from asynckv.backends.transfer import Scratch

if TYPE_CHECKING:
    import os
    from collections.abc import Callable
    from queue import SimpleQueue

    from asynckv.backends.operations import Op

__all__ = ["AiofilesBackend"]

T = TypeVar("T")


class AiofilesBackend(ThreadsBackend):
    """I/O through aiofiles, on a bounded executor of its own. The parameters are those of `ThreadsBackend`."""

    name = "aiofiles"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._executors: dict[int, _LaneExecutor] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, directory: str | os.PathLike[str] | int) -> None:
        """Bind to the running loop and to a directory; see `Backend.start`."""
        loop = asyncio.get_running_loop()
        self._executors = {id(lane): _LaneExecutor(lane, loop) for lane in self._lanes.values()}
        await super().start(directory)

    def _dispatch(self, op: Op) -> None:
        self._let_breathe()
        token = [True]  # popped by the worker when it has ended, or by the loop when it no longer waits for that
        task = self.loop.create_task(self._serve(op, token))
        self._tasks.add(task)
        task.add_done_callback(partial(self._served, op, token))

    async def _end_threads(self, stuck: int) -> None:
        await asyncio.sleep(0)  # tasks that were just made give their jobs to workers that are still there
        await super()._end_threads(stuck)

    async def _serve(self, op: Op, token: list[bool]) -> None:
        if await _attempt(op, token, executor=self._executors[id(op.lane)]):
            self._finish(op)

    def _served(self, op: Op, token: list[bool], task: asyncio.Task[None]) -> None:
        """Take over when somebody cancelled the task, as those do who cancel every task of a loop."""
        self._tasks.discard(task)
        if not task.cancelled():
            task.result()
            return
        try:
            token.pop()
        except IndexError:
            if op in self._in_flight:  # the worker has ended
                self._finish(op)
        else:
            # Perhaps no worker was ever asked. One that has claimed it, or will, hands it over itself.
            op.lane.put(op)


def _run(op: Op, token: list[bool]) -> bool:
    """Do an operation in a worker; False when it was given up before it started."""
    ran = op.perform(_own.scratch)
    try:
        token.pop()
    except IndexError:  # nobody waits any more
        if ran:
            op.engine.hand_over(op)
    return ran


_attempt = wrap(_run)


class _Own(threading.local):
    def __init__(self) -> None:
        self.scratch = Scratch()


_own = _Own()


class _Job:
    """A function that a worker of the lane runs, whoever still waits for it."""

    __slots__ = ("function", "future", "loop")

    def __init__(self, function: Callable[[], Any], future: Future[Any], loop: asyncio.AbstractEventLoop) -> None:
        self.function = function
        self.future = future
        self.loop = loop

    def serve(self, scratch: Scratch) -> None:
        # A cancelled future does not stop the function: `Op.perform` decides what still has to run.
        result = error = None
        try:
            result = self.function()
        except BaseException as reason:
            error = reason
        if self.loop.is_closed():  # nobody can receive it
            return
        with contextlib.suppress(InvalidStateError):
            if error is None:
                self.future.set_result(result)
            else:
                self.future.set_exception(error)


class _LaneExecutor(Executor):
    """Makes an executor of a lane, whose threads the engine starts and ends."""

    def __init__(self, lane: SimpleQueue[Any], loop: asyncio.AbstractEventLoop) -> None:
        self._lane = lane
        self._loop = loop

    def submit(self, function: Callable[..., T], /, *args: Any, **keywords: Any) -> Future[T]:
        """Queue a call."""
        future: Future[T] = Future()
        self._lane.put(_Job(partial(function, *args, **keywords), future, self._loop))
        return future
