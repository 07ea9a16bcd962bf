# Index room: keys, entries, the hash, the entry lists.
#
# Invariants: every entry is in the hash once; keys are compared whole, a hash never decides alone; an entry is in at
# most one list, the one its list code names. Everything grows in pieces: no step copies or rehashes the whole table.


# -- keys -------------------------------------------------------------------------------------------------------------

cdef int parse_key(BlockMap t, object key, Key *k) except -1:
    """Read a user's key. `k.ptr` borrows from the key object."""
    cdef Py_ssize_t size = 0
    cdef int overflow = 0
    cdef long long value
    if PyLong_CheckExact(key):
        value = PyLong_AsLongLongAndOverflow(key, &overflow)
        if overflow:
            raise ValueError("an int key must fit in signed 64 bits")
        k.kind = 0
        k.word = <uint64_t>value
        k.len = 8
        k.ptr = <const uint8_t *>&k.word
        k.hash = hash_word(t, k.word, 0)
        return 0
    if PyBytes_Check(key):
        k.kind = 1
        k.ptr = <const uint8_t *>PyBytes_AS_STRING(key)
        size = PyBytes_GET_SIZE(key)
    elif PyUnicode_Check(key):
        k.kind = 2
        try:
            k.ptr = <const uint8_t *>PyUnicode_AsUTF8AndSize(key, &size)
        except UnicodeError:
            raise ValueError("a str key must be encodable as UTF-8") from None
    elif PyBool_Check(key):
        raise TypeError("a key must be int, bytes or str, not bool")
    elif PyIndex_Check(key):
        return parse_key(t, operator_index(key), k)
    else:
        raise TypeError(f"a key must be int, bytes or str, not {type(key).__name__}")
    if size < 1 or size > 1024:
        raise ValueError("a bytes or str key must have 1 to 1024 bytes")
    k.len = <uint32_t>size
    finish_key(t, k)
    return 0


cdef void finish_key(BlockMap t, Key *k) noexcept:
    """Fill in word and hash from kind, ptr and len."""
    k.word = 0
    if k.len <= 8:
        memcpy(&k.word, k.ptr, k.len)
        k.hash = hash_word(t, k.word, (<uint64_t>k.kind << 8 | k.len) if k.kind else 0)
    else:
        k.hash = hash_bytes(t, k.ptr, k.len, <uint64_t>k.kind << 8 | k.len)


cdef int raw_key(BlockMap t, int kind, const uint8_t *ptr, uint32_t length, Key *k) noexcept:
    """Read a key from (hostile) disk bytes; 0 when it is none."""
    if kind == 0:
        if length != 8:
            return 0
    elif kind < 0 or kind > 2 or length < 1 or length > 1024:
        return 0
    if kind == 2 and not akv_utf8(ptr, length):
        return 0
    k.kind = kind
    k.ptr = ptr
    k.len = length
    finish_key(t, k)
    return 1


cdef inline uint32_t fold(BlockMap t, uint64_t h) noexcept:
    h &= t.hash_mask
    return <uint32_t>(h ^ (h >> 32))


cdef inline uint32_t hash_word(BlockMap t, uint64_t word, uint64_t salt) noexcept:
    return fold(t, akv_mix(word ^ t.seed_a, t.seed_b + (salt << 1)))


cdef uint32_t hash_bytes(BlockMap t, const uint8_t *ptr, uint32_t length, uint64_t salt) noexcept:
    return fold(t, akv_hash(ptr, length, t.seed_a, t.seed_b + (salt << 1)))


cdef inline const uint8_t *entry_key(Entry *e) noexcept:
    if e.keylen <= 8:
        return <const uint8_t *>&e.key
    return <const uint8_t *>e.key


cdef uint32_t entry_hash(BlockMap t, Entry *e) noexcept:
    if e.keylen <= 8:
        return hash_word(t, e.key, (<uint64_t>e.kind << 8 | e.keylen) if e.kind else 0)
    return hash_bytes(t, <const uint8_t *>e.key, e.keylen, <uint64_t>e.kind << 8 | e.keylen)


cdef object key_object(Entry *e):
    if e.kind == 0:
        return PyLong_FromLongLong(<long long>e.key)
    if e.kind == 1:
        return PyBytes_FromStringAndSize(<char *>entry_key(e), e.keylen)
    return PyUnicode_DecodeUTF8(<char *>entry_key(e), e.keylen, NULL)


