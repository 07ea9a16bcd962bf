"""The store leaves its loop free: a 1 ms heartbeat while 2 GiB of 2 MiB blocks are spilled and reloaded.

A control heartbeat beats in another process at the same time, in a loop of the same kind that does nothing else. A beat
is late by the time since it was due, less the time that its thread was runnable and did not run (the run delay of
/proc/self/task/TID/schedstat), which is the machine's doing. On asyncio, a second run without heartbeat times every
callback of the loop by the CPU time of the thread, and tells the worst by name. Only what runs between open and close
counts; the longest ones of open and close are told apart. Beside it another process copies one block at a time from
one place in memory to another and tells the longest of these: a put is such a copy, and not shorter.
"""

from __future__ import annotations

import argparse
import asyncio
import asyncio.events
import gc
import heapq
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from measure import file_system, finish, table

import asynckv
from asynckv.bench.figures import percentile
from asynckv.bench.lateness import Companion, Heartbeat, control
from asynckv.config import parse_size

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
P99_BEYOND_CONTROL_MS = 2.0
P999_BEYOND_CONTROL_MS = 10.0
CALLBACK_MS_MAX = 2.0
WORST = 12
COPY_EVERY_S = 0.003


class Callbacks:
    """CPU time of every callback of an asyncio loop, by name; the worst ones, and totals.

    Attributes
    ----------
    counting
        Whether the store is at work; what runs while it opens and closes is only looked at for the longest.
    around
        (seconds, name) of that one.
    """

    def __init__(self) -> None:
        self.counting = False
        self.around = (0.0, "")
        self.count = 0
        self.worst: list[tuple[float, int, str]] = []
        self.names: dict[str, list[float]] = {}  # count, total, longest

    async def __aenter__(self) -> Callbacks:
        self.counting = True
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.counting = False

    def note(self, seconds: float, callback: Any) -> None:
        name = _name(callback)
        if not self.counting:
            self.around = max(self.around, (seconds, name))
            return
        self.count += 1
        of_name = self.names.setdefault(name, [0, 0.0, 0.0])
        of_name[0] += 1
        of_name[1] += seconds
        of_name[2] = max(of_name[2], seconds)
        if len(self.worst) < WORST:
            heapq.heappush(self.worst, (seconds, self.count, name))
        elif seconds > self.worst[0][0]:
            heapq.heapreplace(self.worst, (seconds, self.count, name))

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Time the callbacks of all asyncio loops of this process; uvloop's are out of reach."""
        plain: Callable[[Any], None] = asyncio.events.Handle._run  # type: ignore[attr-defined]
        clock = time.thread_time_ns

        def run(handle: Any) -> None:
            callback = handle._callback
            start = clock()
            plain(handle)
            self.note((clock() - start) * 1e-9, callback)

        asyncio.events.Handle._run = run  # type: ignore[attr-defined]
        try:
            yield
        finally:
            asyncio.events.Handle._run = plain  # type: ignore[attr-defined]


def _name(callback: Any) -> str:
    """Of a task its coroutine's name, of a bound method or a partial the function's."""
    owner = getattr(callback, "__self__", None)
    if isinstance(owner, asyncio.Task):
        return f"task {getattr(owner.get_coro(), '__qualname__', '?')}"
    callback = getattr(callback, "func", callback)
    module = getattr(callback, "__module__", None) or ""
    return f"{module}.{getattr(callback, '__qualname__', repr(callback))}".strip(".")


