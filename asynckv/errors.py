"""The exception tree.

Hit, miss and "no room" are results, not exceptions. What is raised derives from :class:`AsyncKVError`. A key is an
attribute of the exception and never part of its text: keys name what users asked their models, logs are read by many.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "AsyncKVError",
    "BlockTooLargeError",
    "ClosedError",
    "CorruptStoreError",
    "DiskError",
    "InternalError",
    "NoRoomError",
    "StoreLockedError",
    "UnsafeDirectoryError",
]


class AsyncKVError(Exception):
    """Base of every error that asynckv raises on its own account.

    Parameters
    ----------
    message
        What happened, without the key.
    tier
        The tier that was at work, ``"memory"`` or ``"disk"``, when known.
    operation
        The operation that failed, such as ``"read"`` or ``"flush"``, when known.
    key
        The user's key, when the error is about one block.
    offset
        Byte offset inside the file or buffer at fault, when known.
    """

    tier: str | None
    operation: str | None
    key: object
    offset: int | None

    def __init__(
        self,
        message: str = "",
        *,
        tier: str | None = None,
        operation: str | None = None,
        key: object = None,
        offset: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.tier = tier
        self.operation = operation
        self.key = key
        self.offset = offset

    def __str__(self) -> str:
        return self.message

    def about(self, path: str) -> None:
        """Name the store's directory in the text, unless it is there."""
        if path not in self.message:
            self.message = f"{self.message} (in {path!r})"
            self.args = (self.message,)


class ClosedError(AsyncKVError):
    """The cache was closed before the call."""


class BlockTooLargeError(AsyncKVError, ValueError):
    """The block could never fit in the pool, whatever were evicted."""


class NoRoomError(AsyncKVError):
    """No room in the pool within ``room_timeout``."""


class StoreLockedError(AsyncKVError):
    """Another live process, or another cache of this one, holds the directory.

    Parameters
    ----------
    message
        What happened.
    pid
        The process that holds the store, when it could be read.
    """

    pid: int | None

    def __init__(
        self,
        message: str = "",
        *,
        pid: int | None = None,
        tier: str | None = "disk",
        operation: str | None = "open",
        key: object = None,
        offset: int | None = None,
    ) -> None:
        super().__init__(message, tier=tier, operation=operation, key=key, offset=offset)
        self.pid = pid


class CorruptStoreError(AsyncKVError):
    """The store on disk is damaged and ``recover="strict"`` was asked for."""


class InternalError(AsyncKVError):
    """An invariant of asynckv itself broke: a bug of ours, never swallowed."""


class _SystemError(AsyncKVError):
    """What those have in common that are an `OSError` as well."""

    errno: int | None
    strerror: str | None

    def __reduce__(self) -> tuple[Any, ...]:  # an `OSError` leaves its number behind when it is copied
        return type(self), self.args, {**self.__dict__, "errno": self.errno, "strerror": self.strerror}

    def about(self, path: str) -> None:
        """Name the store's directory in the text, unless it is there."""
        super().about(path)
        self.strerror = self.message


class UnsafeDirectoryError(_SystemError, PermissionError):
    """The store directory is a symlink, another user's, or writable by group or world.

    Parameters
    ----------
    message
        What is wrong with it.
    errno
        The number of the system's error, when there was one.
    """

    def __init__(
        self,
        message: str = "",
        *,
        errno: int | None = None,
        tier: str | None = "disk",
        operation: str | None = "open",
        key: object = None,
        offset: int | None = None,
    ) -> None:
        AsyncKVError.__init__(self, message, tier=tier, operation=operation, key=key, offset=offset)
        self.errno = errno
        self.strerror = message


class DiskError(_SystemError, OSError):
    """The disk could not do what a caller was promised, such as a flush.

    Parameters
    ----------
    message
        What failed.
    errno
        The number of the system's error, kept as ``errno``; None when the disk was merely off or full by our rules.
    """

    def __init__(
        self,
        message: str = "",
        *,
        errno: int | None = None,
        tier: str | None = "disk",
        operation: str | None = None,
        key: object = None,
        offset: int | None = None,
    ) -> None:
        AsyncKVError.__init__(self, message, tier=tier, operation=operation, key=key, offset=offset)
        self.errno = errno
        self.strerror = message
