"""The ``threads`` engine: blocking calls in a bounded set of daemon threads of its own.

Four lanes, each a queue and its threads, so that no kind of work waits behind another: reads (4), writes (2), syncs (1)
and the cold file calls (1). Queues are bounded by the callers, who own the buffers.

An operation's life, and who may change it:

* submitted on the loop, put on its lane's queue; counted in flight from here on;
* claimed, by whoever pops the one token of ``op.claim``: a worker to run it, or the loop to give it up unstarted when
  its deadline has passed or the engine closes. Popping a list is atomic, so there is exactly one claimant;
* run in a worker, then handed over on `_done`; one ``call_soon_threadsafe`` wakes the loop for a whole burst, and at
  most `_DRAIN` completions are delivered in one turn of the loop;
* finished on the loop by `_finish`: out of the counts, ``released()``, then the future.

A worker holds no reference to the engine while idle, so an engine that was never closed is collected, warns, and its
threads end.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import os
import threading
import time
import warnings
from collections import deque
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from asynckv.backends.base import Backend, File
from asynckv.backends.files import NOT_DIRECT, O_DIRECT, Files
from asynckv.backends.operations import Call, Close, Op, Open, Read, Stop, Sync, Write, work
from asynckv.backends.transfer import Transfers
from asynckv.clock import Clock, MonotonicClock, Stalls, TimerHandle
from asynckv.errors import ClosedError, DiskError

if TYPE_CHECKING:
    from collections.abc import Callable

    from asynckv.backends.base import Prepare

__all__ = ["ThreadsBackend"]

_log = logging.getLogger("asynckv.backends")

BREATH_SECONDS = 0.002
BREATH_LENGTH_SECONDS = 50e-6
_DRAIN = 64  # completions delivered in one turn of the loop: well below a millisecond of work
_JOIN_S = 1.0  # for a thread that has already said that it ends


class ThreadsBackend(Backend):
    """I/O by threads: works everywhere, and keeps every promise of `asynckv.backends.base`.

    Parameters
    ----------
    direct
        ``"auto"``, True or ``"on"``, False or ``"off"``.
    timeout
        Seconds from submission to the deadline of an operation, and the time `close` waits.
    clock
        Where deadlines are measured.
    files
        The raw calls; tests pass their own.
    readers, writers
        Threads of the two I/O lanes.
    """

    name = "threads"

    def __init__(
        self,
        *,
        direct: bool | str = "auto",
        timeout: float = 5.0,
        clock: Clock | None = None,
        files: Files | None = None,
        readers: int = 4,
        writers: int = 2,
    ) -> None:
        self._threads: list[threading.Thread] = []
        self._pid = os.getpid()
        self._closed = True  # nothing to warn about before start
        choices = {"auto": None, "on": True, "off": False, True: True, False: False}
        if direct not in choices:
            raise ValueError(f"direct must be 'auto', 'on', 'off', True or False, not {direct!r}")
        if not timeout > 0:
            raise ValueError(f"timeout must be positive, not {timeout!r}")
        if readers < 1 or writers < 1:
            raise ValueError("readers and writers must be at least 1")
        self._wanted = choices[direct]
        self.timeout = timeout
        self._clock: Clock = MonotonicClock() if clock is None else clock
        self.files = Files() if files is None else files
        self.transfers = Transfers(self.files)
        self._lanes: dict[str, SimpleQueue[Any]] = {
            lane: SimpleQueue() for lane in ("read", "write", "sync", "control")
        }
        self._counts = {"read": readers, "write": writers, "sync": 1, "control": 1}
        self._reads, self._writes = self._lanes["read"], self._lanes["write"]
        self._started = False
        self.loop: asyncio.AbstractEventLoop
        self._in_flight: set[Any] = set()  # operations, and flights of an engine that has them
        self._kinds = {"read": 0, "write": 0, "sync": 0, "call": 0}
        self._done: deque[Op] = deque()
        self._arrivals = 0  # since the last breath
        self._breath: asyncio.TimerHandle | None = None
        self._woken = False
        self._timer: TimerHandle | None = None
        self._timer_at = math.inf
        self._open_files: WeakSet[File] = WeakSet()
        self._closing = False
        self._closer: asyncio.Task[int] | None = None
        self._quiet: asyncio.Future[None] | None = None  # resolved when so few operations are in flight
        self._quiet_level = 0
        self._ended = 0
        self._all_ended: asyncio.Future[None] | None = None
        self._ends_wanted = 0

    @property
    def direct(self) -> bool:  # type: ignore[override]
        """Whether files bypass the page cache, as measured at start; False after a fallback."""
        return self.transfers.direct

    @property
    def alignment(self) -> int:  # type: ignore[override]
        """Bytes; direct offsets, lengths and addresses are multiples of it."""
        return self.transfers.alignment

    @property
    def reads_in_flight(self) -> int:
        """Reads submitted and not yet released."""
        return self._kinds["read"]

    @property
    def writes_in_flight(self) -> int:
        """Writes submitted and not yet released."""
        return self._kinds["write"]

    async def start(self, directory: str | os.PathLike[str] | int) -> None:
        """Bind to the running loop and to a directory; see `Backend.start`."""
        if self._started:
            raise RuntimeError("the backend was started before")
        self._started = True
        self.loop = asyncio.get_running_loop()
        self._stalls = Stalls(self.loop)
        self._closed = False
        self._pid = os.getpid()  # a forked child owns nothing
        try:
            for lane, count in self._counts.items():
                for number in range(count):
                    self._start_thread(lane, number)
            works, alignment, reason = await self._cold(Call, self._begin, (directory,), None, None)
        except BaseException:
            await self.close()
            raise
        self.transfers.direct = works
        self.transfers.alignment = alignment
        if self._wanted and not works:
            await self.close()
            raise DiskError(f"direct I/O is not possible: {reason}", errno=errno.EINVAL, operation="start")

    def _start_thread(self, lane: str, number: int) -> None:
        thread = threading.Thread(target=work, args=(self._lanes[lane],), name=f"asynckv-{lane}-{number}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            text = "no thread can be started for the disk: raise ulimit -u, or the limit of tasks of the cgroup"
            raise OSError(errno.EAGAIN, text) from error
        self._threads.append(thread)

    def _begin(self, directory: str | os.PathLike[str] | int) -> tuple[bool, int, str]:
        self.files.attach(directory)
        if self._wanted is False:
            return False, 4096, "off"
        return self.files.probe_direct()

    # submission

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
        op = Read(self, self._reads, file, released)
        op.offset = offset
        op.buffer = buffer
        op.verify = verify
        return self._submit(op, timeout)

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
        op = Write(self, self._writes, file, released)
        op.offset = offset
        op.prepare = prepare
        return self._submit(op, timeout)

    def sync(self, file: File, *, timeout: float | None = None) -> asyncio.Future[None]:
        """Make a file's completed writes durable; see `Backend.sync`."""
        return self._submit(Sync(self, self._lanes["sync"], file, None), timeout)

    def call(self, function: str, *args: Any, timeout: float | None = None) -> asyncio.Future[Any]:
        """Run a cold file function by name; see `Backend.call`."""
        files = self.files
        match function:
            case "open":
                return self._cold(Open, self._open, args, None, timeout)
            case "temporary":
                return self._cold(Open, self._temporary, args, None, timeout)
            case "close":
                return self._cold(Close, self._close_file, args, args[0], timeout)
            case "allocate" | "truncate" | "settle" | "links":
                return self._cold(Call, getattr(self, "_" + function), args, args[0], timeout)
            case "statvfs":
                return self._cold(Call, files.free_bytes, args, None, timeout)
            case "rename" | "unlink" | "sync_directory" | "list" | "stat" | "read_file" | "write_file":
                return self._cold(Call, getattr(files, function), args, None, timeout)
        raise ValueError(f"no such file function: {function!r}")

    def _cold(
        self, kind: type[Call], function: Any, args: tuple[Any, ...], file: File | None, timeout: float | None
    ) -> asyncio.Future[Any]:
        op = kind(self, self._lanes["control"], file, None)
        op.function = function
        op.args = args
        return self._submit(op, timeout)

    def _submit(self, op: Op, timeout: float | None) -> asyncio.Future[Any]:
        self._kinds[op.kind] += 1
        file = op.file
        if self._closing:
            return self._reject(op, ClosedError("the backend was closed", tier="disk", operation=op.kind))
        if file is not None:
            if file.closing is not None or file.fd < 0:
                return self._reject(op, OSError(errno.EBADF, "the file is closed"))
            file.busy += 1
        self._in_flight.add(op)
        op.deadline = deadline = self._clock.monotonic() + (self.timeout if timeout is None else timeout)
        if deadline < self._timer_at:
            self._arm(deadline)
        if op.must_run and file is not None:
            file.closing = op
            if file.busy > 1:  # the close itself counts; the last operation on the file sends it off
                return op.future
        self._dispatch(op)
        return op.future

    def _breathe(self) -> None:
        """Let workers run beside a loop that never blocks.

        Such a loop gives the interpreter lock up for microseconds only, and each time a waiting worker starts its 5 ms
        of patience anew (CPython, Python/ceval_gil.c): a healthy disk would miss its deadlines.
        """
        self._breath = None
        if self.with_workers:
            if not self._arrivals:
                time.sleep(BREATH_LENGTH_SECONDS)
            self._arrivals = 0
            self._breath = self.loop.call_later(BREATH_SECONDS, self._breathe)

    @property
    def with_workers(self) -> bool:
        """Whether a worker has something to do."""
        return bool(self._in_flight)

    def _let_breathe(self) -> None:
        """From here on a worker has something to do."""
        if self._breath is None:
            self._breath = self.loop.call_later(BREATH_SECONDS, self._breathe)

    def _dispatch(self, op: Op) -> None:
        """Send an operation to the workers of its lane."""
        self._let_breathe()
        op.lane.put(op)

    def _reject(self, op: Op, error: BaseException) -> asyncio.Future[Any]:
        op.file = None  # was not counted busy
        op.error = error
        self.loop.call_soon(self._finish, op)
        return op.future

    # what workers run on the control lane

    def _open(self, name: str, create: bool = False, size: int = 0, direct: bool = True) -> File:
        flags = os.O_RDWR | (os.O_CREAT if create else 0)
        opener = partial(self.files.open, name)
        return self._open_by(opener, name, flags, size if create else 0, direct)

    def _temporary(self, size: int) -> File:
        return self._open_by(self.files.temporary, "", 0, size, True)

    def _open_by(self, opener: Callable[[int], int], name: str, flags: int, size: int, direct: bool) -> File:
        direct = direct and self.transfers.direct
        files = self.files
        try:
            fd = opener(flags | (O_DIRECT if direct else 0))
        except OSError as error:
            if not direct or error.errno not in NOT_DIRECT:
                raise
            fd = opener(flags)
            direct = False
            self.transfers.refuse(error)
        try:
            if size:
                files.allocate(fd, size)
            return File(name, fd, direct=direct, size=files.size(fd))
        except BaseException:
            files.close(fd)
            raise

    def _close_file(self, file: File) -> None:
        fd, file.fd = file.fd, -1
        if fd >= 0:
            self.files.close(fd)

    def _allocate(self, file: File, size: int) -> None:
        self.files.allocate(file.fd, size)
        file.size = max(file.size, size)

    def _settle(self, file: File) -> None:
        self.files.settle(file.fd)

    def _links(self, file: File) -> int:
        return self.files.links(file.fd)

    def _truncate(self, file: File, size: int) -> None:
        self.files.truncate(file.fd, size)
        file.size = size

    # completion: first two methods in workers, the rest on the loop

    def hand_over(self, op: Op) -> None:
        """Pass a completed operation to the loop. Called by workers."""
        # Order matters: append, then look at the flag; `_drain` clears the flag, then pops.
        self._done.append(op)
        if not self._woken:
            self._woken = True
            try:
                self.loop.call_soon_threadsafe(self._drain)
            except RuntimeError:  # the loop is closed: nobody can receive it
                self._woken = False
                self._abandon()

    def thread_ended(self) -> None:
        """Note that a worker ends. Called by that worker."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self._thread_ended)

    def _abandon(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                op = self._done.popleft()
                if type(op) is Open and isinstance(op.result, File):
                    with contextlib.suppress(OSError):
                        self._close_file(op.result)
                op.forget()

    def _drain(self) -> None:
        self._woken = False
        self._arrivals += 1
        popleft = self._done.popleft
        for _ in range(_DRAIN):
            try:
                op = popleft()
            except IndexError:
                return
            self._arrived(op)
        if self._done and not self._woken:
            self._woken = True
            self.loop.call_soon(self._drain)

    def _arrived(self, op: Op) -> None:
        """Go on with an operation that a worker has done its part of."""
        self._finish(op)

    def _finish(self, op: Op) -> None:
        """Take an operation out of flight: counts, ``released``, then its future."""
        self._in_flight.discard(op)
        self._kinds[op.kind] -= 1
        file = op.file
        if file is not None:
            file.busy -= 1
            if file.closing is not None:
                self._closing_file(file, op)
        if op.released is not None:
            try:
                op.released()
            except Exception as reason:
                self.loop.call_exception_handler(
                    {"message": "released() of an I/O operation failed", "exception": reason}
                )
        future, error = op.future, op.error
        if future.done():
            op.discard()
        elif error is None:
            if type(op) is Open:
                self._open_files.add(op.result)
            future.set_result(op.result)
        elif isinstance(error, StopIteration):  # a future takes any exception but this one
            _fail(future, RuntimeError("StopIteration in an I/O callback"))
        else:
            _fail(future, error)
        op.forget()
        self._one_less()

    def _one_less(self) -> None:
        if self._closed and not self._in_flight:  # the last stuck operation has ended after all
            self.files.detach()
        quiet = self._quiet
        if quiet is not None and len(self._in_flight) <= self._quiet_level:
            _resolve(quiet)

    def _closing_file(self, file: File, op: Op) -> None:
        if op is file.closing:
            self._open_files.discard(file)
        elif file.busy == 1 and file.closing.claim:  # only the waiting close is left
            if self._closed:  # late end of a stuck operation; the workers are gone
                file.closing.claim.clear()
                with contextlib.suppress(OSError):
                    self._close_file(file)
                self._finish(file.closing)
            else:
                self._dispatch(file.closing)

    def drop_file(self, file: File) -> None:
        """Close a file whose opener has gone away."""
        if self._closed:
            with contextlib.suppress(OSError):
                self._close_file(file)
            return
        op = Close(self, self._lanes["control"], file, None)
        op.function, op.args = self._close_file, (file,)
        file.closing = op
        file.busy += 1
        self._in_flight.add(op)
        self._kinds[op.kind] += 1
        op.future.add_done_callback(_ignore)
        self._dispatch(op)

    # deadlines: one timer, for the earliest deadline known when it was set; it looks at everything in flight

    def _arm(self, deadline: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = deadline
        delay = deadline - self._clock.monotonic()
        self._stalls.armed(delay)
        self._timer = self._clock.call_later(self.loop, delay, self._expire)

    def _expire(self) -> None:
        self._timer = None
        self._timer_at = math.inf
        now = self._clock.monotonic()
        grace = self._stalls.grace()
        if grace:
            self._arm(now + grace)
            return
        earliest = math.inf
        for op in list(self._in_flight):
            if op.deadline <= now:
                self._give_up(op, TimeoutError(errno.ETIMEDOUT, f"{op.kind} passed its deadline"))
            elif op.deadline < earliest:
                earliest = op.deadline
        if earliest < self._timer_at:
            self._arm(earliest)

    def _give_up(self, op: Op, error: BaseException) -> None:
        """End the wait for an operation; and the operation itself when no worker has it yet."""
        op.deadline = math.inf
        if not op.must_run:
            with contextlib.suppress(IndexError):
                op.claim.pop()
                op.error = error
                self._finish(op)
                return
        if not op.future.done():
            _fail(op.future, error)

    # the end

    async def close(self) -> int:
        """Stop intake, drain with a deadline, end the threads; see `Backend.close`."""
        if not self._started:
            return 0
        if self._closer is None:
            self._closing = True
            self._closer = self.loop.create_task(self._close())
        return await asyncio.shield(self._closer)

    async def _close(self) -> int:
        if self._in_flight:
            await self._until_quiet()
        while self._done:  # completions that came with the deadline
            self._drain()
        for op in list(self._in_flight):  # what no worker has taken will never run
            self._give_up(op, TimeoutError(errno.ETIMEDOUT, f"{op.kind} unfinished at close"))
        stuck: int = sum(op.requests for op in self._in_flight if not op.claim)
        control_stuck = any(op.kind == "call" and not op.claim for op in self._in_flight)
        idle = [file for file in self._open_files if not file.busy]
        if idle and not control_stuck:
            for file in idle:
                self._open_files.discard(file)
                self.drop_file(file)
            await self._until_quiet(len(self._in_flight) - len(idle))
        self._closed = True
        await self._end_threads(stuck)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._breath is not None:
            self._breath.cancel()
        if not stuck:
            self.files.detach()
        else:
            _log.warning("%d disk operations are stuck: their memory is left to them", stuck)
        return stuck

    async def _until_quiet(self, besides: int = 0) -> None:
        if len(self._in_flight) <= besides:
            return
        self._quiet_level = besides
        quiet = self._quiet = self.loop.create_future()
        timer = self._clock.call_later(self.loop, self.timeout, lambda: _resolve(quiet))
        try:
            await quiet
        finally:
            timer.cancel()
            self._quiet = None

    async def _end_threads(self, stuck: int) -> None:
        """Send every worker home and join those that come; a stuck one ends when its call does."""
        self._ends_wanted = max(len(self._threads) - stuck, 0)
        self._all_ended = self.loop.create_future()
        for lane, count in self._counts.items():
            for _ in range(count):
                self._lanes[lane].put(Stop(self))
        if self._ends_wanted:
            await self._all_ended
        left = []
        for thread in self._threads:
            if stuck and thread.is_alive():
                thread.join(0.01)
            else:
                thread.join(_JOIN_S)
            if thread.is_alive():
                left.append(thread)
        self._threads = left

    def _thread_ended(self) -> None:
        self._ended += 1
        if self._all_ended is not None and self._ended >= self._ends_wanted and not self._all_ended.done():
            self._all_ended.set_result(None)

    def __del__(self) -> None:
        if self._closed or self._closing or self._pid != os.getpid():
            return
        for lane, count in self._counts.items():
            for _ in range(count):
                self._lanes[lane].put(None)
        self._abandon()
        self.files.detach()
        warnings.warn("an I/O backend was never closed", ResourceWarning, stacklevel=2)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    future.set_exception(error)
    future.exception()  # seen: a task that its ending loop destroyed must not cause a warning


def _ignore(future: asyncio.Future[Any]) -> None:
    """Mark an exception as seen."""
    if not future.cancelled():
        future.exception()
