"""A signal every millisecond, while a test does what must not mind."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator

# The kernel may hand the last signal to another thread, which has to run before it is seen.
LATE_SECONDS = 0.1


@contextlib.contextmanager
def alarms() -> Iterator[list[int]]:
    """Raise SIGALRM at a kilohertz; the list grows with each. The timer and the handler of before come back after."""
    seen: list[int] = []
    handler = signal.signal(signal.SIGALRM, lambda number, _: seen.append(number))
    timer = signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        yield seen
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        time.sleep(LATE_SECONDS)
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *timer)
