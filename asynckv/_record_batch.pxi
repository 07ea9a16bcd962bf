# Batches: laid out when they are composed, filled by a worker.

def footer_bound(body_sum):
    """Upper bound of the footer's bytes in a segment whose batches have bodies of this many bytes together.

    A footer chunk is closed once it holds 128 KiB, so each costs at most one header and one partial page more. A record
    may take two bytes more in a footer than in its batch, because its descriptor's index may be larger; the bodies'
    bounds that are summed up here already allow for that.
    """
    cdef uint64_t total = body_sum
    return pages(total) + (total // 131072 + 1) * (HEAD + PAGE)


@cython.final
cdef class BatchPlan:
    """Where everything of one batch goes; made when the batch is composed, without looking at payloads.

    Attributes
    ----------
    position
        Offset of the batch in its segment.
    header_bytes, payload_bytes, small_bytes
        Of the header (and of the trailer), the payload area, and the packed part at the front of that area.
    body_bound
        Upper bound of the bytes of the descriptors and records.
    spills, carries, tombstones
        How many of each, from the front, are part of the batch.
    offsets
        Payload offsets of those spills, then of those carries.
    """

    cdef readonly uint64_t position, header_bytes, payload_bytes, small_bytes, body_bound
    cdef readonly Py_ssize_t spills, carries, tombstones
    cdef readonly bint clear
    cdef readonly list offsets

    @property
    def batch_bytes(self):
        """Header, payload area and trailer."""
        return 2 * self.header_bytes + self.payload_bytes

    @property
    def empty(self):
        """Nothing found room."""
        return not (self.spills or self.carries or self.tombstones or self.clear)


cdef inline bint is_large(uint64_t stored) noexcept:
    return stored >= C_ALIGNED_FROM or (stored and stored % PAGE == 0)


def plan_batch(list spills, list carries, list tombstones, bint clear, position, segment_bytes, body_sum):
    """Lay out a batch at a position of a segment; what does not fit is left out, in order.

    Parameters
    ----------
    spills, carries
        Objects with ``kind``, ``key``, ``desc`` and ``stored``.
    tombstones
        Tuples of key kind and key bytes.
    clear
        Whether the batch begins with a clear record.
    position
        Where the batch begins.
    segment_bytes
        Size of the segment file; the footer and the seal have to fit behind the batch.
    body_sum
        Sum of `BatchPlan.body_bound` over the batches before.

    Returns
    -------
    BatchPlan
    """
    cdef BatchPlan plan = BatchPlan.__new__(BatchPlan)
    cdef uint64_t start = position
    cdef uint64_t limit = segment_bytes
    cdef uint64_t before = body_sum
    cdef uint64_t offset_bytes = varint_size(limit)
    cdef uint64_t body = 0
    cdef uint64_t small = 0
    cdef uint64_t large = 0
    cdef uint64_t stored, more, more_small, more_large, cursor_small, cursor_large
    cdef set descs = set()
    cdef bint full = False
    cdef list sizes = []
    plan.position = start
    plan.clear = False
    if clear:
        if fits(start, limit, before, 1, 0, 0):
            body = 1
            plan.clear = True
        else:
            full = True
    for kind, key in tombstones:
        more = 1 + 2 + len(key)
        if full or not fits(start, limit, before, body + more, 0, 0):
            full = True
            break
        body += more
        plan.tombstones += 1
    for group, items in enumerate((spills, carries)):
        if full:
            break
        for item in items:
            stored = item.stored
            desc = item.desc
            more = 1 + 2 + len(item.key) + 3 + offset_bytes + varint_size(stored) + 8
            if desc not in descs:
                more += 1 + len(desc)
            if is_large(stored):
                more_large, more_small = pages(stored), 0
            else:
                more_large, more_small = 0, (stored + 15) & ~<uint64_t>15
            if not fits(start, limit, before, body + more, small + more_small, large + more_large):
                full = True
                break
            descs.add(desc)
            body += more
            small += more_small
            large += more_large
            sizes.append(stored)
            if group == 0:
                plan.spills += 1
            else:
                plan.carries += 1
    plan.body_bound = body
    plan.header_bytes = pages(HEAD + body)
    plan.small_bytes = pages(small)
    plan.payload_bytes = plan.small_bytes + large
    cursor_small = start + plan.header_bytes
    cursor_large = cursor_small + plan.small_bytes
    plan.offsets = []
    for size in sizes:
        stored = size
        if is_large(stored):
            plan.offsets.append(cursor_large)
            cursor_large += pages(stored)
        else:
            plan.offsets.append(cursor_small)
            cursor_small += (stored + 15) & ~<uint64_t>15
    return plan


cdef bint fits(uint64_t start, uint64_t limit, uint64_t before, uint64_t body, uint64_t small, uint64_t large):
    if body > <uint64_t>BODY_MAX:
        return False
    return start + 2 * pages(HEAD + body) + pages(small) + large + <uint64_t>footer_bound(before + body) + PAGE <= limit


def write_batch(BatchPlan plan, list spills, list carries, list tombstones, staging, seed, *, sequence, oldest_live,
                synced, good, sealed_upto, previous=0, previous_good=0):
    """Compute checksums and put header, packed payloads and trailer into a staging buffer. Runs in a worker.

    Parameters
    ----------
    plan
        From `plan_batch`.
    spills
        Objects with ``kind``, ``key``, ``desc``, ``stored``, ``sealed_checksum`` and ``view``, the bytes (those that
        begin on a page are written from the view as they lie: it then holds whole pages, or is copied).
    carries
        The same, with ``checksum`` already verified instead of ``sealed_checksum``.
    tombstones
        Tuples of key kind and key bytes.
    staging
        Writable, at least ``2 * header_bytes + small_bytes + copied pages``; see `staging_bytes`.
    seed, sequence, oldest_live, synced, good, sealed_upto, previous, previous_good
        Of the segment and the header.

    Returns
    -------
    tuple
        (buffers to write, checksums of the spills then of the carries, chunk of the header as bytes for the footer).
    """
    cdef RecordWriter writer = RecordWriter()
    cdef Py_buffer target
    cdef uint8_t *base
    cdef uint64_t header_bytes = plan.header_bytes
    cdef uint64_t small_end = header_bytes
    cdef uint64_t copied = 2 * header_bytes + plan.small_bytes
    cdef uint64_t stored, begin, whole
    cdef int64_t run_begin = -1     # pages copied one after the other become one piece
    cdef Py_ssize_t index = 0
    cdef list checksums = []
    cdef list large = []
    staging = memoryview(staging)
    if plan.clear:
        writer.add_clear()
    for kind, key in tombstones[:plan.tombstones]:
        writer.add_tombstone(kind, key)
    PyObject_GetBuffer(staging, &target, PyBUF_SIMPLE | PyBUF_WRITABLE)
    try:
        base = <uint8_t *>target.buf
        if <uint64_t>target.len < copied:
            raise ValueError("the staging buffer is too small")
        for item in spills[:plan.spills] + carries[:plan.carries]:
            stored = item.stored
            view = item.view
            checksum = item.sealed_checksum if index < plan.spills else item.checksum
            if checksum is None:
                checksum = sum_of(view[:stored] if <uint64_t>len(view) != stored else view)
            offset = plan.offsets[index]
            writer.add_block(item.kind, item.key, item.desc, offset, stored, checksum)
            checksums.append(checksum)
            if is_large(stored):
                whole = pages(stored)
                if <uint64_t>len(view) >= whole and stored >= C_ALIGNED_FROM:
                    if run_begin >= 0:
                        large.append(staging[run_begin:copied])
                        run_begin = -1
                    large.append(view[:whole] if <uint64_t>len(view) != whole else view)
                else:
                    if <uint64_t>target.len < copied + whole:
                        raise ValueError("the staging buffer is too small")
                    copy_in(view, base + copied, stored)
                    memset(base + copied + stored, 0, whole - stored)
                    if run_begin < 0:
                        run_begin = copied
                    copied += whole
            elif stored:
                begin = <uint64_t>offset - plan.position
                if begin < small_end or begin + stored > header_bytes + plan.small_bytes:
                    raise ValueError("the layout of the batch is broken")
                memset(base + small_end, 0, begin - small_end)
                copy_in(view, base + begin, stored)
                small_end = begin + stored
            index += 1
            if index % DIGESTS_PER_SLICE == 0:
                sleep(0)
        memset(base + small_end, 0, header_bytes + plan.small_bytes - small_end)
        if run_begin >= 0:
            large.append(staging[run_begin:copied])
    finally:
        PyBuffer_Release(&target)
    fields = {"header_bytes": header_bytes, "payload_bytes": plan.payload_bytes, "sequence": sequence,
              "oldest_live": oldest_live, "synced": synced, "good": good, "sealed_upto": sealed_upto,
              "previous": previous, "previous_good": previous_good}
    writer.write_into(staging, 0, KIND_BATCH, seed, plan.position, **fields)
    begin = header_bytes + plan.small_bytes
    writer.write_into(staging, begin, KIND_TRAILER, seed, plan.position, **fields)
    buffers = [staging[:begin]]
    buffers.extend(large)
    buffers.append(staging[begin:begin + header_bytes])
    return buffers, checksums, bytes(staging[:HEAD + writer.body_bytes])


cdef int copy_in(view, uint8_t *target, uint64_t length) except -1:
    cdef Py_buffer source
    PyObject_GetBuffer(view, &source, PyBUF_SIMPLE)
    try:
        if <uint64_t>source.len < length:
            raise ValueError("a block's bytes are shorter than its stored length")
        memcpy(target, source.buf, length)
    finally:
        PyBuffer_Release(&source)
    return 0


def staging_bytes(BatchPlan plan, list spills, list carries):
    """Bytes of staging that `write_batch` needs: both headers, the packed payloads, and page-aligned ones that are
    shorter than 32 KiB or do not lie in whole pages."""
    cdef uint64_t total = 2 * plan.header_bytes + plan.small_bytes
    cdef uint64_t stored
    for item in spills[:plan.spills] + carries[:plan.carries]:
        stored = item.stored
        if is_large(stored) and (stored < C_ALIGNED_FROM or <uint64_t>len(item.view) < pages(stored)):
            total += pages(stored)
    return total


def payload_span(stored, has_pages):
    """Bytes to read for a payload: its whole pages when it was written page-aligned and the buffer holds them."""
    cdef uint64_t length = stored
    if has_pages and is_large(length):
        return pages(length)
    return length
