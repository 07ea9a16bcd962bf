"""Nothing piles up and nothing burns: short lives, an idle store, and processes that leave without closing.

- churn: asyncio.run(open, put, close) over and over in one process: descriptors, threads, rings, locked and resident
  memory stay where they were after the first lives
- idle: a store that is open and has nothing to do takes almost no CPU
- exits: processes that end with I/O pending and without close: exit status 0, soon, and what they had flushed is there
  for the next one, at once
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import uvloop
from measure import file_system, finish, note, resident_bytes, status_value, table

import asynckv

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
IDLE_CPU_PERCENT_MAX = 0.5
EXIT_SECONDS_MAX = 5.0
KEYS = 64
RESIDENT_GROWTH_MAX = 4 << 20  # bytes, over all lives but the first ones; a leak of one 4 KiB page a life is twice that
SETTLE_S = 2.0  # for threads that were told to end, and for the kernel's that served a ring
PENDING_BLOCK = 1 << 20
PENDING_KEPT = 24  # blocks flushed before the end
ENDINGS = ("return", "sys.exit", "exception caught outside", "loop left open")


def _gauges() -> dict[str, int]:
    names = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:  # the listing's own
            continue
    return {
        "fds": len(names),
        "rings": sum("[io_uring]" in name for name in names),
        "threads": status_value("Threads"),
        "locked_kb": status_value("VmLck"),
        "pinned_kb": status_value("VmPin"),
        "mapped_kb": status_value("VmSize"),
        "resident_bytes": resident_bytes(),
    }


# churn


async def _life(given: argparse.Namespace, directory: Path, number: int) -> None:
    async with asynckv.open(directory, memory="1MiB", disk=given.disk, segment="1MiB", engine=given.engine) as cache:
        if number == 0 and given.engine not in ("auto", cache.stats().engine):
            raise SystemExit(f"the engine is {cache.stats().engine}")
        if not await cache.put(number % KEYS, number.to_bytes(8, "little") * 512):
            raise SystemExit("no room")


def _churn(given: argparse.Namespace, root: Path) -> dict[str, Any]:
    samples = []
    settled = max(1, given.lives // 10)
    start = time.perf_counter()
    for number in range(given.lives):
        loop = list(LOOPS)[number % 2] if given.loop == "both" else given.loop
        with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
            runner.run(_life(given, root / "churn", number))
        if number + 1 >= settled and (number + 1) % settled == 0:
            gc.collect()
            gauges = _gauges()
            until = time.monotonic() + SETTLE_S
            while samples and gauges["threads"] > samples[0]["threads"] and time.monotonic() < until:
                time.sleep(0.01)
                gauges = _gauges()
            samples.append(gauges | {"files": len(os.listdir(root / "churn"))})
            note(f"{number + 1} lives: {samples[-1]}")
    return {"lives": given.lives, "seconds": time.perf_counter() - start, "samples": samples}


# idle


async def _idle(given: argparse.Namespace, root: Path) -> dict[str, Any]:
    async with asynckv.open(root / "idle", memory="16MiB", disk="256MiB", engine=given.engine) as cache:
        for key in range(256):
            await cache.put(key, key.to_bytes(8, "little") * 8192)
        await cache.flush()
        for key in range(256):
            await cache.get(key)
        await asyncio.sleep(1)
        cpu, wall = time.process_time(), time.perf_counter()
        await asyncio.sleep(given.idle)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        return {"seconds": wall, "cpu_seconds": cpu, "cpu_percent": 100 * cpu / wall, "engine": cache.stats().engine}


# exits


def _pattern(key: int) -> bytes:
    return random.Random(key).randbytes(64) * (PENDING_BLOCK // 64)


async def _get_for_ever(cache: asynckv.Cache) -> None:
    while True:
        await cache.get(random.randrange(PENDING_KEPT))


async def _put_for_ever(cache: asynckv.Cache) -> None:
    while True:
        key = PENDING_KEPT + random.randrange(PENDING_KEPT)
        await cache.put(key, _pattern(key))


async def _begin_and_leave(given: argparse.Namespace) -> None:
    """Have blocks on disk, then have reads and writes in flight, tell how many, and stop right there."""
    cache = await asynckv.open(given.dir, memory="16MiB", disk="1GiB", engine=given.engine)
    for key in range(PENDING_KEPT):
        await cache.put(key, _pattern(key))
    await cache.flush()
    global _kept
    _kept = [cache, *(asyncio.ensure_future(work(cache)) for work in (_get_for_ever, _put_for_ever) for _ in range(8))]
    until = time.monotonic() + 5
    stats = cache.stats()
    while not (stats.reads_in_flight and stats.writes_in_flight) and time.monotonic() < until:
        await asyncio.sleep(0)
        stats = cache.stats()
    print(json.dumps([stats.reads_in_flight, stats.writes_in_flight, stats.engine]), flush=True)
    if given.ending == "sys.exit":
        sys.exit(0)
    if given.ending == "exception caught outside":
        raise KeyError


_kept: list[Any] = []  # what lives until the interpreter ends


def _leave(given: argparse.Namespace) -> None:
    """Leave the store in one of several ways; what it then says of tasks left alone is not of interest."""
    warnings.simplefilter("ignore", ResourceWarning)  # the store and the loop are left open on purpose
    if given.ending == "loop left open":
        loop = LOOPS[given.loop]()
        loop.run_until_complete(_begin_and_leave(given))
        _kept.append(loop)
        return
    with asyncio.Runner(loop_factory=LOOPS[given.loop]) as runner:
        try:
            runner.run(_begin_and_leave(given))
        except KeyError:
            return


async def _reopen(given: argparse.Namespace, directory: Path) -> int:
    """How many flushed blocks the next process finds, whole and right."""
    right = 0
    async with asynckv.open(directory, memory="16MiB", disk="1GiB", engine=given.engine) as cache:
        for key in range(PENDING_KEPT):
            block = await cache.get(key)
            right += block is not None and bytes(block) == _pattern(key)
    return right


def _exits(given: argparse.Namespace, root: Path) -> dict[str, Any]:
    runs = []
    loops = list(LOOPS) if given.loop == "both" else [given.loop]
    for number in range(given.exits):
        ending, loop = ENDINGS[number % len(ENDINGS)], loops[number // len(ENDINGS) % len(loops)]
        with tempfile.TemporaryDirectory(dir=root) as folder:
            directory = Path(folder) / "store"
            command = [sys.executable, __file__, "--leave", "--ending", ending, "--loop", loop, "--dir", str(directory)]
            command += ["--engine", given.engine]
            run: dict[str, Any] = {"ending": ending, "loop": loop}
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
                assert process.stdout is not None
                line = process.stdout.readline()  # told at the moment of leaving
                start = time.perf_counter()
                try:
                    _, errors = process.communicate(timeout=60)
                except subprocess.TimeoutExpired:
                    process.kill()
                    _, errors = process.communicate()
                run["seconds"] = time.perf_counter() - start
            run["status"], run["stderr"] = process.returncode, errors[-2000:]
            run["reads"], run["writes"], run["engine"] = json.loads(line) if line else (0, 0, "")
            start = time.perf_counter()
            run["right"] = asyncio.run(_reopen(given, directory))
            run["reopen_seconds"] = time.perf_counter() - start
        runs.append(run)
        note(f"{number + 1} exits: {run}")
    return {"runs": runs}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lives", type=int, default=2000)
    parser.add_argument("--disk", default="4MiB", help="of the churned store; each life begins a segment of its own")
    parser.add_argument("--idle", type=float, default=60.0, help="seconds")
    parser.add_argument("--exits", type=int, default=200)
    parser.add_argument("--engine", default="io_uring")
    parser.add_argument("--loop", choices=[*LOOPS, "both"], default="both", help="both: by turns")
    parser.add_argument("--dir", help="where the stores go, on a real disk (default: the current directory)")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--leave", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--ending", choices=ENDINGS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.leave:
        _leave(given)
        return 0
    result: dict[str, Any] = {"checks": {}}
    rows: list[tuple[Any, ...]] = []
    with tempfile.TemporaryDirectory(dir=given.dir or os.getcwd()) as folder:
        result["file_system"] = file_system(folder)
        if given.lives:
            result["churn"] = _churn(given, Path(folder))
            _judge_churn(result, rows)
        if given.idle:
            result["idle"] = {}
            for loop, factory in LOOPS.items():
                if given.loop in (loop, "both"):
                    with asyncio.Runner(loop_factory=factory) as runner:
                        result["idle"][loop] = runner.run(_idle(given, Path(folder)))
            _judge_idle(result, rows)
        if given.exits:
            result["exits"] = _exits(given, Path(folder))
            _judge_exits(result, rows)
    text = table(["", "first", "last or worst", "limit"], rows)
    return finish(result, text, as_json=given.json)


def _judge_churn(result: dict[str, Any], rows: list[tuple[Any, ...]]) -> None:
    samples = result["churn"]["samples"]
    first, last = samples[0], samples[-1]
    for name in ("fds", "rings", "threads", "locked_kb", "pinned_kb"):
        result["checks"][f"churn_{name}_flat"] = max(sample[name] for sample in samples) == first[name]
        rows.append((f"churn: {name}", first[name], max(sample[name] for sample in samples), first[name]))
    limit = first["resident_bytes"] + RESIDENT_GROWTH_MAX
    result["checks"]["churn_resident_flat"] = last["resident_bytes"] <= limit
    rows.append(("churn: resident KiB", first["resident_bytes"] >> 10, last["resident_bytes"] >> 10, limit >> 10))
    rows.append(("churn: mapped KiB", first["mapped_kb"], last["mapped_kb"], "-"))
    rows.append(("churn: files in the directory", first["files"], last["files"], "-"))
    rows.append(("churn: ms a life", "-", result["churn"]["seconds"] / result["churn"]["lives"] * 1e3, "-"))


def _judge_idle(result: dict[str, Any], rows: list[tuple[Any, ...]]) -> None:
    for loop, found in result["idle"].items():
        result["checks"][f"idle_{loop}_below_0.5_percent"] = found["cpu_percent"] < IDLE_CPU_PERCENT_MAX
        rows.append((f"idle: CPU %, {loop}, {found['seconds']:.0f} s", "-", found["cpu_percent"], IDLE_CPU_PERCENT_MAX))


def _judge_exits(result: dict[str, Any], rows: list[tuple[Any, ...]]) -> None:
    runs = result["exits"]["runs"]
    pending = sum(bool(run["reads"] or run["writes"]) for run in runs)
    both = sum(bool(run["reads"] and run["writes"]) for run in runs)
    good = sum(run["status"] == 0 for run in runs)
    warm = sum(run["right"] == PENDING_KEPT for run in runs)
    slowest = max(run["seconds"] for run in runs)
    result["checks"] |= {
        "exits_all_with_io_pending": pending == len(runs),
        "exits_all_status_0": good == len(runs),
        "exits_all_within_5_s": slowest < EXIT_SECONDS_MAX,
        "exits_all_warm_again": warm == len(runs),
    }
    rows.append(("exits: with I/O pending", "-", pending, len(runs)))
    rows.append(("exits: reads and writes pending", "-", both, "-"))
    rows.append(("exits: status 0", "-", good, len(runs)))
    rows.append(("exits: slowest, s", "-", slowest, EXIT_SECONDS_MAX))
    rows.append((f"exits: all {PENDING_KEPT} flushed blocks there again", "-", warm, len(runs)))
    rows.append(("exits: slowest reopening, s", "-", max(run["reopen_seconds"] for run in runs), "-"))
    rows.append(("exits: silent", "-", sum(not run["stderr"] for run in runs), "-"))
    for ending in ENDINGS:
        those = [run for run in runs if run["ending"] == ending]
        if those:
            rows.append((f"exits: {ending}, slowest s", "-", max(run["seconds"] for run in those), EXIT_SECONDS_MAX))


if __name__ == "__main__":
    raise SystemExit(main())
