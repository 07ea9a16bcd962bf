"""What somebody else, or a heavy accident, may leave in a store's directory: it opens, serves, writes, and removes
nothing that is not its own. Files with our names and other bytes, things with our names that are no files, files that
may not be opened, hard links, the superblock of another store; and the newest segment destroyed to the last byte where
several namespaces share the directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import random
import shutil
import socket
import time

import pytest
from levels import rounds, seed
from logkit import KIB, MIB, Disk, crash_copy, damage, fill, killed, segments_of, value_of

from asynckv import Namespace
from asynckv.backends import create_backend
from asynckv.backends.base import Wrapper
from asynckv.errors import CorruptStoreError, DiskError
from asynckv.tiers import verify_directory
from asynckv.tiers.layout import LOG_START, PAGE, SPARE_NAMES, SUPERBLOCK_NAME, segment_name
from asynckv.tiers.repair import repair_directory
from asynckv.tiers.report import LIVE, key_of_wire

OPEN_SECONDS_MAX = 5
OURS, THEIRS = Namespace(model="ours"), Namespace(model="theirs")
SMALL = {"segment": 64 * KIB, "disk": 2 * MIB}


@pytest.fixture
def tmp_path(memory_path):
    return memory_path


@pytest.fixture
def path(tmp_path):
    return tmp_path / "kv"


# -- the newest segment destroyed, several namespaces ----------------------------------------------------------------


def destroy(segment, how):
    """Leave nothing of a segment that verifies."""
    data = bytearray(segment.read_bytes())
    noise = random.Random(7).randbytes(len(data))
    kept = {"magic": 8, "first fields": 40, "namespace": 72}.get(how, 0)
    data[kept:] = {"noise": noise, "empty": b""}.get(how, bytes(max(len(data) - kept, 0)))
    segment.write_bytes(data)


async def shared(path, target, *, sealed):
    """Ours: blocks 0 to 39, one of them replaced and one deleted in the newest segment; and another namespace's."""
    async with Disk(path, namespace=THEIRS, **SMALL) as disk:
        await fill(disk, range(5), 9)

    async def work(disk):
        if not sealed:
            await fill(disk, range(40), size=5000)
            first = len(segments_of(path))
            while len(segments_of(path)) == first:
                await fill(disk, [39], size=5000)
        await disk.delete(3)
        await fill(disk, [4], 1, size=5000)

    if sealed:
        async with Disk(path, namespace=OURS, **SMALL) as disk:
            await fill(disk, range(40), size=5000)
    return await killed(path, target, work, namespace=OURS, **SMALL)


@pytest.mark.parametrize("sealed", [True, False], ids=["sealed before", "unsealed before"])
@pytest.mark.parametrize("how", ["zeros", "noise", "empty", "magic", "first fields", "namespace"])
async def test_nothing_old_comes_back_where_the_newest_segment_is_destroyed(path, tmp_path, how, sealed):
    place = await shared(path, tmp_path / "crashed", sealed=sealed)
    newest = segments_of(place)
    if not sealed:  # as if the seal of the one before had not been written yet
        unseal(newest[-2])
    destroy(newest[-1], how)
    async with Disk(place, namespace=OURS, **SMALL) as disk:
        found = await disk.get_all(range(40))
        assert 3 not in found, "it was deleted"
        assert found.get(4) != value_of(4, 0, 5000), "it was replaced"
        assert disk.tier.damage
        await fill(disk, range(6), 2)
    async with Disk(place, namespace=OURS, **SMALL) as disk:
        assert await disk.get_all(range(6)) == {key: value_of(key, 2) for key in range(6)}


def unseal(segment):
    size = segment.stat().st_size
    with open(segment, "r+b") as file:
        file.seek(size - PAGE)
        file.write(bytes(PAGE))
        file.truncate(64 * KIB)


