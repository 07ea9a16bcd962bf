"""The directory of a store: is it safe to use, is it ours alone, how much of it counts.

The checks and the lock go to the operating system directly: they come before there is a backend. Everything is relative
to a descriptor of the directory, so that nobody can swap the path between the check and the use.

The lock is a POSIX record lock (fcntl(2)) on the file ``lock``: the kernel lets go of it when the process dies, and a
forked child does not inherit it. Such a lock has two traps. It does not keep out the process that holds it: a
registry by (device, inode) does. And closing *any* descriptor of the file drops it: so the registry is asked before
the file is opened, and no thread opens or closes the file between another's look at the registry and its entry.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import struct
import sys
import threading
from typing import TYPE_CHECKING

from asynckv.errors import StoreLockedError, UnsafeDirectoryError
from asynckv.tiers.layout import (
    LOCK_NAME,
    PAGE,
    SNAPSHOT_NAME,
    SPARE_NAMES,
    SUPERBLOCK_NAME,
    parse_segment_name,
)

if TYPE_CHECKING:
    from typing import Self

__all__ = ["Directory"]

_LOCK_TRIES = 8
_OURS = (SUPERBLOCK_NAME, SUPERBLOCK_NAME + ".tmp", SNAPSHOT_NAME, SNAPSHOT_NAME + ".tmp", *SPARE_NAMES)
_held: dict[tuple[int, int], int] = {}  # (device, inode) of the directory -> process id of the holder
# For a look at the registry and an entry, with the lock file opened or closed between; finalisers may come in between.
_turn = threading.RLock()


def _new_turn() -> None:
    global _turn
    _turn = threading.RLock()  # a thread of the parent's may have it


os.register_at_fork(after_in_child=_new_turn)


class Directory:
    """A store's directory, checked; with `lock`, held for this process alone.

    Attributes
    ----------
    path
        As given.
    fd
        Descriptor of the directory, -1 once closed.
    own_bytes
        Allocated bytes of the directory itself.
    """

    def __init__(self, path: str, fd: int) -> None:
        self.path = path
        self.fd = fd
        info = os.fstat(fd)
        self._identity = (info.st_dev, info.st_ino)
        self.own_bytes = max(info.st_blocks * 512, PAGE)
        self._lock_fd = -1
        self._noted = b""  # what the lock file says while it is ours
        self._lost = False
        self._pid = os.getpid()

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, create: bool = True) -> Self:
        """Open a directory, made with mode 0700 when it does not exist.

        Raises
        ------
        UnsafeDirectoryError
            It is a symlink or no directory, belongs to another user, or is writable by group or world.
        OSError
            It cannot be made or opened.
        """
        text = os.fsdecode(path)
        name = text.rstrip("/") or text[:1] or "."  # with a slash at the end, open(2) would follow a symlink
        if create:
            parent = os.path.dirname(name)
            if parent:
                with contextlib.suppress(FileExistsError):  # a file: what comes next says so
                    os.makedirs(parent, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700)
        try:
            fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR) and os.path.lexists(name):
                raise UnsafeDirectoryError(
                    f"{text!r} is a symlink or not a directory", errno=error.errno, operation="open"
                ) from error
            raise
        try:
            info = os.fstat(fd)
            if info.st_uid != os.geteuid():
                raise UnsafeDirectoryError(f"{text!r} belongs to user {info.st_uid}", operation="open")
            if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise UnsafeDirectoryError(f"{text!r} is writable by group or world", operation="open")
            return cls(text, fd)
        except BaseException:
            os.close(fd)
            raise

    @property
    def locked(self) -> bool:
        """Whether this object holds the lock."""
        return self._lock_fd >= 0

    def lock(self) -> None:
        """Become the only owner; never waits.

        Raises
        ------
        StoreLockedError
            A live process holds the store; its id is in the text and in ``pid``.
        UnsafeDirectoryError
            The lock is not a plain file of ours.
        """
        with _turn:
            holder = _held.get(self._identity)
            if holder == os.getpid():
                raise StoreLockedError(f"{self.path!r} is open in this process ({holder})", pid=holder)
            for _ in range(_LOCK_TRIES):
                fd = self._open_lock()
                try:
                    if self._try_lock(fd):
                        self._noted = self._write_pid(fd)
                        _held[self._identity] = os.getpid()
                        self._lock_fd = fd
                        return
                finally:
                    if self._lock_fd < 0:
                        os.close(fd)
            raise StoreLockedError(f"the lock of {self.path!r} is being replaced all the time")

    def _open_lock(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            fd = os.open(LOCK_NAME, flags, 0o600, dir_fd=self.fd)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
                raise UnsafeDirectoryError(
                    f"the lock in {self.path!r} is not a plain file", errno=error.errno
                ) from error
            raise
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid():
            os.close(fd)
            raise UnsafeDirectoryError(f"the lock in {self.path!r} is not a plain file of ours")
        return fd

    def _try_lock(self, fd: int) -> bool:
        """Lock; False when the file is no longer the one in the directory."""
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
            pid = _lock_holder(fd)
            raise StoreLockedError(
                f"{self.path!r} is in use by process {'unknown' if pid is None else pid}", pid=pid
            ) from error
        try:
            current = os.stat(LOCK_NAME, dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        mine = os.fstat(fd)
        return (current.st_dev, current.st_ino) == (mine.st_dev, mine.st_ino)

    @staticmethod
    def _write_pid(fd: int) -> bytes:
        """Note our process id for people and for systems that cannot ask the kernel; what was noted."""
        note = b"%d\n" % os.getpid()
        with contextlib.suppress(OSError):  # the lock is held all the same, on a full disk too
            os.ftruncate(fd, 0)
            if os.pwrite(fd, note, 0) == len(note):
                return note
        return b""

    def renew(self) -> bool:
        """Lock once more, which changes nothing for who has the lock; whether nobody else had it since `lock`.

        Whoever opens and closes the lock file in this process, to copy the directory for one, lets go of it unawares.
        """
        if self._lock_fd < 0 or self._lost:
            return False
        try:
            fcntl.lockf(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._lost = bool(self._noted) and os.pread(self._lock_fd, 32, 0) != self._noted
        except OSError:
            self._lost = True
        return not self._lost

    def holder(self) -> int | None:
        """Return the process that holds the store, 0 for one that cannot be named, None when nobody does.

        Asks without taking or changing anything.
        """
        with _turn:
            own = _held.get(self._identity)
            if own == os.getpid():  # opening and closing the file here would drop our own lock
                return own
            try:
                fd = os.open(LOCK_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=self.fd)
            except OSError:
                return None
            try:
                return _ask_kernel(fd)
            finally:
                os.close(fd)

    def __del__(self) -> None:
        # A cache that was dropped without being closed must not keep its directory for the life of the process.
        if self.fd >= 0 and self._pid == os.getpid():
            self.close()

    def close_to_others(self) -> None:
        """Take what others may do with the files of a held store: those of a copy made without care may be read by all.

        Segments are used again for new blocks as they are.
        """
        os.fchmod(self._lock_fd, 0o600)
        for name in os.listdir(self.fd):
            if name not in _OURS and parse_segment_name(name) is None:
                continue
            with contextlib.suppress(OSError):  # gone since, or nothing that may be opened
                info = os.stat(name, dir_fd=self.fd, follow_symlinks=False)
                if not stat.S_ISREG(info.st_mode) or not info.st_mode & 0o077:
                    continue
                fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=self.fd)
                try:
                    os.fchmod(fd, 0o600)
                finally:
                    os.close(fd)

    def clear_way(self) -> list[str]:
        """Remove what has one of our names and is no file; the names of what stays in the way.

        A link, a pipe, a socket or an empty directory goes, unopened; a directory with something in it is somebody's.
        So is anything that has the name of a segment: another number will do.
        """
        left = []
        with os.scandir(self.fd) as entries:
            odd = [
                (entry.name, entry.is_dir(follow_symlinks=False))
                for entry in entries
                if not entry.is_file(follow_symlinks=False)
            ]
        for name, is_directory in odd:
            if name in _OURS:
                with contextlib.suppress(OSError):
                    (os.rmdir if is_directory else os.unlink)(name, dir_fd=self.fd)
                    continue
            if name in _OURS or parse_segment_name(name) is not None:
                left.append(name)
        return sorted(left)

    def unlock(self) -> None:
        """Let go of the lock; the file stays, because removing it would race with the next owner."""
        with _turn:
            if self._lock_fd < 0:
                return
            fd, self._lock_fd = self._lock_fd, -1
            os.close(fd)  # first: it would drop the lock of a next owner in this process
            if _held.get(self._identity) == os.getpid():
                del _held[self._identity]

    def close(self) -> None:
        """Unlock and close."""
        self.unlock()
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            os.close(fd)


def _lock_holder(fd: int) -> int | None:
    """Process that holds the lock: asked from the kernel where its struct flock is known, else read from the file."""
    pid = _ask_kernel(fd)
    if pid:
        return pid
    with contextlib.suppress(OSError):
        text = os.pread(fd, 32, 0).strip()
        if text.isdigit():
            return int(text)
    return None


def _ask_kernel(fd: int) -> int | None:
    """Process that holds the lock, 0 when it has no number here, None when nobody does or the kernel cannot tell."""
    if sys.platform == "linux" and sys.maxsize > 2**32:
        with contextlib.suppress(OSError):
            query = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            kind, _, _, _, pid = struct.unpack("hhqqi4x", fcntl.fcntl(fd, fcntl.F_GETLK, query))
            if kind != fcntl.F_UNLCK:
                return max(int(pid), 0)
    return None
