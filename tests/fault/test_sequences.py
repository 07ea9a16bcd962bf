"""Every short sequence of operations, and a power loss at each moment of it.

Before a sequence a store holds two flushed blocks. Then come all sequences of one, two or three operations out of put,
overwrite, delete, flush, rotate, evict, clear and close (and open again). From the record of what each did to its
files, directories are built as a power loss at every write, sync and rename could have left them (at level commit: at
some of them). Each is opened: what was flushed is there, with its flushed value or a later one, what was deleted or
cleared is not, and nothing that was never put. Some are crashed again in the middle of their recovery.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from pathlib import Path
from typing import Any

import pytest
from levels import count, parts, seed, tally
from simkit import Simulation

import asynckv
from asynckv.testing import MemoryDisk, ModelCache, RecordingBackend
from asynckv.testing.model import MISS
from asynckv.testing.values import block_of, key_of

SIZES = (60, 4096, 700, 20_000)
KEYS = range(12)
OPTIONS: dict[str, Any] = {"memory": 96 << 10, "disk": 4 << 20, "segment": 64 << 10, "direct": False}
MODES = ("kill", "dropped", "subset", "torn")
FILLERS = range(6, 12)  # keys of blocks that are there to fill a segment or the pool


class Sequence:
    """One sequence on a store of its own, and what a crash at any moment of it may show."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.disk = MemoryDisk()
        self.model = ModelCache()
        self.versions = itertools.count(1)
        self.fillers = itertools.cycle(FILLERS)
        self.cache: asynckv.Cache
        self.lives: list[tuple[RecordingBackend, ModelCache]] = []

    async def run(self, names: tuple[str, ...]) -> None:
        await self._open()
        for index in (0, 1):
            await self._put(index)
        await self.flush()
        for name in names:
            await getattr(self, name)()
        await self._close()

    async def _open(self) -> None:
        self.cache = await self.simulation.open(self.disk, record=True)
        recording = self.simulation.recording
        self.model.position = recording.position
        self.lives.append((recording, self.model))

    async def _close(self) -> None:
        call = self.model.flush()
        await self.cache.close()
        call.done()

    async def _put(self, index: int) -> None:
        version = next(self.versions)
        call = self.model.put(index, version)
        assert await self.cache.put(key_of(index), block_of(index, version, SIZES))
        call.done()

    async def put(self) -> None:
        await self._put(2)

    async def overwrite(self) -> None:
        await self._put(0)

    async def delete(self) -> None:
        call = self.model.delete(0)
        await self.cache.delete(key_of(0))
        call.done()

    async def clear(self) -> None:
        call = self.model.clear()
        await self.cache.clear()
        call.done()

    async def flush(self) -> None:
        call = self.model.flush()
        await self.cache.flush()
        call.done()

    async def rotate(self) -> None:
        for _ in range(3):
            await self._put(next(self.fillers))
        await self.flush()

    async def evict(self) -> None:
        for _ in range(6):
            await self._put(next(self.fillers))

    async def close(self) -> None:
        await self._close()
        self.model = self.model.crash()
        await self._open()


OPERATIONS = ("put", "overwrite", "delete", "flush", "rotate", "evict", "clear", "close")


def _sequences() -> list[tuple[str, ...]]:
    """All of them up to the level's length; after each comes a close."""
    longest = count("operations in exhaustive sequences")
    return [each for length in range(1, longest + 1) for each in itertools.product(OPERATIONS, repeat=length)]


def _check(simulation: Simulation, model: ModelCache, files: Any, cut: float, where: str) -> None:
    for index, version in simulation.look(files, KEYS).items():
        allowed = model.allowed_after_crash(index, cut)
        assert version in allowed, f"{where}: key {index} has version {version}, allowed are {allowed}"
        assert version is not MISS or not model.kept_after_crash(index, cut), f"{where}: key {index} is lost"


@pytest.mark.parametrize("part", parts())
def test_every_short_sequence_and_every_moment(memory_path: Path, part: int) -> None:
    draw = random.Random(seed("sequences"))
    simulation = Simulation(memory_path / "kv", SIZES, **OPTIONS)
    sequences = _sequences()[part :: len(parts())]
    positions = count("crash positions in each life of a sequence")
    images = twice = 0
    for names in sequences:
        sequence = Sequence(simulation)
        simulation.run(sequence.run(names))
        for life, (recording, model) in enumerate(sequence.lives):
            cuts = recording.cuts()
            for cut in draw.sample(cuts, min(positions, len(cuts))):
                mode = draw.choice(MODES)
                image_seed = draw.getrandbits(32)
                files = recording.content(cut=cut, mode=mode, random=random.Random(image_seed))
                where = f"{names}, life {life}, cut {cut}, mode {mode}, image seed {image_seed}"
                _check(simulation, model, files, cut, where)
                images += 1
                if draw.random() < 0.02:
                    twice += _crash_again(simulation, model, files, cut, where, draw)
    tally("exhaustive sequences", len(sequences))
    tally("crash images of sequences", images)
    tally("crashes during recovery in sequences", twice)


def _crash_again(
    simulation: Simulation, model: ModelCache, files: Any, cut: float, where: str, draw: random.Random
) -> int:
    """Crash the recovery of an image at some moments; how many."""

    async def recover() -> None:
        cache = await simulation.open(MemoryDisk(files), record=True)
        await simulation.values(cache, KEYS)
        await cache.close()

    simulation.run(recover())
    recording = simulation.recording
    cuts = recording.cuts()
    chosen = draw.sample(cuts, min(5, len(cuts)))
    for again in chosen:
        mode = draw.choice(MODES)
        image_seed = draw.getrandbits(32)
        second = recording.content(cut=again, mode=mode, random=random.Random(image_seed))
        _check(simulation, model, second, cut, f"{where}; again at {again}, mode {mode}, image seed {image_seed}")
    return len(chosen)


def test_a_store_that_skips_syncs_is_caught(memory_path: Path) -> None:
    """The check checks: with syncs that do nothing but are believed, flushed blocks are found missing."""
    simulation = Simulation(memory_path / "kv", SIZES, **OPTIONS)
    sequence = Sequence(simulation)
    simulation.run(sequence.run(("overwrite", "flush", "rotate")))
    [(recording, model)] = sequence.lives
    for entry in recording.journal:
        if entry.kind == "sync":
            entry.ok = False
    with pytest.raises(AssertionError, match=r"lost|has version"):
        for cut in recording.cuts():
            _check(simulation, model, recording.content(cut=cut, mode="dropped"), cut, f"cut {cut}")


def test_the_model_is_not_asked_in_vain(memory_path: Path) -> None:
    """Of the images after a flush, most have something that must be there."""
    simulation = Simulation(memory_path / "kv", SIZES, **OPTIONS)
    sequence = Sequence(simulation)
    simulation.run(sequence.run(("put", "flush", "delete")))
    [(recording, model)] = sequence.lives
    cuts = recording.cuts()
    assert sum(any(model.kept_after_crash(index, cut) for index in KEYS) for cut in cuts) > len(cuts) // 2


def test_sequences_leave_no_task(memory_path: Path) -> None:
    """What runs in a simulated loop ends in it."""
    simulation = Simulation(memory_path / "kv", SIZES, **OPTIONS)

    async def run() -> None:
        await Sequence(simulation).run(("evict", "rotate", "clear"))
        assert asyncio.all_tasks() == {asyncio.current_task()}

    simulation.run(run())
