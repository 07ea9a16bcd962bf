"""What one opening knows to be lost, the next one knows as well, wherever the life in between ended.

A segment is destroyed in some way; a second life puts, flushes, closes and is cut at every moment; the third must show
what was flushed last, what the second life put, or a miss: never a value that the destroyed segment had replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import itertools
import math
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from levels import count, tally
from simkit import Simulation

import asynckv
from asynckv.testing import FaultyFiles, MemoryDisk, MemoryFiles, Script, error
from asynckv.testing.values import block_of, key_of
from asynckv.tiers.layout import parse_segment_name, segment_name
from asynckv.tiers.repair import repair_directory

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


def _left(disk: MemoryDisk) -> Files:
    """What is on a disk, to be damaged."""
    return {name: bytearray(data) for name, data in disk.content().items()}


async def _store(simulation: Simulation, way: str) -> Files:
    """Segments in which each key is there in several versions, the newest ones flushed."""
    disk = MemoryDisk()
    cache = await simulation.open(disk, record=True)
    for version in range(1, ROUNDS + 1):
        if way == "opened again" and version == ROUNDS:
            await cache.close()
            cache = await simulation.open(disk, record=True)
        for index in KEYS:
            if (index, version) != (LAST, ROUNDS):
                await cache.put(key_of(index), block_of(index, version, SIZES))
        await cache.flush()
    await cache.delete(key_of(REMOVED))
    await cache.flush()
    await cache.put(key_of(LAST), block_of(LAST, ROUNDS, SIZES))
    await cache.flush()
    files = simulation.recording.content(mode="kill")
    await cache.close()
    return files if way == "killed" else _left(disk)


async def _next_life(
    simulation: Simulation, files: Files, script: Script | None = None, *, puts: int = 2
) -> dict[int, float]:
    """What it flushed, and when: key to position in the journal."""
    disk = MemoryDisk(files)
    script = script or Script()
    flushed: dict[int, float] = {}
    cache = await simulation.open(disk, record=True, files=FaultyFiles(script, MemoryFiles(disk)))
    if not puts:
        await simulation.values(cache, KEYS)
    for index in list(KEYS)[:puts]:
        await cache.put(key_of(index), block_of(index, ROUNDS + 1, SIZES))
    try:
        await cache.flush()
        flushed = dict.fromkeys(list(KEYS)[:puts], simulation.recording.position())
    except asynckv.DiskError:
        assert script.injected
    await cache.close()
    return flushed


@pytest.mark.parametrize("stuck", [False, True], ids=["", "once-not-unlinked"])
@pytest.mark.parametrize("way", ["closed", "killed", "opened again"])
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_loss_is_known_to_the_opening_after_the_next(
    simulation: Simulation, damage: Callable[[Files, str], None], way: str, stuck: bool
) -> None:
    whole = simulation.run(_store(simulation, way))
    names = sorted(name for name in whole if name.endswith(".seg"))
    assert len(names) > 4
    for lost in (names[-1:], names[-2:-1], names[-2:], names[-3:]):
        files = {each: bytearray(data) for each, data in whole.items()}
        for each in lost:
            damage(files, each)

        def script() -> Script:
            return Script().add("unlink", error(errno.ENOMEM), nth=1) if stuck else Script()

        flushed = simulation.run(_next_life(simulation, files, script()))
        journal = simulation.recording
        cuts = journal.cuts()
        for cut in cuts[:: max(len(cuts) // count("crash positions in each life of a sequence"), 1)]:
            for mode in ("kill", "dropped"):
                found = simulation.look(journal.content(cut=cut, mode=mode), KEYS)
                for index, version in found.items():
                    newest = ROUNDS + 1 if flushed.get(index, math.inf) <= cut else ROUNDS
                    allowed = {None} if index == REMOVED else {newest, ROUNDS + 1, None}
                    assert version in allowed, f"{damage.__name__} {lost}, cut {cut} {mode}: {index} is {version}"
                tally("crash images after a loss")
        simulation.run(_next_life(simulation, files, script(), puts=0))
        for before in (journal.content(), simulation.recording.content()):
            simulation.run(_next_life(simulation, before))
            for index, version in simulation.look(simulation.recording.content(mode="kill"), KEYS).items():
                allowed = {None} if index == REMOVED else {ROUNDS, ROUNDS + 1, None}
                assert version in allowed, f"{damage.__name__} {lost}, two lives later: {index} is {version}"


def test_a_damaged_block_passes_for_no_torn_one_when_the_footer_is_damaged_too(simulation: Simulation) -> None:
    """A power loss took the claim: for the recovery that sealed the segment nothing in it had to be durable."""
    files = simulation.run(_store(simulation, "killed"))
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


class Arriving(MemoryFiles):
    """Says of each write that it failed, while it is told to, and does it all the same."""

    failing = False

    def pwritev(self, fd, buffers, offset):  # type: ignore[no-untyped-def]
        """Write."""
        done = super().pwritev(fd, buffers, offset)
        if self.failing:
            raise OSError(errno.EIO, "it says")
        return done


@pytest.mark.parametrize("closed", [False, True], ids=["killed", "closed, footer damaged"])
def test_damage_never_shows_a_failed_write_that_is_older_than_what_was_flushed(
    simulation: Simulation, closed: bool
) -> None:
    disk = MemoryDisk()
    arriving = Arriving(disk)

    async def store() -> Files:
        cache = await simulation.open(disk, record=True, files=arriving, segment=256 * KIB)
        for version in (1, 2, 3):
            await cache.put(key_of(0), block_of(0, version, SIZES))
            arriving.failing = version == 2
            if arriving.failing:
                with pytest.raises(asynckv.DiskError):
                    await cache.flush()
            else:
                await cache.flush()
        files = simulation.recording.content(mode="kill")
        await cache.close()
        return files

    files = simulation.run(store())
    if closed:
        files = _left(disk)
        del files["index.snap"]
    name = segment_name(1)
    if closed:
        files[name][-2 * PAGE + 40] ^= 1
    for place in range(0, 20 * PAGE if not closed else len(files[name]) - 2 * PAGE, PAGE):
        damaged = bytearray(files[name])
        damaged[place + 100] ^= 1
        found = simulation.look({**files, name: damaged}, range(1), segment=256 * KIB)
        assert found[0] in (3, None), f"page {place // PAGE}"


@pytest.mark.parametrize("fails", range(1, 9))
def test_a_repair_that_fails_halfway_forgets_no_loss(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch, fails: int
) -> None:
    """Nothing but the snapshot tells that the newest segment is missing."""
    path = memory_path / "kv"
    options = {"memory": "256KiB", "disk": "8MiB", "segment": "64KiB"}

    async def life(version: int) -> None:
        async with asynckv.open(path, **options) as cache:
            for index in range(2):
                await cache.put(index, bytes([version]) * 8000)
            if version == 2:
                await cache.delete(1)

    async def look() -> list[int | None]:
        async with asynckv.open(path, **options) as cache:
            return [None if block is None else block[0] for block in await cache.get_many(range(2))]

    for version in (1, 2):
        asyncio.run(life(version))
    max(path.glob("*.seg")).unlink()
    calls = itertools.count(1)

    def failing(real: Callable[..., Any], *args: Any, **named: Any) -> Any:
        if next(calls) == fails:
            raise OSError(errno.ENOSPC, "no room")
        return real(*args, **named)

    with monkeypatch.context() as patch:
        for call in ("rename", "unlink", "fsync"):
            patch.setattr(os, call, functools.partial(failing, getattr(os, call)))
        with contextlib.suppress(OSError):
            repair_directory(path)
    assert asyncio.run(look()) == [None, None]


@pytest.mark.parametrize("damage", [gone, one_page], ids=lambda damage: damage.__name__)
def test_a_clean_close_keeps_nothing_that_its_recovery_gave_up(
    simulation: Simulation, damage: Callable[[Files, str], None]
) -> None:
    """One name that cannot be removed the first time, and a life that only reads."""
    files = simulation.run(_store(simulation, "killed"))
    for name in sorted(each for each in files if each.endswith(".seg"))[-3:]:
        damage(files, name)
    lost = len([each for each in files.values() if len(each) == PAGE]) - 1  # but the superblock
    script = Script().add("unlink", error(errno.EIO), nth=1)
    simulation.run(_next_life(simulation, files, script, puts=0))
    assert script.injected["unlink", "error"] == 1
    left = [name for name in simulation.recording.content() if name.endswith(".seg")]
    assert len(left) == lost


async def _life(simulation: Simulation, files: Files, version: int, **options: Any) -> Files:
    """One segment: keys 0 and 1 have this version, but in version 2 key 1 is deleted; closed cleanly."""
    disk = MemoryDisk(files)
    cache = await simulation.open(disk, record=True, **options)
    for index in range(2):
        await cache.put(key_of(index), block_of(index, version, SIZES))
    if version == 2:
        await cache.delete(key_of(1))
    await cache.flush()
    await cache.close()
    return _left(disk)


def _is_right(found: dict[int, int | None]) -> bool:
    return found[0] in (2, None) and found[1] is None


@pytest.fixture
def newest_missing(simulation: Simulation) -> Files:
    """Nothing but the snapshot tells that there was a newer segment."""
    files = simulation.run(_life(simulation, simulation.run(_life(simulation, {}, 1)), 2))
    assert sum(name.endswith(".seg") for name in files) == 2
    del files[segment_name(2)]
    return files


@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE])
@pytest.mark.parametrize("operation", ["open", "preadv"])
def test_a_snapshot_that_cannot_be_read_is_believed_in_what_it_misses(
    simulation: Simulation, newest_missing: Files, operation: str, number: int
) -> None:
    async def look(nth: int) -> tuple[bool, Files]:
        disk = MemoryDisk(newest_missing)
        script = Script().add(operation, error(number), nth=nth)
        with contextlib.suppress(asynckv.AsyncKVError):
            cache = await simulation.open(disk, files=FaultyFiles(script, MemoryFiles(disk)))
            assert _is_right(await simulation.values(cache, range(2))), f"call {nth}"
            await cache.close()
        return bool(script.injected), _left(disk)

    for nth in itertools.count(1):
        injected, files = simulation.run(look(nth))
        assert _is_right(simulation.look(files, range(2))), f"after call {nth}"
        if not injected:
            break
    assert nth > 3


def test_a_snapshot_with_a_damaged_body_is_believed_in_what_it_misses(
    simulation: Simulation, newest_missing: Files
) -> None:
    for place in range(PAGE, len(newest_missing["index.snap"]), 50):
        damaged = bytearray(newest_missing["index.snap"])
        damaged[place] ^= 1
        assert _is_right(simulation.look({**newest_missing, "index.snap": damaged}, range(2)))


def test_a_snapshot_that_stays_is_removed_before_the_next_batch(simulation: Simulation, newest_missing: Files) -> None:
    """It alone tells of the loss, and is to go after the new segment is there; that fails once."""
    for nth in range(1, 6):
        disk = MemoryDisk(newest_missing)
        script = Script().add("unlink", error(errno.EIO), nth=nth)

        async def life(disk: MemoryDisk = disk, script: Script = script) -> None:
            cache = await simulation.open(disk, record=True, files=FaultyFiles(script, MemoryFiles(disk)))
            for _ in range(3):
                await cache.put(key_of(0), block_of(0, 3, SIZES))
                with contextlib.suppress(asynckv.DiskError):
                    await cache.flush()
            killed = simulation.recording.content(mode="kill")
            await cache.close()
            disk.names = MemoryDisk(killed).names

        simulation.run(life())
        files = _left(disk)
        one_page(files, max(name for name in files if name.endswith(".seg")))
        assert simulation.look(files, range(2))[0] != 1, f"call {nth}"


@pytest.mark.parametrize("way", ["strict", "a sync that failed"])
def test_a_clean_store_is_not_called_damaged(memory_path: Path, way: str) -> None:
    """After a strict opening that drops what a clear ended, and after a name that went and was not made durable."""
    simulation = Simulation(memory_path / "kv", SIZES, memory=128 * KIB, disk=300 * KIB, segment=64 * KIB, direct=False)

    async def store(nth: int) -> tuple[MemoryDisk, bool]:
        disk = MemoryDisk()
        script = Script()
        if way != "strict":
            script.add("sync_directory", error(errno.EIO), nth=nth)
        cache = await simulation.open(disk, files=FaultyFiles(script, MemoryFiles(disk)))
        for number in range(30):
            await cache.put(key_of(number % 12), block_of(number % 12, number, SIZES))
            with contextlib.suppress(asynckv.DiskError):
                await cache.flush()
        if way == "strict":
            await cache.close()
            cache = await simulation.open(disk)
            await cache.clear()
            await cache.put(key_of(0), block_of(0, 99, SIZES))
        await cache.close()
        return disk, bool(script.injected)

    async def strict(disk: MemoryDisk) -> None:
        await (await simulation.open(disk, recover="strict")).close()

    for nth in range(1, 20):
        with contextlib.suppress(asynckv.DiskError):
            disk, injected = simulation.run(store(nth))
            for _ in range(2):
                simulation.run(strict(disk))
            if not injected:
                break


def test_a_store_that_is_emptied_comes_back_in_no_part(simulation: Simulation) -> None:
    files = simulation.run(_life(simulation, simulation.run(_life(simulation, {}, 1)), 2))

    async def none() -> None:
        await (await simulation.open(MemoryDisk(files), record=True, recover="none")).close()

    simulation.run(none())
    journal = simulation.recording
    for cut in journal.cuts():
        for number in range(30):
            left = journal.content(cut=cut, mode="torn", random=random.Random(number))
            assert _is_right(simulation.look(left, range(2)))
