# Between records and the block table. One call per chunk crosses the border; inside, everything is C.

from asynckv._core cimport DiskEntry, Table

cdef enum:
    SNAPSHOT_BODY = 200 << 10   # a snapshot's chunk is closed once its body holds this much; it has 256 KiB


def apply_records(Table table, Records records, slots):
    """Tell a recovering table what a chunk says, newest record first; the first sight of a key is final.

    Parameters
    ----------
    table
        With `recovering` set.
    records
        Parsed records of a segment or a snapshot.
    slots
        The segment's slot; or for a snapshot a list of slots by segment index, None where the segment is gone.

    Returns
    -------
    tuple
        (blocks that are new to the table, whether a clear was met: nothing before it counts).
    """
    cdef Py_ssize_t i
    cdef Record *item
    cdef int64_t slot = -1
    cdef int64_t desc
    cdef int64_t *ids
    cdef Py_ssize_t n = len(records.descs)
    cdef int added = 0
    cdef bint cleared = False
    cdef bint single = not isinstance(slots, list)
    cdef bytes raw
    if single:
        slot = slots
    ids = <int64_t *>malloc(max(1, n) * sizeof(int64_t))
    if ids == NULL:
        raise MemoryError()
    for i in range(n):
        raw = records.descs[i]
        ids[i] = table.intern_c(<const uint8_t *>PyBytes_AS_STRING(raw), len(raw))
    try:
        for i in range(records.count - 1, -1, -1):
            item = &records.items[i]
            if item.type == T_BLOCK:
                if not single:
                    found = slots[item.segment]
                    if found is None:
                        continue
                    slot = found
                desc = ids[item.desc]
                added += table.recover_block_c(item.kind, item.key, item.keylen, <uint32_t>slot, item.offset,
                                               item.stored, item.checksum, <uint32_t>desc)      # -1: none
            elif item.type == T_TOMBSTONE:
                table.recover_tombstone_c(item.kind, item.key, item.keylen)
            elif item.type == T_CLEAR:
                cleared = True
                break
    finally:
        for i in range(n):
            if ids[i] >= 0:
                table.release_desc_c(<uint32_t>ids[i])
        free(ids)
    return added, cleared


def write_disk_entries(Table table, cursor, dict segment_index):
    """Collect the table's blocks on disk into the body of one snapshot chunk.

    Parameters
    ----------
    table
        The table.
    cursor
        0 to begin, then what the call before returned.
    segment_index
        Segment index by slot; blocks in other slots are left out.

    Returns
    -------
    tuple
        (RecordWriter, next cursor or None at the end).
    """
    cdef RecordWriter writer = RecordWriter()
    cdef DiskEntry entry
    cdef uint32_t position = cursor
    cdef int64_t desc
    cdef uint32_t last_slot = 0
    cdef int64_t last_index = -2
    cdef uint32_t last_desc = 0
    cdef int64_t last_desc_index = -1
    while writer.desc_bytes + writer.length < SNAPSHOT_BODY:
        if not table.next_disk(&position, &entry):
            return writer, None
        if last_index == -2 or entry.slot != last_slot:
            last_slot = entry.slot
            last_index = segment_index.get(entry.slot, -1)
        if last_index < 0:
            continue
        if last_desc_index < 0 or entry.desc != last_desc:
            last_desc = entry.desc
            last_desc_index = writer.desc(table.desc_raw_c(entry.desc))
        writer.put(T_BLOCK, entry.kind, entry.key, entry.keylen, last_desc_index, entry.offset, entry.stored,
                   entry.checksum, last_index)
    return writer, position
