"""The ``io_uring`` engine: reads, writes and syncs through a ring of the kernel's, in the caller's own event loop.

No thread stands between the loop and the disk. What is submitted in one turn of the loop goes to the kernel by one
system call; completions that are there when it returns are taken at once, later ones announce themselves by an eventfd
that the loop watches. Cold file calls, large checksums and unknown preparations run in the worker threads of
`asynckv.backends.portable`, whose accounts (deadlines, ownership of buffers, files, close) this engine shares.

An operation's life, and who may change it:

* submitted, it waits in `_waiting`, its token in ``op.claim``: given up by whoever pops that token;
* taken by `_fill`, which pops the token and makes a request of it; from then on the kernel may use its buffers;
* completed, it is finished (`_moved`), or its steps want another request and it waits again, first in line;
* finished on the loop by `_finish`: out of the counts, ``released()``, then the future.

A ring that is refused after it was opened (a seccomp filter, for one), that loses something or that takes nothing any
more is given up for good: what the kernel has not taken, and everything later, goes to the worker threads, with one
warning. What it has taken still ends through the ring.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import os
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import ref

from asynckv._core import Load, aim, land, strayed, verify
from asynckv._uring import Ring
from asynckv.backends.operations import Close
from asynckv.backends.portable import ThreadsBackend
from asynckv.backends.ringops import (
    SMALL_BYTES,
    BouncePool,
    NoBounceError,
    RingFlight,
    RingOp,
    RingRead,
    RingSync,
    RingWrite,
    Told,
    os_error,
)
from asynckv.backends.transfer import PAUSE_S, TRIES, Scratch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from asynckv.backends.base import File, Pilot, Prepare, Sink
    from asynckv.backends.files import Files
    from asynckv.backends.operations import Op
    from asynckv.clock import Clock, TimerHandle

__all__ = ["UringBackend"]

_log = logging.getLogger("asynckv.backends")

ENTRIES = 128  # of the submission queue; in flight at most twice as many
# A closed ring gives its share of RLIMIT_MEMLOCK back a moment later, and without privileges there is room for few.
MEMORY_WAITS = (0.01, 0.02, 0.05, 0.1)
TURN_BYTES = 512 << 10  # submitted in one turn of the loop: about 1 ms of copying
REAP = 32
INLINE_BYTES = 256 << 10  # verified and prepared on the loop in one turn; a hash of so many takes some 30 us
BOUNCE_LIMIT = 8 << 20
WATCH_S = 0.05  # in case that a wake-up got lost
CANCEL_S = 1.0  # for the kernel to give back what was cancelled, at close
_BUSY = frozenset({errno.EINTR, errno.EAGAIN, errno.EBUSY})
# Of a read that may do better alone: by another way, or a moment later.
_REFUSED = frozenset({errno.EINTR, errno.EAGAIN, errno.EINVAL, errno.EOPNOTSUPP, errno.ECANCELED})
_SCRATCH = Scratch()  # for what runs on the loop and needs none


class UringBackend(ThreadsBackend):
    """I/O by io_uring. Keeps every promise of `asynckv.backends.base`.

    Parameters
    ----------
    direct, timeout, clock, files
        As for `ThreadsBackend`.
    readers, writers
        Most threads for large checksums and preparations, and for all reads and writes once the ring was given up. They
        are started when they are needed.
    ring_factory
        Makes the ring; called with the number of entries. Tests pass their own.
    entries
        Requests per system call, and half of those in flight.
    inline_bytes
        Bytes to be verified and prepared on the loop in one turn; larger ones go to a worker at once.
    registered_files
        Register open files with the ring.
    """

    name = "io_uring"

    def __init__(
        self,
        *,
        direct: bool | str = "auto",
        timeout: float = 5.0,
        clock: Clock | None = None,
        files: Files | None = None,
        readers: int = 4,
        writers: int = 2,
        ring_factory: Callable[[int], Any] | None = None,
        entries: int = ENTRIES,
        inline_bytes: int = INLINE_BYTES,
        registered_files: bool = False,
    ) -> None:
        self._ring: Any = None
        super().__init__(direct=direct, timeout=timeout, clock=clock, files=files, readers=readers, writers=writers)
        self._limits = self._counts
        self._counts = dict.fromkeys(self._limits, 0) | {"control": 1}
        self._factory = Ring if ring_factory is None else ring_factory
        self._entries = entries
        self._registers = registered_files
        self.ring_works = False
        self._lent: set[Op] = set()  # to workers
        self._waiting: deque[Any] = deque()  # operations and flights
        self._pilot: Pilot  # of all flights
        self._landed: list[Load] = []  # of flights, not yet verified
        self._memory_mask = 0  # bits of an address that must not be set, once the kernel has refused one
        self._unverified: deque[RingRead] = deque()
        self._unprepared: list[RingOp] = []
        self._unbounced: deque[RingOp] = deque()  # wait for a bounce buffer
        self.bounces = BouncePool(BOUNCE_LIMIT, self._bounce_returned)
        self._scheduled = False
        self._refusals = 0  # of submissions in a row
        self._held_up = False  # submissions wait a little after one
        self._watcher: TimerHandle | None = None
        self._inline_bytes = inline_bytes
        self._inline_left: float = inline_bytes
        self.missed_wakes = 0  # times that the timer found completions of which the eventfd did not tell

    async def start(self, directory: str | os.PathLike[str] | int) -> None:
        """Bind to the running loop and to a directory, and make the ring; see `Backend.start`.

        Raises
        ------
        OSError
            The kernel gives no ring, or refuses its use (``ENOSYS``, ``EPERM``, ``EACCES``, ``ENOMEM``).
        """
        await super().start(directory)
        try:
            for seconds in MEMORY_WAITS:
                try:
                    return self._open_ring()
                except OSError as error:
                    if error.errno != errno.ENOMEM:
                        raise
                    await asyncio.sleep(seconds)
            self._open_ring()
        except BaseException:
            await self.close()
            raise

    def _open_ring(self) -> None:
        ring = self._ring = self._factory(self._entries)
        ring.nop(None)
        ring.submit()  # a filter may allow the making and forbid this
        ring.reap()
        ring.acknowledge()
        self._registers = self._registers and ring.register_files()
        self.loop.add_reader(ring.eventfd, _woken, ref(self), ref(ring))
        self.ring_works = True

    def register_buffers(self, buffers: Sequence[memoryview]) -> bool:
        """Register memory, so that the kernel need not pin its pages for each request; False when it does not."""
        return self.ring_works and bool(self._ring.register_buffers(buffers))

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
        op = RingRead(self, self._reads, file, released)
        op.offset = offset
        op.buffer = buffer
        op.verify = verify
        return self._submit(op, timeout)

    def read_for(
        self, file: File, offset: int, buffer: memoryview, sink: Sink, verify: Callable[[memoryview], bool] | None
    ) -> Told:
        """As `read`, for a sink; see `Backend.read_for`."""
        told = Told(self.loop, sink)
        op = RingRead(self, self._reads, file, sink.on_released, told)
        op.offset = offset
        op.buffer = buffer
        op.verify = verify
        self._submit(op, None)
        return told

    @property
    def flies(self) -> bool:
        """Whether the ring works, and is to be used."""
        return self.ring_works and not self._closing

    def fly(self, loads: list[Load], files: dict[int, File], pilot: Pilot, over: Callable[[], object]) -> list[Load]:
        """Read blocks together; see `Backend.fly`."""
        transfers, mask = self.transfers, 0
        used = {slot: file for slot, file in files.items() if file.fd >= 0 and file.closing is None}
        if any(file.direct and transfers.uses_direct(file) for file in used.values()):
            mask = transfers.alignment - 1
        deadline = self._clock.monotonic() + self.timeout
        flight = RingFlight(list(used.values()), mask > 0, over, deadline)
        fds = {slot: file.fd for slot, file in used.items()} if self.flies else {}
        rest = aim(loads, fds, mask, self._memory_mask, self._inline_bytes, flight)
        if flight.left:
            self._pilot = pilot
            for file in flight.files:
                file.busy += 1
                if self._registers:
                    self._ring.fix_file(file.fd)
            self._in_flight.add(flight)
            if deadline < self._timer_at:
                self._arm(deadline)
            self._waiting.append(flight)
            self._schedule()
        return rest

    @property
    def reads_in_flight(self) -> int:
        """Reads submitted and not yet released."""
        return self._kinds["read"] + sum(op.left for op in self._in_flight if type(op) is RingFlight)

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
        op = RingWrite(self, self._writes, file, released)
        op.offset = offset
        op.prepare = prepare
        op.views = op.value = None
        return self._submit(op, timeout)

    def sync(self, file: File, *, timeout: float | None = None) -> asyncio.Future[None]:
        """Make a file's completed writes durable; see `Backend.sync`."""
        return self._submit(RingSync(self, self._lanes["sync"], file, None), timeout)

    def _dispatch(self, op: Op) -> None:
        if op.kind == "call":
            if self._registers and type(op) is Close and op.file is not None and self._ring is not None:
                self._ring.unfix_file(op.file.fd)
            self._lend(op)
        elif self.ring_works and (type(op) is not RingWrite or op.is_short(self._inline_bytes)):
            self._waiting.append(op)
            if not self._scheduled:
                self._scheduled = True
                self.loop.call_soon(self._turn)
        else:
            self._to_worker(op)

    def _to_worker(self, op: Op) -> None:
        lane = op.kind
        number = self._counts[lane]
        if number < self._limits[lane]:
            try:
                self._start_thread(lane, number)
            except OSError as error:
                if not number:  # nobody would ever take it
                    op.claim.clear()
                    op.error = error
                    self.loop.call_soon(self._finish, op)
                    return
            else:
                self._counts[lane] = number + 1
        self._lend(op)

    def _lend(self, op: Op) -> None:
        self._lent.add(op)
        self._let_breathe()
        op.lane.put(op)

    @property
    def with_workers(self) -> bool:
        """Whether a worker has something to do: the ring needs none."""
        return bool(self._lent)

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self.loop.call_soon(self._turn)

    def _turn(self) -> None:
        """Do what one turn of the loop allows: verify, submit, reap."""
        self._scheduled = False
        if self._landed and self._inline_left > 0:
            self._verify_landed()
        while self._unverified and self._inline_left > 0:
            self._verify(self._unverified.popleft())
        ring = self._ring
        if ring is None:
            return
        if self.ring_works and not self._held_up:
            if self._waiting:
                self._fill(ring)
            self._hand_in(ring)
        if self._ring is ring and ring.ready:  # unless it was given up
            ring.acknowledge()
            self._reap(ring)
        if self._ring is ring and self._watcher is None and (ring.in_flight or ring.queued):
            self._watch()

    def _fill(self, ring: Any) -> None:
        """Make requests of what waits, as far as the ring has room and the turn has time."""
        waiting = self._waiting
        budget = TURN_BYTES
        while waiting and budget > 0 and ring.room:
            op = waiting.popleft()
            if type(op) is RingFlight:
                if op.begun < len(op.loads):
                    budget -= op.begin_more(ring, budget)
                    if op.begun < len(op.loads):
                        waiting.appendleft(op)
                        break
                continue
            try:
                op.claim.pop()
            except IndexError:  # given up
                continue
            if op.future.done():  # cancelled before it started
                self._finish(op)
                continue
            if type(op) is RingWrite and op.prepare is not None and not self._prepare(op):
                continue
            if self._registers:
                ring.fix_file(op.file.fd)
            try:
                share = op.begin(ring) if op.request is None else op.again(ring)
            except NoBounceError:
                op.claim.append(True)
                self._unbounced.append(op)
            except Exception as error:  # what cannot be: a buffer that is read-only, a direct write of odd length
                self._fail(op, error)
            else:
                budget -= share
                if share < 0:
                    self._moved(op)
        if waiting and ring.room:
            self._schedule()

    def _prepare(self, op: RingWrite) -> bool:
        """Get the pieces of a write on the loop; False when it ends or has to wait for the next turn."""
        size = getattr(op.prepare, "nbytes", 0)
        if size > self._inline_left < self._inline_bytes:
            op.claim.append(True)
            self._unprepared.append(op)
            return False
        if size:
            self._spend(size)
        op.claim.append(True)
        op.perform(_SCRATCH)
        if op.error is None:
            return True
        self._finish(op)
        return False

    def _hand_in(self, ring: Any) -> None:
        """Give the kernel what the ring has queued."""
        try:
            taken = ring.submit()
        except OSError as error:
            if error.errno in _BUSY:
                self._hold_up(error)
            else:
                self._fall_over(error)
            return
        if not ring.queued:
            self._refusals = 0
        elif taken:
            self._refusals = 0
            self._schedule()
        else:
            self._hold_up(OSError(errno.EAGAIN, "the kernel takes no requests"))

    def _hold_up(self, error: OSError) -> None:
        """Wait a little before the next submission: the kernel is short of memory, or behind with completions."""
        self._refusals += 1
        if self._refusals > TRIES:
            self._fall_over(error)
            return
        self._held_up = True
        self._clock.call_later(self.loop, PAUSE_S * (1 << self._refusals), partial(_go_on, ref(self)))

    # completion

    def _reap(self, ring: Any) -> None:
        done = ring.reap(REAP)
        landed = land(done)
        if landed:
            self._landed += landed
            if self._inline_left > 0:
                self._verify_landed()
        for op, result in done:
            if op is None:  # that of the start
                continue
            try:
                if type(op) is Load:
                    self._strayed(op, result)
                else:
                    self._complete(op, result)
            except Exception as reason:  # one operation must not take the others' results with it
                self.loop.call_exception_handler({"message": "a completion failed", "exception": reason})
        if ring.lost and self.ring_works:
            self._fall_over(OSError(errno.EBADR, "the kernel lost completions"))
        if self._ring is not ring:
            return
        if ring.ready or (self._waiting and self.ring_works and ring.room):
            self._schedule()
        elif not ring.in_flight and not self.ring_works:
            self._drop_ring()

    def _verify_landed(self) -> None:
        """Compare the checksums of reads of flights, as many as the turn has time for."""
        good, bad, over, spent = verify(self._landed, int(self._inline_left))
        if spent:
            self._spend(spent)
        pilot = self._pilot
        try:
            if good:
                pilot.on_landed(good)
            for load in bad:
                pilot.on_fallen(load, None, True)
        except Exception as reason:
            self.loop.call_exception_handler({"message": "the end of reads could not be told", "exception": reason})
        for flight in over:
            self._leave(flight)

    def _strayed(self, load: Load, result: int) -> None:
        """A read of a flight did not move all it should, or nobody waits for it any more."""
        flight, lost = strayed(load)
        pilot = self._pilot
        if lost:
            pilot.on_released(load)
        elif result == -errno.ECANCELED and self._closing:
            pilot.on_fallen(load, TimeoutError(errno.ETIMEDOUT, "read unfinished at close"), True)
        elif result < 0 and -result not in _REFUSED:
            pilot.on_fallen(load, os_error(result), True)
        else:
            if result == -errno.EINVAL:
                self._memory_mask = self.transfers.alignment - 1
            pilot.on_fallen(load, None, True)
        if not flight.left:
            self._leave(flight)

    def _ground(self, flight: RingFlight, error: BaseException) -> None:
        """End the wait for what is left of a flight."""
        flight.deadline = math.inf
        free, lost = flight.give_up()
        for load in lost:
            if self.ring_works and self._ring.cancel(load.token):
                self._schedule()
        for load in free:
            self._pilot.on_fallen(load, error, True)
        for load in lost:
            self._pilot.on_fallen(load, error, False)
        if not flight.left:
            self._leave(flight)

    def _leave(self, flight: RingFlight) -> None:
        """Take a flight out: its last read has ended."""
        self._in_flight.discard(flight)
        for file in flight.files:
            file.busy -= 1
            if file.closing is not None:
                self._closing_file(file, flight)  # type: ignore[arg-type]
        flight.over()
        self._one_less()

    def _complete(self, op: RingOp, result: int) -> None:
        op.token = 0
        if op.future.done():  # nobody waits any more: whatever moved, the kernel is done with the buffers
            self._finish(op)
        elif op.steps is not None:
            self._resume(op, result)
        elif result == op.wanted:
            if type(op) is RingRead and op.verify is None:
                op.result = True
                self._finish(op)
            else:
                self._moved(op)
        elif result == -errno.ECANCELED and self._closing:
            self._fail(op, TimeoutError(errno.ETIMEDOUT, f"{op.kind} unfinished at close"))
        elif type(op) is RingSync or result == -errno.ECANCELED:
            self._fail(op, os_error(result))
        elif op.file.direct is not op.direct or not self.ring_works:  # direct was refused meanwhile, to somebody else
            op.restart()
            self._again(op)
        else:
            op.steps = op.plan(None)
            if next(op.steps, None) is not None:  # the request that was made already
                self._resume(op, result)
            else:  # one of no bytes
                self._fail(op, os_error(result))

    def _resume(self, op: RingOp, result: int) -> None:
        """Tell the steps what became of their request, and go on with the next one."""
        if not self.ring_works:
            op.restart()
            self._again(op)
            return
        steps = op.steps
        assert steps is not None
        try:
            request = steps.throw(os_error(result)) if result < 0 else steps.send(result)
        except StopIteration:
            self._moved(op)
        except BaseException as error:
            self._fail(op, error)
        else:
            if isinstance(request, float):
                self._pause(op, request)
            else:
                op.request = request
                self._again(op)

    def _pause(self, op: RingOp, seconds: float) -> None:
        op.claim.append(True)
        self._clock.call_later(self.loop, seconds, partial(self._after_pause, op))

    def _after_pause(self, op: RingOp) -> None:
        if not op.claim:  # given up
            return
        op.claim.clear()
        if self.ring_works and not op.future.done():
            self._resume(op, 0)
        else:
            op.restart()
            self._again(op)

    def _again(self, op: RingOp) -> None:
        """Put an operation that the kernel does not have first in line."""
        op.claim.append(True)
        if self.ring_works:
            self._waiting.appendleft(op)
            self._schedule()
        else:
            self._to_worker(op)

    def _moved(self, op: RingOp) -> None:
        """All bytes are where they should be: verify, then finish."""
        op.moved = True
        if op.scratch is not None:
            op.restart()
        if type(op) is RingRead:
            if op.verify is not None:
                self._moved_unverified(op)
                return
            op.result = True
        elif type(op) is RingWrite:
            op.result = op.value
        self._finish(op)

    def _moved_unverified(self, op: RingRead) -> None:
        assert op.buffer is not None
        size = getattr(op.verify, "nbytes", None)
        op.wanted = size = len(op.buffer) if size is None else size
        op.claim.append(True)
        if size > self._inline_bytes:
            self._to_worker(op)
        elif size > self._inline_left < self._inline_bytes:
            self._unverified.append(op)
        else:
            self._verify(op)

    def _verify(self, op: RingRead) -> None:
        if op.claim:
            self._spend(op.wanted)
        if op.perform(_SCRATCH):
            self._finish(op)

    def _spend(self, size: float) -> None:
        if self._inline_left == self._inline_bytes:
            self.loop.call_soon(self._refresh)
        self._inline_left -= size

    def _refresh(self) -> None:
        self._inline_left = self._inline_bytes
        if self._unprepared:
            self._waiting.extendleft(reversed(self._unprepared))
            self._unprepared.clear()
        if self._unverified or self._landed or self._waiting:
            self._schedule()

    def _arrived(self, op: Op) -> None:
        """A worker has prepared, verified, or, without a ring, done everything."""
        self._lent.discard(op)
        if type(op) is not RingWrite or op.moved or op.error is not None or op.future.done():
            self._finish(op)
        else:
            op.claim.append(True)
            self._dispatch(op)

    def _fail(self, op: RingOp, error: BaseException) -> None:
        # Its frames hold buffers, and say nothing that the text does not.
        error.__traceback__ = error.__context__ = None
        op.error = error
        self._finish(op)

    def _bounce_returned(self) -> None:
        room = BOUNCE_LIMIT - self.bounces.used
        while self._unbounced and room > 0 and not self._closed:
            op = self._unbounced.popleft()
            if op.claim:
                op.claim.clear()
                self._again(op)
                room -= SMALL_BYTES

    def _give_up(self, op: Any, error: BaseException) -> None:
        if type(op) is RingFlight:
            self._ground(op, error)
            return
        super()._give_up(op, error)
        if op not in self._in_flight:
            self._lent.discard(op)
        # In the kernel: it may still be in a queue there, and then the buffer comes back soon.
        if isinstance(op, RingOp) and op.token and self.ring_works and self._ring.cancel(op.token):
            self._schedule()

    # when the wake-up, or the ring, does not come

    def _watch(self) -> None:
        self._watcher = self._clock.call_later(self.loop, WATCH_S, partial(_tick, ref(self)))

    def _look(self) -> None:
        """Look after what is in flight, in case nobody tells."""
        self._watcher = None
        ring = self._ring
        if ring is None:
            return
        if ring.ready:
            if not ring.acknowledge():  # else the loop is about to hear of it
                self.missed_wakes += 1
            self._reap(ring)
        if self._ring is ring and (ring.in_flight or ring.queued):
            self._watch()

    def _fall_over(self, error: OSError) -> None:
        """Give the ring up: threads do everything that the kernel has not taken."""
        if not self.ring_works:
            return
        self.ring_works = False
        self.name = ThreadsBackend.name
        _log.warning("io_uring has stopped working (%s): using threads", error.strerror or error)
        back = self._take_back(self._ring)
        left = [*back, *self._waiting, *self._unprepared, *self._unbounced]
        self._waiting.clear()
        self._unprepared.clear()
        self._unbounced.clear()
        for op in left:
            if type(op) is RingFlight:
                for load in op.cut():
                    self._pilot.on_fallen(load, None, True)
                if not op.left:
                    self._leave(op)
            elif op.claim:
                op.restart()
                self._to_worker(op)
        if not self._ring.in_flight:
            self._drop_ring()

    def _drop_ring(self) -> None:
        ring, self._ring = self._ring, None
        self.ring_works = False
        if self._watcher is not None:
            self._watcher.cancel()
            self._watcher = None
        _let_go(self.loop, ring)

    # the end

    async def _until_quiet(self, besides: int = 0) -> None:
        await super()._until_quiet(besides)
        if self._ring is not None and len(self._in_flight) > besides:
            await self._cancel_all(self._ring)

    def _take_back(self, ring: Any) -> list[RingOp]:
        """Get back the operations that the kernel has not seen; the reads of flights fall."""
        back = []
        for op in ring.take_back():
            if type(op) is Load:
                self._strayed(op, -errno.ECANCELED)
            else:
                op.claim.append(True)
                back.append(op)
        return back

    async def _cancel_all(self, ring: Any) -> None:
        self._take_back(ring)
        if not ring.in_flight:
            return
        if ring.cancel_all():
            try:
                ring.submit()
            except OSError as error:
                _log.debug("cancelling: %s", error)
                ring.take_back()
        until = self.loop.time() + min(self.timeout, CANCEL_S)
        while self._ring is ring and ring.in_flight and self.loop.time() < until:
            await asyncio.sleep(0.001)
            if self._ring is ring and ring.ready:
                ring.acknowledge()
                self._reap(ring)

    async def _end_threads(self, stuck: int) -> None:
        ring = self._ring
        in_ring = 0 if ring is None else ring.in_flight
        await super()._end_threads(stuck - in_ring)
        self.ring_works = False
        if in_ring:
            ring.keep()  # for good, or until the last completion comes after all; the buffers with it
            self._watch()
        elif ring is not None:
            self._drop_ring()

    def __del__(self) -> None:
        ring, self._ring = self._ring, None
        if ring is not None and not ring.closed:
            try:
                self.loop.call_soon_threadsafe(_let_go, self.loop, ring)
            except RuntimeError:  # the loop is closed
                ring.close(0.0)
        super().__del__()


# Callbacks that do not keep the engine alive.


def _woken(backend: ref[UringBackend], ring: ref[Any]) -> None:
    engine, announced = backend(), ring()
    # A late call of a loop whose reader was removed meanwhile is for another ring, or for none.
    if engine is not None and announced is not None and engine._ring is announced:
        announced.acknowledge()
        engine._reap(announced)


def _tick(backend: ref[UringBackend]) -> None:
    engine = backend()
    if engine is not None:
        engine._look()


def _go_on(backend: ref[UringBackend]) -> None:
    engine = backend()
    if engine is not None:
        engine._held_up = False
        engine._schedule()


def _let_go(loop: asyncio.AbstractEventLoop, ring: Any) -> None:
    """Close a ring, its descriptor out of the loop first."""
    if not ring.closed and ring.eventfd >= 0:
        if not loop.is_closed():
            loop.remove_reader(ring.eventfd)
        ring.close(0.0)
