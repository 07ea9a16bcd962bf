# Pool room: the mapping, extents over it, pins.
#
# Invariants: the nodes in address order tile the pool without gap; no two neighbours are both FREE (freeing merges at
# once); a FREE node is in exactly the bin of its size. Metadata lives outside the pool, so that a forked child, in
# which the pool is not mapped (MADV_DONTFORK), can still run destructors.


@cython.final
@cython.no_gc
cdef class Arena:
    """The pool's mapping; unmapped with its last holder: the table, a view or a window."""

    def __cinit__(self, size_t size):
        self.generation = akv_generation()
        self.base = <char *>akv_map(size)
        if self.base == NULL:
            raise MemoryError(f"cannot map a memory pool of {size} bytes")
        self.size = self.ready_high = size

    def __dealloc__(self):
        # In a forked child the range is not mapped, or is something else by now.
        if self.base != NULL and self.generation == akv_generation():
            with nogil:         # 0.1 s for each GiB of small pages
                akv_unmap(self.base, self.size)
        free(self.released)

    def touch(self, uint64_t start, uint64_t end):
        cdef size_t at = start
        cdef size_t step
        if not start <= end <= self.size or self.generation != akv_generation():
            raise ValueError("a range outside the pool")
        with nogil:
            while at < end and self.table != NULL:      # until the table is closed
                step = min(<size_t>TOUCH_STEP, end - at)
                akv_touch(self.base + at, step)
                at += step


cdef int arena_expect(Arena arena) except -1:
    """Make sure that one more release can be pushed without allocating."""
    cdef uint32_t cap
    cdef uint64_t *grown
    # Both what is outstanding and what was pushed and not drained yet may have to fit.
    if arena.outstanding + arena.n_released + 2 > arena.released_cap:
        cap = 2 * (arena.outstanding + arena.n_released) + 64
        grown = <uint64_t *>realloc(arena.released, cap * sizeof(uint64_t))
        if grown == NULL:
            raise MemoryError()
        arena.released = grown
        arena.released_cap = cap
    arena.outstanding += 1
    return 0


cdef void arena_push(Arena arena, uint32_t node, uint64_t tag) noexcept:
    # Runs in destructors: on any thread that holds the GIL, inside garbage collection, inside a table call.
    arena.released[arena.n_released] = (tag << 32) | node
    arena.n_released += 1
    arena.outstanding -= 1
    if arena.n_released == 1 and arena.table != NULL:
        try:
            table_wake(<BlockMap>arena.table)
        except BaseException:
            pass        # a closed loop: nobody waits any more


cdef int table_wake(BlockMap t) except -1:
    if t.waiting and t.wake is not None:
        t.wake()
    return 0


@cython.final
@cython.no_gc
@cython.freelist(64)
cdef class Pin:
    """Base object of views: keeps the mapping alive and the extent from being reused."""

    cdef Arena arena
    cdef char *data
    cdef Py_ssize_t size
    cdef uint32_t node
    cdef bint armed
    cdef bint writable

    def __getbuffer__(self, Py_buffer *view, int flags):
        # A read-only view must stay so: numpy asks here before it lets setflags(write=True) through.
        PyBuffer_FillInfo(view, self, self.data, self.size, not self.writable, flags)

    def __dealloc__(self):
        if self.armed and self.arena.generation == akv_generation():
            arena_push(self.arena, self.node, 0)


@cython.final
@cython.no_gc
cdef class Window:
    """A buffer over pool bytes that keeps the mapping alive and nothing else."""

    cdef Arena arena
    cdef char *data
    cdef Py_ssize_t size
    cdef bint writable

    def __getbuffer__(self, Py_buffer *view, int flags):
        PyBuffer_FillInfo(view, self, self.data, self.size, not self.writable, flags)


cdef object make_window(BlockMap t, uint32_t n, uint64_t size, bint writable):
    cdef Window w = Window.__new__(Window)
    w.arena = t.arena
    w.data = node_data(t, n)
    w.size = <Py_ssize_t>size
    w.writable = writable
    return PyMemoryView_FromObject(w)


# -- nodes ------------------------------------------------------------------------------------------------------------

cdef inline Node *N(BlockMap t, uint32_t n) noexcept:
    return &t.nodes[n >> PIECE_BITS][n & PIECE_MASK]


cdef inline uint32_t state_of(Node *p) noexcept:
    return p.flags & N_STATE


