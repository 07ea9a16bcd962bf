"""No completion is missed: cold O_DIRECT 4 KiB reads, one at a time, through the io_uring engine, under a watchdog.

A missed completion looks like a slow one, because a timer of the engine's finds it later; both are counted here. The
watchdog is a thread that prints all stacks and ends the process when a read takes longer than the limit. Each page of
the file holds its own number, and every page read is checked.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import math
import mmap
import os
import random
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import uvloop
from measure import file_system, finish, note, table

from asynckv.backends.base import Backend, File
from asynckv.backends.uring import UringBackend
from asynckv.bench.figures import percentile

PAGE = 4096
LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
NOT_DISKS = frozenset({"tmpfs", "ramfs"})


class Watchdog:
    """Ends the process when a read takes too long, whatever the event loop does meanwhile."""

    def __init__(self, limit: float, folder: Path) -> None:
        self.limit = limit
        self.folder = folder  # removed before the process ends
        self.began = 0.0  # 0 between reads
        self.number = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._over.wait(self.limit / 20):
            began = self.began
            if began and time.perf_counter() - began > self.limit:
                print(f"read {self.number} has not completed within {self.limit} s", file=sys.stderr)
                faulthandler.dump_traceback(file=sys.stderr)
                shutil.rmtree(self.folder, ignore_errors=True)
                os._exit(1)

    def stop(self) -> None:
        self._over.set()
        self._thread.join()


def make_file(path: Path, size: int) -> None:
    """Fill a file with numbered pages and let the page cache forget them."""
    with path.open("wb") as file:
        for start in range(0, size, 1 << 20):
            pages = range(start // PAGE, min(start + (1 << 20), size) // PAGE)
            file.write(b"".join(number.to_bytes(8, "little") * (PAGE // 8) for number in pages))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


async def _measure(given: argparse.Namespace, path: Path, loop: str) -> dict[str, Any]:
    backend = UringBackend(timeout=math.inf)  # no deadline: the watchdog decides
    await backend.start(path.parent)
    try:
        file = await backend.open(path.name)
        watchdog = Watchdog(given.limit, path.parent)
        try:
            return await _read(given, backend, file, watchdog, loop)
        finally:
            watchdog.stop()
    finally:
        await backend.close()


async def _read(
    given: argparse.Namespace, backend: UringBackend, file: File, watchdog: Watchdog, loop: str
) -> dict[str, Any]:
    pages = file.size // PAGE
    buffer = memoryview(mmap.mmap(-1, PAGE))
    draw = random.Random(given.seed)
    seconds: list[float] = []
    wrong = 0
    start = time.perf_counter()
    for number in range(given.reads):
        page = draw.randrange(pages)
        watchdog.number = number
        watchdog.began = began = time.perf_counter()
        await backend.read(file, page * PAGE, buffer)
        seconds.append(time.perf_counter() - began)
        watchdog.began = 0.0
        wrong += buffer[:8] != page.to_bytes(8, "little") or buffer[:8] != buffer[-8:]
        if number % 10_000 == 0:
            note(f"{loop}: {number:,} reads")
    return {
        "reads": given.reads,
        "reads_per_second": given.reads / (time.perf_counter() - start),
        "p50_us": percentile(seconds, 50) * 1e6,
        "p99_us": percentile(seconds, 99) * 1e6,
        "p999_us": percentile(seconds, 99.9) * 1e6,
        "longest_s": max(seconds),
        "late": sum(second > given.limit for second in seconds),
        "missed_wakes": backend.missed_wakes,
        "wrong": wrong,
        "direct": _is_direct(backend, file),
        "engine": backend.name,
        "ring_works": backend.ring_works,
    }


def _is_direct(backend: Backend, file: File) -> bool:
    return backend.direct and file.direct


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reads", type=int, default=100_000, help="on each loop")
    parser.add_argument("--limit", type=float, default=2.0, help="seconds that one read may take")
    parser.add_argument("--file-mib", type=int, default=1024)
    parser.add_argument("--loop", choices=[*LOOPS, "both"], default="both")
    parser.add_argument("--dir", help="where the file goes, on a real disk (default: the current directory)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(dir=given.dir or os.getcwd()) as root:
        kind = file_system(root)
        path = Path(root) / "pages"
        make_file(path, given.file_mib << 20)
        for loop, factory in LOOPS.items():
            if given.loop in (loop, "both"):
                with asyncio.Runner(loop_factory=factory) as runner:
                    results[loop] = runner.run(_measure(given, path, loop))
    checks = {"on_a_disk": kind not in NOT_DISKS}
    for loop, found in results.items():
        checks |= {
            f"{loop}_direct_through_the_ring": found["direct"] and found["ring_works"],
            f"{loop}_none_late": found["late"] == 0,
            f"{loop}_none_missed": found["missed_wakes"] == 0,
            f"{loop}_none_wrong": found["wrong"] == 0,
        }
    limits = {"longest_s": given.limit, "late": 0, "missed_wakes": 0, "wrong": 0}
    names = ["reads", "reads_per_second", "p50_us", "p99_us", "p999_us", *limits]
    rows = [[name, *(found[name] for found in results.values()), limits.get(name, "-")] for name in names]
    text = table([f"direct reads of 4 KiB on {kind}", *results, "limit"], rows)
    result = {"loops": results, "file_system": kind, "seed": given.seed, "checks": checks}
    return finish(result, text, as_json=given.json)


if __name__ == "__main__":
    raise SystemExit(main())
