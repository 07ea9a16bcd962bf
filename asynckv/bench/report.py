"""The bench's report: tables, a verdict in words, and the same as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from asynckv.bench.article import Story
from asynckv.bench.contenders import CONTENDERS
from asynckv.bench.figures import Row
from asynckv.bench.peers import OURS
from asynckv.commands.output import plural
from asynckv.config import format_size

__all__ = ["Part", "Report"]

MIB = 1 << 20
HEADS = (
    "operation", "block", "blocks", "depth", "loop", "engine", "blocks/s", "MiB/s", "p50 us", "p95 us", "p99 us",
    "CPU s/GiB", "share", "95 %", "pairs", "wrong",
)  # fmt: skip
LATE_HEADS = (
    "while 2 GiB are put and read by", "loop", "p50 ms", "p99 ms", "p99.9 ms", "worst ms",
    "control: p99", "p99.9", "worst", "seconds", "wrong",
)  # fmt: skip
STORY_HEADS = ("who", "block", "seconds", "CPU s", "load us", "evicted", "from disk", "missed", "wrong")


@dataclass
class Part:
    """What one part of the bench found.

    Attributes
    ----------
    lateness
        Figures of heartbeats, as `asynckv.bench.lateness.late` returns them.
    stories
        Runs of the article's scenarios by bytes of a block and by who ran.
    absent
        Packages that were not there to be compared with.
    """

    title: str
    rows: list[Row] = field(default_factory=list)
    lateness: list[dict[str, Any]] = field(default_factory=list)
    stories: dict[int, dict[str, list[Story]]] = field(default_factory=dict)
    absent: list[str] = field(default_factory=list)

    @property
    def errors(self) -> int:
        """Blocks that were missing or wrong."""
        found = sum(row.errors for row in self.rows) + sum(int(each["store"]["wrong"]) for each in self.lateness)
        return found + sum(story.wrong for _, _, told in self._told() for story in told)

    def _told(self) -> Iterator[tuple[int, str, list[Story]]]:
        for size, by_whom in self.stories.items():
            for who, told in by_whom.items():
                yield size, who, told

    def text(self) -> str:
        """Its tables."""
        lines = ["", self.title]
        if self.rows:
            lines.append(layout(HEADS, [_cells(row) for row in self.rows]))
        if self.lateness:
            lines.append(layout(LATE_HEADS, [_late_cells(each) for each in self.lateness]))
        if self.stories:
            lines.append(layout(STORY_HEADS, [_story_cells(*each) for each in self._told()]))
        if self.absent:
            lines.append(f"not installed, so not compared: {', '.join(self.absent)} (pip install 'asynckv[bench]')")
        return "\n".join(lines)


def _cells(row: Row) -> list[str]:
    share = between = ""
    if row.share is not None and row.low is not None and row.high is not None:
        share, between = f"{row.share:.2f}", f"{row.low:.2f} to {row.high:.2f}"
    name = row.operation if row.direct is not False else f"{row.operation} (page cache)"
    return [
        name,
        f"{row.block:,}",
        f"{row.count:,}" if row.count else "",
        str(row.depth or ""),
        row.loop,
        row.engine,
        f"{row.blocks_per_second:,.0f}",
        f"{row.bytes_per_second / MIB:,.0f}",
        *("" if value is None else _microseconds(value) for value in (row.p50, row.p95, row.p99)),
        "" if row.cpu_per_gib is None else f"{row.cpu_per_gib:.3f}",
        share,
        between,
        str(row.pairs or ""),
        str(row.errors),
    ]


def _microseconds(seconds: float) -> str:
    value = seconds * 1e6
    return f"{value:.2f}" if value < 10 else f"{value:,.0f}"


def _late_cells(found: dict[str, Any]) -> list[str]:
    store, control = found["store"], found["control"]
    cells = [CONTENDERS[found["name"]].label, found["loop"]]
    cells += [f"{store[name]:.2f}" for name in ("p50_ms", "p99_ms", "p999_ms", "max_ms")]
    cells += [f"{control[name]:.2f}" for name in ("p99_ms", "p999_ms", "max_ms")]
    return [*cells, f"{store['seconds']:.1f}", str(store["wrong"])]


def _story_cells(size: int, who: str, told: Sequence[Story]) -> list[str]:
    last = told[-1]
    return [
        who,
        f"{size:,}",
        _range([story.seconds for story in told]),
        _range([story.cpu for story in told]),
        _range([story.load_us for story in told]),
        f"{last.evictions:,}",
        f"{last.disk_hits:,}",
        f"{last.misses:,}",
        str(sum(story.wrong for story in told)),
    ]


def _range(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    digits = 2 if high < 10 else 0
    return f"{low:,.{digits}f} to {high:,.{digits}f}"


def layout(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns under heads, the first to the left, the others to the right; those without any cell are left out."""
    used = [at for at in range(len(heads)) if any(row[at] for row in rows)]
    cells = [[line[at] for at in used] for line in (heads, *rows)]
    widths = [max(len(line[at]) for line in cells) for at in range(len(used))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if not at else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in cells
    )


