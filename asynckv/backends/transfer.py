"""Whole transfers by blocking calls: resumed when short, retried when interrupted, bounced when unaligned.

Runs in workers. The one choke point where direct I/O is given up is `Transfers.refuse`.
"""

from __future__ import annotations

import errno
import itertools
import logging
import mmap
import os
import threading
from bisect import bisect_right
from typing import TYPE_CHECKING

from asynckv.backends.base import ShortTransferError
from asynckv.backends.files import NOT_DIRECT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asynckv.backends.base import BytesLike, File
    from asynckv.backends.files import Files

__all__ = ["BOUNCE_BYTES", "Scratch", "Transfers"]

_log = logging.getLogger("asynckv.backends")

# One system call moves at most 0x7ffff000 bytes (read(2)); stay well below, at a multiple of every alignment.
CALL_BYTES = 1 << 30
IOV_MAX = min(os.sysconf("SC_IOV_MAX"), 1024) if "SC_IOV_MAX" in os.sysconf_names else 16
BOUNCE_BYTES = 1 << 20
_TRANSIENT = frozenset({errno.EINTR, errno.EAGAIN})
_TRIES = 10  # of a call that says EINTR or EAGAIN, or moves nothing; with the pauses below about half a second
_PAUSE_S = 0.0005


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

    # reads

    def read(self, file: File, offset: int, buffer: memoryview, scratch: Scratch) -> None:
        """Fill the buffer or raise."""
        size = len(buffer)
        if file.direct and self.uses_direct(file):
            if not (offset | size) & (self.alignment - 1):
                try:
                    return self._read_direct(file, offset, buffer)
                except OSError as error:
                    if error.errno not in NOT_DIRECT:
                        raise
                    # Perhaps only the address of this buffer: an aligned bounce buffer tells.
            try:
                return self._read_bounced(file, offset, buffer, scratch)
            except OSError as error:
                if error.errno not in NOT_DIRECT:
                    raise
                self._refused(file, error)
        if size <= self.call_bytes:
            try:
                if self.files.preadv(file.fd, (buffer,), offset) == size:
                    return None
            except OSError as error:
                if error.errno not in _TRANSIENT:
                    raise
        done = 0  # from the start: what the first try moved does not matter
        while done < size:
            count = self._read_some(file.fd, buffer[done : done + self.call_bytes], offset + done)
            if count == 0:
                raise ShortTransferError(done, size)
            done += count
        return None

    def _read_direct(self, file: File, offset: int, buffer: memoryview) -> None:
        size = len(buffer)
        done = self._read_aligned(file.fd, offset, buffer, size)
        if done < size:
            raise ShortTransferError(done, size)

    def _read_aligned(self, fd: int, offset: int, buffer: memoryview, wanted: int) -> int:
        """Read an aligned range until `wanted` bytes or the end of the file; the bytes that are there."""
        resume = done = 0
        mask = ~(self.alignment - 1)
        while True:
            count = self._read_some(fd, buffer[resume : resume + self.call_bytes], offset + resume)
            reached = resume + count
            if reached >= wanted:
                return wanted
            if reached <= done:  # no progress from the last aligned boundary: the end of the file
                return max(done, reached)
            done = reached
            resume = done & mask

    def _read_bounced(self, file: File, offset: int, buffer: memoryview, scratch: Scratch) -> None:
        size = len(buffer)
        bounce = scratch.view()
        mask = self.alignment - 1
        done = 0
        while done < size:
            start = offset + done
            skip = start & mask
            part = min(size - done, BOUNCE_BYTES - skip)
            aligned = (skip + part + mask) & ~mask
            got = self._read_aligned(file.fd, start - skip, bounce[:aligned], skip + part)
            if got < skip + part:
                raise ShortTransferError(done + max(got - skip, 0), size)
            buffer[done : done + part] = bounce[skip : skip + part]
            done += part

    def _read_some(self, fd: int, view: memoryview, offset: int) -> int:
        for attempt in itertools.count():
            try:
                return self.files.preadv(fd, (view,), offset)
            except OSError as error:
                self._pause(error, attempt)
        raise AssertionError("unreachable")

    def _pause(self, error: OSError, attempt: int) -> None:
        """Wait a little after a transient error; raise any other, and the last of too many."""
        if error.errno not in _TRANSIENT or attempt >= _TRIES:
            raise error
        if error.errno == errno.EAGAIN:
            self.files.sleep(_PAUSE_S * (1 << attempt))

    # writes

    def write(self, file: File, offset: int, pieces: Sequence[BytesLike], scratch: Scratch) -> None:
        """Write every byte of every piece or raise."""
        views = [view for view in map(_flat, pieces) if len(view)]
        ends = list(itertools.accumulate(map(len, views)))
        if not ends:
            return
        size = ends[-1]
        if file.direct and self.uses_direct(file):
            mask = self.alignment - 1
            if (offset | size) & mask:
                raise ValueError(f"direct writes need multiples of {self.alignment}: {size} bytes at {offset}")
            if not any(end & mask for end in ends):
                try:
                    self._write_pieces(file.fd, offset, views, ends, ~mask)
                    return
                except OSError as error:
                    if error.errno not in NOT_DIRECT:
                        raise
            try:
                self._write_bounced(file.fd, offset, views, ends, scratch)
                return
            except OSError as error:
                if error.errno not in NOT_DIRECT:
                    raise
                self._refused(file, error)
        self._write_pieces(file.fd, offset, views, ends, ~0)

    def _write_pieces(self, fd: int, offset: int, views: list[memoryview], ends: list[int], mask: int) -> None:
        size = ends[-1]
        done = idle = 0
        while done < size:
            count = self._write_some(fd, _from(views, ends, done, self.call_bytes), offset + done)
            reached = done + count
            if reached < size:
                reached &= mask  # direct: back to the last aligned boundary; the bytes between are written twice
            idle = 0 if reached > done else idle + 1
            if idle > _TRIES:
                raise OSError(errno.EIO, "a write makes no progress")
            done = reached

    def _write_bounced(self, fd: int, offset: int, views: list[memoryview], ends: list[int], scratch: Scratch) -> None:
        size = ends[-1]
        bounce = scratch.view()
        done = 0
        while done < size:
            part = _fill(bounce, views, ends, done, min(BOUNCE_BYTES, size - done))
            self._write_pieces(fd, offset + done, [bounce[:part]], [part], -self.alignment)
            done += part

    def _write_some(self, fd: int, views: list[memoryview], offset: int) -> int:
        for attempt in itertools.count():
            try:
                return self.files.pwritev(fd, views, offset)
            except OSError as error:
                self._pause(error, attempt)
        raise AssertionError("unreachable")

    # the rest

    def sync(self, file: File) -> None:
        """Make a file's data durable; never retried after an error, because the retry may lie (fsync(2))."""
        self.files.fdatasync(file.fd)


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
