"""What a read costs through each engine: CPU per cached 4 KiB read, and throughput of direct 64 KiB random reads.

One batch of `depth` reads is submitted and awaited at a time. All engines run in one process in short slices by turns,
so that a noisy neighbour falls on all of them; the figure is the median of the slices. CPU is that of the whole
process: loop, worker threads and kernel. The raw loop of the second table calls preadv directly, from `depth` threads.
"""

from __future__ import annotations

import argparse
import asyncio
import mmap
import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Iterable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import uvloop
from measure import file_system, finish, note, table

from asynckv.backends import create_backend
from asynckv.backends.base import Backend, File

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
ENGINES = ("io_uring", "threads", "aiofiles")
CPU_RATIO_MAX = 0.2
CACHED, CACHED_DEPTHS = 4 << 10, (1, 8, 64)
DIRECT, DIRECT_DEPTHS = 64 << 10, (1, 8, 32)


def make_file(path: Path, size: int) -> None:
    with path.open("wb") as file:
        for _ in range(0, size, 1 << 20):
            file.write(os.urandom(1 << 20))
        file.flush()
        os.fsync(file.fileno())  # the pages stay in the page cache


async def _started(stack: AsyncExitStack, engine: str, path: Path, *, direct: bool) -> tuple[Backend, File]:
    backend = create_backend(engine, direct=direct, timeout=60.0)
    await backend.start(path.parent)
    stack.push_async_callback(backend.close)
    if backend.name != engine or backend.direct is not direct:
        raise SystemExit(f"{engine} runs as {backend.name}, direct {backend.direct}")
    return backend, await backend.open(path.name)


async def _slice(backend: Backend, file: File, offsets: Iterable[int], buffers: list[memoryview]) -> None:
    """Read at these offsets, a batch of as many as there are buffers at a time."""
    read, depth = backend.read, len(buffers)
    at = iter(offsets)
    if depth == 1:
        (buffer,) = buffers
        for offset in at:
            await read(file, offset, buffer)
        return
    while batch := [read(file, offset, buffer) for buffer, offset in zip(buffers, at, strict=False)]:
        for future in batch:
            await future


