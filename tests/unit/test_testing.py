"""The tools that the other tests lean on: a tool that misses faults makes every green test worthless."""

from __future__ import annotations

import asyncio
import errno
import random
from contextlib import asynccontextmanager

import pytest

from asynckv.backends import ShortTransferError, ThreadsBackend
from asynckv.errors import ClosedError
from asynckv.testing import (
    MISS,
    FaultyBackend,
    ManualClock,
    ModelCache,
    RecordingBackend,
    Script,
    corrupt,
    error,
    hang,
    short,
    slow,
)
from asynckv.testing.tools import PAGE, Ends, aligned, pattern, turns


@asynccontextmanager
async def faulty(directory, script=None, clock=None):
    backend = FaultyBackend(ThreadsBackend(clock=clock, timeout=30.0), script, clock=clock)
    await backend.start(directory)
    try:
        yield backend
    finally:
        backend.release_all()
        await backend.close()


# scripts


def met(script, operation, calls):
    return [number for number in range(1, calls + 1) if script.next(operation)]


def test_script_chooses_the_calls():
    assert met(Script().add("read", error(5)), "read", 5) == [1]
    assert met(Script().add("read", error(5), nth=3), "read", 5) == [3]
    assert met(Script().add("read", error(5), nth=3, sticky=True), "read", 5) == [3, 4, 5]
    assert met(Script().add("read", error(5), every=2), "read", 5) == [2, 4]
    assert met(Script().add("write", error(5), every=1), "read", 5) == []
    assert met(Script().add("*", error(5), every=1), "read", 2) == [1, 2]
    chance = met(Script(random.Random(7)).add("read", error(5), probability=0.3), "read", 1000)
    assert 200 < len(chance) < 400
    assert chance == met(Script(random.Random(7)).add("read", error(5), probability=0.3), "read", 1000)


def test_script_counts_and_numbers_from_the_rule_on():
    script = Script()
    met(script, "read", 4)
    script.add("read", error(5), nth=2)
    assert met(script, "read", 3) == [2]
    assert script.calls == {"read": 7}
    assert script.injected == {("read", "error"): 1}
    script.add("read", error(5), sticky=True)
    script.clear()
    assert met(script, "read", 3) == []


def test_script_refuses_what_makes_no_sense():
    with pytest.raises(ValueError, match="no data"):
        Script().add("sync", corrupt())
    with pytest.raises(ValueError, match="one of"):
        Script().add("read", error(5), nth=1, every=2)
    script = Script().add("*", short(), every=1)
    assert script.next("sync") is None
    assert script.next("read") is not None


# FaultyBackend


async def test_errors_reach_the_caller_and_do_nothing(tmp_path):
    async with faulty(tmp_path) as backend:
        file = await backend.open("data", create=True, size=PAGE)
        for operation in ("read", "write", "sync", "open", "rename", "list"):
            backend.script.add(operation, error(errno.EDQUOT))
        ends = Ends()
        for submit in (
            lambda: backend.read(file, 0, aligned(PAGE), released=ends),
            lambda: backend.write(file, 0, [aligned(PAGE, b"w")], released=ends),
            lambda: backend.sync(file),
            lambda: backend.open("other", create=True),
            lambda: backend.rename("data", "other"),
            lambda: backend.list(),
        ):
            with pytest.raises(OSError) as caught:
                await submit()
            assert caught.value.errno == errno.EDQUOT
        assert ends.released == 2
        assert await backend.read(file, 0, aligned(PAGE))
        assert [name for name, _, _ in await backend.list()] == ["data"]
        assert backend.script.injected.total() == 6
        assert backend.script.calls["read"] == 2
    assert (tmp_path / "data").read_bytes() == bytes(PAGE)


async def test_a_failing_close_closes(tmp_path):
    async with faulty(tmp_path) as backend:
        file = await backend.open("data", create=True)
        backend.script.add("close", error(errno.EIO))
        with pytest.raises(OSError):
            await backend.close_file(file)
        assert file.fd == -1