cdef bytes tagged_key(int kind, const uint8_t *ptr, uint32_t length):
    """Kind byte and key in one bytes object: the form of owed tombstones (no garbage collection while building)."""
    cdef bytes out = PyBytes_FromStringAndSize(NULL, <Py_ssize_t>length + 1)
    cdef char *p = PyBytes_AS_STRING(out)
    p[0] = <char>kind
    memcpy(p + 1, ptr, length)
    return out


# -- slab for keys longer than 8 bytes --------------------------------------------------------------------------------

cdef inline uint32_t slab_class(uint32_t length) noexcept:
    # 16, 24, ... 128 by 8 (classes 0..14), then by 64 up to 1024 (15..28)
    if length <= 128:
        return (length - 9) >> 3
    return 15 + ((length - 129) >> 6)


cdef inline uint32_t slab_size(uint32_t c) noexcept:
    return 16 + 8 * c if c < 15 else 192 + 64 * (c - 15)


cdef void *slab_take(BlockMap t, uint32_t length) noexcept:
    cdef uint32_t c = slab_class(length)
    cdef uint32_t size = slab_size(c)
    cdef void *p = t.slab_free[c]
    cdef char *chunk
    if p != NULL:
        t.slab_free[c] = (<void **>p)[0]
        return p
    if t.slab_left[c] < size:
        chunk = <char *>malloc(SLAB_CHUNK)
        if chunk == NULL:
            return NULL
        (<void **>chunk)[0] = t.slab_chunks
        t.slab_chunks = chunk
        t.slab_bump[c] = chunk + 16
        t.slab_left[c] = SLAB_CHUNK - 16
    p = t.slab_bump[c]
    t.slab_bump[c] += size
    t.slab_left[c] -= size
    return p


cdef void slab_give(BlockMap t, void *p, uint32_t length) noexcept:
    cdef uint32_t c = slab_class(length)
    (<void **>p)[0] = t.slab_free[c]
    t.slab_free[c] = p


# -- hash -------------------------------------------------------------------------------------------------------------

cdef SubTable *sub_new(uint32_t size, uint32_t depth) noexcept:
    cdef SubTable *s = <SubTable *>malloc(sizeof(SubTable))
    if s == NULL:
        return NULL
    s.slots = <uint64_t *>akv_alloc64(size * sizeof(uint64_t))
    if s.slots == NULL:
        free(s)
        return NULL
    memset(s.slots, 0xFF, size * sizeof(uint64_t))
    s.mask = size - 1
    s.count = 0
    s.depth = depth
    return s


cdef void sub_free(SubTable *s) noexcept:
    free(s.slots)
    free(s)


cdef inline SubTable *sub_of(BlockMap t, uint32_t h) noexcept:
    return t.directory[(<uint64_t>h) >> (32 - t.depth)]


cdef inline void sub_put(SubTable *s, uint32_t h, uint32_t entry) noexcept:
    cdef uint32_t i = h & s.mask
    while s.slots[i] != EMPTY:
        i = (i + 1) & s.mask
    s.slots[i] = (<uint64_t>h << 32) | entry
    s.count += 1


cdef int sub_grow(BlockMap t, SubTable *s) except -1:
    """Double one sub-table in place: only when splitting would not spread its keys (colliding hashes)."""
    cdef SubTable *g = sub_new(2 * (s.mask + 1), s.depth)
    cdef uint32_t i
    if g == NULL:
        raise MemoryError()
    for i in range(s.mask + 1):
        if s.slots[i] != EMPTY:
            sub_put(g, <uint32_t>(s.slots[i] >> 32), <uint32_t>s.slots[i])
    free(s.slots)
    s.slots = g.slots
    s.mask = g.mask
    free(g)
    return 0


