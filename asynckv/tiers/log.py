"""Appending: batches are composed in log order, written in any order, and durable after a sync.

Invariants
----------
* A batch has its place from `compose` on. Its area is never given to another one, even when its write fails: a write
  that ran past its deadline may still reach the disk, any time. The hole stays; the segment goes on behind it.
* A batch's header says how many complete, durable batches lie below which offset. A recovery that finds fewer knows
  that something was lost, and one that finds a torn batch above knows that it was never acknowledged.
* A sync is reported when it ended and the segment's claim was overwritten to say so. The claim itself is not synced: a
  kill leaves it, and after a power loss without it the bytes that were synced speak for themselves.
* At most one sync runs per segment: after a failed one Linux may call the pages clean, and a second sync that ran
  beside it could report success. A segment whose sync failed takes no more batches, and what was not durable before is
  reverted: its blocks are dirty, its tombstones owed, and the next sync of the log fails, whoever asked for this one.
* Sealing comes after a sync of all batches, so that a seal never speaks of bytes that a power loss can take; and the
  seal is synced before the file is truncated, so a file without a seal that is short has lost something.
* The staging buffers belong to the operation until the engine lets go of them.
"""

from __future__ import annotations

import asyncio
import errno
import mmap
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from asynckv._record import (
    KIND_CLAIM,
    KIND_FOOTER,
    PAGE_BYTES,
    RecordWriter,
    footer_bound,
    parse_piece,
    plan_batch,
    staging_bytes,
    write_batch,
)
from asynckv.errors import DiskError
from asynckv.tiers.layout import CLAIM_AT, LOG_START, Seal, pages

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from asynckv._core import Carry, Spill, Table
    from asynckv._record import BatchPlan
    from asynckv.backends.base import File
    from asynckv.tiers.base import WireKey
    from asynckv.tiers.layout import SegmentHeader
    from asynckv.tiers.segment import Segment, SegmentSet

__all__ = ["DURABLE", "Batch", "CarryItem", "LogWriter", "Staging", "footer_and_seal"]

PENDING, WRITTEN, DURABLE, FAILED = range(4)
FOOTER_CLOSE_BYTES = 128 << 10
STAGING_KEPT = 4
STAGING_KEPT_BYTES_MAX = 8 << 20
STAGING_STEP = 256 << 10


class CarryItem:
    """A block on its way from a segment that is reclaimed; its bytes were verified."""

    __slots__ = ("carry", "checksum", "desc", "key", "kind", "stored", "view")

    def __init__(self, carry: Carry, view: memoryview) -> None:
        self.carry = carry
        self.kind: int = carry.kind
        self.key: bytes = carry.key
        self.desc: bytes = carry.desc
        self.stored: int = carry.stored
        self.checksum: int = carry.checksum
        self.view = view


