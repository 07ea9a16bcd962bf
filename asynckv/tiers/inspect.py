"""Looking at a store from outside: what its directory holds, and whether every byte is well. Never writes to it.

The same scanner and decoders as recovery, fed by plain system calls. `inspect_directory` needs no lock: what it sees
of a store in use is a moment's picture, and a batch half written may be in it. `verify_directory` takes the lock.
"""

from __future__ import annotations

import contextlib
import os
import stat
from dataclasses import replace
from typing import TYPE_CHECKING

from xxhash import xxh3_64

from asynckv._record import (
    BLOCK,
    CLEAR,
    KIND_SNAPSHOT,
    TOMBSTONE,
    find_chunk,
    parse_body,
    read_chunk,
    read_trailer,
)
from asynckv.blocks import namespace_digest
from asynckv.errors import CorruptStoreError, UnsafeDirectoryError
from asynckv.tiers.directory import Directory
from asynckv.tiers.evidence import Evidence, proven_header, scannable, voted_id
from asynckv.tiers.layout import (
    LOG_START,
    PAGE,
    SNAPSHOT_NAME,
    SPARE_NAMES,
    SUPERBLOCK_NAME,
    Seal,
    SegmentHeader,
    SnapshotHead,
    decode_superblock,
    encode_superblock,
    parse_segment_name,
    segment_seed,
    snapshot_seed,
)
from asynckv.tiers.offline import SegmentFile, footer_chunks, read_range
from asynckv.tiers.report import LIVE, LOST, REMOVED, BlockPlace, DirectoryReport, SegmentReport, Space
from asynckv.tiers.scan import scan_segment, verify_batch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from asynckv._record import Records
    from asynckv.tiers.scan import Found, Scan

__all__ = [
    "DirectoryReport",
    "SegmentReport",
    "inspect_directory",
    "is_store",
    "locked_store",
    "look_at",
    "verify_directory",
]

WINDOW_BYTES = 1 << 20


def is_store(names: Iterable[str]) -> bool:
    """Whether a directory with these names in it is a store's."""
    return any(name == SUPERBLOCK_NAME or parse_segment_name(name) is not None for name in names)


def look_at(path: str | os.PathLike[str]) -> tuple[bool, int | None, str]:
    """Say what a directory is to us, by its names and its lock alone. Nothing is changed or locked.

    Returns
    -------
    is a store, holder, objection
        The process that has it open: 0 for one that cannot be named, None for nobody. Why it would be refused as a
        store's directory; empty when it would not.
    """
    store = is_store(os.listdir(path))
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
        return Inspector(directory, verify=False).run()
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
        Called with (bytes done, bytes in all) now and then.

    Raises
    ------
    StoreLockedError
        The store is in use.
    FileNotFoundError, UnsafeDirectoryError, CorruptStoreError
        As for `inspect_directory`.
    """
    with locked_store(path) as directory:
        return Inspector(directory, verify=True, progress=progress).run()


@contextlib.contextmanager
def locked_store(path: str | os.PathLike[str]) -> Iterator[Directory]:
    """Open a store's directory and hold its lock; for errors see `verify_directory`."""
    directory = Directory.open(path, create=False)
    try:
        if not is_store(os.listdir(directory.fd)):
            raise CorruptStoreError(f"{directory.path!r} is not a store", tier="disk", operation="verify")
        directory.lock()
        yield directory
    finally:
        directory.close()