async def _work(
    cache: asynckv.Cache, given: argparse.Namespace, sources: list[np.ndarray[Any, np.dtype[np.uint8]]]
) -> dict[str, float]:
    """Put everything through the small pool, then read it all back: each by some tasks at a time."""
    count = parse_size(given.total, "total") // len(sources[0])
    wrong = missing = 0

    async def put_some(first: int) -> None:
        source = sources[first]
        for key in range(first, count, given.tasks):
            source[:8].view(np.uint64)[0] = key
            if not await cache.put(key, source):
                raise SystemExit(f"no room for block {key}")

    async def get_some(first: int) -> None:
        nonlocal wrong, missing
        for key in range(first, count, given.tasks):
            block = await cache.get(key)
            if block is None:
                missing += 1
            else:
                wrong += int(block[:8].view(np.uint64)[0]) != key or int(block[-1]) != int(sources[first][-1])

    start = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for first in range(given.tasks):
            group.create_task(put_some(first))
    await cache.flush()
    middle = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for first in range(given.tasks):
            group.create_task(get_some(first))
    end = time.perf_counter()
    stats = cache.stats()
    return {
        "blocks": count,
        "spill_s": middle - start,
        "reload_s": end - middle,
        "spilled_blocks": stats.spilled_blocks,
        "loaded_blocks": stats.loaded_blocks,
        "missing": missing,
        "wrong": wrong,
        "faults": stats.io_errors + stats.io_timeouts + stats.corrupt_blocks,
    }


async def _store_run(given: argparse.Namespace, directory: Path, observer: Heartbeat | Callbacks) -> dict[str, Any]:
    size = parse_size(given.block_bytes, "block_bytes")
    sources = [np.random.default_rng(number).integers(0, 256, size, np.uint8) for number in range(given.tasks)]
    gc.collect()  # what imports and sources left is not the store's, and would be collected in its time
    async with asynckv.open(directory, memory=given.memory, disk=given.disk, engine=given.engine) as cache:
        async with observer:
            # A task, so that what runs before and after it in this one does not count.
            found = await asyncio.create_task(_work(cache, given, sources))
        stats = cache.stats()
        return {**found, "engine": stats.engine, "direct": stats.direct}


def _with_heartbeat(given: argparse.Namespace, root: str, loop: str) -> dict[str, Any]:
    heart, rounds = Heartbeat(), []
    with control(loop) as beside:
        for _ in range(given.rounds):
            with (
                tempfile.TemporaryDirectory(dir=root) as directory,
                asyncio.Runner(loop_factory=LOOPS[loop]) as runner,
            ):
                rounds.append(runner.run(_store_run(given, Path(directory) / "store", heart)))
    return {"work": rounds, "store": heart.figures(), "control": beside.found}


def _copy_alone(size: int) -> None:
    """Copy blocks until standard input closes, then tell the CPU milliseconds of the median and of the longest copy."""
    source, target = (np.full(128 << 20, number, np.uint8) for number in (1, 2))
    places = range(0, len(source) - size + 1, size)
    spent: list[int] = []
    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
    print("copying", flush=True)
    while not over.wait(COPY_EVERY_S):
        here, there = random.choice(places), random.choice(places)
        start = time.thread_time_ns()
        target[here : here + size] = source[there : there + size]
        spent.append(time.thread_time_ns() - start)
    print(json.dumps([percentile(spent, 50) * 1e-6, max(spent) * 1e-6]), flush=True)


def _with_callbacks(given: argparse.Namespace, root: str) -> tuple[list[dict[str, Any]], Callbacks, list[float]]:
    callbacks = Callbacks()
    rounds = []
    with Companion([__file__, "--copy-alone", "--block-bytes", given.block_bytes]) as beside, callbacks.watched():
        for _ in range(given.rounds):
            with tempfile.TemporaryDirectory(dir=root) as directory:
                rounds.append(asyncio.run(_store_run(given, Path(directory) / "store", callbacks)))
    return rounds, callbacks, beside.found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--total", default="2GiB")
    parser.add_argument("--block-bytes", default="2MiB")
    parser.add_argument("--memory", default="256MiB")
    parser.add_argument("--disk", default="4GiB")
    parser.add_argument("--engine", default="io_uring")
    parser.add_argument("--tasks", type=int, default=8, help="that put, and then read, at a time")
    parser.add_argument("--rounds", type=int, default=3, help="stores in a row; their beats are put together")
    parser.add_argument("--loop", choices=[*LOOPS, "both"], default="both")
    parser.add_argument("--dir", help="where the stores go, on a real disk (default: the current directory)")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--copy-alone", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.copy_alone:
        _copy_alone(parse_size(given.block_bytes, "block_bytes"))
        return 0
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(dir=given.dir or os.getcwd()) as root:
        kind = file_system(root)
        for loop in LOOPS:
            if given.loop in (loop, "both"):
                results[loop] = _with_heartbeat(given, root, loop)
        timed, callbacks, copies = _with_callbacks(given, root)
    return _report(given, kind, results, timed, callbacks, copies)


