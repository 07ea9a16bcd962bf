"""The disk tier at work: appending, reading, rotation, reclaim within the cap, failures."""

from __future__ import annotations

import asyncio
import errno
import os

import pytest
from logkit import KIB, MIB, SIZES, Disk, allocated, crash_copy, failing, segments_of, value_of, wire_key

from asynckv.backends import create_backend
from asynckv.backends.base import Wrapper
from asynckv.errors import DiskError, StoreLockedError
from asynckv.testing import RecordingBackend
from asynckv.testing.tools import turns
from asynckv.tiers import inspect_directory, verify_directory
from asynckv.tiers.log import LogWriter


@pytest.fixture
def path(tmp_path):
    return tmp_path / "kv"


async def test_every_size_and_kind_of_key_comes_back(path):
    values = {}
    async with Disk(path) as disk:
        for size in SIZES:
            for key in (size, f"s{size}", b"b%d" % size):
                values[key] = value_of(key, 0, size)
                await disk.put(key, values[key])
        await disk.flush()
        assert disk.table.disk_blocks == len(values)
        assert disk.tier.disk_live == sum(len(value) for value in values.values())
    async with Disk(path) as disk:
        assert await disk.get_all(values) == values
        assert not disk.recovered
        assert disk.table.length == len(values)


async def test_the_largest_block_fits_and_one_byte_more_does_not(path):
    async with Disk(path) as disk:
        most = disk.tier.max_block
        for key, size in {"k" * 1024: most, "l" * 1024: most - 1, "m": most - 4095}.items():
            await disk.put(key, value_of(key, 0, size))
            await disk.flush()
            assert disk.table.where(key) is None
            assert disk.table.disk_blocks
        assert disk.table.disk_blocks == 3
    async with Disk(path) as disk:
        assert await disk.get("k" * 1024) == value_of("k" * 1024, 0, most)


@pytest.mark.parametrize("segment", [64 * KIB, 256 * KIB, MIB])
def test_the_largest_block_of_a_segment(segment):
    assert segment // 2 <= LogWriter.largest_block(segment) < segment


async def test_a_second_owner_is_refused_and_harms_nothing(path):
    async with Disk(path) as disk:
        other = Disk(path)
        with pytest.raises(StoreLockedError) as caught:
            await other.open()
        assert caught.value.pid == os.getpid()
        await disk.put(1, b"one")
        await disk.flush()
    async with Disk(path) as disk:
        assert await disk.get(1) == b"one"


async def test_the_cap_holds_through_many_turns_of_the_log(path):
    async with Disk(path, disk=2 * MIB, memory=512 * KIB) as disk:
        most = 0
        for number in range(2000):
            await disk.put(number % 400, value_of(number % 400, number, SIZES[number % len(SIZES)]))
            if number % 50 == 0:
                most = max(most, allocated(path))
        await disk.flush()
        most = max(most, allocated(path), disk.most_used)
        assert most <= 2 * MIB
        assert disk.tier.oldest_segment > 3, "it went round"
        assert disk.tier.bytes_written > 4 * MIB
        for key in range(400):
            value = await disk.get(key)
            if value is not None:
                assert any(value == value_of(key, n, len(value)) for n in range(key, 2000, 400))
    assert allocated(path) <= 2 * MIB


@pytest.mark.parametrize("segments", [4, 5, 8])
async def test_a_store_of_few_segments_goes_round(path, segments):
    async with Disk(path, disk=segments * 64 * KIB, segment=64 * KIB, memory=128 * KIB) as disk:
        for number in range(300):
            await disk.put(number, value_of(number, 0, 9000))
        await disk.flush()
        assert allocated(path) <= segments * 64 * KIB
        assert disk.table.disk_blocks >= 3
        found = await disk.get_all(range(300))
        assert all(value == value_of(key, 0, 9000) for key, value in found.items())
    async with Disk(path, disk=segments * 64 * KIB, segment=64 * KIB, memory=128 * KIB) as disk:
        assert (await disk.get_all(range(300))).keys() >= {299}


