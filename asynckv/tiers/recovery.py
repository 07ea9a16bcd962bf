"""From the bytes of the segments back to the index, while the store already serves.

Invariants
----------
* Newest first: segments by number, batches and records from the last to the first. The first sight of a key, block or
  tombstone, is final; a clear ends everything before it. What the caller puts or removes meanwhile is newer than all.
* A torn batch is skipped, block by block: above the last claim of durability the payloads are read and verified, so a
  write that was cut off never hides the value that was flushed before it.
* When batches that had been durable are gone (both copies of a header), whatever is older may have been overwritten or
  removed by them. It is dropped, durably: a miss, never an old value. So is everything older than a clear, and
  everything when a file has the number of a newer segment, nothing of ours is left in it, and nothing shows that it
  was another namespace's.
* A segment without a seal gets one once it was read, so a crash while recovering costs no more than the same work
  again.
* Damage never raises, except with ``strict``; then the payloads of the whole namespace are verified as well.
"""

from __future__ import annotations

import asyncio
import errno
import mmap
from typing import TYPE_CHECKING, Any

from asynckv._record import CHUNK_MAX, apply_records
from asynckv.backends.base import NOT_ALLOWED, OUR_SHORTAGE
from asynckv.errors import CorruptStoreError, DiskError
from asynckv.tiers.evidence import proven_header
from asynckv.tiers.layout import PAGE
from asynckv.tiers.log import DURABLE
from asynckv.tiers.scan import Found, Scan, footer_chunk, scan_segment, verify_batch

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable, Generator

    from asynckv._core import Table
    from asynckv._record import Records
    from asynckv.tiers.layout import Seal, SegmentHeader
    from asynckv.tiers.log import Batch, LogWriter
    from asynckv.tiers.reclaim import Reclaimer
    from asynckv.tiers.segment import Segment, SegmentSet

__all__ = ["Recovery", "SegmentReader"]

PAGE_READS = 3  # tries of a page before it counts as unreadable
TIMEOUTS_MAX = 3  # in one recovery; a disk that hangs more often is given up


class SegmentReader:
    """Reads ranges of segments for scanners; what the disk does not give is zeros.

    Attributes
    ----------
    failed
        Pages that could not be read, since it was last cleared.
    """

    def __init__(self, segments: SegmentSet) -> None:
        self.set = segments
        self.backend = segments.backend
        self.timeouts = 0
        self.failed: list[int] = []
        self._buffer = memoryview(mmap.mmap(-1, CHUNK_MAX))

    async def run(self, segment: Segment, scanner: Generator[tuple[int, int], memoryview, Any]) -> Any:
        """Feed a scanner until it returns."""
        try:
            want = next(scanner)
            while True:
                want = scanner.send(await self.read(segment, *want))
        except StopIteration as end:
            return end.value

    async def read(self, segment: Segment, offset: int, length: int) -> memoryview:
        """Bytes of a range of whole pages; valid until the next call.

        Raises
        ------
        TimeoutError
            The disk hangs, again and again.
        """
        if await self._into(segment, offset, self._buffer[:length]):
            return self._buffer[:length]
        whole = memoryview(mmap.mmap(-1, CHUNK_MAX))  # a stuck engine may still write into the one before
        for start in range(0, length, PAGE):
            for _ in range(PAGE_READS):
                page = memoryview(mmap.mmap(-1, PAGE))
                if await self._into(segment, offset + start, page):
                    whole[start : start + PAGE] = page
                    break
            else:
                self.failed.append(offset + start)
        self._buffer = whole
        return whole[:length]

    async def _into(self, segment: Segment, offset: int, view: memoryview) -> bool:
        try:
            file = await self.set.open_file(segment)
            segment.hold()
            await self.backend.read(file, offset, view, released=segment.release)
        except TimeoutError as error:
            self.set.met(error)
            self.timeouts += 1
            if self.timeouts > TIMEOUTS_MAX:
                raise
            return False
        except OSError as error:
            if error.errno in OUR_SHORTAGE | NOT_ALLOWED:
                raise DiskError(
                    f"{segment.name!r} could not be read: {error.strerror}", operation="recover", errno=error.errno
                ) from error
            self.set.met(error)
            return False
        return True


