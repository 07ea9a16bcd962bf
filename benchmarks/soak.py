"""One store under a steady mix of calls and a trickle of faults, for an hour: nothing wrong, no growth, no slow-down.

First the peak rate of the mix is measured; then the store runs at 70 % of it, while one disk operation in a thousand
fails, is cut short, comes late or has a bit flipped. Every value tells what it is, and every byte that is read is
checked. Resident memory, descriptors, threads, latencies and counters are sampled. At the end the faults stop, the
store is closed and opened again, and no key may have another value than its last one.

- put, get, get_into, reserve, stream, delete, flush, prefetch, request batches; 16 clients, each with keys of its own
- resident memory: least squares over the samples after the warm-up; what counts is the slope less two standard errors
- descriptors, threads: the medians of the last and of the first quarter of the samples after it; a ring's kernel
  threads come and go, and one more at the end is none that leaked
- drift: the median of the windows' p99 in the last quarter, against that in the first one
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import math
import os
import random
import statistics
import struct
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from measure import file_system, finish, note, resident_bytes, status_value, table

import asynckv
from asynckv.backends import create_backend
from asynckv.config import parse_size
from asynckv.testing import FaultyBackend, Script, corrupt, error, short, slow

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
RATE_SHARE = 0.7
FAULT_PROBABILITY = 1 / 1000
SLOW_S = 0.05
CLIENTS = 16
SIZES = (4096, 5000, 16_384, 32_768, 65_536, 100_000)
BATCH = 12
WARM_UP_SHARE = 1 / 6
BEHIND_S_MAX = 1.0  # what was missed beyond that is not made up for
WINDOW_CALLS_MAX = 1 << 15  # whose latency is kept in one window
SLOPE_MIB_PER_HOUR_MAX = 1.0
DRIFT_MAX = 0.10
TURNOVERS_MIN = 20

_HEAD = struct.Struct("<QQQ")  # key, version, length
_NOISE = np.random.default_rng(11).integers(0, 256, 1 << 20, dtype=np.uint8)

# How often each call is made, in a hundred.
MIX = {
    "get": 52, "put": 20, "get_into": 6, "reserve": 5, "stream": 4, "request": 6, "delete": 4, "prefetch": 2.9,
    "flush": 0.1,
}  # fmt: skip

COLUMNS = (
    "seconds", "resident_bytes", "fds", "threads", "calls", "memory_p50_us", "memory_p99_us", "disk_p50_us",
    "disk_p99_us", "loaded_bytes", "disk_bytes_written", "io_errors", "io_timeouts", "corrupt_blocks",
    "dropped_blocks", "disk_off",
)  # fmt: skip


def value_of(key: int, version: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The bytes of a version of a key; the first ones tell which it is."""
    size = SIZES[(key * 31 + version * 17) % len(SIZES)]
    start = (key * 7919 + version * 104_729) % (len(_NOISE) - size)
    data = _NOISE[start : start + size].copy()
    data[: _HEAD.size] = np.frombuffer(_HEAD.pack(key, version, size), np.uint8)
    return data


class Latencies:
    """Seconds of the calls of one window, in memory that is there from the beginning."""

    def __init__(self) -> None:
        self._values = np.zeros(WINDOW_CALLS_MAX)
        self._count = 0

    def add(self, seconds: float) -> None:
        self._values[self._count % WINDOW_CALLS_MAX] = seconds
        self._count += 1

    def take(self) -> tuple[float, float]:
        """p50 and p99 in microseconds, nan without any; begins a new window."""
        values = self._values[: min(self._count, WINDOW_CALLS_MAX)]
        self._count = 0
        if not len(values):
            return math.nan, math.nan
        return float(np.percentile(values, 50)) * 1e6, float(np.percentile(values, 99)) * 1e6


