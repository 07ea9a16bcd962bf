"""Fixed pages, the scanner, and the account of segment files."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import logging
import random
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asynckv import _record as rec
from asynckv.backends import ThreadsBackend
from asynckv.clock import MonotonicClock
from asynckv.errors import DiskError
from asynckv.testing.tools import turns
from asynckv.tiers import layout
from asynckv.tiers.layout import CLAIM_AT, LOG_START, PAGE, Seal, SegmentHeader, SnapshotHead
from asynckv.tiers.scan import scan_segment, verify_batch
from asynckv.tiers.segment import Segment, SegmentSet

STORE, SPACE = b"S" * 16, b"N" * 32
SEED = layout.segment_seed(STORE, SPACE, 3)
HEADER = SegmentHeader(STORE, SPACE, number=3, oldest_live=1, sequence=10, size=1 << 20, sealed_upto=2, previous=2)
SEAL = Seal(
    STORE,
    SPACE,
    number=3,
    oldest_live=1,
    sequence=10,
    size=1 << 20,
    offset=5 * PAGE,
    data_end=4 * PAGE,
    durable=3 * PAGE,
    footer=4 * PAGE,
    footer_bytes=PAGE,
    batches=2,
    last_sequence=11,
    records=9,
    previous=2,
    previous_good=4,
    next=5,
    lossy=True,
)
HEAD = SnapshotHead(STORE, SPACE, 9, 100, 5, 1, 1 << 18, ((3, 4096), (4, 8192)))


def test_pages_come_back_as_written():
    assert SegmentHeader.decode(HEADER.encode()) == HEADER
    assert Seal.decode(SEAL.encode(), 5 * PAGE) == SEAL
    assert Seal.decode(dataclasses.replace(SEAL, lossy=False).encode(), 5 * PAGE) != SEAL
    assert SnapshotHead.decode(HEAD.encode()) == HEAD
    assert layout.decode_superblock(layout.encode_superblock(STORE)) == STORE
    assert {len(HEADER.encode()), len(SEAL.encode()), len(layout.encode_superblock(STORE))} == {PAGE}


@pytest.mark.parametrize(
    ("page", "decode"),
    [
        (HEADER.encode(), SegmentHeader.decode),
        (SEAL.encode(), lambda data: Seal.decode(data, 5 * PAGE)),
        (HEAD.encode(), SnapshotHead.decode),
    ],
    ids=["header", "seal", "snapshot"],
)
def test_any_change_of_a_page_is_caught(page, decode):
    for position in [*range(400), *range(400, PAGE, 37)]:
        data = bytearray(page)
        data[position] ^= 0x10
        assert decode(bytes(data)) is None, position
    for length in (0, 1, 100, PAGE - 1):
        assert decode(page[:length]) is None
    assert decode(bytes(PAGE)) is None


def test_one_copy_of_the_superblock_is_enough():
    page = layout.encode_superblock(STORE)
    assert layout.decode_superblock(bytes(2048) + page[2048:]) == STORE
    assert layout.decode_superblock(page[:2048]) == STORE
    assert layout.decode_superblock(bytes(PAGE)) is None


def test_a_seal_belongs_to_its_place():
    assert Seal.decode(SEAL.encode(), 6 * PAGE) is None


@pytest.mark.parametrize(
    "name", ["1.seg", "0000000000000001.seg.tmp", "000000000000000a.seg", "0000000000000001.sig", "spare"]
)
def test_other_names_are_no_segments(name):
    assert layout.parse_segment_name(name) is None
    assert layout.parse_segment_name(layout.segment_name(17)) == 17


# -- the scanner -------------------------------------------------------------------------------------------------------


class Item:
    def __init__(self, key: bytes, data: bytes) -> None:
        self.kind, self.key, self.desc, self.stored = 1, key, b"\0", len(data)
        self.sealed_checksum = None
        self.view = memoryview(data)


def build(
    batches: int = 4, *, size: int = 256 << 10, holes: tuple[int, ...] = (), claims: bool = True
) -> tuple[bytearray, list]:
    """A segment's bytes, and the plans of its batches."""
    rng = random.Random(5)
    image = bytearray(size)
    image[:PAGE] = HEADER.encode()
    position, body_sum, plans = LOG_START, 0, []
    for number in range(batches):
        items = [Item(b"k%d-%d" % (number, i), rng.randbytes(rng.choice([40, 4096, 9000]))) for i in range(3)]
        plan = rec.plan_batch(items, [], [], False, position, size, body_sum)
        good = sum(1 for each in range(number) if each not in holes)
        buffers, _, _ = rec.write_batch(
            plan,
            items,
            [],
            [],
            bytearray(rec.staging_bytes(plan, items, [])),
            SEED,
            sequence=10 + number,
            oldest_live=1,
            synced=position if claims else LOG_START,
            good=good if claims else 0,
            sealed_upto=2,
            previous=2,
            previous_good=0,
        )
        if number not in holes:
            data = b"".join(buffers)
            image[position : position + len(data)] = data
        plans.append(plan)
        position += plan.batch_bytes
        body_sum += plan.body_bound
    return image, plans


