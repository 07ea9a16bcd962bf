"""The log's records: bytes in, fields out, and back. The bytes are drawn in docs/format.md.

One shape holds records everywhere: a *chunk* is whole pages that begin with a header of 112 bytes, then a table of
block descriptors, then the records that refer to it. The header and the trailer of a batch, the footer of a sealed
segment and the pieces of a snapshot are chunks of different kinds.

Invariants
----------
* Nothing in a chunk is looked at before its checksum is right, apart from the length that the checksum needs, and that
  is held against the bytes at hand. The checksum's seed binds a chunk to its store, namespace, segment, place and kind.
* Parsing never trusts a checksum to mean sense: every length, index and offset is checked before use, and what is
  allocated is bounded by the bytes that were parsed.
* A malformed body is None, not an exception: damage is an expected input.
* Everything up to the last section is free of the block table; only `apply_records` and `write_disk_entries` know it.
"""

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, Py_buffer, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcmp, memcpy, memset

from time import sleep

from xxhash import xxh3_64_intdigest

from asynckv.checksum import checksum as sum_of

FORMAT_VERSION = 1
PAGE_BYTES = 4096
HEADER_BYTES = 112              # fixed part of a chunk
ALIGNED_FROM = 32768            # stored lengths from here on begin on a page
PACK_BYTES = 16                 # smaller ones are packed at this alignment
BODY_MAX = 1 << 20              # descriptors and records of one batch
CHUNK_MAX = 4 << 20             # no chunk is larger; a reader allocates no more than this for one
DESC_MAX = 255
KEY_MAX = 1024

KIND_BATCH = 1
KIND_TRAILER = 2
KIND_FOOTER = 3
KIND_SNAPSHOT = 4
KIND_CLAIM = 5

BLOCK = 1
TOMBSTONE = 2
CLEAR = 3

cdef enum:
    PAGE = 4096
    HEAD = 112
    C_ALIGNED_FROM = 32768
    C_KEY_MAX = 1024
    C_DESC_MAX = 255
    C_VERSION = 1
    T_BLOCK = 1
    T_TOMBSTONE = 2
    T_CLEAR = 3
    DIGESTS_PER_SLICE = 256     # a worker lets go of the interpreter lock after this many payloads

cdef const char *MAGIC = b"AKVCHUNK"
cdef uint64_t ALL = 0xFFFFFFFFFFFFFFFFULL
cdef uint64_t U32 = 0xFFFFFFFFULL


# -- little-endian fields and varints ------------------------------------------------------------------------------

cdef inline uint64_t get64(const uint8_t *p) noexcept nogil:
    cdef uint64_t value = 0
    cdef int i
    for i in range(8):
        value |= (<uint64_t>p[i]) << (8 * i)
    return value


cdef inline uint32_t get32(const uint8_t *p) noexcept nogil:
    return (<uint32_t>p[0]) | (<uint32_t>p[1]) << 8 | (<uint32_t>p[2]) << 16 | (<uint32_t>p[3]) << 24


cdef inline void set64(uint8_t *p, uint64_t value) noexcept nogil:
    cdef int i
    for i in range(8):
        p[i] = <uint8_t>(value >> (8 * i))


cdef inline void set32(uint8_t *p, uint32_t value) noexcept nogil:
    cdef int i
    for i in range(4):
        p[i] = <uint8_t>(value >> (8 * i))


cdef inline const uint8_t *take_varint(const uint8_t *p, const uint8_t *end, uint64_t *out) noexcept nogil:
    """LEB128 of at most 64 bits; NULL when cut short or too long."""
    cdef uint64_t value = 0
    cdef int shift = 0
    cdef uint8_t byte
    while p < end:
        byte = p[0]
        p += 1
        if shift == 63 and byte > 1:
            return NULL
        value |= (<uint64_t>(byte & 0x7F)) << shift
        if byte < 0x80:
            out[0] = value
            return p
        shift += 7
        if shift > 63:
            return NULL
    return NULL


cdef inline uint8_t *add_varint(uint8_t *p, uint64_t value) noexcept nogil:
    while value >= 0x80:
        p[0] = <uint8_t>(value | 0x80)
        p += 1
        value >>= 7
    p[0] = <uint8_t>value
    return p + 1


