"""A million blocks of 4 KiB on disk: resident bytes per block, reopen after a clean close, serving after kill -9.

One process fills the store, measures its memory as the index grows, flushes and is killed. A second one opens what is
left (page cache dropped), measures the time until a random flushed key is served and until all are found, checks a
sample and closes. A third one opens that and checks a sample again.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from measure import allocated_bytes, drop_page_cache, finish, mix, note, resident_bytes, resident_in_mapping, table

import asynckv

OPEN_SECONDS_MAX = 2.0
SERVED_SECONDS_MAX = 2.0
FOUND_SECONDS_MAX = 30.0
RESIDENT_PER_BLOCK_MAX = 128
RESIDENT_BLOCKS_MIN = 250_000  # below, buffers and the allocator's own steps weigh more than the index
SAMPLE = 2_000


def key_of(number: int, kind: str) -> Any:
    return mix(number) if kind == "int" else hashlib.sha256(number.to_bytes(8, "little")).digest()


def block_of(number: int, size: int) -> bytes:
    return (mix(number) & (1 << 64) - 1).to_bytes(8, "little") * (size // 8)


def tell(name: str, value: Any) -> None:
    print(json.dumps([name, value]), flush=True)


async def _open(given: argparse.Namespace) -> asynckv.Cache:
    return await asynckv.open(given.dir, memory=given.memory, disk=given.disk)


async def _recovered(cache: asynckv.Cache) -> None:
    while cache.stats().recovering:  # noqa: ASYNC110 -- users have no event to wait for either
        await asyncio.sleep(0.005)


async def _sample(given: argparse.Namespace, cache: asynckv.Cache) -> int:
    """Read some random blocks and compare all their bytes; how many were missing or wrong."""
    bad = 0
    for number in random.Random(4).sample(range(given.blocks), min(SAMPLE, given.blocks)):
        block = await cache.get(key_of(number, given.keys))
        bad += block is None or bytes(block) != block_of(number, given.block_bytes)
    return bad


async def _fill(given: argparse.Namespace) -> None:
    """Put everything; resident bytes are counted from the moment at which the pool was full and touched."""
    cache = await _open(given)
    pool_blocks = cache.stats().memory_capacity // given.block_bytes
    points: list[tuple[int, int]] = []  # (blocks on disk, resident bytes)
    start = time.perf_counter()
    step = max(1, given.blocks // 512)
    for number in range(given.blocks):
        if not await cache.put(key_of(number, given.keys), block_of(number, given.block_bytes)):
            raise SystemExit(f"no room for block {number}")
        if number >= 2 * pool_blocks and number % step == 0:
            points.append((cache.stats().disk_blocks, resident_bytes()))
    await cache.flush()
    tell("fill_seconds", time.perf_counter() - start)
    points.append((cache.stats().disk_blocks, resident_bytes()))
    stats = cache.stats()
    tell("fill_dropped", stats.dropped_blocks)
    tell("fill_points", points)
    tell("disk_bytes_written", stats.disk_bytes_written)
    tell("filled", stats.disk_blocks)
    await asyncio.sleep(3600)  # until killed


def _beside_the_pool(cache: asynckv.Cache) -> int:
    """Resident bytes without those of the pool, some of which are there before they are used."""
    return resident_bytes() - resident_in_mapping(cache.stats().memory_capacity)


async def _after_kill(given: argparse.Namespace) -> None:
    number = random.Random(given.seed).randrange(given.blocks)
    before = resident_bytes()
    start = time.perf_counter()
    cache = await _open(given)
    tell("kill_open_seconds", time.perf_counter() - start)
    block = await cache.get(key_of(number, given.keys))
    tell("kill_served_seconds", time.perf_counter() - start)
    tell("kill_served_right", block is not None and bytes(block) == block_of(number, given.block_bytes))
    del block
    await _recovered(cache)
    tell("kill_found_seconds", time.perf_counter() - start)
    tell("kill_found_blocks", len(cache))
    tell("kill_resident_per_block", (_beside_the_pool(cache) - before) / max(1, len(cache)))
    tell("kill_sample_bad", await _sample(given, cache))
    start = time.perf_counter()
    await cache.close()
    tell("close_seconds", time.perf_counter() - start)


async def _after_close(given: argparse.Namespace) -> None:
    before = resident_bytes()
    start = time.perf_counter()
    cache = await _open(given)
    tell("clean_open_seconds", time.perf_counter() - start)
    await _recovered(cache)
    tell("clean_found_seconds", time.perf_counter() - start)
    tell("clean_found_blocks", len(cache))
    tell("clean_resident_per_block", (_beside_the_pool(cache) - before) / max(1, len(cache)))
    tell("clean_sample_bad", await _sample(given, cache))
    await cache.close()


STAGES = {"fill": _fill, "after-kill": _after_kill, "after-close": _after_close}


def _run(stage: str, given: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Run a stage in a process of its own; the filling one is killed when it says that it is done."""
    command = [sys.executable, __file__, "--stage", stage, "--dir", str(directory), "--blocks", str(given.blocks)]
    command += ["--block-bytes", str(given.block_bytes), "--memory", given.memory, "--disk", given.disk]
    command += ["--keys", given.keys, "--seed", str(given.seed)]
    found: dict[str, Any] = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            name, value = json.loads(line)
            found[name] = value
            if name != "fill_points":
                note(f"{name}: {value}")
            if name == "filled":
                os.kill(process.pid, signal.SIGKILL)
    if process.returncode not in (0, -signal.SIGKILL if stage == "fill" else 0):
        raise SystemExit(f"stage {stage} ended with status {process.returncode}")
    return found


