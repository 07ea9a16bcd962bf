"""What a put, a memory hit and a reload cost, by how many blocks there are."""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING, Any

from asynckv.bench.figures import Row, Slice, Stopwatch
from asynckv.bench.payloads import Payloads
from asynckv.commands.output import open_store

if TYPE_CHECKING:
    from asynckv.cache import Cache
    from asynckv.commands.output import Progress

__all__ = ["COUNTS", "growth"]

COUNTS = (1_000, 10_000, 100_000, 1_000_000)
BLOCK_BYTES = 60
EXTENT_BYTES = 64
BATCH = 256
CALLS = 2_000  # in a slice
ROUNDS = 15


async def growth(directory: str, *, loop: str, progress: Progress) -> list[Row]:
    """Single calls on blocks of 60 bytes; a latency is a slice's seconds for each call."""
    rows = []
    for place, count in enumerate(COUNTS):
        progress.update(place / len(COUNTS), f"{count:,} blocks")
        room = 2 * count * EXTENT_BYTES + (1 << 20)
        async with open_store(os.path.join(directory, f"memory-{count}"), memory=room, disk=0) as cache:
            rows += await _measured(cache, count, ("put", "hit"), loop)
        memory = min(1 << 20, count * EXTENT_BYTES // 4)
        options: dict[str, Any] = {"memory": memory, "disk": 4 * room + (64 << 20), "force": True}
        async with open_store(os.path.join(directory, f"disk-{count}"), **options) as cache:
            rows += await _measured(cache, count, ("reload",), loop)
    return rows


async def _measured(cache: Cache, count: int, operations: tuple[str, ...], loop: str) -> list[Row]:
    payloads, dice = Payloads(BLOCK_BYTES), random.Random(count)
    for start in range(0, count, BATCH):
        numbers = range(start, min(start + BATCH, count))
        await cache.put_many((number, payloads.make(number)) for number in numbers)
    await cache.flush()
    stats = cache.stats()
    rows = []
    for operation in operations:
        slices = []
        for _ in range(ROUNDS):
            asked = [dice.randrange(count) for _ in range(CALLS)]
            if operation == "reload":
                asked = [number for number in asked if cache.tier(number) == "disk"][: CALLS // 10]
                assert asked, "the pool holds them all"
            found: list[Any] = []
            with Stopwatch() as watch:
                if operation == "put":
                    for number in asked:
                        await cache.put(number, payloads.make(number))
                else:
                    found = [await cache.get(number) for number in asked]
            wrong = sum(not payloads.check(*pair) for pair in zip(asked, found, strict=False))
            size = len(asked) * BLOCK_BYTES
            took = [watch.seconds / max(1, len(asked))]
            slices.append(Slice(len(asked), size, watch.seconds, watch.cpu, took, wrong))
        what: dict[str, Any] = {"block": BLOCK_BYTES, "depth": 1, "engine": stats.engine, "loop": loop, "count": count}
        rows.append(Row.of(slices, operation=operation, **what))
    return rows
