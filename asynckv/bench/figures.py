"""What is measured, and what is made of it: slices of a run, ratios of neighbouring slices, rows of the report."""

from __future__ import annotations

import math
import resource
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["PERCENTILES", "Row", "Slice", "Stopwatch", "interval", "percentile", "ratio_of"]

CONFIDENCE = 0.95
PERCENTILES = (0.1, 1, 5, *range(10, 100, 10), 95, 98, 99, 99.5, 99.9)


@dataclass(slots=True)
class Slice:
    """What was done in a part of a second.

    Attributes
    ----------
    blocks, bytes
        Payload only.
    seconds, cpu
        Elapsed, and used by all threads of the process in user and system mode.
    latencies
        Seconds of single operations, where they were timed.
    wrong
        Blocks that were missing or had a wrong byte.
    """

    blocks: int = 0
    bytes: int = 0
    seconds: float = 0.0
    cpu: float = 0.0
    latencies: list[float] = field(default_factory=list)
    wrong: int = 0

    @property
    def rate(self) -> float:
        """Blocks a second."""
        return self.blocks / self.seconds if self.seconds else 0.0


class Stopwatch:
    """Elapsed and CPU seconds of a ``with`` block."""

    seconds = 0.0
    cpu = 0.0

    def __enter__(self) -> Stopwatch:
        self._cpu = _cpu_seconds()
        self._start = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._start
        self.cpu = _cpu_seconds() - self._cpu


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that so many percent of all do not exceed; 0.0 of none."""
    return _rank(sorted(values), percent) if values else 0.0


def _rank(ordered: Sequence[float], percent: float) -> float:
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Bounds that hold the median of what the values were drawn from, with 95 % confidence, whatever its distribution.

    Source: order statistics. The number of values below the median is binomial with p = 1/2. With fewer than six
    values no two of them are far enough apart: the least and the greatest then.
    """
    ordered, count = sorted(values), len(values)
    tail, rank = 0.0, 0
    while rank < count // 2:
        tail += math.comb(count, rank) / 2**count
        if tail > (1 - CONFIDENCE) / 2:
            break
        rank += 1
    rank = max(rank, 1)
    return ordered[rank - 1], ordered[count - rank]


def ratio_of(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Median, and the bounds of its 95 % interval."""
    return (statistics.median(ratios), *interval(ratios))


@dataclass(slots=True, kw_only=True)
class Row:
    """One line of the report. Latencies in seconds; None where something was not measured.

    Attributes
    ----------
    depth
        Blocks asked for at a time.
    count
        Blocks that there are, where that is what varies.
    curve
        Latencies at `PERCENTILES`.
    share, low, high
        Of the roofline or of what `beside` names: the median of all pairs of slices and its 95 % interval.
    direct
        Whether the disk was read without the page cache; None where there is no disk.
    """

    operation: str
    block: int
    depth: int
    engine: str = ""
    loop: str = ""
    count: int = 0
    blocks_per_second: float = 0.0
    bytes_per_second: float = 0.0
    p50: float | None = None
    p95: float | None = None
    p99: float | None = None
    curve: list[float] = field(default_factory=list)
    cpu_per_gib: float | None = None
    share: float | None = None
    low: float | None = None
    high: float | None = None
    beside: str = "roofline"
    pairs: int = 0
    direct: bool | None = None
    errors: int = 0

    @classmethod
    def of(cls, slices: Sequence[Slice], ratios: Sequence[float] = (), **what: Any) -> Row:
        """Add up slices."""
        seconds = sum(each.seconds for each in slices)
        moved = sum(each.bytes for each in slices)
        latencies = [value for each in slices for value in each.latencies]
        row = cls(**what)
        row.blocks_per_second = sum(each.blocks for each in slices) / seconds if seconds else 0.0
        row.bytes_per_second = moved / seconds if seconds else 0.0
        if latencies:
            latencies.sort()
            row.p50, row.p95, row.p99 = (_rank(latencies, percent) for percent in (50, 95, 99))
            row.curve = [_rank(latencies, percent) for percent in PERCENTILES]
        row.cpu_per_gib = sum(each.cpu for each in slices) / (moved / 2**30) if moved else None
        row.errors = sum(each.wrong for each in slices)
        if ratios:
            row.share, row.low, row.high = ratio_of(ratios)
            row.pairs = len(ratios)
        return row

    def as_dict(self) -> dict[str, Any]:
        """Return all fields, ready for JSON."""
        return asdict(self)
