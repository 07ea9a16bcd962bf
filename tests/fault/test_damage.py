"""Damage on disk is a miss: every file of a small store is flipped, zeroed, cut, swapped and replayed.

The golden store holds each kind of record: blocks of all kinds, small and aligned, overwritten ones, tombstones, a
clear and another namespace's blocks; once as a clean close leaves it and once as a kill leaves it after a flush. After
each damage the store must open, and each get must give the last flushed value or None; never another key's bytes, an
older value or something deleted. `recover="strict"` must raise whenever the quiet recovery had to leave something out.

ASYNCKV_TEST_SEED repeats a run.
"""

from __future__ import annotations

import asyncio
import errno
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from levels import count, seed, tally

import asynckv
from asynckv.testing.values import WrongBlockError, block_of, key_of, payload, version_of
from asynckv.tiers.log import LogWriter

PAGE = 4096
SIZES = (40, 60, 700, 4096, 5000, 12_000, 32_768)
# Versions of one key that differ by this have equal sizes; so have keys that differ by it.
SAME_SIZE = len(SIZES)
KEYS = range(24)
OPEN_SECONDS_MAX = 5.0
OPTIONS: dict[str, Any] = {
    "memory": 256 << 10,
    "disk": 2 << 20,
    "segment": 64 << 10,
    "io_timeout": 20.0,
    "direct": False,
}

Image = dict[str, bytes]


def take(directory: Path) -> Image:
    """The bytes of every file of a store, the lock left out: opening and closing it would drop a lock we hold."""
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir()) if path.name != "lock"}


def place(directory: Path, image: Image) -> None:
    """Make a directory hold exactly these files."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(mode=0o700)
    for name, data in image.items():
        path = directory / name
        path.touch(mode=0o600)
        path.write_bytes(data)


@dataclass
class Golden:
    """A store's files and what they must give."""

    image: Image
    expected: dict[int, int | None]  # key number to its version, None for deleted and cleared ones
    earlier: list[Image] = field(default_factory=list)  # the same directory at earlier moments


@dataclass
class Found:
    """What a store gave after damage."""

    problems: list[str]
    lost: int
    corrupt: int


class Lab:
    """One event loop and one directory for all samples of a test."""

    def __init__(self, root: Path) -> None:
        self.directory = root / "store"
        self.runner = asyncio.Runner()

    def golden(self, *, clean: bool, first: int = 1) -> Golden:
        return self.runner.run(_build(self.directory, clean, first))

    def unsealed(self) -> Golden:
        """As a kill leaves it that comes before the segment next to the newest has its seal."""

        async def never(*_: Any, **__: Any) -> None:
            raise OSError(errno.EIO, "no seal")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LogWriter, "write_seal", never)
            return self.golden(clean=False)

    def probe(self, image: Image, expected: dict[int, int | None], **options: Any) -> Found:
        place(self.directory, image)
        return self.runner.run(_probe(self.directory, expected, options))

    def strict_raises(self, image: Image) -> bool:
        place(self.directory, image)
        return self.runner.run(_strict_raises(self.directory))


@pytest.fixture
def lab(memory_path: Path) -> Iterator[Lab]:
    lab = Lab(memory_path)
    yield lab
    lab.runner.close()


async def _put(cache: asynckv.Cache, index: int, version: int) -> None:
    assert await cache.put(key_of(index), block_of(index, version, SIZES))


async def _build(directory: Path, clean: bool, first: int) -> Golden:
    """A store whose versions are `first` and the two after it of equal size."""
    shutil.rmtree(directory, ignore_errors=True)
    second, third = first + SAME_SIZE, first + 2 * SAME_SIZE
    expected: dict[int, int | None] = dict.fromkeys(KEYS)
    earlier: list[Image] = []
    other = asynckv.Namespace(model="another")
    async with asynckv.open(directory, namespace=other, **OPTIONS) as cache:
        for index in (0, 1, 2, 21):
            await _put(cache, index, 50)
    async with asynckv.open(directory, **OPTIONS) as cache:
        for index in range(20, 24):
            await _put(cache, index, first)
        await cache.flush()
        earlier.append(take(directory))
        await cache.clear()
        for index in range(16):
            await _put(cache, index, first)
        await cache.flush()
        earlier.append(take(directory))
        for index in range(10):
            await _put(cache, index, second)
        await cache.flush()
    earlier.append(take(directory))
    cache = await asynckv.open(directory, **OPTIONS)
    for index in (6, 7):
        await cache.delete(key_of(index))
    earlier.append(take(directory))
    for index in (0, 1, 11):
        await _put(cache, index, third)
    await cache.flush()
    earlier.append(take(directory))
    for index in range(16, 20):
        await _put(cache, index, first)
    await cache.flush()
    await cache.delete(key_of(16))
    for index in range(20):
        expected[index] = second if index < 10 else first
    expected.update({0: third, 1: third, 11: third, 6: None, 7: None, 16: None})
    image = take(directory)
    await cache.close()
    return Golden(take(directory) if clean else image, expected, earlier)


