"""The raw file calls of an engine, in one object so that tests can put faults under it.

`Files` has no state but the directory's descriptor. Every name is relative to that descriptor, is never followed when
it is a symlink, and no descriptor crosses an exec. All methods block and run in workers.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import stat
import time

__all__ = ["NOT_DIRECT", "Files"]

O_DIRECT: int = getattr(os, "O_DIRECT", 0)  # absent outside Linux: files are then always buffered
O_TMPFILE: int = getattr(os, "O_TMPFILE", 0)

# How a file system says no to direct I/O, at open or at the transfer (open(2), read(2)).
NOT_DIRECT = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP})

# statx(2): the mask bit and the place of the two DIOALIGN fields in struct statx (include/uapi/linux/stat.h).
_AT_EMPTY_PATH = 0x1000
_STATX_DIOALIGN = 0x2000
_STATX_BYTES = 256
_STX_DIO_MEM_ALIGN = 152
_STX_DIO_OFFSET_ALIGN = 156

_COPY_BYTES = 1 << 20
_FALLOC_FL_KEEP_SIZE = 1
_INTERRUPTIONS_MAX = 16


class Files:
    """The system calls of one directory, which `attach` opens."""

    preadv = staticmethod(os.preadv)
    pwritev = staticmethod(os.pwritev)
    fdatasync = staticmethod(os.fdatasync)
    fsync = staticmethod(os.fsync)
    sleep = staticmethod(time.sleep)  # between tries after EAGAIN

    def __init__(self) -> None:
        self.directory_fd = -1

    def attach(self, directory: str | os.PathLike[str] | int) -> None:
        """Open the directory.

        Parameters
        ----------
        directory
            Path of an existing directory, or a descriptor of one, which is duplicated.
        """
        if isinstance(directory, int):
            self.directory_fd = fcntl.fcntl(directory, fcntl.F_DUPFD_CLOEXEC, 0)
        else:
            self.directory_fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)

    def detach(self) -> None:
        """Close the directory; once."""
        fd, self.directory_fd = self.directory_fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            self.detach()

    def open(self, name: str, flags: int, mode: int = 0o600) -> int:
        """Open a regular file; anything else of that name is an error (``EINVAL``)."""
        # O_NONBLOCK: opening a FIFO that somebody planted must not hang; regular files ignore it.
        flags |= os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        fd = os.open(name, flags, mode, dir_fd=self.directory_fd)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise OSError(errno.EINVAL, "not a regular file")
            # Off again: io_uring fails requests on such a file with EAGAIN rather than wait for the disk.
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_NONBLOCK)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def close(self, fd: int) -> None:
        """Close a descriptor."""
        os.close(fd)

    def set_direct(self, fd: int, on: bool) -> None:
        """Turn O_DIRECT of an open file on or off (fcntl(2), F_SETFL)."""
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | O_DIRECT if on else flags & ~O_DIRECT)

    def size(self, fd: int) -> int:
        """Size of an open file."""
        return os.fstat(fd).st_size

    def links(self, fd: int) -> int:
        """How many names an open file has."""
        return os.fstat(fd).st_nlink

    def truncate(self, fd: int, size: int) -> None:
        """Set the size of an open file."""
        os.ftruncate(fd, size)

    def allocate(self, fd: int, size: int) -> None:
        """Grow an open file to a size, with blocks where the file system can allocate them ahead."""
        if size <= 0:
            return
        try:
            os.posix_fallocate(fd, 0, size)
        except OSError as error:
            if error.errno not in NOT_DIRECT and error.errno != errno.ENOSYS:
                raise
            if os.fstat(fd).st_size < size:  # a hint only: a sparse file reads as zeros just the same
                os.ftruncate(fd, size)

    def settle(self, fd: int) -> None:
        """Wait for the writes that are under way on an open file, whoever submitted them.

        A write that a process left in its ring reaches the disk after that process has died and its locks were freed,
        and neither a read nor fsync(2) waits for it. fallocate(2) does: ext4, xfs and f2fs wait for all direct I/O of
        the file first, btrfs for the writes in the range. It allocates nothing here, but one page of a sparse file.
        """
        status = os.fstat(fd)
        dense = status.st_blocks * 512 >= status.st_size
        length = status.st_size if dense else min(status.st_size, mmap.PAGESIZE)
        try:
            libc = ctypes.CDLL(None, use_errno=True)
            fallocate = getattr(libc, "fallocate64", None) or libc.fallocate
        except (OSError, AttributeError):
            return  # such systems have no ring
        for _ in range(_INTERRUPTIONS_MAX):
            failed = fallocate(fd, _FALLOC_FL_KEEP_SIZE, ctypes.c_int64(0), ctypes.c_int64(length))
            if not failed or ctypes.get_errno() != errno.EINTR:
                return  # any other error comes after the wait, or from a file system that knows no fallocate

    def rename(self, old: str, new: str) -> None:
        """Rename inside the directory."""
        os.rename(old, new, src_dir_fd=self.directory_fd, dst_dir_fd=self.directory_fd)

    def unlink(self, name: str) -> None:
        """Remove a name."""
        os.unlink(name, dir_fd=self.directory_fd)

    def sync_directory(self) -> None:
        """Make names durable."""
        self.fsync(self.directory_fd)

    def list(self) -> list[tuple[str, int, int]]:
        """Name, size and allocated bytes of every regular file."""
        found = []
        os.lseek(self.directory_fd, 0, os.SEEK_SET)  # btrfs lists what there was when a directory was opened or rewound
        for name in os.listdir(self.directory_fd):
            with contextlib.suppress(FileNotFoundError):  # gone since it was listed
                status = os.stat(name, dir_fd=self.directory_fd, follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    found.append((name, status.st_size, status.st_blocks * 512))
        return found

    def stat(self, name: str) -> tuple[int, int]:
        """Size and allocated bytes of one name."""
        status = os.stat(name, dir_fd=self.directory_fd, follow_symlinks=False)
        return status.st_size, status.st_blocks * 512

    def free_bytes(self) -> int:
        """Bytes that the file system has left for this user."""
        status = os.statvfs(self.directory_fd)
        return status.f_bavail * status.f_frsize

    def read_file(self, name: str, limit: int) -> bytes:
        """Return a whole file of at most `limit` bytes."""
        fd = self.open(name, os.O_RDONLY)
        try:
            wanted = self.size(fd)
            if wanted > limit:
                raise OSError(errno.EFBIG, f"file has {wanted} bytes, {limit} are allowed")
            data = bytearray(wanted)
            done = 0
            with memoryview(data) as view:
                while done < wanted:
                    count = self.preadv(fd, [view[done : done + _COPY_BYTES]], done)
                    if count == 0:  # shortened under our hands: what is left is all there is
                        break
                    done += count
            return bytes(data[:done])
        finally:
            self.close(fd)

    def write_file(self, name: str, data: bytes | bytearray | memoryview) -> None:
        """Replace a whole file so that a crash leaves the old one or the new one."""
        temporary = name + ".tmp"
        fd = self.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            try:
                view = memoryview(data).cast("B")
                done = 0
                while done < len(view):
                    count = self.pwritev(fd, [view[done : done + _COPY_BYTES]], done)
                    if count == 0:
                        raise OSError(errno.EIO, "a write moved nothing")
                    done += count
                self.fsync(fd)
            finally:
                self.close(fd)
            self.rename(temporary, name)
        except BaseException:
            with contextlib.suppress(OSError):
                self.unlink(temporary)
            raise
        self.sync_directory()

    def temporary(self, flags: int) -> int:
        """Open a file without a name, or with one that is removed at once."""
        if O_TMPFILE:
            try:
                return os.open(".", O_TMPFILE | os.O_RDWR | os.O_CLOEXEC | flags, 0o600, dir_fd=self.directory_fd)
            except OSError as error:  # EISDIR: a kernel that does not know the flag; EOPNOTSUPP: a file system
                if error.errno not in (errno.EISDIR, errno.EOPNOTSUPP, errno.ENOENT):
                    raise
        name = f"probe-{os.getpid()}-{os.urandom(4).hex()}.tmp"
        fd = self.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | flags)
        try:
            self.unlink(name)
        except BaseException:
            self.close(fd)
            raise
        return fd

    def probe_direct(self) -> tuple[bool, int, str]:
        """Find out by a real aligned write and read whether direct I/O works here.

        Returns
        -------
        works, alignment, reason
            The alignment is what statx(2) reports, or 4096; the reason says why it does not work.
        """
        if not O_DIRECT:
            return False, mmap.PAGESIZE, "this system has no O_DIRECT"
        try:
            fd = self.temporary(O_DIRECT)
        except OSError as error:  # a file system without room for one more file can still be read
            if error.errno not in NOT_DIRECT and error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            return False, mmap.PAGESIZE, f"open: {os.strerror(error.errno or 0)}"
        try:
            alignment = self.alignment(fd)
            if alignment == 0:
                return False, mmap.PAGESIZE, "statx reports no direct I/O"
            size = max(alignment, mmap.PAGESIZE)
            with mmap.mmap(-1, 2 * size) as memory:
                memory[:size] = os.urandom(size)
                with memoryview(memory) as view, view[:size] as source, view[size:] as target:
                    try:
                        whole = self.pwritev(fd, [source], 0) == size and self.preadv(fd, [target], 0) == size
                        same = whole and bytes(source) == bytes(target)
                    except OSError as error:
                        if error.errno in (errno.ENOSPC, errno.EDQUOT):
                            return True, alignment, ""  # a full disk says nothing against direct reads
                        if error.errno not in NOT_DIRECT:
                            raise
                        return False, alignment, f"transfer: {os.strerror(error.errno or 0)}"
            if not same:
                return False, alignment, "a direct read returned other bytes"
            if self.cached(fd, size):
                return False, alignment, "the file system sends direct I/O through the page cache"
            return True, alignment, ""
        finally:
            self.close(fd)

    def alignment(self, fd: int) -> int:
        """Alignment of direct I/O on an open file: statx(2), 4096 where it does not tell, 0 where there is none."""
        try:
            statx = ctypes.CDLL(None, use_errno=True).statx
        except (OSError, AttributeError):
            return 4096
        buffer = ctypes.create_string_buffer(_STATX_BYTES)
        if statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, buffer) != 0:
            return 4096
        fields = memoryview(buffer).cast("B").cast("I")
        if not fields[0] & _STATX_DIOALIGN:
            return 4096
        memory, offset = fields[_STX_DIO_MEM_ALIGN // 4], fields[_STX_DIO_OFFSET_ALIGN // 4]
        if not memory or not offset:
            return 0
        return max(memory, offset)

    def cached(self, fd: int, size: int) -> bool:
        """Whether the first bytes of a file are in the page cache (mincore(2)); False where that cannot be told."""
        try:
            mincore = ctypes.CDLL(None, use_errno=True).mincore
            with mmap.mmap(fd, size) as mapping:
                pages = (size + mmap.PAGESIZE - 1) // mmap.PAGESIZE
                answer = (ctypes.c_ubyte * pages)()
                head = ctypes.c_char.from_buffer(mapping)
                address = ctypes.c_void_p(ctypes.addressof(head))
                failed = mincore(address, ctypes.c_size_t(size), answer)
                del head
                return not failed and any(page & 1 for page in answer)
        except (OSError, AttributeError, ValueError):
            return False