@pytest.mark.parametrize("how", ["header", "all but the claim", "all, closed", "all, rotated"])
async def test_damage_that_is_known_to_be_anothers_costs_ours_nothing(path, tmp_path, how):
    async with Disk(path, namespace=OURS, **SMALL) as disk:
        await fill(disk, range(10))
    if how == "all, closed":  # their snapshot names it
        async with Disk(path, namespace=THEIRS, **SMALL) as disk:
            await fill(disk, range(10))
        place = path
    else:
        keys = range(60) if how == "all, rotated" else range(1)

        async def work(disk):
            await fill(disk, keys, size=3000)
            await disk.tier._reclaimer.drain()

        place = await killed(path, tmp_path / "crashed", work, namespace=THEIRS, **SMALL)
    newest = segments_of(place)[-1]
    if how == "header":
        damage(newest, 0, 40)
        damage(newest, 72, PAGE - 72)
    elif how == "all but the claim":
        damage(newest, 72, PAGE - 72)
        damage(newest, LOG_START, newest.stat().st_size - LOG_START)
    else:
        destroy(newest, "noise")
    async with Disk(place, namespace=OURS, **SMALL) as disk:
        assert await disk.get_all(range(10)) == {key: value_of(key) for key in range(10)}


@pytest.mark.parametrize("how", ["recover none", "clear", "clear while recovering"])
async def test_another_namespace_removes_no_evidence(path, tmp_path, how):
    """The newest segment of ours is destroyed; what another namespace does then keeps nothing old alive."""
    place = await shared(path, tmp_path / "crashed", sealed=False)
    unseal(segments_of(place)[-2])
    destroy(segments_of(place)[-1], "noise")
    lost = segments_of(place)[-1]
    theirs = Disk(place, namespace=THEIRS, recover="none" if how == "recover none" else "quiet", **SMALL)
    await theirs.open(recover=how != "clear while recovering")
    if how != "recover none":
        theirs.table.recovering = theirs.tier.recovering
        theirs.table.clear()
        if theirs.tier.recovering:
            await theirs.tier.recover(lambda: None)
            theirs.table.recovering = False
        await theirs.clear()
    await theirs.close()
    assert lost.exists()
    async with Disk(place, namespace=THEIRS, **SMALL) as disk:
        assert await disk.get_all(range(5)) == {}
    async with Disk(place, namespace=OURS, **SMALL) as disk:
        found = await disk.get_all(range(40))
        assert 3 not in found
        assert found.get(4) != value_of(4, 0, 5000)


async def test_a_segment_that_is_given_up_with_a_damaged_first_page_stays_so(path, tmp_path):
    """Whether its claim is there or not."""
    for what in (PAGE, LOG_START):
        place = await killed(path, tmp_path / f"crashed{what}", lambda disk: fill(disk, range(5)))
        shutil.rmtree(path)
        damage(segments_of(place)[-1], 0, what)
        async with Disk(place, recover="none"):
            pass
        async with Disk(place) as disk:
            assert await disk.get_all(range(5)) == {}


async def test_a_new_segment_with_a_damaged_first_page_takes_nothing_with_it(path, tmp_path):
    """It has a claim from its birth on: nothing is lost with an empty one."""
    async with Disk(path) as disk:
        await fill(disk, range(10))
    place = await killed(path, tmp_path / "crashed", lambda disk: disk.tier.prepare(1))
    newest = segments_of(place)[-1]
    damage(newest, 0, PAGE)
    async with Disk(place) as disk:
        assert await disk.get_all(range(10)) == {key: value_of(key) for key in range(10)}
        assert disk.tier.damage


async def test_a_segment_known_by_its_batches_alone_is_cut_by_a_newer_one_that_is_destroyed(path, tmp_path):
    async def work(disk):
        await fill(disk, range(5))

    async with Disk(path) as disk:
        await fill(disk, range(5))
    place = await killed(path, tmp_path / "first", work)
    shutil.rmtree(path)
    shutil.copytree(place, path)
    (older,) = segments_of(path)[-1:]
    damage(older, 0, PAGE)
    (path / segment_name(int(older.name[:16]) + 1)).write_bytes(bytes(256 * KIB))
    async with Disk(path) as disk:
        assert await disk.get_all(range(5)) == {}


