"""Where time comes from: a protocol, and the clock of real runs.

Every deadline and delay of asynckv is measured and scheduled through a `Clock` that is passed in, so that tests move
time by hand (`asynckv.testing.ManualClock`) and never sleep.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

__all__ = ["Clock", "MonotonicClock", "TimerHandle"]


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
