"""Whole transfers: resumed when short, retried when interrupted, bounced when unaligned.

What to do next is decided by generators, `Transfers.read_steps` and `Transfers.write_steps`: they yield requests and
are sent what became of them. Two drivers run them: `Transfers.read` and `Transfers.write` by blocking calls in workers,
and the ring engine on the loop. The one choke point where direct I/O is given up is `Transfers.refuse`.
"""

from __future__ import annotations

import errno
import itertools
import logging
import mmap
import os
import threading
from bisect import bisect_right
from typing import TYPE_CHECKING, TypeAlias

from asynckv.backends.base import ShortTransferError
from asynckv.backends.files import NOT_DIRECT

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from asynckv.backends.base import BytesLike, File
    from asynckv.backends.files import Files

__all__ = ["BOUNCE_BYTES", "STEPS", "Request", "Scratch", "Steps", "Transfers", "flatten"]

# What a step asks for: seconds of pause, or (whether it is a write, the buffers, the offset).
Request: TypeAlias = "float | tuple[bool, Sequence[memoryview], int]"
# A transfer: is sent the bytes moved, or thrown the `OSError`; ends when all is done, or with an error.
Steps: TypeAlias = "Generator[Request, int, None]"

_log = logging.getLogger("asynckv.backends")

# One system call moves at most 0x7ffff000 bytes (read(2)); stay well below, at a multiple of every alignment.
CALL_BYTES = 1 << 30
IOV_MAX = min(os.sysconf("SC_IOV_MAX"), 1024) if "SC_IOV_MAX" in os.sysconf_names else 16
BOUNCE_BYTES = 1 << 20
TRANSIENT = frozenset({errno.EINTR, errno.EAGAIN})
TRIES = 10  # of a call that says EINTR or EAGAIN, or moves nothing; with the pauses below about half a second
PAUSE_S = 0.0005


class Scratch:
    """The bounce buffer of one worker: page-aligned, made on first use, never larger than `BOUNCE_BYTES`."""

    __slots__ = ("_memory",)

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None

    def view(self) -> memoryview:
        """Return the buffer; valid until the worker's next operation."""
        if self._memory is None:
            self._memory = mmap.mmap(-1, BOUNCE_BYTES)
        return memoryview(self._memory)


