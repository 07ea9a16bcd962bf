"""The record format: what is written is read back, and anything else is None without harm."""

from __future__ import annotations

import itertools
import random
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from asynckv import _record as rec

SEED = 0x1234_5678_9ABC_DEF0
DESC = b"\x01\x03<f2\x01\x08"

keys = st.one_of(
    st.integers(-(2**63), 2**63 - 1).map(lambda n: (0, n.to_bytes(8, "little", signed=True))),
    st.binary(min_size=1, max_size=60).map(lambda b: (1, b)),
    st.text(min_size=1, max_size=20).map(lambda t: (2, t.encode("utf-8", "surrogatepass")[:60] or b"x")),
)
blocks = st.tuples(
    keys,
    st.binary(min_size=1, max_size=255),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**64 - 1),
)


class Item:
    """What a spill looks like to the batch writer."""

    def __init__(
        self, key: bytes, data: bytes, *, kind: int = 1, desc: bytes = DESC, sealed: int | None = None
    ) -> None:
        self.kind, self.key, self.desc = kind, key, desc
        self.stored = len(data)
        self.sealed_checksum = sealed
        whole = len(data) if len(data) < 32768 else -(-len(data) // 4096) * 4096
        self.view = memoryview(data.ljust(whole, b"\0"))


def chunk_of(writer: rec.RecordWriter, offset: int = 8192, kind: int = rec.KIND_BATCH) -> bytes:
    return writer.to_bytes(kind, SEED, offset)


def parse(data: bytes, offset: int = 8192, kind: int = rec.KIND_BATCH, **limits: int) -> rec.Records | None:
    header = rec.read_chunk(data, 0, kind, SEED, offset)
    return None if header is None else rec.parse_body(data, 0, header, **limits)


@settings(max_examples=200, deadline=None)
@given(st.lists(blocks, max_size=30), st.lists(keys, max_size=10), st.booleans())
def test_what_is_written_is_read(items, removed, clear):
    writer = rec.RecordWriter()
    if clear:
        writer.add_clear()
    removed = [(kind, key) for kind, key in removed if kind != 2 or _is_utf8(key)]
    items = [item for item in items if item[0][0] != 2 or _is_utf8(item[0][1])]
    for kind, key in removed:
        writer.add_tombstone(kind, key)
    expected = [(rec.CLEAR, 0, b"", None, 0, 0, 0, 0)] * clear
    expected += [(rec.TOMBSTONE, kind, key, None, 0, 0, 0, 0) for kind, key in removed]
    for (kind, key), desc, offset, stored, checksum in items:
        stored = min(stored, 2**32 - 1 - offset)
        writer.add_block(kind, key, desc, offset, stored, checksum)
        expected.append((rec.BLOCK, kind, key, desc, offset, stored, checksum, 0))
    records = parse(chunk_of(writer))
    assert records is not None
    assert [records.get(i) for i in range(len(records))] == expected
    again = rec.RecordWriter()
    again.add_records(records)
    copy = parse(chunk_of(again))
    assert copy is not None
    assert [copy.get(i) for i in range(len(copy))] == expected


def _is_utf8(key: bytes) -> bool:
    try:
        key.decode()
    except UnicodeDecodeError:
        return False
    return True


def sample() -> bytes:
    writer = rec.RecordWriter()
    writer.add_clear()
    for index in range(5):
        writer.add_tombstone(1, b"gone%d" % index)
        writer.add_block(0, struct.pack("<q", index), DESC, 4096 * index, 100 + index, index)
    return chunk_of(writer)


def test_every_flipped_bit_before_the_padding_is_caught():
    data = sample()
    used = rec.HEADER_BYTES + struct.unpack_from("<I", data, 32)[0]
    for position in range(used):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[position] ^= 1 << bit
            assert parse(bytes(flipped)) is None, (position, bit)


@pytest.mark.parametrize("length", [0, 1, 8, 111, 112, 4095])
def test_a_chunk_cut_short_is_none(length):
    assert parse(sample()[:length]) is None
    assert rec.chunk_bytes(sample()[:length], 0) in (0, 4096)


def test_a_chunk_is_bound_to_its_place_kind_and_seed():
    data = sample()
    assert rec.read_chunk(data, 0, rec.KIND_BATCH, SEED, 8192) is not None
    assert rec.read_chunk(data, 0, rec.KIND_BATCH, SEED, 4096) is None
    assert rec.read_chunk(data, 0, rec.KIND_FOOTER, SEED, 8192) is None
    assert rec.read_chunk(data, 0, rec.KIND_BATCH, SEED + 1, 8192) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (20, 2**32 - 1),
        (24, 2**32 - 1),
        (24, 12),
        (24, 10),
        (28, 2**32 - 4096),
        (28, 0),
        (28, 100),
        (32, 2**32 - 1),
        (32, 0),
    ],
)
def test_lying_lengths_allocate_nothing_and_are_none(field, value):
    """With a right checksum, too: the bytes may come from someone who knows the seed."""
    data = bytearray(sample())
    struct.pack_into("<I", data, field, value)
    body = struct.unpack_from("<I", data, 32)[0]
    if body <= 3900:
        seed = rec.chunk_seed(SEED, 8192, rec.KIND_BATCH)
        struct.pack_into("<Q", data, 8, xxh3_64_intdigest(bytes(data[16 : 112 + body]), seed=seed))
    assert parse(bytes(data)) is None


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 50), st.integers(0, 20), st.booleans())
def test_any_body_parses_or_is_none(body, n_records, n_descs, numbered):
    data = bytearray(4096)
    data[112 : 112 + len(body)] = body
    struct.pack_into(
        "<8sQHBxIIIIIQQQQQQ", data, 0, b"AKVCHUNK", 0, 1, 1, n_descs, n_records, 4096, len(body), 0, 0, 1, 8192, 0, 0, 0
    )
    digest = xxh3_64_intdigest(bytes(data[16 : 112 + len(body)]), seed=rec.chunk_seed(SEED, 8192, 1))
    struct.pack_into("<Q", data, 8, digest)
    records = parse(bytes(data), n_segments=3 if numbered else 0)
    if records is not None:
        for index in range(len(records)):
            kind, _, key, desc, offset, stored, _, segment = records.get(index)
            assert kind in (1, 2, 3)
            assert len(key) <= 1024
            assert offset + stored < 2**32
            assert segment < 3
            assert kind != 1 or desc in records.descs


