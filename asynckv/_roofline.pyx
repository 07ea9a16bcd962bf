"""What a disk gives to a ring that does nothing else: a loop in C, without Python between two requests.

The ring is made as `asynckv._uring` makes its own. `asynckv bench` holds the store's reads and writes against this
loop: the same requests to the same files at the same depth.
"""

import os

from asynckv._uring cimport (
    IORING_ENTER_GETEVENTS,
    IORING_OP_READ,
    IORING_OP_WRITE,
    akv_enter,
    akv_load,
    akv_open,
    akv_prepare,
    akv_ring,
    akv_store,
    akv_unmap,
)
from cython cimport final
from libc.errno cimport EAGAIN, EBUSY, EINTR, EIO
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec
from posix.unistd cimport close as close_fd

__all__ = ["Roofline"]


cdef inline int64_t now() noexcept nogil:
    cdef timespec at
    clock_gettime(CLOCK_MONOTONIC, &at)
    return <int64_t>at.tv_sec * 1000000000 + at.tv_nsec


@final
cdef class Roofline:
    """A ring with room for so many requests at a time.

    Parameters
    ----------
    depth
        Requests kept in flight.

    Raises
    ------
    OSError
        The kernel gives no ring.
    """

    cdef akv_ring ring
    cdef readonly uint32_t depth
    cdef int64_t *begun
    cdef uint32_t *wanted

    def __cinit__(self, uint32_t depth):
        self.ring.fd = -1
        if not 0 < depth <= 1024:
            raise ValueError(f"depth={depth}: one to 1024 requests at a time")
        self.depth = depth
        self.begun = <int64_t *>calloc(depth, sizeof(int64_t))
        self.wanted = <uint32_t *>calloc(depth, sizeof(uint32_t))
        if self.begun == NULL or self.wanted == NULL:
            raise MemoryError
        cdef int status = akv_open(&self.ring, depth, 2 * depth)
        if status < 0:
            raise OSError(-status, f"io_uring_setup: {os.strerror(-status)}")

    def __dealloc__(self):
        self.close()
        free(self.begun)
        free(self.wanted)

    cpdef close(self):
        """Give the ring back; idempotent. Nothing is in flight between two calls of `run`."""
        if self.ring.fd >= 0:
            akv_unmap(&self.ring)
            close_fd(self.ring.fd)
            self.ring.fd = -1

    def run(
        self,
        const int32_t[::1] files,
        const uint64_t[::1] offsets,
        const uint32_t[::1] sizes,
        const uint8_t[::1] writes,
        uint8_t[:, ::1] buffers,
        *,
        Py_ssize_t first = 0,
        double seconds = 0.3,
        double[::1] latencies = None,
    ):
        """Go through a list of requests, round and round, until the time is over.

        Parameters
        ----------
        files, offsets, sizes, writes
            Descriptor, place and bytes of each request, and whether its buffer is written, instead of read into.
        buffers
            One row for each request in flight, for O_DIRECT with aligned rows.
        first
            Where in the list to begin.
        latencies
            Filled with seconds from submission to completion, as far as it reaches.

        Returns
        -------
        tuple of int, int, float
            Requests and bytes moved, and the seconds until the last one was there.

        Raises
        ------
        OSError
            The first request that failed or moved less than it should; nothing is in flight then either.
        """
        cdef Py_ssize_t count = files.shape[0], most = 0, number
        if self.ring.fd < 0:
            raise ValueError("the roofline's ring is closed")
        if count == 0 or offsets.shape[0] != count or sizes.shape[0] != count or writes.shape[0] != count:
            raise ValueError("files, offsets, sizes and writes have to be of one length, and not empty")
        for number in range(count):
            most = max(most, <Py_ssize_t>sizes[number])
        if buffers.shape[0] < self.depth or buffers.shape[1] < most:
            raise ValueError(f"buffers have to be {self.depth} of {most} bytes or more")
        if not 0 <= first < count:
            raise ValueError(f"first={first}: there are {count} requests")
        cdef akv_ring *ring = &self.ring
        cdef Py_ssize_t room = 0 if latencies is None else latencies.shape[0], told = 0
        cdef uint32_t tail = ring.sq_tail[0], head, staged = 0, in_flight = 0, slot = 0, row
        cdef Py_ssize_t at = first, moved = 0
        cdef uint64_t total = 0
        cdef int32_t failure = 0, result
        cdef int64_t start, end, time
        cdef long status
        cdef bint going = True
        cdef uint32_t idle_count = self.depth
        cdef uint32_t *idle = <uint32_t *>calloc(self.depth, sizeof(uint32_t))
        if idle == NULL:
            raise MemoryError
        with nogil:
            for slot in range(self.depth):
                idle[slot] = self.depth - 1 - slot
            start = now()
            end = start + <int64_t>(seconds * 1e9)
            time = start
            while True:
                while going and idle_count:
                    idle_count -= 1
                    slot = idle[idle_count]
                    row = tail & ring.sq_mask
                    akv_prepare(
                        &ring.sqes[row],
                        IORING_OP_WRITE if writes[at] else IORING_OP_READ,
                        files[at], <uint64_t><size_t>&buffers[slot, 0], sizes[at], offsets[at],
                    )
                    ring.sqes[row].user_data = slot
                    self.begun[slot] = time
                    self.wanted[slot] = sizes[at]
                    tail += 1
                    staged += 1
                    at += 1
                    if at == count:
                        at = 0
                akv_store(ring.sq_tail, tail)
                if not staged and not in_flight:
                    break
                status = akv_enter(ring.fd, staged, 1, IORING_ENTER_GETEVENTS)
                if status >= 0:
                    staged -= <uint32_t>status
                    in_flight += <uint32_t>status
                elif status != -EINTR and status != -EAGAIN and status != -EBUSY:
                    # It takes no requests: those in flight still end, the staged ones it will never see.
                    failure = <int32_t>status if failure == 0 else failure
                    going = False
                    tail -= staged
                    akv_store(ring.sq_tail, tail)
                    staged = 0
                    if not in_flight:
                        break
                time = now()
                head = ring.cq_head[0]
                while head != akv_load(ring.cq_tail):
                    slot = <uint32_t>ring.cqes[head & ring.cq_mask].user_data
                    result = ring.cqes[head & ring.cq_mask].res
                    head += 1
                    in_flight -= 1
                    idle[idle_count] = slot
                    idle_count += 1
                    if result != <int32_t>self.wanted[slot]:
                        if failure == 0:
                            failure = result if result < 0 else -EIO
                        going = False
                        continue
                    moved += 1
                    total += <uint64_t>result
                    if told < room:
                        latencies[told] = <double>(time - self.begun[slot]) * 1e-9
                        told += 1
                akv_store(ring.cq_head, head)
                if time >= end:
                    going = False
            time = now()
        free(idle)
        if failure:
            raise OSError(-failure, f"a request of the roofline's: {os.strerror(-failure)}")
        return moved, total, <double>(time - start) * 1e-9
