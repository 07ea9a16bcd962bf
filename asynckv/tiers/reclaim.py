"""Room in the log: a new segment when the active one is full, an old one reclaimed, its used blocks carried over.

Invariants
----------
* One segment's worth of room (a spare file, or bytes below the cap) is kept at all times, so that the log can go on
  while the oldest segment is still whole. A rotation uses it up, and is not over before it is there again.
* What is carried over in one rotation is less than half a segment, however many segments must die for the room; every
  rotation gains at least the other half.
* Carried blocks are read, verified, appended in log order, and durable in their new place before the old segment loses
  its name. The table is told when they are written, as of every block: so no copy is in the log that it does not know,
  which would come back when the block was dropped with the old segment and then deleted.
* While the store recovers nothing is reclaimed: what is in the oldest segments is not known yet. New segments are made
  from the room that is there; when that is used up, appends wait for the recovery.
* No segment is made while one is there that a recovery gave up, nor before it is known whether the newest one is lost,
  or the new one says so: what tells the next recovery would be hidden behind it.
* When the file system is full below the cap, because of what others write, the oldest segments make room: few, and no
  more before something was written again.
* A segment is sealed behind the back of the writer; before it is reclaimed its sealing has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import mmap
from typing import TYPE_CHECKING, Any

from asynckv.config import SEGMENTS_MAX
from asynckv.errors import DiskError
from asynckv.tiers.layout import PAGE, pages
from asynckv.tiers.log import CarryItem
from asynckv.tiers.segment import NO_SPACE

if TYPE_CHECKING:
    import logging

    from asynckv._core import Carry, Table
    from asynckv.tiers.log import LogWriter
    from asynckv.tiers.reader import BlockReader
    from asynckv.tiers.segment import Segment, SegmentSet

__all__ = ["Reclaimer"]

CARRY_GROUP_BYTES = 4 << 20
CARRY_GROUP_BLOCKS = 1024
CARRY_READS = 16
RELIEF_SEGMENTS = 2
SEGMENTS_LEFT = 2  # that many have to be there for one to be given up
FORGET_BLOCKS = 4096  # of a dead segment, in one turn of the loop
CARRY_HEADERS_BYTES = 4 * PAGE  # header, trailer and rounding of a carried batch
BATCH_SHARE = 8  # a rotation is due when less than this part of a segment is left for a large batch


class Reclaimer:
    """Keeps an active segment with room.

    Attributes
    ----------
    recovering
        Nothing may be reclaimed yet.
    condemned
        Segments that a recovery gave up and could not remove.
    corrupt_blocks
        Blocks that were found damaged when they should have been carried over.
    """

    def __init__(
        self, segments: SegmentSet, log: LogWriter, reader: BlockReader, table: Table, logger: logging.Logger
    ) -> None:
        self.set = segments
        self.log = log
        self.reader = reader
        self.table = table
        self.logger = logger
        self.condemned: list[Segment] = []
        self.corrupt_blocks = 0
        self.recovering = False
        self.recovered = asyncio.Event()
        self.recovered.set()
        self.before_first_segment: Any = None  # coroutine function: what has to be gone before the log changes
        self._lock = asyncio.Lock()  # a probe may come while the writer waits for room
        self._sealing: set[asyncio.Task[None]] = set()

    # -- rotation ------------------------------------------------------------------------------------------------

    async def prepare(self, nbytes: int) -> None:
        """Make sure that the active segment takes a good part of so many bytes, and the block left over before.

        Asking for all of it would leave the ends of small segments empty.
        """
        async with self._lock:
            await self._prepare(nbytes)

    async def _prepare(self, nbytes: int) -> None:
        if self.set.active is not None:  # it could not be removed when that was made
            await self.drop_snapshot()
        if self.set.starved:  # by a write that found no blocks
            await self._relieve()
        share = min(nbytes, self.set.segment_bytes // BATCH_SHARE)
        want = min(max(share, self.log.wanted), self.log.largest_block(self.set.segment_bytes))
        while not self.log.fits(want):
            await self._rotate(want)
        if not self.set.has_room() and not self.recovering:
            await self._restore_reserve(want)
            while not self.log.fits(want):  # what was carried over took the room
                await self._rotate(want)

    async def _rotate(self, want: int) -> None:
        old, self.set.active = self.set.active, None
        following = 0
        try:
            await self._new_segment()
            following = self.set.next_number - 1
        except (asyncio.CancelledError, GeneratorExit):  # whoever comes next goes on where the log was
            if old is not None and not old.retired:
                self.set.active, old = old, None
            raise
        finally:
            if old is not None:
                self.seal_behind(old, following)
        if not self.recovering and not self.set.has_room():
            await self._restore_reserve(want)

    async def remove_stillborn(self) -> None:
        """Remove segments whose birth failed half-way."""
        for segment in self.set:
            if segment.stillborn:
                await self.drop(segment)

    async def drop_condemned(self) -> None:
        """Remove what a recovery gave up, or find out that it still cannot be."""
        while self.condemned:
            segment = self.condemned.pop()
            try:
                await self.drop(segment)
            except BaseException:
                self.condemned.append(segment)
                raise

    async def _new_segment(self) -> None:
        await self.remove_stillborn()
        if self.recovering and (not self.set.has_room() or self.set.has_suspects()):
            await self.recovered.wait()
        await self.drop_condemned()
        self.set.settle_doubt()
        if not self.set.lost:
            await self.drop_snapshot()
        while not self.set.has_room():
            await self._reclaim_oldest(0)
        while True:
            try:
                await self.set.create(self.log.sequence)
            except OSError as error:
                self.set.refused(error)
                if error.errno not in NO_SPACE or not await self._relieve():
                    raise
            else:
                break
        if self.set.lost:  # only now does another page tell so
            await self.drop_snapshot()

    async def drop_snapshot(self) -> None:
        """Remove the snapshot, if that is still to be done."""
        if self.before_first_segment is not None:
            await self.before_first_segment()
            self.before_first_segment = None

    async def _relieve(self) -> bool:
        """The file system is full, of what others have written: give up the oldest segment, or say that it is no use.

        A second one, because a sealed segment is shorter than a new one. When that was not enough nothing more is
        given up before something was written again.
        """
        if self.recovering or not 0 < self.set.starved <= RELIEF_SEGMENTS or len(self.set) < SEGMENTS_LEFT:
            return False
        self.logger.warning("asynckv: the file system gives no room for one more segment: the oldest one is given up")
        await self._reclaim_oldest(0)
        return True

    def seal_behind(self, segment: Segment, following: int = 0) -> None:
        """Begin to seal a segment that takes no more batches; `following` is the one that took its place."""
        if segment.sealing is None and not (segment.sealed or segment.failed or segment.retired) and segment.own:
            loop = asyncio.get_running_loop()
            segment.sealing = loop.create_task(self._seal(segment, following), name="asynckv seal")
            self._sealing.add(segment.sealing)
            segment.sealing.add_done_callback(self._sealing.discard)

    async def _seal(self, segment: Segment, following: int) -> None:
        try:
            await self.log.seal(segment, following)
        except (OSError, MemoryError) as error:
            # Left as it is: readable, charged in full, sealed by the next recovery or reclaimed before.
            self.set.met(error)
            self.logger.warning("asynckv: sealing a segment failed: %s", str(error) or "no memory")

    async def drain(self) -> None:
        """Wait for the sealing that was begun."""
        while self._sealing:
            await asyncio.wait(list(self._sealing))

    # -- reclaiming ----------------------------------------------------------------------------------------------

    async def _restore_reserve(self, want: int) -> None:
        # What waits to be written must still fit behind what is carried over.
        left = self.log.largest_block(self.set.segment_bytes) - pages(want) - CARRY_HEADERS_BYTES
        budget = min(self.set.segment_bytes // 2 - PAGE, left)
        while not self.set.has_room():
            budget -= await self._reclaim_oldest(budget)

    async def _reclaim_oldest(self, budget: int) -> int:
        """Reclaim one segment; bytes that were carried over."""
        segment = self.set.oldest()
        if segment is None:
            if self.set.spare is not None and len(self.set) < SEGMENTS_MAX:
                await self.set.drop_spare()
                if self.set.has_room():
                    return 0
            raise DiskError("there is no room for one more segment", operation="allocate", errno=errno.ENOSPC)
        if segment.sealing is not None and not segment.sealing.done():
            await asyncio.wait([segment.sealing])
        carried = 0
        if segment.own and budget > 0 and self.set.active is not None and not segment.retired:
            carried = await self._carry_over(segment, budget)
        await self.drop(segment)
        return carried

    async def drop(self, segment: Segment, *, recycle: bool = True) -> None:
        """Give a segment up with all that is in it, durably. Its file may become the spare one if nobody makes one."""
        segment.hold()  # the file stays open: its blocks are served until the table forgets them
        try:
            if segment.slot >= 0:
                with contextlib.suppress(OSError):
                    await self.set.open_file(segment)
            await self._forget(segment, recycle)
        finally:
            segment.release()
        await self.set.bury(segment)

    async def _forget(self, segment: Segment, recycle: bool) -> None:
        await self.set.retire(segment, recycle=recycle)
        if segment.slot >= 0:
            while self.table.drop_segment(segment.slot, FORGET_BLOCKS):  # noqa: ASYNC110 - no wait, pieces of work
                await asyncio.sleep(0)

    # -- carrying over -------------------------------------------------------------------------------------------

    async def _carry_over(self, segment: Segment, budget: int) -> int:
        """Copy blocks that were used since they were written; stored bytes that were copied.

        All blocks, when there are too many files and not too many bytes: many short lives leave many small segments.
        """
        active = self.set.active
        assert active is not None
        candidates = self.table.segment_candidates(segment.slot, budget, self.set.crowded)
        written = False
        carried = 0
        while candidates:
            group, candidates = self._group(candidates, budget - carried)
            if not group:
                break
            items = await self._read_group(group)
            while items:
                if self.set.active is not active:
                    raise DiskError("the segment that takes carried blocks failed", operation="write", errno=errno.EIO)
                batch = self.log.compose([], [], carries=items)
                if not batch.placed:
                    candidates = []  # the active segment is full, or none is current any more
                    break
                kept, items = batch.carries, batch.rest_carries
                carried += sum(self._room_of(item.stored) for item in kept)
                future = self.log.submit(batch)
                future.add_done_callback(functools.partial(self._moved, kept))
                await asyncio.wait([future])  # whoever is cancelled here leaves the batch in the log
                future.result()
                written = True
        if written:
            await self.log.sync_segment(active)
        return carried

    def _moved(self, items: list[CarryItem], future: asyncio.Future[list[tuple[int, int, int]]]) -> None:
        """Blocks have their new place; a failed sync takes it back."""
        if future.cancelled() or future.exception() is not None:
            self.table.log_unknown = True  # the copies may be there all the same
            return
        for item, (slot, offset, _) in zip(items, future.result(), strict=True):
            self.table.finish_carry(item.carry, slot, offset)

    @staticmethod
    def _room_of(stored: int) -> int:
        return pages(stored) if stored >= PAGE else stored

    def _group(self, candidates: list[Carry], budget: int) -> tuple[list[Carry], list[Carry]]:
        total = count = 0
        for carry in candidates:
            size = self._room_of(carry.stored)
            if total + size > budget or count >= CARRY_GROUP_BLOCKS or (count and total + size > CARRY_GROUP_BYTES):
                break
            total += size
            count += 1
        return candidates[:count], candidates[count:]

    async def _read_group(self, group: list[Carry]) -> list[CarryItem]:
        """Read and verify; the blocks that are well."""
        sizes = [pages(carry.stored) for carry in group]
        room = memoryview(mmap.mmap(-1, max(sum(sizes), PAGE)))
        limit = asyncio.Semaphore(CARRY_READS)
        good: list[CarryItem | None] = [None] * len(group)

        async def one(index: int, carry: Carry, buffer: memoryview) -> None:
            async with limit:
                try:
                    well = await self.reader.read(carry.slot, carry.offset, buffer, carry.stored, carry.checksum)
                except OSError as error:
                    self.set.met(error)
                    return  # lost with its segment: a block that the disk does not give back cannot be kept
                if well:
                    good[index] = CarryItem(carry, buffer)
                else:
                    self.corrupt_blocks += 1

        start = 0
        jobs = []
        for index, (carry, size) in enumerate(zip(group, sizes, strict=True)):
            jobs.append(one(index, carry, room[start : start + size]))
            start += size
        await asyncio.gather(*jobs)
        return [item for item in good if item is not None]
