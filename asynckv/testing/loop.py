"""An event loop in which nothing is left to chance: time stands still while something can run, then jumps.

No selector, no signals, no sockets. What other threads have to say arrives at one place, between two turns, after all
of them have ended: so a program that computes the same does the same, turn by turn.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextvars import Context

__all__ = ["SimulatedClock", "SimulatedLoop", "StuckError"]

TURNS_MAX = 1_000_000


class StuckError(AssertionError):
    """Nothing is left that could ever run, or the loop turns for ever."""


class SimulatedLoop(asyncio.BaseEventLoop):
    """An event loop with a time of its own.

    Time moves only when nothing is ready, and then to the next timer at once. Threads of the library (their names begin
    with ``asynckv``) are waited for before each turn.

    Parameters
    ----------
    turns_max
        After so many turns the loop is said to be stuck.

    Attributes
    ----------
    turns
        Turns so far.
    """

    def __init__(self, turns_max: int = TURNS_MAX) -> None:
        super().__init__()
        self._ready: deque[asyncio.Handle]  # these two are the base class's
        self._scheduled: list[asyncio.TimerHandle]
        self._seconds = 0.0
        self._selector = self  # what the base class asks for events
        self._arrived: deque[asyncio.Handle] = deque()
        self._turns_max = turns_max
        self.turns = 0

    def time(self) -> float:
        """Seconds since the loop was made."""
        return self._seconds

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """Call back before the next turn, after all that was ready before."""
        if self.is_closed():
            raise RuntimeError("Event loop is closed")
        handle = asyncio.Handle(callback, args, self, context)
        self._arrived.append(handle)
        return handle

    def select(self, timeout: float | None) -> list[Any]:
        """Let time pass; called by the base class once in each turn."""
        self.turns += 1
        if self.turns > self._turns_max:
            raise StuckError(f"the loop has turned {self.turns} times")
        for thread in threading.enumerate():
            if thread.name.startswith("asynckv") and thread is not threading.current_thread():
                thread.join()
        if self._arrived:
            self._ready.extend(self._arrived)
            self._arrived.clear()
        elif timeout is None:
            raise StuckError("everybody waits, and nothing is left that could end it")
        elif timeout > 0:
            self._seconds = max(self._seconds, self._scheduled[0].when())
        return []

    def _process_events(self, events: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass


class SimulatedClock:
    """The time of a `SimulatedLoop`, as an `asynckv.clock.Clock`."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self.monotonic = loop.time

    def call_later(
        self, loop: asyncio.AbstractEventLoop, delay: float, callback: Callable[[], object]
    ) -> asyncio.TimerHandle:
        """Run a callback after a delay; see `Clock.call_later`."""
        return loop.call_later(max(delay, 0.0), callback)