async def test_short_transfers(tmp_path):
    async with faulty(tmp_path) as backend:
        file = await backend.open("data", create=True)
        await backend.write(file, 0, [aligned(4 * PAGE, b"old.")])
        backend.script.add("write", short(0.5)).add("read", short(0.5)).add("read_file", short(0.5))
        ends = Ends()
        with pytest.raises(OSError) as caught:
            await backend.write(file, 0, lambda: ([aligned(4 * PAGE, b"new.")], "result"), released=ends)
        assert caught.value.errno == errno.EIO
        with pytest.raises(ShortTransferError):
            await backend.read(file, 0, aligned(4 * PAGE), released=ends)
        assert ends.released == 2
        assert len(await backend.read_file("data", 1 << 20)) == 2 * PAGE
        assert await backend.read_file("data", 1 << 20) == b"new." * (PAGE // 2) + b"old." * (PAGE // 2)


async def test_corruption_flips_one_bit(tmp_path):
    data = pattern(PAGE)

    def flips(got):
        return sum(bin(a ^ b).count("1") for a, b in zip(got, data, strict=True))

    async with faulty(tmp_path) as backend:
        file = await backend.open("data", create=True)
        source = aligned(PAGE, data)
        await backend.write(file, 0, [source])
        backend.script.add("read", corrupt()).add("read_file", corrupt())
        target = aligned(PAGE)
        assert await backend.read(file, 0, target, verify=lambda view: view == data) is False
        assert flips(target) == 1
        assert flips(await backend.read_file("data", PAGE)) == 1
        backend.script.add("write", corrupt())
        assert await backend.write(file, 0, lambda: ([source], 7)) == 7
        assert source == data
        assert flips((tmp_path / "data").read_bytes()) == 1


async def test_slow_operations_start_late(tmp_path):
    clock = ManualClock()
    async with faulty(tmp_path, clock=clock) as backend:
        file = await backend.open("data", create=True, size=PAGE)
        backend.script.add("read", slow(2.0)).add("list", slow(50.0))
        future = backend.read(file, 0, aligned(PAGE))
        listing = backend.list()
        await turns()
        assert backend.reads_in_flight == 1
        assert backend.held == 2
        clock.advance(2.1)
        assert await future is True
        clock.advance(30.0)
        with pytest.raises(TimeoutError):
            await listing


async def test_hung_operations_keep_their_buffers(tmp_path):
    clock = ManualClock()
    (tmp_path / "data").write_bytes(b"d" * PAGE)
    async with faulty(tmp_path, clock=clock) as backend:
        file = await backend.open("data")
        for operation in ("read", "write", "sync"):
            backend.script.add(operation, hang())
        reading, writing, ends = aligned(PAGE), Ends(), Ends()
        futures = [
            backend.read(file, 0, reading, released=ends),
            backend.write(file, PAGE, [aligned(PAGE, b"w")], released=writing),
            backend.sync(file),
        ]
        assert (backend.reads_in_flight, backend.writes_in_flight, backend.held) == (1, 1, 3)
        futures[1].cancel()
        clock.advance(30.1)
        for future in (futures[0], futures[2]):
            with pytest.raises(TimeoutError):
                await future
        assert ends.released == writing.released == 0
        backend.release_all()
        await ends.wait()
        await writing.wait()
        assert reading == b"d" * PAGE  # a late read does write into its buffer
        assert ends.released == writing.released == 1
    assert (tmp_path / "data").read_bytes()[PAGE:] == b"w" * PAGE


async def test_close_with_hung_operations(tmp_path):
    clock = ManualClock()
    backend = FaultyBackend(ThreadsBackend(clock=clock, timeout=5.0), clock=clock)
    await backend.start(tmp_path)
    file = await backend.open("data", create=True, size=PAGE)
    backend.script.add("read", hang())
    ends = Ends()
    future = backend.read(file, 0, aligned(PAGE), released=ends, timeout=100.0)
    close = asyncio.ensure_future(backend.close())
    await turns()
    clock.advance(5.1)
    assert await close == 1
    with pytest.raises(TimeoutError):
        await future
    assert ends.released == 0
    backend.release_all()
    await ends.wait()
    with pytest.raises(ClosedError):
        await backend.list()


# RecordingBackend


@asynccontextmanager
async def recording(directory):
    directory.mkdir()
    backend = RecordingBackend(ThreadsBackend(timeout=30.0))
    await backend.start(directory)
    try:
        yield backend
    finally:
        assert await backend.close() == 0


def content(path):
    return {entry.name: entry.read_bytes() for entry in path.iterdir()}


async def test_the_journal_tells_what_happened(tmp_path):
    async with recording(tmp_path / "store") as backend:
        file = await backend.open("a", create=True, size=2 * PAGE)
        assert await backend.write(file, 0, lambda: ([b"x" * PAGE], "result")) == "result"
        await backend.sync(file)
        await backend.truncate(file, PAGE)
        await backend.rename("a", "b")
        await backend.sync_directory()
        backend.mark("label")
        await backend.unlink("b")
        await backend.close_file(file)
        assert [entry.kind for entry in backend.journal] == [
            "create", "allocate", "write", "sync", "truncate", "rename", "sync_directory", "mark", "unlink",
        ]  # fmt: skip
        assert all(entry.ok and entry.begun <= entry.ended for entry in backend.journal)
        assert backend.journal[2].data == b"x" * PAGE
        assert len({entry.file for entry in backend.journal if entry.file}) == 1
        assert backend.cuts()[-1] == backend.events


async def test_images_with_everything_kept_are_the_directory(tmp_path):
    chance = random.Random(3)
    async with recording(tmp_path / "store") as backend:
        files = [await backend.open(f"f{n}", create=True, size=4 * PAGE) for n in range(3)]
        for step in range(40):
            at = chance.randrange(8) * PAGE
            await backend.write(chance.choice(files), at, [aligned(PAGE, pattern(PAGE, step))])
        await backend.truncate(files[0], PAGE)
        await backend.rename("f1", "g1")
        await backend.rename("f2", "f0")
        await backend.write_file("whole", pattern(10_000))
        for mode in ("kept", "kill"):
            backend.image(tmp_path / mode, mode=mode)
            assert content(tmp_path / mode) == content(tmp_path / "store")


async def test_images_begin_with_what_was_there(tmp_path):
    async with recording(tmp_path / "store") as backend:
        await backend.write_file("old", b"content")
    backend = RecordingBackend(ThreadsBackend())
    await backend.start(tmp_path / "store")
    await backend.unlink("old")
    await backend.close()
    backend.image(tmp_path / "before", cut=0)
    backend.image(tmp_path / "dropped", mode="dropped")
    backend.image(tmp_path / "kept", mode="kept")
    assert content(tmp_path / "before") == content(tmp_path / "dropped") == {"old": b"content"}
    assert content(tmp_path / "kept") == {}


async def test_synced_data_survives_and_unsynced_data_may_not(tmp_path):
    async with recording(tmp_path / "store") as backend:
        file = await backend.open("a", create=True, size=4 * PAGE)
        await backend.sync_directory()
        await backend.write(file, 0, [aligned(PAGE, b"1")])
        await backend.sync(file)
        synced = backend.position()
        await backend.write(file, PAGE, [aligned(PAGE, b"2")])
        await backend.write(file, 0, [aligned(PAGE, b"3")])
        end = backend.position()
        await backend.sync(file)
        durable = backend.position()
    seen = set()
    for image in backend.images(tmp_path, random=random.Random(1), cuts=[synced, end] * 40):
        data = content(image.path)["a"].ljust(4 * PAGE, b"\0")
        sectors = {data[at : at + 1] for at in range(0, PAGE, 512)}
        if image.cut == synced:
            assert data[:PAGE] == b"1" * PAGE
            assert data[PAGE:] == bytes(3 * PAGE)
        else:
            assert sectors <= {b"1", b"3"}
            if image.mode == "dropped":
                assert data[: 2 * PAGE] == b"1" * PAGE + bytes(PAGE)
            if image.mode in ("kept", "kill"):
                assert data[: 2 * PAGE] == b"3" * PAGE + b"2" * PAGE
            seen.add((image.mode, len(sectors), data[PAGE : PAGE + 1]))
    assert ("subset", 1, b"2") in seen
    assert ("subset", 1, b"\0") in seen
    assert ("torn", 2, b"2") in seen
    for mode in ("dropped", "subset", "torn"):
        backend.image(tmp_path / mode, cut=durable, mode=mode)
        assert content(tmp_path / mode) == content(tmp_path / "store")


async def test_names_are_durable_only_with_the_directory(tmp_path):
    async with recording(tmp_path / "store") as backend:
        file = await backend.open("a", create=True)
        await backend.write(file, 0, [aligned(PAGE, b"a")])
        await backend.sync(file)
        created = backend.position()
        await backend.sync_directory()
        await backend.rename("a", "b")
        renamed = backend.position()
        await backend.sync_directory()
    seen = {created: set(), renamed: set()}
    for image in backend.images(tmp_path, random=random.Random(1), cuts=[created, renamed] * 10):
        found = content(image.path)
        assert set(found.values()) <= {b"a" * PAGE}
        seen[image.cut].add(tuple(found))
    assert seen == {created: {(), ("a",)}, renamed: {("a",), ("b",)}}
    backend.image(tmp_path / "end", mode="dropped")
    assert list(content(tmp_path / "end")) == ["b"]


async def test_a_rename_moves_the_file_it_was_called_for(tmp_path):
    """Not what had the name before: of removing that, making a new one and renaming it, any part may be lost."""
    async with recording(tmp_path / "store") as backend:
        for data in (b"old", b"new"):
            file = await backend.open("spare", create=True)
            await backend.write(file, 0, [aligned(PAGE, data)])
            await backend.sync(file)
            if data == b"old":
                await backend.sync_directory()
                await backend.unlink("spare")
        await backend.rename("spare", "taken")
    seen = set()
    for number in range(200):
        image = tmp_path / f"image-{number}"
        backend.image(image, mode="subset", random=random.Random(number))
        seen.add(tuple((name, data[:3]) for name, data in sorted(content(image).items())))
    names = [dict(each) for each in seen]
    assert all(each.get("taken", b"new") == b"new" for each in names)
    assert {"spare": b"old", "taken": b"new"} in names, "the removal was lost"
    assert {"taken": b"new"} in names
    assert {"spare": b"old"} in names
    assert {} in names, "the removal alone survived"


async def test_a_whole_file_is_old_or_new_after_any_crash(tmp_path):
    async with recording(tmp_path / "store") as backend:
        await backend.write_file("whole", b"old" * 2000)
        backend.mark("old")
        await backend.write_file("whole", b"new" * 3000)
        backend.mark("new")
    seen = set()
    for image in backend.images(tmp_path, random=random.Random(1)):
        data = content(image.path).get("whole")
        seen.add(data)
        assert data in ({None, b"old" * 2000} if not image.marks else {b"old" * 2000, b"new" * 3000})
        if "new" in image.marks:
            assert data == b"new" * 3000
    assert seen == {None, b"old" * 2000, b"new" * 3000}


async def test_what_failed_or_was_cancelled_is_never_certain(tmp_path):
    directory = tmp_path / "store"
    directory.mkdir()
    inner = FaultyBackend(ThreadsBackend(timeout=30.0))
    backend = RecordingBackend(inner)
    await backend.start(directory)
    file = await backend.open("a", create=True, size=PAGE)
    await backend.sync_directory()
    await backend.sync(file)
    inner.script.add("sync", error(errno.EIO)).add("write", short(0.5), nth=2)
    await backend.write(file, 0, [aligned(PAGE, b"1")])
    with pytest.raises(OSError):
        await backend.sync(file)
    with pytest.raises(OSError):
        await backend.write(file, 0, [aligned(PAGE, b"2")])
    await backend.sync(file)
    await backend.close()
    heads = set()
    for image in backend.images(tmp_path, random=random.Random(1), cuts=[backend.events] * 20, modes=["subset"]):
        heads.add(content(image.path)["a"][:1])
    assert heads == {b"1", b"2"}  # the second sync covers the first write, and the failed one is anybody's guess
    failed = next(entry for entry in backend.journal if entry.kind == "sync" and not entry.ok)
    backend.image(tmp_path / "dropped", cut=failed.ended, mode="dropped")
    assert content(tmp_path / "dropped")["a"] == bytes(PAGE)


async def test_writes_in_flight_at_the_cut_are_torn(tmp_path):
    async with recording(tmp_path / "store") as backend:
        file = await backend.open("a", create=True, size=8 * PAGE)
        await backend.sync(file)
        await backend.sync_directory()
        await asyncio.gather(*(backend.write(file, n * PAGE, [aligned(PAGE, b"%d" % n)]) for n in range(1, 8)))
    first = next(entry for entry in backend.journal if entry.kind == "write")
    partial = 0
    for image in backend.images(tmp_path, random=random.Random(1), cuts=[first.begun] * 40, modes=["kill"]):
        page = content(image.path)["a"][first.offset : first.offset + PAGE]
        partial += 0 < sum(map(bool, page)) < PAGE
    assert partial > 5


async def test_image_modes_are_named(tmp_path):
    with pytest.raises(ValueError, match="mode"):
        RecordingBackend(ThreadsBackend()).image(tmp_path / "x", mode="melted")


# ModelCache


def test_model_in_session():
    model = ModelCache()
    assert model.allowed("k") == {MISS}
    first = model.put("k", 1)
    assert model.allowed("k") == {MISS, 1}
    first.done(True)
    second = model.put("k", 2)
    assert model.allowed("k") == {MISS, 1, 2}
    second.done(True)
    assert model.allowed("k") == {MISS, 2}
    model.put("k", 3).failed()
    assert model.allowed("k") == {MISS, 2, 3}
    model.put("k", 4).refused()
    assert model.allowed("k") == {MISS, 2, 3}
    model.put("k", 5).done(False)
    assert model.allowed("k") == {MISS}
    model.put("k", 6).done()
    model.check("k", 6)
    with pytest.raises(AssertionError):
        model.check("k", 2)
    deleting = model.delete("k")
    assert model.allowed("k") == {MISS, 6}
    deleting.done()
    assert model.allowed("k") == {MISS}
    model.put("j", 7).done()
    model.clear().done()
    assert model.allowed("j") == {MISS}
    assert model.keys() == ["k", "j"]
    with pytest.raises(ValueError, match="MISS"):
        model.put("k", MISS)


def test_model_after_a_crash():
    model = ModelCache()
    for version in (1, 2):
        model.put("k", version).done()
    assert model.allowed_after_crash("k") == {MISS, 1, 2}
    flush = model.flush()
    late = model.put("k", 3)
    late.done()
    before = model.position()
    flush.done()
    assert model.allowed_after_crash("k", before) == {MISS, 1, 2, 3}
    assert model.crash(before).allowed("k") == {MISS, 1, 2, 3}
    assert model.allowed_after_crash("k") == {MISS, 2, 3}
    model.put("k", 4).failed()
    model.flush().done()
    assert model.allowed_after_crash("k") == {MISS, 3, 4}
    model.put("k", 5).done(False)
    assert model.allowed_after_crash("k") == {MISS, 3, 4}
    model.flush().done()
    assert model.allowed_after_crash("k") == {MISS}


def test_model_flush_covers_only_what_had_returned():
    model = ModelCache()
    model.put("k", 1).done()
    running = model.put("k", 2)
    flush = model.flush()
    running.done()
    flush.done()
    assert model.allowed_after_crash("k") == {MISS, 1, 2}


def test_model_flush_that_failed_or_never_returned_covers_nothing():
    model = ModelCache()
    model.put("k", 1).done()
    model.flush().done()
    model.put("k", 2).done()
    model.flush().failed()
    model.flush()
    assert model.allowed_after_crash("k") == {MISS, 1, 2}


def test_model_of_deletes_and_crashes():
    model = ModelCache()
    model.put("k", 1).done()
    model.flush().done()
    begun = model.position()
    deleting = model.delete("k")
    model.put("k", 2)
    assert model.allowed_after_crash("k") == {MISS, 1, 2}
    deleting.done()
    assert model.allowed_after_crash("k") == {MISS, 2}
    assert model.allowed_after_crash("k", begun) == {MISS, 1}
    after = model.crash(begun)
    assert after.allowed("k") == after.allowed_after_crash("k") == {MISS, 1}
    after.put("k", 9)
    assert after.allowed("k") == {MISS, 1, 9}
    clearing = after.clear()
    assert after.allowed_after_crash("k") == {MISS, 1, 9}
    clearing.done()
    assert after.allowed_after_crash("k") == {MISS}
    assert after.crash().keys() == []


def test_model_knows_which_misses_are_losses():
    model = ModelCache()
    assert not model.kept("k")
    putting = model.put("k", 1)
    assert not model.kept("k"), "it may fail"
    putting.done()
    assert model.kept("k")
    assert not model.kept_after_crash("k"), "it was never flushed"
    before = model.position()
    model.flush().done()
    assert model.kept_after_crash("k")
    assert not model.kept_after_crash("k", before)
    model.put("k", 2).failed()
    assert model.kept("k"), "the old one or the new one"
    assert model.kept_after_crash("k")
    assert model.crash().kept("k")
    assert not model.crash(before).kept("k")
    assert not model.crash(may_drop=True).kept("k")
    model.delete("k").failed()
    assert not model.kept("k")
    assert not model.kept_after_crash("k")
    model.put("k", 3).done()
    assert model.kept("k")
    assert not model.kept_after_crash("k"), "the delete may be on disk and the put not"
    model.put("k", 4).done(False)
    assert not model.kept("k")


def test_model_believes_what_a_reopened_store_shows():
    model = ModelCache()
    for version in (1, 2):
        for key in "jkl":
            model.put(key, version).done()
        if version == 1:
            model.flush().done()
    model = model.crash()
    assert model.allowed("k") == {MISS, 1, 2}
    model.observe("k", 1)
    assert model.allowed("k") == model.allowed_after_crash("k") == {MISS, 1}
    assert model.kept("k")
    model.observe("j", MISS)
    assert model.allowed("j") == {MISS, 1, 2}, "it may come back"
    assert model.kept("j")
    model.observe("j", MISS, final=True)
    assert model.allowed("j") == {MISS}
    assert not model.kept("j")
    model.put("l", 3)
    model.observe("l", 1)
    assert model.allowed("l") == {MISS, 1, 2, 3}, "not any more as it was found"
    again = model.crash()
    assert again.allowed("k") == {MISS, 1}
    assert again.kept_after_crash("k")
    assert again.allowed("j") == {MISS}


async def test_model_and_journal_share_positions(tmp_path):
    async with recording(tmp_path / "store") as backend:
        model = ModelCache(backend.position)
        file = await backend.open("k", create=True, size=PAGE)
        await backend.sync_directory()
        for version in (1, 2):
            putting = model.put("k", version)
            await backend.write(file, 0, [aligned(PAGE, b"%d" % version)])
            putting.done()
            flushing = model.flush()
            await backend.sync(file)
            flushing.done()
    seen = set()
    for image in backend.images(tmp_path, random=random.Random(1), cuts=range(backend.events + 1), modes=["subset"]):
        head = content(image.path).get("k", b"\0")[:1].strip(b"\0")
        value = int(head) if head else MISS
        seen.add(value)
        assert value in model.allowed_after_crash("k", image.cut)
    assert seen == {MISS, 1, 2}
