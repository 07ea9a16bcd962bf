# I/O room: blocks on their way to a segment, back from one, or from one segment to another; and what becomes of the
# entries of a segment. An operation owns its extent (node.io) until it has really ended, whatever its waiter did.


cdef inline bint direct_size(uint64_t stored) noexcept:
    return stored >= DIRECT_MIN


cdef object io_view(BlockMap t, uint32_t n, uint64_t stored, bint writable):
    return make_window(t, n, node_bytes(t, n) if direct_size(stored) else stored, writable)


@cython.final
@cython.no_gc_clear
cdef class Spill:
    """One block being written; see `Table.take_dirty`."""

    cdef BlockMap table
    cdef readonly uint32_t node
    cdef uint32_t entry
    cdef readonly int kind
    cdef readonly bytes key
    cdef readonly uint64_t stored
    cdef readonly bytes desc
    cdef readonly object sealed_checksum
    cdef int status             # 0 in flight, 1 expired, 2 over

    @property
    def view(self):
        """The bytes to write: the whole extent when direct I/O applies, else the stored length."""
        if self.status == 2:
            raise InternalError("this spill is over")
        enter(self.table)
        return io_view(self.table, self.node, self.stored, False)


@cython.final
@cython.no_gc_clear
cdef class Load(Request):
    """One block being read back; see `Table.begin_load` and `Table.begin_loads`."""

    cdef BlockMap table
    cdef Arena arena            # keeps the bytes mapped, whatever becomes of the table
    cdef readonly uint32_t node
    cdef uint32_t entry
    cdef readonly int kind
    cdef readonly bytes key
    cdef readonly uint64_t stored
    cdef readonly uint32_t slot
    cdef readonly uint64_t checksum
    cdef readonly bytes desc
    cdef int status             # 0 in flight, 1 expired, 2 over, 3 over and readable
    cdef public Answers answers     # of the call that asked, until somebody else asks too
    cdef readonly Py_ssize_t index
    cdef public object reload   # the scheduler's, when more is to be done than to publish the bytes
    cdef readonly double started
    cdef Flight flight
    cdef int stage

    @property
    def plain_key(self):
        """The key as users know it."""
        if self.kind == 0:
            return int.from_bytes(self.key, "little", signed=True)
        return self.key if self.kind == 1 else self.key.decode()

    @property
    def view(self):
        """Where to read to: the whole extent when direct I/O applies, else the stored length."""
        if self.status >= 2:
            raise InternalError("this load is over")
        enter(self.table)
        return io_view(self.table, self.node, self.stored, True)


cdef Load load_new(BlockMap t, uint32_t i):
    """A read of an entry that is on disk only; nothing has changed yet."""
    cdef Entry *e = E(t, i)
    cdef Load l = Load.__new__(Load)
    l.table = t
    l.arena = t.arena
    l.key = raw_bytes(e)
    l.kind = e.kind
    l.stored = e.length
    l.slot = e.slot
    l.offset = e.offset
    l.checksum = e.checksum
    l.desc = D(t, e.desc).raw
    l.entry = i
    return l


cdef int load_start(BlockMap t, Load l, uint32_t n) except -1:
    """From here on extent n is the read's."""
    t.loads[n] = l              # first: it may fail
    l.node = n
    E(t, l.entry).node = n
    N(t, n).entry = l.entry
    set_state(N(t, n), LOADING)
    node_hold(t, n)
    return 0


cdef bint load_current(BlockMap t, Load l) noexcept:
    return l.status == 0 and N(t, l.node).entry != NONE


cdef int load_end(BlockMap t, Load l, bint ok) except -1:
    """The read ended: 1 when the block is readable now."""
    if l.status >= 2:
        raise InternalError("this load is over")
    t.loads.pop(l.node, None)
    if load_current(t, l):
        if ok:
            set_state(N(t, l.node), READY)
            t.memory_count += 1
            t.disk_only -= 1
            policy_insert(t, l.node)
            l.status = 3
            node_unhold(t, l.node)
            return 1
        E(t, N(t, l.node).entry).node = NONE
        node_detach(t, l.node)
    l.status = 2
    node_unhold(t, l.node)
    return 0


@cython.final
@cython.no_gc
cdef class Carry:
    """One disk-only block worth copying out of a segment about to be reclaimed."""

    cdef readonly int kind
    cdef readonly bytes key
    cdef readonly bytes desc
    cdef readonly uint64_t stored
    cdef readonly uint32_t slot
    cdef readonly uint32_t offset
    cdef readonly uint64_t checksum


cdef bytes raw_bytes(Entry *e):
    return PyBytes_FromStringAndSize(<char *>entry_key(e), e.keylen)


cdef uint32_t find_raw(BlockMap t, int kind, bytes key) noexcept:
    cdef Key k
    if not raw_key(t, kind, <const uint8_t *>PyBytes_AS_STRING(key), <uint32_t>PyBytes_GET_SIZE(key), &k):
        return NONE
    return index_find(t, &k)


cdef void spilling_over(BlockMap t, Entry *e) noexcept:
    if e.flags & E_SPILLING:
        e.flags &= <uint8_t>(~<uint32_t>E_SPILLING & 0xFF)
        t.spilling -= 1


