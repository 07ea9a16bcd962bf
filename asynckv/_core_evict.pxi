# Eviction room: recency order, choice of victims, claims of address windows, rooms.
#
# Invariants: every READY node is in exactly one of the recency list and the ready list. The hint makes long runs of
# unevictable nodes (pinned, dirty) at the old end cost one walk, not one per eviction: nodes the walk passed over carry
# N_SKIPPED, and each evictable node is at the hint, headward of it, or in the ready list.


# -- recency ----------------------------------------------------------------------------------------------------------

cdef void lru_push(BlockMap t, uint32_t n) noexcept:
    cdef Node *p = N(t, n)
    p.prev = NONE
    p.next = t.lru_head
    if t.lru_head != NONE:
        N(t, t.lru_head).prev = n
    else:
        t.lru_tail = n
    t.lru_head = n
    if t.hint == NONE:
        t.hint = n


cdef void lru_push_old(BlockMap t, uint32_t n) noexcept:
    """At the old end, as passed over."""
    cdef Node *p = N(t, n)
    p.next = NONE
    p.prev = t.lru_tail
    if t.lru_tail != NONE:
        N(t, t.lru_tail).next = n
    else:
        t.lru_head = n
    t.lru_tail = n
    p.flags |= N_SKIPPED
    t.skipped += 1


cdef void lru_remove(BlockMap t, uint32_t n) noexcept:
    cdef Node *p = N(t, n)
    if p.flags & N_READYQ:
        if p.prev != NONE:
            N(t, p.prev).next = p.next
        else:
            t.ready_head = p.next
        if p.next != NONE:
            N(t, p.next).prev = p.prev
        else:
            t.ready_tail = p.prev
    else:
        if t.hint == n:
            t.hint = p.prev
        if p.prev != NONE:
            N(t, p.prev).next = p.next
        else:
            t.lru_head = p.next
        if p.next != NONE:
            N(t, p.next).prev = p.prev
        else:
            t.lru_tail = p.prev
        if p.flags & N_SKIPPED:
            t.skipped -= 1
    p.flags &= <uint8_t>(~<uint32_t>(N_READYQ | N_SKIPPED) & 0xFF)
    p.prev = p.next = NONE


cdef inline bint evictable(BlockMap t, uint32_t n) noexcept:
    cdef Node *p = N(t, n)
    cdef Entry *e
    if state_of(p) != READY or p.pins != 0 or p.io != 0:
        return False
    if not t.backed_flag:
        return True
    e = E(t, p.entry)
    return list_code(e) == L_SEGMENT or list_code(e) == L_UNBACKED


cdef void became_evictable(BlockMap t, uint32_t n) noexcept:
    """A hold on n ended or its block became clean: keep the hint's invariant, tell blocked rooms."""
    cdef Node *p = N(t, n)
    if state_of(p) != READY or not evictable(t, n):
        return
    t.epoch += 1
    if not p.flags & N_SKIPPED:
        return
    if t.skipped <= 256:
        t.hint = t.lru_tail         # few to pass again: keep the exact order
        return
    lru_remove(t, n)
    p.flags |= N_READYQ
    p.next = NONE
    p.prev = t.ready_tail
    if t.ready_tail != NONE:
        N(t, t.ready_tail).next = n
    else:
        t.ready_head = n
    t.ready_tail = n


cdef void hint_reset(BlockMap t) noexcept:
    t.hint = t.lru_tail
    t.epoch += 1


cdef uint32_t next_victim(BlockMap t, int *more) noexcept:
    """The oldest evictable node, NONE without one; `more` is set when the walk stopped at its limit."""
    cdef uint32_t n
    cdef uint32_t steps = 0
    more[0] = 0
    while t.ready_head != NONE:
        n = t.ready_head
        if evictable(t, n):
            return n
        lru_remove(t, n)
        lru_push_old(t, n)
    n = t.hint
    while n != NONE:
        if evictable(t, n):
            t.hint = n
            return n
        steps += 1
        if steps > 4096:
            t.hint = n
            more[0] = 1
            return NONE
        if not N(t, n).flags & N_SKIPPED:
            N(t, n).flags |= N_SKIPPED
            t.skipped += 1
        n = N(t, n).prev
    t.hint = NONE
    return NONE