def _growth(points: list[tuple[int, int]]) -> dict[str, float]:
    """Resident bytes that one block on disk adds, between the first point and moments before and after growth.

    Growth shows as the largest step between two neighbouring points; the points on its sides are the moments asked for.
    """
    first_blocks, first_bytes = points[0]
    late = [point for point in points if point[0] - first_blocks >= (points[-1][0] - first_blocks) / 4]

    def per_block(point: tuple[int, int]) -> float:
        return (point[1] - first_bytes) / max(1, point[0] - first_blocks)

    steps = [(after[1] - before[1], before, after) for before, after in pairwise(late)]
    step, before, after = max(steps, default=(0, points[0], points[-1]))
    return {
        "before_largest_step": per_block(before),
        "after_largest_step": per_block(after),
        "largest_step_bytes": step,
        "highest": max(per_block(point) for point in late),
        "at_end": per_block(points[-1]),
    }


def _measure(given: argparse.Namespace, directory: Path) -> int:
    found = _run("fill", given, directory)
    found["allocated_bytes"] = allocated_bytes(directory)
    if not given.warm:
        drop_page_cache(directory)
    found |= _run("after-kill", given, directory)
    if not given.warm:
        drop_page_cache(directory)
    found |= _run("after-close", given, directory)
    growth = _growth([tuple(point) for point in found.pop("fill_points")])
    found["fill_resident_per_block"] = growth
    checks = {
        "all_found_after_kill": found["kill_found_blocks"] == given.blocks,
        "all_found_after_close": found["clean_found_blocks"] == given.blocks,
        "none_wrong": found["kill_sample_bad"] == found["clean_sample_bad"] == 0 and found["kill_served_right"],
        "clean_open_below_2_s": found["clean_found_seconds"] < OPEN_SECONDS_MAX,
        "served_after_kill_within_2_s": found["kill_served_seconds"] < SERVED_SECONDS_MAX,
        "found_after_kill_within_30_s": found["kill_found_seconds"] < FOUND_SECONDS_MAX,
    }
    if given.blocks >= RESIDENT_BLOCKS_MIN:
        resident = max(growth["highest"], found["clean_resident_per_block"])
        checks["resident_per_block_at_most_128"] = resident <= RESIDENT_PER_BLOCK_MAX
    rows = [
        ("fill and flush, s", found["fill_seconds"], "-"),
        ("after kill -9: open, s", found["kill_open_seconds"], "-"),
        ("after kill -9: random key served, s", found["kill_served_seconds"], SERVED_SECONDS_MAX),
        ("after kill -9: all found, s", found["kill_found_seconds"], FOUND_SECONDS_MAX),
        ("after kill -9: blocks found", found["kill_found_blocks"], given.blocks),
        ("clean close, s", found["close_seconds"], "-"),
        ("after clean close: open, s", found["clean_open_seconds"], OPEN_SECONDS_MAX),
        ("after clean close: blocks found", found["clean_found_blocks"], given.blocks),
        ("resident bytes per block, before growth", growth["before_largest_step"], RESIDENT_PER_BLOCK_MAX),
        ("resident bytes per block, after growth", growth["after_largest_step"], RESIDENT_PER_BLOCK_MAX),
        ("resident bytes per block, highest", growth["highest"], RESIDENT_PER_BLOCK_MAX),
        ("resident bytes per block, all filled", growth["at_end"], RESIDENT_PER_BLOCK_MAX),
        ("resident bytes per block, after kill -9", found["kill_resident_per_block"], "-"),
        ("resident bytes per block, reopened", found["clean_resident_per_block"], RESIDENT_PER_BLOCK_MAX),
        ("allocated on disk, MiB", found["allocated_bytes"] / 2**20, "-"),
    ]
    heads = [f"{given.blocks:,} blocks of {given.block_bytes} bytes", "measured", "limit"]
    return finish({**found, "checks": checks}, table(heads, rows), as_json=given.json)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--block-bytes", type=int, default=4096)
    parser.add_argument("--memory", default="256MiB")
    parser.add_argument("--disk", default="12GiB")
    parser.add_argument("--keys", choices=["int", "bytes32"], default="int")
    parser.add_argument("--dir", help="where the store goes (default: a temporary directory)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--warm", action="store_true", help="leave the page cache alone between the stages")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--stage", choices=list(STAGES), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.stage:
        asyncio.run(STAGES[given.stage](given))
        return 0
    with tempfile.TemporaryDirectory(dir=given.dir) as root:
        return _measure(given, Path(root) / "store")


if __name__ == "__main__":
    raise SystemExit(main())
