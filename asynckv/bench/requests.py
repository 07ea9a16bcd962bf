"""What a store asks its disk for, and a roofline that asks for the same."""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import mmap
import os
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from asynckv.backends.base import Wrapper
from asynckv.bench.figures import Slice, Stopwatch
from asynckv.commands.output import UsageError

try:
    from asynckv._roofline import Roofline
except ImportError:  # built without the kernel's header
    Roofline = None  # type: ignore[assignment,misc]

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from asynckv.backends.base import Backend, File, Prepare
    from asynckv.cache import Cache

__all__ = ["Requests", "Tap", "in_a_row", "read_requests", "recycled"]

FILL_BYTES = 4 << 20
_NEEDED = "the parts disk and mix compare with a ring of their own, so they need io_uring"


class Tap(Wrapper):
    """An engine that can note what it is asked for: (descriptor, offset, bytes) of reads and of writes."""

    PASSED = ("read", "read_for", "write")

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.reads: list[tuple[int, int, int]] = []
        self.writes: list[tuple[int, int, int]] = []
        self.note(False)

    async def start(self, directory: str | os.PathLike[str] | int) -> None:
        """Start the inner engine, whose calls may be others from then on."""
        await self.inner.start(directory)
        self.note(False)

    def note(self, on: bool) -> None:
        """Note from now on, or pass everything on without a detour."""
        if on:
            self.reads, self.writes = [], []
            for name in self.PASSED:
                del self.__dict__[name]
        else:
            self.__dict__.update({name: getattr(self.inner, name) for name in self.PASSED})

    def read(self, file: File, offset: int, buffer: memoryview, **options: Any) -> asyncio.Future[bool]:
        """Note a read and pass it on."""
        self.reads.append((file.fd, offset, len(buffer)))
        return self.inner.read(file, offset, buffer, **options)

    def write(self, file: File, offset: int, prepare: Prepare, **options: Any) -> asyncio.Future[Any]:
        """Note a write once its pieces are known, and pass it on."""

        def noted() -> tuple[Sequence[Any], Any]:
            pieces, value = prepare() if callable(prepare) else (prepare, None)
            self.writes.append((file.fd, offset, sum(memoryview(each).nbytes for each in pieces)))
            return pieces, value

        return self.inner.write(file, offset, noted, **options)


class Requests:
    """A list of requests that a roofline goes through, round and round.

    Parameters
    ----------
    requests
        (descriptor, offset, bytes) of each.
    depth
        Requests in flight.
    writes
        Whether each is a write.
    blocks
        Blocks of payload that one round moves; as many as requests unless told.
    """

    def __init__(
        self,
        requests: list[tuple[int, int, int]],
        depth: int,
        *,
        writes: bool | Sequence[bool] = False,
        blocks: float = 0,
    ) -> None:
        self.files = np.array([each[0] for each in requests], np.int32)
        self.offsets = np.array([each[1] for each in requests], np.uint64)
        self.sizes = np.array([each[2] for each in requests], np.uint32)
        self.writes = np.array([writes] * len(requests) if isinstance(writes, bool) else writes, np.uint8)
        self.share = blocks / len(requests) if blocks else 1.0
        self.at = 0
        most = -(-int(self.sizes.max()) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._buffers = np.frombuffer(mmap.mmap(-1, depth * most), np.uint8).reshape(depth, most)
        self._buffers[:] = 0xA5  # resident, like the pool of a store that has been in use
        if Roofline is None:
            raise UsageError(f"{_NEEDED}, which was not built in for want of the kernel's header")
        try:
            self._roofline = Roofline(depth)
        except OSError as error:
            raise UsageError(
                f"{_NEEDED}, which is refused here ({error.strerror}); `asynckv doctor` says why"
            ) from None
        self._latencies = np.zeros(1 << 16)

    def close(self) -> None:
        """Give the ring back."""
        self._roofline.close()

    def play(self, seconds: float) -> Slice:
        """Go on for so long."""
        with Stopwatch() as watch:
            moved, total, elapsed = self._roofline.run(
                self.files,
                self.offsets,
                self.sizes,
                self.writes,
                self._buffers,
                first=self.at,
                seconds=seconds,
                latencies=self._latencies,
            )
        self.at = (self.at + moved) % len(self.files)
        return Slice(
            round(moved * self.share), total, elapsed, watch.cpu, self._latencies[: min(moved, 1 << 16)].tolist()
        )


async def read_requests(cache: Cache, tap: Tap, keys: list[Any], depth: int = 64) -> list[tuple[int, int, int]]:
    """Read all keys, and return what the store asked of its engine."""
    tap.note(True)
    try:
        for start in range(0, len(keys), depth):
            await cache.get_many(keys[start : start + depth])
        return tap.reads
    finally:
        tap.note(False)


@contextmanager
def recycled(directory: str, size: int) -> Iterator[int]:
    """A file in a directory whose blocks were all written before, like a segment that is used again; its descriptor."""
    path = os.path.join(directory, "roofline")
    piece = os.urandom(FILL_BYTES)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        for offset in range(0, size, FILL_BYTES):
            os.pwrite(fd, piece[: size - offset], offset)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        with suppress(OSError):  # a file system that has it not
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
        yield fd
    finally:
        os.close(fd)
        os.unlink(path)


def in_a_row(fd: int, sizes: Sequence[int], end: int) -> list[tuple[int, int, int]]:
    """Requests of these sizes one behind the other, over and over, until a file is full."""
    found: list[tuple[int, int, int]] = []
    offset = 0
    for size in itertools.cycle(sizes):
        if offset + size > end:
            return found
        found.append((fd, offset, size))
        offset += size
    return found