cdef uint32_t victim_after(BlockMap t, uint32_t n, uint32_t *budget) noexcept:
    """The next evictable node after n in eviction order, without moving the hint."""
    if N(t, n).flags & N_READYQ:
        n = N(t, n).next
        while n != NONE and not evictable(t, n):
            n = N(t, n).next
        if n != NONE:
            return n
        n = t.hint
    else:
        n = N(t, n).prev
    while n != NONE and budget[0] > 0:
        if evictable(t, n):
            return n
        budget[0] -= 1
        n = N(t, n).prev
    return NONE


# Policy seam. lru and fifo decide per block and admit all, so begin and commit have no work and nothing is bypassed.

cdef uint64_t policy_begin(BlockMap t) noexcept:
    t.request_token += 1
    return t.request_token


cdef void policy_commit(BlockMap t, uint64_t request) noexcept:
    pass


cdef inline void policy_hit(BlockMap t, uint32_t n) noexcept:
    if t.policy_id == POLICY_LRU and t.lru_head != n:
        lru_remove(t, n)
        lru_push(t, n)


cdef inline void policy_insert(BlockMap t, uint32_t n) noexcept:
    lru_push(t, n)


# -- entries leave memory ---------------------------------------------------------------------------------------------

cdef void node_detach(BlockMap t, uint32_t n) noexcept:
    """n's entry gives it up: out of the recency order, freed now or when its last hold ends."""
    cdef Node *p = N(t, n)
    if state_of(p) == READY:
        lru_remove(t, n)
        t.memory_count -= 1
    set_state(p, DETACHED)
    p.entry = NONE
    node_settle(t, n)


cdef void entry_clear(BlockMap t, uint32_t i) noexcept:
    """Strip extent, location, list, descriptor and all flags but LOGGED."""
    cdef Entry *e = E(t, i)
    cdef bint in_memory = e.node != NONE and state_of(N(t, e.node)) == READY
    cdef uint32_t n = e.node
    if e.flags & E_GHOST:
        t.ghost_count -= 1
    elif not in_memory:
        t.disk_only -= 1
    list_remove(t, i)
    if e.slot != NONE:
        e.slot = NONE
        t.disk_count -= 1
    e.node = NONE
    if n != NONE:
        node_detach(t, n)
    if e.desc != NONE:
        desc_release(t, e.desc)
        e.desc = NONE
    if e.flags & E_SPILLING:
        t.spilling -= 1
    e.flags &= E_LOGGED


cdef void entry_remove(BlockMap t, uint32_t i) noexcept:
    """Remove an entry; while recovering a ghost stays, so that older records of the key are not let in."""
    cdef Entry *e = E(t, i)
    entry_clear(t, i)
    if t.recovering_flag:
        e.flags |= E_GHOST | E_LOGGED
        t.ghost_count += 1
        list_add(t, i, L_UNBACKED, False)
        return
    index_delete(t, i)
    entry_discard(t, i)


cdef int evict(BlockMap t, uint32_t n, uint32_t *freed) except -1:
    """Evict one node; `freed` is the free node that covers it then."""
    cdef Node *p = N(t, n)
    cdef uint32_t i = p.entry
    cdef Entry *e = E(t, i)
    cdef uint64_t offset = p.offset
    if e.slot == NONE and e.flags & E_LOGGED:
        t.owed_keys[tagged_key(e.kind, entry_key(e), e.keylen)] = None
    t.n_evictions += 1
    if e.slot != NONE:
        lru_remove(t, n)
        e.node = NONE
        t.memory_count -= 1
        t.disk_only += 1
        freed[0] = pool_settle(t, n)
        return 0
    t.n_dropped += 1
    # As node_detach would, but the free node that results is wanted.
    list_remove(t, i)
    lru_remove(t, n)
    t.memory_count -= 1
    e.node = NONE
    t.disk_only += 1            # entry_remove takes it off again
    entry_remove(t, i)
    freed[0] = pool_settle(t, n)
    return 0


