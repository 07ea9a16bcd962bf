from collections.abc import Buffer, Sequence  # type: ignore[attr-defined,unused-ignore]
from typing import Any, final

from asynckv._core import Table

FORMAT_VERSION: int
PAGE_BYTES: int
HEADER_BYTES: int
ALIGNED_FROM: int
PACK_BYTES: int
BODY_MAX: int
CHUNK_MAX: int
DESC_MAX: int
KEY_MAX: int
KIND_BATCH: int
KIND_TRAILER: int
KIND_FOOTER: int
KIND_SNAPSHOT: int
KIND_CLAIM: int
BLOCK: int
TOMBSTONE: int
CLEAR: int

@final
class ChunkHeader:
    """The fixed fields of a chunk whose checksum was right."""

    kind: int
    n_descs: int
    n_records: int
    header_bytes: int
    body_bytes: int
    good: int
    payload_bytes: int
    sequence: int
    offset: int
    oldest_live: int
    synced: int
    sealed_upto: int
    previous: int
    previous_good: int
    @property
    def batch_bytes(self) -> int:
        """Header, payload area and trailer together."""

def find_chunk(buffer: Buffer, start: int, end: int) -> int:
    """Position of the first page in [start, end) that begins with a chunk's magic, or -1."""

def chunk_bytes(buffer: Buffer, at: int) -> int:
    """Length that the chunk at a position claims, 0 when that is nonsense."""

def read_chunk(buffer: Buffer, at: int, kind: int, seed: int, offset: int) -> ChunkHeader | None:
    """Verify the chunk at a position of a buffer that holds all of it; None when anything is wrong."""

def read_trailer(buffer: Buffer, at: int, seed: int, file_offset: int) -> ChunkHeader | None:
    """Verify the trailer of a batch at a position; it names its batch's offset itself."""

def chunk_seed(seed: int, offset: int, kind: int) -> int:
    """Seed of a chunk's checksum."""

@final
class Records:
    """The parsed records of one chunk, in log order. Keeps the buffer they were parsed from."""

    count: int
    descs: list[bytes]
    def __len__(self) -> int: ...
    def get(self, index: int) -> tuple[int, int, bytes, bytes | None, int, int, int, int]:
        """(type, key kind, key, descriptor, offset, stored, checksum, segment index); type 0 is discarded."""
    def locations(self) -> list[tuple[int, int, int, int]]:
        """The blocks as (index, offset, stored, checksum)."""
    def discard(self, index: int) -> None:
        """Forget one record: its payload is damaged."""
    @property
    def stored_bytes(self) -> int:
        """Stored bytes of all blocks."""

def parse_body(
    buffer: Buffer, at: int, header: ChunkHeader, low: int = 0, high: int = ..., n_segments: int = 0
) -> Records | None:
    """Parse the body of a verified chunk whose payloads lie in [low, high); None when malformed."""

def parse_piece(piece: bytes) -> Records:
    """Parse what `write_batch` kept of a header for the footer."""

@final
class RecordWriter:
    """Collects descriptors and records, then writes them as one chunk."""

    count: int
    descs: list[bytes]
    desc_bytes: int
    def add_block(
        self, kind: int, key: bytes, desc: bytes, offset: int, stored: int, checksum: int, segment: int = -1
    ) -> None:
        """Append a block record; `segment` is an index into a snapshot's segment table."""
    def add_tombstone(self, kind: int, key: bytes) -> None:
        """Append the record of a removal."""
    def add_clear(self) -> None:
        """Append the record that ends everything of this namespace before it."""
    def add_records(self, records: Records) -> None:
        """Append all records of a parsed body that were not discarded."""
    @property
    def body_bytes(self) -> int:
        """Descriptors and records."""
    @property
    def chunk_bytes(self) -> int:
        """Bytes of the chunk, whole pages."""
    def write_into(
        self,
        buffer: Buffer,
        at: int,
        kind: int,
        seed: int,
        offset: int,
        *,
        header_bytes: int,
        payload_bytes: int = 0,
        sequence: int = 0,
        oldest_live: int = 0,
        synced: int = 0,
        good: int = 0,
        sealed_upto: int = 0,
        previous: int = 0,
        previous_good: int = 0,
    ) -> None:
        """Write the chunk into a writable buffer; the rest of its pages is zeroed."""
    def to_bytes(self, kind: int, seed: int, offset: int, **fields: int) -> bytes:
        """The chunk as bytes, in as few pages as it needs."""

def check_key(kind: int, key: bytes) -> None:
    """Refuse what a record cannot hold: ValueError."""

def footer_bound(body_sum: int) -> int:
    """Upper bound of the footer's bytes in a segment whose batches have bodies of this many bytes together."""

@final
class BatchPlan:
    """Where everything of one batch goes; made when the batch is composed, without looking at payloads."""

    position: int
    header_bytes: int
    payload_bytes: int
    small_bytes: int
    body_bound: int
    spills: int
    carries: int
    tombstones: int
    clear: bool
    offsets: list[int]
    @property
    def batch_bytes(self) -> int:
        """Header, payload area and trailer."""
    @property
    def empty(self) -> bool:
        """Nothing found room."""

def plan_batch(
    spills: list[Any],
    carries: list[Any],
    tombstones: list[tuple[int, bytes]],
    clear: bool,
    position: int,
    segment_bytes: int,
    body_sum: int,
) -> BatchPlan:
    """Lay out a batch at a position of a segment; what does not fit is left out, in order."""

def write_batch(
    plan: BatchPlan,
    spills: list[Any],
    carries: list[Any],
    tombstones: list[tuple[int, bytes]],
    staging: Buffer,
    seed: int,
    *,
    sequence: int,
    oldest_live: int,
    synced: int,
    good: int,
    sealed_upto: int,
    previous: int = 0,
    previous_good: int = 0,
) -> tuple[list[memoryview], list[int], bytes]:
    """Compute checksums, fill the staging buffer: (buffers to write, checksums, piece for the footer)."""

def staging_bytes(plan: BatchPlan, spills: list[Any], carries: list[Any]) -> int:
    """Bytes of staging that `write_batch` needs."""

def payload_span(stored: int, has_pages: bool) -> int:
    """Bytes to read for a payload."""

def apply_records(table: Table, records: Records, slots: int | Sequence[int | None]) -> tuple[int, bool]:
    """Tell a recovering table what a chunk says, newest first: (blocks added, whether a clear was met)."""

def write_disk_entries(table: Table, cursor: int, segment_index: dict[int, int]) -> tuple[RecordWriter, int | None]:
    """Collect the table's blocks on disk into the body of one snapshot chunk, and the next cursor."""
