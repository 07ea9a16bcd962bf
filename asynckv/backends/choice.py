"""Which engine works in a directory: found out by doing it, once, when a backend starts.

Neither the version of the kernel nor a call of io_uring_setup(2) tells enough. Containers refuse the ring by seccomp,
systems by sysctl, and some file systems fail only at the first transfer. So the ring that would be used writes, reads
and syncs a page in the directory it would be used in.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import mmap
import os
from typing import TYPE_CHECKING, Any

from asynckv.backends.base import Wrapper
from asynckv.backends.portable import ThreadsBackend
from asynckv.backends.system import kernel_release, kernel_version, ring_refusal
from asynckv.errors import DiskError

if TYPE_CHECKING:
    from asynckv.backends.base import Backend

__all__ = ["KERNEL_MIN", "ChosenBackend", "NoRingError", "old_kernel", "start_ring"]

_log = logging.getLogger("asynckv.backends")

# Older kernels have rings too, with defects that took the field years to find; see libuv#4093, libuv#4638, deno#16265.
KERNEL_MIN = (6, 1)
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


class NoRingError(OSError):
    """A ring does not work here; the text says exactly why."""


def old_kernel() -> str:
    """Why the kernel is too old for the ring to be chosen unasked; empty when it is not."""
    if kernel_version() >= KERNEL_MIN:
        return ""
    return f"kernel {kernel_release()} is older than {'.'.join(map(str, KERNEL_MIN))}"


async def start_ring(directory: str | os.PathLike[str] | int, **options: Any) -> Backend:
    """Start the ``io_uring`` engine in a directory and prove it by a real write, read and sync.

    Parameters
    ----------
    directory
        As for `Backend.start`.
    **options
        ``direct``, ``timeout`` and ``clock`` of the engine.

    Returns
    -------
    Backend
        Started. A ring that was refused in the proof has said so and goes on by threads, as its ``name`` tells.

    Raises
    ------
    NoRingError
        It is not built, not allowed, or does not work. Its ``errno`` is that of the cause.
    """
    try:
        from asynckv.backends.uring import UringBackend
    except ImportError as error:
        raise NoRingError(errno.ENOSYS, ring_refusal(error)) from error
    backend: Backend = UringBackend(**options)
    try:
        await backend.start(directory)
        await _prove(backend)
    except BaseException as error:
        await asyncio.shield(backend.close())
        if isinstance(error, OSError) and not isinstance(error, NoRingError):
            raise NoRingError(error.errno or errno.EIO, ring_refusal(error)) from error
        raise
    return backend


async def _prove(backend: Backend) -> None:
    size = max(backend.alignment, mmap.PAGESIZE)
    source = memoryview(mmap.mmap(-1, size))
    source[:] = os.urandom(size)
    target = memoryview(mmap.mmap(-1, size))
    try:
        file = await backend.temporary()
    except OSError as error:
        if error.errno in _FULL:  # not even one more file: the first use has to tell
            return
        raise
    try:
        await backend.write(file, 0, [source])
        await backend.read(file, 0, target)
        await backend.sync(file)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        # The disk's answer came through the ring, and says nothing against it.
    else:
        if source != target:
            raise NoRingError(errno.EIO, "a page read through the ring has other bytes than were written")
    await backend.close_file(file)


class ChosenBackend(Wrapper):
    """The ring, or what stands in for it: chosen by `start`, and from then on only passed through.

    Parameters
    ----------
    engine
        ``"auto"``: the ring where it works and the kernel is `KERNEL_MIN` or newer, else threads and one warning that
        names the reason. ``"io_uring"``: the ring, or `DiskError`.
    direct, timeout, clock
        As for `ThreadsBackend`.
    """

    def __init__(self, engine: str = "auto", **options: Any) -> None:
        self._fallback = ThreadsBackend(**options)  # checks the options, too
        super().__init__(self._fallback)
        self._engine = engine
        self._options = options
        self._started = False
        self._running = False

    @property
    def name(self) -> str:  # type: ignore[override]
        """The engine that is at work; before `start`, the one that was asked for."""
        return self.inner.name if self._running else self._engine

    @property
    def flies(self) -> bool:
        """Whether `fly` takes reads now; other wrappers have something to do for each."""
        return self.inner.flies

    async def start(self, directory: str | os.PathLike[str] | int) -> None:
        """Choose, and bind to the running loop and to a directory; see `Backend.start`.

        Raises
        ------
        DiskError
            The ring was demanded and does not work here; the text says why.
        """
        if self._started:
            raise RuntimeError("the backend was started before")
        self._started = True
        reason = old_kernel() if self._engine == "auto" else ""
        if not reason:
            try:
                self.inner = await start_ring(directory, **self._options)
                if self._engine != "auto" and self.inner.name != self._engine:
                    await asyncio.shield(self.inner.close())
                    raise NoRingError(errno.EIO, "it was refused in its first use")
            except NoRingError as error:
                if self._engine != "auto":
                    raise DiskError(
                        f"engine='io_uring' does not work here: {error.strerror}", errno=error.errno, operation="open"
                    ) from error
                reason = error.strerror or str(error)
        if self.inner is self._fallback:
            await self._fallback.start(directory)
            _log.warning("io_uring is not used, threads are: %s", reason)
        self._running = True
        # From now on nothing lies between the caller and the engine.
        inner = self.inner
        calls = ("read", "read_for", "fly", "write", "sync", "call")
        vars(self).update({name: getattr(inner, name) for name in calls})