# -- claims: growing an extent over address neighbours ----------------------------------------------------------------

cdef inline bint usable(BlockMap t, uint32_t n) noexcept:
    return state_of(N(t, n)) == FREE or evictable(t, n)


cdef int find_window(BlockMap t, uint32_t v, uint32_t size, uint32_t limit, uint32_t *first, uint64_t *start,
                     uint32_t *visits) noexcept:
    """Free and evictable neighbours around v that reach `size`: 1 with first node and start, 0 none, -1 over the limit.

    `size` granules, aligned as all extents of that size are. Nothing is evicted here: infeasible windows cost nobody.
    """
    cdef uint32_t align = align_of(t, size)
    cdef uint32_t L = v
    cdef uint32_t R = v
    cdef uint32_t x, seen = 0
    cdef uint64_t base, s, want
    x = N(t, v).left
    if x != NONE and state_of(N(t, x)) == FREE:
        L = x
    base = N(t, L).offset
    s = align_up(base, align)
    if s != base and (L == v or s > N(t, v).offset):
        want = base & ~(<uint64_t>align - 1)
        while N(t, L).offset > want:
            x = N(t, L).left
            if x == NONE or not usable(t, x):
                break
            L = x
        s = want if N(t, L).offset <= want else align_up(N(t, L).offset, align)
    while node_end(N(t, R)) < s + size:
        x = N(t, R).right
        if x == NONE or not usable(t, x):
            break
        R = x
        seen += 1
        if seen > limit:
            visits[0] += seen
            return -1
    if node_end(N(t, R)) < s + size:
        if node_end(N(t, R)) < size:
            visits[0] += seen
            return 0
        s = (node_end(N(t, R)) - size) & ~(<uint64_t>align - 1)
        while N(t, L).offset > s:
            x = N(t, L).left
            if x == NONE or not usable(t, x):
                visits[0] += seen
                return 0
            L = x
            seen += 1
            if seen > limit:
                visits[0] += seen
                return -1
    while node_end(N(t, L)) <= s:
        L = N(t, L).right
    first[0] = L
    start[0] = s
    visits[0] += seen
    return 1


cdef uint32_t claim_begin(BlockMap t, uint32_t first, uint32_t *evictions) except? 0xFFFFFFFF:
    if state_of(N(t, first)) != FREE:
        evict(t, first, &first)
        evictions[0] += 1
    bin_remove(t, first)
    set_state(N(t, first), CLAIM)
    return first


cdef int claim_grow(BlockMap t, uint32_t c, uint64_t end, uint32_t limit, uint32_t *evictions) except -1:
    """Extend the claim to `end`: 1 reached, 0 at the limit, 2 a neighbour cannot go any more."""
    cdef uint32_t r
    while node_end(N(t, c)) < end:
        r = N(t, c).right
        if r == NONE:
            return 2
        if state_of(N(t, r)) != FREE:
            if not evictable(t, r):
                return 2
            if evictions[0] >= limit:
                return 0
            evict(t, r, &r)
            evictions[0] += 1
        bin_remove(t, r)
        pool_absorb_right(t, c)
    return 1


cdef inline uint32_t align_of(BlockMap t, uint32_t size) noexcept:
    return t.align if ((<uint64_t>size) << t.granule_shift) >= DIRECT_MIN else 1


cdef inline uint64_t extent_of(BlockMap t, uint64_t stored) noexcept:
    """Occupied bytes of a block of that stored length."""
    if stored >= DIRECT_MIN:
        stored = align_up(stored, 4096)
    elif stored == 0:
        stored = 1
    return align_up(stored, <uint64_t>1 << t.granule_shift)