cdef int index_room(BlockMap t, uint32_t h) except -1:
    """Make room for one more key with hash h: splits at most a few sub-tables, never the whole."""
    cdef SubTable *s = sub_of(t, h)
    cdef SubTable *halves[2]
    cdef SubTable **grown
    cdef uint32_t i, ones, first, span, half
    cdef uint64_t w
    while (s.count + 1) * 20 > (s.mask + 1) * 17:
        ones = 0
        if s.depth < MAX_DEPTH:
            for i in range(s.mask + 1):
                w = s.slots[i]
                if w != EMPTY and (w >> (63 - s.depth)) & 1:
                    ones += 1
        if ones * 8 < s.count or (s.count - ones) * 8 < s.count:
            sub_grow(t, s)
            continue
        if s.depth == t.depth:
            grown = <SubTable **>malloc((<size_t>2 << t.depth) * sizeof(SubTable *))
            if grown == NULL:
                raise MemoryError()
            for i in range(<uint32_t>1 << t.depth):
                grown[2 * i] = grown[2 * i + 1] = t.directory[i]
            free(t.directory)
            t.directory = grown
            t.depth += 1
        halves[0] = sub_new(s.mask + 1, s.depth + 1)
        halves[1] = sub_new(s.mask + 1, s.depth + 1)
        if halves[0] == NULL or halves[1] == NULL:
            if halves[0] != NULL:
                sub_free(halves[0])
            if halves[1] != NULL:
                sub_free(halves[1])
            raise MemoryError()
        for i in range(s.mask + 1):
            w = s.slots[i]
            if w != EMPTY:
                sub_put(halves[(w >> (63 - s.depth)) & 1], <uint32_t>(w >> 32), <uint32_t>w)
        span = <uint32_t>1 << (t.depth - s.depth)
        first = <uint32_t>((<uint64_t>h) >> (32 - t.depth)) & ~(span - 1)
        half = span >> 1
        for i in range(span):
            t.directory[first + i] = halves[0] if i < half else halves[1]
        sub_free(s)
        s = sub_of(t, h)
    return 0


cdef inline bint same_key(Entry *e, Key *k) noexcept:
    if e.kind != k.kind or e.keylen != k.len:
        return False
    if k.len <= 8:
        return e.key == k.word
    return memcmp(<const void *>e.key, k.ptr, k.len) == 0


cdef uint32_t index_find(BlockMap t, Key *k) noexcept:
    cdef SubTable *s = sub_of(t, k.hash)
    cdef uint32_t i = k.hash & s.mask
    cdef uint64_t w
    while True:
        w = s.slots[i]
        if w == EMPTY:
            return NONE
        if <uint32_t>(w >> 32) == k.hash and same_key(E(t, <uint32_t>w), k):
            return <uint32_t>w
        i = (i + 1) & s.mask


cdef void index_delete(BlockMap t, uint32_t entry) noexcept:
    """Backward-shift delete: no tombstones, probe lengths do not grow with age."""
    cdef uint32_t h = entry_hash(t, E(t, entry))
    cdef SubTable *s = sub_of(t, h)
    cdef uint32_t i = h & s.mask
    cdef uint32_t j, home
    while <uint32_t>s.slots[i] != entry:
        i = (i + 1) & s.mask
    j = i
    while True:
        j = (j + 1) & s.mask
        if s.slots[j] == EMPTY:
            break
        home = <uint32_t>(s.slots[j] >> 32) & s.mask
        if ((j - home) & s.mask) >= ((j - i) & s.mask):
            s.slots[i] = s.slots[j]
            i = j
    s.slots[i] = EMPTY
    s.count -= 1


cdef void index_empty(BlockMap t) noexcept:
    cdef uint32_t i
    cdef SubTable *s
    for i in range(<uint32_t>1 << t.depth):
        s = t.directory[i]
        if s.count:
            memset(s.slots, 0xFF, (<size_t>s.mask + 1) * sizeof(uint64_t))
            s.count = 0


# -- entries ----------------------------------------------------------------------------------------------------------

cdef inline Entry *E(BlockMap t, uint32_t i) noexcept:
    return &t.entries[i >> PIECE_BITS][i & PIECE_MASK]


