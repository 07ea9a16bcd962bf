"""C layout of the block table: what other extensions may cimport."""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t

cdef struct Entry:              # one known key, 48 bytes; the hot half comes first
    uint64_t key                # int value; bytes of keys up to 8 long; else address of the slab copy
    uint32_t node               # extent in the pool, NONE when not in memory
    uint32_t desc               # index of the descriptor
    uint32_t length             # stored bytes
    uint16_t keylen             # bytes of the key (8 for ints)
    uint8_t kind                # 0 int, 1 bytes, 2 str, 255 free entry
    uint8_t flags               # E_* bits, list code in the two highest
    uint64_t checksum           # of the stored bytes; valid with a location or E_SEALED
    uint32_t slot               # segment slot, NONE without a location on disk
    uint32_t offset             # bytes from the start of that segment
    uint32_t prev               # links of the one list the entry is in
    uint32_t next

cdef struct Node:               # one extent, 32 bytes; every granule of the pool belongs to exactly one
    uint32_t prev               # recency links (towards the head); bin links while free
    uint32_t next               # towards the tail
    uint32_t offset             # granules
    uint32_t size               # granules
    uint32_t left               # address neighbours
    uint32_t right
    uint32_t entry              # NONE when free, claimed or detached
    uint16_t pins               # views; 0xFFFF = more, counted in Table.extra
    uint8_t io                  # operations that own the bytes
    uint8_t flags               # state in the three lowest bits, N_* above

cdef struct EntryList:
    uint32_t head
    uint32_t tail
    uint32_t count
    uint64_t bytes              # occupied bytes (dirty, unbacked) or stored bytes (segments)

cdef struct SubTable:           # one piece of the extendible hash
    uint64_t *slots             # hash << 32 | entry, all ones when empty
    uint32_t mask
    uint32_t count
    uint32_t depth              # leading hash bits shared by all keys here

cdef struct Key:                # a parsed key; ptr borrows from the key object
    const uint8_t *ptr
    uint64_t word               # as Entry.key for ints and short keys
    uint32_t hash
    uint32_t len
    int kind

cdef struct DiskEntry:
    const uint8_t *key          # valid until the next table call; ints as 8 little-endian bytes
    uint64_t checksum
    uint32_t keylen
    uint32_t slot
    uint32_t offset
    uint32_t stored
    uint32_t desc
    uint8_t kind
    uint8_t flags

cdef struct ScanCursor:
    uint64_t owner
    uint32_t node

cdef class Arena:               # the mapping; lives as long as the table or any view
    cdef char *base
    cdef size_t size
    cdef uint64_t *released     # node, and a tag in the high half
    cdef uint32_t n_released
    cdef uint32_t released_cap
    cdef uint32_t outstanding   # pins and rooms that may still be pushed
    cdef unsigned int generation
    cdef void *table            # borrowed, NULL once the table is gone
    cdef size_t ready_low       # bytes from the bottom on, and
    cdef size_t ready_high      # from here to the top, that have their pages

cdef class Desc:                # an interned descriptor: how to rebuild a block from its stored bytes
    cdef readonly bytes raw
    cdef int kind
    cdef int32_t layer_id
    cdef int count              # arrays: 0, 1 or 2
    cdef object dtype_a
    cdef object dtype_b
    cdef int nd_a
    cdef int nd_b
    cdef Py_ssize_t dims_a[8]
    cdef Py_ssize_t dims_b[8]
    cdef uint64_t size_a        # bytes
    cdef uint64_t size_b
    cdef uint64_t start_b       # first byte of the value array
    cdef uint64_t payload
    cdef uint64_t stored        # exact stored length; bytes kind: any
    cdef uint32_t index         # in Table.descs, NONE when no entry uses it
    cdef uint32_t refs          # entries and temporary holds

cdef class Request:             # a read that a ring does by itself: its owner keeps the memory mapped
    cdef readonly int fd
    cdef char *data             # where to
    cdef readonly uint32_t span     # bytes
    cdef readonly uint64_t offset   # first byte in the file
    cdef public uint64_t token  # the ring's name of it in the kernel

