"""Looking at a store from outside: what its directory holds, and whether every byte is well. Never writes to it.

The same scanner and decoders as recovery, fed by plain system calls. `inspect_directory` needs no lock: what it sees
of a store in use is a moment's picture, and a batch half written may be in it. `verify_directory` takes the lock.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from asynckv._record import BLOCK, CHUNK_MAX, CLEAR, TOMBSTONE
from asynckv.errors import CorruptStoreError, UnsafeDirectoryError
from asynckv.tiers.directory import Directory
from asynckv.tiers.layout import (
    PAGE,
    SEGMENT_BYTES_MAX,
    SNAPSHOT_NAME,
    SPARE_NAME,
    SUPERBLOCK_NAME,
    Seal,
    SegmentHeader,
    SnapshotHead,
    decode_superblock,
    parse_segment_name,
    segment_seed,
)
from asynckv.tiers.scan import footer_chunk, scan_segment, verify_batch

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from asynckv._record import Records

__all__ = ["DirectoryReport", "SegmentReport", "inspect_directory", "look_at", "verify_directory"]

_Keys = dict[tuple[bytes, int, bytes], tuple[int, int]]  # namespace, key kind, key -> segment, stored bytes; 0 removed


@dataclass(slots=True)
class SegmentReport:
    """One segment file.

    Attributes
    ----------
    number, name, size, allocated
        The file.
    state
        ``"sealed"``, ``"open"`` (no seal: in use, or left by a crash), ``"foreign"`` (another store), ``"unreadable"``.
    namespace
        First 8 bytes of the namespace's digest, in hex.
    batches, records, blocks, tombstones, clears
        What it holds; superseded records count.
    stored_bytes, live_blocks, live_bytes
        Stored bytes of all its blocks, and those that no newer record supersedes.
    damage
        Texts, one for each damaged place.
    """

    number: int
    name: str
    size: int
    allocated: int
    state: str = "unreadable"
    namespace: str = ""
    batches: int = 0
    records: int = 0
    blocks: int = 0
    tombstones: int = 0
    clears: int = 0
    stored_bytes: int = 0
    live_blocks: int = 0
    live_bytes: int = 0
    damage: list[str] = field(default_factory=list)

    @property
    def dead_bytes(self) -> int:
        """Stored bytes that newer records superseded."""
        return self.stored_bytes - self.live_bytes


@dataclass(slots=True)
class DirectoryReport:
    """A whole store.

    Attributes
    ----------
    path, store_id
        The directory and the store's id in hex, empty when the superblock is bad.
    allocated
        Bytes allocated under the directory.
    segments
        By number.
    snapshot
        ``"none"``, ``"valid head"`` or ``"damaged"``.
    spare_bytes
        Size of the spare file.
    verified_blocks, verified_bytes, corrupt_blocks
        Of `verify_directory`: payloads read, and how many of them were wrong.
    damage
        Damaged places outside the segments.
    """

    path: str
    store_id: str = ""
    allocated: int = 0
    segments: list[SegmentReport] = field(default_factory=list)
    snapshot: str = "none"
    spare_bytes: int = 0
    verified_blocks: int = 0
    verified_bytes: int = 0
    corrupt_blocks: int = 0
    damage: list[str] = field(default_factory=list)

    def _sum(self, name: str) -> int:
        return sum(getattr(segment, name) for segment in self.segments)

    @property
    def records(self) -> int:
        """Records in all segments."""
        return self._sum("records")

    @property
    def live_blocks(self) -> int:
        """Blocks that no newer record supersedes, over all namespaces."""
        return self._sum("live_blocks")

    @property
    def live_bytes(self) -> int:
        """Their stored bytes."""
        return self._sum("live_bytes")

    @property
    def dead_bytes(self) -> int:
        """Stored bytes that were superseded and wait for their segment to be reclaimed."""
        return self._sum("dead_bytes")

    @property
    def all_damage(self) -> list[str]:
        """Every damaged place."""
        return self.damage + [f"{s.name}: {text}" for s in self.segments for text in s.damage]

    @property
    def ok(self) -> bool:
        """No damage was found."""
        return not self.all_damage and not self.corrupt_blocks


def look_at(path: str | os.PathLike[str]) -> tuple[bool, int | None, str]:
    """Say what a directory is to us, by its names and its lock alone. Nothing is changed or locked.

    Returns
    -------
    is a store, holder, objection
        The process that has it open: 0 for one that cannot be named, None for nobody. Why it would be refused as a
        store's directory; empty when it would not.
    """
    names = os.listdir(path)
    store = SUPERBLOCK_NAME in names or any(parse_segment_name(name) is not None for name in names)
    try:
        directory = Directory.open(path, create=False)
    except UnsafeDirectoryError as error:
        return store, None, str(error)
    try:
        return store, directory.holder(), ""
    finally:
        directory.close()


def inspect_directory(path: str | os.PathLike[str]) -> DirectoryReport:
    """Describe a store without changing or locking it.

    Raises
    ------
    FileNotFoundError
        There is no such directory.
    UnsafeDirectoryError
        It is a symlink, another user's, or writable by group or world.
    CorruptStoreError
        It is no store: neither a superblock nor a segment is in it.
    """
    directory = Directory.open(path, create=False)
    try:
        return _Inspector(directory, verify=False).run()
    finally:
        directory.close()


def verify_directory(
    path: str | os.PathLike[str], *, progress: Callable[[int, int], object] | None = None
) -> DirectoryReport:
    """Read every record and every payload of a store that nobody has open.

    Parameters
    ----------
    path
        The directory.
    progress
        Called with (bytes done, bytes in all) after each batch.

    Raises
    ------
    StoreLockedError
        The store is in use.
    FileNotFoundError, UnsafeDirectoryError, CorruptStoreError
        As for `inspect_directory`.
    """
    directory = Directory.open(path, create=False)
    try:
        names = os.listdir(directory.fd)
        if SUPERBLOCK_NAME not in names and not any(parse_segment_name(name) is not None for name in names):
            raise CorruptStoreError(f"{directory.path!r} is not a store", tier="disk", operation="verify")
        directory.lock()
        return _Inspector(directory, verify=True, progress=progress).run()
    finally:
        directory.close()


class _Inspector:
    def __init__(
        self, directory: Directory, *, verify: bool, progress: Callable[[int, int], object] | None = None
    ) -> None:
        self.directory = directory
        self.verify = verify
        self.progress = progress
        self.report = DirectoryReport(directory.path)
        self.total = 0
        self.done = 0
        self.newest: _Keys = {}
        self.cleared: set[bytes] = set()

    def run(self) -> DirectoryReport:
        report = self.report
        found = []
        strangers = True
        for name in sorted(os.listdir(self.directory.fd)):
            try:
                info = os.stat(name, dir_fd=self.directory.fd, follow_symlinks=False)
            except FileNotFoundError:
                continue
            allocated = info.st_blocks * 512
            report.allocated += allocated
            number = parse_segment_name(name)
            if number is not None:
                found.append(SegmentReport(number, name, info.st_size, allocated))
                self.total += info.st_size
            elif name == SPARE_NAME:
                report.spare_bytes = info.st_size
            strangers &= number is None and name != SUPERBLOCK_NAME
        if strangers:
            raise CorruptStoreError(f"{report.path!r} is not a store", tier="disk", operation="inspect")
        store_id = self._superblock()
        self._snapshot(store_id)
        for segment in sorted(found, key=lambda each: -each.number):
            try:
                fd = os.open(segment.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.directory.fd)
            except FileNotFoundError:
                continue  # reclaimed since
            except OSError as error:
                segment.damage.append(f"cannot be opened: {error.strerror}")
                report.segments.append(segment)
                continue
            try:
                store_id = self._segment(segment, fd, store_id)
            finally:
                os.close(fd)
            report.segments.append(segment)
            self.done += 0 if self.verify else segment.size
        report.segments.reverse()
        self._live()
        return report

    # -- the small files -----------------------------------------------------------------------------------------

    def _small(self, name: str, limit: int) -> bytes | None:
        try:
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.directory.fd)
        except OSError:
            return None
        try:
            return os.pread(fd, limit, 0)
        except OSError:
            return b""
        finally:
            os.close(fd)

    def _superblock(self) -> bytes:
        data = self._small(SUPERBLOCK_NAME, 1 << 16)
        store_id = decode_superblock(data) if data is not None else None
        if store_id is None:
            self.report.damage.append("the superblock is missing" if data is None else "the superblock is damaged")
            return b""
        self.report.store_id = store_id.hex()
        return store_id

    def _snapshot(self, store_id: bytes) -> None:
        data = self._small(SNAPSHOT_NAME, 1 << 16)
        if data is None:
            return
        head = SnapshotHead.decode(data)
        if head is not None and head.store_id == store_id:
            self.report.snapshot = "valid head"
        else:
            self.report.snapshot = "damaged"
            self.report.damage.append("the index snapshot is damaged")

    # -- segments ------------------------------------------------------------------------------------------------

    def _segment(self, report: SegmentReport, fd: int, store_id: bytes) -> bytes:
        """Fill one report; the store id, which the newest segment stands in for when the superblock is bad."""
        if not 2 * PAGE <= report.size <= SEGMENT_BYTES_MAX:
            report.damage.append("not the size of a segment")
            return store_id
        last = report.size // PAGE * PAGE - PAGE
        header = SegmentHeader.decode(self._read(fd, 0, PAGE))
        seal = Seal.decode(self._read(fd, last, PAGE), last)
        if seal is not None and seal.number != report.number:
            seal = None
        if header is None and seal is not None:
            report.damage.append("the header is damaged")
        known = header if header is not None else seal
        if known is None:
            report.damage.append("the header is damaged")
            return store_id
        if not store_id:
            store_id = known.store_id
        if known.store_id != store_id or known.number != report.number:
            report.state = "foreign"
            return store_id
        report.state = "open" if seal is None else "sealed"
        report.namespace = known.namespace[:8].hex()
        seed = segment_seed(known.store_id, known.namespace, report.number)
        if seal is not None and not self.verify and self._footer(report, fd, seed, seal, known.namespace):
            return store_id
        self._scan(report, fd, seed, seal, known)
        return store_id

    def _read(self, fd: int, offset: int, length: int) -> memoryview:
        data = bytearray(length)
        view = memoryview(data)
        done = 0
        try:
            while done < length:
                got = os.preadv(fd, [view[done:]], offset + done)
                if not got:
                    break
                done += got
        except OSError:
            pass  # zeros: they verify as nothing
        return view

    def _run(self, fd: int, scanner: Generator[tuple[int, int], memoryview, Any]) -> Any:
        try:
            want = next(scanner)
            while True:
                want = scanner.send(self._read(fd, *want))
        except StopIteration as end:
            return end.value

    def _chunks(self, fd: int, seed: int, seal: Seal) -> list[Records] | None:
        """The footer, last chunk first; None when it is damaged."""
        chunks: list[Records] = []
        offset, length, left = seal.footer, seal.footer_bytes, seal.records
        while length:
            chunk = None
            if length <= CHUNK_MAX and not length % PAGE:
                chunk = footer_chunk(self._read(fd, offset, length), offset, seed, seal)
            if chunk is None:
                return None
            records, offset, length = chunk
            chunks.append(records)
            left -= len(records)
        return None if left else chunks

    def _footer(self, report: SegmentReport, fd: int, seed: int, seal: Seal, namespace: bytes) -> bool:
        chunks = self._chunks(fd, seed, seal)
        if chunks is None:
            report.damage.append("the footer is damaged")
            return False
        report.batches = seal.batches
        for records in chunks:
            self._count(report, records, namespace)
        return True

    def _scan(self, report: SegmentReport, fd: int, seed: int, seal: Seal | None, known: SegmentHeader | Seal) -> None:
        scan = self._run(fd, scan_segment(report.size, seed))
        report.batches = len(scan.batches)
        limit = seal.durable if seal is not None else scan.durable_below
        expected = (seal.batches, seal.last_sequence) if seal is not None else (-1, -1)
        if scan.cut(known.sequence, *expected) is not None:
            report.damage.append("batches that had been written are missing")
        if self.verify and seal is not None and self._chunks(fd, seed, seal) is None:
            report.damage.append("the footer is damaged")
        for found in reversed(scan.batches):
            durable = found.offset < limit
            if found.repaired and durable:
                report.damage.append(f"the batch at {found.offset} has a damaged header")
            records = found.records()
            if self.verify:
                bad = self._run(fd, verify_batch(found))
                for index in bad:
                    records.discard(index)
                blocks = records.locations()
                self.report.verified_blocks += len(blocks) + len(bad)
                self.report.verified_bytes += records.stored_bytes
                if durable and bad:
                    self.report.corrupt_blocks += len(bad)
                    report.damage.append(f"the batch at {found.offset} has {len(bad)} damaged blocks")
                self.done += found.end - found.offset
                if self.progress is not None:
                    self.progress(self.done, self.total)
            self._count(report, records, known.namespace)

    def _count(self, report: SegmentReport, records: Any, namespace: bytes) -> None:
        """Count records, the newest first."""
        for index in range(len(records) - 1, -1, -1):
            kind, key_kind, key, _, _, stored, _, _ = records.get(index)
            report.records += bool(kind)
            if kind == BLOCK:
                report.blocks += 1
                report.stored_bytes += stored
            elif kind == TOMBSTONE:
                report.tombstones += 1
            elif kind == CLEAR:
                report.clears += 1
                self.cleared.add(namespace)
            if kind in (BLOCK, TOMBSTONE) and namespace not in self.cleared:
                place = (report.number, stored) if kind == BLOCK else (0, 0)
                self.newest.setdefault((namespace, key_kind, key), place)

    def _live(self) -> None:
        by_number = {segment.number: segment for segment in self.report.segments}
        for number, stored in self.newest.values():
            if number:
                by_number[number].live_blocks += 1
                by_number[number].live_bytes += stored
