"""What an opening makes of the files that it finds."""

from __future__ import annotations

import pytest
from logkit import KIB, Disk, fill, segments_of, value_of

from asynckv.tiers.layout import NUMBER_MAX, STRANGER_MAX, segment_name


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
