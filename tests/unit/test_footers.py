"""A seal that promises more than its footer holds."""

from __future__ import annotations

import dataclasses

import pytest
from logkit import KIB, Disk, damage, fill, segments_of, value_of

from asynckv.errors import CorruptStoreError
from asynckv.tiers import inspect_directory, verify_directory
from asynckv.tiers.layout import PAGE, Seal


def forge(segment, **changes):
    """Change fields of a segment's seal, under a right checksum."""
    data = bytearray(segment.read_bytes())
    last = len(data) - PAGE
    seal = Seal.decode(bytes(data[last:]), last)
    assert seal is not None
    data[last:] = dataclasses.replace(
        seal, **{name: change(getattr(seal, name)) for name, change in changes.items()}
    ).encode()
    segment.write_bytes(data)


@pytest.mark.parametrize(
    "changes",
    [
        {"records": lambda n: n + 1},
        {"records": lambda n: n - 1},
        {"footer_bytes": lambda n: 0},
        {"footer_bytes": lambda n: n - 1},
    ],
)
async def test_a_footer_that_lacks_records_is_damage_and_costs_nothing(tmp_path, changes):
    path = tmp_path / "kv"
    async with Disk(path, segment=64 * KIB) as disk:
        await fill(disk, range(30))
        await fill(disk, range(10), 1)
    segments = segments_of(path)
    assert segments
    for segment in segments:
        forge(segment, **changes)
    (path / "index.snap").unlink()
    expected = {key: value_of(key, int(key < 10)) for key in range(30)}
    async with Disk(path, segment=64 * KIB) as disk:
        assert await disk.get_all(range(30)) == expected
        assert disk.tier.damage >= 1
    async with Disk(path, segment=64 * KIB) as disk:
        assert await disk.get_all(range(30)) == expected


async def test_strict_refuses_it(tmp_path):
    path = tmp_path / "kv"
    async with Disk(path, segment=64 * KIB) as disk:
        await fill(disk, range(5))
    forge(segments_of(path)[-1], records=lambda n: n + 1)
    (path / "index.snap").unlink()
    assert not verify_directory(path).ok
    with pytest.raises(CorruptStoreError):
        async with Disk(path, segment=64 * KIB, recover="strict"):
            pass


@pytest.mark.parametrize("whole", [True, False])
async def test_a_lossy_seal_ends_what_is_older_with_and_without_its_footer(tmp_path, whole):
    path = tmp_path / "kv"
    for key in ("old", "new"):
        async with Disk(path) as disk:
            await fill(disk, [key])
    (path / "index.snap").unlink()
    segment = segments_of(path)[1]
    forge(segment, lossy=lambda _: True)
    if not whole:
        damage(segment, segment.stat().st_size - 2 * PAGE + 20)
    (space,) = inspect_directory(path).spaces.values()
    assert [place.segment for place in space.live] == [2]
    async with Disk(path) as disk:
        assert await disk.get_all(["old", "new"]) == {"new": value_of("new")}
