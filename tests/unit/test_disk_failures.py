"""What a disk that fails leaves in the log: copies that nobody was told of."""

from __future__ import annotations

import asyncio
import contextlib
import itertools

import pytest
from logkit import KIB, MIB, Disk, crash_copy, failing, fill, turns

from asynckv.errors import DiskError
from asynckv.tiers import reclaim


@pytest.fixture
def path(tmp_path):
    return tmp_path / "kv"


@pytest.mark.parametrize("kind", ["sync", "write"])
async def test_what_was_being_carried_over_when_the_disk_failed_stays_deleted(path, tmp_path, monkeypatch, kind):
    """Its copy is in the log, newer than the segment that it is dropped with."""
    monkeypatch.setattr(reclaim, "CARRY_GROUP_BLOCKS", 1)
    factory, made = failing(kind)
    loved = ["first", "second"]
    async with Disk(path, disk=MIB, segment=64 * KIB, memory=128 * KIB, _backend_factory=factory) as disk:
        await fill(disk, loved, size=5000)
        await fill(disk, range(30), size=5000)
        assert (await disk.get_all(loved)).keys() == set(loved)
        await fill(disk, range(30, 60), size=5000)
        assert [disk.table.state(key) for key in loved] == [2, 2]

        submit = disk.tier._log.submit

        def failing_next(*args, **options):
            future = submit(*args, **options)
            made[0].failing = True
            return future

        monkeypatch.setattr(disk.tier._log, "submit", failing_next)
        with pytest.raises(OSError):
            await disk.tier._reclaimer._reclaim_oldest(32 * KIB)
        monkeypatch.undo()
        made[0].failing = False
        await turns()
        with contextlib.suppress(DiskError):  # what was taken back was somebody's
            await disk.tier.sync()
        await disk.tier._reclaimer._reclaim_oldest(0)
        for key in loved:
            await disk.delete(key)
        crashed = crash_copy(path, tmp_path / "crashed")
    for place in (path, crashed):
        async with Disk(place, disk=MIB, segment=64 * KIB) as disk:
            assert await disk.get_all(loved) == {}


async def test_a_large_segment_is_forgotten_in_pieces(path, monkeypatch):
    monkeypatch.setattr(reclaim, "FORGET_BLOCKS", 10, raising=False)
    async with Disk(path) as disk:
        await fill(disk, range(100), size=100)
        left = []

        async def watch():
            while not left or left[-1]:
                left.append(disk.table.disk_blocks)
                await asyncio.sleep(0)

        watching = asyncio.create_task(watch())
        segment = disk.tier._set.active
        await disk.tier._reclaimer.drop(segment)
        await watching
        assert max(before - after for before, after in itertools.pairwise(left)) == 10
