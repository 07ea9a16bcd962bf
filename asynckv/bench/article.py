"""The scenario this project started from, here and in a C++ prototype: blocks through a pool that holds a part of them.

The prototype is any program that takes ``BLOCKS POOL_BYTES DIRECTORY KEY_FLOATS VALUE_FLOATS READS`` and prints
``puts N in S s``, ``evicted N``, ``memory hits N disk hits N misses N`` and ``mean disk load T us``. It checks no byte
of what it reads; here every block is verified.
"""

from __future__ import annotations

import re
import resource
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import asynckv
from asynckv.bench.figures import Stopwatch
from asynckv.commands.output import UsageError, run

if TYPE_CHECKING:
    from asynckv.commands.output import Progress

__all__ = ["SCENARIOS", "Scenario", "Story", "tell"]

ROUNDS = 5
_LINE = re.compile(
    r"puts (?P<puts>\d+) in (?P<put_seconds>[\d.]+) s.*evicted (?P<evictions>\d+).*memory hits (?P<memory_hits>\d+)"
    r" disk hits (?P<disk_hits>\d+) misses (?P<misses>\d+).*mean disk load (?P<load_us>[\d.]+) us",
    re.DOTALL,
)


@dataclass(frozen=True)
class Scenario:
    """How many blocks of how many floats go through how large a pool, and how many are read back.

    The prototype's pool is given in bytes of objects of 56 bytes, however long the arrays are that they point to.
    """

    blocks: int
    pool: int
    prototype_pool: int
    key_floats: int
    value_floats: int
    reads: int = 20

    @property
    def block_bytes(self) -> int:
        """Payload of a block."""
        return 4 * (self.key_floats + self.value_floats)


SCENARIOS = (
    Scenario(20_000, 512 << 10, 512 << 10, 10, 5),
    Scenario(20_000, 512 << 20, 512 << 10, 8192, 8192),
)


@dataclass
class Story:
    """What came of one run: seconds elapsed and of CPU time, and how long a load took, in microseconds."""

    seconds: float
    cpu: float
    load_us: float
    evictions: int
    disk_hits: int
    misses: int
    wrong: int = 0
    direct: bool = False


async def _ours(scenario: Scenario, directory: Path, direct: str) -> Story:
    key = np.empty(scenario.key_floats, np.float32)
    value = np.empty(scenario.value_floats, np.float32)
    wrong = 0
    disk = max(64 << 20, 2 * scenario.blocks * (scenario.block_bytes + 4096))
    options: dict[str, Any] = {"memory": scenario.pool, "disk": disk, "direct": direct, "force": True}
    with Stopwatch() as watch:
        async with asynckv.open(directory, **options) as cache:
            for token in range(scenario.blocks):
                key.fill(token)
                value.fill(token)
                wrong += not await cache.put(token, asynckv.CacheBlock(0, key, value))
            evictions = cache.stats().evictions
            for token in range(scenario.reads):
                block = await cache.get(token)
                wrong += block is None or not ((block.key == token).all() and (block.value == token).all())
            stats = cache.stats()
    load = stats.disk_load_seconds_mean * 1e6
    return Story(watch.seconds, watch.cpu, load, evictions, stats.disk_hits, stats.misses, wrong, stats.direct)


def _prototype(program: str, scenario: Scenario, directory: Path) -> Story:
    directory.mkdir()
    words: list[Any] = [program, scenario.blocks, scenario.prototype_pool, directory]
    words += [scenario.key_floats, scenario.value_floats, scenario.reads]
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    try:
        done = subprocess.run([str(word) for word in words], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise UsageError(f"--prototype {program}: {error}") from None
    seconds = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    found = _LINE.search(done.stdout)
    if found is None:
        raise UsageError(f"--prototype {program}: it printed something else: {done.stdout[:200]!r}")
    evictions, hits, misses = (int(found[name]) for name in ("evictions", "disk_hits", "misses"))
    return Story(seconds, cpu, float(found["load_us"]), evictions, hits, misses)


def tell(
    directory: str, scenario: Scenario, *, program: str | None, loop: str, rounds: int = ROUNDS, progress: Progress
) -> dict[str, list[Story]]:
    """Play a scenario with each, in turn, in fresh directories: both buffered, and the store with O_DIRECT."""
    stories: dict[str, list[Story]] = {}
    for number in range(rounds):
        for who in ("asynckv", "asynckv, O_DIRECT", *(["prototype"] if program else [])):
            progress.update(number / rounds, f"the article's blocks, {scenario.block_bytes:,} bytes")
            place = Path(directory, f"article-{who}-{number}")
            try:
                if who == "prototype" and program:
                    story = _prototype(program, scenario, place)
                else:
                    story = run(_ours(scenario, place, "auto" if "DIRECT" in who else "off"), loop)
            finally:
                shutil.rmtree(place, ignore_errors=True)
            stories.setdefault(who, []).append(story)
    return stories
