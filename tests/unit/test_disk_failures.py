"""What a disk that fails leaves in the log: copies and parts of batches that nobody was told of."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools

import pytest
from logkit import KIB, MIB, Disk, Failing, crash_copy, damage, failing, fill, segments_of, value_of

from asynckv.backends import create_backend
from asynckv.errors import DiskError
from asynckv.testing.tools import turns
from asynckv.tiers import reclaim, verify_directory


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


class Arriving(Failing):
    """An engine whose writes fail while `failing` is set, and arrive; one of kind "truncate" never cuts a file."""

    def write(self, file, offset, prepare, *, timeout=None, released=None):
        written = self.inner.write(file, offset, prepare, timeout=timeout, released=released)
        if not self.failing:
            return written
        failed = asyncio.get_running_loop().create_future()
        written.add_done_callback(lambda _: failed.set_exception(OSError(errno.EIO, "it says")))
        return failed

    def truncate(self, file, size):
        return self._error() if self.kind == "truncate" else self.inner.truncate(file, size)


@pytest.mark.parametrize("end", ["sealed", "footer damaged", "not cut", "killed before the seal"])
async def test_a_failed_write_that_arrived_in_part_hides_no_older_value(path, tmp_path, monkeypatch, end):
    made = []

    def factory(*args, **options):
        kind = "truncate" if end == "not cut" else "write"
        made.append(Arriving(create_backend(*args, **options), kind))
        return made[-1]

    async with Disk(path, _backend_factory=factory) as disk:
        await fill(disk, ["key"])
        await disk.put("key", value_of("key", 1))
        made[0].failing = True
        with pytest.raises(OSError):
            await disk.write()
        made[0].failing = False
        assert await disk.tier.probe()
        log, reclaimer = disk.tier._log, disk.tier._reclaimer
        if end == "killed before the seal":
            monkeypatch.setattr(reclaimer, "seal_behind", lambda *_: None)
            await reclaimer._rotate(0)
            batch = log.compose((), (), empty_ok=True)
            await log.submit(batch)
            await log.sync_segment(batch.home)
        else:
            reclaimer.seal_behind(disk.tier._set.active)
            await reclaimer.drain()
        crashed = crash_copy(path, tmp_path / "crashed")
        monkeypatch.undo()
    segment = segments_of(crashed)[0]
    torn = segment.read_bytes().find(value_of("key", 1)) // 4096 * 4096
    damage(segment, torn)
    damage(segment, torn + 4096)  # and its trailer
    if end == "sealed":
        assert verify_directory(crashed).ok
    if end == "footer damaged":
        damage(segment, segment.stat().st_size - 2 * 4096 + 20)
    async with Disk(crashed) as disk:
        assert await disk.get("key") == value_of("key")


async def test_a_segment_whose_name_cannot_be_taken_away_is_not_called_dead(path, tmp_path, monkeypatch):
    """What is written meanwhile would take it, and what is served from it, from the next opening."""

    def failing(*args):
        future = asyncio.get_running_loop().create_future()
        future.set_exception(OSError(errno.EIO, "stays"))
        return future

    async with Disk(path, disk=4 * MIB, segment=64 * KIB) as disk:
        await fill(disk, range(40), size=5000)
        oldest = disk.tier._set.own()[0]
        with monkeypatch.context() as patch:
            for name in ("rename", "unlink"):
                patch.setattr(disk.tier._set.backend, name, failing)
            with pytest.raises(OSError):
                await disk.tier._reclaimer.drop(oldest)
        assert disk.tier._set.oldest_live <= oldest.number
        await fill(disk, range(40, 60), size=5000)
        crashed = crash_copy(path, tmp_path / "crashed")
        await disk.tier._reclaimer.drop(oldest)
        assert disk.tier._set.oldest_live == oldest.number + 1
    async with Disk(crashed, disk=4 * MIB, segment=64 * KIB) as disk:
        assert (await disk.get_all(range(60))).keys() == set(range(60))
