"""A ring of the kernel's: requests go in by batches, results come out by batches.

A thin layer over io_uring(7), by raw system calls, without liburing. It knows descriptors, buffers and offsets, not
files, and it never waits except in `Ring.close`. `asynckv.backends.uring` makes an engine of it;
`asynckv.testing.FakeRing` has the same methods.

Invariants
----------
* A request holds its buffers (``Py_buffer``) and its tag from `read`, `write`, `fsync` until its completion was reaped,
  or until `take_back` returned it because the kernel never saw it.
* The kernel never has more requests than the completion queue has places: there are fewer slots than places, so the
  queue cannot overflow. What does not fit into the submission queue waits in a list of our own.
* A token is a slot and its generation. A completion with another generation, of a free slot or of no slot is counted
  in `stale` and ignored.
* `reap` copies a batch out and moves the head on before any other Python code can run.
* The rings are mapped with ``MADV_DONTFORK``. Forks are counted in the C library's child handler; in a child every
  method raises `RuntimeError`, and nothing is submitted, unmapped or unregistered there.
* A ring that is let go while the kernel still has requests leaks their buffers on purpose.
* One thread uses a ring: the one that runs the event loop.
"""

import errno
import os
import time
import warnings
import weakref

from asynckv._core cimport Request
from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.ref cimport Py_DECREF, Py_INCREF
from cython cimport final
from libc.errno cimport EINTR
from libc.stdlib cimport calloc, free
from libc.string cimport memset
from posix.unistd cimport close as close_fd
from posix.unistd cimport read as read_fd

__all__ = ["OPCODES", "Ring", "probe"]

cdef enum:
    ENTRIES = 128
    BATCH = 256            # completions copied out at once
    EINTR_TRIES = 16       # of a system call that a signal interrupts
    MOST_BYTES = 0x7ffff000  # one read or write moves no more (read(2))
    MOST_PIECES = 1024     # UIO_MAXIOV
    WORKERS = 8            # threads of the kernel for files; a buffered burst must not make hundreds
    OTHER_WORKERS = 2

cdef uint64_t CONTROL = 0xffffffff  # token of requests without a slot

OPCODES = {
    "read": IORING_OP_READ,
    "write": IORING_OP_WRITE,
    "writev": IORING_OP_WRITEV,
    "fsync": IORING_OP_FSYNC,
    "cancel": IORING_OP_ASYNC_CANCEL,
}

_live = weakref.WeakSet()
_leaked = []  # rings that the kernel did not give back: their buffers are left to it


def _close_in_child():
    """Drop the child's copies of the descriptors, which would keep the parent's rings alive; touch nothing else."""
    for ring in list(_live):
        (<Ring>ring).abandon_in_child()


if akv_watch_forks() != 0:
    raise ImportError("forks cannot be watched, so a ring would not be safe")
os.register_at_fork(after_in_child=_close_in_child)


include "_uring_slots.pxi"


