"""An engine in simulated time: the ``threads`` engine with lanes that are timers instead of threads.

Deadlines, ownership of buffers, resuming of short transfers and the rules of `close` are the real engine's; what is
simulated is when a worker begins and how long it takes. A write reaches the files when its worker begins, a read fills
its buffer when it ends: in between both are under way, whoever still waits for them.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Any

from asynckv.backends.portable import ThreadsBackend
from asynckv.backends.transfer import Scratch

if TYPE_CHECKING:
    from collections.abc import Callable

    from asynckv.backends.files import Files
    from asynckv.backends.operations import Op
    from asynckv.testing.loop import SimulatedClock

__all__ = ["SimulatedBackend"]


class _Never:
    """Stands for a timer that is not needed."""

    def cancel(self) -> None:
        pass


class _Lane:
    __slots__ = ("free", "waiting")

    def __init__(self, workers: int) -> None:
        self.free = workers
        self.waiting: deque[Op] = deque()


class SimulatedBackend(ThreadsBackend):
    """I/O that takes as long as it is told to.

    Parameters
    ----------
    files
        The raw calls.
    clock
        That of the simulated loop.
    seconds
        How long an operation takes, by its kind: ``"read"``, ``"write"``, ``"sync"``, ``"call"``; infinity is for ever.
    direct, timeout, readers, writers
        As for `ThreadsBackend`.
    watch
        Told of each operation when it was done.
    """

    name = "simulated"

    def __init__(
        self,
        *,
        files: Files,
        clock: SimulatedClock,
        seconds: Callable[[str], float],
        direct: bool | str = "auto",
        timeout: float = 5.0,
        readers: int = 4,
        writers: int = 2,
        watch: Callable[[Op], object] | None = None,
    ) -> None:
        super().__init__(direct=direct, timeout=timeout, clock=clock, files=files, readers=readers, writers=writers)
        self._seconds = seconds
        self._watch = watch
        self._scratch = Scratch()
        self._simulated = {
            kind: _Lane(self._counts[lane])
            for kind, lane in (("read", "read"), ("write", "write"), ("sync", "sync"), ("call", "control"))
        }
        self._counts = dict.fromkeys(self._counts, 0)
        self._breath: Any = _Never()  # nobody has to be let through

    def _dispatch(self, op: Op) -> None:
        lane = self._simulated[op.kind]
        lane.waiting.append(op)
        self._serve(lane)

    def _serve(self, lane: _Lane) -> None:
        while lane.free and lane.waiting:
            op = lane.waiting.popleft()
            if not op.claim:  # given up
                continue
            op.claim.clear()
            if op.future.done() and not op.must_run:  # cancelled before it started
                self.hand_over(op)
                continue
            lane.free -= 1
            if op.kind != "read":
                self._do(op)
            seconds = self._seconds(op.kind)
            if seconds < math.inf:
                self.loop.call_later(seconds, self._end, lane, op)

    def _do(self, op: Op) -> None:
        op.execute(self._scratch)
        if self._watch is not None:
            self._watch(op)

    def _end(self, lane: _Lane, op: Op) -> None:
        if op.kind == "read":
            self._do(op)
        lane.free += 1
        self.hand_over(op)
        self._serve(lane)

    def _start_thread(self, lane: str, number: int) -> None:
        raise AssertionError("a simulated engine has no threads")