def run(image, generator):
    asked = []
    try:
        want = next(generator)
        while True:
            offset, length = want
            assert offset % PAGE == 0
            assert length % PAGE == 0
            assert 0 < length <= rec.CHUNK_MAX
            assert offset + length <= len(image)
            asked.append(want)
            want = generator.send(memoryview(bytes(image[offset : offset + length])))
    except StopIteration as end:
        return end.value, asked


def test_a_whole_segment_is_found_in_order():
    image, plans = build()
    scan, asked = run(image, scan_segment(len(image), SEED))
    assert [found.offset for found in scan.batches] == [plan.position for plan in plans]
    assert scan.cut(10) is None
    assert sum(length for _, length in asked) <= 2 * len(image)
    for found in scan.batches:
        assert run(image, verify_batch(found))[0] == []


@pytest.mark.parametrize("lost", [0, 1, 2, 3])
@pytest.mark.parametrize("copy", ["header", "trailer"])
def test_either_copy_of_a_header_is_enough(lost, copy):
    image, plans = build()
    plan = plans[lost]
    at = plan.position if copy == "header" else plan.position + plan.batch_bytes - plan.header_bytes
    image[at : at + plan.header_bytes] = bytes(plan.header_bytes)
    scan, _ = run(image, scan_segment(len(image), SEED))
    assert [found.offset for found in scan.batches] == [plan.position for plan in plans]
    assert [found.repaired for found in scan.batches] == [copy == "header" and i == lost for i in range(4)]
    assert scan.cut(10) is None


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_durable_batch_that_is_gone_cuts_what_is_older(lost):
    image, plans = build()
    plan = plans[lost]
    image[plan.position : plan.position + plan.batch_bytes] = bytes(plan.batch_bytes)
    scan, _ = run(image, scan_segment(len(image), SEED))
    assert len(scan.batches) == 3
    assert scan.cut(10) == lost


def test_the_newest_batch_may_be_missing():
    """It never was durable, as far as the others know."""
    image, plans = build()
    image[plans[3].position :] = bytes(len(image) - plans[3].position)
    scan, _ = run(image, scan_segment(len(image), SEED))
    assert len(scan.batches) == 3
    assert scan.cut(10) is None
    assert scan.cut(10, expected=4, last_sequence=13) == 3
    assert scan.cut(10, expected=4) == 3


@pytest.mark.parametrize("holes", [(1,), (0, 2), (0, 1, 2)])
def test_holes_of_failed_writes_are_no_loss(holes):
    image, _ = build(holes=holes)
    scan, _ = run(image, scan_segment(len(image), SEED))
    assert len(scan.batches) == 4 - len(holes)
    assert scan.cut(10) is None


def durable_below(scan):
    header = SegmentHeader(STORE, SPACE, 3, 0, 10, 1 << 20, 0, 0)
    return scan.known_durable(header, None, 0, ended=False)


def claim(image: bytearray, synced: int, good: int, *, seed: int = SEED) -> None:
    page = rec.RecordWriter().to_bytes(rec.KIND_CLAIM, seed, CLAIM_AT, sequence=10, synced=synced, good=good)
    image[CLAIM_AT:LOG_START] = page


def test_a_claim_tells_of_the_newest_batch():
    image, plans = build()
    end = plans[3].position + plans[3].batch_bytes
    claim(image, end, 4)
    scan, _ = run(image, scan_segment(len(image), SEED))
    assert (scan.claim, durable_below(scan), scan.cut(10)) == ((end, 4), end, None)
    image[plans[3].position : end] = bytes(plans[3].batch_bytes)
    scan, _ = run(image, scan_segment(len(image), SEED))
    assert len(scan.batches) == 3
    assert scan.cut(10) == 3, "what is gone is newer than all that was found"


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_claim_that_counts_a_hole_at_the_end_errs_to_the_safe_side(lost):
    image, plans = build(holes=(3,))
    claim(image, plans[3].position + plans[3].batch_bytes, 3)
    assert run(image, scan_segment(len(image), SEED))[0].cut(10) is None
    image[plans[lost].position : plans[lost].position + plans[lost].batch_bytes] = bytes(plans[lost].batch_bytes)
    assert run(image, scan_segment(len(image), SEED))[0].cut(10) == 2


