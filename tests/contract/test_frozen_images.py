"""Stores of every released format version read as they were written; see `tests/frozenkit.py`."""

from __future__ import annotations

import pytest
from frozenkit import (
    DATA,
    FORMAT_VERSION,
    OPTIONS,
    OTHER,
    absent,
    build,
    expected,
    expected_in_other,
    files,
    plain,
    unpack,
)
from storekit import recovered

import asynckv
from asynckv.tiers import inspect_directory, verify_directory

IMAGES = sorted(DATA.glob("format-*.zip"))
OPEN = {**OPTIONS, "engine": "auto"}


async def check(directory, namespace, wanted, **options):
    async with asynckv.open(directory, namespace=namespace, **OPEN, **options) as cache:
        await recovered(cache)
        assert set(cache.keys()) == set(wanted)
        for key, value in wanted.items():
            found = await cache.get(key)
            assert found is not None, key
            assert plain(found) == value, key
            del found
        for key in absent():
            assert await cache.get(key) is None
        assert cache.stats().corrupt_blocks == 0


def test_there_is_a_pair_of_the_present_version_and_of_all_before():
    wanted = [f"format-{n}-{kind}.zip" for n in range(1, FORMAT_VERSION + 1) for kind in ("closed", "killed")]
    assert [image.name for image in IMAGES] == wanted
    assert sum(image.stat().st_size for image in IMAGES) < 300 << 10


@pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.stem)
async def test_an_image_reads_as_written(image, tmp_path):
    first = unpack(image, tmp_path / "first")
    assert verify_directory(first).ok
    assert {segment.state for segment in inspect_directory(first).segments} >= {"sealed"}
    for number, mode in enumerate(("quiet", "strict")):
        store = unpack(image, tmp_path / f"store{number}")
        for _ in range(2):  # as left, and as we leave it
            await check(store, None, expected(), recover=mode)
            await check(store, OTHER, expected_in_other(), recover=mode)
        assert verify_directory(store).ok


@pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.stem)
async def test_an_image_is_written_to(image, tmp_path):
    store = unpack(image, tmp_path / "store")
    async with asynckv.open(store, **OPEN) as cache:
        assert await cache.put("filler 0", b"new")
        await cache.delete(0)
    wanted = {**expected(), "filler 0": b"new"}
    del wanted[0]
    await check(store, None, wanted)


async def test_the_images_hold_what_is_built_today(tmp_path):
    """The recipe is still that of the images, and what it makes still has every kind of record."""
    killed = await build(tmp_path / "store")
    assert {name.split(".")[-1] for name in killed} == {"superblock", "seg"}
    assert "index.snap" in files(tmp_path / "store")
    report = inspect_directory(tmp_path / "store")
    assert min(sum(getattr(s, kind) for s in report.segments) for kind in ("blocks", "tombstones", "clears")) > 0
    await check(tmp_path / "store", None, expected())
