"""The one task that appends to the log: early spills, tombstones, flush.

Invariants
----------
* Log order is the order in which batches are composed, and composing takes the dirty blocks and the owed tombstones
  in one step without an await. Within a batch: clear, tombstones, blocks. A dirty block of a key whose tombstone is
  still owed was put after the removal, so this order is the order of the calls.
* Blocks are taken oldest first, and a replaced dirty block keeps its place. The first N of the list, N being its
  length when `flush` was called, therefore cover every put that returned before.
* A clear goes alone, and nothing is composed until it is durable or has failed. One that failed stays owed, as a
  tombstone does: the next batch tries again, and buries nothing that was put after it.
* A flush or a durable removal answers only after its batches were written and a sync begun after that ended.
* A block whose write failed is dirty again; a batch that ran past its deadline keeps its extents until the engine
  lets go of them.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Any

from asynckv.errors import DiskError
from asynckv.health import WRITE
from asynckv.waiting import Owned

if TYPE_CHECKING:
    from asynckv._core import Spill
    from asynckv.config import Config
    from asynckv.scheduler import Scheduler
    from asynckv.tiers.base import Tier, WireKey

log = logging.getLogger("asynckv")

BATCH_BYTES_MAX = 4 << 20
BATCH_BYTES_MIN = 64 << 10
BATCH_BLOCKS_MAX = 4096
BATCHES_IN_FLIGHT_MAX = 2
CLOSE_TRIES = 2
RETRY_SECONDS = 0.05
TICK_SECONDS_MIN = 0.05
# Of the pool: writing starts when this much is dirty and goes on down to the lower mark, so that the older half of
# the pool is clean when room is needed.
WRITE_ABOVE = 1 / 2
WRITE_DOWN_TO = 3 / 8


class Flush:
    """One call of `flush`.

    Attributes
    ----------
    left, owed
        Blocks and tombstones that are still to be taken.
    batches
        Those that it waits for.
    first_segment
        Where the first of them went.
    displaced
        The table's `displaced_blocks` when all of them were to be taken; None: what lost its place since may stay.
    """

    __slots__ = ("batches", "displaced", "first_segment", "future", "left", "owed")

    def __init__(
        self, future: asyncio.Future[None], left: int, owed: int, batches: set[InFlight], displaced: int | None
    ) -> None:
        self.future = future
        self.left = left
        self.owed = owed
        self.batches = batches
        self.displaced = displaced
        self.first_segment: int | None = None


class InFlight(Owned):
    """One batch on its way to the disk."""

    __slots__ = ("bytes", "durable", "future", "spills", "tombstones", "writer")

    def __init__(self, writer: Writer, spills: list[Spill], tombstones: list[WireKey], durable: list[Any]) -> None:
        super().__init__(writer.scheduler)
        self.writer = writer
        self.spills = spills
        self.tombstones = tombstones
        self.durable = durable
        self.bytes = sum(spill.stored for spill in spills)
        self.future: asyncio.Future[Any] | None = None

    def give_back(self) -> None:
        for spill in self.spills:
            self.writer.table.release_spill(spill)

    def on_done(self, future: asyncio.Future[Any]) -> None:
        self.writer.finish(self, future)


class Writer:
    """Decides when dirty blocks are written and keeps what is owed to the log."""

    def __init__(self, scheduler: Scheduler, config: Config) -> None:
        self.scheduler = scheduler
        self.loop = scheduler.loop
        self.table = scheduler.table
        self.bytes_in_flight = 0
        capacity = self.table.capacity
        self._batch_bytes = min(max(capacity // 8, BATCH_BYTES_MIN), BATCH_BYTES_MAX)
        self._above = int(capacity * WRITE_ABOVE)
        self._down_to = int(capacity * WRITE_DOWN_TO)
        self._persist_after = config.persist_after
        self._persistent = config.disk // 2  # bytes in memory that may be written once more when they lose their place
        self._wake = asyncio.Event()
        self._busy = False  # writing down to the lower mark
        self._urgent = False  # someone waits for room that a spill would make
        self._quota = 0  # blocks to write although there is no pressure (persist_after)
        self._closed = False
        self._tombstones: dict[WireKey, list[asyncio.Future[None]]] = {}  # oldest first
        self._blocks_first = False  # a block found no room in its batch beside tombstones
        self._clear: list[asyncio.Future[None]] | None = None
        self._clearing: asyncio.Future[None] | None = None  # ends when the clear is durable, or has failed
        self._burials = self._burials_synced = 0  # batches with tombstones: composed, and durable for certain
        self._flushes: list[Flush] = []
        self._in_flight: set[InFlight] = set()
        self._sync_waiters: deque[asyncio.Future[None]] = deque()
        self._sync_task: asyncio.Task[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._started = False
        self._timer: Any = None
        self._aged = 0

    @property
    def tier(self) -> Tier:
        assert self.scheduler.tier is not None
        return self.scheduler.tier

    @property
    def in_flight(self) -> int:
        """Batches submitted and not yet completed."""
        return len(self._in_flight)

    def start(self) -> None:
        """Begin to serve; needs a tier."""
        self._batch_bytes = min(self._batch_bytes, self.tier.max_block)
        self._started = True
        self._ensure()
        if self._persist_after is not None:
            self._arm()

    def _ensure(self) -> None:
        """Have the task. `asyncio.run` cancels all tasks at its end, while owners of caches may still be closing."""
        if self._started and not self._closed and (self._task is None or self._task.done()):
            self._task = self.loop.create_task(self._run(), name="asynckv writer")
            self._task.add_done_callback(lambda _: self.loop.call_soon(self._ended))
            self._wake.set()  # an earlier task may have consumed it

    def _ended(self) -> None:
        if self._flushes or self._clear or any(self._tombstones.values()):
            self._ensure()

    # -- what callers ask for ------------------------------------------------------------------------------------

    def poke(self) -> None:
        """Something became dirty or owed: write if there is reason to."""
        if self._started and self._has_work():
            self._ensure()
            self._wake.set()

    def go_on(self) -> None:
        """As `poke`, when no caller is behind it: the task of a loop that is about to end is not made anew."""
        if self._task is not None and not self._task.done():
            self.poke()

    def urge(self) -> None:
        """A call is blocked until dirty blocks become clean."""
        if self._started and self.table.backed:
            self._urgent = True
            self._ensure()
            self._wake.set()

    def is_owed(self, key: WireKey) -> bool:
        """Whether what ends an absent key may not be durable yet."""
        if key in self._tombstones or self._clear is not None or self._clearing is not None:
            return True
        return self._burials_synced < self._burials

    def bury(self, key: WireKey, *, durable: bool = False) -> asyncio.Future[None]:
        """Owe the log a tombstone; the future ends when it is durable, or with the error."""
        future: asyncio.Future[None] = self.loop.create_future()
        waiters = self._tombstones.setdefault(key, [])
        if durable:
            self._join(waiters, future)
        self.poke()
        return future

    def clear(self) -> asyncio.Future[None]:
        """Owe the log one record that ends everything before it; it covers all tombstones owed so far."""
        future: asyncio.Future[None] = self.loop.create_future()
        waiters = self._clear or []
        self._join(waiters, future)
        for owed in self._tombstones.values():
            waiters.extend(owed)
        self._tombstones.clear()
        self.table.take_owed()
        for flush in self._flushes:
            flush.owed = 0
        self._clear = waiters
        self.poke()
        return future

    async def flush(self) -> None:
        """Write and sync every block that was put before the call; blocks that no segment can hold are an error."""
        oversize = self.table.nospill_blocks
        await self._write_all(self.table.displaced_blocks)
        if oversize:
            raise DiskError(
                f"blocks too large for a segment, which are in memory alone: {oversize} (the largest block that fits "
                f"has {self.table.max_spill} bytes; more disk= or segment= takes larger ones)",
                operation="flush",
                errno=errno.EFBIG,
            )

    async def _write_all(self, displaced: int | None = None) -> None:
        if not self.scheduler.breaker.ok:
            raise DiskError("the disk is switched off", operation="flush", errno=errno.EIO)
        self.table.requeue_unbacked()
        self._take_owed()
        future: asyncio.Future[None] = self.loop.create_future()
        flush = Flush(future, self.table.dirty_blocks, len(self._tombstones), set(self._in_flight), displaced)
        self._flushes.append(flush)
        self._settle_flushes()
        self._ensure()
        self._wake.set()
        try:
            await future
        finally:
            if flush in self._flushes:
                self._flushes.remove(flush)

    def disk_off(self) -> None:
        """The breaker opened: whoever waits for the disk gets the error now."""
        error = DiskError("the disk is switched off", errno=errno.EIO)
        self._fail_flushes(error)
        for waiters in self._tombstones.values():
            self._answer(waiters, error)
        if self._clear is not None:
            self._answer(self._clear, error)
        self._answer(self._sync_waiters, error)

    def _join(self, waiters: list[asyncio.Future[None]], future: asyncio.Future[None]) -> None:
        """Wait with others; while the disk is off nobody waits, however often it is tried."""
        if self.scheduler.breaker.ok:
            waiters.append(future)
        else:
            self._answer([future], DiskError("the disk is switched off", errno=errno.EIO))

    @staticmethod
    def _answer(waiters: Any, error: BaseException | None) -> None:
        for future in waiters:
            if not future.done():
                if error is None:
                    future.set_result(None)
                else:
                    future.set_exception(error)
                    future.exception()  # seen: a caller that left must not cause a warning
        waiters.clear()

    # -- the task ------------------------------------------------------------------------------------------------

    def _has_work(self) -> bool:
        table = self.table
        if not self.scheduler.breaker.ok:
            return False
        if self._owes():
            return True
        if not table.dirty_blocks:
            self._busy = self._urgent = False
            self._quota = 0
            return False
        if table.dirty_bytes > self._above:
            self._busy = True
        elif table.dirty_bytes <= self._down_to:
            self._busy = False
        return self._wanted()

    def _wanted(self) -> bool:
        """Is there a reason to write blocks now?"""
        return self._busy or self._urgent or self._quota > 0 or any(flush.left > 0 for flush in self._flushes)

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._has_work():
                try:
                    if self._clearing is not None:
                        await asyncio.wait([self._clearing])
                        continue
                    if len(self._in_flight) >= self._most_in_flight:
                        await asyncio.wait(self._futures(), return_when=asyncio.FIRST_COMPLETED)
                        continue
                    await self.tier.prepare(max(self._batch_bytes, self.table.dirty_head_bytes))
                    if self._has_work():  # the breaker may have opened meanwhile
                        self._compose()
                except Exception as error:
                    if self.loop.is_closed():  # collected with it: what the cleaning up met says nothing
                        return
                    if not isinstance(error, OSError | MemoryError):  # our bug: go on serving, memory still works
                        log.exception("asynckv: the writer failed")
                    self._failed(error)
                    await asyncio.sleep(RETRY_SECONDS)
            self._settle_flushes()

    @property
    def _most_in_flight(self) -> int:
        """Batches at a time: the disk's time goes to reloads first, unless a call waits for what a spill makes."""
        return 1 if self.scheduler.reading and not self._urgent else BATCHES_IN_FLIGHT_MAX

    def _futures(self) -> list[asyncio.Future[Any]]:
        return [batch.future for batch in self._in_flight if batch.future is not None]

    def _owes(self) -> bool:
        return bool(self._tombstones or self._clear is not None or self.table.owed)

    def _compose(self) -> None:
        """Take what is dirty and owed, fix its place in the log, and submit it: one step."""
        table = self.table
        self._take_owed()
        clear, self._clear = self._clear, None
        wanted = clear is None and self._wanted()
        owed = {} if wanted and self._blocks_first else self._take_tombstones()
        spills: list[Spill] = []
        try:
            if wanted:
                spills = table.take_dirty(self._batch_bytes, BATCH_BLOCKS_MAX)
                if self._tombstones:
                    spills = self._unburied(spills)
            if not spills and not owed:
                owed = self._take_tombstones()
            if clear is None:
                self._urgent = False
            if not spills and not owed and clear is None:
                return
            batch = self.tier.compose(spills, list(owed), clear is not None)
        except BaseException:
            for spill in reversed(spills):
                table.finish_spill(spill, False)
            self._tombstones = owed | self._tombstones
            self._clear = clear
            raise
        for spill in reversed(batch.rest_spills):
            table.finish_spill(spill, False)
        self._blocks_first = bool(batch.rest_spills and not batch.spills)
        if batch.rest_tombstones:
            self._tombstones = {key: owed.pop(key) for key in batch.rest_tombstones} | self._tombstones
        durable = [future for waiters in owed.values() for future in waiters]
        if clear is not None:
            if batch.clear:
                self._clearing = self.loop.create_future()
                self._clearing.add_done_callback(self._cleared)
                durable = [self._clearing, *durable, *clear]
            else:
                self._clear = clear
        self._burials += bool(owed)
        taken = len(batch.spills)
        self._quota = max(0, self._quota - taken)
        in_flight = InFlight(self, batch.spills, list(owed), durable)
        self._in_flight.add(in_flight)
        self.bytes_in_flight += in_flight.bytes
        for flush in self._flushes:
            if flush.left > 0 or flush.owed > 0 or clear is not None:
                flush.left -= taken
                flush.owed -= len(owed)
                flush.batches.add(in_flight)
                if flush.first_segment is None:
                    flush.first_segment = batch.segment
        try:
            in_flight.future = self.tier.submit(batch, released=in_flight.on_released)
        except Exception as error:
            in_flight.released = True
            in_flight.future = self.loop.create_future()
            in_flight.future.set_exception(error)
        in_flight.future.add_done_callback(in_flight.on_done)

    def _take_owed(self) -> None:
        for key in self.table.take_owed():
            self._tombstones.setdefault(key, [])

    def _take_tombstones(self) -> dict[WireKey, list[asyncio.Future[None]]]:
        """The oldest tombstones, as many as fit a quarter of a batch."""
        taken: dict[WireKey, list[asyncio.Future[None]]] = {}
        size = 0
        for key, waiters in self._tombstones.items():
            if size >= self._batch_bytes // 4:
                break
            taken[key] = waiters
            size += len(key[1]) + 16
        if len(taken) == len(self._tombstones):
            self._tombstones = {}
        else:  # a dictionary that is only popped from its head gets slow
            self._tombstones = dict(islice(self._tombstones.items(), len(taken), None))
        return taken

    def _unburied(self, spills: list[Spill]) -> list[Spill]:
        """Give those back that a tombstone which is left for a later batch would bury; the others."""
        buried = [spill for spill in spills if (spill.kind, spill.key) in self._tombstones]
        others = [spill for spill in spills if (spill.kind, spill.key) not in self._tombstones]
        for spill in reversed(buried):  # from here on nothing asks for memory
            self.table.finish_spill(spill, False)
        return others

    def _cleared(self, future: asyncio.Future[None]) -> None:
        """The clear is durable, or stays owed: then it goes before whatever comes, and ends all that the log holds."""
        self._clearing = None
        if future.exception() is None:
            self.table.log_unknown = False
        else:
            self._clear = self._clear or []
            self.go_on()

    def finish(self, batch: InFlight, future: asyncio.Future[Any]) -> None:
        """A batch ended: its blocks are clean, or dirty again."""
        table, counters = self.table, self.scheduler.counters
        self._in_flight.discard(batch)
        self.bytes_in_flight -= batch.bytes
        error: BaseException | None = asyncio.CancelledError() if future.cancelled() else future.exception()
        if error is None:
            for spill, (slot, offset, checksum) in zip(batch.spills, future.result(), strict=True):
                table.finish_spill(spill, True, slot, offset, checksum)
                counters.spilled_bytes += spill.stored
            counters.spilled_blocks += len(batch.spills)
            self.scheduler.breaker.success(WRITE)
            if batch.durable:
                self._sync(batch.durable)
        else:
            late = isinstance(error, TimeoutError) and not batch.released
            batch.expired = late
            for spill in reversed(batch.spills):  # back to the head of the list, in their old order
                if late:
                    table.expire_spill(spill)
                else:
                    table.finish_spill(spill, False)
            table.return_owed(batch.tombstones)
            self._answer(batch.durable, error)
            self._failed(error)
        for flush in self._flushes:
            flush.batches.discard(batch)
        self._settle_flushes()
        self.scheduler.kick()
        self.go_on()

    def _failed(self, error: BaseException) -> None:
        counters = self.scheduler.counters
        if isinstance(error, TimeoutError):
            counters.io_timeouts += 1
        else:
            counters.io_errors += 1
        self._fail_flushes(error)
        if not isinstance(error, asyncio.CancelledError):
            self.scheduler.breaker.failure(WRITE)

    def _fail_flushes(self, error: BaseException) -> None:
        flushes, self._flushes = self._flushes, []
        for flush in flushes:
            if not flush.future.done():
                flush.future.set_exception(
                    DiskError("not everything could be written", operation="flush", errno=getattr(error, "errno", None))
                )

    def _settle_flushes(self) -> None:
        """Hand flushes whose batches are all written to the next sync."""
        table = self.table
        for flush in list(self._flushes):
            if flush.first_segment is not None and self.tier.oldest_segment > flush.first_segment:
                self._flushes.remove(flush)
                error = DiskError("the blocks do not fit the disk together", operation="flush", errno=errno.ENOSPC)
                self._answer([flush.future], error)
            elif flush.batches or self._is_left(flush):
                continue
            elif flush.displaced not in (None, table.displaced_blocks):  # their room went to what it has written
                flush.displaced = table.displaced_blocks
                table.requeue_unbacked()
                flush.left = table.dirty_blocks
                self._wake.set()
            else:
                self._flushes.remove(flush)
                self._sync([flush.future])

    def _is_left(self, flush: Flush) -> bool:
        """Whether something is still to be taken for a flush."""
        blocks, tombstones = flush.left > 0 and self.table.dirty_blocks, flush.owed > 0 and self._owes()
        return bool(blocks or tombstones or self._clear is not None)

    # -- sync ----------------------------------------------------------------------------------------------------

    def _sync(self, waiters: list[asyncio.Future[None]]) -> None:
        self._sync_waiters.extend(waiters)
        if self._sync_task is None and self._sync_waiters:
            self._sync_task = self.loop.create_task(self._sync_all(), name="asynckv sync")
            self._sync_task.add_done_callback(self._sync_ended)

    def _sync_ended(self, _: asyncio.Task[None]) -> None:
        self._sync_task = None
        self._sync([])

    async def _sync_all(self) -> None:
        # One sync at a time; whoever comes meanwhile is covered by the next one.
        while self._sync_waiters:
            waiters, self._sync_waiters = self._sync_waiters, deque()
            burials = self._burials if not any(batch.tombstones for batch in self._in_flight) else 0
            try:
                await self.tier.sync()
            except asyncio.CancelledError:
                self._sync_waiters.extendleft(waiters)
                raise
            except Exception as error:
                if self.loop.is_closed():  # as in `_run`
                    return
                if not isinstance(error, OSError):  # our bug: those who wait are told all the same
                    log.exception("asynckv: a sync failed")
                # What those wait for who came meanwhile was taken back with it: no later sync speaks of that.
                waiters.extend(self._sync_waiters)
                self._sync_waiters.clear()
                self._answer(waiters, DiskError("sync failed", operation="sync", errno=getattr(error, "errno", None)))
                self._failed(error)
            else:
                self._burials_synced = max(self._burials_synced, burials)
                self._answer(waiters, None)

    # -- age -----------------------------------------------------------------------------------------------------

    def _arm(self) -> None:
        assert self._persist_after is not None
        period = max(self._persist_after / 2, TICK_SECONDS_MIN)
        self._timer = self.scheduler.clock.call_later(self.loop, period, self._tick)

    def _tick(self) -> None:
        if self.table.used <= self._persistent:  # more than that would go round and round
            self.table.requeue_unbacked()
        # What was dirty at the last tick and still is has waited at least half, at most all of `persist_after`.
        self._quota = max(self._quota, min(self._aged, self.table.dirty_blocks))
        self._aged = self.table.dirty_blocks
        self.poke()
        self._arm()

    # -- end -----------------------------------------------------------------------------------------------------

    async def close(self) -> bool:
        """Write what is dirty if the disk takes it; True when nothing is left."""
        if not self._started or self._closed:
            return not self.table.dirty_blocks
        if self._timer is not None:
            self._timer.cancel()
        if self.table.nospill_blocks:
            log.warning("asynckv: blocks too large for a segment, which are lost: %d", self.table.nospill_blocks)
            self.table.owe_nospill()  # else what they replaced would be back when the log is read
        clean = await self._write_the_rest()
        self._closed = True
        pending: list[asyncio.Future[Any]] = self._futures()
        if self._task is not None:
            self._task.cancel()
            pending.append(self._task)
        if self._sync_task is not None:
            pending.append(self._sync_task)
        if pending:
            await asyncio.wait(pending)
        return clean

    async def _write_the_rest(self) -> bool:
        """Write all that is left, what is on its way included; once more after a failure. True when that is done."""
        table, error = self.table, None
        for _ in range(CLOSE_TRIES):
            if not (table.dirty_blocks or table.unbacked_blocks or self._in_flight or self._flushes or self._owes()):
                return True
            try:
                await self._write_all()
                return True
            except DiskError as reason:
                error = reason
            if not self.scheduler.breaker.ok:
                break
        log.warning("asynckv: closing without everything on disk: %s", error)
        return False
