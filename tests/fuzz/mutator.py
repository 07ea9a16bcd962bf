"""Changes bytes the way that finds faults in readers of our formats, and makes checksums right again.

Input number i of a seed is a pure function of both: nothing that an execution shows flows back, so a finding is named
by two numbers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from xxhash import xxh3_64_intdigest

from asynckv._record import HEADER_BYTES, PAGE_BYTES, chunk_seed
from asynckv.tiers.layout import SnapshotHead

PAGE = PAGE_BYTES
WIDTHS = (1, 2, 4, 8)
NUMBERS = sorted(
    {base + more for base in (0, 2**7, 2**8, 2**15, 2**16, 2**31, 2**32, 2**63, 2**64) for more in (-2, -1, 0, 1)}
    | {PAGE, PAGE - 1, PAGE + 1, 1 << 20, 4 << 20, (4 << 20) + PAGE, 2**32 - 2**16, 10**15, 1024, 1025, 255, 256}
)
EXTEND_MAX = 3 * PAGE

Repair = Callable[[bytearray, random.Random], None]


def mutate(rng: random.Random, golden: Sequence[bytes], spots: Callable[[bytes], Sequence[int]]) -> bytearray:
    """One of the golden inputs, changed one to six times.

    Parameters
    ----------
    rng
        Decides everything.
    golden
        Inputs that are right.
    spots
        Where structures begin in an input: half of the changes are made in the first bytes behind one of them.
    """
    source = rng.choice(golden)
    data = bytearray(source)
    places = spots(source)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        at = _place(rng, len(data), places)
        rng.choice(CHANGES)(rng, data, at, golden)
    return data


def _place(rng: random.Random, length: int, places: Sequence[int]) -> int:
    if places and rng.random() < 0.6:
        return min(rng.choice(places) + rng.randrange(rng.choice((32, 128, 200, 400))), length)
    return rng.randrange(length + 1)


def _flip(rng: random.Random, data: bytearray, at: int, golden: Sequence[bytes]) -> None:
    for _ in range(rng.choice((1, 1, 2, 8))):
        if at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        at += rng.randrange(4)


def _number(rng: random.Random, data: bytearray, at: int, golden: Sequence[bytes]) -> None:
    width = rng.choice(WIDTHS)
    if rng.random() < 0.7:
        at = at // width * width  # fields are aligned, records are not
    if at + width > len(data):
        return
    old = int.from_bytes(data[at : at + width], "little")
    value = rng.choice((rng.choice(NUMBERS), old + rng.choice((-1, 1, PAGE, -PAGE)), old * 2, old // 2))
    data[at : at + width] = (value % (1 << 8 * width)).to_bytes(width, "little")


def _byte(rng: random.Random, data: bytearray, at: int, golden: Sequence[bytes]) -> None:
    if at < len(data):
        data[at] = rng.randrange(256)


def _varint(rng: random.Random, data: bytearray, at: int, golden: Sequence[bytes]) -> None:
    """A number of any length in the records' own encoding, also too long a one."""
    value = rng.choice(NUMBERS) % 2**64
    raw = bytearray()
    while value >= 0x80:
        raw.append(value & 0x7F | 0x80)
        value >>= 7
    raw.append(value)
    if rng.random() < 0.3:
        raw[-1] |= 0x80
        raw += b"\x80" * rng.randrange(4) + b"\0"
    data[at : at + rng.choice((1, len(raw)))] = raw


def _zero(rng: random.Random, data: bytearray, at: int, golden: Sequence[bytes]) -> None:
    length = min(_length(rng), len(data) - at)
    data[at : at + length] = bytes(length) if rng.random() < 0.7 else b"\xff" * length


def _cut(rng: random.Random, data: bytearray, at: int, golden: Sequence[bytes]) -> None:
    if rng.random() < 0.5:
        at = at // PAGE * PAGE
    del data[at:]


def _remove(rng: random.Random, data: bytearray, at: int, golden: Sequence[bytes]) -> None:
    del data[at : at + _length(rng)]


def _extend(rng: random.Random, data: bytearray, at: int, golden: Sequence[bytes]) -> None:
    length = rng.choice((1, 7, PAGE, rng.randrange(EXTEND_MAX)))
    data += bytes(length) if rng.random() < 0.5 else rng.randbytes(length)


def _duplicate(rng: random.Random, data: bytearray, at: int, golden: Sequence[bytes]) -> None:
    """Copy a part of the input over another part, or in between."""
    if len(data) >= 2 * PAGE and rng.random() < 0.7:
        at = at // PAGE * PAGE
        start = rng.randrange(len(data) // PAGE) * PAGE
        length = PAGE * rng.choice((1, 1, 2, 4))
    else:
        start, length = rng.randrange(len(data) + 1), _length(rng)
    part = data[start : start + length]
    data[at : at + (len(part) if rng.random() < 0.7 else 0)] = part


def _splice(rng: random.Random, data: bytearray, at: int, golden: Sequence[bytes]) -> None:
    """Part of another input in place of ours: at the same position, or anywhere."""
    other = rng.choice(golden)
    start = at if rng.random() < 0.7 else rng.randrange(len(other) + 1)
    if rng.random() < 0.5 and len(data) >= PAGE:
        at, start = at // PAGE * PAGE, start // PAGE * PAGE
    length = rng.choice((len(other), PAGE, 8, _length(rng)))
    data[at : at + length] = other[start : start + length]


def _length(rng: random.Random) -> int:
    return rng.choice((1, 2, 8, 16, 112, rng.randrange(600), PAGE))


CHANGES = (_flip, _flip, _number, _number, _number, _byte, _varint, _zero, _cut, _remove, _extend, _duplicate, _splice)


def page_starts(data: bytes | bytearray) -> list[int]:
    """Pages that begin like something of ours."""
    return [at for at in range(0, len(data), PAGE) if data[at : at + 3] == b"AKV"]


def repair(data: bytearray, rng: random.Random, seed: int) -> None:
    """Make the checksum of every fixed page and chunk right; some chunks are moved to where they are, too.

    Parameters
    ----------
    data
        Bytes of a superblock, a segment, a snapshot or a single chunk, changed in place.
    rng
        Decides which chunks are moved.
    seed
        Of the chunk checksums.
    """
    for at in page_starts(data):
        magic = bytes(data[at : at + 8])
        if magic == b"AKVCHUNK":
            _repair_chunk(data, at, rng, seed)
        elif magic == b"AKVSUPER":
            for start in (at, at + 2048):
                _seal(data, start, 2048)
        elif magic == b"AKVSNAPS":
            segments = int.from_bytes(data[at + 112 : at + 120], "little")
            size = SnapshotHead.head_bytes(segments)
            _seal(data, at, size if size <= len(data) - at else PAGE)
        else:
            _seal(data, at, PAGE)


def _seal(data: bytearray, at: int, length: int) -> None:
    if at + 16 <= len(data):
        data[at + 8 : at + 16] = xxh3_64_intdigest(data[at + 16 : at + length]).to_bytes(8, "little")


def _repair_chunk(data: bytearray, at: int, rng: random.Random, seed: int) -> None:
    body = int.from_bytes(data[at + 32 : at + 36], "little")
    if at + HEADER_BYTES + body > len(data):
        return
    if rng.random() < 0.3:
        data[at + 56 : at + 64] = at.to_bytes(8, "little")
    offset = int.from_bytes(data[at + 56 : at + 64], "little")
    digest = xxh3_64_intdigest(data[at + 16 : at + HEADER_BYTES + body], seed=chunk_seed(seed, offset, data[at + 18]))
    data[at + 8 : at + 16] = digest.to_bytes(8, "little")
