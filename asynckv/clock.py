"""Where time comes from: a protocol, and the clock of real runs.

Every deadline and delay of asynckv is measured and scheduled through a `Clock` that is passed in, so that tests move
time by hand (`asynckv.testing.ManualClock`) and never sleep.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

__all__ = ["Clock", "MonotonicClock", "Stalls", "TimerHandle"]

STALL_SECONDS = 0.1  # late by more than a busy loop's timers are


class TimerHandle(Protocol):
    """A scheduled callback that can be called off."""

    def cancel(self) -> None:
        """Call the timer off; nothing happens when it already fired or was cancelled."""


@runtime_checkable
class Clock(Protocol):
    """Seconds that never run backwards, and timers measured in them."""

    def monotonic(self) -> float:
        """Seconds since an unspecified point; callable from any thread."""
        ...

    def call_later(self, loop: asyncio.AbstractEventLoop, delay: float, callback: Callable[[], object]) -> TimerHandle:
        """Run a callback on an event loop after a delay.

        Parameters
        ----------
        loop
            The running loop of the calling thread.
        delay
            Seconds; zero or less means the next turn of the loop.
        callback
            Called without arguments, never before this call has returned.

        Returns
        -------
        TimerHandle
            Its ``cancel()`` calls the timer off.
        """
        ...


class MonotonicClock:
    """The clock of real runs: `time.monotonic` and the loop's own timers."""

    monotonic = staticmethod(time.monotonic)

    def call_later(self, loop: asyncio.AbstractEventLoop, delay: float, callback: Callable[[], object]) -> TimerHandle:
        """Run a callback on an event loop after a delay; see `Clock.call_later`."""
        return loop.call_later(max(delay, 0.0), callback)


class Stalls:
    """Tells a timer of deadlines that the loop stood still: what ended meanwhile has not been heard of.

    A call that blocks the loop, a process that was stopped or a machine that was asleep must not look like a sick disk.
    Such a timer waits once more, as long as the loop stood still, before it believes what it sees. The loop's own time
    tells, so it is no matter of the clock that the deadlines are measured on.
    """

    __slots__ = ("_due", "_loop", "_waited")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._due = math.inf
        self._waited = False

    def armed(self, delay: float) -> None:
        """Note that the timer was set."""
        self._due = self._loop.time() + max(delay, 0.0)

    def grace(self) -> float:
        """Called when it fires: seconds to wait once more, 0.0 when it was in time or has waited."""
        late = self._loop.time() - self._due
        self._waited = late > STALL_SECONDS and not self._waited
        return late if self._waited else 0.0