async def test_a_number_that_a_seal_names_is_not_used_again(path):
    async with Disk(path, namespace=THEIRS, **SMALL) as disk:
        await fill(disk, range(60), size=3000)
        await disk.tier._reclaimer.drain()
    numbers = [int(each.name[:16]) for each in segments_of(path)]
    segments_of(path)[-1].unlink()
    (path / "index.snap").unlink()
    async with Disk(path, namespace=OURS, **SMALL) as disk:
        await fill(disk, range(5))
    assert int(segments_of(path)[-1].name[:16]) == numbers[-1] + 1


# -- stray files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [5000, 10**15 - 1, 10**16 - 1])
@pytest.mark.parametrize("content", [b"", bytes(3 * PAGE), "foreign", "misplaced"])
async def test_a_stray_number_uses_none_up(path, tmp_path, number, content):
    async with Disk(tmp_path / "other") as disk:
        await fill(disk, range(5), 9)
    async with Disk(path) as disk:
        await fill(disk, range(5))
    sources = {"foreign": segments_of(tmp_path / "other")[0], "misplaced": segments_of(path)[0]}
    stray = path / segment_name(number)
    stray.write_bytes(sources[content].read_bytes() if content in sources else content)
    before = stray.read_bytes()
    for life in range(1, 3):
        async with Disk(path) as disk:
            expected = {key: value_of(key, life - 1) for key in range(5)}
            assert await disk.get_all(range(5)) == expected
            await fill(disk, range(5), life)
            copy = crash_copy(path, tmp_path / f"crashed{life}")
        async with Disk(copy) as disk:
            assert await disk.get_all(range(5)) == {key: value_of(key, life) for key in range(5)}
    assert stray.read_bytes() == before


async def test_strays_go_first_when_room_is_needed(path):
    async with Disk(path, **SMALL) as disk:
        await fill(disk, range(10))
    for number in range(20):
        (path / segment_name(10**15 - 1 - number)).write_bytes(bytes(64 * KIB))
    async with Disk(path, **SMALL) as disk:
        await fill(disk, range(100, 160), size=5000)
        assert len(await disk.get_all(range(10))) == 10
        await fill(disk, range(200, 600), size=5000)
    async with Disk(path, **SMALL) as disk:
        assert len(await disk.get_all(range(500, 600))) == 100
    assert not (path / segment_name(10**15 - 1)).exists()


async def test_thousands_of_tiny_files_evict_nothing(path):
    async with Disk(path) as disk:
        await fill(disk, range(5))
    for number in range(1100):
        (path / segment_name(100 + number)).touch()
        (path / f"{number}.seg").touch()
    began = time.monotonic()
    async with Disk(path, disk=32 * MIB) as disk:
        assert time.monotonic() - began < OPEN_SECONDS_MAX
        assert await disk.get_all(range(5)) == {key: value_of(key) for key in range(5)}
        await fill(disk, range(5), 1)
    async with Disk(path, disk=32 * MIB) as disk:
        assert await disk.get_all(range(5)) == {key: value_of(key, 1) for key in range(5)}
    assert len(list(path.glob("?.seg"))) == 10


async def test_a_hard_link_of_a_segment_is_never_written_over(path, tmp_path):
    """A backup made of links, and a link under a name of ours: what is reclaimed is not used again."""
    backup = tmp_path / "backup"
    backup.mkdir(mode=0o700)
    async with Disk(path, **SMALL) as disk:
        await fill(disk, range(100), size=5000)
    for file in path.iterdir():
        if file.name != "lock":
            os.link(file, backup / file.name)
    before = {file.name: file.read_bytes() for file in backup.iterdir()}
    os.link(segments_of(path)[-1], path / segment_name(10**15 - 1))
    os.link(segments_of(path)[-1], path / "spare")
    async with Disk(path, **SMALL) as disk:
        assert await disk.get_all(range(100)) == {key: value_of(key, 0, 5000) for key in range(100)}
        for version in range(1, 5):
            await fill(disk, range(100), version, size=5000)
        assert len(await disk.get_all(range(100))) == 100
    assert {file.name: file.read_bytes() for file in backup.iterdir()} == before
    async with Disk(backup, **SMALL) as disk:
        assert await disk.get_all(range(100)) == {key: value_of(key, 0, 5000) for key in range(100)}