def test_payloads_outside_their_batch_are_refused():
    writer = rec.RecordWriter()
    writer.add_block(1, b"k", DESC, 8192, 100, 0)
    data = chunk_of(writer)
    assert parse(data, low=8192, high=8292) is not None
    assert parse(data, low=8193, high=9000) is None
    assert parse(data, low=8192, high=8291) is None


def test_a_str_key_that_is_no_utf8_is_refused():
    writer = rec.RecordWriter()
    writer.add_tombstone(2, b"\xff\xfe")
    assert parse(chunk_of(writer)) is None


@pytest.mark.parametrize(("kind", "key"), [(0, b"short"), (1, b""), (1, b"x" * 1025), (2, b""), (3, b"k"), (-1, b"k")])
def test_keys_that_no_record_can_hold(kind, key):
    with pytest.raises(ValueError):
        rec.RecordWriter().add_tombstone(kind, key)


@pytest.mark.parametrize("desc", [b"", b"x" * 256])
def test_descriptors_that_no_record_can_hold(desc):
    with pytest.raises(ValueError):
        rec.RecordWriter().add_block(1, b"k", desc, 0, 0, 0)


def test_a_discarded_record_is_left_out_of_a_copy():
    records = parse(sample())
    assert records is not None
    records.discard(2)
    writer = rec.RecordWriter()
    writer.add_records(records)
    assert writer.count == len(records) - 1
    with pytest.raises(IndexError):
        records.discard(11)
    with pytest.raises(IndexError):
        records.get(-1)


# -- batches -----------------------------------------------------------------------------------------------------------


def batch(items, tombstones=(), *, clear=False, position=4096, segment=1 << 20, body_sum=0, carries=()):
    items, tombstones, carries = list(items), list(tombstones), list(carries)
    plan = rec.plan_batch(items, carries, tombstones, clear, position, segment, body_sum)
    staging = bytearray(b"\xaa" * rec.staging_bytes(plan, items, carries))
    buffers, checksums, piece = rec.write_batch(
        plan, items, carries, tombstones, staging, SEED, sequence=7, oldest_live=2, synced=4096, good=0, sealed_upto=1
    )
    return plan, b"".join(buffers), checksums, piece


