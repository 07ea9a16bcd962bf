"""The seam between the tiers and the operating system: what an I/O engine must promise.

An engine moves whole buffers between memory and the files of one directory. It knows nothing of blocks, segments or
checksums, but for the reads that `Backend.fly` takes. Every engine passes `asynckv.testing.contract.BackendContract`;
the promises, in the order of that suite:

Whole transfers
    A read fills its whole buffer or fails; a write writes every byte or fails. Short transfers are resumed (after a
    short direct transfer at the last aligned boundary), ``EINTR`` and ``EAGAIN`` are retried with a bound, one system
    call never moves more than 1 GiB or more than ``IOV_MAX`` pieces. A read past the end of the file is a
    `ShortTransferError`. After a failed write the range holds any mixture of old and new bytes.
Ownership of buffers
    From submission until ``released()`` the engine owns the buffers, whatever becomes of the future: cancelling it or
    passing its deadline does not end the operation, and the kernel may go on writing into the buffer. ``released`` is
    called exactly once for every accepted operation, on the loop thread, and before the future resolves when that is
    still possible. An operation that was not yet started when its future was cancelled or its deadline passed is never
    started (closing a file excepted) and is released at once. A ``prepare`` callable runs at most once.
Workers
    ``verify`` and ``prepare`` run in a worker thread; or on the loop, in an engine that submits from there, when they
    are short. How long they take is told by their attribute ``nbytes``, the bytes they go through. Without it a verify
    counts as the length of its buffer, and a prepare as long.
Deadlines
    Measured on the injected clock from submission. At the deadline the future gets `TimeoutError`; when the loop stood
    still by then, once as much later, so that what ended meanwhile is heard of.
Order
    None. Two operations in flight may run in any order, a sync does not wait for a write in flight: whoever needs an
    order awaits the first before submitting the second. A sync covers the writes whose futures had resolved before it
    was submitted.
Errors
    Every failure arrives through the future, including exceptions of ``verify`` and ``prepare``; submitting raises
    nothing. I/O errors are plain `OSError` with errno kept (a tier turns them into the public ones). After close the
    future carries `ClosedError`. A failed operation never takes a worker down.
Direct I/O
    On a file with ``direct`` set, a read of any offset, length and buffer address works; a write's offset and total
    length must be multiples of ``alignment`` (`ValueError` otherwise), its addresses and pieces need not be. The first
    ``EINVAL`` or ``EOPNOTSUPP`` of a well-aligned request turns direct I/O off for the whole backend, and the same
    request is tried again: one warning in the log, ``direct`` reads False from then on.
Life
    One event loop, bound by `start`; all methods are called on its thread. Completions are delivered in batches.
    When the loop is closed, completions that nobody can receive are dropped quietly. `close` takes no new work, waits
    for what is in flight until a deadline and tells how many operations are still stuck; those keep their buffers.
"""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from asyncio import CancelledError
from errno import EACCES, EAGAIN, EIO, EMFILE, ENFILE, ENOBUFS, ENOMEM, EPERM, EROFS
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

    from asynckv._core import Load

__all__ = [
    "NOT_ALLOWED",
    "OUR_SHORTAGE",
    "Backend",
    "BytesLike",
    "File",
    "Pilot",
    "Prepare",
    "ShortTransferError",
    "Sink",
    "Wrapper",
]

BytesLike: TypeAlias = "bytes | bytearray | memoryview"

# Errors that tell of this process or system, not of the disk or what is on it.
OUR_SHORTAGE = frozenset({EMFILE, ENFILE, ENOMEM, ENOBUFS, EAGAIN})
NOT_ALLOWED = frozenset({EACCES, EPERM, EROFS})  # to open a file: its owner, its mode, a security module

# What a write carries: the pieces, or a callable that gives (pieces, result), for a worker to run.
Prepare: TypeAlias = "Sequence[BytesLike] | Callable[[], tuple[Sequence[BytesLike], Any]]"


class ShortTransferError(OSError):
    """The file ended before the whole buffer was read.

    An `OSError` with errno ``EIO``. For a tier it means a truncated file, which is damage, not a sick disk.

    Parameters
    ----------
    transferred
        Bytes that did arrive.
    wanted
        Bytes asked for.
    """

    def __init__(self, transferred: int, wanted: int) -> None:
        super().__init__(EIO, f"file ended after {transferred} of {wanted} bytes")
        self.transferred = transferred
        self.wanted = wanted


