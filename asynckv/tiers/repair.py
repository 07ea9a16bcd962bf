"""`verify --repair`: what is damaged leaves a store, durably, and nothing else changes.

A store already knows how to go on with damage: an opening leaves it out. So each namespace is opened here as its owner
would open it, and its index says which blocks are to be kept. Then each damaged segment is written anew under its own
number: the blocks of the index that lie in it and whose bytes are well, and a tombstone for every other key that its
records name and the index no longer has. So a damaged block is removed like a deleted one, and no older record of its
key comes back. Where records themselves are gone, nobody knows what they had replaced or removed: then every segment
of the namespace is written anew, the oldest first, and holds nothing but blocks of the index.

Crash-safe: a segment is written under a name that an opening removes, synced, and renamed over the old one. At any
moment a segment is the old or the new one, and either gives the same blocks: the older ones hold nothing any more
that a newer one, old or new, would have to bury. The index snapshot goes first; without it an opening reads the
segments. (Only where records are gone, a crash half-way may cost blocks that the snapshot alone still knew of.)

Then goes what no opening could use: files that are no whole segment of anybody, segments under another one's name, a
damaged snapshot. Files of another store stay.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from xxhash import xxh3_64_intdigest

from asynckv._core import Table
from asynckv._record import (
    CLEAR,
    KIND_CLAIM,
    KIND_SNAPSHOT,
    RecordWriter,
    parse_body,
    plan_batch,
    read_chunk,
    staging_bytes,
    write_batch,
    write_disk_entries,
)
from asynckv.config import SEGMENT_MIN, Config
from asynckv.errors import CorruptStoreError, DiskError
from asynckv.tiers.directory import Directory
from asynckv.tiers.disk import DiskTier
from asynckv.tiers.inspect import Inspector, locked_store, verify_directory
from asynckv.tiers.layout import (
    CLAIM_AT,
    LOG_START,
    SEGMENT_BYTES_MAX,
    SNAPSHOT_NAME,
    SUPERBLOCK_NAME,
    Seal,
    SegmentHeader,
    encode_superblock,
    segment_seed,
)
from asynckv.tiers.log import footer_and_seal
from asynckv.tiers.offline import SegmentFile, footer_chunks
from asynckv.tiers.report import LIVE, LOST, BlockPlace, DirectoryReport, LostBlock
from asynckv.tiers.scan import scan_segment

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from asynckv._record import Records
    from asynckv.tiers.evidence import Evidence
    from asynckv.tiers.report import Space
    from asynckv.tiers.segment import Segment

__all__ = ["Repair", "repair_directory"]

_TEMPORARY = SNAPSHOT_NAME + ".tmp"  # of all names, openings remove this one
_BATCH_BYTES = 4 << 20
_SLACK_BYTES = 1 << 20  # another layout of the same blocks may need a little more room
_TIMEOUT = 60.0
_Key = tuple[int, bytes]


@dataclass(slots=True)
class Repair:
    """What a repair did.

    Attributes
    ----------
    before, after
        The store as it was found and as it was left.
    rewritten, removed
        Segments that were written anew; files that were removed.
    dropped
        Keys that had a block before and have none now.
    """

    before: DirectoryReport
    after: DirectoryReport
    rewritten: list[int] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    dropped: list[LostBlock] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class _Settings(Config):
    """Options for a namespace of which only the digest is known."""

    digest: bytes = b""

    @property
    def namespace_digest(self) -> bytes:
        return self.digest


class _Kept:
    """A block that is written again; see `asynckv._record.write_batch`."""

    __slots__ = ("checksum", "desc", "key", "kind", "stored", "view")

    def __init__(self, key: _Key, place: BlockPlace) -> None:
        self.kind, self.key = key
        self.desc, self.stored, self.checksum = place.desc, place.stored, place.checksum
        self.view = memoryview(b"")


def repair_directory(path: str | os.PathLike[str], *, progress: Callable[[int, int], object] | None = None) -> Repair:
    """Make a damaged store whole: what is damaged is dropped, durably, everything else is served as before.

    Nothing changes when nothing is damaged. Not to be called from a running event loop.

    Parameters
    ----------
    path
        The directory of a store that nobody has open.
    progress
        Called with (bytes done, bytes in all) now and then, from 0 again for each look.

    Raises
    ------
    StoreLockedError
        The store is in use.
    FileNotFoundError, UnsafeDirectoryError, CorruptStoreError
        As for `verify_directory`; CorruptStoreError as well for segments whose namespace cannot be told: they have to
        be opened with it first.
    OSError
        The disk refuses, or has no room for one more segment. The store is as before or better.
    """
    before = verify_directory(path, progress=progress)
    if before.ok:
        return Repair(before, before)
    orphans = [segment.name for segment in before.segments if segment.orphaned]
    if orphans:
        raise CorruptStoreError(
            f"nothing was changed: nothing says which namespace the records in {', '.join(orphans)} are of; "
            "open the store with that namespace once, then repair it",
            tier="disk",
            operation="repair",
        )
    repair = Repair(before, before)
    headless = {segment.namespace for segment in before.segments if "the header is damaged" in segment.damage}
    # A file that lost its header is taken for anybody's until its owner was opened: owners first.
    for digest in sorted(before.spaces, key=lambda each: before.spaces[each].name not in headless):
        _repair_space(path, digest, repair, progress)
    with locked_store(path) as directory:
        repair.after = Inspector(directory, verify=True, progress=progress).run()
        _tidy(directory, repair.after, repair.removed)
    if repair.removed:
        repair.after = verify_directory(path, progress=progress)
    live = {(digest, *key) for digest, space in repair.after.spaces.items() for key in _live(space.keys)}
    for digest, space in before.spaces.items():
        for key, place in space.keys.items():
            if place.state in (LIVE, LOST) and (digest, *key) not in live:
                repair.dropped.append(LostBlock(digest, *key, place.segment, place.stored))
    return repair


def _live(keys: dict[_Key, BlockPlace]) -> list[_Key]:
    return [key for key, place in keys.items() if place.state == LIVE]


def _tidy(directory: Directory, report: DirectoryReport, removed: list[str]) -> None:
    """Remove what nobody can use, and note it."""
    useless = [s.name for s in report.segments if s.damage and s.state in ("unreadable", "misplaced")]
    if report.snapshot == "damaged" or any(space.indexed and space.broken for space in report.spaces.values()):
        useless.append(SNAPSHOT_NAME)
    for name in useless:
        with contextlib.suppress(FileNotFoundError, IsADirectoryError):
            os.unlink(name, dir_fd=directory.fd)
            removed.append(name)
    if report.store_id and any("superblock" in text for text in report.damage):
        _replace(
            directory, SUPERBLOCK_NAME, lambda fd: _write(fd, 0, [encode_superblock(bytes.fromhex(report.store_id))])
        )
        removed.append("a damaged copy of the superblock")
    if removed:
        os.fsync(directory.fd)


# -- one namespace -----------------------------------------------------------------------------------------------------


def _repair_space(
    path: str | os.PathLike[str],
    digest: bytes,
    repair: Repair,
    progress: Callable[[int, int], object] | None,
) -> None:
    """Open one namespace, and write its damaged segments anew."""
    name = repair.before.spaces[digest].name
    sizes = [segment.size for segment in repair.before.segments if segment.namespace == name]
    table = Table(1 << 16)
    config = _Settings(
        directory=os.fsdecode(path),
        memory=1 << 16,
        disk=1 << 62,
        segment=_segment_bytes(path, digest) or max([SEGMENT_MIN, *sizes]),
        engine="threads",
        direct=False,
        io_timeout=_TIMEOUT,
        force=True,
        digest=digest,
    )
    tier = DiskTier(config, table)
    with asyncio.Runner() as runner:
        try:
            runner.run(_open(tier, table))
            assert tier._directory is not None
            inspector = Inspector(tier._directory, verify=True, progress=progress)
            report, own = inspector.run(), tier._set.own()
            numbers = {segment.number for segment in own}
            useless = _left_out(report, name, numbers) + _unreadable(report, inspector.evidence, digest, numbers)
            _remove(tier._directory, useless, repair.removed)
            repair.rewritten += _Rewriter(tier._directory, report, digest, own, table).run()
        finally:
            runner.run(tier.close(snapshot=False))
            table.close()


def _left_out(report: DirectoryReport, name: str, own: set[int]) -> list[str]:
    """Segments that the opening did not count and left, because their first page does not say whose they are.

    What they were older than may be among what is removed later, and then they would count again.
    """
    return [each.name for each in report.segments if each.namespace == name and each.number not in own]


def _unreadable(report: DirectoryReport, evidence: Evidence, digest: bytes, own: set[int]) -> list[str]:
    """Files without a readable page that were this namespace's, as others of its segments say.

    These are about to be written anew, and will no longer say so: another namespace would take them for a loss of its.
    """
    anybodys = (numbers for space, numbers in evidence.named.items() if space != digest)
    numbers = evidence.named.get(digest, set()).difference(own, *anybodys)
    return [each.name for each in report.segments if each.state == "unreadable" and each.number in numbers]


def _remove(directory: Directory, names: list[str], removed: list[str]) -> None:
    for each in names:
        os.unlink(each, dir_fd=directory.fd)
    if names:
        os.fsync(directory.fd)
        removed += names


def _segment_bytes(path: str | os.PathLike[str], digest: bytes) -> int:
    """Size that the namespace's segments are made with; 0 when none tells."""
    directory = Directory.open(path, create=False)
    try:
        inspector = Inspector(directory, verify=False)
        inspector.run()
        return inspector.made_size(digest)
    finally:
        directory.close()