cdef inline uint64_t varint_size(uint64_t value) noexcept nogil:
    cdef uint64_t size = 1
    while value >= 0x80:
        value >>= 7
        size += 1
    return size


cdef inline uint64_t pages(uint64_t length) noexcept nogil:
    return (length + PAGE - 1) & ~<uint64_t>(PAGE - 1)


# -- chunks --------------------------------------------------------------------------------------------------------

@cython.final
cdef class ChunkHeader:
    """The fixed fields of a chunk whose checksum was right.

    Attributes
    ----------
    kind
        ``KIND_*``.
    n_descs, n_records
        Entries of the descriptor table, records.
    header_bytes
        Whole chunk, a multiple of the page.
    body_bytes
        Descriptors and records.
    payload_bytes
        Payload area between a batch's header and its trailer.
    sequence
        Number of the batch in the store; for other kinds the last one that is contained.
    offset
        Where the chunk belongs in its file; a trailer names its batch's offset.
    oldest_live
        Segments below this number were dead when the batch was composed.
    synced, good
        Of a batch or a claim: below the offset `synced` there were `good` complete batches, all durable. Of a footer:
        offset and bytes of the footer chunk before it, 0 for the first; its `payload_bytes` is the number of batches.
    sealed_upto
        Every segment up to this number was sealed and durable, or dead.
    previous, previous_good
        Of a batch or a claim: number of the segment before in this namespace, and how many of its batches were known
        durable.
    """

    cdef readonly int kind
    cdef readonly uint32_t n_descs, n_records, header_bytes, body_bytes, good, previous_good
    cdef readonly uint64_t payload_bytes, sequence, offset, oldest_live, synced, sealed_upto, previous

    def __repr__(self):
        return (f"<ChunkHeader kind={self.kind} offset={self.offset} records={self.n_records} "
                f"bytes={self.header_bytes}+{self.payload_bytes} sequence={self.sequence}>")

    @property
    def batch_bytes(self):
        """Header, payload area and trailer together."""
        return 2 * <uint64_t>self.header_bytes + self.payload_bytes


def find_chunk(buffer, Py_ssize_t start, Py_ssize_t end):
    """Position of the first page in [start, end) that begins with a chunk's magic, or -1."""
    cdef Py_buffer view
    cdef Py_ssize_t at = start
    cdef Py_ssize_t found = -1
    PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE)
    try:
        if end > view.len:
            end = view.len
        while at >= 0 and at + 8 <= end:
            if memcmp((<const char *>view.buf) + at, MAGIC, 8) == 0:
                found = at
                break
            at += PAGE
    finally:
        PyBuffer_Release(&view)
    return found


def chunk_bytes(buffer, Py_ssize_t at):
    """Length that the chunk at a position claims (whole pages, at most CHUNK_MAX), 0 when that is nonsense."""
    cdef Py_buffer view
    cdef const uint8_t *p
    cdef uint64_t whole
    cdef uint64_t body
    PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE)
    try:
        if at < 0 or at + HEAD > view.len:
            return 0
        p = <const uint8_t *>view.buf + at
        if memcmp(p, MAGIC, 8) != 0 or p[16] | (p[17] << 8) != C_VERSION:
            return 0
        whole = get32(p + 28)
        body = get32(p + 32)
        if whole == 0 or whole % PAGE or whole > <uint64_t>CHUNK_MAX or HEAD + body > whole:
            return 0
        return whole
    finally:
        PyBuffer_Release(&view)


cdef ChunkHeader load_header(const uint8_t *p):
    cdef ChunkHeader header = ChunkHeader.__new__(ChunkHeader)
    header.kind = p[18]
    header.n_descs = get32(p + 20)
    header.n_records = get32(p + 24)
    header.header_bytes = get32(p + 28)
    header.body_bytes = get32(p + 32)
    header.good = get32(p + 36)
    header.payload_bytes = get64(p + 40)
    header.sequence = get64(p + 48)
    header.offset = get64(p + 56)
    header.oldest_live = get64(p + 64)
    header.synced = get64(p + 72)
    header.sealed_upto = get64(p + 80)
    header.previous = get64(p + 88)
    header.previous_good = get32(p + 96)
    return header


