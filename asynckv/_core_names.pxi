# Names room: C declarations, limits, states and flags.

cdef extern from "_core_c.h":
    int akv_watch_forks() noexcept
    unsigned int akv_generation() noexcept
    void *akv_map(size_t size) noexcept
    void akv_unmap(void *p, size_t size) noexcept nogil
    void akv_touch(char *p, size_t size) noexcept nogil
    void *akv_alloc64(size_t size) noexcept
    int akv_clz32(uint32_t x) noexcept
    int akv_ctz64(uint64_t x) noexcept
    uint64_t akv_mix(uint64_t a, uint64_t b) noexcept
    uint64_t akv_hash(const uint8_t *p, size_t n, uint64_t seed_a, uint64_t seed_b) noexcept
    void akv_copy_strided(char *out, const char *source, int nd, const Py_ssize_t *dims, const Py_ssize_t *strides,
                          Py_ssize_t itemsize) noexcept
    int akv_utf8(const uint8_t *p, size_t n) noexcept

cdef extern from "Python.h":
    bint PyLong_CheckExact(object o) noexcept
    long long PyLong_AsLongLongAndOverflow(object o, int *overflow) except? -1
    object PyLong_FromLongLong(long long x)
    bint PyUnicode_Check(object o) noexcept
    const char *PyUnicode_AsUTF8AndSize(object o, Py_ssize_t *size) except NULL
    object PyUnicode_DecodeUTF8(const char *s, Py_ssize_t size, const char *errors)
    bint PyBool_Check(object o) noexcept
    bint PyIndex_Check(object o) noexcept
    int PyBuffer_ToContiguous(void *target, Py_buffer *view, Py_ssize_t size, char order) except -1

cdef extern from "numpy/arrayobject.h":
    ctypedef struct PyArray_Descr:
        pass
    ctypedef struct PyArrayObject:
        pass
    ctypedef struct PyTypeObject:
        pass
    PyTypeObject PyArray_Type
    object PyArray_NewFromDescr(PyTypeObject *subtype, PyArray_Descr *dtype, int nd, Py_ssize_t *dims,
                                Py_ssize_t *strides, void *data, int flags, PyObject *obj)
    int PyArray_SetBaseObject(PyArrayObject *a, PyObject *base) except -1
    int NPY_ARRAY_CARRAY
    int NPY_ARRAY_CARRAY_RO

cdef enum:
    NONE = 0xFFFFFFFF
    PIECE_BITS = 12             # entries and nodes come in pieces of 4096: growth never copies or stalls
    PIECE = 4096
    PIECE_MASK = 4095
    MAX_PIECES = 0xFFFFF
    SUB_SIZE = 4096             # slots of a hash piece
    MAX_DEPTH = 20              # bits of the hash for the directory; the low 12 choose the slot
    SLAB_CHUNK = 32768
    MAX_SLOT = 0xFFFF
    DIRECT_MIN = 32768          # from here on extents are 4096-aligned and read and written whole
    MAX_EVICT = 256             # evictions per loop turn
    TOUCH_STEP = 1 << 21
    SCAN_LIMIT = 32768          # nodes looked at per loop turn, about half a millisecond
    # node states
    FREE = 1                    # in a bin
    CLAIM = 2                   # a room's
    LOADING = 3                 # being read from disk
    READY = 4                   # a readable block
    DETACHED = 5                # no entry any more; freed with its last hold
    N_STATE = 7
    N_EXPIRED = 8               # an operation on it is past its deadline
    N_QUARANTINED = 16          # counted as quarantined
    N_SKIPPED = 32              # passed over by the victim walk
    N_READYQ = 64               # in the ready list
    # entry flags
    E_SPILLING = 1              # bytes being written
    E_LOGGED = 2                # some record of this key may be in the log
    E_USED = 4                  # hit since written
    E_GHOST = 8                 # removed while recovering: older records stay out
    E_NOSPILL = 16              # larger than a segment takes
    E_SEALED = 32               # checksum was taken at publish
    # list codes, in the two highest flag bits
    L_NONE = 0
    L_DIRTY = 1
    L_UNBACKED = 2              # ghosts and too large blocks too, in lists of their own
    L_SEGMENT = 3
    POLICY_LRU = 0
    POLICY_FIFO = 1
    # how a key of a call ended; the same numbers as in asynckv.waiting
    A_PENDING = 0
    A_DISK_HIT = 2
    A_MISS = 3
    # where a read of a flight is
    WAITS = 0
    FLIES = 1                   # the kernel has it
    LANDED = 2                  # all bytes moved, not yet verified
    LOST = 3                    # given up; the kernel still has it
    ENDED = 4

cdef uint64_t EMPTY = 0xFFFFFFFFFFFFFFFFULL
cdef uint64_t MAX_DIM = 0x7FFFFFFFFFFFFFFFULL               # numpy's own limit on an array's bytes
cdef uint64_t MAX_STORED = (<uint64_t>1 << 32) - 65536     # a block's stored length stays below
