"""What an opening makes of the files that it finds."""

from __future__ import annotations

import contextlib
import errno
import shutil

import pytest
from logkit import KIB, Disk, damage, fill, killed, segments_of, value_of

from asynckv.backends import create_backend
from asynckv.errors import DiskError
from asynckv.testing import FaultyBackend, Script, error
from asynckv.tiers.evidence import LOST_NUMBERS_MAX
from asynckv.tiers.layout import PAGE, SegmentHeader, segment_name


@pytest.mark.parametrize(("above", "stray"), [(LOST_NUMBERS_MAX, False), (LOST_NUMBERS_MAX + 1, True)])
async def test_which_number_is_believed(tmp_path, above, stray):
    """So many numbers may have been lost in a row; of a file with a higher one nothing of ours can be in it."""
    path = tmp_path / "kv"
    async with Disk(path, segment=64 * KIB) as disk:
        await fill(disk, range(10))
    (path / "index.snap").unlink()
    highest = int(segments_of(path)[-1].name[:16])
    file = path / segment_name(highest + above)
    file.write_bytes(bytes(64 * KIB))
    async with Disk(path, segment=64 * KIB) as disk:
        assert await disk.get_all(range(10)) == ({key: value_of(key) for key in range(10)} if stray else {})
        await fill(disk, range(10, 20))
    assert file.exists() != stray, "by now it would be believed"
    assert (path / segment_name(highest + 1)).exists() == stray
    async with Disk(path, segment=64 * KIB) as disk:
        found = await disk.get_all(range(20))
        assert found == {key: value_of(key) for key in range(0 if stray else 10, 20)}


async def test_a_stray_number_counts_as_named_once_a_claim_of_ours_is_in_the_file(tmp_path):
    """All pages but the claim gone, and the superblock alone beside it: the claim says that it is ours."""
    path = tmp_path / "kv"

    async def work(disk):
        disk.tier._set.next_number = 5000
        await fill(disk, range(5))

    place = await killed(path, tmp_path / "killed", work)
    (newest,) = segments_of(place)
    assert newest.name == segment_name(5000)
    damage(newest, 0, PAGE)
    async with Disk(place) as disk:
        assert await disk.get_all(range(5)) == {key: value_of(key) for key in range(5)}
        await fill(disk, range(5), 1)
    assert segments_of(place)[-1].name == segment_name(5001)


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


@pytest.mark.parametrize("seals", [False, True], ids=["nothing", "seals"])
async def test_a_disk_that_gives_no_page_with_the_stores_name_makes_no_new_store(tmp_path, seals):
    """A new superblock would make every segment another store's: what was a fault of a moment would cost all."""
    path = tmp_path / "kv"
    async with Disk(path, segment=64 * KIB) as disk:
        await fill(disk, range(10))
    superblock = (path / "superblock").read_bytes()

    def sick(*args, **options):
        return Dim(create_backend(*args, **options), Script().add("read_file", error(errno.EIO)), seals=seals)

    with contextlib.nullcontext() if seals else pytest.raises(DiskError, match="names the store") as caught:
        async with Disk(path, segment=64 * KIB, _backend_factory=sick):
            pass
    assert caught is None or caught.value.errno == errno.EIO
    assert (path / "superblock").read_bytes() == superblock
    async with Disk(path, segment=64 * KIB) as disk:
        assert await disk.get_all(range(10)) == {key: value_of(key) for key in range(10)}


class Dim(FaultyBackend):
    """An engine on a disk that does not give the first pages of files, nor, unless the seals are there, any other."""

    def __init__(self, inner, script, *, seals):
        super().__init__(inner, script)
        self.seals = seals

    def read(self, file, offset, buffer, **options):
        if offset == 0 or not self.seals:
            self.script.add("read", error(errno.EIO), nth=1)
        return super().read(file, offset, buffer, **options)
