"""The block table: sole owner of block state in memory (see ARCHITECTURE.md).

Calls are synchronous and come from one thread; only destructors of views may run on others. After `Table.close`, calls
raise `ClosedError`; counters stay. In a forked child, calls raise `RuntimeError`.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, Self, SupportsIndex, final

from numpy.typing import DTypeLike, NDArray

@final
class CacheBlock:
    """The KV data of one layer under one key: `layer_id` (signed 32 bit) and two arrays, which may differ in kind."""

    @property
    def layer_id(self) -> int: ...
    @property
    def key(self) -> NDArray[Any]: ...
    @property
    def value(self) -> NDArray[Any]: ...
    def __init__(self, layer_id: SupportsIndex, key: NDArray[Any], value: NDArray[Any]) -> None: ...

@final
class Draft:
    """A block parsed and checked, not yet copied. Sizes in bytes."""

    @property
    def stored(self) -> int:
        """Bytes in the pool and on disk: key array, gap, value array."""
    @property
    def payload(self) -> int:
        """Bytes of the arrays."""
    @property
    def extent(self) -> int:
        """Occupied bytes of the pool."""

@final
class Room:
    """A claim on pool space that may take several loop turns; dropped uncancelled, it gives its space back."""

    @property
    def done(self) -> bool: ...
    @property
    def bytes(self) -> int: ...
    @property
    def needs_spill(self) -> bool:
        """After -1: blocks waiting for or in a spill could make room once clean."""
    def step(self) -> int:
        """1 done; 0 call again next turn; -1 nothing evictable makes room now, call again after something changed."""
    def cancel(self) -> None:
        """Give everything back; no effect on a used room."""

@final
class Spill:
    """One block being written."""

    @property
    def node(self) -> int: ...
    @property
    def kind(self) -> int:
        """0 int, 1 bytes, 2 str."""
    @property
    def key(self) -> bytes:
        """Key bytes; ints as 8 bytes, little endian."""
    @property
    def stored(self) -> int: ...
    @property
    def desc(self) -> bytes: ...
    @property
    def sealed_checksum(self) -> int | None: ...
    @property
    def view(self) -> memoryview:
        """Read-only: the whole extent from 32 KiB on, else the stored length. Does not pin; keeps the mapping."""

@final
class Load:
    """One block being read back."""

    @property
    def node(self) -> int: ...
    @property
    def kind(self) -> int: ...
    @property
    def key(self) -> bytes: ...
    @property
    def stored(self) -> int: ...
    @property
    def slot(self) -> int: ...
    @property
    def offset(self) -> int: ...
    @property
    def checksum(self) -> int: ...
    @property
    def desc(self) -> bytes: ...
    @property
    def view(self) -> memoryview:
        """Writable: the whole extent from 32 KiB on, else the stored length."""
    @property
    def plain_key(self) -> int | bytes | str:
        """The key as users know it."""
    @property
    def fd(self) -> int: ...
    @property
    def span(self) -> int:
        """Bytes that a flight reads: whole pages from 32 KiB on."""
    token: int
    answers: Answers | None
    """Of the call that asked; None when nobody did, or `reload` knows."""
    @property
    def index(self) -> int:
        """The place in the answers."""
    reload: Any
    """What else is to be done when it ends."""
    @property
    def started(self) -> float: ...

@final
class Answers:
    """What one call gets for its keys: a place for each, filled without Python when a read ends well.

    Parameters
    ----------
    keys, results
        As long as each other; the results that are there.
    absent
        Places without a result.
    future
        Resolved when none is missing any more; None when nobody waits.
    counted
        Whether its hits and misses are.
    """

    keys: list[Any]
    results: list[Any]
    codes: list[int]
    counted: bool
    missing: int
    future: Any
    gather: Any
    """The waiter that stands for it, as soon as there is one."""
    over: bool
    """Nobody wants them any more."""
    def __init__(
        self, keys: list[Any], results: list[Any], absent: Sequence[int], future: Any, counted: bool = True
    ) -> None: ...
    def answer(self, place: int, block: Any, code: int) -> None:
        """Fill a place; 0 as the code empties it."""
    def drop(self) -> None:
        """Let go of all results."""
    def fail(self, error: BaseException) -> None:
        """End the call with an error."""

class Flight:
    """Reads that were handed to a ring together.

    Attributes
    ----------
    begun
        Of them, that the ring has got, in order.
    left
        That have not ended.
    """

    loads: list[Load]
    begun: int
    left: int
    def give_up(self) -> tuple[list[Load], list[Load]]:
        """Wait for none any more: those that nothing touches, and those that the kernel has."""
    def cut(self) -> list[Load]:
        """Take out those that the ring has not got."""
    def took(self, begun: int) -> None:
        """The ring has got them up to a place."""

def aim(
    loads: list[Load], fds: dict[int, int], mask: int, memory_mask: int, largest: int, flight: Flight
) -> list[Load]:
    """Put reads into a flight; what cannot fly comes back.

    Parameters
    ----------
    fds
        Descriptors by slot.
    mask, memory_mask
        Bits that must not be set in an offset or a length, and in an address.
    largest
        Most bytes of one.
    """

def land(found: list[tuple[Any, int]]) -> list[Load]:
    """Take out of a ring's completions the reads of flights that moved all they should."""

