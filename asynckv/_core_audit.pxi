# Audit room: the invariants, checked in full. For tests and debug builds; cost grows with the table.


cdef int hold(bint ok, str what) except -1:
    if not ok:
        raise InternalError("broken invariant: " + what)
    return 0


cdef int audit_pool(BlockMap t) except -1:
    cdef uint32_t n = t.first_node
    cdef uint32_t left = NONE
    cdef uint32_t b, memory = 0, pinned = 0, state, binned = 0, free_nodes = 0
    cdef uint64_t at = 0, free_size = 0, quarantined = 0, pinned_size = 0
    cdef Node *p
    while n != NONE:
        p = N(t, n)
        state = state_of(p)
        hold(p.offset == at and p.size > 0, "extents tile the pool")
        hold(p.left == left, "address links agree")
        hold(state >= FREE and state <= DETACHED, "every extent has a state")
        if state == FREE:
            hold(left == NONE or state_of(N(t, left)) != FREE, "free neighbours are merged")
            hold(p.pins == 0 and p.io == 0 and p.entry == NONE, "free extents have no holder")
            free_size += p.size
            free_nodes += 1
        elif state == DETACHED:
            hold(p.entry == NONE and (p.pins > 0 or p.io > 0), "detached extents have a holder and no entry")
        elif state == CLAIM:
            hold(p.entry == NONE, "claims have no entry")
        else:
            hold(p.entry != NONE and E(t, p.entry).node == n, "extent and entry point at each other")
            memory += state == READY
        if p.pins:
            pinned += 1
            pinned_size += p.size
        if p.flags & N_QUARANTINED:
            hold(state == DETACHED and p.io > 0 and p.flags & N_EXPIRED, "quarantine is detached and held")
            quarantined += p.size
        at += p.size
        left = n
        n = p.right
    hold(at == t.granules, "extents cover the pool")
    hold(free_size == t.free_granules, "free count")
    hold(memory == t.memory_count, "memory count")
    hold(pinned == t.pinned_count and pinned_size == t.pinned_granules, "pin counts")
    hold(quarantined == t.quarantined_granules, "quarantine count")
    for b in range(544):
        n = t.bins[b]
        hold((n != NONE) == ((t.bin_sub[b >> 4] >> (b & 15)) & 1), "bin bitmap")
        while n != NONE:
            hold(state_of(N(t, n)) == FREE and bin_of(N(t, n).size) == b, "extents are in the bin of their size")
            binned += 1
            n = N(t, n).next
    hold(binned == free_nodes, "every free extent is in a bin")
    return 0


cdef int audit_recency(BlockMap t) except -1:
    cdef uint32_t n = t.lru_head
    cdef uint32_t before = NONE
    cdef uint32_t count = 0, skipped = 0
    cdef bint past_hint = t.hint == NONE
    while n != NONE:
        hold(N(t, n).prev == before and state_of(N(t, n)) == READY, "recency links agree")
        hold(not N(t, n).flags & N_READYQ, "recency flag")
        skipped += (N(t, n).flags & N_SKIPPED) != 0
        if past_hint:
            hold(not evictable(t, n), "nothing evictable beyond the hint")
        past_hint = past_hint or n == t.hint
        count += 1
        before = n
        n = N(t, n).next
    hold(before == t.lru_tail and past_hint, "recency tail and hint")
    hold(skipped == t.skipped, "skipped count")
    n = t.ready_head
    before = NONE
    while n != NONE:
        hold(N(t, n).prev == before and N(t, n).flags & N_READYQ and state_of(N(t, n)) == READY, "ready links agree")
        count += 1
        before = n
        n = N(t, n).next
    hold(before == t.ready_tail, "ready tail")
    hold(count == t.memory_count, "every readable extent has a place in the order")
    return 0


cdef int audit_entries(BlockMap t) except -1:
    cdef uint32_t i, entries = 0, ghosts = 0, disk_only = 0, located = 0, listed = 0, spilling = 0
    cdef Entry *e
    cdef dict refs = {}
    cdef Desc d
    for i in range(t.entry_top):
        e = E(t, i)
        if e.kind == 255:
            continue
        entries += 1
        listed += list_code(e) != L_NONE
        if e.flags & E_GHOST:
            ghosts += 1
            hold(e.node == NONE and e.slot == NONE and e.desc == NONE, "ghosts hold nothing")
            continue
        hold(e.node != NONE or e.slot != NONE, "entries have a place")
        hold((e.slot != NONE) == (list_code(e) == L_SEGMENT), "located entries are in their segment's list")
        hold(e.node == NONE or N(t, e.node).entry == i, "entry and extent point at each other")
        located += e.slot != NONE
        spilling += (e.flags & E_SPILLING) != 0
        disk_only += e.node == NONE or state_of(N(t, e.node)) != READY
        d = D(t, e.desc)
        hold(d is not None and d.index == e.desc, "descriptors are held")
        hold(d.kind == 0 or d.stored == e.length, "stored length and descriptor agree")
        refs[e.desc] = refs.get(e.desc, 0) + 1
    hold(entries == t.entry_count and ghosts == t.ghost_count, "entry counts")
    hold(disk_only == t.disk_only and located == t.disk_count, "disk counts")
    hold(spilling == t.spilling, "spilling count")
    for i in refs:
        hold(D(t, i).refs >= refs[i], "descriptor counts")
    for i in range(4):
        listed -= audit_list(t, &t.lists[i])
    for i in range(t.segment_count):
        listed -= audit_list(t, &t.segments[i])
    hold(listed == 0, "list codes")
    return 0


cdef uint32_t audit_list(BlockMap t, EntryList *l) except? 0xFFFFFFFF:
    cdef uint32_t i = l.head
    cdef uint32_t before = NONE
    cdef uint32_t count = 0
    cdef uint64_t size = 0
    while i != NONE:
        hold(E(t, i).prev == before and list_of(t, E(t, i)) == l, "list links agree")
        size += list_weight(t, E(t, i))
        count += 1
        before = i
        i = E(t, i).next
    hold(before == l.tail and count == l.count and size == l.bytes, "list counts")
    return count


cdef int audit_hash(BlockMap t) except -1:
    cdef uint32_t i, j, h, found = 0
    cdef SubTable *s
    cdef SubTable *last = NULL
    cdef Key k
    for i in range(<uint32_t>1 << t.depth):
        s = t.directory[i]
        if s == last:
            continue
        last = s
        for j in range(s.mask + 1):
            if s.slots[j] == EMPTY:
                continue
            found += 1
            h = <uint32_t>(s.slots[j] >> 32)
            hold(entry_hash(t, E(t, <uint32_t>s.slots[j])) == h and sub_of(t, h) == s, "hash of the slot")
    hold(found == t.entry_count, "every entry is in the hash")
    for i in range(t.entry_top):
        if E(t, i).kind != 255:
            hold(raw_key(t, E(t, i).kind, entry_key(E(t, i)), E(t, i).keylen, &k) == 1, "keys are well formed")
            hold(index_find(t, &k) == i, "every key is found")
    return 0
