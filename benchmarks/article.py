"""The article's scenario here and in its prototype: 20,000 blocks through a 0.5 MiB pool, the first 20 read back.

The prototype is any program that takes `BLOCKS POOL_BYTES DIRECTORY KEY_FLOATS VALUE_FLOATS READS` and prints a line
with `puts N in S s`, `evicted N`, `memory hits N disk hits N misses N` and `mean disk load T us`. Both write to fresh
directories on one file system. The prototype checks no byte of what it reads; here every block is verified.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from measure import finish, table

import asynckv

_LINE = re.compile(
    r"puts (?P<puts>\d+) in (?P<put_seconds>[\d.]+) s.*evicted (?P<evictions>\d+).*memory hits (?P<memory_hits>\d+)"
    r" disk hits (?P<disk_hits>\d+) misses (?P<misses>\d+).*mean disk load (?P<load_us>[\d.]+) us"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prototype", help="path of the prototype's program; without it only asynckv runs")
    parser.add_argument("--blocks", type=int, default=20_000)
    parser.add_argument("--pool", type=int, default=512 << 10, help="bytes")
    parser.add_argument("--reads", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", help="where both write (default: a temporary directory)")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    runs: dict[str, list[dict[str, float]]] = {"asynckv": []}
    with tempfile.TemporaryDirectory(dir=given.dir) as root:
        for number in range(given.rounds):
            runs["asynckv"].append(asyncio.run(_ours(given, Path(root) / f"ours-{number}")))
            if given.prototype:
                directory = Path(root) / f"prototype-{number}"
                directory.mkdir()
                runs.setdefault("prototype", []).append(_prototype(given, directory))
    return _report(given, runs)


async def _ours(given: argparse.Namespace, directory: Path) -> dict[str, float]:
    keys = [np.full(10, token, np.float32) for token in range(given.blocks)]
    values = [np.full(5, token, np.float32) for token in range(given.blocks)]
    blocks = [asynckv.CacheBlock(0, key, value) for key, value in zip(keys, values, strict=True)]
    async with asynckv.open(directory, memory=given.pool, disk="64MiB") as cache:
        start = time.perf_counter()
        for token, block in enumerate(blocks):
            if not await cache.put(token, block):
                raise SystemExit(f"no room for block {token}")
        put_seconds = time.perf_counter() - start
        before = cache.stats()
        start = time.perf_counter()
        for token in range(given.reads):
            block = await cache.get(token)
            if block is None or not (block.key == keys[token]).all() or not (block.value == values[token]).all():
                raise SystemExit(f"block {token} is wrong or missing")
        get_seconds = time.perf_counter() - start
        stats = cache.stats()
    return {
        "puts": given.blocks,
        "put_us": put_seconds / given.blocks * 1e6,
        "evictions": before.evictions,
        "memory_hits": stats.memory_hits,
        "disk_hits": stats.disk_hits,
        "misses": stats.misses,
        "load_us": stats.disk_load_seconds_mean * 1e6,
        "get_us": get_seconds / given.reads * 1e6,
    }


def _prototype(given: argparse.Namespace, directory: Path) -> dict[str, float]:
    words = [given.prototype, str(given.blocks), str(given.pool), str(directory), "10", "5", str(given.reads)]
    output = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    found = _LINE.search(output)
    if found is None:
        raise SystemExit(f"the prototype printed something else: {output!r}")
    values = {name: float(text) for name, text in found.groupdict().items()}
    return {
        "puts": values["puts"],
        "put_us": values["put_seconds"] / values["puts"] * 1e6,
        **{name: values[name] for name in ("evictions", "memory_hits", "disk_hits", "misses", "load_us")},
    }


def _report(given: argparse.Namespace, runs: dict[str, list[dict[str, float]]]) -> int:
    medians: dict[str, dict[str, float]] = {
        who: {name: statistics.median(run[name] for run in those) for name in those[0]} for who, those in runs.items()
    }
    ours = medians["asynckv"]
    checks: dict[str, Any] = {
        "memory_hits_0": ours["memory_hits"] == 0,
        "disk_hits_all": ours["disk_hits"] == given.reads,
        "misses_0": ours["misses"] == 0,
    }
    names = ["puts", "put_us", "evictions", "memory_hits", "disk_hits", "misses", "load_us", "get_us"]
    rows = [[name, *(medians[who].get(name, "-") for who in medians)] for name in names]
    text = table(["median of each round", *medians], rows)
    text += "\nload_us: one block from disk, from submission to verified bytes; get_us: the same as its caller sees it"
    return finish({"medians": medians, "runs": runs, "checks": checks}, text, as_json=given.json)


if __name__ == "__main__":
    raise SystemExit(main())
