"""Power loss at many moments: unsynced writes are lost, kept in part, or torn, and the store keeps its promises.

A short workload runs on a backend that records each change. From the record, directories are built as a power loss
could have left them at sampled moments: all unsynced changes dropped, some of them kept, each torn at a sector or any
byte. Each is opened: what `flush` acknowledged before that moment is there with its flushed or a later value, what was
deleted or cleared before it is not, and no value appears that was never put. Some are crashed again while they recover.

ASYNCKV_TEST_SCALE multiplies the number of images, ASYNCKV_TEST_SEED repeats a run.
"""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fault_history import History, WrongBlockError, block_of, key_of, version_of
from levels import scale, seed

import asynckv
from asynckv.backends import create_backend
from asynckv.testing import RecordingBackend

SIZES = (40, 60, 700, 4096, 5000, 12_000, 32_768)
KEYS = 30
OPERATIONS = 220
SECONDS_MAX = 10.0
OPTIONS: dict[str, Any] = {"memory": 256 << 10, "direct": False, "io_timeout": 20.0, "room_timeout": 20.0}
ROOMY: dict[str, Any] = {**OPTIONS, "disk": 16 << 20, "segment": 256 << 10}
TIGHT: dict[str, Any] = {**OPTIONS, "disk": 512 << 10, "segment": 64 << 10}
MODES = ("kill", "kept", "dropped", "subset", "torn", "torn")


class Events:
    """What the user of a store was told, with the position in the journal at which it was told."""

    def __init__(self) -> None:
        self.list: list[tuple[int, Callable[..., None], tuple[int, ...]]] = []
        self.position: Callable[[], int] = lambda: 0

    def note(self, what: Callable[..., None], *args: int) -> None:
        self.list.append((self.position(), what, args))

    def until(self, cut: float, history: History) -> History:
        """Tell a history everything up to a moment."""
        for position, what, args in self.list:
            if position <= cut:
                what(history, *args)
        history.crash()
        return history


class Life:
    """One opening of a store on a recording backend, with a workload; ended by a close, crashed later in its images."""

    def __init__(self, directory: Path, options: dict[str, Any], seed: int, versions: list[int]) -> None:
        self.directory = directory
        self.options = options
        self.random = random.Random(seed)
        self.next = versions
        self.events = Events()
        self.backend: RecordingBackend | None = None
        self.may_drop = options["disk"] < ROOMY["disk"]

    def _factory(self, *args: Any, **options: Any) -> RecordingBackend:
        self.backend = RecordingBackend(create_backend(*args, **options))
        self.events.position = self.backend.position
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
        draw, note = self.random, self.events.note
        flushes: set[asyncio.Task[None]] = set()
        for _ in range(operations):
            index = draw.choice(share)
            what = draw.random()
            if what < 0.55:
                version = self.next[index]
                self.next[index] += 1
                note(History.begin_put, index, version)
                assert await cache.put(key_of(index), block_of(index, version, SIZES))
                note(History.end_put, index)
            elif what < 0.7:
                block = await cache.get(key_of(index))
                if block is not None:
                    version_of(index, block, SIZES)
                del block
            elif what < 0.78:
                note(History.begin_delete, index)
                await cache.delete(key_of(index))
                note(History.end_delete, index)
            elif what < 0.9:
                await self._flush(cache)
            else:
                flushes.add(asyncio.ensure_future(self._flush(cache)))
        await asyncio.gather(*flushes)

    async def _flush(self, cache: asynckv.Cache) -> None:
        number = self.random.getrandbits(60)
        self.events.note(History.begin_flush, number)
        try:
            await cache.flush()
        except OSError:
            if not self.may_drop:
                raise
            return
        self.events.note(History.end_flush, number)

    async def _clear(self, cache: asynckv.Cache) -> None:
        self.events.note(History.begin_clear)
        await cache.clear()
        self.events.note(History.end_clear)

    def cuts(self, count: int) -> list[int]:
        """Sampled moments at which a crash can make a difference, in order."""
        assert self.backend is not None
        cuts = self.backend.cuts()
        return sorted(self.random.sample(cuts, min(count, len(cuts))))