class Recovery:
    """One scan of a store's own namespace.

    Attributes
    ----------
    damage
        Damaged places that were met.
    corrupt_blocks
        Blocks whose bytes were found damaged, and places that have taken blocks with them.
    stopped
        Set when the caller cleared the namespace: nothing older counts.
    """

    def __init__(
        self,
        segments: SegmentSet,
        log: LogWriter,
        reclaimer: Reclaimer,
        table: Table,
        seals: dict[int, Seal],
        displaced: set[int],
        unreadable: set[int],
        *,
        strict: bool,
        logger: logging.Logger,
    ) -> None:
        self.set = segments
        self.log = log
        self.reclaimer = reclaimer
        self.table = table
        self.seals = seals
        self.strict = strict
        self.logger = logger
        self.reader = SegmentReader(segments)
        self.damage = 0
        self.corrupt_blocks = 0
        self.stopped = False
        self._clear: Batch | None = None  # the one that holds the caller's clear
        self._cut = False  # nothing older than this counts
        self._sealed_upto = 0  # segments up to this number had been sealed
        self._previous: int | None = None  # the number that the next older segment has to have
        self._previous_good = 0  # batches that it has to have at least
        self._displaced = displaced
        self._unreadable = set(unreadable)
        self._present = [segment for segment in segments.own() if segment is not segments.active]

    def damaged(self, what: str) -> None:
        """Count a damaged place.

        Raises
        ------
        CorruptStoreError
            In strict mode.
        """
        self.damage += 1
        self.logger.warning("asynckv: recovery: %s", what)
        if self.strict:
            raise CorruptStoreError(f"the store is damaged: {what}", tier="disk", operation="open")

    def _gone(self, what: str) -> None:
        """Count damage that has taken blocks, nobody knows how many."""
        self.corrupt_blocks += 1
        self.damaged(what)

    async def run(self, progress: Callable[[], None]) -> None:
        """Recover every segment that was there at open."""
        for segment in reversed(self._present):
            if self.stopped:
                break
            self._check_chain(segment)
            if self._cut or segment.number < self.set.oldest_live:
                if segment.header is None:  # perhaps another namespace's, whose recovery has to see that it is lost
                    self.set.disown(segment)
                    continue
                await self._drop(segment)
                continue
            try:
                await self._segment(segment)
            except TimeoutError as error:  # nothing is known to be damaged: what is older stays for the next opening
                raise DiskError(
                    f"segment {segment.number} could not be read in time", operation="recover", errno=errno.ETIMEDOUT
                ) from error
            progress()
            await asyncio.sleep(0)
        self.set.doubtful = 0

    def stop(self, clear: Batch) -> None:
        """The caller cleared the namespace, with a record in this batch."""
        self.stopped = True
        self._clear = clear

    async def drop_cleared(self) -> None:
        """Drop the segments that a clear made needless to recover, once it is durable: so that all are sealed."""
        if self._clear is None or not self._clear.clear or self._clear.state != DURABLE:
            return
        for segment in self.set.own():
            if segment not in self._present or segment.sealed:
                continue
            if segment.header is None:  # as in `run`
                self.set.disown(segment)
            elif not await self._drop(segment):
                return

    def _check_chain(self, segment: Segment) -> None:
        """Hold a segment against what newer ones say of the one before them: none may be missing between."""
        if self._cut or segment.number < self.set.oldest_live:
            return
        if self._previous is not None:  # a newer one knows which was the one before: what else was to be one never was
            if segment.number < self._previous:
                self._cut = True
                self._gone(f"segment {self._previous} is missing")
            return
        known = {each.number for each in self._present}
        if any(number > segment.number and number not in known for number in self._displaced):
            self._cut = True
            self._gone("a segment newer than others has lost its name")
        elif segment.header is not None and max(self._unreadable, default=0) > segment.number:
            self._cut = True
            self._gone("a segment newer than others is unreadable")

    async def _drop(self, segment: Segment) -> bool:
        try:
            await self.reclaimer.drop(segment, recycle=False)  # the writer may be making the spare file
        except OSError as error:
            self.set.met(error)
            self.logger.warning("asynckv: a dead segment could not be removed: %s", error)
            self.table.log_unknown = True
            self.reclaimer.condemned.append(segment)
            return False
        return True

    async def _segment(self, segment: Segment) -> None:
        header = segment.header
        if header is not None and self._unknown_to_newer(segment):
            await self._drop(segment)
            return
        if header is not None:
            self._sealed_upto = max(self._sealed_upto, header.sealed_upto)
        seal = self.seals.get(segment.number)
        if seal is not None:
            if self._previous is None and seal.next > segment.number and seal.next >= self.set.oldest_live:
                self._cut = True
                self._gone(f"segment {seal.next} is missing")
                await self._drop(segment)
                return
            self._previous, self._previous_good = seal.previous, seal.previous_good
        listed = False
        if seal is not None:
            walked = await self._footer(segment, seal)
            listed = walked is not None
            if not listed:
                self.damaged(f"the footer of segment {segment.number} is damaged")
            elif not self.strict:
                self._cut |= bool(walked) or seal.lossy
                return
        elif segment.number <= self._sealed_upto:
            self.damaged(f"the seal of segment {segment.number} is damaged")
        await self._scan(segment, seal, listed=listed)

    def _unknown_to_newer(self, segment: Segment) -> bool:
        """Whether newer segments do not know of it: it was given up before they were made."""
        return self._previous is not None and segment.number > self._previous

    # -- sealed segments -----------------------------------------------------------------------------------------

    async def _footer(self, segment: Segment, seal: Seal) -> bool | None:
        """Apply a footer, last chunk first (strict: only check it); whether a clear was met. None when it is damaged.

        Chunks that were applied before a damaged one stay: they are the newest records, and a scan meets them first.
        """
        offset, length, left = seal.footer, seal.footer_bytes, seal.records
        while length:
            if length > CHUNK_MAX or length % PAGE or offset % PAGE:
                return None
            data = await self.reader.read(segment, offset, length)
            chunk = footer_chunk(data, offset, segment.seed, seal)
            if chunk is None:
                return None
            records, offset, length = chunk
            left -= len(records)
            if not self.strict and self._apply(segment, records):
                return True
            del records
            await asyncio.sleep(0)
        return None if left else False

    def _apply(self, segment: Segment, records: Records) -> bool:
        """Tell the table; whether a clear was met."""
        if self.stopped:
            return False
        _, cleared = apply_records(self.table, records, segment.slot)
        return bool(cleared)

    # -- other segments ------------------------------------------------------------------------------------------

    async def _scan(self, segment: Segment, seal: Seal | None, *, listed: bool) -> None:
        """Apply what the batches say; `listed` when the footer is whole, and says the same."""
        self.reader.failed.clear()
        scan: Scan = await self.reader.run(segment, scan_segment(segment.size, segment.seed))
        unread = scan.unread(self.reader.failed)
        nameless = segment.header is None
        header = self._header(segment, scan)
        if header is None:
            self._gone(f"segment {segment.number} is unreadable")
            self.set.doubtful = max(self.set.doubtful, segment.number)
            self.set.disown(segment)
            self._unreadable.add(segment.number)
            return
        if nameless:  # only now is it known to be ours
            self._check_chain(segment)
            if self._cut or self._unknown_to_newer(segment):
                await self._drop(segment)
                return
        for found in scan.batches:
            self._sealed_upto = max(self._sealed_upto, int(found.header.sealed_upto))
            self.set.oldest_live = max(self.set.oldest_live, int(found.header.oldest_live))
        ended = segment.number <= self._sealed_upto or segment.size < header.size
        cut = scan.loss(header, seal, self._previous_good, ended=ended)
        limit = scan.known_durable(header, seal, self._previous_good, ended=ended)
        if seal is None:
            self._previous = header.previous
            self._previous_good = scan.previous_good
        if cut is not None:
            self._gone(f"segment {segment.number} lost batches that had been written")
        if unread is not None:  # what cannot be read may be newer than all that lies before it
            self.damaged(f"segment {segment.number} cannot be read at some places")
            cut = unread if cut is None else max(cut, unread)
        lossy = cut is not None or scan.is_lossy(header, seal)
        self._cut |= lossy
        told = None if listed else scan.seal_of(header, seal)
        trusted = await self._verified(segment, scan, 0 if cut is None else cut, limit, told)
        for _, records in reversed(trusted):
            if self._apply(segment, records):
                self._cut = True
                break
            await asyncio.sleep(0)
        if self.stopped:
            return
        await self._reseal(segment, scan, trusted, durable=limit, lossy=lossy)

    def _header(self, segment: Segment, scan: Scan) -> SegmentHeader | None:
        """The segment's header, or one that its claim or records prove; None when nothing in it is ours."""
        first = scan.batches[0].header if scan.batches else scan.claim_page
        if segment.header is None and first is not None:
            segment.header = proven_header(
                self.set.store_id, self.set.namespace, segment.number, self.set.segment_bytes, first
            )
            self.damaged(f"the header of segment {segment.number} is damaged")
        return segment.header

    async def _verified(
        self, segment: Segment, scan: Scan, first: int, limit: int, seal: Seal | None
    ) -> list[tuple[Found, Records]]:
        """Parsed batches from one on. Payloads that may be torn are verified; records of torn ones are left out.

        The seal is that of a damaged footer: it tells whether they were torn by then or are damaged since.
        """
        result: list[tuple[Found, Records]] = []
        torn: list[tuple[Records, list[int]]] = []
        known = scan.durable(limit)
        for found in scan.batches[first:]:
            records = found.records()
            durable = found.offset in known
            bad: list[int] = []
            if found.repaired and durable:
                self.damaged(f"a batch header of segment {segment.number} is damaged")
            if not durable or self.strict:
                self.reader.failed.clear()
                bad = await self.reader.run(segment, verify_batch(found))
                if self.reader.failed:  # who cannot read does not know: a get will tell
                    self.damaged(f"a block of segment {segment.number} cannot be read")
                    bad = []
                if durable:
                    self._corrupt(segment, len(bad))
                    bad = []
            result.append((found, records))
            torn.append((records, bad))
        if not scan.leave_out_torn(seal, torn):  # a get misses them, and does not find the value before
            self._corrupt(segment, sum(len(bad) for _, bad in torn))
        return result

    def _corrupt(self, segment: Segment, blocks: int) -> None:
        for _ in range(blocks):
            self.corrupt_blocks += 1
            self.damaged(f"a block of segment {segment.number} is damaged")

    async def _reseal(
        self, segment: Segment, scan: Scan, trusted: list[tuple[Found, Records]], *, durable: int, lossy: bool
    ) -> None:
        """Give the segment a seal; an empty one as well, because others may name it."""
        if segment.sealed and not self.damage:
            return
        try:
            file = await self.set.open_file(segment)
            await self.set.backend.sync(file)
            segment.position = scan.end
            last = trusted[-1][0].header.sequence if trusted else (segment.header.sequence if segment.header else 0)
            await self.log.write_seal(
                segment,
                [records for _, records in trusted],
                len(trusted),
                int(last),
                previous_good=scan.previous_good,
                durable=min(durable, scan.end),
                lossy=lossy,
            )
        except OSError as error:
            self.set.met(error)
            self.logger.warning("asynckv: a recovered segment could not be sealed: %s", error)
            self.table.log_unknown = True  # the next opening may believe records that this one left out
