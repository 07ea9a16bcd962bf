"""What the offline commands tell about a store: one report for the directory, one for each segment."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import sha256

__all__ = ["BlockPlace", "DirectoryReport", "LostBlock", "SegmentReport", "Space", "describe", "key_of_wire"]

LIVE, REMOVED, LOST = range(3)
DIGEST_CHARACTERS = 16


@dataclass(frozen=True, slots=True)
class BlockPlace:
    """The newest record of a key.

    Attributes
    ----------
    state
        `LIVE`, `REMOVED` by a tombstone, or `LOST`: a block whose bytes are damaged or gone.
    segment, offset, stored, checksum
        Where its bytes are.
    desc
        What rebuilds it.
    """

    state: int
    segment: int
    offset: int = 0
    stored: int = 0
    checksum: int = 0
    desc: bytes = b""


@dataclass(frozen=True, slots=True)
class LostBlock:
    """A key whose newest block cannot be given back.

    Attributes
    ----------
    namespace
        Digest of its namespace, 32 bytes.
    kind, key
        Key kind and key bytes as on disk.
    segment, stored
        Where it was, and how long.
    """

    namespace: bytes
    kind: int
    key: bytes
    segment: int
    stored: int

    @property
    def digest(self) -> str:
        """Stands for the key where it may not be shown; hex. Equal keys of a namespace have equal ones."""
        return sha256(self.namespace + bytes([self.kind]) + self.key).hexdigest()[:DIGEST_CHARACTERS]

    @property
    def plain(self) -> int | str | bytes:
        """The key as its user named it."""
        return key_of_wire(self.kind, self.key)


def key_of_wire(kind: int, key: bytes) -> int | str | bytes:
    """A key as its user named it."""
    if kind == 0:
        return int.from_bytes(key, "little", signed=True)
    return key if kind == 1 else key.decode("utf-8", "replace")


def describe(desc: bytes) -> tuple[str, str, str]:
    """Kind, dtype and shape of a block, from its descriptor; see docs/format.md."""
    try:
        kind = ("bytes", "array", "CacheBlock")[desc[0]]
        position = 1
        if kind == "CacheBlock":
            _, position = _varint(desc, position)
        dtypes, shapes = [], []
        while position < len(desc):
            dtypes.append(desc[position + 1 : position + 1 + desc[position]].decode())
            position += 1 + desc[position]
            dims, position = desc[position], position + 1
            shape = []
            for _ in range(dims):
                size, position = _varint(desc, position)
                shape.append(str(size))
            shapes.append("x".join(shape) or "scalar")
    except (IndexError, UnicodeDecodeError):
        return "unknown", "", ""
    return kind, ", ".join(dict.fromkeys(dtypes)), ", ".join(dict.fromkeys(shapes))


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while data[position] & 0x80:
        value |= (data[position] & 0x7F) << shift
        position, shift = position + 1, shift + 7
    return value | data[position] << shift, position + 1


@dataclass(slots=True)
class Space:
    """One namespace.

    Attributes
    ----------
    digest
        Its 32 bytes.
    keys
        (key kind, key) to its newest record.
    ended
        Nothing older counts: a clear was met, or a loss after which older records are not to be trusted.
    broken
        A segment of it is missing.
    displaced
        Numbers of segments of it that lie under another name.
    indexed
        The index snapshot filled `keys`: it, not the records, says what an opening serves.
    expected, expected_good, sealed_upto
        What newer segments say of the ones before: the number of the next older one and how many batches it has at
        least; segments up to which number had been sealed.
    oldest_live
        Below it segments are dead, as the newer ones say.
    """

    digest: bytes
    keys: dict[tuple[int, bytes], BlockPlace] = field(default_factory=dict)
    ended: bool = False
    broken: bool = False
    displaced: set[int] = field(default_factory=set)
    indexed: bool = False
    expected: int | None = None
    expected_good: int = 0
    sealed_upto: int = 0
    oldest_live: int = 0

    @property
    def name(self) -> str:
        """First 8 bytes of the digest, in hex."""
        return self.digest[:8].hex()

    @property
    def live(self) -> list[BlockPlace]:
        """Blocks that no newer record supersedes and whose bytes are well."""
        return [place for place in self.keys.values() if place.state == LIVE]


@dataclass(slots=True)
class SegmentReport:
    """One segment file.

    Attributes
    ----------
    number, name, size, allocated, modified
        The file; when it was last written to, in seconds since 1970.
    state
        ``"sealed"``, ``"open"`` (no seal: in use, or left by a crash), ``"dead"`` (below the oldest live one),
        ``"foreign"`` (another store), ``"misplaced"`` (this store's, under another's name), ``"unreadable"``.
    namespace
        First 8 bytes of the namespace's digest, in hex.
    batches, records, blocks, tombstones, clears
        What it holds; superseded records count.
    stored_bytes, live_blocks, live_bytes
        Stored bytes of all its blocks, and those that no newer record supersedes.
    complete
        Every record that was in it is known.
    orphaned
        It holds records, but nothing says of which namespace.
    damage
        Texts, one for each damaged place.
    """

    number: int
    name: str
    size: int
    allocated: int
    modified: float = 0.0
    state: str = "unreadable"
    namespace: str = ""
    batches: int = 0
    records: int = 0
    blocks: int = 0
    tombstones: int = 0
    clears: int = 0
    stored_bytes: int = 0
    live_blocks: int = 0
    live_bytes: int = 0
    complete: bool = False
    orphaned: bool = False
    damage: list[str] = field(default_factory=list)

    @property
    def dead_bytes(self) -> int:
        """Stored bytes that newer records superseded, or that are damaged."""
        return self.stored_bytes - self.live_bytes


@dataclass(slots=True)
class DirectoryReport:
    """A whole store.

    Attributes
    ----------
    path, store_id
        The directory and the store's id in hex, empty when the superblock is bad.
    allocated
        Bytes allocated under the directory.
    segments
        By number.
    spaces
        Namespaces by digest.
    snapshot
        ``"none"``, ``"valid head"`` or ``"damaged"``.
    spare_bytes
        Size of the spare file.
    verified_blocks, verified_bytes, corrupt_blocks
        Of `verify_directory`: payloads read, and how many of them were wrong.
    damage
        Damaged places outside the segments.
    """

    path: str
    store_id: str = ""
    allocated: int = 0
    segments: list[SegmentReport] = field(default_factory=list)
    spaces: dict[bytes, Space] = field(default_factory=dict, repr=False)
    snapshot: str = "none"
    spare_bytes: int = 0
    verified_blocks: int = 0
    verified_bytes: int = 0
    corrupt_blocks: int = 0
    damage: list[str] = field(default_factory=list)

    def _sum(self, name: str) -> int:
        return sum(getattr(segment, name) for segment in self.segments)

    @property
    def records(self) -> int:
        """Records in all segments."""
        return self._sum("records")

    @property
    def live_blocks(self) -> int:
        """Blocks that no newer record supersedes, over all namespaces."""
        return self._sum("live_blocks")

    @property
    def live_bytes(self) -> int:
        """Their stored bytes."""
        return self._sum("live_bytes")

    @property
    def dead_bytes(self) -> int:
        """Stored bytes that were superseded and wait for their segment to be reclaimed."""
        return self._sum("dead_bytes")

    @property
    def all_damage(self) -> list[str]:
        """Every damaged place."""
        return self.damage + [f"{s.name}: {text}" for s in self.segments for text in s.damage]

    @property
    def lost(self) -> list[LostBlock]:
        """Keys whose newest block is damaged or gone."""
        return [
            LostBlock(space.digest, kind, key, place.segment, place.stored)
            for space in self.spaces.values()
            for (kind, key), place in space.keys.items()
            if place.state == LOST
        ]

    @property
    def ok(self) -> bool:
        """No damage was found."""
        return not self.all_damage
