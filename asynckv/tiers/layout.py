"""The fixed pages of a store: superblock, segment header, seal, head of a snapshot. docs/format.md draws them.

All integers are little-endian. Every page begins with a magic, the checksum of what follows it, and the format
version. These pages verify by themselves (checksum seed 0) and name what they belong to, so that a page of another
store, another segment or another place is recognised as such. Decoders return None for whatever is not exactly
right.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from asynckv._record import FORMAT_VERSION, HEADER_BYTES, PAGE_BYTES

__all__ = [
    "CLAIM_AT",
    "LOG_START",
    "NAMED_MAX",
    "NUMBER_MAX",
    "PAGE",
    "SEGMENT_NAME",
    "SPARE_NAMES",
    "Seal",
    "SegmentHeader",
    "SnapshotHead",
    "pages",
    "parse_segment_name",
    "segment_name",
    "segment_seed",
    "snapshot_seed",
]

PAGE = PAGE_BYTES
CLAIM_AT = PAGE  # the page behind the header says what is durable; the only one that is ever overwritten
LOG_START = 2 * PAGE  # the first batch
NUMBER_MAX = 10**15  # segment numbers of a real store stay far below; a file name has room for one digit more
NAMED_MAX = NUMBER_MAX // 2  # of those that a page names: what is written later gets higher ones
SEQUENCE_MAX = 1 << 62  # of batches: a number from there on would leave none for those to come
SEGMENT_BYTES_MAX = (1 << 32) - (1 << 16)  # offsets are 32 bits in the index
SUPERBLOCK_NAME = "superblock"
SNAPSHOT_NAME = "index.snap"
CHUNK_STRIDE = 256 << 10  # from one chunk of a snapshot to the next
LOCK_NAME = "lock"
SPARE_NAME = "spare"
SPARE_NAMES = (SPARE_NAME, "spare.tmp")  # the second where something that is no file has the first
SEGMENT_NAME = re.compile(r"\d{16}\.seg", re.ASCII)

_COMMON = struct.Struct("<8sQHH4x")  # magic, checksum, version, flags
_SUPER_MAGIC = b"AKVSUPER"
_SEGMENT_MAGIC = b"AKVSEGMT"
_SEAL_MAGIC = b"AKVSEAL\x00"
_SNAPSHOT_MAGIC = b"AKVSNAPS"
_SUPER = struct.Struct("<16s")
_SUPER_COPY = 2048
_SEGMENT = struct.Struct("<16s32sQQQQQQ")
_SEAL = struct.Struct("<16s32sQQQQQQQQQQQQQQQ")
_SNAPSHOT = struct.Struct("<16s32sQQQQQQ")
_LISTED = struct.Struct("<QQ")
_CHECKED_FROM = 16
FLAG_LOSSY = 1  # of a seal
FLAG_CLAIMED = 1  # of a segment header


def pages(length: int) -> int:
    """Round a length up to whole pages."""
    return -(-length // PAGE) * PAGE


def segment_name(number: int) -> str:
    """File name of a segment."""
    return f"{number:016d}.seg"


def parse_segment_name(name: str) -> int | None:
    """Segment number of a file name, None for other files."""
    return int(name[:16]) if SEGMENT_NAME.fullmatch(name) else None


def segment_seed(store_id: bytes, namespace: bytes, number: int) -> int:
    """Seed of the chunk checksums of one segment."""
    return int(xxh3_64_intdigest(store_id + namespace + number.to_bytes(8, "little"), seed=0))


def snapshot_seed(store_id: bytes, namespace: bytes) -> int:
    """Seed of the chunk checksums of a snapshot."""
    return int(xxh3_64_intdigest(store_id + namespace + b"snapshot", seed=0))


def _seal_page(magic: bytes, body: bytes, size: int, flags: int = 0) -> bytes:
    rest = _COMMON.pack(magic, 0, FORMAT_VERSION, flags)[_CHECKED_FROM:] + body
    rest += bytes(size - _CHECKED_FROM - len(rest))
    return magic + xxh3_64_intdigest(rest, seed=0).to_bytes(8, "little") + rest


def _open_page(magic: bytes, data: bytes | bytearray | memoryview) -> tuple[int, memoryview] | None:
    """Flags and body of a page whose magic, checksum and version are right."""
    if len(data) < _COMMON.size or bytes(data[:8]) != magic:
        return None
    _, checksum, version, flags = _COMMON.unpack_from(data)
    if version != FORMAT_VERSION or xxh3_64_intdigest(memoryview(data)[_CHECKED_FROM:], seed=0) != checksum:
        return None
    return flags, memoryview(data)[_COMMON.size :]


def encode_superblock(store_id: bytes) -> bytes:
    """The superblock file: one page that holds the same record twice."""
    return _seal_page(_SUPER_MAGIC, _SUPER.pack(store_id), _SUPER_COPY) * 2


def decode_superblock(data: bytes) -> bytes | None:
    """Store id from either copy."""
    for start in (0, _SUPER_COPY):
        found = _open_page(_SUPER_MAGIC, data[start : start + _SUPER_COPY])
        if found is not None and len(found[1]) >= _SUPER.size:
            return bytes(_SUPER.unpack_from(found[1])[0])
    return None


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """Page 0 of a segment.

    Attributes
    ----------
    store_id, namespace
        Whose blocks these are: 16 random bytes and the digest of the namespace.
    number
        Segment number; equals the file name.
    oldest_live
        Segments below this number were dead when this one was created.
    sequence
        Sequence number of the first batch that may be in it.
    size
        Bytes of the file while it is appended to.
    sealed_upto
        Segments up to this number were sealed and durable, or dead, when this one was created.
    previous
        Number of the segment of the same namespace before this one; 0 when there was none.
    claimed
        The segment has had a claim from its birth on.
    """

    store_id: bytes
    namespace: bytes
    number: int
    oldest_live: int
    sequence: int
    size: int
    sealed_upto: int
    previous: int
    claimed: bool = False

    def encode(self) -> bytes:
        """The page."""
        body = _SEGMENT.pack(
            self.store_id,
            self.namespace,
            self.number,
            self.oldest_live,
            self.sequence,
            self.size,
            self.sealed_upto,
            self.previous,
        )
        return _seal_page(_SEGMENT_MAGIC, body, PAGE, FLAG_CLAIMED if self.claimed else 0)

    @staticmethod
    def named_space(data: bytes | bytearray | memoryview) -> bytes:
        """What a page that does not verify gives as the namespace: worth a try, no more."""
        return bytes(data[_COMMON.size + 16 : _COMMON.size + 48])

    @classmethod
    def decode(cls, data: bytes | memoryview) -> SegmentHeader | None:
        """Parse a page; None when it is not a segment header."""
        found = _open_page(_SEGMENT_MAGIC, data[:PAGE])
        if found is None or len(data) < PAGE:
            return None
        header = cls(*(*_SEGMENT.unpack_from(found[1]), bool(found[0] & FLAG_CLAIMED)))
        if header.number > NAMED_MAX or header.previous >= max(header.number, 1):
            return None
        if header.oldest_live > header.number or header.sealed_upto > header.number or header.sequence >= SEQUENCE_MAX:
            return None
        return header


@dataclass(frozen=True, slots=True)
class Seal:
    """The last page of a sealed segment.

    Attributes
    ----------
    store_id, namespace, number, oldest_live, sequence, size
        As in `SegmentHeader`, of which this is the second copy; `oldest_live` as of the sealing.
    offset
        Where this page belongs.
    data_end
        End of the last batch.
    durable
        Batches below this offset were durable before the sealing began. Of those above, which a recovery found, the
        footer lists what was whole.
    footer, footer_bytes
        The last footer chunk; each names the one before it. 0 bytes when there are no records.
    batches, last_sequence
        Complete batches, and the last one's sequence number.
    records
        Records in the footer.
    previous, previous_good
        As in a batch's header.
    next
        Number of the segment that was made before this one was sealed; 0 when there was none.
    lossy
        Batches that had been durable were missing when a recovery sealed the segment.
    """

    store_id: bytes
    namespace: bytes
    number: int
    oldest_live: int
    sequence: int
    size: int
    offset: int
    data_end: int
    durable: int
    footer: int
    footer_bytes: int
    batches: int
    last_sequence: int
    records: int
    previous: int
    previous_good: int
    next: int
    lossy: bool = False

    def encode(self) -> bytes:
        """The page."""
        body = _SEAL.pack(
            self.store_id,
            self.namespace,
            self.number,
            self.oldest_live,
            self.sequence,
            self.size,
            self.offset,
            self.data_end,
            self.durable,
            self.footer,
            self.footer_bytes,
            self.batches,
            self.last_sequence,
            self.records,
            self.previous,
            self.previous_good,
            self.next,
        )
        return _seal_page(_SEAL_MAGIC, body, PAGE, FLAG_LOSSY if self.lossy else 0)

    @classmethod
    def decode(cls, data: bytes | memoryview, offset: int) -> Seal | None:
        """Parse a page that was read from an offset; None when it is not the seal that belongs there."""
        found = _open_page(_SEAL_MAGIC, data[:PAGE])
        if found is None or len(data) < PAGE:
            return None
        seal = cls(*(*_SEAL.unpack_from(found[1]), bool(found[0] & FLAG_LOSSY)))
        if seal.offset != offset or not LOG_START <= seal.data_end <= offset:
            return None
        if seal.number > NAMED_MAX or seal.previous >= max(seal.number, 1):
            return None
        if seal.next and not seal.number < seal.next <= NAMED_MAX:
            return None
        if max(seal.sequence, seal.last_sequence) >= SEQUENCE_MAX or seal.oldest_live > seal.number:
            return None
        if seal.footer_bytes and not seal.data_end <= seal.footer <= offset - seal.footer_bytes:
            return None
        return seal


@dataclass(frozen=True, slots=True)
class SnapshotHead:
    """The first pages of an index snapshot.

    Attributes
    ----------
    store_id, namespace
        As in `SegmentHeader`.
    next_number, sequence
        The next segment number and batch sequence.
    entries, chunks, chunk_bytes
        Blocks listed, chunks that follow the head, and the bytes from one chunk to the next.
    segments
        (number, file size) of every segment of the namespace.
    """

    store_id: bytes
    namespace: bytes
    next_number: int
    sequence: int
    entries: int
    chunks: int
    chunk_bytes: int
    segments: tuple[tuple[int, int], ...]

    def encode(self) -> bytes:
        """The head, whole pages."""
        body = _SNAPSHOT.pack(
            self.store_id,
            self.namespace,
            self.next_number,
            self.sequence,
            self.entries,
            self.chunks,
            self.chunk_bytes,
            len(self.segments),
        ) + b"".join(_LISTED.pack(*each) for each in self.segments)
        return _seal_page(_SNAPSHOT_MAGIC, body, pages(_COMMON.size + len(body)))

    def fits(self, size: int) -> bool:
        """Whether a snapshot with this head can be a file of so many bytes."""
        start, whole = self.head_bytes(len(self.segments)), self.chunks * CHUNK_STRIDE
        fits = start + whole - CHUNK_STRIDE + HEADER_BYTES <= size <= start + whole
        return fits and self.chunk_bytes == CHUNK_STRIDE and bool(self.segments)

    @staticmethod
    def head_bytes(segments: int) -> int:
        """Bytes of a head that lists so many segments."""
        return pages(_COMMON.size + _SNAPSHOT.size + segments * _LISTED.size)

    @classmethod
    def decode(cls, data: bytes | bytearray | memoryview) -> SnapshotHead | None:
        """Parse the start of a snapshot file; None when it is not one."""
        start = _COMMON.size + _SNAPSHOT.size
        if len(data) < start or bytes(data[:8]) != _SNAPSHOT_MAGIC:
            return None
        *fields, count = _SNAPSHOT.unpack_from(data, _COMMON.size)
        if cls.head_bytes(count) > len(data):
            return None
        found = _open_page(_SNAPSHOT_MAGIC, data[: cls.head_bytes(count)])
        if found is None:
            return None
        listed = tuple(_LISTED.unpack_from(data, start + i * _LISTED.size) for i in range(count))
        head = cls(*(*fields, listed))
        if head.next_number > NAMED_MAX or head.sequence >= SEQUENCE_MAX:
            return None
        return None if any(number >= head.next_number for number, _ in listed) else head
