"""``asynckv bench``: what the store does with a disk, a loop and memory, beside what they could give."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
from asynckv.bench.report import Part, Report
from asynckv.commands.output import FAILED, OK, Progress, UsageError, about, path, run, write, write_json
from asynckv.config import format_size, parse_size

__all__ = ["add_parser"]

PARTS = ("mem", "disk", "mix", "loop", "article", "peers")
LOOPS = ("uvloop", "asyncio")
BLOCKS = (4 << 10, 64 << 10, 2 << 20)
LATE_BLOCK, LATE_TOTAL = 2 << 20, 2 << 30
FEW = 8  # pairs of what is only shown beside
ROOM = 5  # times --data that may be on disk at a time
DATA_MIN = 64 << 20


def add_parser(commands: Any) -> None:
    """Add ``bench`` to the command line."""
    parser = commands.add_parser(
        "bench",
        help="measure the store against what the disk, the loop and memory can give, and against others",
        description=(
            "Store and roofline, a loop in C that asks the same disk for the same, alternate in slices of 0.3 seconds; "
            "a share of the roofline is the median of all pairs, with its 95 % interval. Every byte that is read is "
            "checked; a wrong or missing block is exit status 1. Let nothing else run meanwhile."
        ),
    )
    parser.add_argument(
        "part",
        nargs="?",
        default="all",
        choices=[*PARTS, "all"],
        metavar="PART",
        help=f"{', '.join(PARTS)} or all (the default)",
    )
    parser.add_argument("--dir", type=path, metavar="DIR", help="on the disk to be measured; default: here")
    parser.add_argument("--data", default="1GiB", metavar="SIZE", help="blocks in a store that is read; default 1GiB")
    parser.add_argument("--pairs", type=int, default=40, metavar="N", help="slices of each; default 40")
    parser.add_argument("--prototype", type=path, metavar="BIN", help="article: a C++ prototype to run beside it")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--out", type=path, metavar="DIR", help="write results and plots there (extra: plot)")
    parser.set_defaults(command=main)


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
    with _place(directory) as place:
        rows += run(growth(place, loop=LOOPS[0], progress=progress), LOOPS[0])
    return Part("Memory", rows)


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
            with _place(directory) as place:
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
                with _place(directory) as place:
                    rows += run(disk.spills(place, size, each, loop=loop, engine=engine, progress=progress), loop)
    with _place(directory) as place:
        rows += run(disk.small_spills(place, plan, loop="uvloop"), "uvloop")
    return Part("Disk", rows)


def _mix(directory: str, plan: disk.Plan, progress: Progress, _: argparse.Namespace) -> Part:
    rows = []
    for loop in LOOPS:
        each = plan if loop == LOOPS[0] else replace(plan, pairs=min(plan.pairs, FEW))
        with _place(directory) as place:
            rows += run(disk.mixed(place, BLOCKS[1], each, loop=loop, progress=progress), loop)
    return Part("Mix of reads and writes", rows)


def _loop(directory: str, _: disk.Plan, progress: Progress, __: argparse.Namespace) -> Part:
    found = []
    names = [name for name in CONTENDERS if name not in peers.missing()]
    for number, (name, loop) in enumerate([(name, LOOPS[0]) for name in names] + [("asynckv", LOOPS[1])]):
        progress.update(number / len(names), f"heartbeat beside {CONTENDERS[name].label}")
        with _place(directory) as place:
            found.append(lateness.late(name, place, LATE_BLOCK, LATE_TOTAL, loop))
    return Part("Lateness of a 1 ms heartbeat", lateness=found)


def _article(directory: str, _: disk.Plan, progress: Progress, arguments: argparse.Namespace) -> Part:
    stories = {}
    for scenario in article.SCENARIOS:
        with _place(directory) as place:
            stories[scenario.block_bytes] = article.tell(
                place, scenario, program=arguments.prototype, loop=LOOPS[0], progress=progress
            )
    return Part("The article's blocks", stories=stories)


def _peers(directory: str, _: disk.Plan, progress: Progress, __: argparse.Namespace) -> Part:
    with _place(directory) as place:
        return Part("Others", peers.compare(place, loop=LOOPS[0], progress=progress), absent=peers.missing())


def _smaller(plan: disk.Plan, size: int) -> disk.Plan:
    """For the smallest blocks a quarter of the data: it is their number that takes the time."""
    return replace(plan, data=plan.data // 4) if size == BLOCKS[0] else plan


@contextmanager
def _place(directory: str) -> Iterator[str]:
    with tempfile.TemporaryDirectory(dir=directory) as place:
        yield place


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