async def _open(tier: DiskTier, table: Table) -> None:
    await tier.open()
    if tier.recovering:
        table.recovering = True
        await tier.recover(lambda: None)
        table.recovering = False


class _Rewriter:
    """Writes damaged segments of an open namespace anew."""

    def __init__(
        self, directory: Directory, report: DirectoryReport, digest: bytes, segments: list[Segment], table: Table
    ) -> None:
        self.directory = directory
        self.reports = {segment.number: segment for segment in report.segments}
        self.space = report.spaces.get(digest)
        self.segments = segments
        self.digest = digest
        self.index = self._read_index(table)
        self.batches: dict[int, int] = {}  # of segments that were written anew

    def _read_index(self, table: Table) -> dict[int, dict[_Key, BlockPlace]]:
        """What an opening serves, by segment number."""
        found: dict[int, dict[_Key, BlockPlace]] = {segment.number: {} for segment in self.segments}
        numbers = [segment.number for segment in self.segments]
        slots = {segment.slot: index for index, segment in enumerate(self.segments)}
        cursor: int | None = 0
        while cursor is not None and numbers:
            writer, cursor = write_disk_entries(table, cursor, slots)
            data = writer.to_bytes(KIND_SNAPSHOT, 0, 0)
            header = read_chunk(data, 0, KIND_SNAPSHOT, 0, 0)
            assert header is not None
            records = parse_body(data, 0, header, 0, n_segments=len(numbers))
            assert records is not None
            for each in range(len(records)):
                _, kind, key, desc, offset, stored, checksum, listed = records.get(each)
                number = numbers[listed]
                found[number][kind, key] = BlockPlace(LIVE, number, offset, stored, checksum, desc or b"")
        return found

    def run(self) -> list[int]:
        """Do it; the numbers of the segments that were written."""
        if self.space is None or not self.segments:
            return []
        all_known = not self.space.broken and all(self.reports[each.number].complete for each in self.segments)
        chosen = [each for each in self.segments if self.reports[each.number].damage or not all_known]
        if not chosen:
            return []
        if all_known:
            self._remove_snapshot(self.space)
        for segment in chosen:
            self._drop_damaged(segment)
        kept = {key for blocks in self.index.values() for key in blocks}
        for segment in chosen:
            self._rewrite(segment, kept, all_known)
        self._remove_snapshot(self.space)  # perhaps nothing else told that something is missing
        return [segment.number for segment in chosen]

    def _remove_snapshot(self, space: Space) -> None:
        with contextlib.suppress(FileNotFoundError):
            if space.indexed:
                os.unlink(SNAPSHOT_NAME, dir_fd=self.directory.fd)
        os.fsync(self.directory.fd)

    def _file(self, segment: Segment) -> SegmentFile:
        file = SegmentFile(self.directory, self.reports[segment.number])
        file.peek()
        if not file.open():
            raise DiskError(f"{segment.name} cannot be opened: {file.error}", operation="repair", errno=errno.EIO)
        return file

    def _drop_damaged(self, segment: Segment) -> None:
        file = self._file(segment)
        try:
            blocks = self.index[segment.number]
            for key, place in list(blocks.items()):
                if not file.whole(place):
                    del blocks[key]
        finally:
            file.close()

    def _rewrite(self, segment: Segment, kept: set[_Key], all_known: bool) -> None:
        file = self._file(segment)
        try:
            header = self._header(segment, all_known)
            _, seal = file.own(header.store_id)
            tombstones, clear = self._removals(file, header, seal, kept) if all_known else ([], False)
            good = self.batches.get(header.previous, seal.previous_good if seal is not None and all_known else 0)
            following = seal.next if seal is not None and all_known else self._following(segment)
            lossy = seal is not None and seal.lossy and all_known
            new = _NewSegment(header, good)

            def fill(fd: int) -> None:
                new.write(fd, file, self.index[segment.number], tombstones, clear)
                new.seal(fd, seal.last_sequence if seal is not None else 0, following, lossy=lossy)

            _replace(self.directory, segment.name, fill)
            os.fsync(self.directory.fd)
            self.batches[segment.number] = len(new.pieces)
        finally:
            file.close()

    def _following(self, segment: Segment) -> int:
        return min((each.number for each in self.segments if each.number > segment.number), default=0)

    def _header(self, segment: Segment, all_known: bool) -> SegmentHeader:
        header = segment.header
        assert header is not None  # whatever is ours after an opening has one
        if not all_known:
            previous = max((each.number for each in self.segments if each.number < segment.number), default=0)
            header = replace(header, previous=previous)
        return replace(header, claimed=True)

    def _removals(
        self, file: SegmentFile, header: SegmentHeader, seal: Seal | None, kept: set[_Key]
    ) -> tuple[list[_Key], bool]:
        """Keys that the records name and the index has not, and whether a clear is among the records."""
        seed = segment_seed(header.store_id, header.namespace, header.number)
        chunks: Sequence[Records] | None = footer_chunks(file, seed, seal) if seal is not None else None
        if chunks is None:
            chunks = [found.records() for found in file.run(scan_segment(file.report.size, seed)).batches]
        gone: dict[_Key, None] = {}
        clear = False
        for records in chunks:
            for index in range(len(records)):
                kind, key_kind, key, *_ = records.get(index)
                if kind == CLEAR:
                    clear = True
                elif kind and (key_kind, key) not in kept:
                    gone[key_kind, key] = None
        return list(gone), clear