def read_chunk(buffer, Py_ssize_t at, int kind, seed, offset):
    """Verify the chunk at a position of a buffer that holds all of it.

    Parameters
    ----------
    buffer
        Bytes-like.
    at
        Position of the chunk in the buffer.
    kind
        The only kind that is accepted.
    seed
        The seed of the segment or snapshot.
    offset
        The only place that is accepted: `ChunkHeader.offset` has to equal it, and the checksum's seed contains it.

    Returns
    -------
    ChunkHeader or None
        None when anything is wrong.
    """
    cdef uint64_t whole = chunk_bytes(buffer, at)
    cdef Py_buffer view
    cdef const uint8_t *p
    cdef ChunkHeader header
    cdef uint64_t stored
    if whole == 0 or at + <Py_ssize_t>whole > len(buffer):
        return None
    PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE)
    try:
        p = <const uint8_t *>view.buf + at
        header = load_header(p)
        stored = get64(p + 8)
    finally:
        PyBuffer_Release(&view)
    if header.kind != kind or header.offset != offset:
        return None
    body = memoryview(buffer)[at + 16:at + HEAD + header.body_bytes]
    digest = xxh3_64_intdigest(body, seed=chunk_seed(seed, offset, kind))
    if digest != stored:
        return None
    return header


def read_trailer(buffer, Py_ssize_t at, seed, file_offset):
    """Verify the trailer of a batch at a position; it names its batch's offset itself.

    Parameters
    ----------
    buffer, at, seed
        As for `read_chunk`.
    file_offset
        Where in the file the bytes at that position are.
    """
    cdef Py_buffer view
    cdef uint64_t begin
    if chunk_bytes(buffer, at) == 0:
        return None
    PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE)
    begin = get64(<const uint8_t *>view.buf + at + 56)
    PyBuffer_Release(&view)
    if begin >= <uint64_t>file_offset or begin % PAGE:
        return None
    header = read_chunk(buffer, at, KIND_TRAILER, seed, begin)
    if header is None or begin + header.header_bytes + header.payload_bytes != file_offset:
        return None
    return header


def chunk_seed(seed, offset, int kind):
    """Seed of a chunk's checksum: kinds differ below the page size, so no two chunks of a file share one."""
    return (<uint64_t>seed + <uint64_t>offset + <uint64_t>kind) & ALL


# -- parsing bodies ------------------------------------------------------------------------------------------------

cdef bint utf8_ok(const uint8_t *p, size_t length) noexcept:
    cdef size_t i
    for i in range(length):
        if p[i] >= 0x80:
            try:
                PyUnicode_DecodeUTF8(<const char *>p, <Py_ssize_t>length, NULL)
                return True
            except ValueError:
                return False
    return True


