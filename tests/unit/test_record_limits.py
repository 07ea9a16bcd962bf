"""The record format, where a checksum is right and the bytes under it are not: each limit on its own."""

from __future__ import annotations

import itertools
import struct
from types import SimpleNamespace

import pytest
from xxhash import xxh3_64_intdigest

from asynckv import _record as rec
from asynckv._core import Table

SEED = 77
OFFSET = 8192
DESC = b"\0"
PAGE = rec.PAGE_BYTES


def chunk(body: bytes, n_descs: int, n_records: int, *, kind: int = rec.KIND_BATCH, version: int = 1) -> bytes:
    """A chunk with a right checksum over any body."""
    whole = -(-(rec.HEADER_BYTES + len(body)) // PAGE) * PAGE
    data = bytearray(whole)
    struct.pack_into("<8sQHBxIIII", data, 0, b"AKVCHUNK", 0, version, kind, n_descs, n_records, whole, len(body))
    struct.pack_into("<Q", data, 56, OFFSET)
    data[rec.HEADER_BYTES : rec.HEADER_BYTES + len(body)] = body
    return signed(data)


def signed(data: bytearray) -> bytes:
    body = struct.unpack_from("<I", data, 32)[0]
    offset = struct.unpack_from("<Q", data, 56)[0]
    digest = xxh3_64_intdigest(data[16 : rec.HEADER_BYTES + body], seed=rec.chunk_seed(SEED, offset, data[18]))
    struct.pack_into("<Q", data, 8, digest)
    return bytes(data)


def parsed(body: bytes, n_descs: int, n_records: int, **limits: int) -> rec.Records | None:
    data = chunk(body, n_descs, n_records)
    header = rec.read_chunk(data, 0, rec.KIND_BATCH, SEED, OFFSET)
    assert header is not None
    return rec.parse_body(data, 0, header, **limits)


def varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def block(key: bytes, desc: bytes = b"\0", offset: bytes = b"\0", stored: bytes = b"\0") -> bytes:
    """The record of a block under a bytes key."""
    return b"\x11" + varint(len(key)) + key + desc + offset + stored + bytes(8)


def test_a_record_at_its_limits_is_read():
    assert parsed(b"\x01\0" + block(b"k" * 1024, b"\0", varint(2**32 - 2), b"\1"), 1, 1) is not None


@pytest.mark.parametrize("length", [0, 1025, 3000])
def test_a_key_of_a_length_that_nobody_can_put(length):
    assert parsed(b"\x12" + varint(length) + b"k" * length, 0, 1) is None


@pytest.mark.parametrize("last", [b"\x02", b"\x7f", b"\x81\x00", b"\x80\x80\x00"])
def test_a_number_of_more_than_64_bits(last):
    """Its lower bits alone would be a length that is right."""
    number = b"\x81" + b"\x80" * 8 + last
    assert parsed(b"\x12\x01k", 0, 1) is not None
    assert parsed(b"\x12" + number + b"k", 0, 1) is None


def test_a_descriptor_that_ends_behind_the_body():
    assert parsed(b"\x03abc", 1, 0) is not None
    assert parsed(b"\x04abc", 1, 0) is None
    assert parsed(b"\x00abc", 1, 0) is None


def test_an_index_one_behind_the_descriptors():
    assert parsed(b"\x01\0" + block(b"k", b"\0"), 1, 1) is not None
    assert parsed(b"\x01\0" + block(b"k", b"\1"), 1, 1) is None


def test_an_index_one_behind_the_segments():
    body = b"\x01\0" + block(b"k")
    assert parsed(body + b"\2", 1, 1, n_segments=3) is not None
    assert parsed(body + b"\3", 1, 1, n_segments=3) is None


def test_bytes_behind_the_last_record():
    assert parsed(b"\x12\x01k", 0, 1) is not None
    assert parsed(b"\x12\x01k\0", 0, 1) is None


def test_a_chunk_of_another_version():
    assert rec.read_chunk(chunk(b"", 0, 0), 0, rec.KIND_BATCH, SEED, OFFSET) is not None
    for version in (0, 2, 257):
        data = chunk(b"", 0, 0, version=version)
        assert rec.chunk_bytes(data, 0) == 0
        assert rec.read_chunk(data, 0, rec.KIND_BATCH, SEED, OFFSET) is None


@pytest.mark.parametrize("kind", [rec.KIND_BATCH, rec.KIND_TRAILER, rec.KIND_FOOTER, rec.KIND_SNAPSHOT, rec.KIND_CLAIM])
def test_a_torn_chunk_of_any_kind(kind):
    data = bytearray(chunk(b"", 0, 0, kind=kind))
    assert rec.read_chunk(data, 0, kind, SEED, OFFSET) is not None
    data[72] ^= 1
    assert rec.read_chunk(data, 0, kind, SEED, OFFSET) is None


def test_lengths_that_no_chunk_has():
    data = bytearray(chunk(b"", 0, 0))
    for whole, body in ((0, 0), (PAGE - 1, 0), (rec.CHUNK_MAX + PAGE, 0), (2**32 - PAGE, 0), (PAGE, PAGE - 111)):
        struct.pack_into("<II", data, 28, whole, body)
        assert rec.chunk_bytes(data, 0) == 0, (whole, body)
    struct.pack_into("<II", data, 28, rec.CHUNK_MAX, rec.CHUNK_MAX - 112)
    assert rec.chunk_bytes(data, 0) == rec.CHUNK_MAX


def test_a_trailer_counts_only_behind_its_batch():
    writer = rec.RecordWriter()
    writer.add_tombstone(1, b"k")
    data = writer.to_bytes(rec.KIND_TRAILER, SEED, OFFSET, payload_bytes=2 * PAGE)
    assert rec.read_trailer(data, 0, SEED, OFFSET + 3 * PAGE).offset == OFFSET
    for place in (0, OFFSET, OFFSET + PAGE, OFFSET + 2 * PAGE, OFFSET + 4 * PAGE):
        assert rec.read_trailer(data, 0, SEED, place) is None


def test_the_newest_record_of_a_key_is_final_when_nobody_can_rebuild_it():
    """An older value of it must not show instead."""
    writer = rec.RecordWriter()
    writer.add_block(1, b"k", DESC, 8192, 10, 1)
    writer.add_block(1, b"k", b"\x01\x05<f999\x00", 8208, 10, 2)
    writer.add_block(1, b"other", DESC, 8224, 10, 3)
    data = writer.to_bytes(rec.KIND_BATCH, SEED, OFFSET)
    records = rec.parse_body(data, 0, rec.read_chunk(data, 0, rec.KIND_BATCH, SEED, OFFSET))
    table = Table(1 << 16)
    table.recovering = True
    assert rec.apply_records(table, records, 0) == (1, False)
    table.recovering = False
    assert table.keys() == [b"other"]
    table.check()
    table.close()


@pytest.mark.parametrize("length", [1, 3900, 3984, 3985, 4090, 8000, 70_000, 131_000])
def test_the_bound_of_a_footer_holds_for_one_chunk(length):
    writer = rec.RecordWriter()
    while writer.body_bytes < length:
        writer.add_tombstone(1, b"k" * min(1000, max(1, length - writer.body_bytes - 3)))
    assert writer.chunk_bytes <= rec.footer_bound(writer.body_bytes)


@pytest.mark.parametrize("sizes", [(1, 17, 40), (100, 4097, 5000), (33_000,), (3, 32_769, 40_000, 5)])
def test_nothing_that_was_in_the_staging_buffer_goes_to_disk(sizes):
    items = [
        SimpleNamespace(
            kind=1, key=b"k%d" % n, desc=DESC, stored=size, sealed_checksum=None, view=memoryview(b"\x11" * size)
        )
        for n, size in enumerate(sizes)
    ]
    plan = rec.plan_batch(items, [], [], False, OFFSET, 1 << 20, 0)
    assert plan.spills == len(sizes)
    staging = memoryview(bytearray(b"\xee" * rec.staging_bytes(plan, items, [])))
    buffers, _, _ = rec.write_batch(
        plan, items, [], [], staging, SEED, sequence=1, oldest_live=0, synced=0, good=0, sealed_upto=0
    )
    written = b"".join(map(bytes, buffers))
    payload = written[plan.header_bytes : plan.header_bytes + plan.payload_bytes]
    assert sorted(set(payload)) == [0, 0x11]
    assert payload.count(0x11) == sum(sizes)
    ends = [offset + size for offset, size in zip(plan.offsets, sizes, strict=True)]
    assert max(ends) <= OFFSET + plan.header_bytes + plan.payload_bytes
    spans = sorted(zip(plan.offsets, ends, strict=True))
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))


