# Table room: what has to do with disk - spills, reloads, segments, recovery - and the audit and the end of the table.


cdef uint32_t carried(BlockMap t, Carry c) noexcept:
    cdef uint32_t i = find_raw(t, c.kind, c.key)
    if i == NONE or E(t, i).slot != c.slot or E(t, i).offset != c.offset \
            or E(t, i).checksum != c.checksum or E(t, i).length != c.stored:
        return NONE
    return i


@cython.final
@cython.no_gc_clear
cdef class Table(BlockMap):
    """The block table; the module's stub describes every call."""

    # -- spills -------------------------------------------------------------------------------------------------------

    def take_dirty(self, max_bytes, max_blocks):
        cdef list out = []
        cdef uint64_t used = 0
        cdef Py_ssize_t left
        enter(self)
        try:
            take_list(self, 0, min(max_bytes, 2**63), min(max_blocks, 2**31), &used, out)
        except MemoryError:         # the caller never sees those that were taken: they go back, in their old order
            left = len(out)
            while left:             # and nothing here asks for memory
                left -= 1
                end_spill(self, <Spill>PyList_GET_ITEM(out, left), False, 0, 0, 0)
            raise
        return out

    def requeue_unbacked(self):
        cdef uint32_t count = self.lists[1].count, left = count
        cdef uint32_t i
        enter(self)
        while left:
            i = self.lists[1].head
            list_remove(self, i)
            to_dirty(self, i, False)
            left -= 1
        return count

    def owe_nospill(self):
        cdef uint32_t i = self.lists[3].head
        cdef Entry *e
        enter(self)
        while i != NONE:
            e = E(self, i)
            if e.flags & E_LOGGED:
                self.owed_keys[tagged_key(e.kind, entry_key(e), e.keylen)] = None
            i = e.next

    def finish_spill(self, Spill spill not None, ok, slot=0, offset=0, checksum=0):
        enter(self)
        return end_spill(self, spill, ok, slot, offset, checksum) == 1

    def expire_spill(self, Spill spill not None):
        cdef uint32_t i
        enter(self)
        if spill.status != 0:
            return
        spill.status = 1
        N(self, spill.node).flags |= N_EXPIRED
        i = N(self, spill.node).entry
        if i != NONE and E(self, i).flags & E_SPILLING:
            spilling_over(self, E(self, i))
            to_dirty(self, i, True)
        node_quarantine(self, spill.node)

    def release_spill(self, Spill spill not None):
        enter(self)
        if spill.status != 2:
            end_spill(self, spill, False, 0, 0, 0)

    # -- reloads ------------------------------------------------------------------------------------------------------

    def where(self, key):
        cdef uint32_t i = find_key(self, key)
        cdef Entry *e
        if i == NONE or not self.disk_readable:
            return None
        e = E(self, i)
        if e.node != NONE or e.slot == NONE:
            return None
        return e.slot, e.offset, e.length, e.checksum

    def begin_load(self, key, Room room, double now=0.0):
        cdef uint32_t i = find_key(self, key)
        cdef Load l
        if i == NONE or E(self, i).node != NONE or E(self, i).slot == NONE:
            raise InternalError("not a block on disk only")
        check_room(self, room, E(self, i).length)
        l = load_new(self, i)
        l.started = now
        load_start(self, l, room.node)
        room.use(self)
        return l

    def begin_loads(self, Answers answers not None, places, uint64_t largest, Py_ssize_t most, double now):
        cdef list begun = [], left = []
        cdef Py_ssize_t place, misses = 0
        cdef uint64_t evicted = self.n_evictions
        cdef Key k
        cdef uint32_t i, n = NONE
        cdef Entry *e
        cdef Load l
        enter(self)
        try:
            for place in places:
                parse_key(self, answers.keys[place], &k)
                i = index_find(self, &k)
                if i == NONE or not readable(self, E(self, i)):
                    if self.recovering_flag:
                        left.append(place)
                    else:
                        answers.codes[place] = A_MISS
                        answers.missing -= 1
                        misses += 1
                    continue
                e = E(self, i)
                if PyList_GET_SIZE(begun) >= most or e.node != NONE or e.slot == NONE or not 0 < e.length <= largest:
                    left.append(place)
                    continue
                l = load_new(self, i)
                if not take_now(self, <uint32_t>(extent_of(self, e.length) >> self.granule_shift), &n, False):
                    most = 0    # who comes first gets the next room
                    left.append(place)
                    continue
                try:
                    load_start(self, l, n)
                except BaseException:
                    pool_settle(self, n)
                    raise
                l.answers = answers
                l.index = place
                l.started = now
                begun.append(l)
                if self.n_evictions - evicted > MAX_EVICT:
                    most = 0    # the rest next turn
        except BaseException:
            for l in begun:
                l.answers = None
                load_end(self, l, False)
            raise
        if answers.missing == 0:
            answers.complete()
        return begun, left, misses

    def locate_loads(self, list loads not None):
        cdef list kept = [], stale = []
        cdef Load l
        cdef Entry *e
        enter(self)
        for l in loads:
            if not load_current(self, l):
                stale.append(l)
                continue
            e = E(self, l.entry)
            l.slot = e.slot
            l.offset = e.offset
            kept.append(l)
        return kept, stale

    def land_loads(self, list loads not None, double now, seconds):
        cdef list odd = []
        cdef uint64_t nbytes = 0
        cdef Py_ssize_t hits = 0
        cdef Load l
        cdef Answers a
        enter(self)
        for l in loads:
            if l.reload is not None or not load_current(self, l):
                odd.append(l)
                continue
            a = l.answers
            l.answers = None
            nbytes += l.stored
            load_end(self, l, True)
            seconds(now - l.started)
            if a is None or a.over:
                continue
            E(self, l.entry).flags |= E_USED    # a reload that somebody waited for
            try:
                a.answer(l.index, block_view(self, l.node, D(self, E(self, l.entry).desc), l.stored, False), A_DISK_HIT)
                hits += a.counted
            except BaseException as error:
                a.fail(error)
        return odd, nbytes, hits

    def loading(self, key):
        cdef uint32_t i = find_key(self, key)
        if i == NONE or E(self, i).node == NONE or state_of(N(self, E(self, i).node)) != LOADING:
            return None
        return self.loads.get(E(self, i).node)

    @property
    def loads_begun(self):
        return list(self.loads.values())

    @property
    def loads_count(self):
        return len(self.loads)

    def is_current(self, Load load not None):
        enter(self)
        return load_current(self, load)

    def finish_load(self, Load load not None, ok):
        enter(self)
        return load_end(self, load, ok) == 1

    def expire_load(self, Load load not None):
        cdef Node *p
        enter(self)
        if load.status != 0:
            return
        load.status = 1
        self.loads.pop(load.node, None)
        p = N(self, load.node)
        p.flags |= N_EXPIRED
        if p.entry != NONE:
            E(self, p.entry).node = NONE
            node_detach(self, load.node)
        else:
            node_quarantine(self, load.node)

    def release_load(self, Load load not None):
        if load.status < 2:
            self.finish_load(load, False)

    def block(self, what):
        cdef Load l
        cdef uint32_t i
        cdef Entry *e
        enter(self)
        if isinstance(what, Load):
            l = <Load>what
            # The extent may be another block's by now: match the key and the location that was read.
            i = find_raw(self, l.kind, l.key) if l.status == 3 else NONE
            if i == NONE:
                return None
            e = E(self, i)
            if e.node != l.node or not in_memory(self, e) or e.checksum != l.checksum or e.length != l.stored:
                return None
            e.flags |= E_USED       # a reload that somebody waited for
        else:
            i = operator_index(what)
            if i >= self.node_pieces << PIECE_BITS or state_of(N(self, i)) != READY:
                return None
            e = E(self, N(self, i).entry)
        return block_view(self, e.node, D(self, e.desc), e.length, False)

    def drop(self, what):
        cdef uint32_t i
        if isinstance(what, Load):
            enter(self)
            i = N(self, (<Load>what).node).entry if (<Load>what).status == 0 else NONE
            if (<Load>what).status >= 2:
                i = find_raw(self, (<Load>what).kind, (<Load>what).key)
                if i != NONE and (E(self, i).slot != (<Load>what).slot or E(self, i).offset != (<Load>what).offset):
                    i = NONE        # a newer version, or moved: not what was found damaged
        else:
            i = find_key(self, what)
        if i != NONE and not E(self, i).flags & E_GHOST:
            # What was damage now may read well another time: the record is buried as if it went before its segment.
            self.owed_keys[tagged_key(E(self, i).kind, entry_key(E(self, i)), E(self, i).keylen)] = None
            self.n_dropped += 1
            entry_remove(self, i)

    # -- segments -----------------------------------------------------------------------------------------------------

    def segment_live(self, slot):
        cdef uint32_t s = slot
        if s >= self.segment_count:
            return 0, 0
        return self.segments[s].count, self.segments[s].bytes

    def segment_candidates(self, slot, max_bytes, bint unused=False):
        cdef list out = []
        cdef uint32_t i = self.segment_first(slot)
        cdef Entry *e
        cdef Carry c
        cdef uint64_t total = 0
        cdef uint64_t most = min(max_bytes, 2**63)
        enter(self)
        while i != NONE:
            e = E(self, i)
            if (unused or e.flags & E_USED) and not in_memory(self, e) and total + e.length <= most:
                total += e.length
                c = Carry.__new__(Carry)
                c.kind = e.kind
                c.key = raw_bytes(e)
                c.desc = D(self, e.desc).raw
                c.stored = e.length
                c.slot = e.slot
                c.offset = e.offset
                c.checksum = e.checksum
                out.append(c)
            i = e.next
        return out

    def carry_current(self, Carry carry not None):
        enter(self)
        return carried(self, carry) != NONE

    def reserve_segment(self, slot):
        enter(self)
        segment_reserve(self, slot)

    def finish_carry(self, Carry carry not None, slot, offset):
        cdef uint32_t i, s = slot, o = offset
        enter(self)
        segment_reserve(self, s)
        i = carried(self, carry)
        if i == NONE:
            return False
        list_remove(self, i)
        self.disk_count -= 1
        set_location(self, i, s, o, carry.checksum)
        E(self, i).flags &= <uint8_t>(~<uint32_t>E_USED & 0xFF)
        return True

    def drop_segment(self, slot, max_blocks=0xFFFFFFFF):
        cdef uint32_t s = slot, count = 0, most = max_blocks
        cdef uint32_t i
        enter(self)
        while count < most:
            i = self.segment_first(s)
            if i == NONE:
                break
            drop_location(self, i, (E(self, i).flags & E_USED) != 0)
            count += 1
        return count

    def revert_segment(self, slot, from_offset):
        cdef uint32_t i, following, count = 0
        cdef uint64_t start = from_offset
        cdef Entry *e
        enter(self)
        i = self.segment_first(slot)
        while i != NONE:
            e = E(self, i)
            following = e.next
            if e.offset >= start:
                if not in_memory(self, e):      # what was not made durable may be in the log all the same
                    self.owed_keys[tagged_key(e.kind, entry_key(e), e.keylen)] = None
                drop_location(self, i, True)
                count += 1
            i = following
        return count

    # -- recovery and snapshots ---------------------------------------------------------------------------------------

    cdef int recover_block_c(self, int kind, const uint8_t *key, uint32_t keylen, uint32_t slot, uint32_t offset,
                             uint32_t stored, uint64_t checksum, uint32_t desc_id) except -1:
        cdef Key k
        cdef uint32_t i
        cdef Entry *e
        cdef Desc d
        if self.recover_closed or not raw_key(self, kind, key, keylen, &k) or index_find(self, &k) != NONE:
            return 0
        if self.owed_keys and tagged_key(kind, key, keylen) in self.owed_keys:
            return 0
        d = D(self, desc_id) if desc_id < <uint32_t>len(self.descs) else None
        if d is None or (d.kind and d.stored != stored) or stored >= MAX_STORED:
            # Nobody here can rebuild the key's newest block: as good as removed, older ones must not come back.
            self.n_unusable += 1
            self.recover_tombstone_c(kind, key, keylen)
            return 0
        segment_reserve(self, slot)
        i = entry_new(self, &k)
        e = E(self, i)
        d.refs += 1
        e.desc = desc_id
        e.length = stored
        e.flags = E_LOGGED
        set_location(self, i, slot, offset, checksum)
        self.disk_only += 1
        return 1

    cdef int recover_tombstone_c(self, int kind, const uint8_t *key, uint32_t keylen) except -1:
        cdef Key k
        cdef uint32_t i
        if not self.recovering_flag or self.recover_closed or not raw_key(self, kind, key, keylen, &k) \
                or index_find(self, &k) != NONE:
            return 0
        i = entry_new(self, &k)
        E(self, i).flags |= E_GHOST | E_LOGGED
        self.ghost_count += 1
        list_add(self, i, L_UNBACKED, False)
        return 1

    cdef int64_t intern_c(self, const uint8_t *raw, size_t length) noexcept:
        try:
            return desc_hold(self, desc_of(self, PyBytes_FromStringAndSize(<char *>raw, length))).index
        except (ValueError, MemoryError):
            return -1

    cdef void release_desc_c(self, uint32_t desc_id) noexcept:
        desc_release(self, desc_id)

    cdef int next_disk(self, uint32_t *cursor, DiskEntry *out) noexcept:
        cdef Entry *e
        while cursor[0] < self.entry_top:
            e = E(self, cursor[0])
            cursor[0] += 1
            if e.kind != 255 and e.slot != NONE:
                fill_disk_entry(e, out)
                return 1
        return 0

    cdef uint32_t segment_first(self, uint32_t slot) noexcept:
        return self.segments[slot].head if slot < self.segment_count else NONE

    cdef bytes desc_raw_c(self, uint32_t desc_id):
        return D(self, desc_id).raw

    def recover_block(self, kind, bytes key not None, slot, offset, stored, checksum, desc_id):
        enter(self)
        if not 0 <= stored < MAX_STORED:
            raise ValueError("stored length out of range")
        return self.recover_block_c(kind, <const uint8_t *>PyBytes_AS_STRING(key), <uint32_t>len(key), slot, offset,
                                    stored, checksum, desc_id)

    def recover_tombstone(self, kind, bytes key not None):
        enter(self)
        self.recover_tombstone_c(kind, <const uint8_t *>PyBytes_AS_STRING(key), <uint32_t>len(key))

    def intern(self, bytes desc not None):
        enter(self)
        return desc_hold(self, desc_of(self, desc)).index

    def release_desc(self, desc_id):
        cdef uint32_t i = desc_id
        enter(self)
        if i >= <uint32_t>len(self.descs) or D(self, i) is None:
            raise InternalError("no such descriptor")
        desc_release(self, i)

    def desc_bytes(self, desc_id):
        cdef uint32_t i = desc_id
        enter(self)
        if i >= <uint32_t>len(self.descs) or D(self, i) is None:
            raise InternalError("no such descriptor")
        return D(self, i).raw

    def disk_entries(self, cursor=0, limit=1024):
        cdef uint32_t at = cursor
        cdef DiskEntry d
        cdef list out = []
        enter(self)
        while len(out) < limit and self.next_disk(&at, &d):
            out.append((d.kind, PyBytes_FromStringAndSize(<char *>d.key, d.keylen), d.slot, d.offset, d.stored,
                        d.checksum, d.desc))
        return at, out

    # -- audit and end ------------------------------------------------------------------------------------------------

    def check(self):
        enter(self)
        audit_pool(self)
        audit_recency(self)
        audit_entries(self)
        audit_hash(self)

    def pages_wanted(self, ahead):
        cdef size_t start = 0
        cdef size_t end = 0
        enter(self)
        return (start, end) if pages_wanted(self, ahead, &start, &end) else None

    def touch_pages(self, start, end):
        cdef Arena arena = self.arena       # on another thread than all else
        if arena is not None:
            arena.touch(start, end)

    def pages_ready(self, start, end):
        cdef Arena arena = self.arena
        enter(self)
        if start == arena.ready_low:
            arena.ready_low = max(<size_t>end, arena.ready_low)
        elif end == arena.ready_high:
            arena.ready_high = start
        else:
            raise InternalError("pages in the middle of the pool")

    def leak(self):
        # One reference that nobody gives back: the mapping outlives everything, for I/O that never ended.
        if self.arena is not None:
            Py_INCREF(self.arena)

    def close(self):
        cdef uint32_t n
        cdef Arena arena
        if self.closed or self.generation != akv_generation():
            return None
        drain(self)
        n = self.first_node
        while n != NONE:
            if N(self, n).io:
                self.leak()         # an operation still owns bytes of the pool
                break
            n = N(self, n).right
        self.closed = True
        self.waiting = False
        self.wake = None
        arena, self.arena = self.arena, None
        arena.table = NULL
        return arena                # whose last holder unmaps
