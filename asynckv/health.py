"""The breaker: when a disk counts as sick, and when it is tried again.

Invariant: between `off` and the next successful probe no spill, reload or tombstone is submitted, so a dead
device costs its callers nothing but misses.
"""

from __future__ import annotations

from collections.abc import Callable

FAILURES_UNTIL_OFF = 3
PROBE_SECONDS_FIRST = 1.0
PROBE_SECONDS_MAX = 30.0


class Breaker:
    """Count consecutive disk failures and say when the disk is to be left alone.

    Parameters
    ----------
    on_change
        Called with True when the disk is switched on again, with False when it is switched off.
    """

    __slots__ = ("_failures", "_on_change", "delay_s", "ok")

    def __init__(self, on_change: Callable[[bool], None]) -> None:
        self.ok = True
        self.delay_s = PROBE_SECONDS_FIRST
        self._failures = 0
        self._on_change = on_change

    def success(self) -> None:
        """One operation ended well: earlier failures no longer count."""
        self._failures = 0

    def failure(self) -> None:
        """One operation failed or ran past its deadline."""
        self._failures += 1
        if self._failures >= FAILURES_UNTIL_OFF:
            self.trip()

    def trip(self) -> None:
        """Switch the disk off now."""
        if self.ok:
            self.ok = False
            self.delay_s = PROBE_SECONDS_FIRST
            self._on_change(False)

    def probed(self, healthy: bool) -> None:
        """Take the result of a probe: switch on, or wait twice as long for the next one."""
        if healthy:
            self._failures = 0
            self.ok = True
            self._on_change(True)
        else:
            self.delay_s = min(self.delay_s * 2, PROBE_SECONDS_MAX)