class Transfers:
    """Reads and writes of whole buffers.

    Parameters
    ----------
    files
        The raw calls.

    Attributes
    ----------
    direct
        False once direct I/O was refused.
    alignment
        Of direct offsets, lengths and addresses; a power of two.
    """

    def __init__(self, files: Files) -> None:
        self.files = files
        self.direct = False
        self.alignment = mmap.PAGESIZE
        self.call_bytes = CALL_BYTES
        self._lock = threading.Lock()

    # direct I/O or not

    def uses_direct(self, file: File) -> bool:
        """Whether the next transfer on this file is direct; turns a file buffered after the backend's fallback."""
        if not file.direct:
            return False
        if not self.direct:
            self._make_buffered(file)
            return False
        return True

    def _make_buffered(self, file: File) -> None:
        with self._lock:
            if file.direct:
                self.files.set_direct(file.fd, False)
                file.direct = False

    def refuse(self, error: OSError) -> None:
        """Direct I/O of an aligned request was refused: buffered from here on, for every file; one warning."""
        with self._lock:
            first, self.direct = self.direct, False
        if first:
            _log.warning("direct I/O refused (%s): using the page cache", os.strerror(error.errno or 0))

    def _refused(self, file: File, error: OSError) -> None:
        self.refuse(error)
        self._make_buffered(file)

    # by blocking calls

    def read(self, file: File, offset: int, buffer: memoryview, scratch: Scratch) -> None:
        """Fill the buffer or raise."""
        size = len(buffer)
        direct = file.direct and self.uses_direct(file)
        first: int | OSError | None = None
        if size <= self.call_bytes and not (direct and (offset | size) & (self.alignment - 1)):
            try:
                first = self.files.preadv(file.fd, (buffer,), offset)
            except OSError as error:
                first = error
            if first == size:
                return
            if file.direct is not direct:  # refused meanwhile, to somebody else
                first = None
        self._drive(file.fd, self.read_steps(file, offset, buffer, scratch, self.call_bytes), first)

    def write(self, file: File, offset: int, pieces: Sequence[BytesLike], scratch: Scratch) -> None:
        """Write every byte of every piece or raise."""
        views, ends = flatten(pieces)
        if ends:
            self._drive(file.fd, self.write_steps(file, offset, views, ends, scratch, self.call_bytes), None)

    def _drive(self, fd: int, steps: Steps, outcome: int | OSError | None) -> None:
        """Run steps; `outcome` is that of their first request when it was made already."""
        files = self.files
        try:
            request = next(steps)
            while True:
                if outcome is None:
                    if isinstance(request, float):
                        files.sleep(request)
                        outcome = 0
                    else:
                        writes, views, offset = request
                        try:
                            outcome = (files.pwritev if writes else files.preadv)(fd, views, offset)
                        except OSError as error:
                            outcome = error
                last, outcome = outcome, None
                request = steps.throw(last) if isinstance(last, OSError) else steps.send(last)
        except StopIteration:
            return

    # reads, by steps

    def read_steps(self, file: File, offset: int, buffer: memoryview, scratch: Scratch, limit: int) -> Steps:
        """Fill the buffer by requests of at most `limit` bytes, a multiple of every alignment."""
        if file.direct and self.uses_direct(file):
            if not (offset | len(buffer)) & (self.alignment - 1):
                try:
                    return (yield from self._read_direct(offset, buffer, limit))
                except OSError as error:
                    if error.errno not in NOT_DIRECT:
                        raise
                    # Perhaps only the address of this buffer: an aligned bounce buffer tells.
            try:
                return (yield from self._read_bounced(offset, buffer, scratch, limit))
            except OSError as error:
                if error.errno not in NOT_DIRECT:
                    raise
                self._refused(file, error)
        done = 0
        while done < len(buffer):
            count = yield from _some((False, (buffer[done : done + limit],), offset + done))
            if count == 0:
                raise ShortTransferError(done, len(buffer))
            done += count
        return None

    def _read_direct(self, offset: int, buffer: memoryview, limit: int) -> Steps:
        size = len(buffer)
        done = yield from self._read_aligned(offset, buffer, size, limit)
        if done < size:
            raise ShortTransferError(done, size)

    def _read_aligned(self, offset: int, buffer: memoryview, wanted: int, limit: int) -> Generator[Request, int, int]:
        """Read an aligned range until `wanted` bytes or the end of the file; the bytes that are there."""
        resume = done = idle = 0
        mask = ~(self.alignment - 1)
        while True:
            count = yield from _some((False, (buffer[resume : resume + limit],), offset + resume))
            reached = resume + count
            if reached >= wanted:
                return wanted
            idle = 0 if reached > done else idle + 1
            done = max(done, reached)
            if not count or idle > 1:  # twice no progress from the last aligned boundary: the end of the file
                return done
            resume = done & mask

    def _read_bounced(self, offset: int, buffer: memoryview, scratch: Scratch, limit: int) -> Steps:
        size = len(buffer)
        bounce = scratch.view()
        mask = self.alignment - 1
        done = 0
        while done < size:
            start = offset + done
            skip = start & mask
            part = min(size - done, len(bounce) - skip)
            aligned = (skip + part + mask) & ~mask
            got = yield from self._read_aligned(start - skip, bounce[:aligned], skip + part, limit)
            if got < skip + part:
                raise ShortTransferError(done + max(got - skip, 0), size)
            buffer[done : done + part] = bounce[skip : skip + part]
            done += part

    # writes, by steps

    def write_steps(
        self, file: File, offset: int, views: list[memoryview], ends: list[int], scratch: Scratch, limit: int
    ) -> Steps:
        """Write flat pieces, whose ends are counted from the first one's start; see `read_steps`."""
        size = ends[-1]
        if file.direct and self.uses_direct(file):
            mask = self.alignment - 1
            if (offset | size) & mask:
                raise ValueError(f"direct writes need multiples of {self.alignment}: {size} bytes at {offset}")
            if not any(end & mask for end in ends):
                try:
                    return (yield from _write_pieces(offset, views, ends, ~mask, limit))
                except OSError as error:
                    if error.errno not in NOT_DIRECT:
                        raise
            try:
                return (yield from self._write_bounced(offset, views, ends, scratch, limit))
            except OSError as error:
                if error.errno not in NOT_DIRECT:
                    raise
                self._refused(file, error)
        return (yield from _write_pieces(offset, views, ends, ~0, limit))

    def _write_bounced(
        self, offset: int, views: list[memoryview], ends: list[int], scratch: Scratch, limit: int
    ) -> Steps:
        size = ends[-1]
        bounce = scratch.view()
        done = 0
        while done < size:
            part = _fill(bounce, views, ends, done, min(len(bounce), size - done))
            yield from _write_pieces(offset + done, [bounce[:part]], [part], -self.alignment, limit)
            done += part

    # the rest

    def sync(self, file: File) -> None:
        """Make a file's data durable; never retried after an error, because the retry may lie (fsync(2))."""
        self.files.fdatasync(file.fd)