async def _cached(given: argparse.Namespace, path: Path) -> dict[str, dict[int, float]]:
    """Median microseconds of CPU per read, by engine and depth."""
    draw = random.Random(given.seed)
    spent: dict[str, dict[int, list[float]]] = {engine: {depth: [] for depth in CACHED_DEPTHS} for engine in ENGINES}
    async with AsyncExitStack() as stack:
        started = {engine: await _started(stack, engine, path, direct=False) for engine in ENGINES}
        for round_ in range(given.rounds + 1):
            for depth in CACHED_DEPTHS:
                buffers = [memoryview(mmap.mmap(-1, CACHED)) for _ in range(depth)]
                for engine, (backend, file) in started.items():
                    count = given.slice - given.slice % depth
                    offsets = [draw.randrange(file.size // CACHED) * CACHED for _ in range(count)]
                    start = time.process_time_ns()
                    await _slice(backend, file, offsets, buffers)
                    if round_:  # the first round warms up
                        spent[engine][depth].append((time.process_time_ns() - start) / count / 1e3)
            note(f"cached: round {round_} of {given.rounds}")
    return {
        engine: {depth: statistics.median(found) for depth, found in by_depth.items()}
        for engine, by_depth in spent.items()
    }


def _raw(path: Path, offsets: list[int], depth: int) -> None:
    """The same reads by plain preadv, from `depth` threads."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)

    def read(first: int) -> None:
        buffers = [mmap.mmap(-1, DIRECT)]
        for offset in offsets[first::depth]:
            if os.preadv(fd, buffers, offset) != DIRECT:
                raise SystemExit("a short read")

    try:
        threads = [threading.Thread(target=read, args=(first,)) for first in range(1, depth)]
        for thread in threads:
            thread.start()
        read(0)
        for thread in threads:
            thread.join()
    finally:
        os.close(fd)


async def _direct(given: argparse.Namespace, path: Path) -> dict[str, dict[int, float]]:
    """Median MiB/s of direct random reads, by engine and depth."""
    draw = random.Random(given.seed)
    speed: dict[str, dict[int, list[float]]] = {
        engine: {depth: [] for depth in DIRECT_DEPTHS} for engine in ("raw preadv", *ENGINES)
    }
    async with AsyncExitStack() as stack:
        started = {engine: await _started(stack, engine, path, direct=True) for engine in ENGINES}
        for round_ in range(given.rounds + 1):
            for depth in DIRECT_DEPTHS:
                buffers = [memoryview(mmap.mmap(-1, DIRECT)) for _ in range(depth)]
                for engine in speed:
                    count = given.direct_slice - given.direct_slice % depth
                    offsets = [draw.randrange((given.file_mib << 20) // DIRECT) * DIRECT for _ in range(count)]
                    start = time.perf_counter()
                    if engine in started:
                        await _slice(*started[engine], offsets, buffers)
                    else:
                        _raw(path, offsets, depth)
                    if round_:
                        speed[engine][depth].append(count * DIRECT / 2**20 / (time.perf_counter() - start))
            note(f"direct: round {round_} of {given.rounds}")
    return {
        engine: {depth: statistics.median(found) for depth, found in by_depth.items()}
        for engine, by_depth in speed.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--slice", type=int, default=2048, help="cached reads in one slice")
    parser.add_argument("--direct-slice", type=int, default=512, help="direct reads in one slice")
    parser.add_argument("--file-mib", type=int, default=256)
    parser.add_argument("--loop", choices=[*LOOPS, "both"], default="both")
    parser.add_argument("--dir", help="where the file goes, on a real disk (default: the current directory)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-direct", action="store_true", help="leave the second table out")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    result: dict[str, Any] = {"checks": {}, "cpu_us": {}, "mib_per_s": {}}
    with tempfile.TemporaryDirectory(dir=given.dir or os.getcwd()) as root:
        kind = result["file_system"] = file_system(root)
        path = Path(root) / "data"
        make_file(path, given.file_mib << 20)
        for loop, factory in LOOPS.items():
            if given.loop in (loop, "both"):
                with asyncio.Runner(loop_factory=factory) as runner:
                    result["cpu_us"][loop] = runner.run(_cached(given, path))
                    if not given.no_direct:
                        result["mib_per_s"][loop] = runner.run(_direct(given, path))
    return finish(result, _judge(result, kind), as_json=given.json)


def _judge(result: dict[str, Any], kind: str) -> str:
    rows = []
    for loop, found in result["cpu_us"].items():
        for depth in CACHED_DEPTHS:
            ratio = found["io_uring"][depth] / found["aiofiles"][depth]
            result["checks"][f"{loop}_depth_{depth}_ratio_at_most_{CPU_RATIO_MAX}"] = ratio <= CPU_RATIO_MAX
            each = (found[engine][depth] for engine in ENGINES)
            rows.append((f"{loop}, depth {depth}", *each, ratio, CPU_RATIO_MAX))
    text = table(["CPU us per cached 4 KiB read", *ENGINES, "io_uring / aiofiles", "limit"], rows)
    rows = [
        (f"{loop}, depth {depth}", *(by_depth[depth] for by_depth in found.values()),
         found["io_uring"][depth] / found["raw preadv"][depth])
        for loop, found in result["mib_per_s"].items()
        for depth in DIRECT_DEPTHS
    ]  # fmt: skip
    if rows:
        heads = [f"MiB/s, direct 64 KiB, {kind}", "raw preadv", *ENGINES, "io_uring / raw"]
        text += "\n\n" + table(heads, rows)
    return text


if __name__ == "__main__":
    raise SystemExit(main())
