# cython: auto_pickle=False
"""The block table: sole owner of block state in memory.

Which keys are known, where their bytes are (pool extent, place on disk or both), what is evicted next. All calls are
synchronous and come from one thread; only the destructors of views may run elsewhere. Nothing here waits, opens files,
logs or reads a clock. The class is joined from rooms: pool, index, evict, block and io.
"""

cimport cython
cimport numpy as cnp
from cpython.buffer cimport (PyBUF_CONTIG, PyBUF_FORMAT, PyBUF_FULL_RO, PyBuffer_FillInfo, PyBuffer_IsContiguous,
                             PyBuffer_Release, PyObject_CheckBuffer, PyObject_GetBuffer)
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_Check, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE
from cpython.memoryview cimport PyMemoryView_FromMemory, PyMemoryView_FromObject
from cpython.object cimport PyObject
from cpython.ref cimport Py_INCREF
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcmp, memcpy, memset

import os
from operator import index as operator_index

import numpy as np
from xxhash import xxh3_64_intdigest

from asynckv.errors import ClosedError, InternalError

include "_core_names.pxi"

cnp.import_array()
if akv_watch_forks() != 0:
    raise MemoryError("pthread_atfork failed")


@cython.final
@cython.no_gc
cdef class Desc:
    """An interned descriptor."""


cdef inline int enter(BlockMap t) except -1:
    if t.generation != akv_generation():
        raise RuntimeError("the block table belongs to the process that opened it")
    if t.closed:
        raise ClosedError("the block table is closed")
    if t.arena.n_released:
        drain(t)
    return 0


cdef inline void refresh(BlockMap t) noexcept:
    if not t.closed and t.generation == akv_generation() and t.arena.n_released:
        drain(t)


include "_core_pool.pxi"
include "_core_index.pxi"
include "_core_evict.pxi"
include "_core_block.pxi"
include "_core_flight.pxi"
include "_core_io.pxi"


cdef inline bint readable(BlockMap t, Entry *e) noexcept:
    if e.flags & E_GHOST:
        return False
    return t.disk_readable or (e.node != NONE and state_of(N(t, e.node)) == READY)


cdef inline bint in_memory(BlockMap t, Entry *e) noexcept:
    return e.node != NONE and state_of(N(t, e.node)) == READY


cdef uint32_t find_key(BlockMap t, object key) except? 0xFFFFFFFF:
    """Entry of a user's key, ghosts excluded."""
    cdef Key k
    cdef uint32_t i
    enter(t)
    parse_key(t, key, &k)
    i = index_find(t, &k)
    if i != NONE and E(t, i).flags & E_GHOST:
        return NONE
    return i


cdef int check_room(BlockMap t, Room r, uint64_t stored) except -1:
    if r is None or r.table is not t or r.status != 2:
        raise InternalError("the room is not done")
    if extent_of(t, stored) >> t.granule_shift != r.size:
        raise InternalError("the room is of another size")
    return 0


cdef object hit(BlockMap t, Key *k):
    """The block of a key that is in memory, counted and noted as used; None without one."""
    cdef uint32_t n, i = index_find(t, k)
    cdef Entry *e
    if i == NONE:
        return None
    e = E(t, i)
    n = e.node
    if n == NONE or state_of(N(t, n)) != READY:
        return None
    policy_hit(t, n)
    e.flags |= E_USED
    t.n_hits += 1
    return block_view(t, n, D(t, e.desc), e.length, False)


cdef tuple parse_shape(object shape, object dtype):
    """A shape as numpy takes it, one int or a sequence of them, of an array that can exist."""
    cdef tuple dims
    try:
        dims = (operator_index(shape),) if PyIndex_Check(shape) else tuple(map(operator_index, shape))
    except TypeError:
        raise TypeError(f"a shape is an int or a sequence of ints, not {shape!r:.80}") from None
    if len(dims) > 8:
        raise ValueError("a block array has at most 8 dimensions")
    cdef object size = dtype.itemsize
    for n in dims:
        if n < 0 or n > 1 << 62:
            raise ValueError("a dimension is out of range")
        size *= n or 1
    if size > MAX_DIM:
        raise ValueError("an array of this shape has more bytes than any machine can address")
    return dims