def _report(
    given: argparse.Namespace,
    kind: str,
    results: dict[str, Any],
    timed: list[dict[str, Any]],
    callbacks: Callbacks,
    copies: list[float],
) -> int:
    checks: dict[str, bool] = {}
    rows: list[tuple[Any, ...]] = []
    for loop, found in results.items():
        rounds, store, control = found["work"], found["store"], found["control"]
        for name, beyond in (("p99_ms", P99_BEYOND_CONTROL_MS), ("p999_ms", P999_BEYOND_CONTROL_MS)):
            checks[f"{loop}_{name[:-3]}_at_most_control_plus_{beyond:.0f}_ms"] = store[name] <= control[name] + beyond
            rows.append((f"{loop} {name}", store[name], control[name], control[name] + beyond))
        rows.append((f"{loop} max_ms", store["max_ms"], control["max_ms"], "-"))
        rows.append((f"{loop} run delay, s", store["run_delay_s"], control["run_delay_s"], "-"))
        rows.append((f"{loop} beats", store["beats"], control["beats"], "-"))
        rows.append((f"{loop} spill, mean s", sum(work["spill_s"] for work in rounds) / len(rounds), "-", "-"))
        rows.append((f"{loop} reload, mean s", sum(work["reload_s"] for work in rounds) / len(rounds), "-", "-"))
    for name, rounds in (*((loop, found["work"]) for loop, found in results.items()), ("timed", timed)):
        checks[f"{name}_all_there_and_right"] = not any(w["missing"] or w["wrong"] or w["faults"] for w in rounds)
        checks[f"{name}_all_spilled"] = all(work["spilled_blocks"] >= work["blocks"] for work in rounds)
    own = max(longest for _, _, longest in callbacks.names.values()) * 1e3
    checks["longest_own_callback_at_most_2_ms"] = own <= CALLBACK_MS_MAX
    rows.append(("asyncio longest callback, CPU ms", own, "-", CALLBACK_MS_MAX))
    rows.append(("bare copies beside it, median and longest", *copies, "-"))
    around_s, around = callbacks.around
    rows.append((f"the same in open and close: {around}", around_s * 1e3, "-", "-"))
    worst = [(name, seconds * 1e3) for seconds, _, name in sorted(callbacks.worst, reverse=True)]
    by_name = [
        (name, int(count), total * 1e3, longest * 1e3)
        for name, (count, total, longest) in sorted(callbacks.names.items(), key=lambda item: -item[1][1])
    ]
    text = table([f"{given.total} of {given.block_bytes}, {kind}", "store", "control", "limit"], rows)
    text += "\n\n" + table(["the longest callbacks", "CPU ms"], worst)
    text += "\n\n" + table(["callbacks by total", "count", "CPU ms", "longest, ms"], by_name[:WORST])
    result = {
        "loops": results, "timed": timed, "file_system": kind, "own_callback_ms_max": own, "worst": worst,
        "bare_copy_ms": copies, "open_close_callback_ms_max": around_s * 1e3, "callbacks": by_name, "checks": checks,
    }  # fmt: skip
    return finish(result, text, as_json=given.json)


if __name__ == "__main__":
    raise SystemExit(main())
