"""What an opening finds in the directory, and puts in order before the store serves.

Invariants
----------
* Whatever is there, opening ends and serves; only ``strict`` refuses. A disk that hangs is another matter: nothing is
  served from one where a write of the owner before is still under way after the deadline.
* A file name in our pattern is a segment, whatever is in it; files of other names are counted and left alone.
* A write of the owner before may reach the disk after that process has died. A file that it may have been writing to
  is settled before it is believed or used again, so that the next opening does not find more than this one showed.
* New segments get numbers above every number that was ever seen, so a foreign or damaged file with a high number cannot
  hide ours: only its own bytes are ignored. Numbers that no store reaches are not believed, and such files removed.
* Below the cap, before anything is served: files that alone are above it go first, then the oldest segments.
* A shortage of our own (descriptors, memory) says nothing about the disk: the opening fails, and nothing is dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections import Counter
from typing import TYPE_CHECKING

from asynckv.backends.base import OUR_SHORTAGE
from asynckv.errors import CorruptStoreError, DiskError
from asynckv.tiers.layout import (
    LOCK_NAME,
    PAGE,
    SEGMENT_BYTES_MAX,
    SNAPSHOT_NAME,
    SPARE_NAME,
    STRANGER_MAX,
    SUPERBLOCK_NAME,
    Seal,
    SegmentHeader,
    decode_superblock,
    encode_superblock,
    pages,
    parse_segment_name,
)
from asynckv.tiers.segment import SEGMENTS_MAX, Segment, SegmentSet, Spare

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable

    from asynckv.backends.base import Backend, File
    from asynckv.clock import Clock
    from asynckv.tiers.directory import Directory
    from asynckv.tiers.reclaim import Reclaimer

__all__ = ["Opening"]

PEEKS_AT_ONCE = 16
NAME_BYTES = 64  # of the directory file, per segment


class Opening:
    """Reads the directory into a `SegmentSet`.

    Attributes
    ----------
    set
        The segments, own and foreign.
    displaced
        Numbers of segments of this namespace that were met under another name.
    unreadable
        Numbers of files that cannot be a whole segment of anybody.
    seals
        Seals of the sealed ones of this namespace, by number.
    next_sequence
        Above every sequence number in use.
    snapshot_size, snapshot_charge
        Of the index snapshot; -1 when there is none.
    damage
        Damaged places met so far.
    """

    def __init__(
        self,
        backend: Backend,
        directory: Directory,
        *,
        cap: int,
        segment_bytes: int,
        namespace: bytes,
        random: Callable[[int], bytes],
        clock: Clock,
        strict: bool,
        logger: logging.Logger,
    ) -> None:
        self.backend = backend
        self.directory = directory
        self.random = random
        self.strict = strict
        self.logger = logger
        self.set = SegmentSet(
            backend, cap=cap, segment_bytes=segment_bytes, store_id=b"", namespace=namespace, clock=clock, log=logger
        )
        self.seals: dict[int, Seal] = {}
        self.displaced: set[int] = set()
        self.unreadable: set[int] = set()
        self.next_sequence = 1
        self.snapshot_size = -1
        self.snapshot_charge = 0
        self.damage = 0

    def damaged(self, what: str) -> None:
        """Count a damaged place; raises in strict mode."""
        self.damage += 1
        self.logger.warning("asynckv: open: %s", what)
        if self.strict:
            raise CorruptStoreError(f"the store is damaged: {what}", tier="disk", operation="open")

    async def run(self) -> None:
        """Read superblock and segments, remove what is dead or stray of ours."""
        files = await self.backend.list()
        names = {name for name, _, _ in files}
        found: list[Segment] = []
        stray: list[str] = []
        overhead = self._fixed_overhead(names)
        for name, size, allocated in files:
            number = parse_segment_name(name)
            charge = max(size, allocated)
            if number is not None:
                found.append(Segment(number, size, charge, header=None, own=False))
            elif name == SPARE_NAME:
                await self._take_spare(size, charge)
            elif name.endswith(".tmp") and name[:-4] in (SUPERBLOCK_NAME, SNAPSHOT_NAME):
                stray.append(name)
            else:
                overhead += max(pages(size), allocated)
                if name == SNAPSHOT_NAME:
                    self.snapshot_size, self.snapshot_charge = size, max(pages(size), allocated)
        for name in stray:
            with contextlib.suppress(FileNotFoundError):
                await self.backend.unlink(name)
        self.set.overhead = overhead
        found.sort(key=lambda segment: segment.number)
        peeks = await self._peek_all(found)
        self.set.store_id = await self._store_id(names, [header for header, _ in peeks])
        for segment, (header, seal) in zip(found, peeks, strict=True):
            self._classify(segment, header, seal)
        await self._remove_dead()

    def _fixed_overhead(self, names: set[str]) -> int:
        entries = min(self.set.cap // self.set.segment_bytes + 8, SEGMENTS_MAX)
        total = max(self.directory.own_bytes, pages(entries * NAME_BYTES))
        total += PAGE * sum(1 for name in (SUPERBLOCK_NAME, LOCK_NAME) if name not in names)
        return total

    async def _take_spare(self, size: int, charge: int) -> None:
        if self.set.segment_bytes // 2 <= size <= self.set.segment_bytes:
            with contextlib.suppress(OSError):
                file = await self.backend.open(SPARE_NAME)
                await self.backend.settle(file)
                self.set.spare = Spare(file, size, charge)
                return
        await self.backend.unlink(SPARE_NAME)

    async def _peek_all(self, found: list[Segment]) -> list[tuple[SegmentHeader | None, Seal | None]]:
        limit = asyncio.Semaphore(PEEKS_AT_ONCE)

        async def one(segment: Segment) -> tuple[SegmentHeader | None, Seal | None]:
            async with limit:
                return await self._peek(segment)

        return await asyncio.gather(*(one(segment) for segment in found))

    async def _peek(self, segment: Segment) -> tuple[SegmentHeader | None, Seal | None]:
        """First and last page; of a segment that was still written to, once nothing is under way."""
        if not PAGE <= segment.size <= SEGMENT_BYTES_MAX:
            return None, None
        try:
            file = await self.backend.open(segment.name)
        except OSError as error:
            if error.errno in OUR_SHORTAGE:
                raise
            self.logger.warning("asynckv: a segment could not be opened: %s", error.strerror)
            return None, None
        try:
            header, seal = await self._ends(segment, file)
            if seal is None or segment.size == seal.size:  # a shorter one was durable before it was cut to its length
                await self._settle(file)
                header, seal = await self._ends(segment, file)
            return header, seal
        finally:
            with contextlib.suppress(OSError):
                await self.backend.close_file(file)

    async def _ends(self, segment: Segment, file: File) -> tuple[SegmentHeader | None, Seal | None]:
        last = segment.size // PAGE * PAGE - PAGE
        first_page, last_page = bytearray(PAGE), bytearray(PAGE)
        header = seal = None
        try:
            await self.backend.read(file, 0, memoryview(first_page))
            header = SegmentHeader.decode(bytes(first_page))
            segment.traced = SegmentHeader.traced(first_page)
            if last > 0:
                await self.backend.read(file, last, memoryview(last_page))
                seal = Seal.decode(bytes(last_page), last)
        except OSError as error:
            if error.errno in OUR_SHORTAGE:
                raise
            self.logger.warning("asynckv: a segment could not be read: %s", error.strerror)
        return header, seal

    async def _settle(self, file: File) -> None:
        try:
            await self.backend.settle(file)
        except TimeoutError as error:
            raise DiskError(
                "a write of the process that had the store before does not end", operation="open", errno=errno.ETIMEDOUT
            ) from error

    async def _store_id(self, names: set[str], headers: list[SegmentHeader | None]) -> bytes:
        """From the superblock; else what the segments agree on; else a new one, written."""
        if SUPERBLOCK_NAME in names:
            try:
                known = decode_superblock(await self.backend.read_file(SUPERBLOCK_NAME, 1 << 16))
            except OSError as error:
                if error.errno not in (errno.EFBIG, errno.EIO):
                    raise
                known = None
            if known is not None:
                return known
            self.damaged("the superblock is damaged")
        votes = Counter(header.store_id for header in headers if header is not None)
        if votes:
            if SUPERBLOCK_NAME not in names:
                self.damaged("the superblock is missing")
            store_id = votes.most_common(1)[0][0]
        else:
            store_id = self.random(16)
        await self.backend.write_file(SUPERBLOCK_NAME, encode_superblock(store_id))
        self.set.bytes_written += PAGE
        return store_id

    def _classify(self, segment: Segment, header: SegmentHeader | None, seal: Seal | None) -> None:
        ours = self.set.store_id
        if seal is not None and (seal.store_id != ours or seal.number != segment.number):
            seal = None
        if header is not None and (header.store_id != ours or header.number != segment.number):
            if header.store_id == ours and header.namespace == self.set.namespace:
                self.displaced.add(header.number)
            if seal is None:
                self.damaged(f"segment {segment.number} belongs to another store or another place")
                self._add(segment)
                return
            header = None
        if header is None and seal is not None:
            self.damaged(f"the header of segment {segment.number} is damaged")
            header = SegmentHeader(
                store_id=seal.store_id,
                namespace=seal.namespace,
                number=seal.number,
                oldest_live=seal.oldest_live,
                sequence=seal.sequence,
                size=seal.size,
                sealed_upto=0,
                previous=seal.previous,
            )
        if seal is not None and header is not None and seal.namespace != header.namespace:
            seal = None
        segment.header = header
        if header is None:
            # Perhaps ours with a bad first page: the scan tells. Absurd sizes and numbers are not worth one.
            segment.own = 2 * PAGE <= segment.size <= SEGMENT_BYTES_MAX and not self._absurd(segment)
            if not segment.own:
                self.damaged("a segment file is unreadable")
                if not segment.traced:
                    self.unreadable.add(segment.number)
            self._add(segment)
            return
        segment.own = header.namespace == self.set.namespace
        segment.first_sequence = header.sequence
        segment.sealed = seal is not None
        if segment.own and seal is not None:
            self.seals[segment.number] = seal
        self.set.oldest_live = max(self.set.oldest_live, header.oldest_live, seal.oldest_live if seal else 0)
        most = seal.last_sequence + 1 if seal else header.sequence + segment.size // (2 * PAGE) + 1
        self.next_sequence = max(self.next_sequence, most)
        self._add(segment)

    def _add(self, segment: Segment) -> None:
        before = self.set.next_number
        self.set.add(segment)
        if self._absurd(segment):
            self.set.next_number = before

    @staticmethod
    def _absurd(segment: Segment) -> bool:
        """Whether a number stands in a file's name alone and is too high to go on from: numbers must not run out."""
        return segment.header is None and segment.number >= STRANGER_MAX

    async def _remove_dead(self) -> None:
        dead = [s for s in self.set if s.number < self.set.oldest_live or self._absurd(s)]
        for segment in dead:
            await self._discard(segment)
        if dead:
            await self.backend.sync_directory()

    async def _discard(self, segment: Segment) -> None:
        with contextlib.suppress(FileNotFoundError):
            await self.backend.unlink(segment.name)
        segment.retired = True
        await self.set.bury(segment)
        self.seals.pop(segment.number, None)

    async def start_empty(self) -> None:
        """Give up every segment of this namespace, durably."""
        own = self.set.own()
        for segment in own:
            await self._discard(segment)
        if own:
            await self.backend.sync_directory()

    async def enforce_cap(self, reclaimer: Reclaimer) -> None:
        """Drop the oldest segments until the directory is below the cap.

        Raises
        ------
        DiskError
            It is not, even without any.
        """
        for stray in [s for s in self.set if not s.own and s.charge > self.set.cap]:
            await reclaimer.drop(stray)  # no store of this size has made it
        if self.set.charged > self.set.cap:
            await self.set.drop_spare()
        while self.set.charged > self.set.cap or len(self.set) > SEGMENTS_MAX:
            oldest = self.set.oldest()
            if oldest is None:
                break
            await reclaimer.drop(oldest)
            self.seals.pop(oldest.number, None)
        if self.set.charged > self.set.cap:
            await self.set.drop_spare()
        if self.set.charged > self.set.cap:
            raise DiskError(
                "other files in the directory leave no room below the disk cap", operation="open", errno=errno.ENOSPC
            )