@cython.no_gc_clear
cdef class BlockMap:
    """Keys, hits and puts; `Table` adds what has to do with disk. The module's stub describes every call.

    Parameters
    ----------
    capacity
        Bytes of the pool.
    policy
        ``"lru"`` or ``"fifo"``.
    backed
        Whether dirty blocks must be spilled before they are evicted.
    max_spill
        Blocks with a larger stored length are never spilled.
    hash_mask
        For tests: bits of the key hash that are used.
    random
        Where the hash's seeds come from: n -> n random bytes.
    """

    def __cinit__(
        self, capacity, *, policy="lru", backed=False, max_spill=2**32, hash_mask=2**64 - 1, random=os.urandom
    ):
        cdef uint64_t size
        cdef int i
        capacity = operator_index(capacity)
        if not 1 <= capacity < 2**46:
            raise ValueError("capacity must be a positive number of bytes")
        if policy not in ("lru", "fifo"):
            raise ValueError("policy must be 'lru' or 'fifo'")
        size = capacity
        self.capacity = size
        self.granule_shift = 6
        while (size >> self.granule_shift) >= NONE:
            self.granule_shift += 1
        self.granules = <uint32_t>(size >> self.granule_shift)
        self.align = max(1, <uint32_t>(4096 >> self.granule_shift))
        self.policy_id = POLICY_FIFO if policy == "fifo" else POLICY_LRU
        self.backed_flag = backed
        self.max_spill = max_spill
        self.hash_mask = hash_mask
        self.disk_readable = True
        self.generation = akv_generation()
        self.seed_a = int.from_bytes(random(8), "little")
        self.seed_b = int.from_bytes(random(8), "little")
        self.entry_free = self.node_free = self.first_node = NONE
        self.lru_head = self.lru_tail = self.ready_head = self.ready_tail = self.hint = NONE
        self.epoch = 1
        memset(self.bins, 0xFF, sizeof(self.bins))
        for i in range(4):
            self.lists[i].head = self.lists[i].tail = NONE
        for i in range(8):
            self.cursors[i].node = NONE
        self.extra = {}
        self.descs = []
        self.desc_free = []
        self.desc_by_raw = {}
        self.desc_cache = [None] * 128 + [desc_parse(b"\0")]
        self.loads = {}
        self.owed_keys = {}
        self.directory = <SubTable **>malloc(sizeof(SubTable *))
        if self.directory == NULL:
            raise MemoryError()
        self.directory[0] = sub_new(SUB_SIZE, 0)
        if self.directory[0] == NULL:
            raise MemoryError()
        self.arena = Arena.__new__(Arena, size)
        self.arena.table = <void *>self
        self.used_high = self.granules
        nodes_reserve(self, 4)
        if self.granules:
            self.first_node = node_take(self)
            N(self, self.first_node).size = self.granules
            bin_add(self, self.first_node)

    def __dealloc__(self):
        cdef uint32_t i
        cdef SubTable *last = NULL
        cdef void *chunk
        if self.arena is not None:
            self.arena.table = NULL
        for i in range(self.entry_pieces):
            free(self.entries[i])
        free(self.entries)
        for i in range(self.node_pieces):
            free(self.nodes[i])
        free(self.nodes)
        if self.directory != NULL:
            for i in range(<uint32_t>1 << self.depth):
                if self.directory[i] != last and self.directory[i] != NULL:
                    last = self.directory[i]
                    sub_free(last)
            free(self.directory)
        while self.slab_chunks != NULL:
            chunk = self.slab_chunks
            self.slab_chunks = (<void **>chunk)[0]
            free(chunk)
        free(self.segments)

    # -- settings and counters ----------------------------------------------------------------------------------------

    @property
    def backed(self):
        return self.backed_flag

    @backed.setter
    def backed(self, value):
        self.backed_flag = value
        if not self.closed:
            hint_reset(self)

    @property
    def recovering(self):
        return self.recovering_flag

    @recovering.setter
    def recovering(self, value):
        cdef uint32_t i
        self.recovering_flag = value
        self.recover_closed = False
        if not self.recovering_flag:
            while self.lists[2].head != NONE:
                i = self.lists[2].head
                list_remove(self, i)
                self.ghost_count -= 1
                index_delete(self, i)
                entry_discard(self, i)

    @property
    def used(self):
        refresh(self)
        return (self.granules - self.free_granules - self.quarantined_granules) << self.granule_shift

    @property
    def quarantined(self):
        refresh(self)
        return self.quarantined_granules << self.granule_shift

    @property
    def pinned_blocks(self):
        refresh(self)
        return self.pinned_count

    @property
    def pinned_bytes(self):
        refresh(self)
        return self.pinned_granules << self.granule_shift

    @property
    def memory_blocks(self):
        return self.memory_count

    @property
    def disk_blocks(self):
        return self.disk_count

    @property
    def length(self):
        return self.memory_count + (self.disk_only if self.disk_readable else 0)

    @property
    def evictions(self):
        return self.n_evictions

    @property
    def dropped_blocks(self):
        return self.n_dropped

    @property
    def displaced_blocks(self):
        return self.n_displaced

    @property
    def unusable_blocks(self):
        return self.n_unusable

    @property
    def memory_hits(self):
        return self.n_hits

    @property
    def dirty_blocks(self):
        return self.lists[0].count

    @property
    def dirty_bytes(self):
        return self.lists[0].bytes

    @property
    def unbacked_blocks(self):
        return self.lists[1].count

    @property
    def unbacked_bytes(self):
        return self.lists[1].bytes

    @property
    def nospill_blocks(self):
        return self.lists[3].count

    @property
    def dirty_head_bytes(self):
        return E(self, self.lists[0].head).length if self.lists[0].count else 0

    @property
    def owed(self):
        return len(self.owed_keys)

    # -- keys and hits ------------------------------------------------------------------------------------------------

    def check_key(self, key):
        cdef Key k
        parse_key(self, key, &k)

    def get(self, key):
        cdef Key k
        enter(self)
        parse_key(self, key, &k)
        return hit(self, &k)

    def get_many(self, list keys not None):
        cdef Key k
        cdef Py_ssize_t place
        cdef list blocks = [], absent = []
        cdef object block
        enter(self)
        for key in keys:
            parse_key(self, key, &k)
        for place in range(len(keys)):
            parse_key(self, keys[place], &k)
            block = hit(self, &k)
            blocks.append(block)
            if block is None:
                absent.append(place)
        return blocks, absent

    def peek(self, key):
        cdef uint32_t i = find_key(self, key)
        if i == NONE or not in_memory(self, E(self, i)):
            return None
        return block_view(self, E(self, i).node, D(self, E(self, i).desc), E(self, i).length, False)

    def copy_into(self, key, out):
        cdef Py_buffer view
        cdef uint32_t i = find_key(self, key)
        cdef Entry *e
        cdef Desc d
        cdef uint64_t need
        cdef cnp.ndarray a
        cdef char *target
        cdef uint64_t room
        cdef bint held = False
        if isinstance(out, cnp.ndarray):
            # Not through the buffer protocol: numpy exports no ml_dtypes arrays there.
            a = <cnp.ndarray>out
            if a.dtype.hasobject:
                raise TypeError("cannot write into an array of Python objects")
            if not cnp.PyArray_ISWRITEABLE(a) or not cnp.PyArray_IS_C_CONTIGUOUS(a):
                raise ValueError("out must be writable and C-contiguous")
            target = <char *>cnp.PyArray_DATA(a)
            room = <uint64_t>cnp.PyArray_NBYTES(a)
        else:
            try:
                PyObject_GetBuffer(out, &view, PyBUF_CONTIG | PyBUF_FORMAT)
            except BufferError:
                raise ValueError("out must be writable and C-contiguous") from None
            held = True
            target = <char *>view.buf
            room = <uint64_t>view.len
        try:
            if held and holds_objects(view.format):
                raise TypeError("cannot write into a buffer of Python objects")
            if i == NONE or not in_memory(self, E(self, i)):
                return -1
            e = E(self, i)
            d = D(self, e.desc)
            need = e.length if d.kind == 0 else d.payload
            if room < need:
                raise ValueError(f"out has {room} bytes, the block has {need}")
            policy_hit(self, e.node)
            e.flags |= E_USED
            self.n_hits += 1
            return copy_block(self, e.node, d, e.length, target)
        finally:
            if held:
                PyBuffer_Release(&view)

    def payload_size(self, key):
        cdef uint32_t i = find_key(self, key)
        if i == NONE or not readable(self, E(self, i)):
            return -1
        cdef Desc d = D(self, E(self, i).desc)
        return E(self, i).length if d.kind == 0 else d.payload

    def state(self, key):
        cdef uint32_t i = find_key(self, key)
        if i == NONE or not readable(self, E(self, i)):
            return 0
        if E(self, i).node == NONE:
            return 2
        return 1 if in_memory(self, E(self, i)) else 3

    def match_prefix(self, keys):
        cdef Py_ssize_t run = 0
        cdef uint32_t i
        for key in keys:
            i = find_key(self, key)
            if i == NONE or not readable(self, E(self, i)):
                break
            run += 1
        return run

    def touch(self, key):
        cdef uint32_t i = find_key(self, key)
        if i == NONE or not readable(self, E(self, i)):
            return False
        E(self, i).flags |= E_USED
        if in_memory(self, E(self, i)):
            policy_hit(self, E(self, i).node)
        return True

    def keys(self):
        cdef list out = []
        cdef uint32_t i
        cdef Entry *e
        enter(self)
        for i in range(self.entry_top):
            e = E(self, i)
            if e.kind != 255 and readable(self, e):
                out.append(key_object(e))
        return out

    # -- puts ---------------------------------------------------------------------------------------------------------

    def draft(self, block):
        enter(self)
        return draft_block(self, block)

    def draft_like(self, shape, dtype):
        enter(self)
        cdef Draft d = Draft.__new__(Draft)
        dtype = np.dtype(dtype)
        d.desc = desc_of_shapes(self, 1, 0, dtype, parse_shape(shape, dtype), None, None)
        draft_sizes(self, d)
        return d

    def draft_block(self, layer_id, key_shape, value_shape, dtype):
        enter(self)
        cdef Draft d = Draft.__new__(Draft)
        dtype = np.dtype(dtype)
        d.desc = desc_of_shapes(self, 2, parse_layer(layer_id), dtype, parse_shape(key_shape, dtype), dtype,
                                parse_shape(value_shape, dtype))
        draft_sizes(self, d)
        return d

    def fits(self, Draft draft not None):
        return draft.stored < MAX_STORED and (draft.extent >> self.granule_shift) <= self.granules

    def put(self, key, Draft draft not None):
        cdef Key k
        cdef uint32_t n = NONE
        enter(self)
        parse_key(self, key, &k)
        if draft.stored >= MAX_STORED or (draft.extent >> self.granule_shift) > self.granules:
            return False
        if not take_now(self, <uint32_t>(draft.extent >> self.granule_shift), &n, True):
            return False
        try:
            draft_copy(self, draft, n)
            publish_node(self, &k, n, draft.desc, draft.stored, None)
        except BaseException:
            pool_settle(self, n)
            raise
        return True

    def room(self, what):
        cdef Room r = Room.__new__(Room)
        cdef uint64_t stored
        enter(self)
        stored = (<Draft>what).stored if isinstance(what, Draft) else operator_index(what)
        r.status = 3            # nothing to give back yet
        r.table = self
        r.node = NONE
        r.stored = stored
        stored = extent_of(self, stored) >> self.granule_shift
        if stored > self.granules or r.stored >= MAX_STORED:
            raise ValueError("larger than the pool")
        r.size = <uint32_t>stored
        r.patient = isinstance(what, Draft)
        self.room_token += 1
        r.token = self.room_token
        arena_expect(self.arena)
        r.status = 0
        return r

    def fill(self, Room room, key, Draft draft not None):
        cdef Key k
        enter(self)
        parse_key(self, key, &k)
        check_room(self, room, draft.stored)
        draft_copy(self, draft, room.node)
        publish_node(self, &k, room.node, draft.desc, draft.stored, None)
        room.use(self)

    def reserve(self, Room room, Draft draft not None):
        enter(self)
        check_room(self, room, draft.stored)
        room.stored = draft.stored
        memset(node_data(self, room.node), 0, node_bytes(self, room.node))
        return block_view(self, room.node, draft.desc, draft.stored, True)

    def publish(self, Room room, key, Draft draft not None, checksum):
        cdef Key k
        enter(self)
        parse_key(self, key, &k)
        check_room(self, room, draft.stored)
        publish_node(self, &k, room.node, draft.desc, draft.stored, checksum)
        room.use(self)

    def extent(self, what):
        cdef uint32_t n
        enter(self)
        if isinstance(what, Room):
            check_room(self, <Room>what, (<Room>what).stored)
            return make_window(self, (<Room>what).node, (<Room>what).stored, True)
        n = operator_index(what)
        if n >= self.node_pieces << PIECE_BITS or N(self, n).entry == NONE:
            raise InternalError("not the extent of a block")
        return make_window(self, n, E(self, N(self, n).entry).length, True)

    def remove(self, key):
        cdef Key k
        cdef uint32_t i
        cdef bint logged
        enter(self)
        parse_key(self, key, &k)
        i = index_find(self, &k)
        if i == NONE:
            if self.recovering_flag:
                i = entry_new(self, &k)
                self.disk_only += 1         # entry_remove takes it off again
                entry_remove(self, i)
                self.owed_keys.pop(tagged_key(k.kind, k.ptr, k.len), None)
                return 2
            if self.owed_keys and self.owed_keys.pop(tagged_key(k.kind, k.ptr, k.len), 0) is None:
                return 2
            return 2 if self.log_unknown else 0
        logged = self.recovering_flag or (E(self, i).flags & E_LOGGED) != 0
        entry_remove(self, i)
        return 2 if logged else 1

    def clear(self):
        cdef uint32_t i, count = 0
        enter(self)
        for i in range(self.entry_top):
            if E(self, i).kind != 255:
                count += not E(self, i).flags & E_GHOST
                entry_clear(self, i)
                entry_discard(self, i)
        index_empty(self)
        self.owed_keys.clear()
        self.recover_closed = self.recovering_flag
        return count

    def take_owed(self):
        enter(self)
        cdef list out = []
        for raw in self.owed_keys:      # no comprehension: when memory is refused, Cython's frees an item twice
            out.append((raw[0], raw[1:]))
        self.owed_keys.clear()
        return out

    def return_owed(self, items):
        """Give tombstones back that could not be written; keys present again only note that they are logged."""
        cdef uint32_t i
        enter(self)
        for kind, key in items:
            i = find_raw(self, kind, key)
            if i == NONE:
                self.owed_keys[bytes([kind]) + key] = None
            else:
                E(self, i).flags |= E_LOGGED

    def request_begin(self):
        return policy_begin(self)

    def request_end(self, rid):
        policy_commit(self, rid)


include "_core_audit.pxi"
include "_core_table.pxi"
