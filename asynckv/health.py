"""The breaker: when a disk counts as sick, and when it is tried again.

Invariant: between `off` and the next successful probe no spill, reload or tombstone is submitted, so a dead
device costs its callers nothing but misses.
"""

from __future__ import annotations

from collections.abc import Callable

READ, WRITE = "read", "write"
FAILURES_UNTIL_OFF = 3
PROBE_SECONDS_FIRST = 1.0
PROBE_SECONDS_MAX = 30.0


class Breaker:
    """Count consecutive disk failures and say when the disk is to be left alone.

    Reads and writes are counted apart: a disk that still reads must not hide that it takes nothing any more, nor one
    that writes that it gives nothing back.

    Parameters
    ----------
    on_change
        Called with True when the disk is switched on again, with False when it is switched off.
    """

    __slots__ = ("_failures", "_on_change", "_relapse", "delay_s", "ok")

    def __init__(self, on_change: Callable[[bool], None]) -> None:
        self.ok = True
        self.delay_s = PROBE_SECONDS_FIRST
        self._failures = {READ: 0, WRITE: 0}
        self._relapse = ""  # what failed last time, as long as it has not worked since
        self._on_change = on_change

    def success(self, kind: str) -> None:
        """One operation ended well: earlier failures of its kind no longer count."""
        self._failures[kind] = 0
        if kind == self._relapse:
            self._relapse = ""

    def failure(self, kind: str) -> None:
        """One operation failed or ran past its deadline."""
        self._failures[kind] += 1
        if self._failures[kind] >= FAILURES_UNTIL_OFF:
            self.trip(kind)

    def trip(self, kind: str) -> None:
        """Switch the disk off now. When a good probe proved nothing last time, the next one waits longer."""
        if self.ok:
            self.ok = False
            self.delay_s = min(self.delay_s * 2, PROBE_SECONDS_MAX) if self._relapse == kind else PROBE_SECONDS_FIRST
            self._relapse = kind
            self._on_change(False)

    def probed(self, healthy: bool) -> None:
        """Take the result of a probe: switch on, or wait twice as long for the next one."""
        if healthy:
            self._failures = {READ: 0, WRITE: 0}
            self.ok = True
            self._on_change(True)
        else:
            self.delay_s = min(self.delay_s * 2, PROBE_SECONDS_MAX)