@cython.final
cdef class Records:
    """The parsed records of one chunk, in log order. Keeps the buffer they were parsed from.

    Attributes
    ----------
    count
        Records, discarded ones included.
    descs
        The chunk's descriptors, as bytes.
    """

    def __cinit__(self):
        self.items = NULL
        self.count = 0
        self.descs = []

    def __dealloc__(self):
        free(self.items)

    def __len__(self):
        return self.count

    cdef Py_ssize_t fill(self, const uint8_t *data, Py_ssize_t length, uint32_t n_descs, uint32_t n_records,
                         uint64_t low, uint64_t high, uint32_t n_segments) except -2:
        """Parse; the number of records, or -1 when malformed."""
        cdef const uint8_t *p = data
        cdef const uint8_t *end = data + length
        cdef uint32_t i
        cdef uint64_t value = 0
        cdef Record *item
        # A descriptor and a record take at least one byte each, so the counts bound what is allocated.
        if <Py_ssize_t>n_descs > length or <Py_ssize_t>n_records > length:
            return -1
        for _ in range(n_descs):
            if p >= end or p + 1 + p[0] > end or p[0] == 0:
                return -1
            self.descs.append(PyBytes_FromStringAndSize(<const char *>p + 1, p[0]))
            p += 1 + p[0]
        self.items = <Record *>malloc(max(1, n_records) * sizeof(Record))
        if self.items == NULL:
            raise MemoryError()
        for i in range(n_records):
            if p >= end:
                return -1
            item = &self.items[i]
            memset(item, 0, sizeof(Record))
            item.type = p[0] & 15
            item.kind = p[0] >> 4
            p += 1
            if item.type == T_CLEAR:
                if item.kind != 0:
                    return -1
                continue
            if item.type != T_BLOCK and item.type != T_TOMBSTONE:
                return -1
            if item.kind == 0:
                value = 8
            elif item.kind <= 2:
                p = take_varint(p, end, &value)
                if p == NULL or value == 0 or value > C_KEY_MAX:
                    return -1
            else:
                return -1
            if <uint64_t>(end - p) < value:
                return -1
            item.key = p
            item.keylen = <uint32_t>value
            if item.kind == 2 and not utf8_ok(p, <size_t>value):
                return -1
            p += value
            if item.type == T_TOMBSTONE:
                continue
            p = take_varint(p, end, &value)
            if p == NULL or value >= n_descs:
                return -1
            item.desc = <uint32_t>value
            p = take_varint(p, end, &value)
            if p == NULL or value < low or value > high or value > U32:
                return -1
            item.offset = <uint32_t>value
            p = take_varint(p, end, &value)
            if p == NULL or value > U32 or item.offset + value > high:
                return -1
            item.stored = <uint32_t>value
            if end - p < 8:
                return -1
            item.checksum = get64(p)
            p += 8
            if n_segments:
                p = take_varint(p, end, &value)
                if p == NULL or value >= n_segments:
                    return -1
                item.segment = <uint32_t>value
        if p != end:
            return -1
        self.count = n_records
        return n_records

    def get(self, Py_ssize_t index):
        """One record as (type, key kind, key, descriptor, offset, stored, checksum, segment index).

        The descriptor is None for tombstones and clears; type 0 is a discarded record.
        """
        if not 0 <= index < self.count:
            raise IndexError(index)
        cdef Record *item = &self.items[index]
        cdef bytes key = b""
        if item.keylen:
            key = PyBytes_FromStringAndSize(<const char *>item.key, item.keylen)
        desc = self.descs[item.desc] if item.type == T_BLOCK else None
        return (item.type, item.kind, key, desc, item.offset, item.stored, item.checksum, item.segment)

    def locations(self):
        """The blocks as a list of (index, offset, stored, checksum)."""
        cdef Py_ssize_t i
        cdef list found = []
        for i in range(self.count):  # no comprehension: when memory is refused, Cython's frees an item twice
            if self.items[i].type == T_BLOCK:
                found.append((i, self.items[i].offset, self.items[i].stored, self.items[i].checksum))
        return found

    def discard(self, Py_ssize_t index):
        """Forget one record: its payload is damaged."""
        if not 0 <= index < self.count:
            raise IndexError(index)
        self.items[index].type = 0

    @property
    def stored_bytes(self):
        """Stored bytes of all blocks."""
        cdef Py_ssize_t i
        cdef uint64_t total = 0
        for i in range(self.count):
            if self.items[i].type == T_BLOCK:
                total += self.items[i].stored
        return total


def parse_body(buffer, Py_ssize_t at, ChunkHeader header, low=0, high=U32, n_segments=0):
    """Parse the body of a verified chunk.

    Parameters
    ----------
    buffer
        Bytes-like that holds the chunk; kept alive and not to be changed while the result is in use.
    at
        Position of the chunk.
    header
        What `read_chunk` returned.
    low, high
        Payloads have to lie in [low, high).
    n_segments
        Entries of the snapshot's segment table; 0 for the records of a segment, which name none.

    Returns
    -------
    Records or None
        None when malformed.
    """
    cdef Records records = Records.__new__(Records)
    cdef Py_buffer view
    cdef Py_ssize_t n
    PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE)
    try:
        if at < 0 or at + HEAD + <Py_ssize_t>header.body_bytes > view.len:
            return None
        n = records.fill(<const uint8_t *>view.buf + at + HEAD, header.body_bytes, header.n_descs, header.n_records,
                         low, high, n_segments)
    finally:
        PyBuffer_Release(&view)
    if n < 0:
        return None
    records.owner = buffer
    return records


def parse_piece(bytes piece):
    """Parse what `write_batch` kept of a header for the footer: memory of ours, nothing to verify."""
    if len(piece) < HEAD:
        raise ValueError("not a piece of a batch")
    cdef ChunkHeader header = load_header(<const uint8_t *>PyBytes_AS_STRING(piece))
    records = parse_body(piece, 0, header)
    if records is None:
        raise ValueError("not a piece of a batch")
    return records


include "_record_write.pxi"
include "_record_batch.pxi"
include "_record_table.pxi"