cdef uint32_t entry_new(BlockMap t, Key *k) except? 0xFFFFFFFF:
    """A new entry in the hash, in no list, without extent or location. Changes nothing when memory is short."""
    cdef Entry *e
    cdef Entry **grown
    cdef uint32_t i
    cdef uint64_t word = k.word
    index_room(t, k.hash)
    if t.entry_free == NONE and t.entry_top == t.entry_pieces << PIECE_BITS:
        if t.entry_pieces == MAX_PIECES:
            raise MemoryError("the block table is full")
        if (t.entry_pieces & (t.entry_pieces - 1)) == 0:
            grown = <Entry **>realloc(t.entries, (2 * <size_t>t.entry_pieces + 1) * sizeof(Entry *))
            if grown == NULL:
                raise MemoryError()
            t.entries = grown
        t.entries[t.entry_pieces] = <Entry *>akv_alloc64(PIECE * sizeof(Entry))
        if t.entries[t.entry_pieces] == NULL:
            raise MemoryError()
        t.entry_pieces += 1
    if k.len > 8:
        word = <uint64_t>slab_take(t, k.len)
        if word == 0:
            raise MemoryError()
        memcpy(<void *>word, k.ptr, k.len)
    if t.entry_free != NONE:
        i = t.entry_free
        t.entry_free = E(t, i).next
    else:
        i = t.entry_top
        t.entry_top += 1
    e = E(t, i)
    e.key = word
    e.keylen = <uint16_t>k.len
    e.kind = <uint8_t>k.kind
    e.flags = 0
    e.node = e.desc = e.slot = NONE
    e.length = e.offset = 0
    e.checksum = 0
    e.prev = e.next = NONE
    sub_put(sub_of(t, k.hash), k.hash, i)
    t.entry_count += 1
    return i


cdef void entry_discard(BlockMap t, uint32_t i) noexcept:
    """Return the index and the key copy of an entry that left the hash."""
    cdef Entry *e = E(t, i)
    if e.keylen > 8:
        slab_give(t, <void *>e.key, e.keylen)
    e.kind = 255
    e.next = t.entry_free
    t.entry_free = i
    t.entry_count -= 1


# -- entry lists ------------------------------------------------------------------------------------------------------

cdef inline uint32_t list_code(Entry *e) noexcept:
    return e.flags >> 6


cdef inline EntryList *list_of(BlockMap t, Entry *e) noexcept:
    cdef uint32_t code = list_code(e)
    if code == L_SEGMENT:
        return &t.segments[e.slot]
    if code == L_DIRTY:
        return &t.lists[0]
    if e.flags & E_GHOST:
        return &t.lists[2]
    return &t.lists[3] if e.flags & E_NOSPILL else &t.lists[1]


cdef inline uint64_t list_weight(BlockMap t, Entry *e) noexcept:
    if list_code(e) == L_SEGMENT:
        return e.length
    return node_bytes(t, e.node) if e.node != NONE else 0


cdef void list_add(BlockMap t, uint32_t i, uint32_t code, bint at_head) noexcept:
    cdef Entry *e = E(t, i)
    cdef EntryList *l
    e.flags = <uint8_t>((e.flags & 0x3F) | (code << 6))
    l = list_of(t, e)
    if at_head:
        e.prev = NONE
        e.next = l.head
        if l.head != NONE:
            E(t, l.head).prev = i
        else:
            l.tail = i
        l.head = i
    else:
        e.next = NONE
        e.prev = l.tail
        if l.tail != NONE:
            E(t, l.tail).next = i
        else:
            l.head = i
        l.tail = i
    l.count += 1
    l.bytes += list_weight(t, e)


cdef void list_remove(BlockMap t, uint32_t i) noexcept:
    """Take the entry out of its list, if it is in one. Before its node, length or slot changes."""
    cdef Entry *e = E(t, i)
    cdef EntryList *l
    if list_code(e) == L_NONE:
        return
    l = list_of(t, e)
    if e.prev != NONE:
        E(t, e.prev).next = e.next
    else:
        l.head = e.next
    if e.next != NONE:
        E(t, e.next).prev = e.prev
    else:
        l.tail = e.prev
    l.count -= 1
    l.bytes -= list_weight(t, e)
    e.prev = e.next = NONE
    e.flags &= 0x3F


cdef int segment_reserve(BlockMap t, uint32_t slot) except -1:
    """Have a list for that segment slot."""
    cdef EntryList *grown
    cdef uint32_t count, i
    if slot < t.segment_count:
        return 0
    if slot > MAX_SLOT:
        raise ValueError("segment slot out of range")
    count = slot + 64
    grown = <EntryList *>realloc(t.segments, count * sizeof(EntryList))
    if grown == NULL:
        raise MemoryError()
    for i in range(t.segment_count, count):
        grown[i].head = grown[i].tail = NONE
        grown[i].count = 0
        grown[i].bytes = 0
    t.segments = grown
    t.segment_count = count
    return 0
