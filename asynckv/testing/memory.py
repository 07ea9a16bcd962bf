"""Files in memory: a directory that costs nothing to fill, copy and damage, below any engine that takes a `Files`."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Any

from asynckv.backends.files import O_DIRECT, Files
from asynckv.testing.tools import PAGE, os_error

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["MemoryDisk", "MemoryFiles"]

SECTOR = 512
NO_NAME = "/"  # no file can have it
FD_FIRST = 1 << 30  # far from every descriptor of the system, which somebody may close by mistake


def _pages(size: int) -> int:
    """Bytes a file of this size takes."""
    return -(-size // PAGE) * PAGE


class _Data:
    """What a name stands for. A file without a name lives on while it is open."""

    __slots__ = ("bytes", "held", "opened")

    def __init__(self, content: bytes | bytearray = b"") -> None:
        self.bytes = bytearray(content)
        self.held = _pages(len(content))
        self.opened = 0


class MemoryDisk:
    """The files of one directory.

    Parameters
    ----------
    files
        Name to content.
    capacity
        Bytes; what does not fit is ``ENOSPC``.

    Attributes
    ----------
    others
        Bytes that somebody else has taken.
    """

    def __init__(self, files: Mapping[str, bytes | bytearray] | None = None, *, capacity: int = 1 << 40) -> None:
        self.names = {name: _Data(content) for name, content in (files or {}).items()}
        self.capacity = capacity
        self.others = 0
        self._nameless: list[_Data] = []

    def content(self) -> dict[str, bytes]:
        """Name to content, as it is now."""
        return {name: bytes(data.bytes) for name, data in sorted(self.names.items())}

    @property
    def used(self) -> int:
        """Bytes that the files take."""
        return sum(data.held for data in [*self.names.values(), *self._nameless])

    @property
    def free(self) -> int:
        """Bytes left."""
        return max(self.capacity - self.others - self.used, 0)

    def grow(self, data: _Data, size: int) -> None:
        """Take room for a file of this size."""
        more = _pages(size) - data.held
        if more > 0:
            if more > self.free:
                raise os_error(errno.ENOSPC)
            data.held += more

    def unname(self, name: str) -> None:
        """Take a name away."""
        data = self.names.pop(name)
        if data.opened:
            self._nameless.append(data)

    def closed(self, data: _Data) -> None:
        """A descriptor of a file is gone, and with the last one what has no name."""
        data.opened -= 1
        if not data.opened:
            self._nameless = [each for each in self._nameless if each is not data]


class MemoryFiles(Files):
    """The system calls of an engine on a `MemoryDisk`.

    Parameters
    ----------
    disk
        The files.
    direct
        Whether files can be opened with O_DIRECT; unaligned transfers on such a file are ``EINVAL``.
    """

    def __init__(self, disk: MemoryDisk, *, direct: bool = True) -> None:
        super().__init__()
        self.disk = disk
        self._direct = direct
        self._open: dict[int, _Data] = {}
        self._unbuffered: set[int] = set()  # descriptors with O_DIRECT
        self._next = FD_FIRST

    def attach(self, directory: Any) -> None:
        """There is but one directory."""

    def _data(self, fd: int) -> _Data:
        try:
            return self._open[fd]
        except KeyError:
            raise os_error(errno.EBADF) from None

    def _named(self, name: str) -> _Data:
        try:
            return self.disk.names[name]
        except KeyError:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name) from None

    def open(self, name: str, flags: int, mode: int = 0o600) -> int:
        """Open a file."""
        if flags & O_DIRECT and not self._direct:
            raise os_error(errno.EINVAL)
        if name not in self.disk.names and flags & os.O_CREAT:
            self.disk.names[name] = _Data()
        elif flags & os.O_EXCL and name in self.disk.names:
            raise os_error(errno.EEXIST)
        data = self._named(name)
        if flags & os.O_TRUNC:
            data.bytes.clear()
            data.held = 0
        fd, self._next = self._next, self._next + 1
        self._open[fd] = data
        data.opened += 1
        self.set_direct(fd, bool(flags & O_DIRECT))
        return fd

    def temporary(self, flags: int) -> int:
        """Open a file without a name."""
        fd = self.open(NO_NAME, os.O_RDWR | os.O_CREAT | os.O_EXCL | flags)
        self.unlink(NO_NAME)
        return fd

    def close(self, fd: int) -> None:
        """Close a descriptor."""
        self.disk.closed(self._data(fd))
        self.set_direct(fd, False)
        del self._open[fd]

    def set_direct(self, fd: int, on: bool) -> None:
        """Turn O_DIRECT on or off."""
        (self._unbuffered.add if on else self._unbuffered.discard)(fd)

    def _check_direct(self, fd: int, offset: int, buffers: Sequence[Any]) -> None:
        if fd in self._unbuffered and (offset | sum(map(len, buffers))) & (SECTOR - 1):
            raise os_error(errno.EINVAL)

    def preadv(self, fd: int, buffers: Any, offset: int) -> int:  # type: ignore[override]
        """Read what is there."""
        data = self._data(fd).bytes
        self._check_direct(fd, offset, buffers)
        done = 0
        for buffer in buffers:
            part = data[offset + done : offset + done + len(buffer)]
            buffer[: len(part)] = part
            done += len(part)
        return done

    def pwritev(self, fd: int, buffers: Any, offset: int) -> int:  # type: ignore[override]
        """Write."""
        data = self._data(fd)
        self._check_direct(fd, offset, buffers)
        content = b"".join(buffers)
        self.disk.grow(data, offset + len(content))
        if len(data.bytes) < offset:
            data.bytes.extend(bytes(offset - len(data.bytes)))
        data.bytes[offset : offset + len(content)] = content
        return len(content)

    def fdatasync(self, fd: int) -> None:  # type: ignore[override]
        """Nothing is ever unsynced here: `asynckv.testing.RecordingBackend` knows what would be."""
        if fd != self.directory_fd:
            self._data(fd)

    fsync = fdatasync  # type: ignore[assignment]

    def sleep(self, seconds: float) -> None:  # type: ignore[override]
        """Time is somebody else's."""

    def size(self, fd: int) -> int:
        """Size of an open file."""
        return len(self._data(fd).bytes)

    def links(self, fd: int) -> int:
        """How many names an open file has."""
        data = self._data(fd)
        return sum(data is each for each in self.disk.names.values())

    def truncate(self, fd: int, size: int) -> None:
        """Set the size of an open file."""
        data = self._data(fd)
        self.disk.grow(data, size)
        del data.bytes[size:]
        data.bytes.extend(bytes(size - len(data.bytes)))
        data.held = _pages(size)

    def allocate(self, fd: int, size: int) -> None:
        """Grow an open file to a size."""
        data = self._data(fd)
        self.disk.grow(data, size)
        data.bytes.extend(bytes(max(size - len(data.bytes), 0)))

    def settle(self, fd: int) -> None:
        """Nothing is ever under way here."""
        self._data(fd)

    def rename(self, old: str, new: str) -> None:
        """Rename, replacing what has the new name."""
        data = self._named(old)
        if new in self.disk.names:
            self.unlink(new)
        del self.disk.names[old]
        self.disk.names[new] = data

    def unlink(self, name: str) -> None:
        """Remove a name."""
        self._named(name)
        self.disk.unname(name)

    def sync_directory(self) -> None:
        """As `fdatasync`."""

    def list(self) -> list[tuple[str, int, int]]:
        """Name, size and allocated bytes of every file."""
        return [(name, len(data.bytes), data.held) for name, data in sorted(self.disk.names.items())]

    def stat(self, name: str) -> tuple[int, int]:
        """Size and allocated bytes of one name."""
        data = self._named(name)
        return len(data.bytes), data.held

    def free_bytes(self) -> int:
        """Bytes left."""
        return self.disk.free

    def probe_direct(self) -> tuple[bool, int, str]:
        """Find out by opening a file."""
        try:
            fd = self.temporary(O_DIRECT)
        except OSError as error:
            return False, PAGE, os.strerror(error.errno or 0)
        self.close(fd)
        return True, PAGE, ""
