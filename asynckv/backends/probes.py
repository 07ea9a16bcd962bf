"""What a machine and a directory can do, found out by trying: the facts behind ``asynckv doctor``.

Each probe answers one question and judges nothing. What writes does so in files without a name, or with one that is
removed at once, in the directory it is given.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import mmap
import os
import platform
import random
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from asynckv.backends import create_backend
from asynckv.backends.choice import NoRingError, old_kernel, start_ring
from asynckv.backends.files import Files
from asynckv.backends.system import (
    io_uring_sysctl,
    kernel_release,
    kernel_version,
    memlock_limit,
    read_text,
    seccomp_mode,
)
from asynckv.config import memory_limit

if TYPE_CHECKING:
    from asynckv.backends.base import Backend, File

__all__ = [
    "FileSystem",
    "NoRingError",
    "Speed",
    "cpu_flags",
    "cpu_name",
    "direct_io",
    "file_system",
    "hash_seeds_agree",
    "huge_pages",
    "io_uring_sysctl",
    "kernel_release",
    "kernel_version",
    "memlock_limit",
    "memory_available",
    "memory_limit",
    "old_kernel",
    "ring_works",
    "seccomp_mode",
    "speed",
]

READ_BYTES = 64 << 10
WRITE_BYTES = 1 << 20
SPEED_FILE_MAX = 256 << 20
SPEED_FILE_MIN = 4 << 20
READ_DEPTH = 16
WRITE_DEPTH = 4
SHARES = (0.4, 0.35, 0.25)  # of the time: writes, reads at depth, reads one by one

_KEYS_CODE = """
import asynckv
namespace = asynckv.Namespace(model="doctor", block_tokens=16, salt="s")
for each in (None, namespace):
    print(*(key.hex() for key in asynckv.prefix_keys(range(1, 65), 16, namespace=each)))
"""
_HEX_LINES = 2
_CPU_FLAGS = ("sse2", "sse4_2", "avx2", "avx512f", "asimd", "crc32", "sve")


@dataclass(frozen=True, slots=True)
class FileSystem:
    """The file system of a directory.

    Attributes
    ----------
    kind
        Its type as in mount(8), ``"unknown"`` when /proc does not tell.
    mounted_on
        Where it is mounted.
    free
        Bytes that this user may still write.
    inodes, inodes_free
        All of them and those left; 0 and 0 where the file system makes them as needed.
    """

    kind: str
    mounted_on: str
    free: int
    inodes: int
    inodes_free: int


@dataclass(frozen=True, slots=True)
class Speed:
    """What an engine did in a directory, in bytes a second and seconds.

    Attributes
    ----------
    engine, direct
        What was at work in the end.
    write_rate
        Of writes of 1 MiB, four at a time, the sync included.
    read_rate
        Of random reads of 64 KiB, 16 at a time.
    read_p50
        Median time of one such read alone.
    wrong
        Reads that returned other bytes than were written.
    """

    engine: str
    direct: bool
    write_rate: float
    read_rate: float
    read_p50: float
    wrong: int


def file_system(directory: str) -> FileSystem:
    """Describe the file system of a directory."""
    room = os.statvfs(directory)
    device = os.stat(directory).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    real = os.path.realpath(directory)
    kind, mounted_on = "unknown", ""
    for line in read_text("/proc/self/mountinfo").splitlines():
        # proc(5): id, parent, device, root, mount point, options, optional fields up to a dash, type, ...
        fields, _, rest = line.partition(" - ")
        parts = fields.split(" ")
        if len(parts) < 5 or not rest:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), parts[4])
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        # btrfs and overlay show another device in stat(2) than here: then the deepest mount point decides.
        if inside and (len(point) > len(mounted_on) or (len(point) == len(mounted_on) and parts[2] == wanted)):
            kind, mounted_on = rest.split(" ", 1)[0], point
    return FileSystem(kind, mounted_on, room.f_bavail * room.f_frsize, room.f_files, room.f_favail)


def direct_io(directory: str) -> tuple[bool, int, str]:
    """Whether direct I/O works in a directory, its alignment, and why not; see `Files.probe_direct`."""
    files = Files()
    files.attach(directory)
    try:
        return files.probe_direct()
    finally:
        files.detach()


async def ring_works(directory: str) -> bool:
    """Whether a real write, read and sync through a ring work in a directory.

    Returns
    -------
    bool
        Whether it does direct I/O.

    Raises
    ------
    NoRingError
        They do not; the text says why.
    """
    backend = await start_ring(directory)
    name, direct = backend.name, backend.direct
    await backend.close()
    if name != "io_uring":
        raise NoRingError(errno.EIO, "refused in its first use")
    return direct


def memory_available() -> tuple[int, int]:
    """Return the bytes of RAM, and those that new work can have; zeros where /proc does not tell."""
    text = read_text("/proc/meminfo")
    found = dict(re.findall(r"^(MemTotal|MemAvailable):\s+(\d+) kB", text, re.MULTILINE))
    return int(found.get("MemTotal", 0)) << 10, int(found.get("MemAvailable", 0)) << 10


def huge_pages() -> tuple[str, int]:
    """Return the setting of transparent huge pages ("" when there are none), and the number of reserved ones."""
    match = re.search(r"\[(\w+)\]", read_text("/sys/kernel/mm/transparent_hugepage/enabled"))
    reserved = read_text("/proc/sys/vm/nr_hugepages")
    return match[1] if match else "", int(reserved) if reserved.isdigit() else 0


def cpu_flags() -> tuple[str, int, list[str]]:
    """Return the architecture, the CPUs this process may use, and those features of them that checksums can gain by."""
    match = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", read_text("/proc/cpuinfo"), re.MULTILINE)
    present = set(match[1].split()) if match else set()
    return platform.machine(), len(os.sched_getaffinity(0)), [flag for flag in _CPU_FLAGS if flag in present]


def cpu_name() -> str:
    """The processor's name as the kernel tells it; empty where it tells none."""
    match = re.search(r"^model name\s*:\s*(.*)$", read_text("/proc/cpuinfo"), re.MULTILINE)
    return match[1] if match else ""