async def test_blocks_that_are_used_are_carried_over(path):
    async with Disk(path, disk=2 * MIB, segment=128 * KIB, memory=256 * KIB) as disk:
        loved = range(10)
        for key in loved:
            await disk.put(key, value_of(key, 0, 5000))
        await disk.flush()
        for number in range(100, 1500):
            await disk.put(number, value_of(number, 0, 5000))
            if number % 20 == 0:
                for key in loved:
                    assert await disk.get(key) == value_of(key, 0, 5000)
        assert disk.tier.oldest_segment > 10
        assert await disk.get(100) is None
    async with Disk(path, disk=2 * MIB, segment=128 * KIB, memory=256 * KIB) as disk:
        assert (await disk.get_all(loved)).keys() == set(loved)


async def test_damage_found_when_carrying_over_is_counted_and_not_spread(path):
    async with Disk(path, disk=2 * MIB, segment=128 * KIB, memory=256 * KIB) as disk:
        await disk.put("loved", value_of("loved", 0, 5000))
        await disk.flush()
        for number in range(60):
            await disk.put(number, value_of(number, 0, 5000))
        assert await disk.get("loved") is not None
        for number in range(60, 120):
            await disk.put(number, value_of(number, 0, 5000))
        assert disk.table.state("loved") == 2
        slot, offset, *_ = disk.table.where("loved")
        segment = disk.tier._set.by_slot(slot)
        with open(path / segment.name, "r+b") as file:
            file.seek(offset + 100)
            file.write(b"damage")
        for number in range(120, 800):
            await disk.put(number, value_of(number, 0, 5000))
        assert await disk.get("loved") is None
        assert disk.tier.corrupt_blocks == 1
        assert disk.tier.disk_used <= 2 * MIB


async def test_damaged_bytes_are_false_after_a_second_look(path):
    async with Disk(path) as disk:
        for size in SIZES[2:]:
            await disk.put(size, value_of(size, 0, size))
        await disk.flush()
    (segment,) = segments_of(path)
    data = bytearray(segment.read_bytes())
    for size in SIZES[2:]:
        at = data.find(value_of(size, 0, size)) + size // 2
        data[at] ^= 0x40
    segment.write_bytes(data)
    async with Disk(path) as disk:
        assert await disk.get_all(SIZES[2:]) == {}
        assert disk.table.disk_blocks == 0


class Flawed(Wrapper):
    """An engine whose first read of each buffer is flawed."""

    def __init__(self, inner) -> None:
        super().__init__(inner)
        self.seen = set()

    def read(self, file, offset, buffer, *, verify=None, timeout=None, released=None):
        check = verify
        if verify is not None and offset not in self.seen:
            self.seen.add(offset)

            def check(view):
                view[0] ^= 1
                return verify(view)

        return self.inner.read(file, offset, buffer, verify=check, timeout=timeout, released=released)


async def test_a_flawed_transfer_is_read_again(path):
    async with Disk(path) as disk:
        await disk.put(1, value_of(1))
        await disk.flush()
    async with Disk(path, _backend_factory=lambda *a, **k: Flawed(create_backend(*a, **k))) as disk:
        assert await disk.get(1) == value_of(1)


async def test_a_cancelled_read_lets_go_of_everything(path):
    async with Disk(path) as disk:
        await disk.put(1, value_of(1, 0, 40_000))
        await disk.flush()
    async with Disk(path) as disk:
        for spins in range(6):
            room = disk.table.room(40_000)
            assert room.step() == 1
            load = disk.table.begin_load(1, room)
            released = []
            future = disk.tier._reader.read(
                load.slot,
                load.offset,
                load.view,
                load.stored,
                load.checksum,
                released=lambda released=released: released.append(True),
            )
            await turns(spins)
            future.cancel()
            for _ in range(200):
                if released:
                    break
                await asyncio.sleep(0.005)
            assert released == [True]
            disk.table.finish_load(load, False)
        assert await disk.get(1) == value_of(1, 0, 40_000)
        await asyncio.sleep(0.01)
        assert all(segment.users == 0 for segment in disk.tier._set)


async def test_a_missing_segment_file_is_a_miss(path):
    async with Disk(path) as disk:
        await disk.put(1, value_of(1))
        await disk.flush()
    async with Disk(path) as disk:
        segments_of(path)[0].unlink()
        assert await disk.get(1) is None