def test_a_batch_holds_header_payloads_and_trailer():
    rng = random.Random(1)
    items = [
        Item(b"key%d" % i, rng.randbytes(size))
        for i, size in enumerate([0, 1, 60, 4096, 5000, 32767, 32768, 40_000, 8192])
    ]
    plan, data, checksums, piece = batch(items, [(1, b"dead")], clear=True)
    assert len(data) == plan.batch_bytes
    assert plan.batch_bytes % 4096 == 0
    header = rec.read_chunk(data, 0, rec.KIND_BATCH, SEED, 4096)
    assert header is not None
    assert header.batch_bytes == len(data)
    assert (header.sequence, header.oldest_live, header.synced, header.sealed_upto) == (7, 2, 4096, 1)
    trailer = rec.read_trailer(data, len(data) - header.header_bytes, SEED, 4096 + len(data) - header.header_bytes)
    assert trailer is not None
    records = rec.parse_body(
        data, 0, header, 4096 + header.header_bytes, 4096 + header.header_bytes + header.payload_bytes
    )
    assert records is not None
    assert [records.get(i)[0] for i in range(len(records))] == [3, 2] + [1] * len(items)
    assert len(rec.parse_piece(piece)) == len(records)
    taken = []
    for (index, offset, stored, checksum), item, given_checksum in zip(
        records.locations(), items, checksums, strict=True
    ):
        at = offset - 4096
        assert data[at : at + stored] == bytes(item.view[: item.stored]), index
        assert checksum == given_checksum == xxh3_64_intdigest(bytes(item.view[: item.stored]))
        aligned = stored >= 32768 or (stored and stored % 4096 == 0)
        assert offset % (4096 if aligned else 16) == 0
        taken.append((at, at + stored))
    gaps = bytearray(data[header.header_bytes : -header.header_bytes])
    for begin, end in taken:
        gaps[begin - header.header_bytes : end - header.header_bytes] = bytes(end - begin)
    assert not any(gaps), "what lies between payloads is zero"
    taken.sort()
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(taken))


def test_large_payloads_are_written_from_where_they_lie():
    item = Item(b"k", bytes(range(256)) * 160)
    plan = rec.plan_batch([item], [], [], False, 4096, 1 << 20, 0)
    assert rec.staging_bytes(plan, [item], []) == 8192
    buffers, _, _ = rec.write_batch(
        plan, [item], [], [], bytearray(8192), SEED, sequence=1, oldest_live=0, synced=0, good=0, sealed_upto=0
    )
    assert any(buffer.obj is item.view.obj for buffer in buffers)


def test_a_sealed_checksum_is_used_instead_of_a_new_one():
    _, _, checksums, _ = batch([Item(b"k", b"data", sealed=99)])
    assert checksums == [99]


@pytest.mark.parametrize("count", [1, 50, 500])
@pytest.mark.parametrize("key_bytes", [8, 1024])
@pytest.mark.parametrize("size", [0, 60, 4096, 40_000])
def test_a_plan_leaves_room_for_footer_and_seal(count, key_bytes, size):
    items = [Item((b"%d" % i).rjust(key_bytes, b"."), bytes(size)) for i in range(count)]
    segment = 256 << 10
    position, body_sum, left = 4096, 0, items
    pieces = []
    while left:
        plan, data, _, piece = batch(left, position=position, segment=segment, body_sum=body_sum)
        if plan.empty:
            break
        assert plan.spills
        left = left[plan.spills :]
        position += len(data)
        body_sum += plan.body_bound
        pieces.append(piece)
    writer = rec.RecordWriter()
    for piece in pieces:
        writer.add_records(rec.parse_piece(piece))
    assert writer.body_bytes <= body_sum
    assert writer.chunk_bytes <= rec.footer_bound(body_sum)
    assert position + rec.footer_bound(body_sum) + 4096 <= segment
    if left:
        more = rec.plan_batch(left[:1], [], [], False, position, segment, body_sum)
        assert more.empty


def test_what_does_not_fit_is_left_in_order():
    items = [Item(b"k%d" % i, bytes(30_000)) for i in range(10)]
    plan = rec.plan_batch(items, [], [(1, b"t")] * 3, True, 4096, 128 << 10, 0)
    assert plan.clear
    assert plan.tombstones == 3
    assert 0 < plan.spills < 10
    tight = rec.plan_batch(items, [], [(1, b"t")], True, (128 << 10) - 4096, 128 << 10, 0)
    assert tight.empty


def test_the_span_of_a_read():
    assert rec.payload_span(60, True) == 60
    assert rec.payload_span(4096, False) == 4096
    assert rec.payload_span(40_000, True) == 40_960
    assert rec.payload_span(40_000, False) == 40_000
    assert rec.payload_span(0, True) == 0