class Load:
    """Clients that put, read and check; each key has one client, so its calls have one order."""

    def __init__(self, cache: asynckv.Cache, keys: int, seed: int) -> None:
        self.cache = cache
        self.random = random.Random(seed)
        self.versions = np.zeros(keys, np.int64)  # under each key now; 0 is absent
        self.next = np.ones(keys, np.int64)
        self.calls = 0
        self.put_bytes = 0
        self.wrong: list[str] = []
        self.refused: Counter[str] = Counter()  # calls that an error ended, as they may
        self.lost = 0  # reads that missed a block which had been put
        self.memory = Latencies()
        self.disk = Latencies()
        self.rate = math.inf
        self._began = 0.0
        self._begun = 0

    async def run(self, seconds: float, rate: float) -> float:
        """Keep all clients busy at a rate; calls per second."""
        self.rate, self._began, self._begun = rate, time.perf_counter(), 0
        calls, until = self.calls, self._began + seconds
        async with asyncio.TaskGroup() as group:
            for number in range(CLIENTS):
                group.create_task(self._client(number, until))
        return (self.calls - calls) / (time.perf_counter() - self._began)

    async def _client(self, number: int, until: float) -> None:
        names, weights = list(MIX), list(MIX.values())
        kinds = self.random.choices(names, weights, k=4096)
        at = self.random.randrange(len(kinds))
        while (now := time.perf_counter()) < until and len(self.wrong) < 10:
            due = (now - self._began) * self.rate
            if self._begun >= due:
                await asyncio.sleep(0.001)
                continue
            self._begun = max(self._begun, int(due - BEHIND_S_MAX * self.rate) if due < math.inf else 0) + 1
            kind = kinds[at]
            at = (at + 1) % len(kinds)
            try:
                await getattr(self, f"_{kind}")(number)
            except (OSError, asynckv.NoRoomError):  # the disk refused, or the pool; the call says so
                self.refused[kind] += 1
            self.calls += 1

    def _key(self, number: int) -> int:
        """One of the client's keys, the first ones more often."""
        share = len(self.versions) // CLIENTS
        return int(share * self.random.random() ** 2) * CLIENTS + number

    def _keys(self, number: int) -> list[int]:
        first = self._key(number)
        return [key for key in range(first, first + BATCH * CLIENTS, CLIENTS) if key < len(self.versions)]

    def check(self, key: int, block: Any) -> None:
        """A read gave this: the version that is there, whole, or a miss."""
        version = int(self.versions[key])
        if block is None:
            self.lost += bool(version)
            return
        data = np.frombuffer(block, np.uint8)
        if not version:
            self.wrong.append(f"key {key}: a block came back after it was removed")
        elif not np.array_equal(data, value_of(key, version)):
            self.wrong.append(f"key {key}: version {version} was put, {_HEAD.unpack_from(data[:24])} is there")

    def _made(self, key: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        version = int(self.next[key])
        self.next[key] += 1
        data = value_of(key, version)
        self.put_bytes += len(data)
        return data

    def _stored(self, key: int, done: bool) -> None:
        self.versions[key] = self.next[key] - 1 if done else 0
        self.refused["put"] += not done

    async def _get(self, number: int) -> None:
        key = self._key(number)
        tier = self.cache.tier(key)
        start = time.perf_counter()
        block = await self.cache.get(key)
        seconds = time.perf_counter() - start
        if block is not None:
            (self.memory if tier == "memory" else self.disk).add(seconds)
        self.check(key, block)

    async def _get_into(self, number: int) -> None:
        key = self._key(number)
        out = np.empty(SIZES[-1], np.uint8)
        written = await self.cache.get_into(key, out)
        self.check(key, None if written is None else out[:written])

    async def _put(self, number: int) -> None:
        key = self._key(number)
        self._stored(key, await self.cache.put(key, self._made(key).data))

    async def _reserve(self, number: int) -> None:
        key = self._key(number)
        data = self._made(key)
        async with self.cache.reserve(key, data.shape, data.dtype) as array:
            array[:] = data
        self._stored(key, True)

    async def _stream(self, number: int) -> None:
        async for key, block in self.cache.stream(self._keys(number)):
            self.check(key, block)
            del block

    async def _request(self, number: int) -> None:
        """A prompt: read what is there, compute the rest."""
        keys = self._keys(number)
        async with self.cache.request(keys) as request:
            blocks = await request.get_many()
            for key, block in zip(keys, blocks, strict=True):
                self.check(key, block)
            missing = [key for key, block in zip(keys, blocks, strict=True) if block is None]
            del block, blocks
            items = [(key, self._made(key).data) for key in missing]
            for key, done in zip(missing, await request.put_many(items), strict=True):
                self._stored(key, done)

    async def _delete(self, number: int) -> None:
        key = self._key(number)
        self.versions[key] = 0
        await self.cache.delete(key)

    async def _prefetch(self, number: int) -> None:
        self.cache.prefetch(self._keys(number))

    async def _flush(self, number: int) -> None:
        await self.cache.flush()


class Samples:
    """Rows of figures, in memory that is there from the beginning."""

    def __init__(self, seconds: float, interval: float) -> None:
        self.interval = interval
        self._rows = np.full((int(seconds / interval) + 16, len(COLUMNS)), math.nan)
        self.count = 0

    async def take(self, load: Load) -> None:
        """Take one each interval, until cancelled."""
        start = time.perf_counter()
        while self.count < len(self._rows):
            await asyncio.sleep(start + (self.count + 1) * self.interval - time.perf_counter())
            stats = load.cache.stats()
            self._rows[self.count] = (
                time.perf_counter() - start,
                resident_bytes(),
                len(os.listdir("/proc/self/fd")),
                status_value("Threads"),
                load.calls,
                *load.memory.take(),
                *load.disk.take(),
                stats.loaded_bytes,
                stats.disk_bytes_written,
                stats.io_errors,
                stats.io_timeouts,
                stats.corrupt_blocks,
                stats.dropped_blocks,
                stats.disk_state == "off",
            )
            self.count += 1
            note(", ".join(f"{name} {value:,.0f}" for name, value in self.last().items()))

    def last(self) -> dict[str, float]:
        return dict(zip(COLUMNS, map(float, self._rows[self.count - 1]), strict=True))

    def as_lists(self) -> dict[str, list[float | None]]:
        """All of them, by column; those of a window without such calls are None."""
        columns = self._rows[: self.count].T
        return {
            name: [None if v != v else v for v in column.tolist()]
            for name, column in zip(COLUMNS, columns, strict=True)
        }

    def after_warm_up(self, name: str) -> list[float]:
        first = int(self.count * WARM_UP_SHARE)
        values = self._rows[first : self.count, COLUMNS.index(name)]
        return [float(value) for value in values if not math.isnan(value)]

    def quarters(self, name: str) -> tuple[list[float], list[float]]:
        """The first and the last quarter of what came after the warm-up."""
        values = self.after_warm_up(name)
        quarter = max(1, len(values) // 4)
        return values[:quarter], values[-quarter:]


def slope(times: list[float], values: list[float]) -> tuple[float, float]:
    """Of the line through points by least squares, and its standard error."""
    count, middle = len(times), statistics.fmean(times)
    spread = sum((time - middle) ** 2 for time in times)
    line = statistics.linear_regression(times, values)
    rest = sum((value - line.intercept - line.slope * at) ** 2 for at, value in zip(times, values, strict=True))
    return line.slope, math.sqrt(rest / max(1, count - 2) / spread)


async def soak(given: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """The whole run; the figures that the verdict is made of."""
    script = Script(random.Random(given.seed))

    def factory(*args: Any, **options: Any) -> FaultyBackend:
        return FaultyBackend(create_backend(*args, **options), script)

    memory, disk = parse_size(given.memory, "memory"), parse_size(given.disk, "disk")
    options: dict[str, Any] = {"memory": memory, "disk": disk, "engine": given.engine}
    keys = disk // 2 // (sum(SIZES) // len(SIZES)) // CLIENTS * CLIENTS
    peak_seconds = min(30.0, given.seconds / 10)
    async with asynckv.open(directory, _backend_factory=factory, **options) as cache:
        load = Load(cache, keys, given.seed)
        for key in range(keys):
            load._stored(key, await cache.put(key, load._made(key).data))
        peak = await load.run(peak_seconds, math.inf)
        note(f"peak: {peak:,.0f} calls/s")
        each = FAULT_PROBABILITY / 4
        for fault in (error(errno.EIO), slow(SLOW_S), short(), corrupt()):
            script.add("*", fault, probability=each)
        operations = script.calls.total()
        samples = Samples(given.seconds, max(1.0, min(5.0, given.seconds / 60)))
        sampler = asyncio.create_task(samples.take(load))
        before = cache.stats()
        load.put_bytes = 0
        rate = await load.run(given.seconds, RATE_SHARE * peak)
        sampler.cancel()
        await asyncio.wait([sampler])
        if not sampler.cancelled():
            sampler.result()
        stats = cache.stats()
        operations = script.calls.total() - operations
        script.clear()
        await asyncio.sleep(1)  # a disk that was switched off is tried again
        await cache.flush()
    found = 0
    async with asynckv.open(directory, **options) as cache:
        load.cache = cache
        for key in range(keys):
            block = await cache.get(key)
            found += block is not None
            load.check(key, block)
            del block
    moved = load.put_bytes + stats.loaded_bytes - before.loaded_bytes
    return {
        "peak_per_second": peak,
        "rate_per_second": rate,
        "calls": load.calls,
        "wrong": load.wrong,
        "refused": dict(load.refused),
        "lost": load.lost,
        "keys": keys,
        "found_after_reopening": found,
        "expected_after_reopening": int(np.count_nonzero(load.versions)),
        "memory_turnovers": moved / memory,
        "disk_turnovers": (stats.disk_bytes_written - before.disk_bytes_written) / disk,
        "disk_operations": operations,
        "faults": {" ".join(name): number for name, number in script.injected.items()},
        "stats": stats.as_dict(),
        "samples": samples,
    }


def judge(result: dict[str, Any], samples: Samples) -> list[tuple[Any, ...]]:
    """Add the checks to a result; rows for people."""
    checks = result["checks"] = {}
    rows: list[tuple[Any, ...]] = [
        ("calls/s at the peak, steady", result["peak_per_second"], result["rate_per_second"], "-"),
        ("faults, of disk operations", sum(result["faults"].values()), result["disk_operations"], "-"),
    ]
    times, resident = samples.after_warm_up("seconds"), samples.after_warm_up("resident_bytes")
    per_hour = 3600 / 2**20
    growth, deviation = (figure * per_hour for figure in slope(times, resident))
    result["resident_slope_mib_per_hour"], result["resident_slope_standard_error"] = growth, deviation
    checks["resident_slope_below_1_mib_per_hour"] = growth - 2 * deviation < SLOPE_MIB_PER_HOUR_MAX
    rows.append(("resident MiB/h, standard error", growth, deviation, SLOPE_MIB_PER_HOUR_MAX))
    for name in ("fds", "threads"):
        first, last = map(statistics.median, samples.quarters(name))
        checks[f"{name}_flat"] = last <= first + 1
        rows.append((f"{name}: first, last quarter", first, last, first + 1))
    for name in ("memory_p99_us", "disk_p99_us"):
        first, last = map(statistics.median, samples.quarters(name))
        result[f"{name}_drift"] = last / first - 1
        checks[f"{name}_drift_below_10_percent"] = last < first * (1 + DRIFT_MAX)
        rows.append((f"{name}: first, last quarter", first, last, first * (1 + DRIFT_MAX)))
    checks["nothing_wrong"] = not result["wrong"]
    rows.append(("wrong", "-", len(result["wrong"]), 0))
    checks["memory_turned_over_20_times"] = result["memory_turnovers"] >= TURNOVERS_MIN
    rows.append(("turnovers of memory, disk", result["memory_turnovers"], result["disk_turnovers"], TURNOVERS_MIN))
    checks["faults_were_met"] = sum(result["faults"].values()) >= result["disk_operations"] * FAULT_PROBABILITY / 4
    rows.append(
        ("keys put, found after reopening", result["expected_after_reopening"], result["found_after_reopening"], "-")
    )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3600.0, help="of the steady run")
    parser.add_argument("--memory", default="64MiB")
    parser.add_argument("--disk", default="512MiB")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--loop", choices=list(LOOPS), default="asyncio")
    parser.add_argument("--seed", type=int, default=0, help="of calls and faults")
    parser.add_argument("--dir", help="where the store goes, on a real disk (default: the current directory)")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if given.seconds < 60:
        parser.error("--seconds: at least 60, for enough samples")
    with tempfile.TemporaryDirectory(dir=given.dir or os.getcwd()) as folder:
        with asyncio.Runner(loop_factory=LOOPS[given.loop]) as runner:
            result = runner.run(soak(given, Path(folder) / "store"))
        result["file_system"] = file_system(folder)
    samples = result.pop("samples")
    rows = judge(result, samples)
    result["sampled"] = samples.as_lists()
    return finish(result, table(["", "first", "last", "limit"], rows), as_json=given.json)


if __name__ == "__main__":
    raise SystemExit(main())