# -- things that are no files ----------------------------------------------------------------------------------------


def plant(place, what, outside):
    """Put something that is no file at a place; False where this system does not let us."""
    if what == "directory":
        place.mkdir()
    elif what == "full directory":
        place.mkdir()
        (place / "precious").write_bytes(b"precious")
    elif what == "fifo":
        os.mkfifo(place)
    elif what == "symlink":
        place.symlink_to(outside)
    elif what == "socket":
        here = os.open(place.parent, os.O_RDONLY)
        try:
            with contextlib.closing(socket.socket(socket.AF_UNIX)) as end:
                end.bind(f"/proc/self/fd/{here}/{place.name}")
        finally:
            os.close(here)


THINGS = ["directory", "full directory", "fifo", "symlink", "socket"]
NAMES = [segment_name(2), *SPARE_NAMES, "index.snap", "index.snap.tmp", "superblock.tmp"]


@pytest.mark.parametrize("what", THINGS)
@pytest.mark.parametrize("when", ["closed", "open"])
async def test_what_is_no_file_stops_nothing(path, tmp_path, what, when):
    outside = tmp_path / "outside"
    outside.write_bytes(b"not to be touched")
    for name in NAMES:
        shutil.rmtree(path, ignore_errors=True)
        async with Disk(path, **SMALL) as disk:
            await fill(disk, range(5))
            if when == "open":
                with contextlib.suppress(FileNotFoundError):
                    (path / name).unlink()
                plant(path / name, what, outside)
                await asyncio.wait_for(fill(disk, range(5, 30), size=5000), 20)
        if when == "closed":
            with contextlib.suppress(FileNotFoundError):
                (path / name).unlink()
            plant(path / name, what, outside)
        async with Disk(path, **SMALL) as disk:
            await asyncio.wait_for(fill(disk, range(30, 55), size=5000), 20)
            copy = crash_copy_of_files(path, tmp_path / "copy")
        async with Disk(copy, **SMALL) as disk:
            assert await disk.get_all(range(5)) == {key: value_of(key) for key in range(5)}, name
            assert len(await disk.get_all(range(30, 55))) == 25, name
            assert len(await disk.get_all(range(5, 30))) == (25 if when == "open" else 0), name
        if what == "full directory":
            assert (path / name / "precious").read_bytes() == b"precious", name
    assert outside.read_bytes() == b"not to be touched"


@pytest.mark.parametrize("what", THINGS)
async def test_what_has_the_name_of_the_superblock_is_replaced_or_named(path, tmp_path, what):
    outside = tmp_path / "outside"
    outside.write_bytes(b"not to be touched")
    async with Disk(path) as disk:
        await fill(disk, range(5))
    (path / SUPERBLOCK_NAME).unlink()
    plant(path / SUPERBLOCK_NAME, what, outside)
    if what == "full directory":
        with pytest.raises(DiskError, match="superblock"):
            await Disk(path).open()
        shutil.rmtree(path / SUPERBLOCK_NAME)
    async with Disk(path) as disk:
        assert await disk.get_all(range(5)) == {key: value_of(key) for key in range(5)}
    assert outside.read_bytes() == b"not to be touched"


async def test_what_is_no_file_is_damage(path):
    async with Disk(path) as disk:
        await fill(disk, range(5))
    (path / segment_name(7)).mkdir()
    async with Disk(path) as disk:
        assert disk.tier.damage == 1
    with pytest.raises(CorruptStoreError):
        await Disk(path, recover="strict").open()


@pytest.mark.parametrize("when", ["before", "after"])
async def test_when_both_spare_names_are_taken_the_error_says_so(path, when):
    async with Disk(path) as disk:
        await fill(disk, range(5))
    disk = Disk(path)
    if when == "after":
        await disk.open()
    for name in SPARE_NAMES:
        plant(path / name, "full directory", None)
    with pytest.raises(DiskError, match="spare"):
        await (fill(disk, range(5), 1) if when == "after" else disk.open())
    shutil.rmtree(path / SPARE_NAMES[0])
    if when == "before":
        disk = Disk(path)
        await disk.open()
    await fill(disk, range(5), 1)
    assert await disk.get_all(range(5)) == {key: value_of(key, 1) for key in range(5)}
    await disk.close()


