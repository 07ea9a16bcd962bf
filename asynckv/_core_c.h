/* Small C pieces of the block table: mapping, hashing, strided copy, UTF-8 check. Included once, by _core.pyx. */
#ifndef ASYNCKV_CORE_C_H
#define ASYNCKV_CORE_C_H

#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* Counts the forks between us and the process that mapped a pool: pages with MADV_DONTFORK are not there in a child,
   and asking getpid() on each call would cost a system call. */
static unsigned int akv_forks = 0;
static void akv_in_child(void) { akv_forks++; }
static unsigned int akv_generation(void) { return akv_forks; }
static int akv_watch_forks(void) { return pthread_atfork(NULL, NULL, akv_in_child); }

static void *akv_map(size_t size) {
    void *p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) return NULL;
#ifdef MADV_DONTFORK
    madvise(p, size, MADV_DONTFORK);
#endif
#ifdef MADV_DONTDUMP
    madvise(p, size, MADV_DONTDUMP);
#endif
#ifdef MADV_HUGEPAGE
    madvise(p, size, MADV_HUGEPAGE);
#endif
    return p;
}
static void akv_unmap(void *p, size_t size) { munmap(p, size); }

/* Write to each page of a range without changing a byte, whoever else writes there. Not MADV_POPULATE_WRITE: that holds a
   lock for which every other thread that maps or unmaps memory, or starts a thread, would have to wait. */
static void akv_touch(char *p, size_t size) {
    /* volatile: else a compiler may see that nothing changes, and leave it out */
    for (size_t at = 0; at < size; at += 4096) __atomic_fetch_or((volatile char *)p + at, 0, __ATOMIC_RELAXED);
}

static void *akv_alloc64(size_t size) {
    void *p = NULL;
    return posix_memalign(&p, 64, size) == 0 ? p : NULL;
}

static inline int akv_clz32(uint32_t x) { return __builtin_clz(x); }
static inline int akv_ctz64(uint64_t x) { return __builtin_ctzll(x); }

/* Folded 128-bit product, the mixing step of wyhash and rapidhash (public domain); the seeds are random per process. */
static inline uint64_t akv_mix(uint64_t a, uint64_t b) {
    __uint128_t m = (__uint128_t)a * (b | 1);
    return (uint64_t)m ^ (uint64_t)(m >> 64);
}
static inline uint64_t akv_word(const uint8_t *p) { uint64_t w; memcpy(&w, p, 8); return w; }
static uint64_t akv_hash(const uint8_t *p, size_t n, uint64_t seed_a, uint64_t seed_b) {
    uint64_t h = seed_a ^ akv_mix(seed_b, n + 0x9E3779B97F4A7C15ull);
    const uint8_t *end = p + n;
    for (; end - p > 16; p += 16) h = akv_mix(akv_word(p) ^ seed_b, akv_word(p + 8) ^ h);
    /* the last 16 bytes, overlapping what came before; keys here are longer than 8 bytes */
    if (n >= 16) return akv_mix(akv_mix(akv_word(end - 16) ^ seed_b, akv_word(end - 8) ^ h), seed_a ^ n);
    return akv_mix(akv_mix(akv_word(p) ^ seed_b, akv_word(end - 8) ^ h), seed_a ^ n);
}

/* Copy an array with any strides to C order. Own code, because numpy's may release the GIL half way. */
static void akv_copy_level(char **out, const char *in, int nd, const Py_ssize_t *dims, const Py_ssize_t *strides,
                           Py_ssize_t itemsize) {
    Py_ssize_t i, n = dims[0], s = strides[0];
    if (nd > 1) {
        for (i = 0; i < n; i++) akv_copy_level(out, in + i * s, nd - 1, dims + 1, strides + 1, itemsize);
        return;
    }
    char *o = *out;
    if (s == itemsize) {
        memcpy(o, in, n * itemsize);
    } else switch (itemsize) {
        case 1: for (i = 0; i < n; i++) o[i] = in[i * s]; break;
        case 2: for (i = 0; i < n; i++) memcpy(o + 2 * i, in + i * s, 2); break;
        case 4: for (i = 0; i < n; i++) memcpy(o + 4 * i, in + i * s, 4); break;
        case 8: for (i = 0; i < n; i++) memcpy(o + 8 * i, in + i * s, 8); break;
        default: for (i = 0; i < n; i++) memcpy(o + itemsize * i, in + i * s, itemsize);
    }
    *out = o + n * itemsize;
}
static void akv_copy_strided(char *out, const char *in, int nd, const Py_ssize_t *dims, const Py_ssize_t *strides,
                             Py_ssize_t itemsize) {
    Py_ssize_t d[9], s[9];
    int i, m = 0;
    for (i = 0; i < nd; i++) {
        if (dims[i] == 1) continue;
        if (m > 0 && s[m - 1] == dims[i] * strides[i]) { d[m - 1] *= dims[i]; s[m - 1] = strides[i]; continue; }
        d[m] = dims[i]; s[m] = strides[i]; m++;
    }
    if (m == 0) { memcpy(out, in, itemsize); return; }
    akv_copy_level(&out, in, m, d, s, itemsize);
}

/* Strict UTF-8 (RFC 3629): no overlong forms, no surrogates, nothing above U+10FFFF. */
static int akv_utf8(const uint8_t *p, size_t n) {
    const uint8_t *end = p + n;
    while (p < end) {
        uint8_t c = *p++;
        int more;
        uint8_t low = 0x80, high = 0xBF;
        if (c < 0x80) continue;
        if (c >= 0xC2 && c <= 0xDF) more = 1;
        else if (c >= 0xE0 && c <= 0xEF) { more = 2; if (c == 0xE0) low = 0xA0; if (c == 0xED) high = 0x9F; }
        else if (c >= 0xF0 && c <= 0xF4) { more = 3; if (c == 0xF0) low = 0x90; if (c == 0xF4) high = 0x8F; }
        else return 0;
        if (end - p < more) return 0;
        if (*p < low || *p > high) return 0;
        for (p++; --more > 0; p++) if (*p < 0x80 || *p > 0xBF) return 0;
    }
    return 1;
}
#endif
