/* The kernel's side of _uring.pyx: io_uring_setup(2), io_uring_enter(2), io_uring_register(2) and the mapped rings.
 *
 * Every constant and struct comes from <linux/io_uring.h>; what a header may be too old for is under #ifdef. Where the
 * header is missing or older than Linux 5.7's, this file does not compile and the package goes without the extension.
 *
 * Barriers (io_uring(7)): acquire on the CQ tail and the SQ head, which the kernel moves; release on the CQ head and
 * the SQ tail, which we move.
 */
#ifndef ASYNCKV_URING_ABI_H
#define ASYNCKV_URING_ABI_H

#ifndef __linux__
#error "io_uring is Linux only"
#endif

#include <errno.h>
#include <fcntl.h>
#include <linux/io_uring.h>
#ifdef IORING_ENTER_EXT_ARG
#include <linux/time_types.h>
#endif
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#if !defined(__NR_io_uring_setup) || !defined(__NR_io_uring_enter) || !defined(__NR_io_uring_register)
#error "the system call numbers of io_uring are unknown here"
#endif
#ifndef IORING_FEAT_FAST_POLL /* 5.7: later than IORING_REGISTER_PROBE, which is an enum and cannot be asked for */
#error "<linux/io_uring.h> is too old"
#endif

typedef struct {
    int fd;
    uint32_t sq_entries, cq_entries, features, flags;
    uint32_t sq_mask, cq_mask;
    uint32_t *sq_head, *sq_tail, *sq_flags, *sq_dropped;
    uint32_t *cq_head, *cq_tail, *cq_overflow;
    struct io_uring_sqe *sqes;
    struct io_uring_cqe *cqes;
    void *sq_map, *cq_map, *sqe_map;
    size_t sq_bytes, cq_bytes, sqe_bytes;
} akv_ring;

static inline uint32_t akv_load(const uint32_t *word) {
    return atomic_load_explicit((const _Atomic uint32_t *)word, memory_order_acquire);
}

static inline void akv_store(uint32_t *word, uint32_t value) {
    atomic_store_explicit((_Atomic uint32_t *)word, value, memory_order_release);
}

/* -- forks: the mapped rings are not inherited, so a child must not even look at them */

static uint32_t akv_fork_count;

static inline void akv_forked(void) { akv_fork_count++; }

static inline int akv_watch_forks(void) { return pthread_atfork(NULL, NULL, akv_forked); }

/* -- system calls: the result, or -errno */

static inline long akv_result(long value) { return value < 0 ? -(long)errno : value; }

static inline long akv_enter(int fd, uint32_t submit, uint32_t wait, uint32_t flags) {
    return akv_result(syscall(__NR_io_uring_enter, fd, submit, wait, flags, NULL, (size_t)0));
}

static inline long akv_register(int fd, unsigned opcode, const void *arg, unsigned count) {
    return akv_result(syscall(__NR_io_uring_register, fd, opcode, arg, count));
}

/* Wait until a completion is there or the time is over; -ETIME then. -EOPNOTSUPP: this kernel cannot wait so. */
static inline long akv_wait(const akv_ring *ring, int64_t nanoseconds) {
#ifdef IORING_ENTER_EXT_ARG
    struct __kernel_timespec time = {nanoseconds / 1000000000, nanoseconds % 1000000000};
    struct io_uring_getevents_arg arg;
    if (ring->features & IORING_FEAT_EXT_ARG) {
        memset(&arg, 0, sizeof arg);
        arg.ts = (uint64_t)(uintptr_t)&time;
        return akv_result(syscall(__NR_io_uring_enter, ring->fd, 0, 1, IORING_ENTER_GETEVENTS | IORING_ENTER_EXT_ARG,
                                  &arg, sizeof arg));
    }
#else
    (void)ring;
    (void)nanoseconds;
#endif
    return -EOPNOTSUPP;
}

static inline int akv_eventfd(void) { return (int)akv_result(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)); }

/* Limit the kernel's worker threads for this ring: bounded (files) and unbounded ones. */
static inline long akv_limit_workers(int fd, uint32_t bounded, uint32_t unbounded) {
#ifdef IORING_FEAT_CQE_SKIP /* 5.17; the opcode, an enum, came with 5.15 */
    uint32_t limits[2] = {bounded, unbounded};
    return akv_register(fd, IORING_REGISTER_IOWQ_MAX_WORKERS, limits, 2);
#else
    (void)fd;
    (void)bounded;
    (void)unbounded;
    return -EINVAL;
#endif
}

/* Fill a request that cancels everything; 0 where the header does not know how. */
static inline int akv_prepare_cancel_all(struct io_uring_sqe *sqe) {
#ifdef IORING_ASYNC_CANCEL_ANY
    memset(sqe, 0, sizeof *sqe);
    sqe->opcode = IORING_OP_ASYNC_CANCEL;
    sqe->fd = -1;
    sqe->cancel_flags = IORING_ASYNC_CANCEL_ANY | IORING_ASYNC_CANCEL_ALL;
    return 1;
#else
    (void)sqe;
    return 0;
#endif
}

