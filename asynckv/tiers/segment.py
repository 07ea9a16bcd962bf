"""Segment files: which there are, what they cost, which are open, how they are born and how they die.

Invariants, each with the crash it is there for
-----------------------------------------------
* Numbers grow and are never used twice, and the seed of every checksum contains the number: what an earlier life of a
  file left in its pages never verifies in a later one.
* A segment is born under the name ``spare``: allocated, its header written and synced, only then renamed to its
  number, and the directory synced before the first batch. A crash before the rename leaves a spare, which no one
  reads; after it, an empty segment. No batch is ever acknowledged in a file whose name may vanish.
* A segment dies in this order: what is carried over is durable elsewhere; the name goes (renamed to ``spare``, or
  unlinked) and the directory is synced; the table forgets its blocks; reads and writes in flight on the file end;
  only then the file is reused or closed. A crash between any two steps leaves either the segment whole or its death
  durable. The table forgets last because, from then on, a removal of one of those keys owes no tombstone.
* Segments die oldest first, so a tombstone outlives everything that it buries. Should a file system lose a synced
  unlink all the same, every later segment and batch carries the number below which all are dead.
* Charged bytes (the greater of size and allocated bytes, and one page more while a file grows, for the file system's
  own extent block) never pass the cap: charged before the allocation, given back after the file is gone.
* A file with an operation in flight is never closed and never handed to its next life.
* A file that an operation failed on before it was a segment never becomes one: the operation may still come late.
* The name ``spare`` has one user at a time: `create` and a `retire` that recycles never run side by side (the
  reclaimer's lock sees to it, and recovery does not recycle), and a file made under it is always a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
from typing import TYPE_CHECKING, Any

from asynckv._record import KIND_CLAIM, RecordWriter
from asynckv.config import SEGMENTS_MAX
from asynckv.errors import DiskError
from asynckv.tiers.base import wait_at_most
from asynckv.tiers.layout import (
    CLAIM_AT,
    LOG_START,
    NUMBER_MAX,
    PAGE,
    SPARE_NAME,
    SPARE_NAMES,
    SegmentHeader,
    segment_name,
    segment_seed,
)

if TYPE_CHECKING:
    import logging
    from collections.abc import Iterator

    from asynckv.backends.base import Backend, File
    from asynckv.clock import Clock
    from asynckv.tiers.log import Batch

__all__ = ["LOST_NUMBERS_MAX", "NO_SPACE", "Segment", "SegmentSet", "Spare"]

LOST_NUMBERS_MAX = SEGMENTS_MAX  # in a row, of births that failed or of segments that were given up
OPEN_FILES_MAX = 64
NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})
# What a rename or an unlink says when a name is a directory's.
IN_THE_WAY = frozenset({errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENOTEMPTY})


class Segment:
    """One segment file.

    Attributes
    ----------
    number, name, size
        Segment number, present file name, bytes of the file.
    slot
        Small number that stands for this segment in the block table.
    own
        It belongs to this store and namespace; others are only kept until their room is needed.
    header
        Its first page, or the copy in its seal; None when neither could be read.
    charge
        Bytes it takes: the greater of its size and what is allocated.
    sealed
        Complete, durable and closed to appends.
    stillborn
        Its birth failed half-way: it is to be removed before the next one is made.
    failed
        A sync failed: no more appends, and nothing past `synced` is relied on.
    retired
        Its name is gone from the directory.
    position, body_sum
        Where the next batch goes; upper bound of the bodies so far, for the size of the footer.
    batches
        Batches of this opening in log order.
    synced, good
        Below this offset every batch ended well and is durable, or is a known hole; how many ended well.
    """

    __slots__ = (
        "batches",
        "before",
        "body_sum",
        "charge",
        "failed",
        "file",
        "good",
        "header",
        "idle",
        "name",
        "number",
        "opening",
        "own",
        "position",
        "retired",
        "sealed",
        "sealing",
        "seed",
        "size",
        "slot",
        "stillborn",
        "sync_lock",
        "synced",
        "synced_index",
        "used",
        "users",
    )

    def __init__(self, number: int, size: int, charge: int, *, header: SegmentHeader | None, own: bool) -> None:
        self.number = number
        self.name = segment_name(number)
        self.size = size
        self.charge = charge
        self.header = header
        self.own = own
        self.slot = -1
        self.seed = 0
        self.file: File | None = None
        self.opening: asyncio.Future[File] | None = None
        self.users = 0  # operations on the file that were submitted and not released
        self.idle: asyncio.Future[None] | None = None
        self.used = 0
        self.sealed = False
        self.sealing: asyncio.Task[None] | None = None
        self.failed = False
        self.stillborn = False
        self.retired = False
        self.position = LOG_START
        self.body_sum = 0
        self.batches: list[Batch] = []
        self.synced = LOG_START
        self.synced_index = 0
        self.good = 0
        self.before: Segment | None = None  # the one before in this namespace, while it may be needed
        self.sync_lock = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<Segment {self.number} slot={self.slot} own={self.own} sealed={self.sealed}>"

    def hold(self) -> None:
        """An operation on the file begins."""
        self.users += 1

    def release(self) -> None:
        """An operation on the file is over: the engine no longer touches it."""
        self.users -= 1
        if not self.users and self.idle is not None and not self.idle.done():
            self.idle.set_result(None)


class Spare:
    """A file of a full segment's size, or nearly, that the next segment is made of."""

    __slots__ = ("charge", "file", "size")

    def __init__(self, file: File, size: int, charge: int) -> None:
        self.file = file
        self.size = size
        self.charge = charge