def test_a_torn_or_foreign_claim_is_ignored():
    image, plans = build()
    for seed, spoil in ((SEED, True), (layout.segment_seed(STORE, SPACE, 4), False)):
        claim(image, len(image), 9, seed=seed)
        image[CLAIM_AT + 36] ^= spoil
        scan, _ = run(image, scan_segment(len(image), SEED))
        assert scan.claim == (plans[3].position, 3)
        assert scan.cut(10) is None


def test_more_batches_than_are_claimed_are_verified_from_the_first_that_may_have_failed():
    """One of them was reported as failed and reached the disk later, who knows how much of it."""
    image, plans = build()
    claim(image, plans[3].position + plans[3].batch_bytes, 3)
    scan, _ = run(image, scan_segment(len(image), SEED))
    assert len(scan.batches) == 4
    assert (durable_below(scan), scan.cut(10)) == (plans[3].position, None), "its own header counts those before it"
    for found in scan.batches:  # as if none had been composed after another one had ended
        found.header = SimpleNamespace(offset=found.offset, sequence=found.header.sequence, synced=LOG_START, good=0)
    assert (durable_below(scan), scan.cut(10)) == (LOG_START, None)


def test_bytes_of_an_earlier_life_never_verify():
    image, _ = build()
    for number in (2, 4):
        scan, _ = run(image, scan_segment(len(image), layout.segment_seed(STORE, SPACE, number)))
        assert scan.batches == []
    assert not run(image, scan_segment(len(image), layout.segment_seed(b"T" * 16, SPACE, 3)))[0].batches


def test_batches_do_not_verify_at_another_offset():
    image, _ = build()
    moved = image[:LOG_START] + bytes(PAGE) + image[LOG_START:]
    scan, _ = run(moved, scan_segment(len(moved), SEED))
    assert scan.batches == []


def test_damaged_payloads_are_told_one_by_one():
    image, _ = build()
    scan, _ = run(image, scan_segment(len(image), SEED))
    records = scan.batches[1].records()
    index, offset, stored, _ = records.locations()[2]
    image[offset + stored - 1] ^= 1
    assert run(image, verify_batch(scan.batches[1]))[0] == [index]


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 2**32), st.lists(st.tuples(st.integers(0, 255), st.integers(0, 63), st.integers(1, 40)), max_size=6)
)
def test_a_scan_of_anything_ends_and_finds_only_what_was_written(seed, damage):
    image, plans = build()
    rng = random.Random(seed)
    for value, page, length in damage:
        at = page * PAGE + rng.randrange(PAGE)
        image[at : at + length] = bytes([value]) * min(length, len(image) - at)
    size = rng.choice([len(image), rng.randrange(len(image))])
    scan, asked = run(image[:size], scan_segment(size, SEED))
    offsets = [plan.position for plan in plans]
    assert all(found.offset in offsets for found in scan.batches)
    assert sum(length for _, length in asked) <= 4 * len(image)


# -- the account -------------------------------------------------------------------------------------------------------


@pytest.fixture
async def backend(tmp_path):
    tmp_path.chmod(0o700)
    backend = ThreadsBackend(direct=False)
    await backend.start(tmp_path)
    yield backend
    await backend.close()


def make_set(backend, *, cap=1 << 20, segment=128 << 10) -> SegmentSet:
    return SegmentSet(
        backend,
        cap=cap,
        segment_bytes=segment,
        store_id=STORE,
        namespace=SPACE,
        clock=MonotonicClock(),
        log=logging.getLogger("asynckv"),
    )


async def test_a_new_segment_is_named_headed_and_charged(backend, tmp_path):
    segments = make_set(backend)
    one = await segments.create(7)
    two = await segments.create(9)
    assert [one.number, two.number] == [1, 2]
    assert segments.active is two
    assert sorted(path.name for path in tmp_path.iterdir()) == [one.name, two.name]
    header = SegmentHeader.decode((tmp_path / two.name).read_bytes()[:PAGE])
    assert header == two.header
    assert (header.previous, header.sequence, header.size) == (1, 9, 128 << 10)
    assert segments.used >= 256 << 10
    assert segments.charged == segments.used + 2 * PAGE
    await segments.close()


async def one_sealed_and_one_active(backend):
    segments = make_set(backend)
    one = await segments.create(1)
    one.sealed = True
    await segments.create(2)
    return segments, one


async def test_the_oldest_dies_into_the_spare_and_lives_again(backend, tmp_path):
    segments, one = await one_sealed_and_one_active(backend)
    assert segments.oldest() is one
    await segments.retire(one)
    assert segments.oldest_live == 2
    assert (tmp_path / "spare").exists()
    await segments.bury(one)
    assert segments.by_slot(one.slot) is None
    assert segments.spare is not None
    before = segments.used
    three = await segments.create(3)
    assert (segments.used, segments.spare) == (before, None)
    assert not (tmp_path / "spare").exists()
    assert three.header is not None
    assert three.header.oldest_live == 2
    await segments.close()