def _some(request: Request) -> Generator[Request, int, int]:
    """Make one request, again after a transient error; raise any other, and the last of too many."""
    for attempt in itertools.count():
        try:
            return (yield request)
        except OSError as error:
            if error.errno not in TRANSIENT or attempt >= TRIES:
                raise
            pause = error.errno == errno.EAGAIN
        if pause:
            yield PAUSE_S * (1 << attempt)
    raise AssertionError("unreachable")


def _write_pieces(offset: int, views: list[memoryview], ends: list[int], mask: int, limit: int) -> Steps:
    size = ends[-1]
    done = idle = 0
    while done < size:
        count = yield from _some((True, _from(views, ends, done, limit), offset + done))
        reached = done + count
        if reached < size:
            reached &= mask  # direct: back to the last aligned boundary; the bytes between are written twice
        idle = 0 if reached > done else idle + 1
        if idle > TRIES:
            raise OSError(errno.EIO, "a write makes no progress")
        done = reached


# The code of the generators: an error that came through one has ended it, so its frame may be cleared.
STEPS = frozenset(
    function.__code__
    for function in (
        Transfers.read_steps,
        Transfers._read_direct,
        Transfers._read_aligned,
        Transfers._read_bounced,
        Transfers.write_steps,
        Transfers._write_bounced,
        _write_pieces,
        _some,
    )
)


def flatten(pieces: Sequence[BytesLike]) -> tuple[list[memoryview], list[int]]:
    """Return the pieces that are not empty as flat bytes, and where each ends."""
    views = [view for view in map(_flat, pieces) if len(view)]
    return views, list(itertools.accumulate(map(len, views)))


def _flat(piece: BytesLike) -> memoryview:
    view = piece if type(piece) is memoryview else memoryview(piece)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def _from(views: list[memoryview], ends: list[int], start: int, limit: int) -> list[memoryview]:
    """Return the pieces from a byte on: at most IOV_MAX of them and `limit` bytes."""
    first = bisect_right(ends, start)
    begin = ends[first] - len(views[first])
    if begin == start and len(views) - first <= IOV_MAX and ends[-1] - start <= limit:
        return views[first:] if first else views
    chosen = []
    room = limit
    skip = start - begin
    for view in views[first : first + IOV_MAX]:
        part = view[skip : skip + room]
        skip = 0
        chosen.append(part)
        room -= len(part)
        if not room:
            break
    return chosen


def _fill(target: memoryview, views: list[memoryview], ends: list[int], start: int, size: int) -> int:
    """Copy `size` bytes of the pieces from a byte on, however many pieces that takes."""
    done = 0
    while done < size:
        for view in _from(views, ends, start + done, size - done):
            target[done : done + len(view)] = view
            done += len(view)
    return done