static inline void akv_prepare(struct io_uring_sqe *sqe, uint8_t opcode, int fd, uint64_t address, uint32_t length,
                               uint64_t offset) {
    memset(sqe, 0, sizeof *sqe);
    sqe->opcode = opcode;
    sqe->fd = fd;
    sqe->addr = address;
    sqe->len = length;
    sqe->off = offset;
}

/* -- set up and tear down */

static inline void akv_unmap(akv_ring *ring) {
    if (ring->sqe_map != MAP_FAILED)
        munmap(ring->sqe_map, ring->sqe_bytes);
    if (ring->cq_map != MAP_FAILED && ring->cq_map != ring->sq_map)
        munmap(ring->cq_map, ring->cq_bytes);
    if (ring->sq_map != MAP_FAILED)
        munmap(ring->sq_map, ring->sq_bytes);
    ring->sq_map = ring->cq_map = ring->sqe_map = MAP_FAILED;
}

static inline void *akv_map(int fd, size_t bytes, uint64_t offset) {
    void *map = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, (off_t)offset);
    if (map != MAP_FAILED && madvise(map, bytes, MADV_DONTFORK) != 0) {
        int saved = errno;
        munmap(map, bytes);
        errno = saved;
        return MAP_FAILED;
    }
    return map;
}

/* Make a ring of about so many entries and map it; 0 or -errno with nothing left open. */
static inline int akv_open(akv_ring *ring, uint32_t entries, uint32_t cq_entries) {
    struct io_uring_params params;
    uint32_t index, *array;
    long fd = -EINVAL;
    uint32_t wishes[] = {
#ifdef IORING_SETUP_SUBMIT_ALL
        IORING_SETUP_CLAMP | IORING_SETUP_CQSIZE | IORING_SETUP_SUBMIT_ALL,
#endif
        IORING_SETUP_CLAMP | IORING_SETUP_CQSIZE,
    };
    for (index = 0; index < sizeof wishes / sizeof *wishes && fd == -EINVAL; index++) {
        memset(&params, 0, sizeof params);
        params.flags = wishes[index];
        params.cq_entries = cq_entries;
        fd = akv_result(syscall(__NR_io_uring_setup, entries, &params)); /* close-on-exec is set by the kernel */
    }
    if (fd < 0)
        return (int)fd;
    memset(ring, 0, sizeof *ring);
    ring->fd = (int)fd;
    ring->sq_map = ring->cq_map = ring->sqe_map = MAP_FAILED;
    ring->sq_entries = params.sq_entries;
    ring->cq_entries = params.cq_entries;
    ring->features = params.features;
    ring->flags = params.flags;
    ring->sq_bytes = params.sq_off.array + params.sq_entries * sizeof(uint32_t);
    ring->cq_bytes = params.cq_off.cqes + params.cq_entries * sizeof(struct io_uring_cqe);
    ring->sqe_bytes = params.sq_entries * sizeof(struct io_uring_sqe);
    if (params.features & IORING_FEAT_SINGLE_MMAP) {
        if (ring->cq_bytes > ring->sq_bytes)
            ring->sq_bytes = ring->cq_bytes;
        ring->cq_bytes = ring->sq_bytes;
    }
    ring->sq_map = akv_map(ring->fd, ring->sq_bytes, IORING_OFF_SQ_RING);
    if (ring->sq_map == MAP_FAILED)
        goto failed;
    ring->cq_map = params.features & IORING_FEAT_SINGLE_MMAP
                       ? ring->sq_map
                       : akv_map(ring->fd, ring->cq_bytes, IORING_OFF_CQ_RING);
    if (ring->cq_map == MAP_FAILED)
        goto failed;
    ring->sqe_map = akv_map(ring->fd, ring->sqe_bytes, IORING_OFF_SQES);
    if (ring->sqe_map == MAP_FAILED)
        goto failed;
    ring->sq_head = (uint32_t *)((char *)ring->sq_map + params.sq_off.head);
    ring->sq_tail = (uint32_t *)((char *)ring->sq_map + params.sq_off.tail);
    ring->sq_flags = (uint32_t *)((char *)ring->sq_map + params.sq_off.flags);
    ring->sq_dropped = (uint32_t *)((char *)ring->sq_map + params.sq_off.dropped);
    ring->sq_mask = *(uint32_t *)((char *)ring->sq_map + params.sq_off.ring_mask);
    ring->cq_head = (uint32_t *)((char *)ring->cq_map + params.cq_off.head);
    ring->cq_tail = (uint32_t *)((char *)ring->cq_map + params.cq_off.tail);
    ring->cq_overflow = (uint32_t *)((char *)ring->cq_map + params.cq_off.overflow);
    ring->cq_mask = *(uint32_t *)((char *)ring->cq_map + params.cq_off.ring_mask);
    ring->cqes = (struct io_uring_cqe *)((char *)ring->cq_map + params.cq_off.cqes);
    ring->sqes = (struct io_uring_sqe *)ring->sqe_map;
    array = (uint32_t *)((char *)ring->sq_map + params.sq_off.array);
    for (index = 0; index < params.sq_entries; index++)
        array[index] = index;
    return 0;
failed:
    index = (uint32_t)errno;
    akv_unmap(ring);
    close(ring->fd);
    ring->fd = -1;
    return -(int)index;
}

#endif
