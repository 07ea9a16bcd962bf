# Records are collected, then written as one chunk.

@cython.final
cdef class RecordWriter:
    """Collects descriptors and records, then writes them as one chunk.

    Attributes
    ----------
    count
        Records so far.
    descs
        Distinct descriptors so far.
    """

    def __cinit__(self):
        self.data = NULL
        self.length = 0
        self.room = 0
        self.count = 0
        self.descs = []
        self.desc_index = {}
        self.desc_bytes = 0

    def __dealloc__(self):
        free(self.data)

    cdef int reserve(self, size_t more) except -1:
        cdef size_t room
        cdef uint8_t *data
        if self.length + more > self.room:
            room = self.room * 2 + 4096
            if room < self.length + more:
                room = self.length + more
            data = <uint8_t *>realloc(self.data, room)
            if data == NULL:
                raise MemoryError()
            self.data = data
            self.room = room
        return 0

    cdef int64_t desc(self, bytes raw) except -1:
        found = self.desc_index.get(raw)
        if found is not None:
            return found
        if not 0 < len(raw) <= C_DESC_MAX:
            raise ValueError(f"a block descriptor of {len(raw)} bytes")
        found = len(self.descs)
        self.desc_index[raw] = found
        self.descs.append(raw)
        self.desc_bytes += 1 + len(raw)
        return found

    cdef int put(self, uint8_t type, uint8_t kind, const uint8_t *key, size_t keylen, int64_t desc,
                 uint64_t offset, uint64_t stored, uint64_t checksum, int64_t segment) except -1:
        cdef uint8_t *p
        self.reserve(keylen + 64)
        p = self.data + self.length
        p[0] = type | <uint8_t>(kind << 4)
        p += 1
        if type != T_CLEAR:
            if kind != 0:
                p = add_varint(p, keylen)
            memcpy(p, key, keylen)
            p += keylen
            if type == T_BLOCK:
                p = add_varint(p, <uint64_t>desc)
                p = add_varint(p, offset)
                p = add_varint(p, stored)
                set64(p, checksum)
                p += 8
                if segment >= 0:
                    p = add_varint(p, <uint64_t>segment)
        self.length = p - self.data
        self.count += 1
        return 0

    def add_block(self, int kind, bytes key, bytes desc, offset, stored, checksum, segment=-1):
        """Append a block record; `segment` is an index into a snapshot's segment table."""
        check_key(kind, key)
        self.put(T_BLOCK, kind, <const uint8_t *>PyBytes_AS_STRING(key), len(key), self.desc(desc), offset, stored,
                 checksum, segment)

    def add_tombstone(self, int kind, bytes key):
        """Append the record of a removal."""
        check_key(kind, key)
        self.put(T_TOMBSTONE, kind, <const uint8_t *>PyBytes_AS_STRING(key), len(key), 0, 0, 0, 0, -1)

    def add_clear(self):
        """Append the record that ends everything of this namespace before it."""
        self.put(T_CLEAR, 0, NULL, 0, 0, 0, 0, 0, -1)

    def add_records(self, Records records):
        """Append all records of a parsed body that were not discarded (snapshots excepted)."""
        cdef Py_ssize_t i
        cdef Record *item
        cdef list index = []
        for raw in records.descs:
            index.append(self.desc(raw))
        for i in range(records.count):
            item = &records.items[i]
            if item.type:
                self.put(item.type, item.kind, item.key, item.keylen,
                         index[item.desc] if item.type == T_BLOCK else 0,
                         item.offset, item.stored, item.checksum, -1)

    @property
    def body_bytes(self):
        """Descriptors and records."""
        return self.desc_bytes + self.length

    @property
    def chunk_bytes(self):
        """Bytes of the chunk, whole pages."""
        return pages(HEAD + self.desc_bytes + self.length)

    def write_into(self, buffer, Py_ssize_t at, int kind, seed, offset, *, header_bytes, payload_bytes=0, sequence=0,
                   oldest_live=0, synced=0, good=0, sealed_upto=0, previous=0, previous_good=0):
        """Write the chunk into a writable buffer; the rest of its pages is zeroed.

        Parameters
        ----------
        buffer, at
            Where to.
        kind, seed, offset
            What the checksum is bound to, as for `read_chunk`.
        header_bytes
            Pages to fill; more than needed is fine.
        payload_bytes, sequence, oldest_live, synced, good, sealed_upto, previous, previous_good
            As in `ChunkHeader`.
        """
        cdef Py_buffer view
        cdef uint8_t *p
        cdef uint8_t *q
        cdef size_t body = self.desc_bytes + self.length
        cdef size_t whole = header_bytes
        cdef bytes raw
        if whole % PAGE or HEAD + body > whole or whole > <size_t>CHUNK_MAX:
            raise ValueError(f"a chunk of {body} body bytes does not go into {whole}")
        PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE | PyBUF_WRITABLE)
        try:
            if at < 0 or at + <Py_ssize_t>whole > view.len:
                raise ValueError("the buffer is too small for the chunk")
            p = <uint8_t *>view.buf + at
            memset(p, 0, HEAD)
            memcpy(p, MAGIC, 8)
            p[16] = C_VERSION
            p[18] = <uint8_t>kind
            set32(p + 20, <uint32_t>len(self.descs))
            set32(p + 24, self.count)
            set32(p + 28, <uint32_t>whole)
            set32(p + 32, <uint32_t>body)
            set32(p + 36, good)
            set64(p + 40, payload_bytes)
            set64(p + 48, sequence)
            set64(p + 56, offset)
            set64(p + 64, oldest_live)
            set64(p + 72, synced)
            set64(p + 80, sealed_upto)
            set64(p + 88, previous)
            set32(p + 96, previous_good)
            q = p + HEAD
            for raw in self.descs:
                q[0] = <uint8_t>PyBytes_GET_SIZE(raw)
                memcpy(q + 1, PyBytes_AS_STRING(raw), q[0])
                q += 1 + q[0]
            if self.length:
                memcpy(q, self.data, self.length)
            memset(q + self.length, 0, whole - HEAD - body)
            digest = xxh3_64_intdigest(memoryview(buffer)[at + 16:at + HEAD + <Py_ssize_t>body],
                                       seed=chunk_seed(seed, offset, kind))
            set64(p + 8, digest)
        finally:
            PyBuffer_Release(&view)

    def to_bytes(self, int kind, seed, offset, **fields):
        """The chunk as bytes, in as few pages as it needs; fields as for `write_into`."""
        buffer = bytearray(self.chunk_bytes)
        self.write_into(buffer, 0, kind, seed, offset, header_bytes=len(buffer), **fields)
        return bytes(buffer)


def check_key(int kind, bytes key):
    """Refuse what a record cannot hold.

    Raises
    ------
    ValueError
        The kind is unknown or the length wrong.
    """
    if kind == 0:
        if len(key) != 8:
            raise ValueError("an int key is 8 bytes")
    elif kind not in (1, 2) or not 0 < len(key) <= C_KEY_MAX:
        raise ValueError(f"a key of kind {kind} and {len(key)} bytes")