# -- files that may not be opened ------------------------------------------------------------------------------------


class Forbidding(Wrapper):
    """Some names cannot be opened."""

    def __init__(self, inner, names, number):
        super().__init__(inner)
        self.names = names
        self.number = number

    def call(self, function, *args, timeout=None):
        if function in ("open", "read_file") and args[0] in self.names:
            future = asyncio.get_running_loop().create_future()
            future.set_exception(OSError(self.number, os.strerror(self.number)))
            return future
        return super().call(function, *args, timeout=timeout)


def forbidding(names, number):
    return lambda *args, **options: Forbidding(create_backend(*args, **options), names, number)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EROFS, errno.ETIMEDOUT])
async def test_a_segment_that_may_not_be_opened_is_named_and_costs_nothing(path, tmp_path, number):
    async def work(disk):
        await fill(disk, range(40), size=5000)
        await disk.delete(3)
        await fill(disk, [4], 1)

    place = await killed(path, tmp_path / "crashed", work, **SMALL)
    names = [each.name for each in segments_of(place)]
    assert len(names) > 2
    before = {name: (place / name).read_bytes() for name in names}
    for name in names:
        with pytest.raises(DiskError, match=name):
            await Disk(place, **SMALL, _backend_factory=forbidding([name], number)).open()
        assert {each.name: each.read_bytes() for each in segments_of(place)} == before
    async with Disk(place, **SMALL) as disk:
        expected = {key: value_of(key, 0, 5000) for key in range(40) if key not in (3, 4)}
        assert await disk.get_all(range(40)) == expected | {4: value_of(4, 1)}


async def test_a_segment_that_may_not_be_opened_any_more_drops_nothing(path, tmp_path):
    """Between the first look and the scan."""
    place = await killed(path, tmp_path / "crashed", lambda disk: fill(disk, range(40), size=5000), **SMALL)
    names = []
    disk = Disk(place, **SMALL, _backend_factory=forbidding(names, errno.EACCES))
    await disk.open(recover=False)
    names.append(segments_of(place)[-1].name)
    with pytest.raises(DiskError, match=names[0]):
        await disk.recover()
    disk.snapshot = False
    await disk.close()
    async with Disk(place, **SMALL) as disk:
        assert len(await disk.get_all(range(40))) == 40


async def test_a_superblock_that_may_not_be_opened_is_named(path):
    async with Disk(path) as disk:
        await fill(disk, range(5))
    with pytest.raises(DiskError, match="superblock"):
        await Disk(path, _backend_factory=forbidding([SUPERBLOCK_NAME], errno.EACCES)).open()
    async with Disk(path, _backend_factory=forbidding(["index.snap", *SPARE_NAMES], errno.EACCES)) as disk:
        assert len(await disk.get_all(range(5))) == 5


# -- everything at once ----------------------------------------------------------------------------------------------


async def test_any_mixture_gives_no_wrong_value_and_ends(path, tmp_path):
    """Copies, links, holes, strays and replaced files on a killed store of two namespaces."""
    golden = await shared(path, tmp_path / "golden", sealed=False)
    async with Disk(golden, namespace=OURS, **SMALL) as disk:
        right = await disk.get_all(range(40))
    golden2 = await shared(tmp_path / "again", tmp_path / "golden2", sealed=False)
    draw = random.Random(seed())
    for _ in rounds("strange directories"):
        place = tmp_path / "strange"
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(golden2, place)
        place.chmod(0o700)
        done = [strange(place, golden, draw) for _ in range(draw.randint(1, 3))]
        began = time.monotonic()
        if all((place / name).is_dir() and os.listdir(place / name) for name in SPARE_NAMES):
            continue
        async with Disk(place, namespace=OURS, **SMALL) as disk:
            found = await disk.get_all(range(40))
            await fill(disk, [100], 5)
            copy = crash_copy_of_files(place, tmp_path / "copy")
        assert time.monotonic() - began < OPEN_SECONDS_MAX, done
        wrong = {key for key, value in found.items() if value != right.get(key)}
        assert not wrong, done
        async with Disk(copy, namespace=OURS, **SMALL) as disk:
            assert await disk.get(100) == value_of(100, 5), done


