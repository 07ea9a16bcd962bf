"""C layout of parsed log records."""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

cdef struct Record:             # one parsed record, 48 bytes
    const uint8_t *key          # borrowed from the buffer that was parsed; ints as 8 little-endian bytes
    uint64_t checksum           # XXH3-64 of the stored bytes (blocks)
    uint32_t keylen             # bytes
    uint32_t offset             # of the payload, bytes from the start of the segment (blocks)
    uint32_t stored             # payload length in bytes (blocks)
    uint32_t desc               # index in the descriptor table of its body (blocks)
    uint32_t segment            # index in the segment table (snapshots), 0 elsewhere
    uint8_t type                # 1 block, 2 tombstone, 3 clear; 0 discarded
    uint8_t kind                # of the key: 0 int, 1 bytes, 2 str

cdef class Records:             # a verified body
    cdef Record *items
    cdef readonly Py_ssize_t count
    cdef readonly list descs    # bytes
    cdef object owner           # keeps the parsed buffer alive
    cdef Py_ssize_t fill(self, const uint8_t *data, Py_ssize_t length, uint32_t n_descs, uint32_t n_records,
                         uint64_t low, uint64_t high, uint32_t n_segments) except -2

cdef class RecordWriter:        # builds a body
    cdef uint8_t *data
    cdef size_t length          # record bytes so far
    cdef size_t room
    cdef readonly uint32_t count
    cdef readonly list descs
    cdef dict desc_index
    cdef readonly size_t desc_bytes
    cdef int reserve(self, size_t more) except -1
    cdef int64_t desc(self, bytes raw) except -1
    cdef int put(self, uint8_t type, uint8_t kind, const uint8_t *key, size_t keylen, int64_t desc,
                 uint64_t offset, uint64_t stored, uint64_t checksum, int64_t segment) except -1
