"""What an opening finds in the directory, and puts in order before the store serves.

Invariants
----------
* Whatever is there, opening ends and serves; only ``strict`` refuses. A disk that hangs is another matter: nothing is
  served from one where a write of the owner before is still under way after the deadline.
* A file name in our pattern is a segment, whatever is in it; files of other names are counted and left alone.
* A write of the owner before may reach the disk after that process has died. A file that it may have been writing to
  is settled before it is believed or used again, so that the next opening does not find more than this one showed.
* New segments get numbers above every number that this store can have used: so nothing that lies there hides ours. A
  file far above all that the store's own pages name is a stray one: it waits for its room to be needed, first of all.
* Whose a file without header and seal was, another namespace's claim or pages may tell. While they do not, it counts as
  ours, the newest perhaps, which is for recovery to judge.
* What has one of our names and is no file is never followed or opened, and nothing of somebody else's is removed.
* Below the cap, before anything is served: files that alone are above it go first, then the oldest segments.
* A shortage of our own (descriptors, memory), a file that we may not open, a disk that does not answer: they say
  nothing about the bytes. The opening fails, and nothing is dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
from dataclasses import dataclass
from typing import TYPE_CHECKING

from asynckv.backends.base import NOT_ALLOWED, OUR_SHORTAGE
from asynckv.config import SEGMENTS_MAX
from asynckv.errors import CorruptStoreError, DiskError
from asynckv.tiers.evidence import Evidence, named, own_pages, scannable, voted_id
from asynckv.tiers.layout import (
    CLAIM_AT,
    LOCK_NAME,
    PAGE,
    SEGMENT_BYTES_MAX,
    SNAPSHOT_NAME,
    SPARE_NAMES,
    SUPERBLOCK_NAME,
    Seal,
    SegmentHeader,
    decode_superblock,
    encode_superblock,
    pages,
    parse_segment_name,
)
from asynckv.tiers.segment import Segment, SegmentSet, Spare
from asynckv.tiers.snapshot import peek_snapshot

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


@dataclass(slots=True)
class _Peek:
    """What the fixed pages of a segment file say; when not that they are its own, what may tell whose it was."""

    header: SegmentHeader | None = None
    seal: Seal | None = None
    space: bytes = b""  # the namespace in its damaged first page
    claim: bytes = b""


class Opening:
    """Reads the directory into a `SegmentSet`.

    Attributes
    ----------
    set
        The segments, own and foreign.
    displaced
        Numbers of segments of this namespace that were met under another name, or that a snapshot lists and are gone.
    unreadable
        Numbers of files that are no segment any more and may have been one of this namespace.
    seals
        Seals of the sealed ones of this namespace, by number.
    next_sequence
        Above every sequence number in use.
    snapshot_size, snapshot_charge
        Of the index snapshot; -1 when there is none.
    snapshot_whole
        Every segment that it lists has a file.
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
        self._evidence = Evidence(b"")
        self._dark: tuple[str, OSError] | None = None  # a segment that the disk did not give
        self._claimed: set[int] = set()  # numbers of segments with a damaged first page that have a claim of ours
        self.snapshot_size = -1
        self.snapshot_charge = 0
        self.snapshot_whole = True
        self.damage = 0

    def damaged(self, what: str) -> None:
        """Count a damaged place; raises in strict mode."""
        self.damage += 1
        self.logger.warning("asynckv: open: %s", what)
        if self.strict:
            raise CorruptStoreError(f"the store is damaged: {what}", tier="disk", operation="open")

    async def run(self) -> None:
        """Read superblock and segments, remove what is dead or stray of ours."""
        self.directory.close_to_others()
        in_the_way = self.directory.clear_way()
        for name in in_the_way:
            self.damaged(f"{name!r} is not a file")
        if set(SPARE_NAMES) <= set(in_the_way):
            raise _blocked("no segment can be made", SPARE_NAMES[0])
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
            elif name in SPARE_NAMES:
                await self._take_spare(name, size, charge)
            elif name.endswith(".tmp") and name[:-4] in (SUPERBLOCK_NAME, SNAPSHOT_NAME):
                stray.append(name)
            else:
                charge = max(pages(size), allocated)
                overhead += charge
                if name == SNAPSHOT_NAME:
                    self.snapshot_size, self.snapshot_charge = size, charge
        for name in stray:
            with contextlib.suppress(FileNotFoundError):
                await self.backend.unlink(name)
        self.set.overhead = overhead
        peeks = await self._peek_all(found)
        self.set.store_id = await self._store_id(names, in_the_way, peeks)
        evidence = self._evidence = Evidence(self.set.store_id)
        for peek in peeks:
            evidence.learn(peek.header, peek.seal)
        if self.snapshot_size >= 0:
            await self._learn_snapshot({segment.number for segment in found})
        ours = self.set.namespace
        for segment, peek in zip(found, peeks, strict=True):
            if evidence.learn_claim(segment.number, peek.claim, (ours, peek.space)) == ours:
                self._claimed.add(segment.number)
            await asyncio.sleep(0)
        both = sorted(zip(found, peeks, strict=True), key=lambda each: (not self._is_stray(each[0]), each[0].number))
        for segment, peek in both:
            self._classify(segment, peek)
            (self.set.keep if self._is_stray(segment) else self.set.add)(segment)
        self.set.next_number = max(self.set.next_number, evidence.highest + 1)
        await self._remove_dead()
        gone = self.unreadable | self.displaced | {seal.next for seal in self.seals.values()}
        self.set.doubtful = max(gone, default=0)
        self.set.shared = bool(evidence.named.keys() - {self.set.namespace})

    async def _learn_snapshot(self, present: set[int]) -> None:
        """Note which segments there were when the snapshot was written."""
        try:
            head = await peek_snapshot(self.backend, self.snapshot_size)
        except OSError as error:
            if error.errno in OUR_SHORTAGE:
                raise
            self.set.met(error)
            self.snapshot_whole = False
            return
        self._evidence.learn_snapshot(head)
        if head is None or head.store_id != self.set.store_id:
            return
        gone = {number for number, _ in head.segments} - present
        self.snapshot_whole = not gone
        if head.namespace == self.set.namespace:
            self.displaced |= gone

    def _fixed_overhead(self, names: set[str]) -> int:
        entries = min(self.set.cap // self.set.segment_bytes + 8, SEGMENTS_MAX)
        total = max(self.directory.own_bytes, pages(entries * NAME_BYTES))
        total += PAGE * sum(1 for name in (SUPERBLOCK_NAME, LOCK_NAME) if name not in names)
        return total

    async def _take_spare(self, name: str, size: int, charge: int) -> None:
        if self.set.spare is None and self.set.segment_bytes // 2 <= size <= self.set.segment_bytes:
            with contextlib.suppress(OSError):
                file = await self.backend.open(name)
                if await self.set.has_one_name(file):
                    await self.backend.settle(file)
                    self.set.spare, self.set.spare_name = Spare(file, size, charge), name
                    return
                await self.backend.close_file(file)
        await self.backend.unlink(name)

    async def _peek_all(self, found: list[Segment]) -> list[_Peek]:
        limit = asyncio.Semaphore(PEEKS_AT_ONCE)

        async def one(segment: Segment) -> _Peek:
            async with limit:
                return await self._peek(segment)

        return await asyncio.gather(*(one(segment) for segment in found))

    async def _peek(self, segment: Segment) -> _Peek:
        """First and last page; of a segment that was still written to, once nothing is under way."""
        if not PAGE <= segment.size <= SEGMENT_BYTES_MAX:
            return _Peek()
        try:
            file = await self.backend.open(segment.name)
        except OSError as error:
            if error.errno in OUR_SHORTAGE:
                raise
            if error.errno in NOT_ALLOWED or isinstance(error, TimeoutError):
                raise _refused(segment.name, "opened", error) from error
            self.set.met(error)
            self.logger.warning("asynckv: a segment could not be opened: %s", error.strerror)
            self._dark = segment.name, error
            return _Peek()
        try:
            peek = await self._ends(segment, file)
            if peek.seal is None or segment.size == peek.seal.size:  # a shorter one was durable before it was cut
                await self._settle(file)
                peek = await self._ends(segment, file)
            return peek
        finally:
            with contextlib.suppress(OSError):
                await self.backend.close_file(file)

    async def _ends(self, segment: Segment, file: File) -> _Peek:
        last = segment.size // PAGE * PAGE - PAGE
        first_page = await self._page(file, 0)
        peek = _Peek(SegmentHeader.decode(first_page))
        if last > 0:
            peek.seal = Seal.decode(await self._page(file, last), last)
        if last > CLAIM_AT and not named(segment.number, peek.header, peek.seal):
            peek.space = SegmentHeader.named_space(first_page)
            peek.claim = await self._page(file, CLAIM_AT)
        return peek

    async def _page(self, file: File, offset: int) -> bytes:
        """One page; zeros where the disk does not give it."""
        page = bytearray(PAGE)
        try:
            await self.backend.read(file, offset, memoryview(page))
        except TimeoutError as error:
            raise _refused(file.name, "read", error) from error
        except OSError as error:
            if error.errno in OUR_SHORTAGE:
                raise
            self.set.met(error)
            self.logger.warning("asynckv: a segment could not be read: %s", error.strerror)
            self._dark = file.name, error
            return bytes(PAGE)
        return bytes(page)

    async def _settle(self, file: File) -> None:
        try:
            await self.backend.settle(file)
        except TimeoutError as error:
            raise DiskError(
                "a write of the process that had the store before does not end", operation="open", errno=errno.ETIMEDOUT
            ) from error

    async def _store_id(self, names: set[str], in_the_way: list[str], peeks: list[_Peek]) -> bytes:
        """From the superblock; else what the segments agree on; else a new one, written.

        Not while the disk does not give what may tell: a new one makes all that is there another store's.
        """
        if SUPERBLOCK_NAME in names:
            try:
                known = decode_superblock(await self.backend.read_file(SUPERBLOCK_NAME, 1 << 16))
            except OSError as error:
                if error.errno in NOT_ALLOWED:
                    raise _refused(SUPERBLOCK_NAME, "opened", error) from error
                if error.errno not in (errno.EFBIG, errno.EIO):
                    raise
                self.set.met(error)
                known = None
            if known is not None:
                return known
            self.damaged("the superblock is damaged")
        store_id = voted_id(page for peek in peeks for page in (peek.header, peek.seal))
        if not store_id and self._dark is not None:
            raise _refused(self._dark[0], "read, nor any other page that names the store", self._dark[1])
        if store_id and SUPERBLOCK_NAME not in names:
            self.damaged("the superblock is missing")
        store_id = store_id or self.random(16)
        for name in (SUPERBLOCK_NAME, SUPERBLOCK_NAME + ".tmp"):
            if name in in_the_way:
                raise _blocked("the superblock cannot be written", name)
        await self.backend.write_file(SUPERBLOCK_NAME, encode_superblock(store_id))
        self.set.bytes_written += PAGE
        return store_id

    def _is_stray(self, segment: Segment) -> bool:
        return self._evidence.is_stray(segment.number)

    def _classify(self, segment: Segment, peek: _Peek) -> None:
        store_id, namespace = self.set.store_id, self.set.namespace
        page = peek.header
        header, seal = own_pages(store_id, segment.number, page, peek.seal)
        if page is not None and page is not header:
            if page.store_id == store_id and page.namespace == namespace:
                self.displaced.add(page.number)
            if header is None and page.store_id != store_id:
                self.damaged(f"segment {segment.number} belongs to another store")
                return
        segment.header = header
        if header is None:
            # Perhaps ours with a bad first page, or another segment's: the scan tells. Absurd sizes and numbers are not
            # worth one.
            perhaps = self._evidence.perhaps(namespace, segment.number, segment.size)
            segment.own = perhaps and scannable(segment.size)
            if not segment.own:
                self.damaged("a segment file is unreadable")
                if perhaps:
                    self.unreadable.add(segment.number)
            return
        if page is not header:
            self.damaged(f"the header of segment {segment.number} is damaged")
        segment.own = header.namespace == namespace
        segment.sealed = seal is not None
        if segment.own and seal is not None:
            self.seals[segment.number] = seal
        self.set.oldest_live = max(self.set.oldest_live, header.oldest_live, seal.oldest_live if seal else 0)
        most = seal.last_sequence + 1 if seal else header.sequence + segment.size // (2 * PAGE) + 1
        self.next_sequence = max(self.next_sequence, most)

    async def _remove_dead(self) -> None:
        dead = [s for s in self.set if s.number < self.set.oldest_live]
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
        """Give up every segment of this namespace, durably.

        A file that may be another one's is emptied instead: its recovery has to see that something is lost.
        """
        own = self.set.own()
        for segment in own:
            if segment.header is None and segment.number not in self._claimed:
                file = await self.set.open_file(segment)
                await self.backend.truncate(file, 0)
                await self.backend.sync(file)
                segment.size = 0
                self.set.disown(segment)
            else:
                await self._discard(segment)
                await self.backend.sync_directory()  # the oldest first, also after a power loss

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
        given_up = 0
        while self.set.charged > self.set.cap or len(self.set) > SEGMENTS_MAX:
            oldest = self.set.oldest()
            if oldest is None:
                break
            await reclaimer.drop(oldest)
            self.seals.pop(oldest.number, None)
            given_up += 1
        if given_up:
            self.logger.warning(
                "asynckv: open: %r is above the disk cap of %d bytes, so the oldest segments were given up: %d",
                self.directory.path,
                self.set.cap,
                given_up,
            )
        if self.set.charged > self.set.cap:
            await self.set.drop_spare()
        if self.set.charged > self.set.cap:
            raise DiskError(
                "other files in the directory leave no room below the disk cap", operation="open", errno=errno.ENOSPC
            )


def _refused(name: str, what: str, error: OSError) -> DiskError:
    return DiskError(f"{name!r} cannot be {what}: {error.strerror}", operation="open", errno=error.errno)


def _blocked(what: str, name: str) -> DiskError:
    return DiskError(f"{what}: {name!r} is not a file", operation="open", errno=errno.EISDIR)