class _NewSegment:
    """Writes one segment: header, claim, batches, footer, seal."""

    def __init__(self, header: SegmentHeader, previous_good: int) -> None:
        self.header = header
        self.previous_good = previous_good
        self.seed = segment_seed(header.store_id, header.namespace, header.number)
        self.position = LOG_START
        self.body_sum = 0
        self.pieces: list[bytes] = []

    @property
    def sequence(self) -> int:
        """Of the batch that comes next."""
        return self.header.sequence + len(self.pieces)

    def _fields(self, sequence: int) -> dict[str, int]:
        return {
            "sequence": sequence,
            "oldest_live": self.header.oldest_live,
            "synced": self.position,
            "good": len(self.pieces),
            "sealed_upto": self.header.sealed_upto,
            "previous": self.header.previous,
            "previous_good": self.previous_good,
        }

    def write(
        self, fd: int, file: SegmentFile, blocks: dict[_Key, BlockPlace], tombstones: list[_Key], clear: bool
    ) -> None:
        """Write header and batches, in the order of a batch: clear, tombstones, blocks."""
        _write(fd, 0, [self.header.encode()])
        waiting = sorted(blocks.items(), key=lambda each: each[1].offset)
        while waiting or tombstones or clear:
            group: list[_Kept] = []
            size = 0
            while len(group) < len(waiting) and size < _BATCH_BYTES:
                key, place = waiting[len(group)]
                item = _Kept(key, place)
                item.view = file.read(place.offset, place.stored)
                if xxh3_64_intdigest(item.view) != place.checksum:
                    raise DiskError(
                        "a block reads differently from moment to moment", operation="repair", errno=errno.EIO
                    )
                group.append(item)
                size += place.stored
            limit = min(self.header.size + _SLACK_BYTES, SEGMENT_BYTES_MAX)
            plan = plan_batch([], group, tombstones, clear, self.position, limit, self.body_sum)
            if plan.empty:
                raise DiskError("a segment has no room for its own blocks", operation="repair", errno=errno.ENOSPC)
            staging = bytearray(staging_bytes(plan, [], group))
            fields = self._fields(self.sequence)
            buffers, _, piece = write_batch(plan, [], group, tombstones, staging, self.seed, **fields)
            _write(fd, self.position, buffers)
            self.pieces.append(piece)
            self.position += plan.batch_bytes
            self.body_sum += plan.body_bound
            clear = clear and not plan.clear
            tombstones, waiting = tombstones[plan.tombstones :], waiting[plan.carries :]

    def seal(self, fd: int, last_sequence: int, following: int, *, lossy: bool) -> None:
        """Write claim, footer and seal."""
        header, start = self.header, self.position
        claim = RecordWriter().to_bytes(KIND_CLAIM, self.seed, CLAIM_AT, **self._fields(header.sequence))
        _write(fd, CLAIM_AT, [claim])
        ending = footer_and_seal(
            header,
            self.pieces,
            start,
            self.seed,
            len(self.pieces),
            max(last_sequence, self.sequence - 1, 0),
            previous_good=self.previous_good,
            durable=start,
            following=following,
            lossy=lossy,
        )
        _write(fd, start, ending)


# -- files -------------------------------------------------------------------------------------------------------------


def _replace(directory: Directory, name: str, fill: Callable[[int], object]) -> None:
    """Put a new file in the place of another: the old one or the whole new one is there, whenever it is cut short."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(_TEMPORARY, dir_fd=directory.fd)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(_TEMPORARY, flags, 0o600, dir_fd=directory.fd)
    try:
        fill(fd)
        os.fsync(fd)
        os.rename(_TEMPORARY, name, src_dir_fd=directory.fd, dst_dir_fd=directory.fd)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(_TEMPORARY, dir_fd=directory.fd)
        raise
    finally:
        os.close(fd)


def _write(fd: int, offset: int, buffers: Sequence[bytes | memoryview]) -> None:
    for buffer in buffers:
        view = memoryview(buffer)
        while view:
            done = os.pwrite(fd, view, offset)
            view, offset = view[done:], offset + done