def hash_seeds_agree() -> str:
    """Compute prefix keys in two processes with different hash seeds; empty when they are equal, else what happened."""
    package_root = str(Path(__file__).resolve().parents[2])
    answers = []
    for seed in ("1", "2"):
        path = os.pathsep.join([package_root, *filter(None, [os.environ.get("PYTHONPATH")])])
        done = subprocess.run(
            [sys.executable, "-c", _KEYS_CODE],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=60,
        )
        if done.returncode or len(done.stdout.splitlines()) != _HEX_LINES:
            return f"a second process could not compute them: {done.stderr.strip()[-200:]}"
        answers.append(done.stdout)
    return "" if answers[0] == answers[1] else "two processes computed different keys"


# the speed test


async def speed(engine: str, directory: str, seconds: float = 2.0) -> Speed:
    """Measure an engine in a directory: writes, then random reads, each checked.

    Raises
    ------
    OSError
        It failed; ``ENOSPC`` with less room than `SPEED_FILE_MIN`.
    """
    backend = create_backend(engine)
    await backend.start(directory)
    try:
        size = max(min(SPEED_FILE_MAX, await backend.free_bytes() // 4), SPEED_FILE_MIN) // WRITE_BYTES * WRITE_BYTES
        file = await backend.temporary(size)
        run = _SpeedRun(backend, file, size)
        write_rate = await run.write(seconds * SHARES[0])
        with contextlib.suppress(OSError):  # so that a buffered engine reads from the disk, too
            os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        read_rate, _ = await run.read(seconds * SHARES[1], READ_DEPTH)
        _, read_p50 = await run.read(seconds * SHARES[2], 1)
        return Speed(backend.name, backend.direct, write_rate, read_rate, read_p50, run.wrong)
    finally:
        await backend.close()


def _aligned(size: int) -> tuple[memoryview, np.ndarray]:
    """Page-aligned memory, as bytes and as words."""
    memory = mmap.mmap(-1, size)
    return memoryview(memory), np.frombuffer(memory, np.uint64)


class _SpeedRun:
    """A file in which every word is its own number."""

    def __init__(self, backend: Backend, file: File, size: int) -> None:
        self.backend = backend
        self.file = file
        self.size = size
        self.written = 0
        self.wrong = 0
        self._next = 0
        self._until = 0.0

    async def write(self, seconds: float) -> float:
        started = time.perf_counter()
        self._until = started + seconds
        counts = await asyncio.gather(*(self._writer() for _ in range(WRITE_DEPTH)))
        await self.backend.sync(self.file)
        return sum(counts) / (time.perf_counter() - started)

    async def _writer(self) -> int:
        view, words = _aligned(WRITE_BYTES)
        ramp = np.arange(len(words), dtype=np.uint64)
        count = 0
        while time.perf_counter() < self._until or not self.written:
            offset = self._next
            self._next = (offset + WRITE_BYTES) % self.size
            np.add(ramp, offset // 8, out=words)
            await self.backend.write(self.file, offset, [view])
            self.written = max(self.written, offset + WRITE_BYTES)
            count += WRITE_BYTES
        return count

    async def read(self, seconds: float, depth: int) -> tuple[float, float]:
        started = time.perf_counter()
        self._until = started + seconds
        lists = await asyncio.gather(*(self._reader(number) for number in range(depth)))
        spent = time.perf_counter() - started
        times = sorted(each for some in lists for each in some)
        return len(times) * READ_BYTES / spent, times[len(times) // 2]

    async def _reader(self, number: int) -> list[float]:
        view, words = _aligned(READ_BYTES)
        ramp = np.arange(len(words), dtype=np.uint64)
        places = random.Random(number)
        times: list[float] = []
        while time.perf_counter() < self._until or not times:
            offset = places.randrange(self.written // READ_BYTES) * READ_BYTES
            started = time.perf_counter()
            await self.backend.read(self.file, offset, view)
            times.append(time.perf_counter() - started)
            self.wrong += not np.array_equal(words, ramp + np.uint64(offset // 8))
        return times