def verify(landed: list[Load], budget: int) -> tuple[list[Load], list[Load], list[Any], int]:
    """Take reads off the front, for so many bytes, and compare their checksums.

    Returns
    -------
    tuple
        Those that are right, those that are wrong, the flights that are over with them, and the bytes.
    """

def strayed(load: Load) -> tuple[Any, bool]:
    """End a read of a flight that did not move all it should: the flight, and whether nobody waited any more."""

@final
class Carry:
    """One disk-only block worth copying out of a segment about to be reclaimed."""

    @property
    def kind(self) -> int: ...
    @property
    def key(self) -> bytes: ...
    @property
    def desc(self) -> bytes: ...
    @property
    def stored(self) -> int: ...
    @property
    def slot(self) -> int: ...
    @property
    def offset(self) -> int: ...
    @property
    def checksum(self) -> int: ...

@final
class Arena:
    """The mapping of the pool."""

    def __new__(cls, size: int) -> Self: ...

@final
class Pin:
    """Base object of views: while it lives, its extent is not reused. Exports a buffer."""

@final
class Window:
    """Base object of I/O views: keeps the mapping, pins nothing. Exports a buffer."""

@final
class Desc:
    """An interned descriptor."""

    @property
    def raw(self) -> bytes: ...

class BlockMap:
    """Keys, hits and puts.

    Parameters
    ----------
    capacity
        Bytes of the pool, one anonymous mapping of exactly that size.
    policy
        Order of eviction.
    backed
        Whether dirty blocks must be spilled before eviction; else they are dropped.
    max_spill
        Blocks of a larger stored length are never spilled, and droppable.
    hash_mask
        For tests: the bits of key hashes that are used.
    random
        Where the seeds of key hashes come from: n -> n random bytes.
    """

    def __new__(
        cls,
        capacity: SupportsIndex,
        *,
        policy: str = "lru",
        backed: bool = False,
        max_spill: int = ...,
        hash_mask: int = ...,
        random: Callable[[int], bytes] = ...,
    ) -> Self: ...
    backed: bool
    max_spill: int
    waiting: bool
    """While True, the first release of a view since the last call invokes `wake`."""
    wake: Callable[[], object] | None
    """Called from any thread and inside garbage collection: may only schedule."""
    recovering: bool
    """While True, removed keys leave ghosts that keep older records out; False purges them."""
    log_unknown: bool
    """True: the log may hold unknown records (a recovery cut short): removals owe tombstones."""
    disk_readable: bool
    """False: blocks on disk only are reported absent."""

    @property
    def closed(self) -> bool: ...
    @property
    def capacity(self) -> int: ...
    @property
    def used(self) -> int: ...
    @property
    def quarantined(self) -> int: ...
    @property
    def pinned_blocks(self) -> int: ...
    @property
    def pinned_bytes(self) -> int: ...
    @property
    def memory_blocks(self) -> int: ...
    @property
    def disk_blocks(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def evictions(self) -> int: ...
    @property
    def dropped_blocks(self) -> int: ...
    @property
    def displaced_blocks(self) -> int:
        """Blocks in memory that lost their place on disk, so far."""
    @property
    def unusable_blocks(self) -> int:
        """Blocks that recovery left out: of a dtype unknown to this process, or with a descriptor that is none."""
    @property
    def memory_hits(self) -> int: ...
    @property
    def dirty_blocks(self) -> int: ...
    @property
    def dirty_bytes(self) -> int: ...
    @property
    def unbacked_blocks(self) -> int: ...
    @property
    def unbacked_bytes(self) -> int: ...
    @property
    def nospill_blocks(self) -> int:
        """Blocks in memory that no segment can hold."""
    def owe_nospill(self) -> None:
        """Owe the tombstones of those whose key has older records in the log."""
    @property
    def dirty_head_bytes(self) -> int:
        """Stored bytes of the oldest dirty block, 0 without one."""
    @property
    def owed(self) -> int: ...
    def check_key(self, key: object) -> None:
        """Raise TypeError or ValueError for what is no key."""
    def get(self, key: object) -> Any:
        """The block as views that pin it, or None when not in memory; counts, and notes the use."""
    def get_many(self, keys: list[Any]) -> tuple[list[Any], list[int]]:
        """`get` for each key, all of them checked first: the blocks, and the places of those not in memory."""
    def peek(self, key: object) -> Any:
        """As `get`, without counting or noting."""
    def copy_into(self, key: object, out: Any) -> int:
        """Payload into a writable buffer: bytes, or -1 when not in memory. ValueError before anything is written."""
    def payload_size(self, key: object) -> int:
        """Payload bytes of a known block, -1 when absent."""
    def state(self, key: object) -> Literal[0, 1, 2, 3]:
        """0 absent, 1 in memory, 2 on disk only, 3 on disk and loading."""
    def match_prefix(self, keys: Iterable[object]) -> int: ...
    def touch(self, key: object) -> bool:
        """Note a use; whether the key is readable."""
    def keys(self) -> list[int | bytes | str]: ...
    def draft(self, block: object) -> Draft:
        """Parse a block; TypeError or ValueError for what cannot be stored."""
    def draft_like(self, shape: SupportsIndex | Sequence[SupportsIndex], dtype: DTypeLike) -> Draft: ...
    def draft_block(
        self,
        layer_id: SupportsIndex,
        key_shape: SupportsIndex | Sequence[SupportsIndex],
        value_shape: SupportsIndex | Sequence[SupportsIndex],
        dtype: DTypeLike,
    ) -> Draft: ...
    def fits(self, draft: Draft) -> bool:
        """Whether it could be stored in an empty pool."""
    def put(self, key: object, draft: Draft) -> bool:
        """Copy and publish when room can be had at once; False otherwise, with nothing changed."""
    def room(self, what: Draft | SupportsIndex) -> Room:
        """Room for a draft or a stored length; ValueError when larger than the pool.

        Room for a draft waits while the policy's next victim has yet to be written; room for a stored length (a reload)
        takes the first clean one.
        """
    def fill(self, room: Room, key: object, draft: Draft) -> None:
        """Copy into a done room and publish; consumes the room."""
    def reserve(self, room: Room, draft: Draft) -> Any:
        """Writable zeroed arrays over a done room; they pin it."""
    def publish(self, room: Room, key: object, draft: Draft, checksum: int | None) -> None:
        """Publish a reserved room; a later spill uses the checksum."""
    def extent(self, what: Room | SupportsIndex) -> memoryview:
        """Writable bytes of the stored length, of a room or a node; not pinned."""
    def remove(self, key: object) -> Literal[0, 1, 2]:
        """0 absent; 1 removed; 2 removed and a tombstone is owed (always while recovering)."""
    def clear(self) -> int:
        """Remove everything; how many."""
    def take_owed(self) -> list[tuple[int, bytes]]:
        """Kind and bytes of keys whose tombstones are owed and not reported by `remove`."""
    def return_owed(self, items: Iterable[tuple[int, bytes]]) -> None:
        """Take tombstones back that could not be written."""
    def request_begin(self) -> int: ...
    def request_end(self, rid: int) -> None: ...

@final
class Table(BlockMap):
    """The block table with its disk side."""

    def take_dirty(self, max_bytes: int, max_blocks: int) -> list[Spill]:
        """Oldest dirty blocks, at least one when there is one and max_blocks allows."""
    def requeue_unbacked(self) -> int:
        """Make blocks dirty again that lost their place on disk; how many."""
    def finish_spill(self, spill: Spill, ok: bool, slot: int = 0, offset: int = 0, checksum: int = 0) -> bool:
        """The write ended: whether the block has that location now."""
    def expire_spill(self, spill: Spill) -> None:
        """Past the deadline: as failed, but the bytes stay held until `release_spill`."""
    def release_spill(self, spill: Spill) -> None: ...
    def where(self, key: object) -> tuple[int, int, int, int] | None:
        """Slot, offset, stored bytes and checksum of a block on disk only and not loading."""
    def begin_load(self, key: object, room: Room, now: float = 0.0) -> Load: ...
    def begin_loads(
        self, answers: Answers, places: Iterable[int], largest: int, most: int, now: float
    ) -> tuple[list[Load], list[int], int]:
        """Begin to read what is on disk only and finds room at once, in order.

        Parameters
        ----------
        largest
            Stored bytes of a block.
        most
            Blocks.

        Returns
        -------
        tuple of list, list, int
            The reads, the places left, and how many were answered as misses.
        """
    def locate_loads(self, loads: list[Load]) -> tuple[list[Load], list[Load]]:
        """Look again where blocks are, which may have been moved since their reads began: these, and the stale ones."""
    def land_loads(
        self, loads: list[Load], now: float, seconds: Callable[[float], object]
    ) -> tuple[list[Load], int, int]:
        """Publish blocks whose bytes are right, and answer the calls that they are for.

        Returns
        -------
        tuple of list, int, int
            Those left to the caller, as others asked too or the key was replaced; bytes and hits of the rest.
        """
    def loading(self, key: object) -> Load | None:
        """The read that fills a key's block."""
    @property
    def loads_begun(self) -> list[Load]:
        """All reads that have not ended or expired."""
    @property
    def loads_count(self) -> int:
        """How many."""
    def is_current(self, load: Load) -> bool: ...
    def finish_load(self, load: Load, ok: bool) -> bool:
        """The read ended: whether the block is readable now. Does not forget a damaged one: see `drop`."""
    def expire_load(self, load: Load) -> None:
        """Past the deadline: on disk only again, the extent in quarantine until `release_load`."""
    def release_load(self, load: Load) -> None: ...
    def block(self, what: Load | SupportsIndex) -> Any:
        """View of a finished load or of a node; None when it is not there any more."""
    def drop(self, what: object) -> None:
        """Forget a damaged block in every tier; of a load only when the block still is what was read."""
    def segment_live(self, slot: int) -> tuple[int, int]:
        """Blocks and stored bytes with their location there."""
    def segment_candidates(self, slot: int, max_bytes: int, unused: bool = False) -> list[Carry]:
        """Blocks that are on disk only and were used since they were written; `unused` ones as well."""
    def carry_current(self, carry: Carry) -> bool: ...
    def reserve_segment(self, slot: int) -> None:
        """Have room for the blocks of a segment: for one that has it `finish_spill` and `finish_carry` do not fail."""
    def finish_carry(self, carry: Carry, slot: int, offset: int) -> bool: ...
    def drop_segment(self, slot: int, max_blocks: int = ...) -> int:
        """Take the location from up to max_blocks blocks there; how many. Call until it returns 0."""
    def revert_segment(self, slot: int, from_offset: int) -> int:
        """As `drop_segment` from an offset on, after a failed sync: what is in memory becomes dirty."""
    def recover_block(
        self, kind: int, key: bytes, slot: int, offset: int, stored: int, checksum: int, desc_id: int
    ) -> int:
        """Newest first: the first sight of a key is final. How many were added."""
    def recover_tombstone(self, kind: int, key: bytes) -> None: ...
    def intern(self, desc: bytes) -> int:
        """Id of a descriptor, held until `release_desc`; ValueError when malformed."""
    def release_desc(self, desc_id: int) -> None: ...
    def desc_bytes(self, desc_id: int) -> bytes: ...
    def disk_entries(
        self, cursor: int = 0, limit: int = 1024
    ) -> tuple[int, list[tuple[int, bytes, int, int, int, int, int]]]:
        """Next cursor and (kind, key, slot, offset, stored, checksum, desc id) of blocks with a location."""
    def check(self) -> None:
        """Check every invariant; InternalError. Cost grows with the table."""
    def pages_wanted(self, ahead: int) -> tuple[int, int] | None:
        """Byte range of the pool that comes into use next and has no pages: None while half of `ahead` is ready."""
    def touch_pages(self, start: int, end: int) -> None:
        """Give a range of the pool its pages, without the GIL and without a change to any byte; for a thread."""
    def pages_ready(self, start: int, end: int) -> None:
        """That range, of `pages_wanted`, is not wanted any more."""
    def leak(self) -> None:
        """Keep the mapping for ever: I/O on it never ended."""
    def close(self) -> Arena | None:
        """End; the mapping, which its last holder unmaps."""
