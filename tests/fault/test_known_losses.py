"""What one opening knows to be lost, the next one knows as well, wherever the life in between ended.

A segment is destroyed in some way; a second life puts, flushes, closes and is cut at every moment; the third must show
what was flushed last, what the second life put, or a miss: never a value that the destroyed segment had replaced.
"""

from __future__ import annotations

import errno
import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from levels import count, tally
from simkit import Simulation

import asynckv
from asynckv.testing import FaultyFiles, MemoryDisk, MemoryFiles, Script, error
from asynckv.testing.values import block_of, key_of
from asynckv.tiers.layout import parse_segment_name, segment_name

KIB = 1 << 10
PAGE = 4096
SIZES = (16_384, 4096, 12_000)
KEYS = range(6)
ROUNDS = 3
REMOVED = 5  # this key is deleted
LAST = 4  # this one is put last of all

Files = dict[str, bytearray]


def zeros(files: Files, name: str) -> None:
    """Every byte of it is gone."""
    files[name] = bytearray(len(files[name]))


def one_page(files: Files, name: str) -> None:
    """Every byte of it is gone, and nearly all of its length."""
    files[name] = bytearray(PAGE)


def noise(files: Files, name: str) -> None:
    """It has other bytes."""
    files[name] = bytearray(random.Random(5).randbytes(len(files[name])))


def fixed_pages(files: Files, name: str) -> None:
    """Header, claim, and the last two pages are gone."""
    data = files[name]
    data[: 2 * PAGE] = bytes(2 * PAGE)
    data[-2 * PAGE :] = bytes(2 * PAGE)


def head(files: Files, name: str) -> None:
    """It has the header of another segment."""
    other = next(each for each in sorted(files) if each.endswith(".seg") and each != name)
    files[name][:PAGE] = files[other][:PAGE]


def renamed(files: Files, name: str) -> None:
    """It lies under another name."""
    number = parse_segment_name(name)
    assert number is not None
    files[segment_name(number + 3)] = files.pop(name)


def gone(files: Files, name: str) -> None:
    """It is not there."""
    del files[name]


DAMAGES = (zeros, one_page, noise, fixed_pages, head, renamed, gone)


@pytest.fixture
def simulation(memory_path: Path) -> Simulation:
    return Simulation(memory_path / "kv", SIZES, memory=256 * KIB, disk=8192 * KIB, segment=64 * KIB, direct=False)


async def _store(simulation: Simulation, clean: bool) -> Files:
    """Segments in which each key is there in several versions, the newest ones flushed."""
    disk = MemoryDisk()
    cache = await simulation.open(disk, record=True)
    for version in range(1, ROUNDS + 1):
        for index in KEYS:
            if (index, version) != (LAST, ROUNDS):
                await cache.put(key_of(index), block_of(index, version, SIZES))
        await cache.flush()
    await cache.delete(key_of(REMOVED))
    await cache.flush()
    await cache.put(key_of(LAST), block_of(LAST, ROUNDS, SIZES))
    await cache.flush()
    if not clean:
        files = simulation.recording.content(mode="kill")
    await cache.close()
    return {name: bytearray(data) for name, data in disk.content().items()} if clean else files


async def _second_life(simulation: Simulation, files: Files, script: Script) -> dict[int, float]:
    """What it flushed, and when: key to position in the journal."""
    disk = MemoryDisk(files)
    flushed: dict[int, float] = {}
    cache = await simulation.open(disk, record=True, files=FaultyFiles(script, MemoryFiles(disk)))
    for index in list(KEYS)[:2]:
        await cache.put(key_of(index), block_of(index, ROUNDS + 1, SIZES))
    try:
        await cache.flush()
        flushed = dict.fromkeys(list(KEYS)[:2], simulation.recording.position())
    except asynckv.DiskError:
        assert script.injected
    await cache.close()
    return flushed


@pytest.mark.parametrize("stuck", [False, True], ids=["", "once-not-unlinked"])
@pytest.mark.parametrize("clean", [True, False], ids=["closed", "killed"])
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_loss_is_known_to_the_opening_after_the_next(
    simulation: Simulation, damage: Callable[[Files, str], None], clean: bool, stuck: bool
) -> None:
    whole = simulation.run(_store(simulation, clean))
    names = sorted(name for name in whole if name.endswith(".seg"))
    assert len(names) > 4
    for name in names[-2:]:
        if damage is gone and name == names[-1] and not clean:
            continue  # nothing names it: that is the store of a moment before (docs/format.md)
        files = {each: bytearray(data) for each, data in whole.items()}
        damage(files, name)
        script = Script()
        if stuck:
            script.add("unlink", error(errno.ENOMEM), nth=1)
        flushed = simulation.run(_second_life(simulation, files, script))
        journal = simulation.recording
        cuts = journal.cuts()
        for cut in cuts[:: max(len(cuts) // count("crash positions in each life of a sequence"), 1)]:
            for mode in ("kill", "dropped"):
                found = simulation.look(journal.content(cut=cut, mode=mode), KEYS)
                for index, version in found.items():
                    newest = ROUNDS + 1 if flushed.get(index, math.inf) <= cut else ROUNDS
                    allowed = {None} if index == REMOVED else {newest, ROUNDS + 1, None}
                    assert version in allowed, f"{damage.__name__} {name}, cut {cut} {mode}: {index} is {version}"
                tally("crash images after a loss", 2)


def test_a_damaged_block_passes_for_no_torn_one_when_the_footer_is_damaged_too(simulation: Simulation) -> None:
    """A power loss took the claim: for the recovery that sealed the segment nothing in it had to be durable."""
    files = simulation.run(_store(simulation, False))
    name = max(each for each in files if each.endswith(".seg"))
    files[name][PAGE : 2 * PAGE] = bytes(PAGE)
    disk = MemoryDisk(files)

    async def recover() -> None:
        await (await simulation.open(disk)).close()

    simulation.run(recover())
    sealed = disk.content()
    del sealed["index.snap"]
    data = sealed[name]
    for place in range(2 * PAGE, len(data) - 2 * PAGE, PAGE):
        damaged = bytearray(data)
        damaged[-2 * PAGE : -PAGE] = bytes(PAGE)  # the footer
        damaged[place + 100] ^= 1
        found = simulation.look({**sealed, name: damaged}, KEYS)
        assert found[REMOVED] is None
        assert set(found.values()) <= {ROUNDS, None}, f"page {place // PAGE}: {found}"
        assert list(found.values()).count(None) <= 2, f"page {place // PAGE}: {found}"
