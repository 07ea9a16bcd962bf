# The memory of a ring: its mappings, the slots of its requests, its queues; included by _uring.pyx.


cdef class Slots:
    """The inner half of `Ring`: everything that has no place in its interface."""

    def __cinit__(self, uint32_t entries=ENTRIES, *, uint32_t limit=0, uint32_t generation=1):
        cdef int32_t index
        cdef int status
        self.eventfd = -1
        self.ring.fd = -1
        self.dead = True
        self.free_first = self.queue_first = self.queue_last = -1
        if not 1 <= entries <= 32768:
            raise ValueError(f"entries must be 1 to 32768, not {entries}")
        if generation == 0:
            raise ValueError("generation must not be 0")
        status = akv_open(&self.ring, entries, 2 * entries)
        if status < 0:
            self.ring.fd = -1
            raise OSError(-status, f"io_uring_setup: {os.strerror(-status)}")
        self.forks = akv_fork_count
        self.dead = False
        self.reserve = 2 if self.ring.cq_entries >= 4 else 1
        self.capacity = self.ring.cq_entries - self.reserve
        if 0 < limit < self.capacity:
            self.capacity = limit
        self.slots = <Slot *>calloc(self.capacity, sizeof(Slot))
        self.order = <int32_t *>calloc(self.ring.sq_entries, sizeof(int32_t))
        if self.slots == NULL or self.order == NULL:
            raise MemoryError
        for index in range(<int32_t>self.capacity):
            self.slots[index].generation = generation
            self.slots[index].next = index + 1
        self.slots[self.capacity - 1].next = -1
        self.free_first = 0
        self.room = self.capacity
        self.tail = self.taken = akv_load(self.ring.sq_head)

    def __dealloc__(self):
        if self.forks != akv_fork_count and self.ring.fd >= 0:
            return  # a child's copy: the mappings do not exist here, and the buffers are the parent's
        if not self.dead and self.in_flight == 0:
            akv_unmap(&self.ring)
            close_fd(self.ring.fd)
            if self.eventfd >= 0:
                close_fd(self.eventfd)
            self.dead = True
        if self.dead:
            free(self.slots)
            free(self.order)
            free(self.regions)

    cdef int check(self) except -1:
        """Refuse a closed ring, a forked child and a second thread."""
        if self.dead or self.forks != akv_fork_count:
            if self.forks != akv_fork_count:
                raise RuntimeError("a forked child cannot use the ring of its parent")
            raise RuntimeError("the ring is closed")
        if self.busy:
            raise RuntimeError("a ring belongs to one thread")
        return 0

    cdef uint64_t token(self, int32_t index) noexcept:
        return <uint64_t>self.slots[index].generation << 32 | <uint64_t>index

    cdef int32_t take_slot(self, object tag) except -1:
        cdef int32_t index = self.free_first
        if index < 0:
            raise RuntimeError("no room in the ring")
        cdef Slot *slot = &self.slots[index]
        self.free_first = slot.next
        self.room -= 1
        slot.next = -1
        slot.state = QUEUED
        slot.buffers = 0
        slot.many = NULL
        slot.pieces = NULL
        Py_INCREF(tag)
        slot.tag = <PyObject *>tag
        return index

    cdef void free_slot(self, Slot *slot) noexcept:
        """Free it first and let go of what it held last: that may run anything, `read` included."""
        cdef uint32_t number, count = slot.buffers
        cdef Py_buffer one = slot.one
        cdef Py_buffer *many = slot.many
        cdef PyObject *tag = slot.tag
        free(slot.pieces)
        slot.pieces = NULL
        slot.many = NULL
        slot.tag = NULL
        slot.buffers = 0
        slot.state = FREE
        slot.generation += 1
        if slot.generation == 0:
            slot.generation = 1
        slot.next = self.free_first
        self.free_first = <int32_t>(slot - self.slots)
        self.room += 1
        if many != NULL:
            for number in range(count):
                PyBuffer_Release(&many[number])
            free(many)
        elif count:
            PyBuffer_Release(&one)
        Py_DECREF(<object>tag)

    cdef void enqueue(self, int32_t index) noexcept:
        self.slots[index].sqe.user_data = self.token(index)
        if self.queue_last < 0:
            self.queue_first = index
        else:
            self.slots[self.queue_last].next = index
        self.queue_last = index
        self.queued += 1

    cdef int prepare_buffers(self, Slot *slot, object buffers) except -1:
        cdef uint32_t number, count = <uint32_t>len(buffers)
        cdef uint64_t total = 0
        if not 1 <= count <= MOST_PIECES:
            raise ValueError(f"one write takes 1 to {MOST_PIECES} pieces, not {count}")
        if count == 1:
            PyObject_GetBuffer(buffers[0], &slot.one, PyBUF_SIMPLE)
            slot.buffers = 1
            total = slot.one.len
        else:
            slot.many = <Py_buffer *>calloc(count, sizeof(Py_buffer))
            slot.pieces = <iovec *>calloc(count, sizeof(iovec))
            if slot.many == NULL or slot.pieces == NULL:
                raise MemoryError
            for number in range(count):
                PyObject_GetBuffer(buffers[number], &slot.many[number], PyBUF_SIMPLE)
                slot.buffers = number + 1
                slot.pieces[number].iov_base = slot.many[number].buf
                slot.pieces[number].iov_len = slot.many[number].len
                total += slot.many[number].len
        if total > MOST_BYTES:
            raise ValueError(f"one write moves at most {MOST_BYTES} bytes, not {total}")
        return 0

    cdef int prepare_read(self, Slot *slot, int fd, char *data, uint32_t size, uint64_t offset) except -1:
        cdef int32_t region = self.region_of(data, size)
        akv_prepare(
            &slot.sqe, IORING_OP_READ if region < 0 else IORING_OP_READ_FIXED, fd, <uint64_t><size_t>data, size, offset
        )
        if region >= 0:
            slot.sqe.buf_index = <uint16_t>region
        return self.use_file(&slot.sqe, fd)

    cdef int use_file(self, io_uring_sqe *sqe, int fd) except -1:
        if self.files:
            place = self.files.get(fd)
            if place is not None:
                sqe.fd = place
                sqe.flags |= IOSQE_FIXED_FILE
        return 0

    cdef int32_t region_of(self, char *address, size_t size) noexcept:
        cdef int32_t number
        for number in range(self.region_count):
            if self.regions[number].begin <= address and address + size <= self.regions[number].end:
                return number
        return -1

    cdef void fill(self) noexcept:
        """Move requests from our list to the submission queue, as far as there are places."""
        cdef int32_t index
        cdef uint32_t head = akv_load(self.ring.sq_head)
        while self.queue_first >= 0 and self.tail - head < self.ring.sq_entries:
            index = self.queue_first
            self.queue_first = self.slots[index].next
            if self.queue_first < 0:
                self.queue_last = -1
            self.ring.sqes[self.tail & self.ring.sq_mask] = self.slots[index].sqe
            self.order[self.tail & self.ring.sq_mask] = index
            self.tail += 1
        akv_store(self.ring.sq_tail, self.tail)

    cdef io_uring_sqe *stage(self) noexcept:
        """Take a submission queue entry for a request without a slot; NULL when there is none."""
        cdef io_uring_sqe *sqe
        if self.staged >= self.reserve or self.tail - akv_load(self.ring.sq_head) >= self.ring.sq_entries:
            return NULL
        self.staged += 1
        sqe = &self.ring.sqes[self.tail & self.ring.sq_mask]
        self.order[self.tail & self.ring.sq_mask] = -1
        self.tail += 1
        akv_store(self.ring.sq_tail, self.tail)
        return sqe

    cdef void note_taken(self) noexcept:
        """Mark the requests that the kernel has taken since we last looked."""
        cdef int32_t index
        cdef uint32_t head = akv_load(self.ring.sq_head)
        while self.taken != head:
            index = self.order[self.taken & self.ring.sq_mask]
            if index >= 0:
                self.slots[index].state = KERNEL
                self.queued -= 1
                self.in_flight += 1
            self.taken += 1

    cdef long enter(self, uint32_t submit, uint32_t flags) except? -4096:
        cdef long status = 0
        cdef int attempt, fd = self.ring.fd
        self.busy = True
        try:
            with nogil:
                for attempt in range(EINTR_TRIES):
                    status = akv_enter(fd, submit, 0, flags)
                    if status != -EINTR:
                        break
        finally:
            self.busy = False
        return status

    def wait_for_one(self, int64_t nanoseconds):
        """Block until a completion is there or the time is over."""
        cdef long status
        self.check()
        self.busy = True
        try:
            with nogil:
                status = akv_wait(&self.ring, nanoseconds)
        finally:
            self.busy = False
        if status < 0 and -status not in (errno.ETIME, errno.EINTR):
            time.sleep(min(nanoseconds / 1e9, 0.001))  # refused, or a kernel that cannot: look again soon

    cdef void look_for_losses(self) noexcept:
        """Add to `lost` what the kernel threw away: completions it had no memory for, requests it called bad."""
        cdef uint32_t overflow = akv_load(self.ring.cq_overflow), dropped = akv_load(self.ring.sq_dropped)
        self.lost += <uint32_t>(overflow - self.lost_before) + <uint32_t>(dropped - self.dropped_before)
        self.lost_before = overflow
        self.dropped_before = dropped

    cdef int ask(self, unsigned opcode, const void *argument, unsigned count) except -1:
        """Call io_uring_register(2)."""
        cdef long status
        with nogil:
            status = akv_register(self.ring.fd, opcode, argument, count)
        if status < 0:
            raise OSError(-status, f"io_uring_register: {os.strerror(-status)}")
        return 0

    cdef frozenset probe_opcodes(self):
        cdef uint32_t number
        cdef io_uring_probe *found = <io_uring_probe *>calloc(
            1, sizeof(io_uring_probe) + 256 * sizeof(io_uring_probe_op)
        )
        if found == NULL:
            raise MemoryError
        try:
            self.ask(IORING_REGISTER_PROBE, found, 256)
            return frozenset([
                found.ops[number].op
                for number in range(found.ops_len)
                if found.ops[number].flags & IO_URING_OP_SUPPORTED
            ])
        finally:
            free(found)

    cdef bint update_file(self, uint32_t place, int32_t fd):
        cdef io_uring_files_update update
        cdef long status
        memset(&update, 0, sizeof(update))
        update.offset = place
        update.fds = <uint64_t><size_t>&fd
        status = akv_register(self.ring.fd, IORING_REGISTER_FILES_UPDATE, &update, 1)
        return status == 1