async def test_a_file_in_use_is_never_reused(backend, tmp_path):
    segments, one = await one_sealed_and_one_active(backend)
    one.hold()
    await segments.retire(one)
    used = segments.used
    backend.timeout = 0.05
    await segments.bury(one)
    backend.timeout = 30.0
    assert segments.spare is None
    assert not (tmp_path / "spare").exists()
    assert segments.used == used, "its bytes count while it is open"
    assert segments.by_slot(one.slot) is one
    one.release()
    for _ in range(50):
        await backend.list()
        if segments.by_slot(one.slot) is None:
            break
    assert segments.by_slot(one.slot) is None
    assert segments.used < used
    await segments.close()


async def test_a_file_that_is_used_again_in_the_moment_it_is_free_stays_open(backend, tmp_path):
    """A read that went wrong, and is tried once more by itself."""
    segments, one = await one_sealed_and_one_active(backend)
    one.hold()
    await segments.retire(one)
    burial = asyncio.create_task(segments.bury(one))
    await turns(3)
    assert one.idle is not None
    one.release()
    one.hold()
    await burial
    for _ in range(3):
        await backend.list()
        assert one.file is not None
        assert one.file.closing is None
        one.release()
        one.hold()
    assert segments.spare is None
    one.release()
    while segments.by_slot(one.slot) is not None:
        await backend.list()
    await segments.close()


async def test_a_file_whose_first_page_may_come_late_is_not_used(backend, tmp_path):
    segments = make_set(backend)
    write, late = backend.write, []

    def hang(file, offset, buffers, **named):
        late.append((file, offset, buffers))
        future = asyncio.get_running_loop().create_future()
        future.set_exception(TimeoutError(errno.ETIMEDOUT, "injected"))
        return future

    backend.write = hang
    with pytest.raises(TimeoutError):
        await segments.create(1)
    backend.write = write
    assert not (tmp_path / "spare").exists()
    assert segments.used == 0
    two = await segments.create(1)
    assert two.file is not late[0][0]
    with contextlib.suppress(OSError):  # it is closed here; an engine closes it after such a write
        await write(*late[0])
    assert SegmentHeader.decode((tmp_path / two.name).read_bytes()[:PAGE]) == two.header
    assert segments.charged == segments.used + PAGE
    await segments.close()


async def test_a_rename_that_comes_late_does_not_put_a_dead_segment_in_place_of_a_new_one(backend, tmp_path):
    """What is written to the new one would go to a file without a name."""
    segments, one = await one_sealed_and_one_active(backend)
    rename, stat = backend.rename, backend.stat

    def hang(source, target):
        future = asyncio.get_running_loop().create_future()
        future.set_exception(TimeoutError(errno.ETIMEDOUT, "injected"))
        return future

    async def stat_then_rename(name):
        found = await stat(name)
        if name == segments.spare_name:
            backend.stat = stat
            await rename(one.name, name)
        return found

    backend.rename = hang
    with pytest.raises(TimeoutError):
        await segments.retire(one)
    backend.rename, backend.stat = rename, stat_then_rename
    with pytest.raises(DiskError):
        await segments.create(3)
    assert backend.stat is stat, "the rename came"
    four = await segments.create(3)
    assert SegmentHeader.decode((tmp_path / four.name).read_bytes()[:PAGE]) == four.header
    await segments.close()


async def test_a_file_whose_sealing_failed_is_not_used_again(backend, tmp_path):
    """A truncation that is late would leave the next segment shorter than its header says, which means a loss."""
    segments = make_set(backend)
    one = await segments.create(1)
    await segments.create(2)
    await segments.retire(one)
    await segments.bury(one)
    assert (segments.spare, (tmp_path / "spare").exists()) == (None, False)
    await segments.close()


async def test_room_counts_everything(backend):
    segments = make_set(backend, cap=4 * (128 << 10))
    segments.overhead = 3 * PAGE
    count = 0
    while segments.has_room():
        await segments.create(1)
        count += 1
    assert count == 3
    assert segments.charged <= segments.cap
    await segments.close()


async def test_open_files_are_bounded(backend, tmp_path):
    segments = make_set(backend)
    for number in range(1, 101):
        (tmp_path / layout.segment_name(number)).write_bytes(bytes(PAGE))
        segments.add(Segment(number, PAGE, PAGE, header=None, own=True))
    for segment in segments:
        file = await segments.open_file(segment)
        assert file is await segments.open_file(segment)
    assert sum(segment.file is not None for segment in segments) <= 64
    await segments.close()
