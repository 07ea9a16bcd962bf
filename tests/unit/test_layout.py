"""The fixed pages: what is written is read, and what makes no sense is refused although its checksum is right."""

from __future__ import annotations

import dataclasses
import random
import struct

import pytest
from xxhash import xxh3_64_intdigest

from asynckv.tiers.layout import (
    LOG_START,
    NAMED_MAX,
    PAGE,
    Seal,
    SegmentHeader,
    SnapshotHead,
    decode_superblock,
    encode_superblock,
    parse_segment_name,
    segment_name,
)

STORE = bytes(range(16))
NAMESPACE = bytes(range(100, 132))
HEADER = {
    "store_id": STORE,
    "namespace": NAMESPACE,
    "number": 9,
    "oldest_live": 3,
    "sequence": 40,
    "size": 65536,
    "sealed_upto": 8,
    "previous": 7,
}
SEAL = {
    "store_id": STORE,
    "namespace": NAMESPACE,
    "number": 9,
    "oldest_live": 3,
    "sequence": 40,
    "size": 65536,
    "offset": 10 * PAGE,
    "data_end": 8 * PAGE,
    "durable": 7 * PAGE,
    "footer": 9 * PAGE,
    "footer_bytes": PAGE,
    "batches": 2,
    "last_sequence": 41,
    "records": 5,
    "previous": 7,
    "previous_good": 1,
    "next": 10,
}
HEAD = SnapshotHead(STORE, NAMESPACE, 12, 50, 5, 1, 262144, ((8, 65536), (9, 45056)))


def of_version(data: bytes, version: int, length: int = PAGE) -> bytes:
    """The same page as another version would have written it."""
    page = bytearray(data)
    for start in range(0, len(page), length):
        struct.pack_into("<H", page, start + 16, version)
        struct.pack_into("<Q", page, start + 8, xxh3_64_intdigest(page[start + 16 : start + length]))
    return bytes(page)


def test_what_is_written_is_read():
    for lossy in (False, True):
        seal = Seal(**SEAL, lossy=lossy)
        assert Seal.decode(seal.encode(), seal.offset) == seal
    assert SegmentHeader.decode(SegmentHeader(**HEADER).encode()) == SegmentHeader(**HEADER)
    assert SnapshotHead.decode(HEAD.encode()) == HEAD
    assert decode_superblock(encode_superblock(STORE)) == STORE


@pytest.mark.parametrize("version", [0, 2, 258])
def test_a_page_of_another_version_is_refused(version):
    assert SegmentHeader.decode(of_version(SegmentHeader(**HEADER).encode(), version)) is None
    assert Seal.decode(of_version(Seal(**SEAL).encode(), version), SEAL["offset"]) is None
    assert SnapshotHead.decode(of_version(HEAD.encode(), version)) is None
    assert decode_superblock(of_version(encode_superblock(STORE), version, 2048)) is None


@pytest.mark.parametrize("damaged", [0, 8, 17, 30, 2047])
def test_either_copy_of_the_superblock_is_enough(damaged):
    data = bytearray(encode_superblock(STORE))
    data[damaged] ^= 1
    assert decode_superblock(bytes(data)) == STORE
    data[2048 + 30] ^= 1
    assert decode_superblock(bytes(data)) is None
    data[damaged] ^= 1
    assert decode_superblock(bytes(data)) == STORE
    assert decode_superblock(bytes(data[:2048])) == STORE
    assert decode_superblock(bytes(data[:100])) is None


@pytest.mark.parametrize(
    "change",
    [
        {"number": NAMED_MAX + 1},
        {"previous": 9},
        {"previous": 2**63},
        {"oldest_live": 10},
        {"sealed_upto": 10},
        {"sequence": 2**62},
    ],
)
def test_a_header_that_contradicts_itself_is_refused(change):
    assert SegmentHeader.decode(SegmentHeader(**{**HEADER, **change}).encode()) is None


@pytest.mark.parametrize(
    "change",
    [
        {"number": NAMED_MAX + 1},
        {"previous": 9},
        {"next": 9},
        {"next": 8},
        {"next": 2**64 - 2**48},
        {"oldest_live": 10},
        {"sequence": 2**64 - 1},
        {"last_sequence": 2**62},
        {"offset": 11 * PAGE},
        {"data_end": LOG_START - 1},
        {"data_end": 11 * PAGE},
        {"footer": 7 * PAGE},
        {"footer": 10 * PAGE},
        {"footer_bytes": 2 * PAGE},
        {"footer_bytes": 2**64 - PAGE},
    ],
)
def test_a_seal_that_contradicts_itself_is_refused(change):
    assert Seal.decode(Seal(**{**SEAL, **change}).encode(), SEAL["offset"]) is None


@pytest.mark.parametrize(
    "change",
    [
        {"next_number": 9},
        {"next_number": NAMED_MAX + 1},
        {"next_number": 2**64 - 1},
        {"sequence": 2**62},
        {"segments": ((8, 65536), (2**40, 45056))},
    ],
)
def test_a_snapshot_that_would_use_the_numbers_up_or_contradicts_itself_is_refused(change):
    assert SnapshotHead.decode(dataclasses.replace(HEAD, **change).encode()) is None


def test_pages_cut_short_are_refused():
    for length in (0, 7, 16, 23, 24, 100, PAGE - 1):
        assert SegmentHeader.decode(SegmentHeader(**HEADER).encode()[:length]) is None
        assert Seal.decode(Seal(**SEAL).encode()[:length], SEAL["offset"]) is None
        assert SnapshotHead.decode(HEAD.encode()[:length]) is None
    many = SnapshotHead(STORE, NAMESPACE, 700, 50, 5, 1, 262144, tuple((n, 65536) for n in range(600)))
    assert SnapshotHead.decode(many.encode()) == many
    assert SnapshotHead.decode(many.encode()[:-PAGE]) is None


def test_names_of_segments():
    rng = random.Random(4)
    for number in (0, 1, 10**16 - 1, *(rng.randrange(10**16) for _ in range(20))):
        assert parse_segment_name(segment_name(number)) == number
    wrong = ["", "1.seg", "0000000000000001.seg.bak", "0000000000000001.seg\n", "x000000000000001.seg", "spare"]
    wrong += ["00000000000000001.seg", "-000000000000001.seg", "٠٠٠٠٠٠٠٠٠٠٠٠٠٠٠١.seg"]
    assert [parse_segment_name(name) for name in wrong] == [None] * len(wrong)