cdef void to_dirty(BlockMap t, uint32_t i, bint at_head) noexcept:
    """An entry in memory and in no list waits for a spill; too large ones wait for nothing."""
    cdef Entry *e = E(t, i)
    if e.length > t.max_spill:
        e.flags |= E_NOSPILL
        list_add(t, i, L_UNBACKED, False)
        became_evictable(t, e.node)
    else:
        list_add(t, i, L_DIRTY, at_head)


cdef int take_list(BlockMap t, uint32_t which, uint64_t max_bytes, uint32_t max_blocks, uint64_t *used,
                   list out) except -1:
    cdef uint32_t i = t.lists[which].head
    cdef uint32_t following
    cdef Entry *e
    cdef Spill s
    cdef uint64_t size
    while i != NONE and <uint32_t>len(out) < max_blocks:
        e = E(t, i)
        following = e.next
        size = node_bytes(t, e.node)
        if out and used[0] + size > max_bytes:
            break
        if N(t, e.node).io < 255:
            s = Spill.__new__(Spill)
            s.key = raw_bytes(e)
            s.sealed_checksum = e.checksum if e.flags & E_SEALED else None
            s.table = t
            s.node = e.node
            s.entry = i
            s.kind = e.kind
            s.stored = e.length
            s.desc = D(t, e.desc).raw
            out.append(s)
            used[0] += size
            list_remove(t, i)
            e.flags |= E_SPILLING | E_LOGGED
            e.flags &= <uint8_t>(~<uint32_t>E_USED & 0xFF)
            t.spilling += 1
            node_hold(t, e.node)
        i = following
    return 0


cdef int set_location(BlockMap t, uint32_t i, uint32_t slot, uint32_t offset, uint64_t checksum) except -1:
    cdef Entry *e = E(t, i)
    segment_reserve(t, slot)
    e.slot = slot
    e.offset = offset
    e.checksum = checksum
    e.flags &= <uint8_t>(~<uint32_t>E_SEALED & 0xFF)
    t.disk_count += 1
    list_add(t, i, L_SEGMENT, False)
    return 0


cdef int end_spill(BlockMap t, Spill s, bint ok, uint32_t slot, uint32_t offset, uint64_t checksum) except -1:
    """The write ended: 1 when the entry has that location now."""
    cdef uint32_t n = s.node
    cdef uint32_t i = N(t, n).entry
    cdef Entry *e
    cdef int placed = 0
    if s.status == 2:
        raise InternalError("this spill is over")
    if ok:
        segment_reserve(t, slot)
    if s.status == 0 and i != NONE:
        e = E(t, i)
        if e.flags & E_SPILLING:
            spilling_over(t, e)
            if ok:
                set_location(t, i, slot, offset, checksum)
                placed = 1
            else:
                to_dirty(t, i, True)
    s.status = 2
    node_unhold(t, n)
    return placed


cdef int drop_location(BlockMap t, uint32_t i, bint keep) except -1:
    """The entry's segment is gone. With a memory copy: back to be written when `keep`, else only in memory."""
    cdef Entry *e = E(t, i)
    if e.node == NONE or state_of(N(t, e.node)) != READY:
        t.n_dropped += 1
        entry_remove(t, i)
        return 0
    list_remove(t, i)
    e.slot = NONE
    t.disk_count -= 1
    t.n_displaced += 1
    if keep:
        to_dirty(t, i, False)
    else:
        list_add(t, i, L_UNBACKED, False)
    return 0


cdef void fill_disk_entry(Entry *e, DiskEntry *out) noexcept:
    out.key = entry_key(e)
    out.checksum = e.checksum
    out.keylen = e.keylen
    out.slot = e.slot
    out.offset = e.offset
    out.stored = e.length
    out.desc = e.desc
    out.kind = e.kind
    out.flags = e.flags


cdef int publish_node(BlockMap t, Key *k, uint32_t n, Desc d, uint64_t stored, object checksum) except -1:
    """Make extent n the block of k, replacing any other. Raises before anything changed; it stays the caller's."""
    cdef uint32_t i
    cdef Entry *e
    cdef bint keep = False
    cdef uint64_t sum = 0
    if checksum is not None:
        sum = checksum
    d = desc_hold(t, d)
    i = index_find(t, k)
    if i == NONE:
        try:
            i = entry_new(t, k)
        except BaseException:
            desc_release(t, d.index)
            raise
        e = E(t, i)
        if t.recovering_flag or t.log_unknown or (
                t.owed_keys and t.owed_keys.pop(tagged_key(k.kind, k.ptr, k.len), 0) is None):
            e.flags |= E_LOGGED     # the log may hold an older record, known or not read yet
    else:
        e = E(t, i)
        keep = list_code(e) == L_DIRTY and stored <= t.max_spill
        if keep:
            # The newer version keeps the place in line, so that a block put again and again still gets written.
            t.lists[0].bytes += node_bytes(t, n)
            t.lists[0].bytes -= node_bytes(t, e.node)
            node_detach(t, e.node)
            e.node = NONE
            desc_release(t, e.desc)
            e.flags &= E_LOGGED | <uint32_t>(L_DIRTY << 6)
        else:
            entry_clear(t, i)
    e.node = n
    e.desc = d.index
    e.length = <uint32_t>stored
    e.checksum = sum
    if checksum is not None:
        e.flags |= E_SEALED
    N(t, n).entry = i
    set_state(N(t, n), READY)
    t.memory_count += 1
    policy_insert(t, n)
    if not keep:
        to_dirty(t, i, False)
    return 0