cdef inline void set_state(Node *p, uint32_t state) noexcept:
    p.flags = <uint8_t>((p.flags & ~<uint32_t>N_STATE) | state)


cdef inline char *node_data(BlockMap t, uint32_t n) noexcept:
    return t.arena.base + ((<uint64_t>N(t, n).offset) << t.granule_shift)


cdef inline uint64_t node_bytes(BlockMap t, uint32_t n) noexcept:
    return (<uint64_t>N(t, n).size) << t.granule_shift


cdef int nodes_reserve(BlockMap t, uint32_t count) except -1:
    """Have `count` unused node indices at hand, so that splitting cannot fail half way."""
    cdef Node *piece
    cdef Node **grown
    cdef uint32_t i, first
    while t.node_spare < count:
        if (t.node_pieces & (t.node_pieces - 1)) == 0:
            grown = <Node **>realloc(t.nodes, (2 * t.node_pieces + 1) * sizeof(Node *))
            if grown == NULL:
                raise MemoryError()
            t.nodes = grown
        piece = <Node *>akv_alloc64(PIECE * sizeof(Node))
        if piece == NULL:
            raise MemoryError()
        t.nodes[t.node_pieces] = piece
        first = t.node_pieces << PIECE_BITS
        for i in range(t.node_top, first):      # leftovers of the piece before
            N(t, i).next = t.node_free
            t.node_free = i
        t.node_pieces += 1
        t.node_spare += PIECE
        t.node_top = first      # untouched indices of the newest piece are handed out from here
    return 0


cdef uint32_t node_take(BlockMap t) noexcept:
    # nodes_reserve came before. Freed indices first: fresh pages of a piece are only touched when needed.
    cdef uint32_t n = t.node_free
    cdef Node *p
    t.node_spare -= 1
    if n != NONE:
        p = N(t, n)
        t.node_free = p.next
    else:
        n = t.node_top
        t.node_top += 1
        p = N(t, n)
    memset(p, 0, sizeof(Node))
    p.entry = NONE
    p.prev = p.next = p.left = p.right = NONE
    return n


cdef void node_return(BlockMap t, uint32_t n) noexcept:
    cdef Node *p = N(t, n)
    p.flags = 0
    p.next = t.node_free
    t.node_free = n
    t.node_spare += 1


# -- bins: power-of-two classes cut in 16; sizes below 32 granules have a bin of their own -----------------------------

cdef inline uint32_t bin_of(uint32_t size) noexcept:
    cdef uint32_t top
    if size < 16:
        return size
    top = 31 - <uint32_t>akv_clz32(size)
    return ((top - 3) << 4) | ((size >> (top - 4)) & 15)


cdef void bin_add(BlockMap t, uint32_t n) noexcept:
    cdef Node *p = N(t, n)
    cdef uint32_t b = bin_of(p.size)
    set_state(p, FREE)
    p.entry = NONE
    p.prev = NONE
    p.next = t.bins[b]
    if p.next != NONE:
        N(t, p.next).prev = n
    t.bins[b] = n
    t.bin_map |= <uint64_t>1 << (b >> 4)
    t.bin_sub[b >> 4] |= <uint32_t>1 << (b & 15)
    t.free_granules += p.size


cdef void bin_remove(BlockMap t, uint32_t n) noexcept:
    cdef Node *p = N(t, n)
    cdef uint32_t b = bin_of(p.size)
    if p.prev != NONE:
        N(t, p.prev).next = p.next
    else:
        t.bins[b] = p.next
        if p.next == NONE:
            t.bin_sub[b >> 4] &= ~(<uint32_t>1 << (b & 15))
            if t.bin_sub[b >> 4] == 0:
                t.bin_map &= ~(<uint64_t>1 << (b >> 4))
    if p.next != NONE:
        N(t, p.next).prev = p.prev
    p.prev = p.next = NONE
    t.free_granules -= p.size


cdef uint32_t bin_next(BlockMap t, uint32_t b) noexcept:
    """First non-empty bin at or after b, NONE when there is none."""
    cdef uint32_t row = b >> 4
    cdef uint32_t sub
    cdef uint64_t rows
    if row >= 34:
        return NONE
    sub = t.bin_sub[row] & (<uint32_t>0xFFFF << (b & 15))
    if sub == 0:
        if row + 1 >= 34:
            return NONE
        rows = t.bin_map & (~<uint64_t>0 << (row + 1))
        if rows == 0:
            return NONE
        row = <uint32_t>akv_ctz64(rows)
        sub = t.bin_sub[row]
    return (row << 4) | <uint32_t>akv_ctz64(sub)