class File:
    """An open file of a backend's directory. Opaque to its users, apart from these attributes.

    A file that nobody holds any more, not even an operation in flight, closes its descriptor.

    Attributes
    ----------
    name
        Its name when opened; a rename does not change it.
    fd
        The file descriptor, -1 once closed.
    direct
        Whether it bypasses the page cache now.
    size
        Bytes as last set by open, allocate or truncate; writes do not change it.
    """

    __slots__ = ("__weakref__", "busy", "closing", "direct", "fd", "name", "size")

    def __init__(self, name: str, fd: int, *, direct: bool, size: int) -> None:
        self.name = name
        self.fd = fd
        self.direct = direct
        self.size = size
        self.busy = 0  # operations in flight on it; a close waits for zero, because fd numbers are reused
        self.closing: Any = None  # the close operation that waits

    def __del__(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)

    def __repr__(self) -> str:
        return f"<File {self.name!r} fd={self.fd} {'direct' if self.direct else 'buffered'}>"


class Sink(Protocol):
    """Who a read is for: told by plain calls on the loop's thread, without a future and a turn of the loop between."""

    def on_released(self) -> object:
        """Nothing touches the buffer any more; called once, and before `on_ended` unless the deadline came first."""

    def on_ended(self, result: bool, error: BaseException | None) -> object:
        """The result or the error; called once, unless the read was given up. Must not raise."""


class Reading(Protocol):
    """A read under way."""

    def cancel(self) -> object:
        """Nobody waits for it any more: it is not started, or only `Sink.on_released` is called when it ended."""


class Pilot(Protocol):
    """Who reads of blocks are for that were handed in together. Its methods must not raise."""

    def on_landed(self, loads: list[Load]) -> object:
        """These are there and verified, and nothing touches their bytes any more."""

    def on_fallen(self, load: Load, error: BaseException | None, free: bool) -> object:
        """This one is not.

        Parameters
        ----------
        error
            None when the bytes are wrong or too few, or the request was refused: `Backend.read_for` may do better.
        free
            Whether nothing touches its bytes any more.
        """

    def on_released(self, load: Load) -> object:
        """Nothing touches the bytes any more of one that was not free when it fell."""


