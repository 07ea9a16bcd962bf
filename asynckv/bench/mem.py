"""Memory hits and puts beside what does the same without a disk: an OrderedDict in order of use, and cachetools."""

from __future__ import annotations

import importlib.util
import random
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

import asynckv
from asynckv.bench.figures import Row, Slice, Stopwatch

if TYPE_CHECKING:
    from asynckv.commands.output import Progress

__all__ = ["RIVAL", "in_memory"]

BLOCKS = 4096
FLOATS = 256  # of each of a block's two arrays
BLOCK_BYTES = 2 * 4 * FLOATS
BATCH = 64
BATCHES = 64  # in a slice
RIVAL = "cachetools"

Play = Callable[[Sequence[int]], Awaitable[object]]


def _blocks() -> list[asynckv.CacheBlock]:
    values = np.arange(2 * BLOCKS * FLOATS, dtype=np.float32).reshape(BLOCKS, 2, FLOATS)
    return [asynckv.CacheBlock(0, pair[0], pair[1]) for pair in values]


def _rivals(blocks: list[asynckv.CacheBlock]) -> dict[str, Play]:
    """A hit returns a ready object; a put copies its two arrays, as the store does."""
    ordered = OrderedDict(enumerate(blocks))

    async def ordered_hit(order: Sequence[int]) -> None:
        for number in order:
            ordered.move_to_end(number)
            ordered[number]

    async def ordered_put(order: Sequence[int]) -> None:
        for number in order:
            block = blocks[number]
            ordered[number] = asynckv.CacheBlock(0, block.key.copy(), block.value.copy())
            ordered.move_to_end(number)

    plays: dict[str, Play] = {"hit, dict + OrderedDict": ordered_hit, "put, dict + OrderedDict": ordered_put}
    if importlib.util.find_spec(RIVAL) is None:
        return plays
    from cachetools import LRUCache

    lru: Any = LRUCache(BLOCKS)
    lru.update(enumerate(blocks))

    async def lru_hit(order: Sequence[int]) -> None:
        for number in order:
            lru[number]

    async def lru_put(order: Sequence[int]) -> None:
        for number in order:
            block = blocks[number]
            lru[number] = asynckv.CacheBlock(0, block.key.copy(), block.value.copy())

    return plays | {f"hit, {RIVAL}": lru_hit, f"put, {RIVAL}": lru_put}


def _ours(cache: asynckv.Cache, blocks: list[asynckv.CacheBlock]) -> dict[str, Play]:
    async def hit(order: Sequence[int]) -> None:
        get = cache.get
        for number in order:
            await get(number)

    async def put(order: Sequence[int]) -> None:
        for number in order:
            await cache.put(number, blocks[number])

    async def get_many(order: Sequence[int]) -> None:
        for start in range(0, len(order), BATCH):
            await cache.get_many(order[start : start + BATCH])

    async def request(order: Sequence[int]) -> None:
        for start in range(0, len(order), BATCH):
            async with cache.request(order[start : start + BATCH]) as one:
                await one.get_many()

    async def match_prefix(order: Sequence[int]) -> None:
        for start in range(0, len(order), BATCH):
            cache.match_prefix(order[start : start + BATCH])

    plays: dict[str, Play] = {"hit": hit, "put": put}
    for play in (get_many, request, match_prefix):
        plays[f"{play.__name__} of {BATCH}"] = play
    return plays


async def in_memory(directory: str, *, loop: str, rounds: int, progress: Progress) -> list[Row]:
    """All of them in turn. Latencies are a slice's seconds for each block; a share is of cachetools' rate."""
    blocks = _blocks()
    dice = random.Random(1)
    async with asynckv.open(directory, memory=16 * BLOCKS * BLOCK_BYTES, disk=0) as cache:
        await cache.put_many(enumerate(blocks))
        plays = _ours(cache, blocks) | _rivals(blocks)
        slices: dict[str, list[Slice]] = {name: [] for name in plays}
        for number in range(rounds):
            order = [dice.randrange(BLOCKS) for _ in range(BATCH * BATCHES)]
            for name, play in plays.items():
                with Stopwatch() as watch:
                    await play(order)
                took = watch.seconds / len(order)
                slices[name].append(Slice(len(order), len(order) * BLOCK_BYTES, watch.seconds, watch.cpu, [took]))
            slices["hit"][-1].wrong = await _wrong(cache, blocks, order)
            progress.update((number + 1) / rounds, "memory")
        engine = cache.stats().engine
    rows = []
    for name, found in slices.items():
        kind = "put" if name.startswith("put") else "hit"
        rival = slices.get(f"{kind}, {RIVAL}", [])
        ratios = [ours.rate / theirs.rate for ours, theirs in zip(found, rival, strict=False)] if rival != found else []
        row = Row.of(found, ratios, operation=name, block=BLOCK_BYTES, depth=1, engine=engine, loop=loop)
        row.beside = f"{kind}, {RIVAL}" if ratios else ""
        rows.append(row)
    return rows


async def _wrong(cache: asynckv.Cache, blocks: list[asynckv.CacheBlock], order: Sequence[int]) -> int:
    wrong = 0
    for number in set(order):
        block, wanted = await cache.get(number), blocks[number]
        right = (
            block is not None and np.array_equal(block.key, wanted.key) and np.array_equal(block.value, wanted.value)
        )
        wrong += not right
    return wrong
