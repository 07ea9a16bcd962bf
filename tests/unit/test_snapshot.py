"""The index snapshot: when it is not written, and what then is left."""

from __future__ import annotations

import asyncio
import errno

import pytest
from logkit import KIB, MIB, Disk, allocated, fill, value_of

from asynckv.backends import create_backend
from asynckv.errors import CorruptStoreError
from asynckv.testing import RecordingBackend
from asynckv.tiers import verify_directory
from asynckv.tiers.snapshot import TEMPORARY


async def test_a_snapshot_that_does_not_fit_below_the_cap_is_left_out(tmp_path, caplog):
    path = tmp_path / "kv"
    options = {"segment": 64 * KIB, "disk": 512 * KIB, "memory": 8 * MIB}
    async with Disk(path, **options) as disk:
        await fill(disk, range(3000), size=0)
        room = disk.tier._set.cap - disk.tier._set.charged
        (path / "stranger").write_bytes(bytes(max(0, room - 8 * KIB)))
        disk.tier._set.overhead += max(0, room - 8 * KIB)
        caplog.set_level("INFO", logger="asynckv")
    assert "no room for the index snapshot" in caplog.text
    assert not (path / "index.snap").exists()
    assert not (path / TEMPORARY).exists()
    assert allocated(path) <= options["disk"] + 64 * KIB
    (path / "stranger").unlink()
    async with Disk(path, **options) as disk:
        assert disk.recovered
        found = await disk.get_all(range(2900, 3000))
        assert found == dict.fromkeys(range(2900, 3000), b"")


@pytest.mark.parametrize("function", ["rename", "sync_directory"])
async def test_a_snapshot_whose_writing_fails_leaves_nothing_half_written(tmp_path, function):
    path = tmp_path / "kv"
    failing = False

    class Sick(RecordingBackend):
        def call(self, name, *args, timeout=None):
            if failing and name == function:
                future = asyncio.get_running_loop().create_future()
                future.set_exception(OSError(errno.EIO, "no"))
                return future
            return super().call(name, *args, timeout=timeout)

    factory = lambda *args, **options: Sick(create_backend(*args, **options))  # noqa: E731
    disk = Disk(path, _backend_factory=factory)
    async with disk:
        await fill(disk, range(20))
        failing = True
    assert not (path / TEMPORARY).exists()
    async with Disk(path) as disk:
        assert await disk.get_all(range(20)) == {key: value_of(key) for key in range(20)}


async def test_a_snapshot_is_durable_before_its_name_is_and_its_name_before_the_close_ends(tmp_path):
    events = []

    class Watching(RecordingBackend):
        def write(self, file, offset, prepare, **options):
            events.append(("write", file))
            return super().write(file, offset, prepare, **options)

        def sync(self, file, **options):
            events.append(("sync", file))
            return super().sync(file, **options)

        def call(self, name, *args, timeout=None):
            events.append((name, *args))
            return super().call(name, *args, timeout=timeout)

    async with Disk(
        tmp_path / "kv", _backend_factory=lambda *args, **more: Watching(create_backend(*args, **more))
    ) as disk:
        await fill(disk, range(20))
        events.clear()
    named = events.index(("rename", TEMPORARY, "index.snap"))
    written = max(at for at in range(named) if events[at][0] == "write")
    assert ("sync", events[written][1]) in events[written:named]
    assert ("sync_directory",) in events[named:]
    # And it is gone, durably, before the next segment is made.
    async with Disk(
        tmp_path / "kv", _backend_factory=lambda *args, **more: Watching(create_backend(*args, **more))
    ) as disk:
        events.clear()
        await fill(disk, range(3))
        gone = events.index(("unlink", "index.snap"))
        synced = events.index(("sync_directory",), gone)
        born = next(at for at, event in enumerate(events) if event[0] == "rename")
        assert gone < synced < born


@pytest.mark.parametrize("options", [{"disk": 2 * MIB}, {"recover": "none"}], ids=["smaller", "none"])
async def test_what_an_opening_drops_on_purpose_is_missed_by_nobody(tmp_path, options):
    path = tmp_path / "kv"
    async with Disk(path, disk=4 * MIB) as disk:
        await fill(disk, range(100), size=20_000)
    before = len(list(path.glob("*.seg")))
    async with Disk(path, **options):
        assert len(list(path.glob("*.seg"))) < before
    assert verify_directory(path).all_damage == []
    async with Disk(path, recover="strict") as disk:
        assert disk.tier.damage == 0


async def test_a_snapshot_of_another_length_is_damage_to_an_opening_and_to_verify_alike(tmp_path):
    path = tmp_path / "kv"
    async with Disk(path) as disk:
        await fill(disk, range(20))
    with (path / "index.snap").open("ab") as file:
        file.write(bytes(300 * KIB))
    assert verify_directory(path).all_damage == ["the index snapshot is damaged"]
    async with Disk(path) as disk:
        assert disk.tier.damage == 1


@pytest.mark.parametrize("pages", [(-1,), (0, -1)], ids=["seal", "header and seal"])
async def test_a_segment_that_only_the_snapshot_vouches_for_is_damage(tmp_path, pages):
    path = tmp_path / "kv"
    async with Disk(path) as disk:
        await fill(disk, range(20))
    segment = min(path.glob("*.seg"))
    data = bytearray(segment.read_bytes())
    for page in pages:
        start = page * 4096 % len(data)
        data[start : start + 4096] = bytes(4096)
    segment.write_bytes(data)
    assert not verify_directory(path).ok
    with pytest.raises(CorruptStoreError):
        await Disk(path, recover="strict").open()
    async with Disk(path) as disk:
        assert disk.tier.damage == 1
        assert len(await disk.get_all(range(20))) == 20