# -- writing -------------------------------------------------------------------------------------------------------


def item(key: bytes, stored: int, view: bytes | None = None, **more: int | None) -> SimpleNamespace:
    """What a spill or a carried block looks like to the batch writer."""
    data = b"\x11" * stored if view is None else view
    return SimpleNamespace(kind=1, key=key, desc=DESC, stored=stored, view=memoryview(data), **more)


def write(plan: rec.BatchPlan, spills: list, carries: list, staging: bytearray) -> tuple:
    return rec.write_batch(
        plan, spills, carries, [], staging, SEED, sequence=1, oldest_live=0, synced=0, good=0, sealed_upto=0
    )


def test_a_batch_ends_where_its_body_is_full():
    tombstones = [(1, b"%04d" % n + b"k" * 1020) for n in range(1100)]
    plan = rec.plan_batch([item(b"k", 10)], [], tombstones, True, OFFSET, 64 << 20, 0)
    assert plan.clear
    assert 1000 < plan.tombstones < 1100
    assert plan.body_bound <= rec.BODY_MAX
    assert plan.spills == 0, "what is left over goes first the next time"


def test_a_clear_that_does_not_fit_keeps_everything_behind_it_out():
    plan = rec.plan_batch([item(b"k", 10)], [item(b"c", 10)], [(1, b"t")], True, OFFSET, OFFSET + 2 * PAGE, 0)
    assert plan.empty
    assert (plan.clear, plan.tombstones, plan.spills, plan.carries) == (False, 0, 0, 0)


