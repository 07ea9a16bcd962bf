"""Power loss at many moments: unsynced writes are lost, kept in part, or torn, and the store keeps its promises.

A short workload runs on a backend that records each change. From the record, directories are built as a power loss
could have left them at sampled moments: all unsynced changes dropped, some of them kept, each torn at a sector or any
byte. Each is opened: what `flush` acknowledged before that moment is there with its flushed or a later value, what was
deleted or cleared before it is not, and no value appears that was never put. Some are crashed again while they recover.

ASYNCKV_TEST_SEED repeats a run.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from levels import count, seed, tally

import asynckv
from asynckv.backends import create_backend
from asynckv.testing import ModelCache, RecordingBackend
from asynckv.testing.values import WrongBlockError, block_of, key_of, version_of

SIZES = (40, 60, 700, 4096, 5000, 12_000, 32_768)
KEYS = 30
OPERATIONS = 220
IMAGES_OF_A_LIFE = 150
SECONDS_MAX = 10.0
OPTIONS: dict[str, Any] = {"memory": 256 << 10, "direct": False, "io_timeout": 20.0, "room_timeout": 20.0}
ROOMY: dict[str, Any] = {**OPTIONS, "disk": 16 << 20, "segment": 256 << 10}
TIGHT: dict[str, Any] = {**OPTIONS, "disk": 512 << 10, "segment": 64 << 10}
MODES = ("kill", "kept", "dropped", "subset", "torn", "torn")


class Life:
    """One opening of a store on a recording backend, with a workload; ended by a close, crashed later in its images."""

    def __init__(
        self, directory: Path, options: dict[str, Any], seed: int, versions: list[int], model: ModelCache
    ) -> None:
        self.directory = directory
        self.options = options
        self.random = random.Random(seed)
        self.next = versions
        self.model = model
        self.backend: RecordingBackend
        self.may_drop = options["disk"] < ROOMY["disk"]

    def _factory(self, *args: Any, **options: Any) -> RecordingBackend:
        self.backend = RecordingBackend(create_backend(*args, **options))
        self.model.position = self.backend.position
        return self.backend

    async def run(self, operations: int) -> None:
        cache = await asynckv.open(self.directory, _backend_factory=self._factory, **self.options)
        try:
            shares = [range(share, KEYS, 2) for share in range(2)]
            await asyncio.gather(*(self._client(cache, share, operations // 2) for share in shares))
            await self._clear(cache)
            await self._client(cache, range(KEYS), operations // 4)
        finally:
            await cache.close()

    async def _client(self, cache: asynckv.Cache, share: range, operations: int) -> None:
        draw, model = self.random, self.model
        flushes: set[asyncio.Task[None]] = set()
        for _ in range(operations):
            index = draw.choice(share)
            what = draw.random()
            if what < 0.55:
                version = self.next[index]
                self.next[index] += 1
                call = model.put(index, version)
                assert await cache.put(key_of(index), block_of(index, version, SIZES))
                call.done()
            elif what < 0.7:
                block = await cache.get(key_of(index))
                if block is not None:
                    version_of(index, block, SIZES)
                del block
            elif what < 0.78:
                call = model.delete(index)
                await cache.delete(key_of(index))
                call.done()
            elif what < 0.9:
                await self._flush(cache)
            else:
                flushes.add(asyncio.ensure_future(self._flush(cache)))
        await asyncio.gather(*flushes)

    async def _flush(self, cache: asynckv.Cache) -> None:
        call = self.model.flush()
        try:
            await cache.flush()
        except OSError:
            if not self.may_drop:
                raise
            return
        call.done()

    async def _clear(self, cache: asynckv.Cache) -> None:
        call = self.model.clear()
        await cache.clear()
        call.done()

    def cuts(self, count: int) -> list[int]:
        """Sampled moments at which a crash can make a difference, in order."""
        cuts = self.backend.cuts()
        return sorted(self.random.sample(cuts, min(count, len(cuts))))


async def _look(directory: Path, life: Life, cut: int) -> list[str]:
    """Open an image and compare every key with what is allowed."""
    model, may_drop = life.model, life.may_drop
    problems = []
    cache = await asyncio.wait_for(_opened(directory, life.options), SECONDS_MAX)
    try:
        for index in range(KEYS):
            block = await asyncio.wait_for(cache.get(key_of(index)), SECONDS_MAX)
            try:
                version = None if block is None else version_of(index, block, SIZES)
            except WrongBlockError as error:
                problems.append(str(error))
                continue
            allowed = model.allowed_after_crash(index, cut)
            if version not in allowed:
                problems.append(f"key {index}: version {version} is back or was never put, allowed are {allowed}")
            elif version is None and not may_drop and model.kept_after_crash(index, cut):
                problems.append(f"key {index}: lost, allowed are {allowed}")
            del block
        stats = cache.stats()
        if stats.disk_used > stats.disk_capacity:
            problems.append(f"{stats.disk_used} bytes on disk, the cap is {stats.disk_capacity}")
        if stats.disk_state != "ok" or stats.io_errors:
            problems.append(f"the disk is {stats.disk_state}, {stats.io_errors} errors")
        if not may_drop and stats.corrupt_blocks:
            problems.append(f"{stats.corrupt_blocks} blocks called corrupt")
    finally:
        await asyncio.wait_for(cache.close(), SECONDS_MAX)
    return problems


async def _opened(directory: Path, options: dict[str, Any]) -> asynckv.Cache:
    return await asynckv.open(directory, **options)


def _check(runner: asyncio.Runner, root: Path, life: Life, cuts: list[int], what: str) -> int:
    """Open one image for each moment; returns how many had something that must be there."""
    telling = 0
    path = root / "image"
    for number, cut in enumerate(cuts):
        mode = MODES[number % len(MODES)]
        telling += any(life.model.kept_after_crash(index, cut) for index in range(KEYS))
        image_seed = life.random.getrandbits(32)
        life.backend.image(path, cut=cut, mode=mode, random=random.Random(image_seed))
        try:
            problems = runner.run(_look(path, life, cut))
        finally:
            shutil.rmtree(path)
        assert not problems, f"{what}cut {cut}, mode {mode}, image seed {image_seed}: " + "; ".join(problems[:4])
    return telling


@pytest.mark.parametrize("options", [ROOMY, TIGHT], ids=["all that is put fits", "segments are reused"])
def test_power_loss(memory_path: Path, options: dict[str, Any]) -> None:
    first = seed()
    wanted = count("power-loss images") // 2
    telling = images = 0
    with asyncio.Runner() as runner:
        for number in itertools.count(first):
            life = Life(memory_path / "store", options, number, [1] * KEYS, ModelCache())
            runner.run(life.run(OPERATIONS))
            cuts = life.cuts(min(IMAGES_OF_A_LIFE, wanted - images))
            telling += _check(runner, memory_path, life, cuts, f"seed {number}, ")
            images += len(cuts)
            shutil.rmtree(life.directory)
            if images >= wanted:
                break
    tally("power-loss images", images)
    print(f"{images} images, {telling} of them after an acknowledged flush")
    assert telling > images // 2


def test_power_loss_while_it_recovers_from_one(memory_path: Path) -> None:
    first = seed()
    wanted = count("crashes during recovery")
    images = 0
    with asyncio.Runner() as runner:
        for number in itertools.count(first):
            life = Life(memory_path / "store", ROOMY, number, [1] * KEYS, ModelCache())
            runner.run(life.run(OPERATIONS))
            for cut in life.cuts(3):
                mode = life.random.choice(MODES)
                path = memory_path / "recovering"
                life.backend.image(path, cut=cut, mode=mode, random=life.random)
                second = Life(path, ROOMY, life.random.getrandbits(32), list(life.next), life.model.crash(cut))
                runner.run(second.run(8))
                cuts = second.cuts(25)
                _check(runner, memory_path, second, cuts, f"seed {number}, first cut {cut} {mode}, second ")
                images += len(cuts)
                shutil.rmtree(path)
            shutil.rmtree(life.directory)
            if images >= wanted:
                break
    tally("crashes during recovery", images)
    print(f"{images} images")


def test_a_store_that_skips_syncs_is_caught(memory_path: Path) -> None:
    """The check checks: with syncs that do nothing but are believed, acknowledged blocks must be found missing."""
    life = Life(memory_path / "store", ROOMY, seed(), [1] * KEYS, ModelCache())
    with asyncio.Runner() as runner:
        runner.run(life.run(OPERATIONS))
        for entry in life.backend.journal:
            if entry.kind == "sync":
                entry.ok = False
        with pytest.raises(AssertionError, match=r"lost|corrupt|back"):
            _check(runner, memory_path, life, life.backend.cuts()[-60:], "")
