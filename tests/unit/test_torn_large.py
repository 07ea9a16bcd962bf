"""A torn block that is verified in pieces, because it is larger than what is read at once."""

from __future__ import annotations

import pytest
from logkit import MIB, Disk, damage, killed, segments_of, value_of

SIZE = 2 * MIB + 12_345
OPTIONS = {"memory": 16 * MIB, "segment": 8 * MIB, "disk": 64 * MIB}


@pytest.mark.parametrize("place", [0, MIB, SIZE - 1])
async def test_a_large_block_that_is_torn_does_not_hide_the_one_before(tmp_path, place):
    async def work(disk):
        await disk.put(1, value_of(1, 0, SIZE))
        await disk.flush()
        await disk.put(1, value_of(1, 1, SIZE))
        await disk.write()

    crashed = await killed(tmp_path / "kv", tmp_path / "crashed", work, **OPTIONS)
    (segment,) = segments_of(crashed)
    at = segment.read_bytes().find(value_of(1, 1, SIZE))
    assert at > 0
    damage(segment, at + place)
    for _ in range(2):
        async with Disk(crashed, **OPTIONS) as disk:
            assert await disk.get(1) == value_of(1, 0, SIZE)


async def test_a_large_block_that_arrived_whole_is_shown(tmp_path):
    async def work(disk):
        await disk.put(1, value_of(1, 0, SIZE))
        await disk.flush()
        await disk.put(1, value_of(1, 1, SIZE))
        await disk.write()

    crashed = await killed(tmp_path / "kv", tmp_path / "crashed", work, **OPTIONS)
    async with Disk(crashed, **OPTIONS) as disk:
        assert await disk.get(1) == value_of(1, 1, SIZE)