class Staging:
    """A few page-aligned buffers that are used again and again."""

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []

    def take(self, size: int) -> mmap.mmap:
        """A buffer of at least so many bytes."""
        for index, buffer in enumerate(self._free):
            if len(buffer) >= size:
                return self._free.pop(index)
        if self._free:
            self._free.pop(0)  # too small for what is written now
        return mmap.mmap(-1, -(-max(size, 1) // STAGING_STEP) * STAGING_STEP)

    def give(self, buffer: mmap.mmap) -> None:
        """Take a buffer back that nobody uses any more."""
        if len(self._free) < STAGING_KEPT and len(buffer) <= STAGING_KEPT_BYTES_MAX:
            self._free.append(buffer)


class Batch:
    """One batch: what is in it, where it lies, how far it got. See `asynckv.tiers.base.LogBatch`."""

    __slots__ = (
        "carries",
        "clear",
        "empty",
        "end",
        "fields",
        "future",
        "home",
        "piece",
        "placed",
        "plan",
        "rest_carries",
        "rest_spills",
        "rest_tombstones",
        "spills",
        "state",
        "tombstones",
    )

    def __init__(
        self,
        home: Segment,
        plan: BatchPlan,
        spills: list[Spill],
        tombstones: list[WireKey],
        carries: list[CarryItem],
        fields: dict[str, int],
    ) -> None:
        self.home = home
        self.plan: BatchPlan | None = plan
        self.spills = spills[: plan.spills]
        self.rest_spills = spills[plan.spills :]
        self.tombstones = tombstones[: plan.tombstones]
        self.rest_tombstones = tombstones[plan.tombstones :]
        self.carries = carries[: plan.carries]
        self.rest_carries = carries[plan.carries :]
        self.fields = fields
        self.end = plan.position + plan.batch_bytes
        self.state = PENDING
        self.piece = b""  # its header, for the footer
        self.clear = bool(plan.clear)
        self.empty = bool(plan.empty)  # nothing found room
        self.placed = False  # it has an area of the segment
        self.future: asyncio.Future[Any] | None = None

    @property
    def segment(self) -> int:
        """Number of the segment."""
        return self.home.number

    def forget(self) -> None:
        """Let go of the blocks; what the footer needs stays, and the tombstones until they are durable."""
        self.spills, self.rest_spills, self.carries, self.rest_carries = [], [], [], []
        self.rest_tombstones = []
        self.plan = None


class LogWriter:
    """Composes, writes, syncs and seals."""

    def __init__(self, segments: SegmentSet, table: Table) -> None:
        self.set = segments
        self.table = table
        self.backend = segments.backend
        self.sequence = 1
        self.wanted = 0  # stored bytes of a block that found no room last time
        self.staging = Staging()
        self._taken_back: OSError | None = None  # why batches were reverted since the last sync of the log

    # -- room ----------------------------------------------------------------------------------------------------

    def fits(self, nbytes: int) -> bool:
        """Whether the active segment takes a batch that begins with a block of so many stored bytes."""
        segment = self.set.active
        if segment is None or segment.failed or segment.sealing is not None:
            return False
        after = segment.position + 2 * PAGE_BYTES + pages(nbytes)
        return bool(after + footer_bound(segment.body_sum + PAGE_BYTES) + PAGE_BYTES <= segment.size)

    @staticmethod
    def largest_block(segment_bytes: int) -> int:
        """Largest stored length that an empty segment takes."""
        room = segment_bytes - LOG_START - 2 * PAGE_BYTES - footer_bound(PAGE_BYTES) - PAGE_BYTES
        return int(room // PAGE_BYTES * PAGE_BYTES)

    # -- batches -------------------------------------------------------------------------------------------------

    def compose(
        self,
        spills: Iterable[Spill],
        tombstones: Iterable[WireKey],
        clear: bool = False,
        carries: Iterable[CarryItem] = (),
        *,
        empty_ok: bool = False,
    ) -> Batch:
        """Fix the place of a batch; what does not fit is in its ``rest_*``."""
        segment = self.set.active
        if segment is None or segment.failed or segment.sealing is not None:
            raise DiskError("no segment can take a batch", operation="write", errno=errno.EIO)
        self.table.reserve_segment(segment.slot)  # so that nothing is refused once the blocks are written
        spills, tombstones = list(spills), list(tombstones)
        carries = [each for each in carries if self.table.carry_current(each.carry)]
        plan = plan_batch(spills, carries, tombstones, clear, segment.position, segment.size, segment.body_sum)
        self._settle(segment)
        fields = self._fields(segment, self.sequence, segment.synced, segment.good)
        batch = Batch(segment, plan, spills, tombstones, carries, fields)
        self.wanted = batch.rest_spills[0].stored if batch.rest_spills else 0
        if plan.empty and not empty_ok:
            return batch
        if batch.end + PAGE_BYTES > segment.size:
            raise DiskError("the segment is full", operation="write", errno=errno.ENOSPC)
        self.sequence += 1
        segment.position = batch.end
        segment.body_sum += plan.body_bound
        segment.batches.append(batch)
        batch.placed = True
        return batch

    def _fields(self, segment: Segment, sequence: int, synced: int, good: int) -> dict[str, int]:
        """What batches and claims say of their segment and the one before."""
        return {
            "sequence": sequence,
            "oldest_live": self.set.oldest_live,
            "synced": synced,
            "good": good,
            "sealed_upto": min(self.set.sealed_upto(), segment.number),
            "previous": segment.header.previous if segment.header is not None else 0,
            "previous_good": segment.before.good if segment.before is not None else 0,
        }

    def submit(
        self, batch: Batch, *, released: Callable[[], object] | None = None
    ) -> asyncio.Future[list[tuple[int, int, int]]]:
        """Write a batch. The result is (slot, offset, checksum) per spill, then per carried block."""
        loop = asyncio.get_running_loop()
        result: asyncio.Future[list[tuple[int, int, int]]] = loop.create_future()
        segment = batch.home
        if not batch.placed:
            if released is not None:
                released()
            result.set_result([])
            return result
        plan, fields = batch.plan, batch.fields
        spills, carries, tombstones = batch.spills, batch.carries, batch.tombstones
        assert plan is not None
        try:
            buffer = self.staging.take(staging_bytes(plan, spills, carries))
        except BaseException:
            batch.state = FAILED  # its area stays a hole, nobody waits for it
            raise
        batch.future = result

        def prepare() -> tuple[Sequence[Any], Any]:
            buffers, checksums, piece = write_batch(plan, spills, carries, tombstones, buffer, segment.seed, **fields)
            return buffers, (checksums, piece)

        def on_released() -> None:
            self.staging.give(buffer)
            segment.release()
            if released is not None:
                released()

        def on_done(future: asyncio.Future[Any]) -> None:
            error: BaseException | None = asyncio.CancelledError() if future.cancelled() else future.exception()
            if error is None and (segment.failed or segment.retired):
                error = DiskError("the segment of this batch is given up", operation="write", errno=errno.EIO)
            if error is None:
                checksums, batch.piece = future.result()
                batch.state = WRITTEN
                self.set.starved = 0
                self.set.bytes_written += plan.batch_bytes
                places = [(segment.slot, offset, check) for offset, check in zip(plan.offsets, checksums, strict=True)]
            else:
                batch.state = FAILED
                self.set.refused(error)
            batch.forget()
            if result.done():  # the caller cancelled it; the batch counts all the same
                return
            if error is None:
                result.set_result(places)
            else:
                result.set_exception(error)

        segment.hold()
        written = self.backend.write(segment.file, plan.position, prepare, released=on_released)  # type: ignore[arg-type]
        written.add_done_callback(on_done)
        return result

    # -- durability ----------------------------------------------------------------------------------------------

    @staticmethod
    def _ended(segment: Segment, synced: Collection[Batch] = ()) -> tuple[int, int, int]:
        """How many batches from the front have ended, where they end, how many of them are durable or in `synced`."""
        index, end, good = segment.synced_index, segment.synced, segment.good
        for batch in segment.batches[index:]:
            durable = batch.state == DURABLE or batch in synced
            if not durable and batch.state != FAILED:
                break
            index, end, good = index + 1, batch.end, good + durable
        return index, end, good

    def _settle(self, segment: Segment) -> None:
        """Move `synced` up over batches that ended."""
        segment.synced_index, segment.synced, segment.good = self._ended(segment)

    async def sync(self) -> None:
        """Make everything durable whose write completed before the call.

        Raises
        ------
        DiskError
            A segment could not be synced, now or since the last call; its blocks that were not durable before are dirty
            again.
        """
        due = [s for s in self.set.own() if any(batch.state == WRITTEN for batch in s.batches[s.synced_index :])]
        results = await asyncio.gather(*(self.sync_segment(segment) for segment in due), return_exceptions=True)
        taken_back, self._taken_back = self._taken_back, None
        for result in (*results, taken_back):
            if isinstance(result, OSError):
                raise DiskError("a segment could not be synced", operation="sync", errno=result.errno) from result
            if isinstance(result, BaseException):
                raise result

    async def sync_segment(self, segment: Segment) -> None:
        """Make the completed batches of one segment durable."""
        async with segment.sync_lock:
            written = [batch for batch in segment.batches[segment.synced_index :] if batch.state == WRITTEN]
            if segment.failed:
                if written:
                    self._revert(segment)
                raise DiskError("an earlier sync of the segment failed", operation="sync", errno=errno.EIO)
            if not written:
                return
            try:
                file = await self.set.open_file(segment)
                await self.backend.sync(file)
                await self._claim(segment, file, written)
            except OSError as error:  # a timeout is one, too
                self._sync_failed(segment, error)
                raise
            for batch in written:
                if batch.state == WRITTEN:
                    batch.state = DURABLE
                    batch.tombstones = []
            self._settle(segment)

    async def _claim(self, segment: Segment, file: File, synced: list[Batch]) -> None:
        """Note on disk what is durable, those that were just synced included."""
        assert segment.header is not None
        _, end, good = self._ended(segment, synced)
        fields = self._fields(segment, segment.header.sequence, end, good)
        page = RecordWriter().to_bytes(KIND_CLAIM, segment.seed, CLAIM_AT, **fields)
        segment.hold()
        await self.backend.write(file, CLAIM_AT, [page], released=segment.release)
        self.set.bytes_written += len(page)

    def _sync_failed(self, segment: Segment, error: OSError) -> None:
        if any(batch.state == WRITTEN and not batch.empty for batch in segment.batches[segment.synced_index :]):
            self._taken_back = error
        segment.failed = True
        if self.set.active is segment:
            self.set.active = None
        self._revert(segment)
        # Whoever was told of a finished write in this turn of the loop notes its place first.
        asyncio.get_running_loop().call_soon(self._revert, segment)

    def _revert(self, segment: Segment) -> None:
        for batch in segment.batches[segment.synced_index :]:
            if batch.state == WRITTEN:
                batch.state = FAILED
                self.table.return_owed(batch.tombstones)
        if segment.slot >= 0:
            self.table.revert_segment(segment.slot, segment.synced)

    # -- sealing -------------------------------------------------------------------------------------------------

    async def seal(self, segment: Segment, following: int = 0) -> None:
        """Close a segment of this opening: footer, seal, truncated, durable.

        Parameters
        ----------
        segment
            No longer the active one.
        following
            Number of the segment that took its place, 0 for none.

        Raises
        ------
        OSError
            Something failed; the segment stays readable as it is, and the next recovery seals it.
        """
        pending = [b.future for b in segment.batches if b.state == PENDING and b.future is not None]
        if pending:
            await asyncio.wait(pending)
        await self.sync_segment(segment)
        self._settle(segment)
        assert segment.header is not None
        batches = [batch for batch in segment.batches if batch.state == DURABLE]
        last = batches[-1].fields["sequence"] if batches else segment.header.sequence
        pieces = [batch.piece for batch in batches]
        good = segment.before.good if segment.before is not None else 0
        end = segment.position
        await self.write_seal(segment, pieces, len(batches), last, previous_good=good, durable=end, following=following)
        segment.batches.clear()
        segment.synced_index = 0
        segment.before = None

    async def write_seal(
        self,
        segment: Segment,
        pieces: list[Any],
        batches: int,
        last_sequence: int,
        *,
        previous_good: int,
        durable: int,
        following: int = 0,
        lossy: bool = False,
    ) -> None:
        """Write footer and seal at the segment's position, from pieces of batches or parsed records."""
        header = segment.header
        assert header is not None
        header = replace(header, oldest_live=min(self.set.oldest_live, segment.number))
        start, seed = segment.position, segment.seed

        def prepare() -> tuple[Sequence[Any], int]:
            ending = footer_and_seal(
                header,
                pieces,
                start,
                seed,
                batches,
                last_sequence,
                previous_good=previous_good,
                durable=durable,
                following=following,
                lossy=lossy,
            )
            return ending, start + sum(map(len, ending))

        file = await self.set.open_file(segment)
        segment.hold()
        end = await self.backend.write(file, start, prepare, released=segment.release)
        self.set.bytes_written += end - start
        await self.backend.sync(file)
        await self.backend.truncate(file, end)
        await self.backend.sync(file)
        segment.size = end
        segment.sealed = True
        try:
            size, allocated = await self.backend.stat(segment.name)
        except OSError:
            return  # charged in full until the next opening
        segment.charge = max(size, allocated)


def footer_and_seal(
    header: SegmentHeader,
    pieces: list[Any],
    start: int,
    seed: int,
    batches: int,
    last_sequence: int,
    *,
    previous_good: int,
    durable: int,
    following: int,
    lossy: bool,
) -> list[bytes]:
    """Encode what ends a segment, to be written from `start` on; the header says whose it is. Runs in a worker."""
    chunks, footer, footer_bytes, records = _footer_pieces(pieces, start, seed, batches, last_sequence)
    seal = Seal(
        store_id=header.store_id,
        namespace=header.namespace,
        number=header.number,
        oldest_live=header.oldest_live,
        sequence=header.sequence,
        size=header.size,
        offset=start + sum(map(len, chunks)),
        data_end=start,
        durable=durable,
        footer=footer,
        footer_bytes=footer_bytes,
        batches=batches,
        last_sequence=last_sequence,
        records=records,
        previous=header.previous,
        previous_good=previous_good,
        next=following,
        lossy=lossy,
    )
    return [*chunks, seal.encode()]


def _footer_pieces(
    pieces: list[Any], start: int, seed: int, batches: int, last_sequence: int
) -> tuple[list[bytes], int, int, int]:
    """Encode a footer: (chunks, offset of the last chunk, its bytes, records in all). Runs in a worker."""
    chunks: list[bytes] = []
    place, before, before_bytes, total = start, 0, 0, 0
    writer = RecordWriter()

    def close() -> None:
        nonlocal place, before, before_bytes, total, writer
        chunk = writer.to_bytes(
            KIND_FOOTER,
            seed,
            place,
            payload_bytes=batches,
            sequence=last_sequence,
            synced=before,
            good=before_bytes,
        )
        total += writer.count
        chunks.append(chunk)
        before, before_bytes = place, len(chunk)
        place += len(chunk)
        writer = RecordWriter()

    for piece in pieces:
        writer.add_records(parse_piece(piece) if isinstance(piece, bytes) else piece)
        if writer.body_bytes >= FOOTER_CLOSE_BYTES:
            close()
    if writer.count:
        close()
    return chunks, before, before_bytes, total