cdef inline uint64_t align_up(uint64_t x, uint64_t a) noexcept:
    return (x + a - 1) & ~(a - 1)       # a is a power of two


cdef inline uint64_t node_end(Node *p) noexcept:
    return <uint64_t>p.offset + p.size


cdef inline bint fits_in(Node *p, uint32_t size, uint32_t align) noexcept:
    return align_up(p.offset, align) + size <= node_end(p)


cdef uint32_t pool_carve(BlockMap t, uint32_t n, uint32_t start, uint32_t size) noexcept:
    """Cut [start, start + size) out of n, which is in no bin; the rest becomes free. Needs 2 spare nodes."""
    cdef Node *p = N(t, n)
    cdef Node *q
    cdef uint32_t m, old
    set_state(p, CLAIM)         # first: what is cut off must not merge back
    if start > p.offset:
        m = node_take(t)
        q = N(t, m)
        q.offset = p.offset
        q.size = start - p.offset
        q.left = p.left
        q.right = n
        if q.left != NONE:
            N(t, q.left).right = m
        else:
            t.first_node = m
        p.left = m
        p.size -= q.size
        p.offset = start
        pool_settle(t, m)
    if p.size > size:
        old = p.right
        m = node_take(t)
        q = N(t, m)
        q.offset = start + size
        q.size = p.size - size
        q.left = n
        q.right = old
        if old != NONE:
            N(t, old).left = m
        p.right = m
        p.size = size
        pool_settle(t, m)
    return n


cdef uint32_t pool_take_free(BlockMap t, uint32_t size, uint32_t align) noexcept:
    """An extent out of free space, NONE without one. Needs 2 spare nodes.

    Exact fit first, then a bounded walk of the size's own class, then the classes above.
    """
    cdef uint32_t b = bin_of(size)
    cdef uint32_t n = t.bins[b]
    cdef uint32_t best = NONE
    cdef uint32_t steps = 0
    cdef Node *p
    cdef uint64_t start
    while n != NONE and steps < 32:
        p = N(t, n)
        if p.size >= size and fits_in(p, size, align):
            if p.size == size:
                best = n
                break
            if best == NONE or p.size < N(t, best).size:
                best = n
        n = p.next
        steps += 1
    b += 1
    while best == NONE:
        b = bin_next(t, b)
        if b == NONE:
            return NONE
        n = t.bins[b]
        steps = 0
        while n != NONE and steps < 8:
            if fits_in(N(t, n), size, align):
                best = n
                break
            n = N(t, n).next
            steps += 1
        b += 1
    p = N(t, best)
    # Small extents from the top, aligned ones from the bottom: the two kinds fragment each other less.
    if align > 1:
        start = align_up(p.offset, align)
        if start + size <= t.used_high:
            t.used_low = max(t.used_low, <uint32_t>start + size)
    else:
        start = node_end(p) - size
        if start >= t.used_low:
            t.used_high = min(t.used_high, <uint32_t>start)
    bin_remove(t, best)
    return pool_carve(t, best, <uint32_t>start, size)