class Backend(ABC):
    """An I/O engine on one directory and one event loop; the module's docstring states its promises.

    Attributes
    ----------
    name
        The engine's name, as in ``asynckv.open(engine=...)``.
    direct
        Whether files really bypass the page cache, as measured by `start`; False after a fallback.
    alignment
        Bytes; direct offsets, lengths and addresses are multiples of it.
    timeout
        Seconds; the deadline of operations that name none.
    """

    name: str = ""
    direct: bool = False
    alignment: int = 4096
    timeout: float = 5.0

    @property
    @abstractmethod
    def reads_in_flight(self) -> int:
        """Reads submitted and not yet released."""

    @property
    @abstractmethod
    def writes_in_flight(self) -> int:
        """Writes submitted and not yet released."""

    @abstractmethod
    async def start(self, directory: str | os.PathLike[str] | int) -> None:
        """Bind to the running loop and to a directory, and find out what the directory can do.

        Parameters
        ----------
        directory
            Path of an existing directory (not a symlink), or a descriptor of one, which is duplicated.

        Raises
        ------
        DiskError
            Direct I/O was demanded and a real aligned write and read with it failed.
        OSError
            The directory cannot be opened.
        """

    @abstractmethod
    def read(
        self,
        file: File,
        offset: int,
        buffer: memoryview,
        *,
        verify: Callable[[memoryview], bool] | None = None,
        timeout: float | None = None,
        released: Callable[[], object] | None = None,
    ) -> asyncio.Future[bool]:
        """Fill a whole buffer from a file.

        Parameters
        ----------
        file
            An open file.
        offset
            First byte.
        buffer
            Writable, contiguous bytes; owned by the engine until `released`. Its content is undefined after a failure.
        verify
            Called with the filled buffer, in a worker unless it is short; must not touch anything that belongs to the
            loop, and must not block when it has no large ``nbytes``.
        timeout
            Seconds from now; None means the backend's `timeout`, ``math.inf`` never.
        released
            Called once on the loop when the engine no longer touches the buffer.

        Returns
        -------
        asyncio.Future of bool
            What `verify` returned, True without one.
        """

    def read_for(
        self, file: File, offset: int, buffer: memoryview, sink: Sink, verify: Callable[[memoryview], bool] | None
    ) -> Reading:
        """As `read`, but a sink is told instead of a future; never before this call returned."""
        return _Telling(self.read(file, offset, buffer, verify=verify, released=sink.on_released), sink)

    @property
    def flies(self) -> bool:
        """Whether `fly` takes any reads now."""
        return False

    def fly(self, loads: list[Load], files: dict[int, File], pilot: Pilot, over: Callable[[], object]) -> list[Load]:
        """Read blocks together into their extents and verify them, with nothing to be done for each in between.

        A read that fell is not tried again. Deadlines and ownership of the bytes are as for `read`.

        Parameters
        ----------
        files
            Of the segments that they are in, by slot.
        pilot
            Is told of each once, after this call returned; always the same one.
        over
            Called when the last one has let go of its bytes, if any flies at all.

        Returns
        -------
        list of Load
            Those that the engine does not take this way, in order.
        """
        return loads

    @abstractmethod
    def write(
        self,
        file: File,
        offset: int,
        prepare: Prepare,
        *,
        timeout: float | None = None,
        released: Callable[[], object] | None = None,
    ) -> asyncio.Future[Any]:
        """Write pieces one after the other from an offset on.

        Parameters
        ----------
        file
            An open file.
        offset
            First byte.
        prepare
            The pieces (contiguous buffers), or a callable that returns ``(pieces, result)`` and is run in a worker,
            unless its ``nbytes`` say that it is short: the place for checksums and for staging.
        timeout, released
            As for `read`.

        Returns
        -------
        asyncio.Future
            The result that `prepare` returned, None for plain pieces.
        """

    @abstractmethod
    def sync(self, file: File, *, timeout: float | None = None) -> asyncio.Future[None]:
        """Make the completed writes, truncations and allocations of a file durable (fdatasync)."""

    @abstractmethod
    def call(self, function: str, *args: Any, timeout: float | None = None) -> asyncio.Future[Any]:
        """Run one of the cold file functions by name, on a lane of their own.

        The names and arguments are those of the methods below; wrappers need only override this.
        """

    @abstractmethod
    async def close(self) -> int:
        """Stop intake, wait for what is in flight until `timeout`, and let every resource go.

        Idempotent; a cancelled caller does not stop it.

        Returns
        -------
        int
            Operations that are still stuck in the kernel. They own their buffers for ever: the caller must leak them.
        """

    # The cold calls. Each starts when called, not when awaited.

    def open(self, name: str, *, create: bool = False, size: int = 0, direct: bool = True) -> asyncio.Future[File]:
        """Open a regular file for reading and writing, without following symlinks.

        Parameters
        ----------
        name
            A plain name in the directory.
        create
            Create it with mode 0600 when it does not exist; the name is durable after `sync_directory`.
        size
            With `create`: allocate this many bytes.
        direct
            False asks for a buffered file even where the backend is direct.
        """
        return self.call("open", name, create, size, direct)

    def temporary(self, size: int = 0) -> asyncio.Future[File]:
        """Open a new file that has no name, with so many bytes allocated: it touches none that is there."""
        return self.call("temporary", size)

    def close_file(self, file: File) -> asyncio.Future[None]:
        """Close a file once nothing on it is in flight any more; runs even after its deadline."""
        return self.call("close", file)

    def allocate(self, file: File, size: int) -> asyncio.Future[None]:
        """Grow a file to a size with blocks allocated where the file system can; they read as zeros."""
        return self.call("allocate", file, size)

    def settle(self, file: File) -> asyncio.Future[None]:
        """Wait for writes under way on a file that nobody here can await: those of a process that died."""
        return self.call("settle", file)

    def links(self, file: File) -> asyncio.Future[int]:
        """Return how many names a file has: two after a hard link, none after an unlink."""
        return self.call("links", file)

    def truncate(self, file: File, size: int) -> asyncio.Future[None]:
        """Set the size of a file."""
        return self.call("truncate", file, size)

    def rename(self, old: str, new: str) -> asyncio.Future[None]:
        """Rename a file, replacing what has the new name."""
        return self.call("rename", old, new)

    def unlink(self, name: str) -> asyncio.Future[None]:
        """Remove a file's name."""
        return self.call("unlink", name)

    def sync_directory(self) -> asyncio.Future[None]:
        """Make the completed creations, renames and unlinks durable."""
        return self.call("sync_directory")

    def list(self) -> asyncio.Future[list[tuple[str, int, int]]]:
        """Return (name, size, allocated bytes) of the regular files of the directory, in no order."""
        return self.call("list")

    def stat(self, name: str) -> asyncio.Future[tuple[int, int]]:
        """Return (size, allocated bytes) of a file."""
        return self.call("stat", name)

    def read_file(self, name: str, limit: int) -> asyncio.Future[bytes]:
        """Read a whole file of at most `limit` bytes; ``EFBIG`` when it is longer."""
        return self.call("read_file", name, limit)

    def write_file(self, name: str, data: BytesLike, *, timeout: float | None = None) -> asyncio.Future[None]:
        """Replace a whole file: ``name.tmp`` written, synced, renamed, and the directory synced."""
        return self.call("write_file", name, data, timeout=timeout)

    def free_bytes(self) -> asyncio.Future[int]:
        """Return the bytes that the file system has left for this user."""
        return self.call("statvfs")