def test_carried_blocks_come_behind_the_spills_with_the_checksum_they_have():
    spills, carries = [item(b"s", 100, sealed_checksum=None)], [item(b"c", 200, checksum=5), item(b"d", 0, checksum=6)]
    plan = rec.plan_batch(spills, carries, [], False, OFFSET, 1 << 20, 0)
    assert (plan.spills, plan.carries) == (1, 2)
    _, checksums, piece = write(plan, spills, carries, bytearray(rec.staging_bytes(plan, spills, carries)))
    assert checksums == [xxh3_64_intdigest(b"\x11" * 100), 5, 6]
    records = rec.parse_piece(piece)
    assert [records.get(n)[2] for n in range(3)] == [b"s", b"c", b"d"]


def test_copied_pages_and_pages_that_lie_ready_keep_their_order():
    spills = [
        item(b"%d" % n, size, bytes([n + 1]) * length, sealed_checksum=None)
        for n, (size, length) in enumerate([(33_000, 33_000), (40_000, 40_960), (8192, 8192), (50_000, 53_248)])
    ]
    plan = rec.plan_batch(spills, [], [], False, OFFSET, 1 << 20, 0)
    buffers, _, _ = write(plan, spills, [], bytearray(b"\xee" * rec.staging_bytes(plan, spills, [])))
    written = b"".join(map(bytes, buffers))
    for n, (offset, spill) in enumerate(zip(plan.offsets, spills, strict=True)):
        at = offset - OFFSET
        assert written[at : at + spill.stored] == bytes([n + 1]) * spill.stored