class SegmentSet:
    """All segments of a directory and the account of its bytes.

    Attributes
    ----------
    cap, segment_bytes
        Most bytes allocated in the directory; size of a segment that is appended to.
    active
        The segment that batches go to.
    oldest_live
        Segments below this number are dead.
    next_number
        Above every number ever seen.
    overhead
        Bytes of everything that is no segment and no spare: directory, superblock, lock, snapshot, strangers.
    bytes_written
        Bytes handed to the device, padding included.
    starved
        How many times in a row the file system had no room for us.
    io_errors, io_timeouts
        Disk operations that failed or ran past their deadline, of those whose caller goes on without them.
    lost
        Number of a segment of this namespace that is gone, 0 for none. The next one names it as the one before, if it
        is newer than all that are left.
    doubtful
        Number of a segment that may have been this namespace's, and newer than all that are left; 0 when there is none,
        or what is older is gone.
    shared
        There are pages of other namespaces.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        cap: int,
        segment_bytes: int,
        store_id: bytes,
        namespace: bytes,
        clock: Clock,
        log: logging.Logger,
    ) -> None:
        self.backend = backend
        self.clock = clock
        self.cap = cap
        self.segment_bytes = segment_bytes
        self.store_id = store_id
        self.namespace = namespace
        self.log = log
        self.overhead = 0
        self.bytes_written = 0
        self.starved = 0
        self.io_errors = 0
        self.io_timeouts = 0
        self.oldest_live = 0
        self.lost = 0
        self.doubtful = 0
        self.shared = False
        self.next_number = 1
        self.active: Segment | None = None
        self.spare: Spare | None = None
        self.spare_name = SPARE_NAME
        self._segments: dict[int, Segment] = {}  # strays first, then by number, ascending
        self._slots: list[Segment | None] = []
        self._orphans: set[Segment] = set()  # dead, with an operation that does not end
        self._pending = 0  # charged for a file that is being made
        self._late_rename = False  # a dead segment may yet take the spare file's name, and that file be without one
        self._tick = 0
        self._open = 0
        self._closers: set[asyncio.Future[Any]] = set()

    # -- the set -------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Segments of anybody's; files that were never one do not count."""
        return sum(1 for segment in self._segments.values() if segment.own or segment.header is not None)

    def __iter__(self) -> Iterator[Segment]:
        return iter(list(self._segments.values()))

    def own(self) -> list[Segment]:
        """Segments of this store and namespace, oldest first."""
        return [segment for segment in self._segments.values() if segment.own]

    def oldest(self) -> Segment | None:
        """The segment that is reclaimed next; never the active one."""
        for segment in self._segments.values():
            if segment is not self.active:
                return segment
        return None

    def by_slot(self, slot: int) -> Segment | None:
        """The segment that a slot stands for."""
        return self._slots[slot] if 0 <= slot < len(self._slots) else None

    def add(self, segment: Segment) -> None:
        """Take a segment in; the next number is above its own. They come in the order in which they are to die."""
        self.next_number = max(self.next_number, segment.number + 1)
        self.keep(segment)

    def keep(self, segment: Segment) -> None:
        """Take a file in whose number is not believed."""
        self._segments[segment.number] = segment
        if segment.own:
            segment.seed = segment_seed(self.store_id, self.namespace, segment.number)
            if None not in self._slots:
                self._slots.append(None)
            segment.slot = self._slots.index(None)
            self._slots[segment.slot] = segment

    def disown(self, segment: Segment) -> None:
        """Nothing in a segment is ours after all: it only waits for its room to be needed."""
        segment.own = False
        if segment.slot >= 0 and not segment.users:
            self._slots[segment.slot] = None
            segment.slot = -1

    def has_suspects(self) -> bool:
        """Whether the newest segment may be lost: the next one would hide that from the next recovery."""
        own = self.own()
        return bool(own) and (own[-1].header is None or own[-1].number < self.doubtful)

    def settle_doubt(self) -> None:
        """Count what a recovery left open as lost, so that the next segment names it.

        Raises
        ------
        DiskError
            It may have been another namespace's, whose recovery has to see that it is lost.
        """
        if self.has_suspects():
            if self.shared:
                raise DiskError("what could not be recovered may be newer", operation="allocate", errno=errno.EIO)
            self.lost = max(self.lost, self.doubtful, self.own()[-1].number)

    def sealed_upto(self) -> int:
        """The highest number up to which all segments of ours are sealed."""
        number = self.next_number - 1
        for segment in self._segments.values():
            if segment.own and not segment.sealed:
                return segment.number - 1
        return number

    # -- the account ---------------------------------------------------------------------------------------------

    @property
    def used(self) -> int:
        """Bytes allocated in the directory, as far as we know."""
        total = self.overhead + sum(segment.charge for segment in self._segments.values())
        total += sum(segment.charge for segment in self._orphans)
        return total + (self.spare.charge if self.spare is not None else 0)

    @property
    def charged(self) -> int:
        """Bytes that count against the cap: what is used, what is being made, and a page for each file that grows."""
        growing = sum(1 for segment in self._segments.values() if segment.own and not segment.sealed)
        return self.used + self._pending + (growing + (self.spare is not None)) * PAGE

    def has_room(self) -> bool:
        """Whether one more segment can be made without reclaiming."""
        return self._has_bytes() and len(self) < SEGMENTS_MAX

    def _has_bytes(self) -> bool:
        spare = self.spare.charge + PAGE if self.spare is not None else 0
        return self.charged - spare + self.segment_charge <= self.cap

    @property
    def crowded(self) -> bool:
        """Whether it is their number alone that keeps another segment from being made."""
        return len(self) >= SEGMENTS_MAX and self._has_bytes()

    @property
    def segment_charge(self) -> int:
        """What one more segment costs."""
        return self.segment_bytes + PAGE

    def refused(self, error: BaseException) -> None:
        """Note why something could not be written."""
        self.starved += isinstance(error, OSError) and error.errno in NO_SPACE

    def met(self, error: BaseException) -> None:
        """Count what the disk refused, and nobody else is told."""
        if isinstance(error, TimeoutError):
            self.io_timeouts += 1
        elif isinstance(error, OSError):
            self.io_errors += 1

    # -- files ---------------------------------------------------------------------------------------------------

    def touch(self, segment: Segment) -> None:
        """Note a use, for the choice of the file to close next."""
        self._tick += 1
        segment.used = self._tick

    async def open_file(self, segment: Segment) -> File:
        """The segment's open file; keeps the number of open ones bounded."""
        self.touch(segment)
        if segment.file is not None:
            return segment.file
        if segment.opening is None:
            self._close_unused()
            segment.opening = self.backend.open(segment.name)
            segment.opening.add_done_callback(lambda future: self._opened(segment, future))
        opening = segment.opening
        await asyncio.wait([opening])  # whoever is cancelled here leaves the opening to the others
        return opening.result()

    def _opened(self, segment: Segment, future: asyncio.Future[File]) -> None:
        segment.opening = None
        if not future.cancelled() and future.exception() is None:
            segment.file = future.result()
            self._open += 1

    def _close_unused(self) -> None:
        if self._open < OPEN_FILES_MAX:
            return
        idle = [
            s
            for s in self._segments.values()
            if s.file is not None and not s.users and s is not self.active and s.sealing is None
        ]
        for segment in sorted(idle, key=lambda s: s.used)[: self._open - OPEN_FILES_MAX + 1]:
            self._close_file(segment)

    def _close_file(self, segment: Segment) -> asyncio.Future[None] | None:
        file, segment.file = segment.file, None
        if file is None:
            return None
        self._open -= 1
        return self._close_quietly(file)

    def _close_quietly(self, file: File) -> asyncio.Future[None]:
        future = self.backend.close_file(file)
        self._closers.add(future)
        future.add_done_callback(self._closed)
        return future

    def _closed(self, future: asyncio.Future[Any]) -> None:
        self._closers.discard(future)
        if not future.cancelled() and future.exception() is not None:
            self.log.warning("asynckv: closing a file failed: %s", future.exception())

    # -- birth ---------------------------------------------------------------------------------------------------

    async def create(self, sequence: int) -> Segment:
        """Make the next segment, durable and empty, and make it the active one.

        The caller has made sure that there is room.
        """
        number = await self._new_number()
        await self._remove_strays(number)
        own = self.own()
        before = own[-1] if own and own[-1].number > self.lost else None
        header = SegmentHeader(
            store_id=self.store_id,
            namespace=self.namespace,
            number=number,
            oldest_live=min(self.oldest_live, number),
            sequence=sequence,
            size=self.segment_bytes,
            sealed_upto=min(self.sealed_upto(), number - 1),
            previous=self.lost if before is None else before.number,
            claimed=True,
        )
        if self.spare is None:
            await self._make_spare()
        spare = self.spare
        assert spare is not None
        file = spare.file
        more = max(self.segment_bytes - spare.charge, 0)
        self._pending += more
        try:
            if spare.size != self.segment_bytes:
                await self.backend.allocate(file, self.segment_bytes)
                spare.size = self.segment_bytes
            page, claim = header.encode(), self._first_claim(header, before.good if before else 0)
            await self.backend.write(file, 0, [page, claim])
            self.bytes_written += len(page) + len(claim)
            await self.backend.sync(file)
            size, allocated = await self.backend.stat(self.spare_name)
            if size != self.segment_bytes:
                raise DiskError(f"{self.spare_name!r} was replaced", operation="allocate", errno=errno.ESTALE)
            spare.charge = max(self.segment_bytes, allocated)
        except BaseException as error:
            self._give_up_spare(spare, file)
            if isinstance(error, OSError):
                with contextlib.suppress(OSError):
                    await self._free_spare_name()
            raise
        finally:
            self._pending -= more
        if self.charged > self.cap:
            await self.drop_spare()
            raise DiskError("the file system allocated more than asked for", operation="allocate", errno=errno.ENOSPC)
        self.spare = None
        segment = Segment(number, self.segment_bytes, spare.charge, header=header, own=True)
        segment.file = file
        segment.before = before
        self._open += 1
        try:
            await self.backend.rename(self.spare_name, segment.name)
            if self._late_rename and not await self.backend.links(file):
                raise DiskError(f"{segment.name!r} is another file", operation="allocate", errno=errno.ESTALE)
            await self.backend.sync_directory()
        except BaseException:
            # Under which name it is nobody knows. It counts, and no later segment may name it as the one before,
            # because it may be gone after a crash.
            segment.own = False
            segment.stillborn = True
            self.add(segment)
            raise
        self.add(segment)
        self.active = segment
        self.starved = 0
        return segment

    async def _new_number(self) -> int:
        """Use up the next number whose name nobody has: a rename would replace what has it."""
        while self.next_number < NUMBER_MAX:
            number = self.next_number
            self.next_number += 1
            if number not in self._segments:
                try:
                    await self.backend.stat(segment_name(number))
                except FileNotFoundError:
                    return number
        raise DiskError("all segment numbers are used up", operation="allocate", errno=errno.ENOSPC)

    async def _remove_strays(self, number: int) -> None:
        """Remove stray files that a segment of this number would make look like newer ones, all bytes of it lost."""
        for stray in self:
            if number < stray.number <= number + LOST_NUMBERS_MAX:
                with contextlib.suppress(OSError):
                    await self.retire(stray, recycle=False)
                    await self.bury(stray)

    def _first_claim(self, header: SegmentHeader, previous_good: int) -> bytes:
        """The claim of an empty segment: whose it is shows even when its first page is damaged."""
        return RecordWriter().to_bytes(
            KIND_CLAIM,
            segment_seed(self.store_id, self.namespace, header.number),
            CLAIM_AT,
            sequence=header.sequence,
            oldest_live=header.oldest_live,
            synced=LOG_START,
            sealed_upto=header.sealed_upto,
            previous=header.previous,
            previous_good=previous_good,
        )

    async def _make_spare(self) -> None:
        await self._free_spare_name()
        self._pending += self.segment_bytes
        try:
            file = await self.backend.open(self.spare_name, create=True, size=self.segment_bytes)
            self.spare = Spare(file, self.segment_bytes, self.segment_bytes)
        except OSError:
            with contextlib.suppress(OSError):
                await self.backend.unlink(self.spare_name)
            raise
        finally:
            self._pending -= self.segment_bytes

    async def _free_spare_name(self) -> None:
        """Make sure that no dead segment lies under the name: one that is read from, or whose burial failed."""
        if not await self._unlink(self.spare_name):
            self.spare_name = next(name for name in SPARE_NAMES if name != self.spare_name)
            if not await self._unlink(self.spare_name):
                raise DiskError(
                    f"{' and '.join(SPARE_NAMES)} are directories", operation="allocate", errno=errno.EISDIR
                )
        for segment in (*self._segments.values(), *self._orphans):
            if segment.name in SPARE_NAMES:
                segment.name = ""

    async def _unlink(self, name: str) -> bool:
        """Remove a file's name, if it is there; False when a directory of somebody's has it."""
        try:
            await self.backend.unlink(name)
        except FileNotFoundError:
            pass
        except OSError as error:
            if error.errno not in IN_THE_WAY:
                raise
            return False
        return True

    def _give_up_spare(self, spare: Spare, file: File) -> None:
        """What was done to it last may come late: over the first page of the segment that it would be by then."""
        self.spare = None
        self._pending += spare.charge
        self._close_quietly(file).add_done_callback(lambda _: self._given_up(spare))

    def _given_up(self, spare: Spare) -> None:
        self._pending -= spare.charge

    async def drop_spare(self) -> None:
        """Remove the spare file, for room."""
        spare, self.spare = self.spare, None
        if spare is None:
            return
        self._pending += spare.charge
        try:
            await self._unlink(self.spare_name)
            with contextlib.suppress(OSError):
                await self._close_quietly(spare.file)
        except OSError:
            self.spare = spare
            raise
        finally:
            self._pending -= spare.charge

    async def has_one_name(self, file: File) -> bool:
        """Whether what is written to a file changes no other one: a backup made of hard links, for instance."""
        return await self.backend.links(file) == 1

    # -- death ---------------------------------------------------------------------------------------------------

    async def retire(self, segment: Segment, *, recycle: bool = True) -> None:
        """Take a segment's name away, durably: it is made the spare if allowed and there is none, else unlinked."""
        if not segment.retired:
            recycle = recycle and self._recyclable(segment)
            if recycle:
                try:
                    recycle = await self.has_one_name(await self.open_file(segment))
                except OSError:
                    recycle = False
            if not (recycle and await self._make_spare_of(segment)):
                await self._unlink(segment.name)  # where somebody removed or replaced it, it is as dead as it gets
            segment.retired = True
        await self.backend.sync_directory()
        if segment.number < self.next_number:  # a higher one is no segment's and says nothing
            numbers = (each.number for each in self._segments.values() if not each.retired)
            others = [number for number in numbers if number < self.next_number]
            self.oldest_live = max(self.oldest_live, min(others, default=segment.number + 1))

    async def _make_spare_of(self, segment: Segment) -> bool:
        """Give a dead segment the spare file's name; False when something that is no file has one of the two."""
        try:
            await self.backend.rename(segment.name, self.spare_name)
        except FileNotFoundError:
            return False
        except TimeoutError:
            self._late_rename = True
            raise
        except OSError as error:
            if error.errno not in IN_THE_WAY:
                raise
            return False
        segment.name = self.spare_name
        return True

    def _recyclable(self, segment: Segment) -> bool:
        if segment.own and not segment.sealed:
            return False  # its sealing failed half-way: nobody knows how long the file is
        if self.spare is not None or not self.segment_bytes // 2 <= segment.size <= self.segment_bytes:
            return False
        if any(each.name in SPARE_NAMES for each in self._orphans):
            return False
        return self.charged - segment.charge + self.segment_charge <= self.cap

    async def bury(self, segment: Segment) -> None:
        """After `retire`, and once the table forgot the segment: wait for its readers, then reuse or close the file."""
        self._segments.pop(segment.number, None)
        if self.active is segment:
            self.active = None
        self._orphans.add(segment)
        if segment.users:
            segment.idle = asyncio.get_running_loop().create_future()
            await wait_at_most(self.clock, self.backend.timeout, [segment.idle])
        if segment.users:
            # One is stuck, or began just now: a read that went wrong, once more. The file may not be reused: it loses
            # its name, and stays charged until it is free.
            if segment.name in SPARE_NAMES:
                with contextlib.suppress(OSError):  # should it stay, the next one that wants the name removes it
                    await self._free_spare_name()
            self._let_go(segment)
            return
        file = segment.file
        if segment.name in SPARE_NAMES and self.spare is None and file is not None:
            self.spare = Spare(file, segment.size, segment.charge)
            segment.file = None
            self._open -= 1
        else:
            closing = self._close_file(segment)
            if closing is not None:
                with contextlib.suppress(OSError):
                    await closing
        self._forget(segment)

    def _let_go(self, segment: Segment) -> None:
        if segment.users:
            segment.idle = asyncio.get_running_loop().create_future()
            segment.idle.add_done_callback(lambda _: self._let_go(segment))
            return
        closing = self._close_file(segment)
        if closing is None:
            self._forget(segment)
        else:
            closing.add_done_callback(lambda _: self._forget(segment))

    def _forget(self, segment: Segment) -> None:
        self._orphans.discard(segment)
        if segment.slot >= 0 and self._slots[segment.slot] is segment:
            self._slots[segment.slot] = None

    async def close(self) -> None:
        """Close all files that nothing is in flight on."""
        for segment in self._segments.values():
            if not segment.users:
                self._close_file(segment)
        if self.spare is not None:
            self._close_quietly(self.spare.file)
        await wait_at_most(self.clock, self.backend.timeout, list(self._closers))
