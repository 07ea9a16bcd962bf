"""What the black-box tests of the store share: self-describing values, crash images, recounts.

Public names only, but for the question whether a ring works here.
"""

from __future__ import annotations

import asyncio
import functools
import os
import random
import resource
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import asynckv
from asynckv.backends.choice import start_ring

KIB = 1 << 10
MIB = 1 << 20
# A size that needs no rounding in the pool: N of them fill a pool made for N.
BLOCK = 64 * KIB
SHM = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # a place in memory, where the system has one

_HEADER = struct.Struct("<QQQ")
_ROOT = Path(asynckv.__file__).resolve().parents[1]


@functools.cache
def ring_refusal() -> str:
    """Why no ring works here, found out as a store does; empty when one works."""

    async def attempt(directory: str) -> str:
        backend = await start_ring(directory)
        await backend.close()
        return "" if backend.name == "io_uring" else "refused in its first use"

    with tempfile.TemporaryDirectory() as directory:
        try:
            return asyncio.run(attempt(directory))
        except OSError as error:
            return str(error.strerror or error)


def little_ring_memory() -> bool:
    """Whether an ordinary user's limit of locked memory leaves room for a few small rings only."""
    return os.geteuid() != 0 and resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] < 8 << 20


def payload(key: int, version: int = 0, size: int = BLOCK) -> bytes:
    """Bytes that repeat their own key, version and length, and differ everywhere from those of another version."""
    header = _HEADER.pack(key & (2**64 - 1), version, size)
    body = random.Random(header).randbytes(max(0, size - len(header)))
    return (header + body)[:size]


def check_payload(key: int, data: Any) -> int:
    """Assert that these are the whole bytes of some version put under this key; the version."""
    data = bytes(data)
    assert len(data) >= _HEADER.size
    found, version, size = _HEADER.unpack_from(data)
    assert found == key & (2**64 - 1), "a value of another key"
    assert size == len(data), "a value cut short"
    assert data == payload(key, version, size), "torn or wrong bytes"
    return version


def canon(block: Any) -> Any:
    """A block as plain values: kind, dtype, shape and bytes; None stays None."""
    if block is None:
        return None
    if isinstance(block, asynckv.CacheBlock):
        return ("block", block.layer_id, canon(block.key), canon(block.value))
    if isinstance(block, np.ndarray):
        return ("array", block.dtype.str, str(block.dtype), block.shape, block.tobytes())
    return ("bytes", bytes(block))


