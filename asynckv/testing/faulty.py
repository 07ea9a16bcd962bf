"""Faults by script: below an engine (`FaultyFiles`) and above it (`FaultyBackend`).

Both ask one `Script` before each call. Above the engine a fault is what a tier sees; below, it is what the engine must
cope with: a short transfer is resumed there, ``EINTR`` is retried, ``EINVAL`` turns direct I/O off.
"""

from __future__ import annotations

import asyncio
import errno as errno_module
import math
import os
import threading
import time
from typing import TYPE_CHECKING, Any

from asynckv.backends.base import Backend, File, ShortTransferError, Wrapper
from asynckv.backends.files import Files
from asynckv.clock import Clock, MonotonicClock, TimerHandle
from asynckv.errors import ClosedError
from asynckv.testing.script import Fault, Script
from asynckv.testing.tools import os_error

if TYPE_CHECKING:
    from collections.abc import Callable

    from asynckv.backends.base import Prepare

__all__ = ["FaultyBackend", "FaultyFiles"]


class FaultyFiles(Files):
    """The raw calls of an engine, with faults.

    Operations are the names of the calls: preadv, pwritev, fdatasync, fsync, open, close, truncate, allocate, settle,
    links, rename, unlink, sync_directory, list, stat, free_bytes, read_file, write_file, temporary, probe_direct.
    A slow or hanging call blocks its worker, as a real one would.

    Parameters
    ----------
    script
        The faults.
    inner
        The calls that work; those of the system when left out.
    """

    def __init__(self, script: Script | None = None, inner: Files | None = None) -> None:
        super().__init__()
        self.script = Script() if script is None else script
        self.inner = Files() if inner is None else inner
        self.hanging = 0
        self._free = threading.Event()

    def release_all(self) -> None:
        """Let everything that hangs go on."""
        free, self._free = self._free, threading.Event()
        free.set()

    def attach(self, directory: str | os.PathLike[str] | int) -> None:
        """Open the directory."""
        self.inner.attach(directory)
        self.directory_fd = self.inner.directory_fd

    def detach(self) -> None:
        """Close the directory."""
        self.directory_fd = -1
        self.inner.detach()

    def _meet(self, operation: str) -> Fault | None:
        fault = self.script.next(operation)
        if fault is None:
            return None
        if fault.action == "error":
            raise os_error(fault.errno)
        if fault.action == "slow":
            time.sleep(fault.seconds)
            return None
        if fault.action == "hang":
            self.hanging += 1
            self._free.wait()
            self.hanging -= 1
            return None
        return fault

    def preadv(self, fd: int, buffers: Any, offset: int) -> int:  # type: ignore[override]
        """Read, or not."""
        fault = self._meet("preadv")
        count = self.inner.preadv(fd, buffers, offset)
        if fault is None:
            return count
        if fault.action == "short":  # the kernel's count is small; the bytes beyond it are undefined
            return fault.part(count)
        view = memoryview(buffers[0])
        if count:
            at, mask = self.script.bit(min(count, len(view)))
            view[at] ^= mask
        return count

    def pwritev(self, fd: int, buffers: Any, offset: int) -> int:  # type: ignore[override]
        """Write, or not."""
        fault = self._meet("pwritev")
        if fault is None:
            return self.inner.pwritev(fd, buffers, offset)
        if fault.action == "short":
            return fault.part(self.inner.pwritev(fd, buffers, offset))
        data = [bytearray(piece) for piece in buffers]
        at, mask = self.script.bit(len(data[0]))
        data[0][at] ^= mask
        return self.inner.pwritev(fd, data, offset)

    def close(self, fd: int) -> None:
        """Close; with an injected error the descriptor is gone all the same, as on Linux."""
        try:
            self._meet("close")
        finally:
            self.inner.close(fd)


def _with_fault(name: str) -> Any:
    def call(self: FaultyFiles, *args: Any) -> Any:
        self._meet(name)
        return getattr(self.inner, name)(*args)

    return _named(call, name)


def _of_parts(name: str) -> Any:
    """Each call that it is made of may meet a fault of its own."""

    def call(self: FaultyFiles, *args: Any) -> Any:
        self._meet(name)
        return getattr(type(self.inner), name)(self, *args)

    return _named(call, name)


def _without(name: str) -> Any:
    def call(self: FaultyFiles, *args: Any) -> Any:
        return getattr(self.inner, name)(*args)

    return _named(call, name)


def _named(call: Any, name: str) -> Any:
    call.__name__ = name
    call.__doc__ = getattr(Files, name).__doc__
    return call


for _kind, _names in (
    (_with_fault, "fdatasync fsync open truncate allocate settle links rename unlink list stat free_bytes"),
    (_of_parts, "sync_directory read_file write_file temporary probe_direct"),
    (_without, "set_direct size sleep alignment cached"),
):
    for _name in _names.split():
        setattr(FaultyFiles, _name, _kind(_name))