async def test_a_failed_write_leaves_a_hole_that_recovery_skips(path):
    factory, made = failing("write")
    disk = Disk(path, _backend_factory=factory)
    disk.snapshot = False
    async with disk:
        await disk.put(1, value_of(1))
        await disk.flush()
        await disk.put(2, value_of(2))
        made[0].failing = True
        with pytest.raises(OSError):
            await disk.write()
        made[0].failing = False
        await disk.flush()
        await disk.put(3, value_of(3))
        await disk.flush()
        assert len(segments_of(path)) == 1
        assert disk.table.disk_blocks == 3
    assert inspect_directory(path).ok
    async with Disk(path) as disk:
        assert disk.recovered
        assert await disk.get_all([1, 2, 3]) == {key: value_of(key) for key in (1, 2, 3)}
        assert disk.tier.damage == 0


async def test_a_failed_sync_makes_the_blocks_dirty_again(path):
    factory, made = failing("sync")
    async with Disk(path, _backend_factory=factory) as disk:
        await disk.put(1, value_of(1))
        await disk.flush()
        await disk.put(2, value_of(2))
        await disk.write()
        assert disk.table.disk_blocks == 2
        made[0].failing = True
        with pytest.raises(DiskError) as caught:
            await disk.tier.sync()
        assert caught.value.errno == errno.EIO
        made[0].failing = False
        await turns()
        assert disk.table.disk_blocks == 1, "what was durable before stays"
        assert disk.table.dirty_blocks == 1
        await disk.flush()
        assert disk.table.disk_blocks == 2
        assert len(segments_of(path)) == 2, "a segment whose sync failed takes no more"
    async with Disk(path) as disk:
        assert await disk.get_all([1, 2]) == {key: value_of(key) for key in (1, 2)}


async def test_a_claim_that_cannot_be_written_fails_the_sync(path, tmp_path):
    factory, made = failing("write")
    async with Disk(path, _backend_factory=factory) as disk:
        await disk.put(1, value_of(1))
        await disk.write()
        made[0].failing = True
        with pytest.raises(DiskError):
            await disk.tier.sync()
        made[0].failing = False
        await turns()
        assert disk.table.dirty_blocks == 1
        await disk.flush()
        crashed = crash_copy(path, tmp_path / "crashed")
    for place in (path, crashed):
        async with Disk(place) as disk:
            assert await disk.get(1) == value_of(1)


async def test_a_sync_costs_one_page_and_only_when_there_is_something_to_say(path):
    async with Disk(path) as disk:
        await disk.put(1, value_of(1))
        await disk.write()
        before = disk.tier.bytes_written
        await disk.tier.sync()
        await disk.tier.sync()
        assert disk.tier.bytes_written == before + 4096


async def test_a_sync_that_failed_for_somebody_else_fails_the_next_one(path):
    """What it took back was written, and may be what the next caller waits for."""
    factory, made = failing("sync")
    async with Disk(path, _backend_factory=factory) as disk:
        await disk.put(1, value_of(1))
        await disk.write()
        made[0].failing = True
        with pytest.raises(OSError):
            await disk.tier._log.sync_segment(disk.tier._set.active)
        made[0].failing = False
        await turns()
        with pytest.raises(DiskError):
            await disk.tier.sync()
        await disk.flush()
    async with Disk(path) as disk:
        assert await disk.get(1) == value_of(1)


