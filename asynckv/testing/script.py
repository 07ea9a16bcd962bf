"""Scripts of faults: which call of which kind goes wrong, and how."""

from __future__ import annotations

import random as random_module
import threading
from collections import Counter
from dataclasses import dataclass

__all__ = ["Fault", "Script", "corrupt", "error", "hang", "short", "slow"]


@dataclass(frozen=True)
class Fault:
    """What goes wrong with one call; made by `error`, `short`, `corrupt`, `slow` and `hang`."""

    action: str
    errno: int = 0
    seconds: float = 0.0
    fraction: float = 0.0
    count: int | None = None

    def part(self, whole: int) -> int:
        """How much of so many bytes a short call moves."""
        if self.count is None:
            return int(whole * self.fraction)
        return max(0, min(whole, self.count if self.count >= 0 else whole + self.count))


def error(errno: int) -> Fault:
    """The call fails with this errno and does nothing (a close still closes)."""
    return Fault("error", errno=errno)


def short(fraction: float = 0.5, *, count: int | None = None) -> Fault:
    """Only the first part of the bytes moves.

    Above the engine a short read ends as `ShortTransferError` and a short write as ``EIO``.

    Parameters
    ----------
    fraction
        Share of the bytes.
    count
        Instead of a share: so many bytes, or all but so many when it is negative.
    """
    return Fault("short", fraction=fraction, count=count)


def corrupt() -> Fault:
    """One bit of the data flips, silently."""
    return Fault("corrupt")


def slow(seconds: float) -> Fault:
    """The call starts late."""
    return Fault("slow", seconds=seconds)


def hang() -> Fault:
    """The call does not start before ``release_all()``, and keeps its buffer until it has then ended."""
    return Fault("hang")


_WITH_DATA = frozenset({"read", "write", "read_file", "preadv", "pwritev", "*"})


@dataclass
class _Rule:
    operation: str
    fault: Fault
    nth: int | None
    every: int | None
    probability: float | None
    sticky: bool
    fired: int = 0


class Script:
    """Which call of which kind meets which fault.

    Parameters
    ----------
    random
        Source of probabilities and of corrupted positions; seeded with 0 when left out.

    Attributes
    ----------
    calls
        Calls seen, per operation.
    injected
        Faults injected, per (operation, action).
    """

    def __init__(self, random: random_module.Random | None = None) -> None:
        self.random = random_module.Random(0) if random is None else random
        self.calls: Counter[str] = Counter()
        self.injected: Counter[tuple[str, str]] = Counter()
        self._rules: list[_Rule] = []
        self._lock = threading.Lock()

    def add(
        self,
        operation: str,
        fault: Fault,
        *,
        nth: int | None = None,
        every: int | None = None,
        probability: float | None = None,
        sticky: bool = False,
    ) -> Script:
        """Add a rule; the first rule that applies wins.

        Parameters
        ----------
        operation
            ``"read"``, ``"write"``, ``"sync"``, the name of a cold call (above the engine) or of a system call (below),
            or ``"*"`` for all.
        fault
            What goes wrong.
        nth
            The how-manyth call from now on, counted from 1; with `sticky` that one and all later ones.
        every
            Each call whose number is a multiple of this.
        probability
            Each call with this chance.
        sticky
            Without `nth`: from the next call on.

        Returns
        -------
        Script
            Itself.
        """
        if fault.action in ("short", "corrupt") and operation not in _WITH_DATA:
            raise ValueError(f"{operation!r} moves no data that could be {fault.action}")
        if sum(choice is not None for choice in (nth, every, probability)) > 1:
            raise ValueError("give one of nth, every and probability")
        if every is None and probability is None:
            nth = (nth or 1) + self._seen(operation)
        with self._lock:
            self._rules.append(_Rule(operation, fault, nth, every, probability, sticky))
        return self

    def clear(self) -> None:
        """Drop all rules: from here on everything works. Counts stay, and so does what hangs."""
        with self._lock:
            self._rules.clear()

    def _seen(self, operation: str) -> int:
        return self.calls.total() if operation == "*" else self.calls[operation]

    def next(self, operation: str) -> Fault | None:
        """Count a call and return the fault it meets, if any. Callable from any thread."""
        with self._lock:
            self.calls[operation] += 1
            for rule in self._rules:
                if rule.operation not in (operation, "*"):
                    continue
                if rule.fault.action in ("short", "corrupt") and operation not in _WITH_DATA:
                    continue
                number = self._seen(rule.operation)
                if rule.probability is not None:
                    applies = self.random.random() < rule.probability
                elif rule.every is not None:
                    applies = number % rule.every == 0
                else:
                    assert rule.nth is not None
                    applies = number >= rule.nth if rule.sticky else not rule.fired and number >= rule.nth
                if applies:
                    rule.fired += 1
                    self.injected[operation, rule.fault.action] += 1
                    return rule.fault
        return None

    def bit(self, size: int) -> tuple[int, int]:
        """A random (byte, mask) in `size` bytes."""
        with self._lock:
            return self.random.randrange(size), 1 << self.random.randrange(8)
