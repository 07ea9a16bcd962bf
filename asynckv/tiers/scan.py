"""Finding the batches of a segment, whatever its bytes are. No I/O here: the scanner asks for ranges and is given
bytes, so that recovery (through a backend) and the offline commands (through the system) share every decision.

Invariants
----------
* It ends: every step moves up by at least a page. Whatever the bytes are, less than three times the file is read: what
  lies behind a page that claims to begin a chunk is read again only when half a window was gone through.
* It never asks for more than `WINDOW_MAX` bytes at once and keeps only verified headers.
* A batch counts when its header or its trailer verifies and the body parses; it then lies wholly inside the file.
* A flawed transfer is no damage: what looks damaged, or like the end of the log, is read again.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from xxhash import xxh3_64, xxh3_64_intdigest

from asynckv._record import (
    HEADER_BYTES,
    KIND_BATCH,
    KIND_CLAIM,
    KIND_FOOTER,
    Records,
    chunk_bytes,
    find_chunk,
    parse_body,
    parse_piece,
    read_chunk,
    read_trailer,
)
from asynckv.tiers.layout import CLAIM_AT, LOG_START, PAGE, Seal, pages

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Sequence

    from asynckv._record import ChunkHeader
    from asynckv.tiers.layout import SegmentHeader

__all__ = ["Found", "Scan", "footer_chunk", "scan_segment", "verify_batch"]

HOP_BYTES = 64 << 10  # read where a header is expected
SWEEP_BYTES = 1 << 20  # read where there is none
WINDOW_MAX = 4 << 20
SWEPT_CHUNK_MAX = WINDOW_MAX // 2  # none of a segment is larger: a batch's is below 1.1 MiB, a footer's below 1.3 MiB
TRIES = 3  # of a block before its bytes are damaged, which may let an older value count
Want = tuple[int, int]  # offset and bytes; always whole pages inside the file


@dataclass(slots=True)
class Found:
    """A batch: its verified header (or trailer), and a copy of header and body."""

    header: ChunkHeader
    piece: bytes
    repaired: bool = False  # only the trailer was well

    @property
    def offset(self) -> int:
        """Where the batch begins."""
        return int(self.header.offset)

    @property
    def end(self) -> int:
        """Where the next one may begin."""
        return int(self.header.offset + self.header.batch_bytes)

    def records(self) -> Records:
        """The records, parsed anew."""
        return parse_piece(self.piece)


@dataclass(slots=True)
class Scan:
    """What a scan found.

    Attributes
    ----------
    batches
        In log order.
    footer_batches, footer_sequence
        Batches of which a footer chunk speaks and the number of the last, -1 when there is none.
    claim_page
        The segment's claim, None when it has none that verifies.
    seal
        One that lies behind a footer, whosever it is.
    """

    batches: list[Found] = field(default_factory=list)
    footer_batches: int = -1
    footer_sequence: int = -1
    claim_page: ChunkHeader | None = None
    seal: Seal | None = None

    @property
    def end(self) -> int:
        """End of the last batch."""
        return self.batches[-1].end if self.batches else LOG_START

    @property
    def previous_good(self) -> int:
        """Durable batches of the segment before, as far as the batches tell."""
        return max((int(batch.header.previous_good) for batch in self.batches), default=0)

    @property
    def claim(self) -> tuple[int, int]:
        """The best claim of the claim page and all headers: (offset, complete and durable batches below it)."""
        return max(self._claims(), default=(LOG_START, 0))

    def _claims(self) -> list[tuple[int, int]]:
        claims = [batch.header for batch in self.batches]
        if self.claim_page is not None:
            claims.append(self.claim_page)
        return [(int(each.synced), int(each.good)) for each in claims]

    def _in_front_of_failed_writes(self) -> int:
        """The best claim that counts as many batches as there are."""
        offsets = [batch.offset for batch in self.batches]
        exact = [synced for synced, good in self._claims() if bisect_left(offsets, synced) == good]
        return max(exact, default=LOG_START)

    def durable(self, limit: int) -> set[int]:
        """Offsets of the batches that were durable: those below `known_durable`, and those that claims count singly.

        The latter lie between two claims of which the second counts as many more.
        """
        offsets = [batch.offset for batch in self.batches]
        found = {offset for offset in offsets if offset < limit}
        claims = sorted({(LOG_START, 0), *self._claims()})
        for (start, before), (end, good) in pairwise(claims):
            between = offsets[bisect_left(offsets, start) : bisect_left(offsets, end)]
            if len(between) == good - before:
                found.update(between)
        return found

    def _has_failed_write(self, seal: Seal | None) -> bool:
        """Whether one of the batches is a failed write that reached the disk all the same, perhaps in part."""
        limit, good = self.claim
        if sum(1 for batch in self.batches if batch.offset < limit) > good:
            return True
        counted = self.footer_batches if seal is None else len(self.batches) if seal.lossy else seal.batches
        return 0 <= counted < len(self.batches)

    def known_durable(self, header: SegmentHeader, seal: Seal | None, expected_good: int, *, ended: bool) -> int:
        """Offset below which every batch was durable: what is damaged there is no torn write.

        Parameters
        ----------
        header, seal
            Of the segment.
        expected_good
            Durable batches that newer segments know of.
        ended
            It is known to have been sealed.
        """
        seal = self.seal_of(header, seal)
        if self._has_failed_write(seal):
            return self._in_front_of_failed_writes()
        if seal is not None:
            return seal.durable
        limit = self.claim[0]
        if self.footer_batches >= 0 and ended:  # that was written when all batches were durable
            limit = max(limit, self.end)
        if header.claimed and self.claim_page is None and self.batches:  # torn: at least one batch was durable
            limit = max(limit, self.batches[0].end)
        if 0 < expected_good <= len(self.batches):
            limit = max(limit, self.batches[expected_good - 1].end)
        return limit

    def leave_out_torn(self, seal: Seal | None, batches: Sequence[tuple[Records, Sequence[int]]]) -> bool:
        """Discard the bad records, for which what was there before counts; False, and they stay, when they are damaged.

        Parameters
        ----------
        seal
            That of a damaged footer, which listed what was whole by then; None when there is none.
        batches
            Records of each batch, and the indices of those whose bytes are bad though they need not have been durable.
        """
        if seal is not None and not self._were_torn(seal, [(len(records), len(bad)) for records, bad in batches]):
            return False
        for records, bad in batches:
            for index in bad:
                records.discard(index)
        return True

    def _were_torn(self, seal: Seal, batches: Sequence[tuple[int, int]]) -> bool:
        """Whether what is whole is just what the footer listed, by records of each batch and how many are bad."""
        failed = len(self.batches) - seal.batches  # writes that it listed nothing of
        if failed:
            whole = [records for records, bad in batches if not bad]
            return len(batches) - len(whole) == failed and sum(whole) == seal.records
        return sum(records - bad for records, bad in batches) == seal.records

    def is_lossy(self, header: SegmentHeader, seal: Seal | None) -> bool:
        """Whether a recovery had found already that batches are lost: nothing older counts."""
        seal = self.seal_of(header, seal)
        return seal is not None and seal.lossy

    def seal_of(self, header: SegmentHeader, seal: Seal | None) -> Seal | None:
        """The seal at the end of the file, else one that was written behind a footer before the file was cut there."""
        if seal is None and self.seal is not None and self.seal.number == header.number:
            known = (header.store_id, header.namespace) == (self.seal.store_id, self.seal.namespace)
            return self.seal if known else None
        return seal

    def loss(self, header: SegmentHeader, seal: Seal | None, expected_good: int, *, ended: bool) -> int | None:
        """As `cut`, by whatever tells how many batches there were.

        Parameters
        ----------
        header, seal, expected_good, ended
            As for `known_durable`.
        """
        seal = self.seal_of(header, seal)
        if seal is not None:
            return self.cut(header.sequence, seal.batches, seal.last_sequence)
        if self.footer_batches >= 0:
            return self.cut(header.sequence, self.footer_batches, self.footer_sequence)
        if ended:
            return len(self.batches)  # it had a seal and a footer, and both are gone
        if self.lacks_claim(header):
            return 0
        return self.cut(header.sequence, expected_good)

    def unread(self, failed: Iterable[int]) -> int | None:
        """How many of the oldest batches may have been overwritten by one on pages that could not be read.

        None when no such page can have been the head of a batch: it is part of one that was found, or a fixed one.
        """
        heads = [
            page
            for page in failed
            if page >= LOG_START and not any(batch.offset <= page < batch.end for batch in self.batches)
        ]
        return sum(batch.offset < max(heads) for batch in self.batches) if heads else None

    def lacks_claim(self, header: SegmentHeader) -> bool:
        """Whether a claim is damaged: one is torn only where it was to speak of batches, durable by then."""
        return header.claimed and self.claim_page is None and not self.batches

    def cut(self, first_sequence: int, expected: int = -1, last_sequence: int = -1) -> int | None:
        """How many of the oldest batches may have been overwritten or undone by batches that were durable and are lost.

        None means that nothing durable is missing; else older segments are not to be trusted either. A hole that a
        failed write left is no loss: the claims do not count it. Where a loss is certain, the newest hole in the
        numbering is taken for it, so the answer errs to the safe side.

        Parameters
        ----------
        first_sequence
            Of the segment.
        expected, last_sequence
            How many batches the segment holds and the number of the last one, when a seal or a footer tells.
        """
        limit, good = self.claim
        short = sum(1 for batch in self.batches if batch.offset < limit) < good
        if len(self.batches) < expected:
            short = True
            limit = self.end
            if not self.batches or self.batches[-1].header.sequence < last_sequence:
                return len(self.batches)
        if not short:
            return None
        if self.end < limit:  # perhaps it was the newest that is gone
            return len(self.batches)
        for index in range(len(self.batches) - 1, -1, -1):
            end = self.batches[index - 1].end if index else LOG_START
            sequence = self.batches[index - 1].header.sequence if index else first_sequence - 1
            if end < limit and self.batches[index].header.sequence != sequence + 1:
                return index
        return len(self.batches)


class _Window:
    """The bytes read last."""

    __slots__ = ("data", "size", "start")

    def __init__(self, size: int) -> None:
        self.size = size // PAGE * PAGE
        self.start = 0
        self.data = memoryview(b"")

    def need(self, offset: int, length: int, ahead: int) -> Generator[Want, memoryview, int]:
        """Have [offset, offset + length) at hand; its position in `data`, -1 when the file ends before."""
        end = offset + length
        if end > self.size or length > WINDOW_MAX:
            return -1
        if not (self.start <= offset and end <= self.start + len(self.data)):
            self.data = yield (offset, min(max(length, ahead), self.size - offset))
            self.start = offset
        return offset - self.start


def scan_segment(size: int, seed: int) -> Generator[Want, memoryview, Scan]:
    """Read the claim, then look for batches from there to the end of the file.

    A generator: yields (offset, bytes) and is sent that much; returns the `Scan`.

    Parameters
    ----------
    size
        Bytes of the file.
    seed
        Of the segment's checksums.
    """
    window = _Window(size)
    scan = Scan()
    position = LOG_START
    ahead = HOP_BYTES
    at = yield from window.need(CLAIM_AT, PAGE, ahead)
    if at >= 0:
        scan.claim_page = read_chunk(window.data, at, KIND_CLAIM, seed, CLAIM_AT)
    while position + PAGE <= window.size:
        found = yield from _header_at(window, position, seed, ahead)
        if found is None:
            found = yield from _resync(window, scan, position, seed)
        if found is None:
            window = _Window(size)
            found = yield from _header_at(window, position, seed, PAGE)
        if found is None:
            break
        scan.batches.append(found)
        position = found.end
        ahead = HOP_BYTES
    return scan


def _header_at(window: _Window, position: int, seed: int, ahead: int) -> Generator[Want, memoryview, Found | None]:
    at = yield from window.need(position, PAGE, ahead)
    whole = chunk_bytes(window.data, at) if at >= 0 else 0
    if not whole:
        return None
    at = yield from window.need(position, whole, ahead)
    if at < 0:
        return None
    header = read_chunk(window.data, at, KIND_BATCH, seed, position)
    return None if header is None else _found(window, at, header)


def _found(window: _Window, at: int, header: ChunkHeader, repaired: bool = False) -> Found | None:
    """Check that the batch lies inside the file and makes sense."""
    begin = header.offset + header.header_bytes
    end = begin + header.payload_bytes
    if end + header.header_bytes > window.size or header.payload_bytes % PAGE:
        return None
    if parse_body(window.data, at, header, begin, end) is None:
        return None
    return Found(header, bytes(window.data[at : at + HEADER_BYTES + header.body_bytes]), repaired)


def _resync(window: _Window, scan: Scan, start: int, seed: int) -> Generator[Want, memoryview, Found | None]:
    """Go on page by page from a page that is no header: to a trailer of a batch from there on, or to a header."""
    position = start
    while position + PAGE <= window.size:
        at = yield from window.need(position, PAGE, SWEEP_BYTES)
        hit = find_chunk(window.data, at, len(window.data))
        if hit < 0:
            position = window.start + len(window.data)
            continue
        position = window.start + hit
        whole = chunk_bytes(window.data, hit)
        if 0 < whole <= SWEPT_CHUNK_MAX:
            at = yield from window.need(position, whole, WINDOW_MAX)
            if at >= 0:
                header = read_chunk(window.data, at, KIND_BATCH, seed, position) if position != start else None
                if header is not None:
                    found = _found(window, at, header)
                    if found is not None:
                        return found
                header = read_trailer(window.data, at, seed, position)
                if header is not None and header.offset >= start:
                    found = _found(window, at, header, repaired=True)
                    if found is not None:
                        return found
                header = read_chunk(window.data, at, KIND_FOOTER, seed, position)
                if header is not None:
                    scan.footer_batches = max(scan.footer_batches, int(header.payload_bytes))
                    scan.footer_sequence = max(scan.footer_sequence, int(header.sequence))
                    at = yield from window.need(position + whole, PAGE, PAGE)
                    if at >= 0:
                        behind = Seal.decode(bytes(window.data[at : at + PAGE]), position + whole)
                        scan.seal = behind or scan.seal
        position += PAGE
    return None


def footer_chunk(data: memoryview, offset: int, seed: int, seal: Seal) -> tuple[Records, int, int] | None:
    """Verify one footer chunk: (records, offset and bytes of the chunk before), None when it is damaged."""
    header = read_chunk(data, 0, KIND_FOOTER, seed, offset)
    if header is None or header.header_bytes != len(data):
        return None
    records = parse_body(data, 0, header, LOG_START, seal.data_end)
    if records is None:
        return None
    before, length = int(header.synced), int(header.good)
    if length and not seal.data_end <= before <= offset - length:
        return None
    return records, before, length


def verify_batch(found: Found) -> Generator[Want, memoryview, list[int]]:
    """Check the payloads of a batch; the indices of the records whose bytes are damaged."""
    size = found.offset + found.header.header_bytes + int(found.header.payload_bytes)
    doubtful = sorted(found.records().locations(), key=lambda each: each[1])
    for _ in range(TRIES):
        window, bad = _Window(size), []
        for location in doubtful:
            _, offset, stored, checksum = location
            if (yield from _digest(window, offset, stored)) != checksum:
                bad.append(location)
        doubtful = bad
    return [index for index, *_ in doubtful]


def _digest(window: _Window, offset: int, stored: int) -> Generator[Want, memoryview, int]:
    """Checksum of a payload."""
    first = offset // PAGE * PAGE
    length = pages(offset + stored - first)
    if length <= SWEEP_BYTES:
        at = yield from window.need(first, length, SWEEP_BYTES)
        at += offset - first
        return xxh3_64_intdigest(window.data[at : at + stored])
    hasher = xxh3_64()
    left, position = stored, offset
    while left:
        first = position // PAGE * PAGE
        piece = min(left, SWEEP_BYTES - (position - first))
        length = pages(position + piece - first)
        at = yield from window.need(first, length, length)
        hasher.update(window.data[at + position - first : at + position - first + piece])
        position += piece
        left -= piece
    return hasher.intdigest()