class _Held:
    """An operation that has been submitted here and not yet to the inner backend."""

    __slots__ = ("future", "kind", "late", "submit", "timer")

    def __init__(self, kind: str, future: asyncio.Future[Any], submit: Callable[[], asyncio.Future[Any]]) -> None:
        self.kind = kind
        self.future = future
        self.submit = submit
        self.timer: TimerHandle | None = None  # of a slow start
        self.late: TimerHandle | None = None  # the deadline


class FaultyBackend(Wrapper):
    """A backend with faults between it and its tier; keeps every promise about ownership and deadlines.

    Operations are ``"read"``, ``"write"``, ``"sync"`` and the names of the cold calls.

    Parameters
    ----------
    inner
        The backend that does the work.
    script
        The faults.
    clock
        Where slow starts and deadlines of held operations are measured; give it the inner backend's.
    """

    def __init__(self, inner: Backend, script: Script | None = None, *, clock: Clock | None = None) -> None:
        super().__init__(inner)
        self.script = Script() if script is None else script
        self._clock: Clock = MonotonicClock() if clock is None else clock
        self._held: set[_Held] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing = False
        self._closer: asyncio.Task[int] | None = None
        self._none_held: asyncio.Future[None] | None = None

    @property
    def held(self) -> int:
        """Operations that hang or have not started yet."""
        return len(self._held)

    @property
    def reads_in_flight(self) -> int:
        """Reads submitted and not yet released."""
        return self.inner.reads_in_flight + sum(held.kind == "read" for held in self._held)

    @property
    def writes_in_flight(self) -> int:
        """Writes submitted and not yet released."""
        return self.inner.writes_in_flight + sum(held.kind == "write" for held in self._held)

    async def start(self, directory: str | os.PathLike[str] | int) -> None:
        """Start the inner backend."""
        self._loop = asyncio.get_running_loop()
        await self.inner.start(directory)

    def release_all(self) -> None:
        """Submit everything that hangs, and everything that waits for a slow start, now."""
        for held in list(self._held):
            self._let_go(held)

    # operations

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
        """Fill a whole buffer, or not; see `Backend.read`."""
        fault = self._next("read")
        if fault is not None and fault.action == "corrupt" and len(buffer):
            check, (at, mask) = verify, self.script.bit(len(buffer))

            def verify(view: memoryview) -> bool:
                view[at] ^= mask
                return True if check is None else check(view)

        def submit(timeout: float | None = math.inf) -> asyncio.Future[bool]:
            return self.inner.read(file, offset, buffer, verify=verify, timeout=timeout, released=released)

        if fault is None or fault.action == "corrupt":
            return self._closed("read", released) if self._closing else submit(timeout)
        if fault.action == "error":
            half = len(buffer) // 2  # a failed read leaves the buffer undefined
            buffer[:half] = b"\xa5" * half
            return self._failed(os_error(fault.errno), released)
        if fault.action == "short":
            part = fault.part(len(buffer))

            def cut(view: memoryview) -> bool:
                raise ShortTransferError(part, len(buffer))

            return self.inner.read(file, offset, buffer[:part], verify=cut, timeout=timeout, released=released)
        return self._hold("read", fault, submit, timeout)

    def write(
        self,
        file: File,
        offset: int,
        prepare: Prepare,
        *,
        timeout: float | None = None,
        released: Callable[[], object] | None = None,
    ) -> asyncio.Future[Any]:
        """Write pieces, or not; see `Backend.write`."""
        fault = self._next("write")

        def submit(timeout: float | None = math.inf) -> asyncio.Future[Any]:
            return self.inner.write(file, offset, prepare, timeout=timeout, released=released)

        if fault is None:
            return self._closed("write", released) if self._closing else submit(timeout)
        if fault.action == "error":
            return self._failed(os_error(fault.errno), released)
        if fault.action in ("slow", "hang"):
            return self._hold("write", fault, submit, timeout)

        def spoiled() -> tuple[list[Any], Any]:
            pieces, result = prepare() if callable(prepare) else (prepare, None)
            data = bytearray().join(bytes(piece) for piece in pieces)
            if fault.action == "corrupt":
                if data:
                    at, mask = self.script.bit(len(data))
                    data[at] ^= mask
                return [data], result
            return [data[: fault.part(len(data)) & -self.alignment]], result

        if fault.action == "corrupt":
            return self.inner.write(file, offset, spoiled, timeout=timeout, released=released)
        return self._then_fail(self.inner.write(file, offset, spoiled, timeout=timeout, released=released))

    def sync(self, file: File, *, timeout: float | None = None) -> asyncio.Future[None]:
        """Sync a file, or not; see `Backend.sync`."""
        fault = self._next("sync")

        def submit(timeout: float | None = math.inf) -> asyncio.Future[None]:
            return self.inner.sync(file, timeout=timeout)

        if fault is None:
            return self._closed("sync", None) if self._closing else submit(timeout)
        if fault.action == "error":
            return self._failed(os_error(fault.errno), None)
        return self._hold("sync", fault, submit, timeout)

    def call(self, function: str, *args: Any, timeout: float | None = None) -> asyncio.Future[Any]:
        """Run a cold call, or not; see `Backend.call`."""
        fault = self._next(function)

        def submit(timeout: float | None = math.inf) -> asyncio.Future[Any]:
            return self.inner.call(function, *args, timeout=timeout)

        if fault is None:
            return self._closed(function, None) if self._closing else submit(timeout)
        if fault.action == "error":
            if function == "close":  # Linux lets the descriptor go even when close(2) fails
                return self._changed(submit(timeout), _raise(os_error(fault.errno)))
            return self._failed(os_error(fault.errno), None)
        if fault.action == "short":
            return self._changed(submit(timeout), lambda data: data[: fault.part(len(data))])
        if fault.action == "corrupt":
            return self._changed(submit(timeout), self._flipped)
        return self._hold("call", fault, submit, timeout)

    # how they go wrong

    def _next(self, operation: str) -> Fault | None:
        return None if self._closing else self.script.next(operation)

    def _flipped(self, data: bytes) -> bytes:
        if not data:
            return data
        changed = bytearray(data)
        at, mask = self.script.bit(len(changed))
        changed[at] ^= mask
        return bytes(changed)

    def _future(self) -> asyncio.Future[Any]:
        assert self._loop is not None, "not started"
        return self._loop.create_future()

    def _failed(self, reason: BaseException, released: Callable[[], object] | None) -> asyncio.Future[Any]:
        future = self._future()

        def finish() -> None:
            if released is not None:
                released()
            if not future.done():
                future.set_exception(reason)

        assert self._loop is not None
        self._loop.call_soon(finish)
        return future

    def _closed(self, operation: str, released: Callable[[], object] | None) -> asyncio.Future[Any]:
        return self._failed(ClosedError("the backend was closed", tier="disk", operation=operation), released)

    def _then_fail(self, inner: asyncio.Future[Any]) -> asyncio.Future[Any]:
        return self._changed(inner, _raise(OSError(errno_module.EIO, "the write stopped in the middle")))

    def _changed(self, inner: asyncio.Future[Any], change: Callable[[Any], Any]) -> asyncio.Future[Any]:
        outer = self._future()

        def done(inner: asyncio.Future[Any]) -> None:
            _copy(inner, outer, change)

        inner.add_done_callback(done)
        return outer

    def _hold(
        self, kind: str, fault: Fault, submit: Callable[[], asyncio.Future[Any]], timeout: float | None
    ) -> asyncio.Future[Any]:
        held = _Held(kind, self._future(), submit)
        self._held.add(held)
        assert self._loop is not None
        seconds = self.timeout if timeout is None else timeout
        if seconds < math.inf:
            held.late = self._clock.call_later(self._loop, seconds, lambda: _expire(held.future))
        if fault.action == "slow":
            held.timer = self._clock.call_later(self._loop, fault.seconds, lambda: self._let_go(held))
        return held.future

    def _let_go(self, held: _Held) -> None:
        if held not in self._held:
            return
        self._held.discard(held)
        if held.timer is not None:
            held.timer.cancel()

        def done(inner: asyncio.Future[Any]) -> None:
            if held.late is not None:
                held.late.cancel()
            _copy(inner, held.future, None)

        held.submit().add_done_callback(done)
        if not self._held and self._none_held is not None and not self._none_held.done():
            self._none_held.set_result(None)

    async def close(self) -> int:
        """Close the inner backend once nothing is held any more, or after the deadline; see `Backend.close`."""
        if self._loop is None:
            return await self.inner.close()
        if self._closer is None:
            self._closing = True
            self._closer = self._loop.create_task(self._close())
        return await asyncio.shield(self._closer)

    async def _close(self) -> int:
        if self._held:
            waiting = self._none_held = self._future()
            assert self._loop is not None
            timer = self._clock.call_later(self._loop, self.timeout, lambda: _resolve(waiting))
            await waiting
            timer.cancel()
            for held in self._held:
                _expire(held.future)
                for handle in (held.timer, held.late):
                    if handle is not None:
                        handle.cancel()
        return len(self._held) + await self.inner.close()


def _raise(reason: BaseException) -> Callable[[Any], Any]:
    def change(_: Any) -> Any:
        raise reason

    return change


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _expire(future: asyncio.Future[Any]) -> None:
    if not future.done():
        future.set_exception(TimeoutError(errno_module.ETIMEDOUT, "operation passed its deadline"))


def _copy(inner: asyncio.Future[Any], outer: asyncio.Future[Any], change: Callable[[Any], Any] | None) -> None:
    """Pass an outcome on, unless nobody waits."""
    reason = None if inner.cancelled() else inner.exception()
    if outer.done():
        return
    if inner.cancelled():
        outer.cancel()
    elif reason is not None:
        outer.set_exception(reason)
    else:
        try:
            outer.set_result(inner.result() if change is None else change(inner.result()))
        except Exception as error:
            outer.set_exception(error)