cdef bint oldest_is_dirty(BlockMap t) noexcept:
    """Would the policy's next victim be one that has to be written first? Pinned ones do not count.

    A put then waits for the write: taking a younger clean block instead would turn a burst of puts into the loss of
    what is used most. A reload does not wait, see `Table.room`.
    """
    cdef uint32_t n = t.lru_tail
    cdef uint32_t seen = 0
    cdef Entry *e
    if not t.backed_flag or t.ready_head != NONE:
        return False
    while n != NONE and seen < 64:
        if N(t, n).pins == 0:
            e = E(t, N(t, n).entry)
            if list_code(e) == L_DIRTY or e.flags & E_SPILLING:
                return True
            if evictable(t, n):
                return False
        n = N(t, n).prev
        seen += 1
    return False


cdef int take_now(BlockMap t, uint32_t size, uint32_t *out, bint patient) except -1:
    """An extent with at most a few hundred evictions: 1, or 0 and nothing changed. `patient` as for a room."""
    cdef uint32_t v, first = NONE, visits = 0, evictions = 0, walk = 256
    cdef uint64_t start = 0
    cdef int more = 0, tries = 0, found
    cdef uint32_t c
    nodes_reserve(t, 4)
    c = pool_take_free(t, size, align_of(t, size))
    if c != NONE:
        out[0] = c
        return 1
    if patient and oldest_is_dirty(t):
        return 0
    v = next_victim(t, &more)
    while v != NONE and tries < 4:
        found = find_window(t, v, size, MAX_EVICT - 2, &first, &start, &visits)
        if found == 1:
            c = claim_begin(t, first, &evictions)
            try:
                found = claim_grow(t, c, start + size, NONE, &evictions)
            except BaseException:
                pool_settle(t, c)
                raise
            out[0] = pool_carve(t, c, <uint32_t>start, size)
            return 1
        tries += 1
        v = victim_after(t, v, &walk)
    return 0