def cache_block(key: int, version: int = 0, *, layer_id: int = 3, floats: int = 10) -> asynckv.CacheBlock:
    """A CacheBlock in the article's proportions: twice as many key floats as value floats."""
    rng = np.random.default_rng([key, version])
    half = max(1, floats // 2)
    return asynckv.CacheBlock(
        layer_id=layer_id,
        key=rng.random(floats, dtype=np.float32),
        value=rng.random(half, dtype=np.float32),
    )


def blocks(count: int, size: int = BLOCK, *, start: int = 0, version: int = 0) -> dict[int, bytes]:
    """`count` blocks under consecutive int keys."""
    return {key: payload(key, version, size) for key in range(start, start + count)}


async def settle(cache: asynckv.Cache, seconds: float = 10.0) -> None:
    """Wait until nothing is in flight for some turns in a row."""
    deadline = time.monotonic() + seconds
    quiet = 0
    while quiet < 3:
        stats = cache.stats()
        quiet = 0 if stats.reads_in_flight or stats.writes_in_flight else quiet + 1
        assert time.monotonic() < deadline, f"still in flight after {seconds} s:\n{stats}"
        await asyncio.sleep(0.002)


async def recovered(cache: asynckv.Cache) -> None:
    """Wait for the scan of the log, which plain look-ups do not wait for."""
    await until(lambda: not cache.stats().recovering)


async def until(condition: Any, seconds: float = 10.0) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        await asyncio.sleep(0.002)


def check_idle(cache: asynckv.Cache, *, pinned: int = 0) -> asynckv.Stats:
    """Assert what holds in every idle store: memory accounted to the byte, pins known, no gauge below zero."""
    stats = cache.stats()
    assert stats.memory_used + stats.memory_free + stats.memory_quarantined == stats.memory_capacity
    assert stats.pinned_blocks == pinned
    assert stats.memory_quarantined == 0
    if not pinned:
        assert stats.pinned_bytes == 0
    check_gauges(stats)
    return stats


def check_gauges(stats: asynckv.Stats) -> None:
    """No counter or gauge is negative or beyond what it can be."""
    for name in stats.__slots__:
        value = getattr(stats, name)
        if isinstance(value, (int, float)):
            assert value >= 0, name
            assert value < 2**62, name
    assert stats.memory_used <= stats.memory_capacity
    assert stats.memory_free <= stats.memory_capacity
    assert stats.disk_used <= stats.disk_capacity


async def fill(directory: Path, items: Mapping[Any, Any], **options: Any) -> None:
    """Put blocks into a store and close it, so that the next open finds all of them on disk only."""
    async with asynckv.open(directory, **options) as cache:
        for key, block in items.items():
            assert await cache.put(key, block)
        await cache.flush()


def files_of(directory: Path) -> list[Path]:
    """The files of a store, lock file left out, biggest first."""
    found = [path for path in directory.rglob("*") if path.is_file() and path.name != "lock"]
    return sorted(found, key=lambda path: (-path.stat().st_size, path.name))


def allocated(directory: Path) -> int:
    """Bytes the file system has given to a directory's files; files that vanish meanwhile count nothing."""
    total = 0
    for root, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.lstat(os.path.join(root, name)).st_blocks * 512
            except FileNotFoundError:
                continue
    return total


def crash_image(directory: Path, target: Path) -> Path:
    """Copy a live store as `kill -9` would leave it. Call it while the event loop stands still."""
    time.sleep(0.004)  # worker threads end the call they are in; nothing new starts while the loop stands still
    shutil.copytree(directory, target)
    target.chmod(0o700)
    return target


def find_payload(directory: Path, data: bytes) -> tuple[Path, int]:
    """The file and offset where a block's bytes lie on disk."""
    for path in files_of(directory):
        offset = path.read_bytes().find(data)
        if offset >= 0:
            return path, offset
    raise AssertionError("the block's bytes are in no file")


def flip(path: Path, offset: int, mask: int = 0xFF) -> None:
    """Invert bits of one byte of a file in place."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ mask]))


async def read_all(cache: asynckv.Cache, keys: Iterable[Any]) -> dict[Any, Any]:
    """Read keys one after the other, no view kept: key to plain value or None."""
    return {key: canon(await cache.get(key)) for key in keys}


class Lag:
    """Measures how long the loop went without a turn: `async with Lag() as lag: ...; lag.worst`.

    Time in which the thread was ready to run but had no processor is the machine's, and is not counted.
    """

    worst = 0.0

    async def __aenter__(self) -> Lag:
        self._task = asyncio.create_task(self._tick())
        await asyncio.sleep(0)
        return self

    async def _tick(self) -> None:
        last, waited = time.perf_counter(), run_delay()
        while True:
            await asyncio.sleep(0.001)
            now, delay = time.perf_counter(), run_delay()
            self.worst = max(self.worst, now - last - (delay - waited))
            last, waited = now, delay

    async def __aexit__(self, *exc: object) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])


def run_delay() -> float:
    """Seconds that this thread has waited for a processor. Source: Documentation/scheduler/sched-stats.rst."""
    try:
        text = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").read_text(encoding="ascii")
    except OSError:  # a kernel without it
        return 0.0
    return int(text.split()[1]) / 1e9


def python(
    source: str, *arguments: object, timeout: float = 60, check: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run a script in a process of its own."""
    result = subprocess.run(
        [sys.executable, "-c", source, *map(str, arguments)],
        env=child_environment(),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    if check:
        assert result.returncode == 0, result.stderr
    return result


def child_environment() -> dict[str, str]:
    """The environment of a child that has to find the package under test."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])}