cdef bint pages_wanted(BlockMap t, uint64_t ahead, size_t *start, size_t *end) noexcept:
    """The range that comes into use next and has no pages: due when less than half of `ahead` is ready.

    At the top, where small blocks come from, an eighth of it is enough.
    """
    cdef Arena arena = t.arena
    cdef uint64_t used = <uint64_t>t.used_low << t.granule_shift
    if arena.ready_low < min(used + ahead // 2, arena.ready_high):
        start[0] = arena.ready_low
        end[0] = min(used + ahead, arena.ready_high)
        return True
    used = <uint64_t>t.used_high << t.granule_shift
    ahead = ahead // 8
    if arena.ready_high > max(used - min(used, ahead // 2), arena.ready_low):
        start[0] = max((used - min(used, ahead)) & ~<uint64_t>4095, arena.ready_low)
        end[0] = arena.ready_high
        return True
    return False


cdef void cursors_move(BlockMap t, uint32_t gone, uint32_t into) noexcept:
    cdef int i
    for i in range(8):
        if t.cursors[i].node == gone:
            t.cursors[i].node = into


cdef void pool_absorb_right(BlockMap t, uint32_t n) noexcept:
    """Merge n's right neighbour, which is in no bin, into n."""
    cdef Node *p = N(t, n)
    cdef uint32_t r = p.right
    cdef Node *q = N(t, r)
    p.size += q.size
    p.right = q.right
    if p.right != NONE:
        N(t, p.right).left = n
    cursors_move(t, r, n)
    node_return(t, r)


cdef uint32_t pool_settle(BlockMap t, uint32_t n) noexcept:
    """Free n: merge with free neighbours, enter a bin. Returns the node that covers it now."""
    cdef Node *p = N(t, n)
    cdef uint32_t m
    p.flags = 0
    p.entry = NONE
    m = p.right
    if m != NONE and state_of(N(t, m)) == FREE:
        bin_remove(t, m)
        pool_absorb_right(t, n)
    m = p.left
    if m != NONE and state_of(N(t, m)) == FREE:
        bin_remove(t, m)
        pool_absorb_right(t, m)
        n = m
    bin_add(t, n)
    t.epoch += 1
    return n


# -- pins and I/O holds -----------------------------------------------------------------------------------------------

cdef void node_quarantine(BlockMap t, uint32_t n) noexcept:
    """Recount n's part in the quarantine: detached, and owned by an operation past its deadline."""
    cdef Node *p = N(t, n)
    cdef bint now = state_of(p) == DETACHED and p.io > 0 and (p.flags & N_EXPIRED) != 0
    cdef bint was = (p.flags & N_QUARANTINED) != 0
    if now and not was:
        p.flags |= N_QUARANTINED
        t.quarantined_granules += p.size
    elif was and not now:
        p.flags &= <uint8_t>(~<uint32_t>N_QUARANTINED & 0xFF)
        t.quarantined_granules -= p.size


cdef void node_settle(BlockMap t, uint32_t n) noexcept:
    """After a hold on n ended or its entry left: free it, or note that it became evictable."""
    cdef Node *p = N(t, n)
    if state_of(p) == DETACHED:
        node_quarantine(t, n)
        if p.pins == 0 and p.io == 0:
            pool_settle(t, n)
    elif state_of(p) == READY:
        became_evictable(t, n)


cdef int node_pin(BlockMap t, uint32_t n) except -1:
    cdef Node *p = N(t, n)
    arena_expect(t.arena)
    if p.pins == 0:
        t.pinned_count += 1
        t.pinned_granules += p.size
    if p.pins == 0xFFFF:
        try:
            t.extra[n] = t.extra.get(n, 0) + 1
        except BaseException:
            t.arena.outstanding -= 1
            raise
    else:
        p.pins += 1
    return 0


cdef void node_unpin(BlockMap t, uint32_t n) noexcept:
    cdef Node *p = N(t, n)
    if p.pins == 0xFFFF and n in t.extra:
        if t.extra[n] == 1:
            del t.extra[n]
        else:
            t.extra[n] -= 1
        return
    p.pins -= 1
    if p.pins == 0:
        t.pinned_count -= 1
        t.pinned_granules -= p.size
        node_settle(t, n)


cdef void node_hold(BlockMap t, uint32_t n) noexcept:
    N(t, n).io += 1


cdef void node_unhold(BlockMap t, uint32_t n) noexcept:
    cdef Node *p = N(t, n)
    p.io -= 1
    if p.io == 0:
        node_quarantine(t, n)
        p.flags &= <uint8_t>(~<uint32_t>N_EXPIRED & 0xFF)
        node_settle(t, n)


cdef void drain(BlockMap t) noexcept:
    """Apply the releases that destructors pushed. Runs no Python code, so nothing is pushed meanwhile."""
    cdef Arena arena = t.arena
    cdef uint32_t i = 0
    cdef uint32_t n
    while i < arena.n_released:
        n = <uint32_t>(arena.released[i] & NONE)
        if n != NONE:
            if arena.released[i] >> 32:
                node_abandon(t, n)
            else:
                node_unpin(t, n)
        i += 1
    arena.n_released = 0


cdef void node_abandon(BlockMap t, uint32_t n) noexcept:
    """Give a room's extent back; reserved arrays may still hold it."""
    cdef Node *p = N(t, n)
    set_state(p, DETACHED)
    node_settle(t, n)