class _Telling:
    """Tells a sink what becomes of a future."""

    __slots__ = ("_future", "_sink")

    def __init__(self, future: asyncio.Future[bool], sink: Sink) -> None:
        self._future = future
        self._sink: Sink | None = sink
        future.add_done_callback(self._tell)

    def cancel(self) -> None:
        """Nobody waits any more."""
        self._sink = None
        self._future.cancel()

    def _tell(self, future: asyncio.Future[bool]) -> None:
        sink, self._sink = self._sink, None
        if sink is None:
            return
        if future.cancelled():
            sink.on_ended(False, CancelledError())
        else:
            error = future.exception()
            sink.on_ended(error is None and future.result(), error)


class Wrapper(Backend):
    """A backend that passes everything on to an inner one; subclasses change what they are there for.

    Parameters
    ----------
    inner
        The backend that does the work.
    """

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.timeout = inner.timeout

    @property
    def name(self) -> str:  # type: ignore[override]
        """The inner engine's name."""
        return self.inner.name

    @property
    def direct(self) -> bool:  # type: ignore[override]
        """As the inner one says."""
        return self.inner.direct

    @property
    def alignment(self) -> int:  # type: ignore[override]
        """As the inner one says."""
        return self.inner.alignment

    @property
    def reads_in_flight(self) -> int:
        """As the inner one says."""
        return self.inner.reads_in_flight

    @property
    def writes_in_flight(self) -> int:
        """As the inner one says."""
        return self.inner.writes_in_flight

    async def start(self, directory: str | os.PathLike[str] | int) -> None:
        """Start the inner backend."""
        await self.inner.start(directory)

    def read(
        self,
        file: File,
        offset: int,
        buffer: memoryview,
        *,
        verify: Callable[[memoryview], bool] | None = None,
        timeout: float | None = None,
        released: Callable[[], object] | None = None,
    ) -> asyncio.Future[bool]:
        """Fill a whole buffer from a file; see `Backend.read`."""
        return self.inner.read(file, offset, buffer, verify=verify, timeout=timeout, released=released)

    def write(
        self,
        file: File,
        offset: int,
        prepare: Prepare,
        *,
        timeout: float | None = None,
        released: Callable[[], object] | None = None,
    ) -> asyncio.Future[Any]:
        """Write pieces one after the other; see `Backend.write`."""
        return self.inner.write(file, offset, prepare, timeout=timeout, released=released)

    def sync(self, file: File, *, timeout: float | None = None) -> asyncio.Future[None]:
        """Make a file's completed writes durable; see `Backend.sync`."""
        return self.inner.sync(file, timeout=timeout)

    def call(self, function: str, *args: Any, timeout: float | None = None) -> asyncio.Future[Any]:
        """Run a cold file function by name; see `Backend.call`."""
        return self.inner.call(function, *args, timeout=timeout)

    async def close(self) -> int:
        """Close the inner backend."""
        return await self.inner.close()