async def _probe(directory: Path, expected: dict[int, int | None], options: dict[str, Any]) -> Found:
    problems: list[str] = []
    lost = 0
    cache = await asyncio.wait_for(_opened(directory, options), OPEN_SECONDS_MAX)
    try:
        for index in KEYS:
            block = await asyncio.wait_for(cache.get(key_of(index)), OPEN_SECONDS_MAX)
            wanted = expected[index]
            if block is None:
                lost += wanted is not None
                continue
            try:
                version = version_of(index, block, SIZES)
            except WrongBlockError as error:
                problems.append(str(error))
                continue
            if version != wanted:
                problems.append(f"key {index}: version {version} instead of {wanted}")
        stats = cache.stats()
        if stats.disk_state != "ok":
            problems.append(f"the disk is {stats.disk_state}")
        # The store must also go on working: what is put now is there, in memory and after it was written.
        assert await cache.put("after the damage", b"whole")
        await cache.flush()
        if bytes(await cache.get("after the damage") or b"") != b"whole":
            problems.append("a block put after the damage is not there")
        return Found(problems, lost, stats.corrupt_blocks)
    finally:
        await asyncio.wait_for(cache.close(), 2 * OPEN_SECONDS_MAX)


async def _opened(directory: Path, options: dict[str, Any]) -> asynckv.Cache:
    return await asynckv.open(directory, **{**OPTIONS, **options})


async def _indexed(directory: Path) -> int:
    """How many of the golden keys a quiet recovery finds, without reading a block."""
    async with asynckv.open(directory, **OPTIONS) as cache:
        await cache.get("a miss, which waits for the scan")
        assert not cache.stats().recovering
        return sum(key_of(index) in cache for index in KEYS)


async def _strict_raises(directory: Path) -> bool:
    try:
        cache = await asyncio.wait_for(_opened(directory, {"recover": "strict"}), OPEN_SECONDS_MAX)
    except asynckv.CorruptStoreError:
        return True
    await cache.close()
    return False


def pages(image: Image, names: Callable[[str], bool] = lambda name: True) -> list[tuple[str, int]]:
    """Where the image has something: (file, offset) of each page that is not all zeros, the lock file left out."""
    return [
        (name, offset)
        for name, data in image.items()
        if names(name)
        for offset in range(0, len(data), PAGE)
        if any(data[offset : offset + PAGE])
    ]


def patched(image: Image, name: str, offset: int, data: bytes) -> Image:
    """The image with some bytes of a file replaced."""
    old = image[name]
    return {**image, name: old[:offset] + data + old[offset + len(data) :]}


def segments(image: Image) -> list[str]:
    return sorted(name for name in image if name.endswith(".seg"))


def samples() -> int:
    return count("damaged images of each kind")


def report(what: str, found: list[Found]) -> None:
    """Print what was lost, and fail when anything wrong was seen."""
    lost = sorted(each.lost for each in found)
    print(f"{what}: {len(found)} samples, lost at most {lost[-1]}, median {lost[len(lost) // 2]}")
    problems = [problem for each in found for problem in each.problems]
    assert not problems, f"{what}: {len(problems)} problems, first " + "; ".join(problems[:4])


def check_all(lab: Lab, golden: Golden, what: str, damaged: list[tuple[str, Image]]) -> list[Found]:
    """Probe each damaged image; problems name the damage."""
    found = []
    for name, image in damaged:
        each = lab.probe(image, golden.expected)
        each.problems = [f"{name}: {problem}" for problem in each.problems]
        found.append(each)
    tally("damaged images of each kind", len(found))
    report(what, found)
    return found


both = pytest.mark.parametrize("clean", [True, False], ids=["closed", "killed"])


@both
def test_golden_store_is_whole(lab: Lab, clean: bool) -> None:
    golden = lab.golden(clean=clean)
    found = lab.probe(golden.image, golden.expected)
    assert not found.problems
    assert found.lost == 0
    assert not lab.strict_raises(golden.image)
    assert ("index.snap" in golden.image) == clean


