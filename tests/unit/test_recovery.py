"""Reopening: with a snapshot, after a kill, with damage, while serving."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import time

import pytest
from logkit import KIB, MIB, Disk, allocated, crash_copy, damage, fill, killed, segments_of, value_of, write_over

from asynckv import Namespace
from asynckv.backends import create_backend
from asynckv.errors import CorruptStoreError, DiskError
from asynckv.testing import RecordingBackend
from asynckv.tiers import inspect_directory
from asynckv.tiers.layout import LOG_START, PAGE


@pytest.fixture
def path(tmp_path):
    return tmp_path / "kv"


async def test_a_clean_close_needs_no_scan_and_a_kill_does(path, tmp_path):
    async def work(disk):
        await fill(disk, range(50))
        await fill(disk, range(20), 1)
        await disk.delete(30)

    crashed = await killed(path, tmp_path / "crashed", work)
    expected = {key: value_of(key, int(key < 20)) for key in range(50) if key != 30}
    for place, scanned in ((path, False), (crashed, True)):
        async with Disk(place) as disk:
            assert disk.recovered == scanned
            assert await disk.get_all(range(60)) == expected
            assert disk.tier.damage == 0
            disk.table.check()
    async with Disk(crashed) as disk:
        assert not disk.recovered, "the close after the recovery wrote a snapshot"


async def test_a_snapshot_is_gone_before_the_log_changes(path, tmp_path):
    async with Disk(path) as disk:
        await fill(disk, range(5))
    assert (path / "index.snap").exists()
    async with Disk(path) as disk:
        assert (path / "index.snap").exists()
        await fill(disk, range(5), 1)
        assert not (path / "index.snap").exists()


async def test_a_session_that_only_reads_keeps_the_snapshot(path):
    async with Disk(path) as disk:
        await fill(disk, range(5))
    before = (path / "index.snap").read_bytes()
    async with Disk(path) as disk:
        assert await disk.get(3) == value_of(3)
    assert (path / "index.snap").read_bytes() == before
    async with Disk(path) as disk:
        assert not disk.recovered


async def test_an_old_snapshot_that_comes_back_is_refused(path):
    async with Disk(path) as disk:
        await fill(disk, range(5))
    old = (path / "index.snap").read_bytes()
    async with Disk(path) as disk:
        await fill(disk, range(3), 1)
        await disk.delete(4)
    (path / "index.snap").write_bytes(old)
    async with Disk(path) as disk:
        assert disk.recovered
        assert await disk.get_all(range(5)) == {0: value_of(0, 1), 1: value_of(1, 1), 2: value_of(2, 1), 3: value_of(3)}


@pytest.mark.parametrize("spoil", ["flip head", "flip body", "cut", "empty", "zeros"])
async def test_a_damaged_snapshot_means_a_scan(path, spoil):
    async with Disk(path) as disk:
        await fill(disk, range(40))
    file = path / "index.snap"
    data = bytearray(file.read_bytes())
    if spoil == "flip head":
        data[100] ^= 1
    elif spoil == "flip body":
        data[PAGE + 300] ^= 1
    file.write_bytes({"cut": data[:PAGE], "empty": b"", "zeros": bytes(len(data))}.get(spoil, data))
    async with Disk(path) as disk:
        assert disk.recovered
        assert len(await disk.get_all(range(40))) == 40


async def test_cleared_and_deleted_blocks_stay_gone(path, tmp_path):
    async def work(disk):
        await fill(disk, range(30))
        await disk.clear()
        await fill(disk, range(10), 1)
        await disk.delete(4)

    crashed = await killed(path, tmp_path / "crashed", work, segment=64 * KIB, disk=MIB)
    for place in (path, crashed):
        async with Disk(place, segment=64 * KIB, disk=MIB) as disk:
            assert await disk.get_all(range(30)) == {key: value_of(key, 1) for key in range(10) if key != 4}


async def test_recover_none_starts_empty_for_good(path):
    other = Namespace(model="other")
    async with Disk(path, namespace=other) as disk:
        await fill(disk, range(5), 7)
    async with Disk(path) as disk:
        await fill(disk, range(5))
    async with Disk(path, recover="none") as disk:
        assert not disk.recovered
        assert disk.table.length == 0
        await disk.put(3, b"new")
        disk.table.remove(3)
    async with Disk(path) as disk:
        assert await disk.get_all(range(5)) == {}
    async with Disk(path, namespace=other) as disk:
        assert len(await disk.get_all(range(5))) == 5


async def test_namespaces_share_the_room_and_nothing_else(path):
    one, other = Namespace(model="one"), Namespace(model="other")
    for round_ in range(3):
        for space in (one, other):
            async with Disk(path, namespace=space) as disk:
                found = await disk.get_all(range(5))
                expected = {k: value_of(k, round_ - 1 + 100 * (space is other)) for k in range(5)} if round_ else {}
                assert found == expected
                await fill(disk, range(5), round_ + 100 * (space is other))


async def test_a_foreign_segment_with_a_high_number_hides_nothing(path, tmp_path):
    async with Disk(tmp_path / "other") as disk:
        await fill(disk, range(5), 9)
    async with Disk(path) as disk:
        await fill(disk, range(5))
    shutil.copy(segments_of(tmp_path / "other")[0], path / "0000000000004000.seg")
    (path / ("9" * 16 + ".seg")).write_bytes(b"x" * 5000)
    async with Disk(path) as disk:
        assert await disk.get_all(range(5)) == {key: value_of(key) for key in range(5)}
        await fill(disk, range(5, 9))
        assert "0000000000000002.seg" in [each.name for each in segments_of(path)], "their numbers are not believed"
    async with Disk(path) as disk:
        assert len(await disk.get_all(range(9))) == 9


@pytest.mark.parametrize("lost", ["flipped", "missing"])
async def test_a_lost_superblock_is_made_good_from_the_segments(path, lost):
    async with Disk(path) as disk:
        await fill(disk, range(5))
    if lost == "missing":
        (path / "superblock").unlink()
    else:
        (path / "superblock").write_bytes(bytes(PAGE))
    async with Disk(path) as disk:
        assert len(await disk.get_all(range(5))) == 5
        assert disk.tier.damage == 1
    async with Disk(path) as disk:
        assert disk.tier.damage == 0


async def test_new_values_win_over_what_is_recovered(path, tmp_path):
    async def work(disk):
        await fill(disk, range(20))

    crashed = await killed(path, tmp_path / "crashed", work, segment=64 * KIB, disk=MIB)
    disk = Disk(crashed, segment=64 * KIB, disk=MIB)
    await disk.open(recover=False)
    disk.table.recovering = True
    await disk.put(3, b"new")
    assert disk.table.remove(4) == 2, "while recovering a removal always owes a tombstone"
    await disk.write([(0, (4).to_bytes(8, "little"))])
    await disk.recover()
    await disk.flush()
    assert await disk.get(3) == b"new"
    assert await disk.get(4) is None
    assert await disk.get(5) == value_of(5)
    copy = crash_copy(crashed, tmp_path / "again")
    await disk.close()
    async with Disk(copy, segment=64 * KIB, disk=MIB) as disk:
        assert await disk.get(3) == b"new"
        assert await disk.get(4) is None


async def test_appends_wait_for_recovery_when_there_is_no_room(path, tmp_path):
    options = {"segment": 64 * KIB, "disk": 320 * KIB, "memory": 128 * KIB}

    async def work(disk):
        await fill(disk, range(200), size=5000)

    crashed = await killed(path, tmp_path / "crashed", work, **options)
    disk = Disk(crashed, **options)
    await disk.open(recover=False)
    disk.table.recovering = True
    writing = asyncio.ensure_future(fill(disk, range(1000, 1040), size=5000))
    await asyncio.sleep(0.1)
    assert not writing.done()
    await disk.recover()
    await writing
    assert allocated(crashed) <= 320 * KIB
    await disk.close()


async def test_a_clear_while_recovering_lets_nothing_older_in(path, tmp_path):
    async def work(disk):
        await fill(disk, range(200), size=5000)

    options = {"segment": 64 * KIB, "disk": 4 * MIB, "memory": MIB}
    crashed = await killed(path, tmp_path / "crashed", work, **options)
    disk = Disk(crashed, **options)
    await disk.open(recover=False)
    disk.table.recovering = True
    calls = []

    def progress() -> None:
        calls.append(disk.table.length)
        if len(calls) == 2:
            disk.table.clear()

    await disk.recover(progress)
    await disk.clear()
    assert disk.table.length == 0
    await disk.close()
    async with Disk(crashed, **options) as disk:
        assert await disk.get_all(range(200)) == {}


async def test_a_close_after_a_clear_while_recovering_leaves_a_snapshot(path, tmp_path):
    async def work(disk):
        await fill(disk, range(200), size=5000)

    options = {"segment": 64 * KIB, "disk": 4 * MIB, "memory": MIB}
    crashed = await killed(path, tmp_path / "crashed", work, **options)
    open_segment = segments_of(crashed)[-1]
    disk = Disk(crashed, **options)
    await disk.open(recover=False)
    disk.table.recovering = True
    await disk.clear()
    await fill(disk, [7], 1)
    await disk.recover()
    copy = crash_copy(crashed, tmp_path / "again")
    await disk.close()
    assert not open_segment.exists(), "nobody has read it, and nobody will"
    for place, scanned in ((crashed, False), (copy, True)):
        async with Disk(place, **options) as disk:
            assert disk.recovered == scanned
            assert await disk.get_all(range(200)) == {7: value_of(7, 1)}


async def test_a_clear_that_failed_while_recovering_drops_nothing(path, tmp_path):
    async def work(disk):
        await fill(disk, range(50), size=5000)

    options = {"segment": 64 * KIB, "disk": 4 * MIB, "memory": MIB}
    crashed = await killed(path, tmp_path / "crashed", work, **options)
    before = segments_of(crashed)
    disk = Disk(crashed, **options)
    await disk.open(recover=False)
    disk.table.recovering = True
    await disk.tier.prepare(1)
    disk.tier._backend.sync = failing
    with pytest.raises(OSError):
        await disk.clear()
    del disk.tier._backend.sync
    await disk.recover()
    await disk.close()
    assert all(each.exists() for each in before)


def failing(*_args, **_named):
    future = asyncio.get_running_loop().create_future()
    future.set_exception(OSError(errno.EIO, "injected"))
    return future


async def test_lost_batches_take_what_they_may_have_replaced_with_them(path, tmp_path):
    async def work(disk):
        await fill(disk, range(10))
        await fill(disk, range(5), 1)
        await fill(disk, [50])
        await fill(disk, [51])

    crashed = await killed(path, tmp_path / "crashed", work)
    (segment,) = segments_of(crashed)
    data = segment.read_bytes()
    begin = data.find(value_of(0, 1)) // PAGE * PAGE - PAGE
    damage(segment, begin, 20 * KIB)
    async with Disk(crashed) as disk:
        found = await disk.get_all(range(60))
        assert 51 in found
        assert all(key >= 50 for key in found), "no old value, even of a key that was not replaced"
        assert disk.tier.damage
    async with Disk(crashed) as disk:
        assert 51 in await disk.get_all(range(60))


@pytest.mark.parametrize("content", [b"", b"x" * 512, bytes(5000), bytes(64 * KIB), b"noise" * 10_000])
async def test_a_newest_segment_without_a_trace_takes_all_before_it(path, tmp_path, content):
    """It may have replaced or removed any of them: nothing old comes back, and what is put then stays."""
    async with Disk(path) as disk:
        await fill(disk, range(10))

    async def work(disk):
        await disk.delete(3)
        await fill(disk, range(2), 1)

    crashed = await killed(path, tmp_path / "crashed", work)
    segments_of(crashed)[-1].write_bytes(content)
    async with Disk(crashed) as disk:
        assert await disk.get_all(range(10)) == {}
        assert disk.tier.damage > 0
        await fill(disk, range(4), 2)
    async with Disk(crashed) as disk:
        assert await disk.get_all(range(10)) == {key: value_of(key, 2) for key in range(4)}


async def test_a_torn_batch_does_not_hide_what_was_flushed_before(path, tmp_path):
    crashed = await killed(path, tmp_path / "crashed", write_over)
    (segment,) = segments_of(crashed)
    at = segment.read_bytes().find(value_of(2, 1, 5000))
    damage(segment, at + 4000)
    async with Disk(crashed) as disk:
        found = await disk.get_all(range(5))
        assert found == {key: value_of(key) if key == 2 else value_of(key, 1, 5000) for key in range(5)}


@pytest.mark.parametrize("gate", ["open", "rename", "unlink"])
async def test_segments_dropped_by_recovery_never_become_a_file_that_the_writer_makes(path, tmp_path, gate):
    """One side of the race for the name of the spare file is held while the other one goes all the way."""
    options = {"segment": 64 * KIB, "disk": 2 * MIB}

    async def work(disk):
        await fill(disk, range(60), size=5000)
        await disk.clear()
        await fill(disk, range(100, 105))

    crashed = await killed(path, tmp_path / "crashed", work, **options)
    disk = Disk(crashed, **options)
    await disk.open(recover=False)
    disk.table.recovering = True
    backend = disk.tier._backend
    entered, go = asyncio.Event(), asyncio.Event()
    original = getattr(backend, gate)

    def gated(name, *args, **named):
        if gate == "open" and name != "spare":
            return original(name, *args, **named)
        return asyncio.ensure_future(held(name, *args, **named))

    async def held(*args, **named):
        entered.set()
        await go.wait()
        return await original(*args, **named)

    setattr(backend, gate, gated)
    writer = lambda: fill(disk, range(200, 203), size=5000)  # noqa: E731
    sides = [disk.recover, writer] if gate == "unlink" else [writer, disk.recover]
    first = asyncio.ensure_future(sides[0]())
    async with asyncio.timeout(5):
        await entered.wait()
    second = asyncio.ensure_future(sides[1]())
    await asyncio.wait([second], timeout=0.3)
    go.set()
    await asyncio.gather(first, second)
    copy = crash_copy(crashed, tmp_path / "again")
    await disk.close()
    assert not (copy / "spare").exists(), "recovery gave a dead segment the name"
    expected = {key: value_of(key) for key in range(100, 105)}
    expected.update((key, value_of(key, 0, 5000)) for key in range(200, 203))
    for place in (copy, crashed):
        async with Disk(place, **options) as disk:
            assert await disk.get_all(range(300)) == expected
            assert disk.tier.damage == 0


@pytest.mark.parametrize("which", ["payload", "header", "footer", "seal", "first page"])
async def test_strict_raises_on_any_damage_and_quiet_serves(path, which):
    async with Disk(path, segment=64 * KIB, disk=MIB) as disk:
        await fill(disk, range(20))
    segment = segments_of(path)[0]
    data = segment.read_bytes()
    offset = {
        "payload": data.find(value_of(3)) + 10,
        "header": LOG_START + 200,
        "footer": len(data) - 2 * PAGE + 150,
        "seal": len(data) - PAGE + 40,
        "first page": 40,
    }[which]
    (path / "index.snap").unlink()
    damage(segment, offset)
    copy = crash_copy(path, path.parent / "copy")
    async with Disk(copy, segment=64 * KIB, disk=MIB) as disk:
        found = await disk.get_all(range(20))
        assert found.keys() >= set(range(20)) - {3}
    if which == "seal":
        return  # a crash could have left that: nothing newer says that there was one
    with pytest.raises(CorruptStoreError):
        await Disk(path, segment=64 * KIB, disk=MIB, recover="strict").open()


async def test_strict_opens_a_whole_store(path, tmp_path):
    async def work(disk):
        await fill(disk, range(100), size=5000)
        await fill(disk, range(30), 1)
        await disk.delete(5)

    crashed = await killed(path, tmp_path / "crashed", work, segment=64 * KIB, disk=2 * MIB)
    for place in (path, crashed):
        async with Disk(place, segment=64 * KIB, disk=2 * MIB, recover="strict") as disk:
            assert len(await disk.get_all(range(100))) == 99


async def test_recovery_seals_what_a_kill_left_open(path, tmp_path):
    async def work(disk):
        await fill(disk, range(10))

    crashed = await killed(path, tmp_path / "crashed", work)
    assert segments_of(crashed)[0].stat().st_size == 256 * KIB
    disk = Disk(crashed)
    disk.snapshot = False
    async with disk:
        assert disk.tier.disk_used < 64 * KIB
    report = inspect_directory(crashed)
    assert [segment.state for segment in report.segments] == ["sealed"]
    async with Disk(crashed) as disk:
        assert len(await disk.get_all(range(10))) == 10


async def test_reclaimed_segments_that_come_back_stay_dead(path, tmp_path):
    options = {"segment": 64 * KIB, "disk": 512 * KIB, "memory": 128 * KIB}
    async with Disk(path, **options) as disk:
        await fill(disk, range(10), size=3000)
        early = crash_copy(path, tmp_path / "early")
        for key in range(10):
            await disk.delete(key)
        await fill(disk, range(100, 300), size=5000)
        assert disk.tier.oldest_segment > 2
        later = crash_copy(path, tmp_path / "later")
    for name in os.listdir(early):
        if name.endswith(".seg") and not (later / name).exists():
            shutil.copy(early / name, later / name)
    async with Disk(later, **options) as disk:
        assert await disk.get_all(range(10)) == {}
        assert len(await disk.get_all(range(100, 300))) > 20


async def test_huge_and_sparse_files_cost_nothing(path):
    async with Disk(path) as disk:
        await fill(disk, range(5))
    for name in ("0000000000000007.seg", "index.snap", "superblock"):
        with open(path / name, "wb") as file:
            file.truncate(1 << 40)
    began = time.monotonic()
    with pytest.raises(OSError):  # a terabyte of names passes any cap; the segment of ours is older than that file
        await Disk(path, disk=1 << 30).open()
    (path / "index.snap").unlink(missing_ok=True)
    (path / "superblock").unlink()
    async with Disk(path, disk=1 << 30) as disk:
        assert time.monotonic() - began < 5
        assert disk.tier.disk_used < 1 << 30


async def test_a_crash_while_recovering_costs_nothing(path, tmp_path):
    async def work(disk):
        await fill(disk, range(100), size=5000)
        await fill(disk, range(50), 1, size=5000)

    options = {"segment": 64 * KIB, "disk": 4 * MIB}
    crashed = await killed(path, tmp_path / "crashed", work, **options)
    copies = []
    disk = Disk(crashed, **options)
    await disk.open(recover=False)
    await disk.recover(lambda: copies.append(crash_copy(crashed, tmp_path / f"copy{len(copies)}")))
    await disk.close()
    assert len(copies) > 3
    for copy in copies:
        async with Disk(copy, **options) as disk:
            assert await disk.get_all(range(100)) == {k: value_of(k, int(k < 50), 5000) for k in range(100)}
            assert disk.tier.damage == 0


async def test_many_short_sessions_stay_bounded_and_keep_all(path):
    for session in range(40):
        async with Disk(path, segment=64 * KIB, disk=MIB) as disk:
            await fill(disk, [session])
    async with Disk(path, segment=64 * KIB, disk=MIB) as disk:
        found = await disk.get_all(range(40))
        assert 39 in found
        assert all(value == value_of(key) for key, value in found.items())
    assert allocated(path) <= MIB


@pytest.mark.parametrize("killed_too", [True, False])
async def test_damage_of_another_namespace_costs_ours_nothing(path, tmp_path, killed_too):
    ours, theirs = Namespace(model="a"), Namespace(model="b")
    async with Disk(path, namespace=ours) as disk:
        await fill(disk, range(10))
    if killed_too:
        place = await killed(path, tmp_path / "crashed", lambda disk: fill(disk, range(10)), namespace=theirs)
    else:
        place = path
        async with Disk(path, namespace=theirs) as disk:
            await fill(disk, range(10))
    damage(segments_of(place)[-1], 100)  # its first page
    async with Disk(place, namespace=ours) as disk:
        assert await disk.get_all(range(10)) == {key: value_of(key) for key in range(10)}


@pytest.mark.parametrize("which", ["all", "newest"])
async def test_a_shortage_of_descriptors_loses_nothing(path, tmp_path, which):
    async def work(disk):
        for key in range(4):
            await fill(disk, range(key * 10, key * 10 + 10), size=20_000)

    crashed = await killed(path, tmp_path / "crashed", work)
    names = [segment.name for segment in segments_of(crashed)]

    class Short(RecordingBackend):
        def call(self, function, *args, timeout=None):
            if function == "open" and args[0] in (names if which == "all" else names[-1:]):
                future = asyncio.get_running_loop().create_future()
                future.set_exception(OSError(errno.EMFILE, "too many open files"))
                return future
            return super().call(function, *args, timeout=timeout)

    def factory(*args, **options):
        return Short(create_backend(*args, **options))

    with pytest.raises(DiskError):
        async with Disk(crashed, _backend_factory=factory):
            pass
    async with Disk(crashed) as disk:
        assert len(await disk.get_all(range(40))) == 40