class Inspector:
    """One look at a directory; `run` gives the report.

    Parameters
    ----------
    directory
        Open; locked, when payloads are to be verified.
    verify
        Read the payloads too, and hold what the segments say of each other against what is there: of a store in use
        that changes while one looks.
    progress
        Called with (bytes done, bytes in all) now and then.
    """

    def __init__(
        self, directory: Directory, *, verify: bool, progress: Callable[[int, int], object] | None = None
    ) -> None:
        self.directory = directory
        self.verify = verify
        self.progress = progress
        self.report = DirectoryReport(directory.path)
        self.spaces = self.report.spaces
        self.files: list[SegmentFile] = []
        self.total = 0
        self.done = 0
        self.oldest_live = 0
        self.evidence = Evidence(b"")
        self.unreadable: list[SegmentFile] = []  # nobody's, as far as their bytes tell

    def run(self) -> DirectoryReport:
        """Look at everything."""
        self._list()
        for file in self.files:
            file.peek()
        self.evidence = Evidence(self._superblock())
        self._weigh()
        for file in sorted(self.files, key=lambda each: -each.report.number):
            if file.error or not file.sized:
                file.report.damage.append(
                    f"cannot be opened: {file.error}" if file.error else "not the size of a segment"
                )
                self._lose(file)
                continue
            if not file.open():
                continue  # reclaimed since
            try:
                self._segment(file)
            finally:
                file.close()
            self.done += 0 if self.verify else file.report.size
        self._live()
        return self.report

    def _weigh(self) -> None:
        """Learn from all pages what an opening learns from them."""
        evidence = self.evidence
        head = self._head()
        for file in self.files:
            evidence.learn(file.header, file.seal)
        evidence.learn_snapshot(head)
        for file in self.files:
            evidence.learn_claim(file.report.number, file.claim, (file.space, namespace_digest(None)))
            header, seal = file.own(evidence.store_id)
            for page in (header, seal):
                if page is not None:
                    self.oldest_live = max(self.oldest_live, page.oldest_live)
            if file.elsewhere(evidence.store_id) and file.header is not None:
                self._space(file.header.namespace).displaced.add(file.header.number)
        if head is not None and self.verify and not self._entries(head):
            self._snapshot_damaged()

    def _space(self, digest: bytes) -> Space:
        return self.spaces.setdefault(digest, Space(digest))

    def _list(self) -> None:
        report = self.report
        names = sorted(os.listdir(self.directory.fd))
        if not is_store(names):
            raise CorruptStoreError(f"{report.path!r} is not a store", tier="disk", operation="inspect")
        for name in names:
            try:
                info = os.stat(name, dir_fd=self.directory.fd, follow_symlinks=False)
            except FileNotFoundError:
                continue
            allocated = info.st_blocks * 512
            report.allocated += allocated
            number = parse_segment_name(name)
            if number is not None:
                segment = SegmentReport(number, name, info.st_size, allocated, info.st_mtime)
                report.segments.append(segment)
                self.total += info.st_size
                file = SegmentFile(self.directory, segment)
                if not stat.S_ISREG(info.st_mode):
                    file.plain, file.error = False, "not a plain file"
                self.files.append(file)
            elif name in SPARE_NAMES:
                if stat.S_ISREG(info.st_mode):
                    report.spare_bytes += info.st_size
                else:
                    report.damage.append(f"{name!r} is not a file")

    # -- the small files -----------------------------------------------------------------------------------------

    def _small(self, name: str, limit: int) -> bytes | None:
        try:
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=self.directory.fd)
        except OSError:
            return None if name not in os.listdir(self.directory.fd) else b""
        try:
            return os.pread(fd, limit, 0)
        except OSError:
            return b""
        finally:
            os.close(fd)

    def _superblock(self) -> bytes:
        """The store id: from the superblock, else what most segments say, as at an opening."""
        data = self._small(SUPERBLOCK_NAME, 1 << 16)
        store_id = decode_superblock(data) if data is not None else None
        if store_id is not None:
            self.report.store_id = store_id.hex()
            if data != encode_superblock(store_id):
                self.report.damage.append("one copy of the superblock is damaged")
            return store_id
        self.report.damage.append("the superblock is missing" if data is None else "the superblock is damaged")
        return voted_id(page for file in self.files for page in (file.header, file.seal))

    def _head(self) -> SnapshotHead | None:
        """The head of the snapshot, when it is this store's."""
        data = self._small(SNAPSHOT_NAME, 1 << 16)
        if data is None:
            return None
        head = SnapshotHead.decode(data)
        if head is None or head.store_id != self.evidence.store_id:
            self._snapshot_damaged()
            return None
        self.report.snapshot = "valid head"
        return head

    def _snapshot_damaged(self) -> None:
        self.report.snapshot = "damaged"
        self.report.damage.append("the index snapshot is damaged")

    def _entries(self, head: SnapshotHead) -> bool:
        """Read the whole snapshot into its namespace; False when it is damaged."""
        seed = snapshot_seed(head.store_id, head.namespace)
        start = SnapshotHead.head_bytes(len(head.segments))
        numbers = [number for number, _ in head.segments]
        space = Space(head.namespace, indexed=True)
        if head.namespace in self.spaces:
            space.displaced = self.spaces[head.namespace].displaced
        fd = os.open(SNAPSHOT_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.directory.fd)
        total = 0
        try:
            size = os.fstat(fd).st_size
            if not head.fits(size):
                return False
            for chunk in range(head.chunks):
                place = start + chunk * head.chunk_bytes
                data = read_range(fd, place, min(head.chunk_bytes, size - place))
                header = read_chunk(data, 0, KIND_SNAPSHOT, seed, place)
                records = None if header is None else parse_body(data, 0, header, LOG_START, n_segments=len(numbers))
                if records is None:
                    return False
                total += len(records)
                for index in range(len(records)):
                    _, kind, key, desc, offset, stored, checksum, listed = records.get(index)
                    entry = BlockPlace(LIVE, numbers[listed], offset, stored, checksum, desc or b"")
                    space.keys[kind, key] = entry
        finally:
            os.close(fd)
        if total != head.entries:
            return False
        present = {number for number in self._present(head.namespace) if not self._is_dead(number, space)}
        if present - set(numbers):
            return False  # older than the log
        dead = {number for number in numbers if self._is_dead(number, space)}
        space.keys = {name: entry for name, entry in space.keys.items() if entry.segment not in dead}
        gone = set(numbers) - present - dead
        self.report.damage += [f"segment {number} is missing" for number in sorted(gone)]
        space.broken = bool(gone)
        for name, entry in space.keys.items():
            if entry.segment in gone:
                space.keys[name] = replace(entry, state=LOST)
        self.spaces[head.namespace] = space
        return True

    # -- segments ------------------------------------------------------------------------------------------------

    def _present(self, digest: bytes) -> set[int]:
        """Numbers of the files that an opening takes for segments of a namespace."""
        found = set()
        for file in self.files:
            header, _ = file.own(self.evidence.store_id)
            number, size = file.report.number, file.report.size
            if header is not None:
                mine = header.namespace == digest
            else:
                mine = file.header is None or file.elsewhere(self.evidence.store_id)
                mine = mine and file.plain and scannable(size) and self.evidence.perhaps(digest, number, size)
            if mine:
                found.add(number)
        return found

    def _lose(self, file: SegmentFile) -> None:
        """Nothing in a file is of a namespace that we know."""
        if file.plain:
            self.unreadable.append(file)
        for space in self.spaces.values():
            self._indexed_only(file, space)

    def _segment(self, file: SegmentFile) -> None:
        report = file.report
        header, seal = file.own(self.evidence.store_id)
        misplaced = file.elsewhere(self.evidence.store_id)
        if header is None and file.header is not None and not misplaced:
            report.state = "foreign"
            return
        if header is None or header is not file.header:
            header = header or self._guess(file)
            if header is None and misplaced:
                assert file.header is not None
                report.state = "misplaced"
                report.damage.append(f"this is segment {file.header.number} under another name")
            else:
                report.damage.append("the header is damaged")
        if header is None:
            if not misplaced:
                self._orphan(file)
            self._lose(file)
            return
        report.state = "open" if seal is None else "sealed"
        space = self._space(header.namespace)
        report.namespace = space.name
        if self._is_dead(report.number, space):
            report.state = "dead"
            return
        if space.indexed and seal is None:  # a snapshot lists sealed ones only
            report.damage.append("the seal is damaged")
            space.sealed_upto = max(space.sealed_upto, report.number)
        skipped = self.verify and not space.indexed and self._chain(report, space, header, seal)
        ended, space.ended = space.ended, space.ended or skipped
        self._contents(file, space, header, seal)
        if skipped:
            space.ended = ended

    def _guess(self, file: SegmentFile) -> SegmentHeader | None:
        """A header that the file's claim or records prove, under one of the namespaces that are known."""
        number, size = file.report.number, file.report.size
        if not scannable(size):
            return None
        for digest in dict.fromkeys([*self.evidence.named, namespace_digest(None)]):
            if not self.evidence.perhaps(digest, number, size):
                continue
            scan: Scan = file.run(scan_segment(size, segment_seed(self.evidence.store_id, digest, number)))
            first = scan.batches[0].header if scan.batches else scan.claim_page
            if first is not None:
                made = self.made_size(digest) or size
                return proven_header(self.evidence.store_id, digest, number, made, first)
        return None

    def made_size(self, digest: bytes) -> int:
        """The size that a namespace's segments are made with; 0 when no page tells."""
        known = [page for file in self.files for page in file.own(self.evidence.store_id) if page is not None]
        return max((page.size for page in known if page.namespace == digest), default=0)

    def _orphan(self, file: SegmentFile) -> None:
        """Nothing in it is of a namespace that we know. Are there records of one that we do not know?"""
        for start in range(0, file.report.size // PAGE * PAGE, WINDOW_BYTES):
            data = file.read(start, min(WINDOW_BYTES, file.report.size // PAGE * PAGE - start))
            if find_chunk(data, 0, len(data)) >= 0:
                file.report.orphaned = True
                file.report.damage.append("it holds records of a namespace that no other file names")
                break

    def _chain(self, report: SegmentReport, space: Space, header: SegmentHeader, seal: Seal | None) -> bool:
        """Hold a segment against what newer ones say of it, as recovery does; whether it would be left out."""
        number, expected = report.number, space.expected
        if not space.ended:
            missing = 0
            if expected is not None:
                missing = expected if number < expected else 0
            elif any(each > number for each in space.displaced and space.displaced - self._present(space.digest)):
                report.damage.append("a newer segment has lost its name")
                space.ended = space.broken = True
            elif self._has_lost(space.digest, number):
                space.ended = True  # one of them may have been newer, and have replaced or removed anything
            if not missing and expected is None and seal is not None and seal.next > number:
                missing = seal.next
            if missing and not self._is_dead(missing, space):
                report.damage.append(f"segment {missing}, which was newer, is missing")
                space.ended = space.broken = True
        if expected is not None and number > expected:
            return True  # it was given up before the newer ones were made
        space.sealed_upto = max(space.sealed_upto, header.sealed_upto)
        if seal is None and number <= space.sealed_upto:
            report.damage.append("the seal is damaged")
        space.expected = seal.previous if seal is not None else header.previous
        return False

    def _has_lost(self, digest: bytes, number: int) -> bool:
        """Whether a file that may have been a newer segment of a namespace is nobody's any more."""
        lost = [file.report for file in self.unreadable]
        return any(each.number > number and self.evidence.perhaps(digest, each.number, each.size) for each in lost)

    def _contents(self, file: SegmentFile, space: Space, header: SegmentHeader, seal: Seal | None) -> None:
        report = file.report
        seed = segment_seed(header.store_id, header.namespace, report.number)
        chunks = footer_chunks(file, seed, seal) if seal is not None else None
        if seal is not None and chunks is None:
            report.damage.append("the footer is damaged")
        if chunks is None:
            scan: Scan = file.run(scan_segment(report.size, seed))
            self._scanned(file, space, header, seal, scan, seed)
        else:
            assert seal is not None
            report.batches, report.complete = seal.batches, True
            for records in chunks:
                self._count(report, space, records, self._damaged(file, records))
            space.ended |= seal.lossy
            space.expected_good = seal.previous_good
            if self.verify:
                scan = file.run(scan_segment(report.size, seed))
                if scan.loss(header, seal, 0, ended=False) is not None:
                    report.damage.append("batches that had been written are missing")
                elif scan.lacks_claim(header):
                    report.damage.append("the claim is damaged")
                limit = scan.known_durable(header, seal, 0, ended=False)
                for found in scan.batches:
                    if found.offset < limit:
                        self._copies(file, found, seed)
        if not report.complete:
            self._indexed_only(file, space)
        self._step(0)

    def _scanned(
        self, file: SegmentFile, space: Space, header: SegmentHeader, seal: Seal | None, scan: Scan, seed: int
    ) -> None:
        """A segment without a footer, batch by batch; the same decisions as in recovery."""
        report = file.report
        report.batches = len(scan.batches)
        ended = self.verify and (report.number <= space.sealed_upto or report.size < header.size)
        limit = scan.known_durable(header, seal, space.expected_good, ended=ended)
        cut = scan.loss(header, seal, space.expected_good, ended=ended)
        if cut is not None:
            report.damage.append("batches that had been written are missing")
        report.complete = cut is None
        known = scan.durable(limit)
        batches: list[tuple[Records, list[int]]] = []
        for found in scan.batches:
            unsure = self.verify and found.offset not in known
            batches.append((found.records(), file.run(verify_batch(found)) if unsure else []))
        scan.leave_out_torn(scan.seal_of(header, seal), batches)
        for index in range(len(batches) - 1, -1, -1):
            found, records = scan.batches[index], batches[index][0]
            space.sealed_upto = max(space.sealed_upto, int(found.header.sealed_upto))
            if not space.indexed:  # else an opening does not look at batches
                space.oldest_live = max(space.oldest_live, int(found.header.oldest_live))
            space.ended |= cut is not None and index < cut
            damaged = self._damaged(file, records)
            if self.verify and found.offset in known:
                self._copies(file, found, seed)
            self._count(report, space, records, damaged)
        space.ended |= cut is not None or scan.is_lossy(header, seal)
        space.expected_good = scan.previous_good if seal is None else seal.previous_good

    def _copies(self, file: SegmentFile, found: Found, seed: int) -> None:
        """Hold the second copy of a durable batch's header against the first."""
        if found.repaired:
            file.report.damage.append(f"the batch at {found.offset} has a damaged header")
            return
        place = found.end - int(found.header.header_bytes)
        if read_trailer(file.read(place, int(found.header.header_bytes)), 0, seed, place) is None:
            file.report.damage.append(f"the batch at {found.offset} has a damaged trailer")

    def _damaged(self, file: SegmentFile, records: Records) -> set[int]:
        """Indices of the blocks whose bytes are not those that were written."""
        bad: set[int] = set()
        if not self.verify:
            return bad
        window, start = memoryview(b""), 0
        for index, offset, stored, checksum in sorted(records.locations(), key=lambda each: each[1]):
            hasher, position = xxh3_64(), offset
            while position < offset + stored:
                if not start <= position < start + len(window):
                    start = position // PAGE * PAGE
                    window = file.read(start, min(WINDOW_BYTES, file.report.size - start))
                    if not window:
                        break
                piece = window[position - start : offset + stored - start]
                hasher.update(piece)
                position += len(piece)
            if hasher.intdigest() != checksum:
                bad.add(index)
                file.report.damage.append(f"the block at {offset}, {stored:,} bytes, is damaged")
            self.report.verified_blocks += 1
            self.report.verified_bytes += stored
            self._step(stored)
        self.report.corrupt_blocks += len(bad)
        return bad

    def _step(self, done: int) -> None:
        self.done += done
        if self.progress is not None:
            self.progress(self.done, self.total)

    def _is_dead(self, number: int, space: Space) -> bool:
        return number < max(self.oldest_live, space.oldest_live)

    def _indexed_only(self, file: SegmentFile, space: Space) -> None:
        """Blocks that only the snapshot still knows of."""
        for key, place in space.keys.items() if space.indexed else ():
            if place.segment == file.report.number and place.state == LIVE and not file.whole(place):
                space.keys[key] = replace(place, state=LOST)

    def _count(self, report: SegmentReport, space: Space, records: Records, damaged: set[int]) -> None:
        """Count records, the newest first; the first sight of a key is final."""
        number = report.number
        for index in range(len(records) - 1, -1, -1):
            kind, key_kind, key, desc, offset, stored, checksum, _ = records.get(index)
            report.records += bool(kind)
            name = (key_kind, key)
            if kind == BLOCK:
                report.blocks += 1
                report.stored_bytes += stored
                place = BlockPlace(LOST if index in damaged else LIVE, number, offset, stored, checksum, desc or b"")
                if not space.indexed and not space.ended:
                    space.keys.setdefault(name, place)
                elif space.indexed and place.state == LOST:
                    entry = space.keys.get(name)
                    if entry is not None and (entry.segment, entry.offset) == (number, offset):
                        space.keys[name] = place
            elif kind == TOMBSTONE:
                report.tombstones += 1
                if not space.indexed and not space.ended:
                    space.keys.setdefault(name, BlockPlace(REMOVED, number))
            elif kind == CLEAR:
                report.clears += 1
                space.ended = True

    def _live(self) -> None:
        by_number = {segment.number: segment for segment in self.report.segments}
        for space in self.spaces.values():
            for place in space.live:
                by_number[place.segment].live_blocks += 1
                by_number[place.segment].live_bytes += place.stored