async def _look(directory: Path, options: dict[str, Any], history: History) -> list[str]:
    """Open an image and compare every key with what is allowed."""
    problems = []
    cache = await asyncio.wait_for(_opened(directory, options), SECONDS_MAX)
    try:
        for index in range(KEYS):
            block = await asyncio.wait_for(cache.get(key_of(index)), SECONDS_MAX)
            try:
                state = None if block is None else version_of(index, block, SIZES)
            except WrongBlockError as error:
                problems.append(str(error))
                continue
            problem = history.problem(index, state)
            if problem:
                problems.append(problem)
            del block
        stats = cache.stats()
        if stats.disk_used > stats.disk_capacity:
            problems.append(f"{stats.disk_used} bytes on disk, the cap is {stats.disk_capacity}")
        if stats.disk_state != "ok" or stats.io_errors:
            problems.append(f"the disk is {stats.disk_state}, {stats.io_errors} errors")
        if not history.may_drop and stats.corrupt_blocks:
            problems.append(f"{stats.corrupt_blocks} blocks called corrupt")
    finally:
        await asyncio.wait_for(cache.close(), SECONDS_MAX)
    return problems


async def _opened(directory: Path, options: dict[str, Any]) -> asynckv.Cache:
    return await asynckv.open(directory, **options)


def _check(
    runner: asyncio.Runner, root: Path, life: Life, cuts: list[int], start: Callable[[], History], what: str
) -> int:
    """Open one image for each moment; returns how many had acknowledged flushes."""
    backend = life.backend
    assert backend is not None
    telling = 0
    path = root / "image"
    for number, cut in enumerate(cuts):
        mode = MODES[number % len(MODES)]
        history = life.events.until(cut, start())
        telling += history.acknowledged > 0
        image_seed = life.random.getrandbits(32)
        backend.image(path, cut=cut, mode=mode, random=random.Random(image_seed))
        try:
            problems = runner.run(_look(path, life.options, history))
        finally:
            shutil.rmtree(path)
        assert not problems, f"{what}cut {cut}, mode {mode}, image seed {image_seed}: " + "; ".join(problems[:4])
    return telling


@pytest.mark.parametrize(
    ("options", "count"), [(ROOMY, 150), (TIGHT, 150)], ids=["all that is put fits", "segments are reused"]
)
def test_power_loss(memory_path: Path, options: dict[str, Any], count: int) -> None:
    first = seed()
    may_drop = options is TIGHT
    rounds = max(1, round(scale()))
    telling = images = 0
    with asyncio.Runner() as runner:
        for number in range(rounds):
            life = Life(memory_path / f"store-{number}", options, first + number, [1] * KEYS)
            runner.run(life.run(OPERATIONS))
            cuts = life.cuts(count)
            telling += _check(runner, memory_path, life, cuts, lambda: History(KEYS, may_drop=may_drop), "")
            images += len(cuts)
            shutil.rmtree(life.directory)
    print(f"{images} images, {telling} of them after an acknowledged flush")
    assert telling > images // 2


def test_power_loss_while_it_recovers_from_one(memory_path: Path) -> None:
    first = seed()
    images = 0
    with asyncio.Runner() as runner:
        for number in range(max(1, round(3 * scale()))):
            life = Life(memory_path / f"store-{number}", ROOMY, first + number, [1] * KEYS)
            runner.run(life.run(OPERATIONS))
            assert life.backend is not None
            for cut in life.cuts(3):
                mode = life.random.choice(MODES)
                path = memory_path / "recovering"
                life.backend.image(path, cut=cut, mode=mode, random=life.random)
                second = Life(path, ROOMY, life.random.getrandbits(32), list(life.next))
                runner.run(second.run(8))
                cuts = second.cuts(25)

                def start(life: Life = life, cut: int = cut) -> History:
                    return life.events.until(cut, History(KEYS))

                where = f"seed {first + number}, first cut {cut} {mode}, second "
                _check(runner, memory_path, second, cuts, start, where)
                images += len(cuts)
                shutil.rmtree(path)
            shutil.rmtree(life.directory)
    print(f"{images} images")


def test_a_store_that_skips_syncs_is_caught(memory_path: Path) -> None:
    """The check checks: with syncs that do nothing but are believed, acknowledged blocks must be found missing."""
    first = seed()
    life = Life(memory_path / "store", ROOMY, first, [1] * KEYS)
    with asyncio.Runner() as runner:
        runner.run(life.run(OPERATIONS))
        backend = life.backend
        assert backend is not None
        for entry in backend.journal:
            if entry.kind == "sync":
                entry.ok = False
        with pytest.raises(AssertionError, match=r"lost|corrupt|back"):
            _check(runner, memory_path, life, backend.cuts()[-60:], lambda: History(KEYS), "")