@dataclass
class Report:
    """All parts of a run.

    Attributes
    ----------
    machine
        What the figures belong to.
    """

    machine: dict[str, Any]
    parts: dict[str, Part] = field(default_factory=dict)

    @property
    def errors(self) -> int:
        """Blocks that were missing or wrong."""
        return sum(part.errors for part in self.parts.values())

    def head(self) -> str:
        """The machine in two lines."""
        m = self.machine
        return (
            f"asynckv {m['asynckv']}, Python {m['python']}, numpy {m['numpy']}, uvloop {m['uvloop']}, "
            f"Linux {m['kernel']}\n"
            f"{plural(m['cpus'], 'CPU')} ({m['cpu']}), {format_size(m['memory'])}, {m['file_system']} on "
            f"{m['mounted_on']}, load {m['load']:.2f}"
        )

    def verdict(self) -> str:
        """What it comes to, for someone who saw none of the tables."""
        lines = ["", "Verdict"]
        for part in self.parts.values():
            lines += [f"- {line}" for line in _verdict_of(part)]
        wrong = self.errors
        lines.append(
            "- Every byte that was read was right." if not wrong else f"- WRONG OR MISSING: {plural(wrong, 'block')}."
        )
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        parts = {}
        for name, part in self.parts.items():
            parts[name] = {
                "rows": [row.as_dict() for row in part.rows],
                "lateness": part.lateness,
                "article": {
                    str(size): {who: [asdict(story) for story in told] for who, told in by_whom.items()}
                    for size, by_whom in part.stories.items()
                },
                "absent": part.absent,
            }
        return {"machine": self.machine, "errors": self.errors, "parts": parts, "verdict": self.verdict().strip()}


def _verdict_of(part: Part) -> Iterator[str]:
    for row in part.rows:
        if row.share is None or row.low is None or row.loop == "asyncio":
            continue
        what = f"{row.operation}, {format_size(row.block)}"
        if row.beside == "roofline" and row.depth > 1 and row.engine == "io_uring":
            yield f"{what}, {row.depth} at a time: {row.share:.0%} of what this disk gives (at least {row.low:.0%})."
        elif row.beside == "roofline" and row.engine == "io_uring" and row.p50 is not None:
            yield f"{what}, one at a time: {row.p50 * 1e6:,.0f} us; {1 / row.share:.1f} times as long as the bare disk."
        elif row.operation == "spill" and row.engine == "io_uring":
            yield f"{what}: writes at {row.share:.0%} of what this disk takes (at least {row.low:.0%})."
        elif row.beside != "roofline":
            yield f"{what}: {row.share:.2f} times {row.beside} (at least {row.low:.2f})."
    for each in part.lateness:
        label, store = CONTENDERS[each["name"]].label, each["store"]
        yield (
            f"While {label} ({each['loop']}) moved 2 GiB each way, other work of its loop was late by at most "
            f"{store['max_ms']:.1f} ms, p99 {store['p99_ms']:.1f} ms."
        )
    for size, by_whom in part.stories.items():
        if "prototype" in by_whom:
            ours, theirs = (statistics.median(story.cpu for story in by_whom[who]) for who in (OURS, "prototype"))
            yield f"The article's blocks of {size:,} bytes: {theirs / ours:.1f} times less CPU than the prototype."