cdef class BlockMap:            # the state; helpers take this
    cdef Arena arena
    cdef readonly uint64_t capacity
    cdef uint32_t granule_shift
    cdef uint32_t granules
    cdef uint32_t used_low      # aligned extents were taken below it,
    cdef uint32_t used_high     # small ones above it
    cdef uint32_t align         # granules per 4096 bytes
    cdef unsigned int generation
    cdef readonly bint closed
    # entries
    cdef Entry **entries
    cdef uint32_t entry_pieces
    cdef uint32_t entry_free
    cdef uint32_t entry_top     # indices handed out so far
    cdef uint32_t entry_count
    cdef uint32_t ghost_count
    cdef uint32_t disk_only     # readable entries without a readable extent
    cdef uint32_t disk_count    # entries with a location
    cdef uint32_t spilling      # entries being written
    cdef void *slab_free[32]
    cdef char *slab_bump[32]
    cdef uint32_t slab_left[32]
    cdef void *slab_chunks
    # hash
    cdef SubTable **directory
    cdef uint32_t depth
    cdef uint64_t seed_a
    cdef uint64_t seed_b
    cdef uint64_t hash_mask
    # nodes and bins
    cdef Node **nodes
    cdef uint32_t node_pieces
    cdef uint32_t node_free
    cdef uint32_t node_spare    # unused indices at hand
    cdef uint32_t node_top
    cdef uint32_t first_node
    cdef uint32_t bins[544]
    cdef uint64_t bin_map
    cdef uint32_t bin_sub[34]
    cdef uint64_t free_granules
    cdef uint64_t quarantined_granules
    cdef uint64_t pinned_granules
    cdef uint32_t pinned_count
    cdef uint32_t memory_count
    cdef dict extra             # node -> pins beyond 0xFFFF
    # recency
    cdef uint32_t lru_head
    cdef uint32_t lru_tail
    cdef uint32_t ready_head    # passed-over nodes that became evictable, oldest first
    cdef uint32_t ready_tail
    cdef uint32_t hint          # every evictable node is in the ready list or at/headward of this
    cdef uint32_t skipped
    cdef int policy_id
    cdef uint64_t epoch         # moves when something becomes free or evictable
    cdef uint64_t room_token
    cdef ScanCursor cursors[8]
    cdef uint64_t request_token
    # lists
    cdef EntryList lists[4]     # dirty, unbacked, ghosts, too large to spill
    cdef EntryList *segments
    cdef uint32_t segment_count
    # descriptors
    cdef list descs
    cdef list desc_free
    cdef dict desc_by_raw
    cdef list desc_cache
    # the rest
    cdef dict loads             # node -> Load of every read that nobody has ended yet
    cdef dict owed_keys         # kind byte + key: tombstones to write
    cdef bint backed_flag
    cdef bint recovering_flag
    cdef bint recover_closed    # cleared during recovery: nothing older may come in
    cdef public bint disk_readable
    cdef public bint log_unknown     # a recovery failed: records of any key may lie on disk
    cdef public bint waiting
    cdef public object wake
    cdef public uint64_t max_spill
    cdef uint64_t n_evictions
    cdef uint64_t n_dropped
    cdef uint64_t n_unusable
    cdef uint64_t n_displaced
    cdef uint64_t n_hits

cdef class Table(BlockMap):     # adds segments, spills, reloads and recovery
    # recovery and snapshots; everything below is for the loop thread
    cdef int recover_block_c(self, int kind, const uint8_t *key, uint32_t keylen, uint32_t slot,
                             uint32_t offset, uint32_t stored, uint64_t checksum,
                             uint32_t desc_id) except -1
    cdef int recover_tombstone_c(self, int kind, const uint8_t *key, uint32_t keylen) except -1
    cdef int64_t intern_c(self, const uint8_t *raw, size_t length) noexcept   # -1 when malformed
    cdef void release_desc_c(self, uint32_t desc_id) noexcept
    cdef int next_disk(self, uint32_t *cursor, DiskEntry *out) noexcept       # 1, or 0 at the end
    cdef uint32_t segment_first(self, uint32_t slot) noexcept                 # 0xFFFFFFFF at the end
    cdef bytes desc_raw_c(self, uint32_t desc_id)