def test_a_batch_of_many_blocks():
    spills = [item(b"%d" % n, 20, b"%020d" % n, sealed_checksum=None) for n in range(700)]
    plan = rec.plan_batch(spills, [], [], False, OFFSET, 1 << 20, 0)
    assert plan.spills == 700
    buffers, checksums, _ = write(plan, spills, [], bytearray(rec.staging_bytes(plan, spills, [])))
    assert checksums == [xxh3_64_intdigest(b"%020d" % n) for n in range(700)]
    written = b"".join(map(bytes, buffers))
    assert written[plan.offsets[699] - OFFSET :][:20] == b"%020d" % 699


@pytest.mark.parametrize("sizes", [(100,), (33_000,), (33_000, 8192)])
def test_a_staging_buffer_that_is_too_small_is_never_overrun(sizes):
    spills = [item(b"%d" % n, size, sealed_checksum=None) for n, size in enumerate(sizes)]
    plan = rec.plan_batch(spills, [], [], False, OFFSET, 1 << 20, 0)
    with pytest.raises(ValueError, match="staging"):
        write(plan, spills, [], bytearray(rec.staging_bytes(plan, spills, []) - 1))


@pytest.mark.parametrize("size", [100, 33_000])
def test_a_block_whose_bytes_are_shorter_than_it_says(size):
    spills = [item(b"k", size, bytes(size - 1), sealed_checksum=1)]
    plan = rec.plan_batch(spills, [], [], False, OFFSET, 1 << 20, 0)
    with pytest.raises(ValueError, match="shorter"):
        write(plan, spills, [], bytearray(1 << 20))


def test_a_chunk_is_written_where_it_fits_only():
    writer = rec.RecordWriter()
    writer.add_tombstone(1, b"k" * 1000)
    for header_bytes in (PAGE - 1, 0, rec.CHUNK_MAX + PAGE):
        with pytest.raises(ValueError, match="does not go"):
            writer.write_into(bytearray(2 * PAGE), 0, rec.KIND_BATCH, SEED, OFFSET, header_bytes=header_bytes)
    for at in (-1, PAGE + 1):
        with pytest.raises(ValueError, match="too small"):
            writer.write_into(bytearray(2 * PAGE), at, rec.KIND_BATCH, SEED, OFFSET, header_bytes=PAGE)
    for _ in range(4):
        writer.add_tombstone(1, b"k" * 1000)
    with pytest.raises(ValueError, match="does not go"):
        writer.write_into(bytearray(2 * PAGE), 0, rec.KIND_BATCH, SEED, OFFSET, header_bytes=PAGE)


def test_what_is_no_piece_of_a_batch():
    data = chunk(b"\x12\x01k", 0, 1)
    assert len(rec.parse_piece(data[: 112 + 3])) == 1
    for piece in (b"", data[:111], data[: 112 + 2], chunk(b"\x12\x01k\0", 0, 1)[: 112 + 4]):
        with pytest.raises(ValueError, match="piece"):
            rec.parse_piece(piece)
    header = rec.read_chunk(data, 0, rec.KIND_BATCH, SEED, OFFSET)
    assert rec.parse_body(data[:114], 0, header) is None
    assert rec.parse_body(data, -1, header) is None


def test_a_snapshot_lists_the_blocks_of_its_segments_in_chunks():
    table = Table(1 << 16)
    desc = table.intern(DESC)
    for n in range(3000):
        assert table.recover_block(1, b"%04d" % n + b"k" * 100, n % 3, OFFSET, 16, n, desc)
    listed, cursor, chunks = [], 0, 0
    while cursor is not None:
        writer, cursor = rec.write_disk_entries(table, cursor, {0: 1, 2: 0})
        chunks += 1
        data = writer.to_bytes(rec.KIND_SNAPSHOT, SEED, OFFSET)
        header = rec.read_chunk(data, 0, rec.KIND_SNAPSHOT, SEED, OFFSET)
        records = rec.parse_body(data, 0, header, n_segments=2)
        listed += [records.get(index) for index in range(len(records))]
    assert chunks == 2
    wanted = {(b"%04d" % n + b"k" * 100, n, 1 if n % 3 == 0 else 0) for n in range(3000) if n % 3 != 1}
    assert {(each[2], each[6], each[7]) for each in listed} == wanted
    assert len(listed) == 2000
    table.release_desc(desc)
    table.close()