@final
cdef class Ring(Slots):
    """One io_uring instance and its eventfd.

    Parameters
    ----------
    entries
        Places of the submission queue: requests per system call. The completion queue is twice as long.
    limit
        Most requests that the kernel may have at a time; never more than the completion queue takes.
    generation
        The first one; tests let it wrap.

    Attributes
    ----------
    eventfd
        Readable when completions were posted; nonblocking and close-on-exec.
    capacity
        Requests that fit, queued ones included.
    room
        How many more fit now.
    in_flight
        Requests that the kernel has.
    queued
        Requests that it has not yet taken.
    stale
        Completions that belonged to no request, ignored.
    lost
        Completions or requests that the kernel says it threw away. Anything but zero means the ring is unusable.
    backlogs
        Times that the kernel kept completions back because the queue was full.
    enters
        System calls that submitted.
    opcodes
        What this kernel can do, by number.

    Raises
    ------
    OSError
        The kernel does not give a ring (``ENOSYS``, ``EPERM``, ``ENOMEM``, ...) or one that cannot read, write and
        sync (``EOPNOTSUPP``).
    """

    def __init__(self, *args, **options):
        cdef int number
        self.held = []
        self.files = {}
        self.file_places = []
        _live.add(self)
        try:
            self.opcodes = self.probe_opcodes()
            missing = []
            for name, code in OPCODES.items():
                if code not in self.opcodes:
                    missing.append(name)
            if missing:
                raise OSError(errno.EOPNOTSUPP, f"this kernel's io_uring lacks {', '.join(missing)}")
            number = akv_eventfd()
            if number < 0:
                raise OSError(-number, f"eventfd: {os.strerror(-number)}")
            self.eventfd = number
            self.ask(IORING_REGISTER_EVENTFD, &number, 1)
            akv_limit_workers(self.ring.fd, WORKERS, OTHER_WORKERS)  # a courtesy: EINVAL before 5.15
        except BaseException:
            self.close()
            raise

    # -- requests

    def read(self, tag, int fd, buffer, uint64_t offset):
        """Queue a read into one writable buffer and return its token.

        Parameters
        ----------
        tag
            Comes back with the result.
        fd, offset
            Of the file.
        buffer
            Held until the completion was reaped. Less than all of it may be read.
        """
        self.check()
        cdef int32_t index = self.take_slot(tag)
        cdef Slot *slot = &self.slots[index]
        try:
            PyObject_GetBuffer(buffer, &slot.one, PyBUF_SIMPLE | PyBUF_WRITABLE)
            slot.buffers = 1
            if slot.one.len > MOST_BYTES:
                raise ValueError(f"one read moves at most {MOST_BYTES} bytes, not {slot.one.len}")
            self.prepare_read(slot, fd, <char *>slot.one.buf, <uint32_t>slot.one.len, offset)
        except BaseException:
            self.free_slot(slot)
            raise
        self.enqueue(index)
        return self.token(index)

    def read_all(self, list requests, Py_ssize_t first, uint64_t most):
        """Queue the reads of a list, from one on, as far as there is room and for at most so many bytes.

        Each is its own tag, and keeps its memory mapped.

        Returns
        -------
        int
            Place of the first that was not queued.
        """
        self.check()
        cdef Py_ssize_t number = first
        cdef int32_t index
        cdef Request request
        cdef Slot *slot
        cdef uint64_t bytes_left = most
        while number < len(requests) and self.free_first >= 0 and (bytes_left or number == first):
            request = <Request?>requests[number]
            index = self.take_slot(request)
            slot = &self.slots[index]
            try:
                self.prepare_read(slot, request.fd, request.data, request.span, request.offset)
            except BaseException:
                self.free_slot(slot)
                raise
            self.enqueue(index)
            request.token = self.token(index)
            bytes_left -= min(bytes_left, <uint64_t>request.span)
            number += 1
        return number

    def write(self, tag, int fd, buffers, uint64_t offset):
        """Queue a write of buffers, one after the other, and return its token; see `read`."""
        self.check()
        cdef int32_t index = self.take_slot(tag), region
        cdef Slot *slot = &self.slots[index]
        try:
            self.prepare_buffers(slot, buffers)
            if slot.many != NULL:
                akv_prepare(
                    &slot.sqe, IORING_OP_WRITEV, fd, <uint64_t><size_t>slot.pieces, slot.buffers, offset
                )
            else:
                region = self.region_of(<char *>slot.one.buf, slot.one.len)
                akv_prepare(
                    &slot.sqe,
                    IORING_OP_WRITE if region < 0 else IORING_OP_WRITE_FIXED,
                    fd, <uint64_t><size_t>slot.one.buf, <uint32_t>slot.one.len, offset,
                )
                if region >= 0:
                    slot.sqe.buf_index = <uint16_t>region
            self.use_file(&slot.sqe, fd)
        except BaseException:
            self.free_slot(slot)
            raise
        self.enqueue(index)
        return self.token(index)

    def fsync(self, tag, int fd, bint datasync=True):
        """Queue an fdatasync or fsync and return its token. It covers what was completed before it was submitted."""
        self.check()
        cdef int32_t index = self.take_slot(tag)
        cdef Slot *slot = &self.slots[index]
        akv_prepare(&slot.sqe, IORING_OP_FSYNC, fd, 0, 0, 0)
        slot.sqe.fsync_flags = IORING_FSYNC_DATASYNC if datasync else 0
        try:
            self.use_file(&slot.sqe, fd)
        except BaseException:
            self.free_slot(slot)
            raise
        self.enqueue(index)
        return self.token(index)

    def nop(self, tag):
        """Queue a request that does nothing, and return its token."""
        self.check()
        cdef int32_t index = self.take_slot(tag)
        akv_prepare(&self.slots[index].sqe, IORING_OP_NOP, -1, 0, 0, 0)
        self.enqueue(index)
        return self.token(index)

    def cancel(self, uint64_t token):
        """Ask the kernel to give up one request, with the next `submit`; it may be too late or impossible.

        Returns
        -------
        bool
            False when there is no place to ask now. The request itself ends as ever, by its completion.
        """
        self.check()
        cdef io_uring_sqe *sqe = self.stage()
        if sqe == NULL:
            return False
        akv_prepare(sqe, IORING_OP_ASYNC_CANCEL, -1, token, 0, 0)
        sqe.user_data = CONTROL
        return True

    def cancel_all(self):
        """Ask the kernel to give up everything, with the next `submit`; see `cancel`."""
        self.check()
        cdef io_uring_sqe probe
        if not akv_prepare_cancel_all(&probe):
            return False
        cdef io_uring_sqe *sqe = self.stage()
        if sqe == NULL:
            return False
        akv_prepare_cancel_all(sqe)
        sqe.user_data = CONTROL
        return True

    def forge(self, uint64_t token):
        """Make the kernel post a completion of any token with the next `submit`. For tests."""
        self.check()
        cdef io_uring_sqe *sqe = self.stage()
        if sqe == NULL:
            return False
        self.staged -= 1
        akv_prepare(sqe, IORING_OP_NOP, -1, 0, 0, 0)
        sqe.user_data = token
        return True

    # -- submission

    def submit(self):
        """Give queued requests to the kernel by one system call, and return how many it took.

        Fewer than were queued is no error: the rest goes with the next call.

        Raises
        ------
        OSError
            The kernel took none: ``EAGAIN`` (short of memory), ``EBUSY`` (reap first), ``EINTR`` (too often), or it
            refuses io_uring from now on (``EPERM``, ``ENOSYS``, ``EACCES``).
        """
        self.check()
        self.fill()
        cdef uint32_t count = self.tail - akv_load(self.ring.sq_head)
        if count == 0:
            return 0
        self.enters += 1
        cdef uint32_t before = self.taken
        cdef long status = self.enter(count, 0)
        self.note_taken()
        if status < 0 and self.taken == before:
            raise OSError(-status, f"io_uring_enter: {os.strerror(-status)}")
        return self.taken - before

    def take_back(self):
        """Return the tags of the requests that the kernel has not taken, which it will now never see."""
        self.check()
        cdef int32_t index
        cdef list tags = []
        cdef uint32_t head = akv_load(self.ring.sq_head)
        self.note_taken()
        cdef uint32_t at = head
        while at != self.tail:
            index = self.order[at & self.ring.sq_mask]
            if index >= 0:
                tags.append(<object>self.slots[index].tag)
                self.queued -= 1
                self.free_slot(&self.slots[index])
            elif self.staged:
                self.staged -= 1
            at += 1
        self.tail = head  # nobody reads it but io_uring_enter: there is no polling thread
        akv_store(self.ring.sq_tail, head)
        while self.queue_first >= 0:
            index = self.queue_first
            self.queue_first = self.slots[index].next
            tags.append(<object>self.slots[index].tag)
            self.queued -= 1
            self.free_slot(&self.slots[index])
        self.queue_last = -1
        return tags

    # -- completion

    @property
    def ready(self):
        """Whether completions wait to be reaped."""
        self.check()
        return (
            akv_load(self.ring.cq_tail) != self.ring.cq_head[0]
            or akv_load(self.ring.sq_flags) & IORING_SQ_CQ_OVERFLOW != 0
        )

    def acknowledge(self):
        """Empty the eventfd; to be called before `reap`, so that what is posted later is announced again."""
        self.check()
        cdef uint64_t value = 0
        return read_fd(self.eventfd, &value, sizeof(value)) == sizeof(value)

    def reap(self, uint32_t limit=64):
        """Return up to `limit` completions as (tag, result): bytes moved, or a negative errno."""
        self.check()
        cdef io_uring_cqe batch[BATCH]
        cdef uint32_t head, count, number, place
        cdef Slot *slot
        cdef list found = []
        cdef object tag
        head = self.ring.cq_head[0]
        if akv_load(self.ring.sq_flags) & IORING_SQ_CQ_OVERFLOW:
            self.backlogs += 1
            self.enter(0, IORING_ENTER_GETEVENTS)  # hands over what was kept back, as far as there are places
        self.look_for_losses()
        count = akv_load(self.ring.cq_tail) - head
        count = min(count, min(limit, <uint32_t>BATCH))
        for number in range(count):
            batch[number] = self.ring.cqes[(head + number) & self.ring.cq_mask]
        akv_store(self.ring.cq_head, head + count)
        for number in range(count):
            if batch[number].user_data == CONTROL:
                if self.staged:
                    self.staged -= 1
                continue
            place = <uint32_t>batch[number].user_data
            slot = NULL
            if place < self.capacity:
                slot = &self.slots[place]
            if slot == NULL or slot.state != KERNEL or slot.generation != <uint32_t>(batch[number].user_data >> 32):
                self.stale += 1
                continue
            tag = <object>slot.tag
            self.in_flight -= 1
            self.free_slot(slot)
            found.append((tag, batch[number].res))
        return found

    # -- optional registrations

    def register_buffers(self, buffers):
        """Register memory with the kernel, so that reads and writes inside it skip pinning its pages; once.

        Returns
        -------
        bool
            False when the kernel does not (``ENOMEM`` under a small memlock limit, above all); all works without.
        """
        self.check()
        cdef list views = []
        for buffer in buffers:
            views.append(memoryview(buffer).cast("B"))
        cdef iovec *pieces
        cdef Py_buffer view
        cdef int32_t number
        if self.held or not views or len(views) > MOST_PIECES:
            return False
        pieces = <iovec *>calloc(len(views), sizeof(iovec))
        self.regions = <Region *>calloc(len(views), sizeof(Region))
        try:
            if pieces == NULL or self.regions == NULL:
                raise MemoryError
            for number in range(<int32_t>len(views)):
                PyObject_GetBuffer(views[number], &view, PyBUF_SIMPLE | PyBUF_WRITABLE)
                pieces[number].iov_base = view.buf
                pieces[number].iov_len = view.len
                self.regions[number].begin = <char *>view.buf
                self.regions[number].end = <char *>view.buf + view.len
                PyBuffer_Release(&view)
            self.ask(IORING_REGISTER_BUFFERS, pieces, <unsigned>len(views))
        except OSError:
            free(self.regions)
            self.regions = NULL
            return False
        finally:
            free(pieces)
        self.held = views
        self.region_count = <int32_t>len(views)
        return True

    def register_files(self, uint32_t places=64):
        """Make a table of registered descriptors for `fix_file`; False when the kernel has none."""
        self.check()
        cdef int32_t *fds = <int32_t *>calloc(places, sizeof(int32_t))
        if fds == NULL:
            raise MemoryError
        memset(fds, 0xff, places * sizeof(int32_t))
        try:
            self.ask(IORING_REGISTER_FILES, fds, places)
        except OSError:
            return False
        finally:
            free(fds)
        self.file_places = list(range(places - 1, -1, -1))
        return True

    def fix_file(self, int fd):
        """Register a descriptor: its requests then skip looking it up. False when there is no place."""
        self.check()
        if fd in self.files:
            return True
        if not self.file_places or not self.update_file(self.file_places[len(self.file_places) - 1], fd):
            return False
        self.files[fd] = self.file_places.pop()
        return True

    def unfix_file(self, int fd):
        """Take a descriptor out of the table, which must happen before it is closed."""
        self.check()
        place = self.files.pop(fd, None)
        if place is not None and self.update_file(place, -1):
            self.file_places.append(place)

    # -- the end

    @property
    def closed(self):
        """Whether it was closed, or belongs to a forked parent."""
        return self.dead or self.forks != akv_fork_count

    def close(self, double timeout=1.0):
        """Give up what is queued, cancel what is in flight, wait for it, and let everything go; idempotent.

        Parameters
        ----------
        timeout
            Seconds to wait, in this thread.

        Returns
        -------
        int
            Requests that the kernel still has. The ring and their buffers then stay where they are for good, or until
            another `close` finds them completed.
        """
        cdef int64_t left
        if self.closed:
            return 0
        self.take_back()
        deadline = time.monotonic() + timeout
        asked = False
        while self.in_flight:
            if not asked:
                asked = True
                if self.cancel_all():
                    try:
                        self.submit()
                    except OSError:
                        self.take_back()
            left = <int64_t>((deadline - time.monotonic()) * 1e9)
            if not self.ready:
                if left <= 0:
                    break
                self.wait_for_one(left)
            self.reap(BATCH)
        if self.in_flight:
            self.keep()
            return self.in_flight
        self.dead = True
        for place in range(len(_leaked)):
            if _leaked[place] is self:
                del _leaked[place]
                break
        akv_unmap(&self.ring)
        close_fd(self.ring.fd)
        self.ring.fd = -1
        if self.eventfd >= 0:
            close_fd(self.eventfd)
            self.eventfd = -1
        self.held = []
        return 0

    def keep(self):
        """Stay referenced, and with it the buffers of what is in flight, until a `close` succeeds."""
        for ring in _leaked:
            if ring is self:
                return
        _leaked.append(self)

    def __del__(self):
        if not self.closed and self.slots != NULL:
            self.close(0.0)
            warnings.warn("a ring was never closed", ResourceWarning, stacklevel=2, source=self)

    def abandon_in_child(self):
        """Close a forked child's copies of the descriptors. Called right after a fork, while they are surely ours."""
        if self.forks != akv_fork_count and self.ring.fd >= 0:
            close_fd(self.ring.fd)
            if self.eventfd >= 0:
                close_fd(self.eventfd)
            self.ring.fd = self.eventfd = -1
        self.dead = True

    @property
    def sq_entries(self):
        """Places of the submission queue."""
        return self.ring.sq_entries

    @property
    def cq_entries(self):
        """Places of the completion queue."""
        return self.ring.cq_entries

    @property
    def features(self):
        """The kernel's feature bits."""
        return self.ring.features


def probe():
    """Make a ring, ask it what it can do, and close it again: what `asynckv doctor` and ``engine="auto"`` go by first.

    Returns
    -------
    dict
        ``features`` (the kernel's bits), ``opcodes`` (numbers it supports), ``nodrop`` (it never throws completions
        away), ``single_mmap``, ``sq_entries``, ``cq_entries``.

    Raises
    ------
    OSError
        As `Ring`; the errno says why: ``ENOSYS`` no io_uring in this kernel or a filter that hides it, ``EPERM`` and
        ``EACCES`` a filter or ``kernel.io_uring_disabled``, ``ENOMEM`` the memlock limit.
    """
    cdef Ring ring = Ring(4)
    try:
        return {
            "features": ring.ring.features,
            "opcodes": ring.opcodes,
            "nodrop": bool(ring.ring.features & IORING_FEAT_NODROP),
            "single_mmap": bool(ring.ring.features & IORING_FEAT_SINGLE_MMAP),
            "sq_entries": ring.ring.sq_entries,
            "cq_entries": ring.ring.cq_entries,
        }
    finally:
        ring.close()