def _flip(golden: Golden, draw: random.Random) -> tuple[str, Image]:
    name, page = draw.choice(pages(golden.image))
    data = golden.image[name]
    inside = [at for at in range(page, min(page + PAGE, len(data))) if data[at]]
    offset = draw.choice(inside) if draw.random() < 0.8 else draw.randrange(page, min(page + PAGE, len(data)))
    old = data[offset]
    new = draw.choice([old ^ 1 << draw.randrange(8), 0x00, 0xFF])
    return f"{name}[{offset}] {old:#04x} -> {new:#04x}", patched(golden.image, name, offset, bytes([new]))


@both
def test_flipped_bytes(lab: Lab, clean: bool) -> None:
    draw = random.Random(seed())
    golden = lab.golden(clean=clean)
    found = check_all(lab, golden, "flips", [_flip(golden, draw) for _ in range(2 * samples())])
    lost = sorted(each.lost for each in found)
    assert lost[len(lost) // 2] <= 1


@both
def test_flips_in_every_header_byte_range(lab: Lab, clean: bool) -> None:
    """The first bytes of each page that is no payload: where lengths and counts are."""
    draw = random.Random(seed())
    golden = lab.golden(clean=clean)
    damaged = []
    places = pages(golden.image)
    for _ in range(samples()):
        name, page = draw.choice(places)
        offset = page + draw.randrange(min(160, len(golden.image[name]) - page))
        value = bytes(draw.randrange(256) for _ in range(draw.choice([1, 2, 4, 8])))
        damaged.append((f"{name}[{offset}] = {value.hex()}", patched(golden.image, name, offset, value)))
    check_all(lab, golden, "header bytes", damaged)


@both
@pytest.mark.parametrize("sector", [512, PAGE])
def test_zeroed_sectors(lab: Lab, clean: bool, sector: int) -> None:
    draw = random.Random(seed())
    golden = lab.golden(clean=clean)
    places = [
        (name, offset)
        for name, page in pages(golden.image)
        for offset in range(page, min(page + PAGE, len(golden.image[name])), sector)
    ]
    damaged = []
    for name, offset in draw.sample(places, min(len(places), samples())):
        zeros = bytes(min(sector, len(golden.image[name]) - offset))
        damaged.append((f"{name}[{offset}:+{sector}] zeroed", patched(golden.image, name, offset, zeros)))
    check_all(lab, golden, f"zeroed {sector} bytes", damaged)


@both
def test_truncated_files(lab: Lab, clean: bool) -> None:
    draw = random.Random(seed())
    golden = lab.golden(clean=clean)
    damaged = []
    for _ in range(samples()):
        name, page = draw.choice(pages(golden.image))
        length = page + draw.choice([0, 1, 511, 512, PAGE - 1])
        damaged.append((f"{name} cut to {length}", {**golden.image, name: golden.image[name][:length]}))
    check_all(lab, golden, "truncated", damaged)


@both
def test_whole_files(lab: Lab, clean: bool) -> None:
    """Each file emptied, filled with noise and zeroed."""
    draw = random.Random(seed())
    golden = lab.golden(clean=clean)
    damaged = []
    for name in golden.image:
        noise = draw.randbytes(max(PAGE, len(golden.image[name])))
        damaged += [(f"{name} emptied", {**golden.image, name: b""}), (f"{name} noise", {**golden.image, name: noise})]
        damaged.append((f"{name} zeros", {**golden.image, name: bytes(len(golden.image[name]))}))
    damaged.append(("a stray file", {**golden.image, "9" * 16 + ".seg": draw.randbytes(3 * PAGE)}))
    damaged.append(("an empty stray file", {**golden.image, "9" * 16 + ".seg": b""}))
    check_all(lab, golden, "whole files", damaged)


def test_another_file_in_place_of_the_newest_one(lab: Lab) -> None:
    """Before the segment next to it has a seal, which names it."""
    golden = lab.unsealed()
    *older, newest = segments(golden.image)
    damaged = [(f"{name} copied to {newest}", {**golden.image, newest: golden.image[name]}) for name in older]
    damaged += [
        (f"{newest} emptied", {**golden.image, newest: b""}),
        (f"{newest} zeros", {**golden.image, newest: bytes(64 << 10)}),
    ]
    check_all(lab, golden, "newest segment", damaged)


@both
def test_a_first_page_of_another_segment_costs_nothing(lab: Lab, clean: bool) -> None:
    golden = lab.golden(clean=clean)
    names = segments(golden.image)
    pairs = [(one, other) for one in names for other in names if one != other]
    damaged = [
        (f"the first page of {one} over that of {other}", patched(golden.image, other, 0, golden.image[one][:PAGE]))
        for one, other in random.Random(seed()).sample(pairs, min(len(pairs), samples()))
    ]
    found = check_all(lab, golden, "first pages", damaged)
    assert not sum(each.lost for each in found)


@both
def test_missing_files(lab: Lab, clean: bool) -> None:
    """Each file is taken away.

    But for the newest segment of a killed store: what is left is what a kill a moment earlier would have left.
    """
    golden = lab.golden(clean=clean)
    newest = segments(golden.image)[-1]
    damaged = [
        (f"{name} missing", {each: data for each, data in golden.image.items() if each != name})
        for name in golden.image
        if clean or name != newest
    ]
    check_all(lab, golden, "missing files", damaged)


def _places(golden: Golden) -> dict[int, list[tuple[int, int, str, int]]]:
    """Where payloads lie: by size, (key number, version, file, offset)."""
    found: dict[int, list[tuple[int, int, str, int]]] = {}
    for index in KEYS:
        for version in (1, 1 + SAME_SIZE, 1 + 2 * SAME_SIZE):
            data = payload(block_of(index, version, SIZES))
            for name in segments(golden.image):
                offset = golden.image[name].find(data)
                if offset >= 0:
                    found.setdefault(len(data), []).append((index, version, name, offset))
    return found


@both
def test_swapped_payloads(lab: Lab, clean: bool) -> None:
    """Two payloads of one size change places, as a misdirected write would leave them; also two versions of one key."""
    draw = random.Random(seed())
    golden = lab.golden(clean=clean)
    pairs = [
        (size, one, other)
        for size, places in _places(golden).items()
        for at, one in enumerate(places)
        for other in places[:at]
    ]
    assert any(one[0] == other[0] for _, one, other in pairs)
    damaged = []
    for size, one, other in draw.sample(pairs, min(len(pairs), samples())):
        first = golden.image[one[2]][one[3] : one[3] + size]
        second = golden.image[other[2]][other[3] : other[3] + size]
        image = patched(patched(golden.image, one[2], one[3], second), other[2], other[3], first)
        damaged.append((f"{size} bytes of {one} and {other} swapped", image))
    check_all(lab, golden, "swapped payloads", damaged)


@both
def test_swapped_pages(lab: Lab, clean: bool) -> None:
    draw = random.Random(seed())
    golden = lab.golden(clean=clean)
    places = pages(golden.image, lambda name: name.endswith(".seg"))
    damaged = []
    for _ in range(samples()):
        one, other = draw.sample(places, 2)
        first, second = (golden.image[name][offset : offset + PAGE] for name, offset in (one, other))
        image = patched(patched(golden.image, *one, second), *other, first)
        damaged.append((f"pages {one} and {other} swapped", image))
    check_all(lab, golden, "swapped pages", damaged)


@both
def test_doubled_pages(lab: Lab, clean: bool) -> None:
    """A page is written a second time over another, as a stale or misdirected write would."""
    draw = random.Random(seed())
    golden = lab.golden(clean=clean)
    places = pages(golden.image, lambda name: name.endswith(".seg"))
    damaged = []
    for _ in range(samples()):
        (name, offset), target = draw.sample(places, 2)
        page = golden.image[name][offset : offset + PAGE]
        damaged.append((f"page {(name, offset)} over {target}", patched(golden.image, *target, page)))
    check_all(lab, golden, "doubled pages", damaged)


@both
def test_swapped_segments(lab: Lab, clean: bool) -> None:
    """Two segment files exchange names; one is copied to a newer number."""
    draw = random.Random(seed())
    golden = lab.golden(clean=clean)
    names = segments(golden.image)
    damaged = []
    for at, one in enumerate(names):
        for other in names[:at]:
            image = {**golden.image, one: golden.image[other], other: golden.image[one]}
            damaged.append((f"{one} and {other} exchanged", image))
        newer = f"{int(names[-1].split('.')[0]) + 1 + at:016d}.seg"
        damaged.append((f"{one} copied to {newer}", {**golden.image, newer: golden.image[one]}))
    check_all(lab, golden, "swapped segments", draw.sample(damaged, min(len(damaged), samples())))


@both
def test_replayed_segments(lab: Lab, clean: bool) -> None:
    """A file goes back to what it was at an earlier moment, or comes back after it was removed.

    Left out: the newest segment of a killed store, because its earlier state is a whole store of that moment.
    """
    golden = lab.golden(clean=clean)
    newest = segments(golden.image)[-1]
    damaged = []
    for moment, earlier in enumerate(golden.earlier):
        for name, data in earlier.items():
            if data != golden.image.get(name) and (clean or name != newest):
                damaged.append((f"{name} of moment {moment}", {**golden.image, name: data}))
    assert damaged
    check_all(lab, golden, "replayed", damaged)


@both
def test_foreign_segments(lab: Lab, clean: bool) -> None:
    """Segments and snapshots of another store, with the same keys and numbers but other values, give nothing."""
    foreign = lab.golden(clean=True, first=1 + 100 * SAME_SIZE)
    golden = lab.golden(clean=clean)
    alone = {**foreign.image, "superblock": golden.image["superblock"]}
    found = lab.probe(alone, dict.fromkeys(KEYS))
    assert not found.problems
    damaged = []
    for name in segments(foreign.image):
        if clean or name != segments(golden.image)[-1]:
            damaged.append((f"foreign {name}", {**golden.image, name: foreign.image[name]}))
        newer = f"{int(name.split('.')[0]) + 1000:016d}.seg"
        damaged.append((f"foreign {name} as {newer}", {**golden.image, newer: foreign.image[name]}))
    damaged.append(("foreign snapshot", {**golden.image, "index.snap": foreign.image["index.snap"]}))
    check_all(lab, golden, "foreign", damaged)


def test_reclaimed_segments_stay_dead(lab: Lab) -> None:
    """Segments that were reclaimed come back, as an unlink that was never synced would leave them."""
    golden = lab.runner.run(_build_reclaimed(lab.directory))
    damaged = []
    for earlier in golden.earlier:
        gone = [name for name in segments(earlier) if name not in golden.image]
        damaged += [(f"{name} is back", {**golden.image, name: earlier[name]}) for name in gone]
        damaged.append(("all are back", {**golden.image, **{name: earlier[name] for name in gone}}))
    assert any(name.endswith("is back") for name, _ in damaged)
    check_all(lab, golden, "reclaimed", damaged)


async def _build_reclaimed(directory: Path) -> Golden:
    """Keys written until the log has gone round several times; what is expected is what the store has at the end."""
    shutil.rmtree(directory, ignore_errors=True)
    expected: dict[int, int | None] = dict.fromkeys(KEYS)
    earlier = []
    cache = await asynckv.open(directory, **{**OPTIONS, "disk": 512 << 10})
    for version in range(1, 13):
        for index in KEYS:
            if (index + version) % 4 == 0:
                await cache.delete(key_of(index))
                expected[index] = None
            elif (index + version) % 4 < 3 or version == 1:
                await _put(cache, index, version)
                expected[index] = version
        await cache.flush()
        if version % 3 == 0:
            earlier.append(take(directory))
    image = take(directory)
    await cache.close()
    return Golden(image, expected, earlier)


@both
def test_strict_raises_when_quiet_leaves_something_out(lab: Lab, clean: bool) -> None:
    draw = random.Random(seed())
    golden = lab.golden(clean=clean)
    whole = sum(version is not None for version in golden.expected.values())
    raised = 0
    for _ in range(samples()):
        name, page = draw.choice(pages(golden.image, lambda each: each.endswith(".seg")))
        length = draw.choice([1, 512, PAGE, 3 * PAGE])
        data = golden.image[name]
        noise = draw.randbytes(min(length, len(data) - page))
        image = patched(golden.image, name, page, noise)
        if draw.random() < 0.3:
            image.pop("index.snap", None)
        place(lab.directory, image)
        indexed = lab.runner.run(_indexed(lab.directory))
        strict = lab.strict_raises(image)
        raised += strict
        assert strict or indexed >= whole, f"{name}[{page}:+{len(noise)}]: {whole - indexed} keys left out in silence"
    print(f"strict raised on {raised} of {samples()} damaged stores")
    assert raised > 0


@both
def test_recover_none_starts_empty(lab: Lab, clean: bool) -> None:
    golden = lab.golden(clean=clean)
    found = lab.probe(golden.image, dict.fromkeys(KEYS), recover="none")
    assert not found.problems


def test_damaged_payload_is_counted(lab: Lab) -> None:
    golden = lab.golden(clean=True)
    current = [
        (size, index, name, offset)
        for size, places in _places(golden).items()
        for index, version, name, offset in places
        if golden.expected[index] == version
    ]
    assert current
    for size, index, name, offset in current:
        at = offset + size // 2
        image = patched(golden.image, name, at, bytes([golden.image[name][at] ^ 0x10]))
        found = lab.probe(image, golden.expected)
        assert not found.problems
        assert found.lost == 1, f"key {index}"
        assert found.corrupt == 1, f"key {index}"
