"""A clock that moves only when a test says so."""

from __future__ import annotations

import heapq
import itertools
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

__all__ = ["ManualClock"]


class _Timer:
    __slots__ = ("callback", "cancelled")

    def __init__(self, callback: Callable[[], object]) -> None:
        self.callback = callback
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class ManualClock:
    """A `asynckv.clock.Clock` under the control of a test.

    Timers fire inside `advance`, on the thread that calls it, in order of their time and then of their making.

    Parameters
    ----------
    start
        The first reading.
    """

    def __init__(self, start: float = 1000.0) -> None:
        self._now = start
        self._timers: list[tuple[float, int, _Timer]] = []
        self._order = itertools.count()

    def monotonic(self) -> float:
        """Return the current reading."""
        return self._now

    def call_later(self, loop: asyncio.AbstractEventLoop, delay: float, callback: Callable[[], object]) -> _Timer:
        """Note a timer; see `asynckv.clock.Clock.call_later`. A delay of zero is a turn of the loop."""
        timer = _Timer(callback)
        if delay <= 0:
            loop.call_soon(lambda: timer.cancelled or callback())
        elif delay < math.inf:
            heapq.heappush(self._timers, (self._now + delay, next(self._order), timer))
        return timer

    @property
    def pending(self) -> int:
        """Timers that have neither fired nor been cancelled."""
        return sum(1 for _, _, timer in self._timers if not timer.cancelled)

    @property
    def next_at(self) -> float:
        """When the next timer fires; infinity without one."""
        return min((when for when, _, timer in self._timers if not timer.cancelled), default=math.inf)

    def advance(self, seconds: float) -> int:
        """Move time forward and fire what falls due, including timers set meanwhile.

        Returns
        -------
        int
            Timers fired.
        """
        if seconds < 0:
            raise ValueError("time does not run backwards")
        target = self._now + seconds
        fired = 0
        while self._timers and self._timers[0][0] <= target:
            when, _, timer = heapq.heappop(self._timers)
            self._now = max(self._now, when)
            if not timer.cancelled:
                timer.cancelled = True
                timer.callback()
                fired += 1
        self._now = target
        return fired