async def test_tombstones_of_a_failed_sync_are_owed_again(path, tmp_path):
    factory, made = failing("sync")
    async with Disk(path, _backend_factory=factory) as disk:
        for key in (1, 2):
            await disk.put(key, value_of(key))
        await disk.flush()
        assert [disk.table.remove(key) for key in (1, 2)] == [2, 2]
        await disk.write([wire_key(key) for key in (1, 2)])
        made[0].failing = True
        with pytest.raises(DiskError):
            await disk.tier.sync()
        made[0].failing = False
        await turns()
        await disk.put(2, value_of(2, 1))
        assert disk.table.owed == 1, "a key that is back needs none"
        await disk.flush()
        crashed = crash_copy(path, tmp_path / "crashed")
    failed = segments_of(crashed)[0]
    data = failed.read_bytes()
    failed.write_bytes(data[: data.find(value_of(2)) // 4096 * 4096 + 8192].ljust(len(data), b"\0"))
    async with Disk(crashed) as disk:
        assert await disk.get_all([1, 2]) == {2: value_of(2, 1)}


async def test_a_rotation_that_is_cancelled_leaves_the_log_where_it_was(path):
    hung = asyncio.Event()

    class Hung(RecordingBackend):
        hanging = False

        def call(self, function, *args, timeout=None):
            if self.hanging and function == "open":
                hung.set()
                return asyncio.get_running_loop().create_future()
            return super().call(function, *args, timeout=timeout)

    made = []

    def factory(*args, **options):
        made.append(Hung(create_backend(*args, **options)))
        return made[-1]

    values = {key: value_of(key, 0, 5000) for key in range(24)}
    async with Disk(path, _backend_factory=factory, segment=64 * KIB, disk=MIB) as disk:
        for key in range(8):
            await disk.put(key, values[key])
        await disk.flush()
        active = disk.tier._set.active
        for key in range(8, 16):
            await disk.put(key, values[key])
        made[0].hanging = True
        flushing = asyncio.ensure_future(disk.flush())
        await hung.wait()
        assert disk.tier._set.active is None
        flushing.cancel()
        await asyncio.wait([flushing])
        assert disk.tier._set.active is active
        made[0].hanging = False
        for key in range(16, 24):
            await disk.put(key, values[key])
        disk.table.requeue_unbacked()
        await disk.flush()
    async with Disk(path) as disk:
        assert not disk.recovered, "every segment was sealed, and the snapshot written"
        found = await disk.get_all(values)
        assert {key: found[key] for key in range(16, 24)} == {key: values[key] for key in range(16, 24)}


@pytest.mark.parametrize("kind", ["allocate", "rename", "directory", "sync", "write"])
async def test_a_rotation_that_fails_is_tried_again(path, kind):
    factory, made = failing(kind)
    values = {key: value_of(key, 0, 5000) for key in range(20)}
    async with Disk(path, _backend_factory=factory, segment=64 * KIB, disk=MIB) as disk:
        for key, value in values.items():
            await disk.put(key, value)
            if key == 9:
                await disk.flush()
                made[0].failing = True
        with pytest.raises(OSError):
            await disk.flush()
        for _ in range(3):
            with pytest.raises(OSError):
                await disk.flush()
        made[0].failing = False
        await disk.flush()
        assert disk.table.disk_blocks == len(values)
        assert disk.tier.disk_used <= MIB
    assert allocated(path) <= MIB
    async with Disk(path, segment=64 * KIB, disk=MIB) as disk:
        assert await disk.get_all(values) == values
        assert disk.tier.damage == 0


async def test_the_probe_tells_whether_the_disk_works(path):
    factory, made = failing("sync")
    async with Disk(path, _backend_factory=factory) as disk:
        assert await disk.tier.probe()
        made[0].failing = True
        assert not await disk.tier.probe()
        made[0].failing = False
        assert await disk.tier.probe()
        await disk.put(1, value_of(1))
        await disk.flush()
    async with Disk(path) as disk:
        assert await disk.get(1) == value_of(1)


async def test_what_finds_no_room_in_a_batch_is_given_back(path):
    async with Disk(path, segment=64 * KIB, disk=MIB) as disk:
        keys = [b"%d" % i + b"." * 1000 for i in range(100)]
        for key in keys:
            await disk.put(key, b"value")
        await disk.tier.prepare(1)
        spills = disk.table.take_dirty(MIB, 4096)
        batch = disk.tier.compose(spills, [(1, b"gone" * 100)])
        assert 0 < len(batch.spills) < 100
        assert batch.spills + batch.rest_spills == spills
        assert batch.tombstones == [(1, b"gone" * 100)]
        for spill in reversed(batch.rest_spills):
            disk.table.finish_spill(spill, False)
        kept = batch.spills
        for spill, place in zip(kept, await disk.tier.submit(batch), strict=True):
            disk.table.finish_spill(spill, True, *place)
        await disk.flush()
        assert disk.table.disk_blocks == 100
    async with Disk(path, segment=64 * KIB, disk=MIB) as disk:
        assert len(await disk.get_all(keys)) == 100


async def test_composing_fixes_the_order_whatever_order_writes_end_in(path):
    disk = Disk(path)
    disk.snapshot = False
    async with disk:
        await disk.tier.prepare(4096)
        batches = []
        for version in range(4):
            draft = disk.table.draft(value_of("k", version))
            assert disk.table.put("k", draft)
            spills = disk.table.take_dirty(MIB, 10)
            batches.append((disk.tier.compose(spills, ()), spills))
        for batch, spills in reversed(batches):
            places = await disk.tier.submit(batch)
            for spill, place in zip(spills, places, strict=True):
                disk.table.finish_spill(spill, True, *place)
        await disk.tier.sync()
    async with Disk(path) as disk:
        assert disk.recovered
        assert await disk.get("k") == value_of("k", 3)


async def test_an_empty_directory_that_is_closed_at_once_is_a_store(path):
    async with Disk(path) as disk:
        assert not disk.recovered
        assert disk.tier.disk_used <= 16 * KIB
    assert sorted(os.listdir(path)) == ["lock", "superblock"]
    async with Disk(path) as disk:
        assert disk.table.length == 0


async def test_other_files_count_and_are_left_alone(path):
    path.mkdir(mode=0o700)
    (path / "notes").write_bytes(bytes(300 * KIB))
    async with Disk(path, disk=MIB, segment=64 * KIB) as disk:
        assert disk.tier.disk_used >= 300 * KIB
        for number in range(300):
            await disk.put(number, value_of(number, 0, 9000))
        await disk.flush()
        assert allocated(path) <= MIB
    assert (path / "notes").read_bytes() == bytes(300 * KIB)


async def test_other_files_that_leave_no_room_are_an_error(path):
    path.mkdir(mode=0o700)
    (path / "notes").write_bytes(bytes(2 * MIB))
    with pytest.raises(DiskError):
        await Disk(path, disk=MIB, segment=64 * KIB).open()


async def test_a_smaller_cap_drops_the_oldest_first(path):
    async with Disk(path, disk=8 * MIB) as disk:
        for number in range(600):
            await disk.put(number, value_of(number, 0, 9000))
        await disk.flush()
    async with Disk(path, disk=2 * MIB) as disk:
        assert allocated(path) <= 2 * MIB
        found = await disk.get_all(range(600))
        assert found.keys() == set(range(min(found), 600)), "the newest are left"
        assert len(found) > 100


async def test_the_offline_commands_see_what_is_there(path):
    async with Disk(path) as disk:
        for number in range(100):
            await disk.put(number, value_of(number))
        await disk.flush()
        for number in range(50):
            await disk.put(number, value_of(number, 1))
        await disk.delete(99)
        await disk.flush()
        live = inspect_directory(path)
        assert (live.live_blocks, live.live_bytes) == (99, 99_000)
        with pytest.raises(StoreLockedError):
            verify_directory(path)
    report = verify_directory(path)
    assert report.ok, report.all_damage
    assert (report.live_blocks, report.dead_bytes, report.verified_blocks) == (99, 51_000, 150)
    assert report.snapshot == "valid head"
    assert sum(segment.tombstones for segment in report.segments) == 1
    segment = segments_of(path)[0]
    data = bytearray(segment.read_bytes())
    data[data.find(value_of(60)) + 3] ^= 1
    segment.write_bytes(data)
    report = verify_directory(path)
    assert not report.ok
    assert report.corrupt_blocks == 1
    assert inspect_directory(path).ok, "payloads are not read by it"


async def test_the_largest_blocks_pass_a_full_log_of_used_blocks(path):
    async with Disk(path, disk=MIB, segment=128 * KIB, memory=256 * KIB) as disk:
        for key in range(60):
            await disk.put(key, value_of(key, 0, 9000))
            await disk.get(key)
        await disk.flush()
        for number in range(20):
            key = f"large {number}"
            await disk.put(key, value_of(key, 0, disk.tier.max_block))
            await asyncio.wait_for(disk.flush(), 10)
            assert disk.tier.disk_used <= MIB