def test_verify_tells_what_an_opening_gives_and_a_repair_keeps_it(path, tmp_path):
    """On the same mixtures, and what is there no more is not called lost by one and found by the other."""

    async def opened(place):
        async with Disk(place, namespace=OURS, **SMALL) as disk:
            return await disk.get_all(range(40))

    killed_store = asyncio.run(shared(path, tmp_path / "killed", sealed=False))
    foreign = asyncio.run(shared(tmp_path / "other", tmp_path / "foreign", sealed=False))
    draw = random.Random(seed())
    repaired = 0
    for _ in rounds("strange directories"):
        place, copy = tmp_path / "strange", tmp_path / "copy"
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(killed_store, place)
        place.chmod(0o700)
        done = [strange(place, foreign, draw) for _ in range(draw.randint(1, 3))]
        # A directory stays, so no repair is ever done with it; nor are large files copied.
        if any(each.is_dir() or (each.is_file() and each.stat().st_size > MIB) for each in place.iterdir()):
            continue
        crash_copy_of_files(place, copy)
        report = verify_directory(copy)
        found = asyncio.run(opened(place))
        space = report.spaces.get(OURS.digest())
        live = {key_of_wire(*key) for key, block in space.keys.items() if block.state == LIVE} if space else set()
        assert live == found.keys(), (done, report.all_damage)
        crash_copy_of_files(place, copy)
        if any(segment.orphaned for segment in verify_directory(copy).segments):
            continue
        after = repair_directory(copy).after
        repaired += 1
        assert after.ok, (done, report.all_damage, after.all_damage)
        assert asyncio.run(opened(copy)) == found, (done, report.all_damage)
    assert repaired


def crash_copy_of_files(place, target):
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(mode=0o700)
    for file in place.iterdir():
        small = file.is_file() and not file.is_symlink() and file.stat().st_size <= MIB
        if small and file.name != "lock":
            shutil.copy(file, target / file.name)
    return target


def strange(place, other, draw):
    """One strange thing; what it was, for the message."""
    files = [each for each in segments_of(place) if each.is_file() and not each.is_symlink()]
    names = [each.name for each in files if each.stat().st_size <= MIB]
    name = draw.choice(names)
    file = place / name
    number = max(int(each[:16]) for each in names if int(each[:16]) < 5000) + draw.randint(1, 3)
    number = draw.choice([number, 3000, 10**15 - 1])
    new = place / segment_name(number)
    what = draw.choice(
        ["hole", "link", "copy", "foreign", "zeros", "destroyed", "sparse", "swap", "superblock", "thing"]
    )
    if what == "hole":
        start = draw.randrange(0, max(file.stat().st_size, 1), PAGE)
        data = file.read_bytes()
        file.write_bytes(data[:start] + bytes(len(data[start : start + 4 * PAGE])) + data[start + 4 * PAGE :])
    elif what == "destroyed":
        destroy(file, draw.choice(["zeros", "noise", "empty", "magic"]))
    elif what == "swap":
        one, two = file, place / draw.choice(names)
        first, second = one.read_bytes(), two.read_bytes()
        one.write_bytes(second)
        two.write_bytes(first)
    elif what == "superblock":
        shutil.copy(other / "superblock", place / "superblock") if (place / "superblock").is_file() else None
    elif what == "thing":
        target = place / draw.choice([*SPARE_NAMES, "index.snap", segment_name(number)])
        if not target.exists() and not target.is_symlink():
            plant(target, draw.choice(THINGS), other / "superblock")
    elif not new.exists() and not new.is_symlink():
        if what == "link":
            os.link(file, new)
        elif what == "copy":
            shutil.copy(file, new)
        elif what == "foreign":
            shutil.copy(draw.choice(segments_of(other)), new)
        elif what == "zeros":
            new.write_bytes(bytes(draw.choice([0, 100, PAGE, 3 * PAGE])))
        else:
            with open(new, "wb") as sparse:
                sparse.truncate(1 << 31)
    return what, name, number