@cython.final
@cython.no_gc_clear
cdef class Room:
    """A claim on pool space that grows over loop turns; see `Table.room`."""

    cdef BlockMap table
    cdef uint32_t size          # granules
    cdef uint64_t stored        # bytes the owner will use
    cdef uint32_t node          # the claim or the finished extent, NONE before
    cdef uint64_t start         # granules: where the finished extent begins
    cdef int status             # 0 searching, 1 claiming, 2 done, 3 used or cancelled
    cdef int tried              # victims without a window so far
    cdef bint scanning
    cdef bint patient           # waits for the policy's victim to be written rather than taking another
    cdef uint64_t token
    cdef uint64_t blocked_at    # epoch of the last fruitless search
    cdef readonly bint needs_spill

    @property
    def done(self):
        return self.status == 2

    @property
    def bytes(self):
        """Occupied bytes once done."""
        return (<uint64_t>self.size) << self.table.granule_shift

    def step(self):
        """Work towards the extent: 1 done, 0 call again next turn, -1 nothing evictable makes room now."""
        cdef BlockMap t = self.table
        enter(t)
        if self.status == 2:
            return 1
        if self.status == 3:
            raise InternalError("this room was used or cancelled")
        nodes_reserve(t, 4)
        if self.status == 1:
            return self.grow(t, 0)
        self.search(t)
        if self.status == 2:
            return 1
        if self.status == 0 and self.blocked_at == t.epoch:
            self.needs_spill = t.backed_flag and (t.lists[0].count > 0 or t.spilling > 0)
            return -1
        return 0

    cdef int search(self, BlockMap t) except -1:
        """Find free space or a window; sets status, or blocked_at when there is none."""
        cdef uint32_t c, v, first = NONE, visits = 0, walk = 4096, evictions = 0
        cdef uint64_t start = 0
        cdef uint32_t limit = max(SCAN_LIMIT, 2 * self.size)
        cdef int more = 0, k, found
        if self.blocked_at == t.epoch:
            return 0
        if self.blocked_at != 0:
            self.blocked_at = 0
            self.tried = 0
        c = pool_take_free(t, self.size, align_of(t, self.size))
        if c != NONE:
            self.node = c
            self.status = 2
            return 0
        if self.patient and oldest_is_dirty(t):
            self.blocked_at = t.epoch
            return 0
        if not self.scanning:
            v = next_victim(t, &more)
            if v == NONE:
                if not more:
                    self.blocked_at = t.epoch
                return 0
            k = 0
            while v != NONE and k < 16:
                if k >= self.tried:
                    found = find_window(t, v, self.size, limit, &first, &start, &visits)
                    self.tried = k + 1
                    if found == 1:
                        return self.claim(t, first, start)
                    if visits > SCAN_LIMIT:
                        break
                k += 1
                v = victim_after(t, v, &walk)
            if v != NONE and self.tried < 16:
                return 0
            self.scanning = True
        found = scan_windows(t, self.token, self.size, &first, &start)
        if found < 0:
            return 0
        self.scanning = False
        self.tried = 0
        if found == 1:
            return self.claim(t, first, start)
        self.blocked_at = t.epoch
        return 0

    cdef int claim(self, BlockMap t, uint32_t first, uint64_t start) except -1:
        cdef uint32_t evictions = 0
        self.node = claim_begin(t, first, &evictions)
        self.start = start
        self.status = 1
        self.tried = 0
        return self.grow(t, evictions)

    cdef int grow(self, BlockMap t, uint32_t evictions) except? -2:
        cdef int reached = claim_grow(t, self.node, self.start + self.size, MAX_EVICT, &evictions)
        if reached == 1:
            pool_carve(t, self.node, <uint32_t>self.start, self.size)
            self.status = 2
            return 1
        if reached == 0:
            return 0
        # A view was taken inside the window meanwhile: give it up and search again next turn. No endless loop: the
        # caller's deadline ends it.
        pool_settle(t, self.node)
        self.node = NONE
        self.status = 0
        return 0

    def cancel(self):
        """Give everything back; nothing happens when the room was used."""
        cdef BlockMap t = self.table
        if self.status == 3 or t.generation != akv_generation():
            return
        if self.node != NONE:
            node_abandon(t, self.node)
        if not t.closed:
            self.disarm(t)
        self.status = 3
        self.node = NONE

    cdef void disarm(self, BlockMap t) noexcept:
        if self.status != 3:
            t.arena.outstanding -= 1

    cdef uint32_t use(self, BlockMap t) noexcept:
        cdef uint32_t n = self.node
        self.disarm(t)
        self.status = 3
        self.node = NONE
        return n

    def __dealloc__(self):
        # Dropped without cancel: as for views, only push.
        if self.status != 3 and self.table is not None and not self.table.closed \
                and self.table.generation == akv_generation():
            arena_push(self.table.arena, self.node, 1)


cdef int scan_windows(BlockMap t, uint64_t token, uint32_t size, uint32_t *first, uint64_t *start) noexcept:
    """Search the pool by address, some tens of thousands of nodes a call: 1 found, 0 none, -1 call again."""
    cdef int i, mine = -1
    cdef uint32_t x, L = NONE, begin, visits = 0
    cdef uint32_t align = align_of(t, size)
    cdef uint64_t s = 0
    for i in range(8):
        if t.cursors[i].owner == token:
            mine = i
    if mine < 0:
        mine = <int>(token & 7)
        t.cursors[mine].owner = token
        t.cursors[mine].node = t.first_node
    x = t.cursors[mine].node
    begin = x
    while x != NONE:
        visits += 1
        if usable(t, x):
            if L == NONE:
                L = x
                s = align_up(N(t, L).offset, align)
            if node_end(N(t, x)) >= s + size:
                while node_end(N(t, L)) <= s:
                    L = N(t, L).right
                first[0] = L
                start[0] = s
                t.cursors[mine].owner = 0
                t.cursors[mine].node = NONE
                return 1
        else:
            L = NONE
        x = N(t, x).right
        if visits > SCAN_LIMIT and L != begin and x != NONE:
            t.cursors[mine].node = L if L != NONE else x
            return -1
    t.cursors[mine].owner = 0
    t.cursors[mine].node = NONE
    return 0
