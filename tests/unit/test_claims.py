"""What is durable: the claim of a segment and what its seal says, after a kill, a power loss, with damage."""

from __future__ import annotations

import pytest
from logkit import KIB, MIB, Disk, damage, fill, killed, segments_of, value_of, write_over

from asynckv.tiers import verify_directory
from asynckv.tiers.layout import CLAIM_AT, LOG_START, PAGE, SegmentHeader, segment_seed
from asynckv.tiers.scan import scan_segment


@pytest.fixture
def path(tmp_path):
    return tmp_path / "kv"


@pytest.mark.parametrize("place", [0, 2500, 4999])
async def test_a_damaged_newest_block_that_was_flushed_is_a_miss(path, tmp_path, place):
    async def work(disk):
        for version in range(3):
            await disk.put(1, value_of(1, version, 5000))
            await disk.put(2, value_of(2, version, 300))
            await disk.flush()

    crashed = await killed(path, tmp_path / "crashed", work)
    (segment,) = segments_of(crashed)
    damage(segment, segment.read_bytes().find(value_of(1, 2, 5000)) + place)
    for _ in range(2):
        async with Disk(crashed) as disk:
            assert await disk.get_all([1, 2]) == {2: value_of(2, 2, 300)}


async def test_a_newest_batch_that_was_flushed_and_is_gone_takes_what_is_older_with_it(path, tmp_path):
    async def work(disk):
        await fill(disk, range(3))
        await disk.delete(1)

    crashed = await killed(path, tmp_path / "crashed", work)
    (segment,) = segments_of(crashed)
    found = batches_of(segment)
    damage(segment, found[-1].offset, found[-1].end - found[-1].offset)
    async with Disk(crashed) as disk:
        assert await disk.get_all(range(3)) == {}
        assert disk.tier.damage


async def test_a_claim_that_a_power_loss_took_is_not_missed(path, tmp_path):
    async def work(disk):
        await fill(disk, range(5))
        await fill(disk, range(3), 1)

    crashed = await killed(path, tmp_path / "crashed", work)
    (segment,) = segments_of(crashed)
    damage(segment, CLAIM_AT, 200)
    async with Disk(crashed) as disk:
        assert await disk.get_all(range(5)) == {key: value_of(key, int(key < 3)) for key in range(5)}
        assert disk.tier.damage == 0


async def test_first_page_and_batches_gone_with_a_claim_left_is_a_loss(path, tmp_path):
    async def work(disk):
        await fill(disk, range(30), size=5000)
        await disk.delete(3)

    options = {"segment": 64 * KIB, "disk": 2 * MIB}
    crashed = await killed(path, tmp_path / "crashed", work, **options)
    newest = segments_of(crashed)[-1]
    damage(newest, 0, PAGE)
    damage(newest, LOG_START, newest.stat().st_size - LOG_START)
    async with Disk(crashed, **options) as disk:
        assert await disk.get_all(range(30)) == {}


@pytest.mark.parametrize("length", range(1, 6))
async def test_a_claim_and_the_pages_behind_it_gone_bring_nothing_old_back(path, tmp_path, length):
    """The first batch takes four pages, header, payload and trailer."""
    async with Disk(path) as disk:
        await fill(disk, range(5))

    crashed = await killed(path, tmp_path / "crashed", lambda disk: fill(disk, [3], 1, size=5000))
    damage(segments_of(crashed)[-1], CLAIM_AT, length * PAGE)
    async with Disk(crashed) as disk:
        found = await disk.get_all(range(5))
        assert found.get(3) == (value_of(3, 1, 5000) if length < 3 else None)
        assert len(found) == (5 if length < 3 else 4 if length < 5 else 0)


async def torn(path, target, **options):
    """A killed store whose newest batch was never synced and is torn; block 2 has an older, flushed version."""
    crashed = await killed(path, target, write_over, **options)
    (segment,) = segments_of(crashed)
    damage(segment, segment.read_bytes().find(value_of(2, 1, 5000)) + 4000)
    return crashed, {key: value_of(key) if key == 2 else value_of(key, 1, 5000) for key in range(5)}


async def test_a_seal_of_a_recovery_whose_footer_was_torn_does_not_vouch_for_torn_batches(path, tmp_path):
    crashed, expected = await torn(path, tmp_path / "crashed")
    disk = Disk(crashed)
    disk.snapshot = False
    async with disk:
        assert await disk.get_all(range(5)) == expected
    assert verify_directory(crashed).ok
    (segment,) = segments_of(crashed)
    damage(segment, segment.stat().st_size - 2 * PAGE, 100)
    async with Disk(crashed) as disk:
        assert disk.recovered
        assert await disk.get_all(range(5)) == expected


async def test_a_seal_in_a_file_that_was_not_cut_yet_tells_damage_from_a_torn_write(path, tmp_path):
    """A recovery that is killed between sealing and cutting has shown the blocks: one damaged since is a miss."""
    crashed = await killed(path, tmp_path / "crashed", write_over)
    (segment,) = segments_of(crashed)
    size = segment.stat().st_size
    again = await killed(crashed, tmp_path / "again", lambda disk: disk.get_all(range(5)))
    (segment,) = [each for each in segments_of(again) if each.name == segment.name]
    assert segment.stat().st_size < size
    with segment.open("r+b") as file:
        file.truncate(size)
    damage(segment, segment.read_bytes().find(value_of(2, 1, 5000)) + 4000)
    report = verify_directory(again)
    assert not report.ok
    async with Disk(again) as disk:
        assert disk.recovered
        assert await disk.get_all(range(5)) == {key: value_of(key, 1, 5000) for key in range(5) if key != 2}
        assert disk.tier.damage


async def test_strict_takes_a_recovered_store_for_whole(path, tmp_path):
    crashed, expected = await torn(path, tmp_path / "crashed")
    async with Disk(crashed):
        pass
    (crashed / "index.snap").unlink()
    async with Disk(crashed, recover="strict") as disk:
        assert await disk.get_all(range(5)) == expected


async def test_a_lossy_seal_cuts_what_is_older_without_its_footer_too(path, tmp_path):
    options = {"segment": 64 * KIB, "disk": 2 * MIB}

    async def work(disk):
        await fill(disk, range(30), size=5000)
        await disk.delete(3)
        await fill(disk, [50])
        await fill(disk, [51])

    crashed = await killed(path, tmp_path / "crashed", work, **options)
    segments = segments_of(crashed)
    deleting = batches_of(segments[-1])[-3]
    damage(segments[-1], deleting.offset, deleting.end - deleting.offset)
    expected = {50: value_of(50), 51: value_of(51)}
    older = {each.name: each.read_bytes() for each in segments[:-1]}
    disk = Disk(crashed, **options)
    disk.snapshot = False
    async with disk:
        assert await disk.get_all(range(60)) == expected
    for name, data in older.items():  # as if they could not be removed
        (crashed / name).write_bytes(data)
    damage(segments[-1], segments[-1].stat().st_size - 2 * PAGE, 100)
    async with Disk(crashed, **options) as disk:
        assert await disk.get_all(range(60)) == expected


def batches_of(segment):
    header = SegmentHeader.decode(segment.read_bytes()[:PAGE])
    seed = segment_seed(header.store_id, header.namespace, header.number)
    data = segment.read_bytes()
    scanner = scan_segment(len(data), seed)
    want = next(scanner)
    while True:
        try:
            want = scanner.send(memoryview(data)[want[0] : want[0] + want[1]])
        except StopIteration as end:
            return end.value.batches
