"""Declarations of the ring: what the kernel's header and ours give, and the fields of a `Ring`."""

from cpython.object cimport PyObject
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t


cdef extern from "<sys/uio.h>" nogil:
    struct iovec:
        void *iov_base
        size_t iov_len


cdef extern from "_uring_abi.h" nogil:
    struct io_uring_sqe:
        uint8_t opcode
        uint8_t flags
        int32_t fd
        uint64_t off
        uint64_t addr
        uint32_t len
        uint32_t fsync_flags
        uint64_t user_data
        uint16_t buf_index

    struct io_uring_cqe:
        uint64_t user_data
        int32_t res

    struct io_uring_probe_op:
        uint8_t op
        uint16_t flags

    struct io_uring_probe:
        uint8_t last_op
        uint8_t ops_len
        io_uring_probe_op ops[0]

    struct io_uring_files_update:
        uint32_t offset
        uint64_t fds

    ctypedef struct akv_ring:
        int fd
        uint32_t sq_entries
        uint32_t cq_entries
        uint32_t features
        uint32_t flags
        uint32_t sq_mask
        uint32_t cq_mask
        uint32_t *sq_head
        uint32_t *sq_tail
        uint32_t *sq_flags
        uint32_t *sq_dropped
        uint32_t *cq_head
        uint32_t *cq_tail
        uint32_t *cq_overflow
        io_uring_sqe *sqes
        io_uring_cqe *cqes

    enum:
        IORING_OP_NOP
        IORING_OP_READ
        IORING_OP_READ_FIXED
        IORING_OP_WRITE
        IORING_OP_WRITE_FIXED
        IORING_OP_WRITEV
        IORING_OP_FSYNC
        IORING_OP_ASYNC_CANCEL
        IORING_FSYNC_DATASYNC
        IORING_ENTER_GETEVENTS
        IORING_SQ_CQ_OVERFLOW
        IORING_FEAT_NODROP
        IORING_FEAT_SINGLE_MMAP
        IORING_REGISTER_BUFFERS
        IORING_REGISTER_EVENTFD
        IORING_REGISTER_FILES
        IORING_REGISTER_FILES_UPDATE
        IORING_REGISTER_PROBE
        IO_URING_OP_SUPPORTED
        IOSQE_FIXED_FILE

    uint32_t akv_fork_count
    uint32_t akv_load(const uint32_t *word) noexcept
    void akv_store(uint32_t *word, uint32_t value) noexcept
    int akv_watch_forks() noexcept
    long akv_enter(int fd, uint32_t submit, uint32_t wait, uint32_t flags) noexcept
    long akv_register(int fd, unsigned opcode, const void *arg, unsigned count) noexcept
    long akv_wait(const akv_ring *ring, int64_t nanoseconds) noexcept
    int akv_eventfd() noexcept
    long akv_limit_workers(int fd, uint32_t bounded, uint32_t unbounded) noexcept
    int akv_prepare_cancel_all(io_uring_sqe *sqe) noexcept
    void akv_prepare(
        io_uring_sqe *sqe, uint8_t opcode, int fd, uint64_t address, uint32_t length, uint64_t offset
    ) noexcept
    void akv_unmap(akv_ring *ring) noexcept
    int akv_open(akv_ring *ring, uint32_t entries, uint32_t cq_entries) noexcept


cdef enum State:
    FREE     # nobody's
    QUEUED   # in our own list, or in the submission queue and not yet taken by the kernel
    KERNEL   # taken by the kernel, which may read and write its buffers until its completion is reaped


cdef struct Slot:
    uint32_t generation   # of the operation in it; in the upper half of the token, so that a late one is told
    State state
    int32_t next          # slot behind it in the free list or in the queue, -1 at the end
    uint32_t buffers      # held by it
    PyObject *tag         # what the caller gets back with the result; owned
    Py_buffer one         # the buffer, when it is one
    Py_buffer *many       # else the buffers,
    iovec *pieces         # and where they are: the kernel may read this until the completion
    io_uring_sqe sqe      # the request


cdef struct Region:
    char *begin           # of a registered buffer
    char *end


cdef class Slots:
    # Here, not in Ring: Cython 3.3 gives a subclass with nothing else of its own no dealloc that clears it.
    cdef object __weakref__
    cdef akv_ring ring
    cdef Slot *slots
    cdef int32_t *order           # slot of each submission queue entry, -1: a request without one
    cdef uint32_t tail            # of the submission queue, as we wrote it
    cdef uint32_t taken           # entries that we know the kernel took
    cdef int32_t free_first
    cdef int32_t queue_first
    cdef int32_t queue_last
    cdef uint32_t staged          # requests without a slot in the submission queue or in the kernel
    cdef uint32_t reserve         # how many of those there may be
    cdef uint32_t forks           # forks seen when it was made
    cdef uint32_t lost_before     # the kernel's counters when last looked at
    cdef uint32_t dropped_before
    cdef bint busy                # a system call is under way without the GIL
    cdef bint dead                # closed, or inherited by a forked child
    cdef list held                # registered buffers
    cdef Region *regions
    cdef int32_t region_count
    cdef dict files               # registered descriptors and their places
    cdef list file_places         # free places
    cdef readonly int eventfd
    cdef readonly uint32_t capacity
    cdef readonly uint32_t room
    cdef readonly uint32_t in_flight
    cdef readonly uint32_t queued
    cdef readonly uint64_t stale
    cdef readonly uint64_t lost
    cdef readonly uint64_t backlogs
    cdef readonly uint64_t enters
    cdef readonly frozenset opcodes

    cdef int check(self) except -1
    cdef int32_t take_slot(self, object tag) except -1
    cdef void free_slot(self, Slot *slot) noexcept
    cdef void enqueue(self, int32_t index) noexcept
    cdef uint64_t token(self, int32_t index) noexcept
    cdef int use_file(self, io_uring_sqe *sqe, int fd) except -1
    cdef int prepare_read(self, Slot *slot, int fd, char *data, uint32_t size, uint64_t offset) except -1
    cdef int32_t region_of(self, char *address, size_t size) noexcept
    cdef void fill(self) noexcept
    cdef void note_taken(self) noexcept
    cdef io_uring_sqe *stage(self) noexcept
    cdef void look_for_losses(self) noexcept
    cdef int ask(self, unsigned opcode, const void *argument, unsigned count) except -1
    cdef frozenset probe_opcodes(self)
    cdef bint update_file(self, uint32_t place, int32_t fd)
    cdef long enter(self, uint32_t submit, uint32_t flags) except? -4096
    cdef int prepare_buffers(self, Slot *slot, object buffers) except -1


cdef class Ring(Slots):
    pass
