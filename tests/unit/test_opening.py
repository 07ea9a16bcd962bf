"""What an opening makes of the files that it finds."""

from __future__ import annotations

import shutil

import pytest
from logkit import KIB, Disk, fill, killed, segments_of, value_of

from asynckv.tiers.layout import NUMBER_MAX, PAGE, STRANGER_MAX, SegmentHeader, segment_name


@pytest.mark.parametrize("number", [STRANGER_MAX, NUMBER_MAX - 1, NUMBER_MAX, 10**16 - 1])
@pytest.mark.parametrize("content", [b"", bytes(64 * KIB), b"another segment of this store"])
async def test_a_file_with_an_absurd_number_does_not_use_the_numbers_up(tmp_path, number, content):
    path = tmp_path / "kv"
    async with Disk(path, segment=64 * KIB) as disk:
        await fill(disk, range(10))
    if content.startswith(b"another"):
        content = segments_of(path)[0].read_bytes()
    (path / segment_name(number)).write_bytes(content)
    (path / "index.snap").unlink()
    async with Disk(path, segment=64 * KIB) as disk:
        await fill(disk, range(10, 20))
        assert not (path / segment_name(number)).exists()
    assert all(file.name < segment_name(100) for file in segments_of(path))
    async with Disk(path, segment=64 * KIB) as disk:
        found = await disk.get_all(range(20))
        assert found.items() >= {key: value_of(key) for key in range(10, 20)}.items()


async def test_a_stranger_with_a_believable_number_is_kept_and_gone_past(tmp_path):
    path = tmp_path / "kv"
    async with Disk(path, segment=64 * KIB) as disk:
        await fill(disk, range(10))
    stranger = path / segment_name(STRANGER_MAX - 1)
    stranger.write_bytes(segments_of(path)[0].read_bytes())
    async with Disk(path, segment=64 * KIB) as disk:
        await fill(disk, range(10, 20))
        assert stranger.exists()
        assert segments_of(path)[-1].name == segment_name(STRANGER_MAX)
    async with Disk(path, segment=64 * KIB) as disk:
        found = await disk.get_all(range(20))
        assert found.items() >= {key: value_of(key) for key in range(10, 20)}.items()


async def test_a_segment_that_newer_ones_do_not_know_of_had_been_given_up(tmp_path):
    """Its death was not durable, or its name came back: nothing of it may show."""

    async def first(disk):
        await fill(disk, range(5))

    async def second(disk):
        await fill(disk, range(1), 2)

    base = await killed(tmp_path / "kv", tmp_path / "base", first)
    other = shutil.copytree(base, tmp_path / "other")
    async with Disk(other) as disk:
        await fill(disk, range(3, 8), 1)
    abandoned = (other / segment_name(2)).read_bytes()
    # Somebody else's file takes that number: the next segment is 3, and it names 1 as the one before.
    stranger = SegmentHeader(b"x" * 16, bytes(32), 2, 0, 1, 64 * KIB, 1, 1).encode() + bytes(15 * PAGE)
    (base / segment_name(2)).write_bytes(stranger)
    crashed = await killed(base, tmp_path / "crashed", second)
    assert (crashed / segment_name(3)).exists()
    (crashed / segment_name(2)).write_bytes(abandoned)
    expected = {key: value_of(key, 0 if key else 2) for key in range(5)}
    for _ in range(2):
        async with Disk(crashed) as disk:
            assert await disk.get_all(range(8)) == expected
            assert not (crashed / segment_name(2)).exists()


async def test_a_reclaimed_segment_that_comes_back_is_removed_and_the_snapshot_still_used(tmp_path):
    path = tmp_path / "kv"
    options = {"segment": 64 * KIB, "disk": 512 * KIB}
    async with Disk(path, **options) as disk:
        await fill(disk, range(5), size=5000)
        dead = segments_of(path)[0].read_bytes()
        for version in range(1, 30):
            await fill(disk, range(5), version, size=5000)
    assert not (path / segment_name(1)).exists()
    (path / segment_name(1)).write_bytes(dead)
    async with Disk(path, **options) as disk:
        assert not disk.recovered
        assert not (path / segment_name(1)).exists()
        assert await disk.get_all(range(5)) == {key: value_of(key, 29, 5000) for key in range(5)}
