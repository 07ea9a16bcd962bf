"""Plots of the bench's results, by matplotlib (extra ``plot``)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from asynckv.bench.contenders import CONTENDERS
from asynckv.bench.figures import PERCENTILES

__all__ = ["draw"]

MIB = 1 << 20
LOOP = "uvloop"  # of what is drawn


def draw(directory: str, values: dict[str, Any]) -> list[str]:
    """Write a file for each plot that the results have the figures for; returns their names."""
    parts = values["parts"]
    rows = [row for row in parts.get("disk", {}).get("rows", ()) if row["loop"] == LOOP and row["engine"] == "io_uring"]
    written = []
    if rows:
        written.append(_save(directory, "throughput", _throughput, rows))
        written.append(_save(directory, "latency", _latency, rows))
    if "loop" in parts:
        written.append(_save(directory, "lateness", _lateness, parts["loop"]["lateness"]))
    grown = [row for row in parts.get("mem", {}).get("rows", ()) if row["count"]]
    if grown:
        written.append(_save(directory, "growth", _growth, grown))
    return written


def _save(directory: str, name: str, paint: Any, what: Any) -> str:
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    paint(axes, what)
    path = os.path.join(directory, f"{name}.png")
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def _lines(axes: Axes, rows: Iterable[dict[str, Any]], x: str, y: str, scale: float) -> None:
    by_name: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        by_name.setdefault(row["operation"], []).append((row[x], row[y] * scale))
    for name, points in by_name.items():
        points.sort()
        bare = name.endswith("roofline")
        axes.plot(
            *zip(*points, strict=True),
            marker="o",
            label=name,
            color="black" if bare else None,
            ls="--" if bare else "-",
        )
    axes.set_xscale("log", base=10 if x == "count" else 2)
    axes.legend()
    axes.grid(alpha=0.3)


def _throughput(axes: Axes, rows: Sequence[dict[str, Any]]) -> None:
    deep = [row for row in rows if row["depth"] > 1 and row["block"] >= 4096 and row["operation"] != "write roofline"]
    _lines(axes, deep, "block", "bytes_per_second", 1 / MIB)
    axes.set(title="Cold reads, 64 at a time", xlabel="bytes of a block", ylabel="MiB/s", ylim=(0, None))


def _latency(axes: Axes, rows: Sequence[dict[str, Any]]) -> None:
    for row in rows:
        if row["curve"] and row["operation"] in ("get", "read roofline"):
            times = [seconds * 1e6 for seconds in row["curve"]]
            bare = row["operation"] == "read roofline"
            label = f"{row['operation']}, {row['block']:,} bytes, {row['depth']} at a time"
            axes.plot(times, PERCENTILES, label=label, ls="--" if bare else "-")
    axes.set_xscale("log")
    axes.set(title="Latency of single reads", xlabel="microseconds", ylabel="percent of reads that took no longer")
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)


def _lateness(axes: Axes, found: Sequence[dict[str, Any]]) -> None:
    names = [f"{CONTENDERS[each['name']].label}\n({each['loop']})" for each in found]
    for shift, (key, label) in enumerate((("p99_ms", "p99"), ("p999_ms", "p99.9"), ("max_ms", "worst"))):
        places = [place + 0.25 * (shift - 1) for place in range(len(found))]
        axes.barh(places, [each["store"][key] for each in found], height=0.22, label=label)
    axes.set_yticks(range(len(found)), names)
    axes.set_xscale("log")
    axes.invert_yaxis()
    axes.set(title="How late a 1 ms heartbeat comes in the same loop", xlabel="milliseconds")
    axes.legend()


def _growth(axes: Axes, rows: Sequence[dict[str, Any]]) -> None:
    _lines(axes, rows, "count", "p50", 1e6)
    axes.set_yscale("log")
    axes.set(title="Cost of a call by number of blocks", xlabel="blocks", ylabel="microseconds")
