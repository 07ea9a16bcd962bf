"""``asynckv bench``: what the store does with a disk, a loop and memory, beside what they could give."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from asynckv._version import __version__
from asynckv.backends import probes
from asynckv.bench import article, disk, lateness, mem, peers
from asynckv.bench.contenders import CONTENDERS
from asynckv.bench.figures import Row
from asynckv.bench.growth import growth
from asynckv.bench.parser import PARTS
from asynckv.bench.report import Part, Report
from asynckv.commands.output import FAILED, OK, Progress, UsageError, about, run, write, write_json
from asynckv.config import format_size, parse_size

__all__ = ["main"]

LOOPS = ("uvloop", "asyncio")
BLOCKS = (4 << 10, 64 << 10, 2 << 20)
LATE_BLOCK, LATE_TOTAL = 2 << 20, 2 << 30
FEW = 8  # pairs of what is only shown beside
ROOM = 5  # times --data that may be on disk at a time
DATA_MIN = 64 << 20


def main(arguments: argparse.Namespace) -> int:
    """Run ``asynckv bench``."""
    place = arguments.dir or os.getcwd()
    plan = _plan(arguments)
    parts = PARTS if arguments.part == "all" else (arguments.part,)
    if arguments.out:
        with about(arguments.out):
            Path(arguments.out).mkdir(parents=True, exist_ok=True)
    with about(place):
        temporary = tempfile.TemporaryDirectory(prefix="asynckv-bench-", dir=place)
    report = Report(_machine(place))
    with temporary as directory, Progress("bench") as progress:
        _check_room(directory, plan, parts)
        if not arguments.json:
            write(report.head())
        for part in parts:
            found = _RUNS[part](directory, plan, progress, arguments)
            progress.done()
            report.parts[part] = found
            if not arguments.json:
                write(found.text())
    values = report.as_dict()
    if arguments.json:
        write_json(values)
    else:
        write(report.verdict())
    if arguments.out:
        _write_out(arguments.out, values)
    return FAILED if report.errors else OK


def _plan(arguments: argparse.Namespace) -> disk.Plan:
    try:
        data = parse_size(arguments.data, "--data")
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from None
    if data < DATA_MIN:
        raise UsageError(f"--data {arguments.data}: a store of less than {format_size(DATA_MIN)} shows nothing")
    if arguments.pairs < 1:
        raise UsageError(f"--pairs {arguments.pairs}: at least one pair of slices")
    return disk.Plan(data=data, pairs=arguments.pairs)


def _check_room(directory: str, plan: disk.Plan, parts: Sequence[str]) -> None:
    need = max(ROOM * plan.data, 3 * LATE_TOTAL if "loop" in parts else 0)
    free = shutil.disk_usage(directory).free
    if set(parts) - {"mem"} and free < need:
        raise UsageError(
            f"{directory}: the bench needs up to {format_size(need)} of disk, {format_size(free)} are free; see --dir "
            "and --data"
        )


def _machine(place: str) -> dict[str, Any]:
    """What the figures belong to."""
    machine, usable, _ = probes.cpu_flags()
    total, free = probes.memory_available()
    system = probes.file_system(place)
    return {
        "asynckv": __version__,
        "python": sys.version.split()[0],
        "numpy": np.__version__,
        "uvloop": version("uvloop"),
        "kernel": probes.kernel_release(),
        "cpu": probes.cpu_name() or machine,
        "cpus": usable,
        "memory": total,
        "memory_available": free,
        "file_system": system.kind,
        "mounted_on": system.mounted_on,
        "load": os.getloadavg()[0],
    }


# -- the parts -------------------------------------------------------------------------------------------------------


def _mem(directory: str, plan: disk.Plan, progress: Progress, _: argparse.Namespace) -> Part:
    rows = []
    for number, loop in enumerate(LOOPS):
        place = os.path.join(directory, f"mem-{number}")
        rows += run(mem.in_memory(place, loop=loop, rounds=plan.pairs, progress=progress), loop)
    with tempfile.TemporaryDirectory(dir=directory) as place:
        rows += run(growth(place, loop=LOOPS[0], progress=progress), LOOPS[0])
    return Part("Memory", rows, absent=peers.missing([mem.RIVAL]))


def _disk(directory: str, plan: disk.Plan, progress: Progress, _: argparse.Namespace) -> Part:
    rows: list[Row] = []
    few = replace(plan, pairs=min(plan.pairs, FEW))
    for loop, engine, sizes, each in (
        ("uvloop", "auto", BLOCKS, plan),
        ("asyncio", "auto", BLOCKS, few),
        ("uvloop", "threads", BLOCKS[1:2], few),
        ("uvloop", "aiofiles", BLOCKS[1:2], few),
    ):
        operations = tuple(disk.RELOADS) if each is plan else ("get_many", "get")
        for size in sizes:
            with tempfile.TemporaryDirectory(dir=directory) as place:
                job = disk.reloads(
                    place,
                    size,
                    _smaller(each, size),
                    loop=loop,
                    engine=engine,
                    operations=operations,
                    progress=progress,
                )
                rows += run(job, loop)
            if size > BLOCKS[0]:
                with tempfile.TemporaryDirectory(dir=directory) as place:
                    rows += run(disk.spills(place, size, each, loop=loop, engine=engine, progress=progress), loop)
    with tempfile.TemporaryDirectory(dir=directory) as place:
        rows += run(disk.small_spills(place, plan, loop="uvloop"), "uvloop")
    return Part("Disk", rows)


def _mix(directory: str, plan: disk.Plan, progress: Progress, _: argparse.Namespace) -> Part:
    rows = []
    for loop in LOOPS:
        each = plan if loop == LOOPS[0] else replace(plan, pairs=min(plan.pairs, FEW))
        with tempfile.TemporaryDirectory(dir=directory) as place:
            rows += run(disk.mixed(place, BLOCKS[1], each, loop=loop, progress=progress), loop)
    return Part("Mix of reads and writes", rows)


def _loop(directory: str, _: disk.Plan, progress: Progress, __: argparse.Namespace) -> Part:
    found = []
    names = [name for name in CONTENDERS if name not in peers.missing()]
    for number, (name, loop) in enumerate([(name, LOOPS[0]) for name in names] + [("asynckv", LOOPS[1])]):
        progress.update(number / len(names), f"heartbeat beside {CONTENDERS[name].label}")
        with tempfile.TemporaryDirectory(dir=directory) as place:
            found.append(lateness.late(name, place, LATE_BLOCK, LATE_TOTAL, loop))
    return Part("Lateness of a 1 ms heartbeat", lateness=found, absent=peers.missing())


def _article(directory: str, _: disk.Plan, progress: Progress, arguments: argparse.Namespace) -> Part:
    stories = {}
    for scenario in article.SCENARIOS:
        with tempfile.TemporaryDirectory(dir=directory) as place:
            stories[scenario.block_bytes] = article.tell(
                place, scenario, program=arguments.prototype, loop=LOOPS[0], progress=progress
            )
    return Part("The article's blocks", stories=stories)


def _peers(directory: str, _: disk.Plan, progress: Progress, __: argparse.Namespace) -> Part:
    with tempfile.TemporaryDirectory(dir=directory) as place:
        return Part("Others", peers.compare(place, loop=LOOPS[0], progress=progress), absent=peers.missing())


def _smaller(plan: disk.Plan, size: int) -> disk.Plan:
    """For the smallest blocks a quarter of the data: it is their number that takes the time."""
    return replace(plan, data=plan.data // 4) if size == BLOCKS[0] else plan


_RUNS: dict[str, Callable[[str, disk.Plan, Progress, argparse.Namespace], Part]] = {
    "mem": _mem,
    "disk": _disk,
    "mix": _mix,
    "loop": _loop,
    "article": _article,
    "peers": _peers,
}


def _write_out(directory: str, values: dict[str, Any]) -> None:
    """Write the results, and as plots what matplotlib can draw."""
    with about(directory):
        Path(directory, "bench.json").write_text(json.dumps(values, indent=2))
        try:
            from asynckv.bench import plots
        except ImportError as error:
            sys.stderr.write(f"asynckv: no plots: {error}; install asynckv[plot]\n")
            return
        plots.draw(directory, values)
