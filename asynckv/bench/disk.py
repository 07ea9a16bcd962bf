"""Cold reloads, spills and a mix of both, in alternating slices with the roofline."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from asynckv.backends import create_backend
from asynckv.bench.figures import Row, Slice, Stopwatch
from asynckv.bench.payloads import Payloads
from asynckv.bench.requests import Requests, Tap, in_a_row, read_requests, recycled
from asynckv.commands.output import Progress, open_store

if TYPE_CHECKING:
    from asynckv.cache import Cache

__all__ = ["Plan", "mixed", "reloads", "small_spills", "spills"]

DEPTH = 64
CALLS = 2  # of get_many at a time
SLICE_SECONDS = 0.3
MIB = 1 << 20
SMALL_BYTES = 60  # the article's
SMALL_BLOCKS = 100_000
SMALL_BATCH = 256
SMALL_POOL = 512 << 10
SMALL_DISK = 256 << 20


@dataclass(frozen=True)
class Plan:
    """How much is done.

    Attributes
    ----------
    data
        Bytes of blocks in a store that is read from.
    seconds
        Of a slice.
    pairs
        Slices of the store, each between two of the roofline.
    """

    data: int = 1 << 30
    seconds: float = SLICE_SECONDS
    pairs: int = 40


class Bed:
    """An open store of blocks of one size, all of them durable, read in one random order round and round.

    The pool takes half of them, so that an LRU never hits.

    Parameters
    ----------
    cache
        The store.
    payloads
        What its blocks hold.
    count
        How many there are; the keys are their numbers.
    """

    def __init__(self, cache: Cache, payloads: Payloads, count: int) -> None:
        self.cache = cache
        self.payloads = payloads
        self.keys: list[int] = np.random.Generator(np.random.PCG64(count)).permutation(count).tolist()
        self.at = 0  # in the keys
        self.most = cache.stats().memory_capacity // 2 // payloads.size  # results that a slice may keep

    def next_keys(self, count: int) -> list[int]:
        """The next keys in turn."""
        found = self.keys[self.at : self.at + count]
        self.at = (self.at + len(found)) % len(self.keys)
        return found if len(found) == count else found + self.next_keys(count - len(found))

    def judge(self, found: Slice, watch: Stopwatch, results: Sequence[tuple[int, Any]]) -> Slice:
        """Complete a slice: the clock has stopped, now every byte is looked at."""
        found.blocks = len(results)
        found.bytes = len(results) * self.payloads.size
        found.seconds, found.cpu = watch.seconds, watch.cpu
        found.wrong = sum(not self.payloads.check(key, block) for key, block in results)
        return found


@asynccontextmanager
async def tapped(directory: str, **options: Any) -> AsyncIterator[tuple[Cache, Tap]]:
    """An open store in a directory, and its engine's tap."""
    taps: list[Tap] = []

    def factory(name: str, **details: Any) -> Tap:
        taps.append(Tap(create_backend(name, **details)))
        return taps[-1]

    async with open_store(directory, force=True, _backend_factory=factory, **options) as cache:
        yield cache, taps[-1]


async def alternate(
    variants: Mapping[str, Callable[[], Awaitable[Slice]]],
    roofline: Callable[[], Slice],
    pairs: int,
    told: Callable[[float], object] = lambda share: None,
) -> tuple[dict[str, list[Slice]], dict[str, list[float]], list[Slice]]:
    """Play variants in turn, the roofline between any two.

    Returns
    -------
    tuple
        Slices of each variant, their rates divided by the mean of the two rooflines around them, and those.
    """
    slices: dict[str, list[Slice]] = {name: [] for name in variants}
    ratios: dict[str, list[float]] = {name: [] for name in variants}
    roofs = [roofline()]
    for number in range(pairs):
        for name, play in variants.items():
            slices[name].append(await play())
            roofs.append(roofline())
            ratios[name].append(2 * slices[name][-1].rate / (roofs[-2].rate + roofs[-1].rate))
        told((number + 1) / pairs)
    return slices, ratios, roofs


# -- reloads ---------------------------------------------------------------------------------------------------------


Results = list[tuple[int, Any]]


async def _in_tasks(
    bed: Bed, seconds: float, tasks: int, most: int, step: Callable[[Results], Awaitable[object]]
) -> Slice:
    """A slice of tasks that take one step after the other, until the time is over or there are so many results."""
    results: Results = []
    found, clock = Slice(), time.perf_counter

    async def go_on() -> None:
        going = True
        while going:
            begun = clock()
            await step(results)
            found.latencies.append(clock() - begun)
            going = clock() < end and len(results) < most

    with Stopwatch() as watch:
        end = clock() + seconds
        await asyncio.gather(*(go_on() for _ in range(tasks)))
    return bed.judge(found, watch, results)


async def _individually(bed: Bed, seconds: float, depth: int) -> Slice:
    get = bed.cache.get

    async def step(results: Results) -> None:
        key = bed.next_keys(1)[0]
        results.append((key, await get(key)))

    return await _in_tasks(bed, seconds, depth, bed.most, step)


async def _batches(bed: Bed, seconds: float, depth: int) -> Slice:
    async def step(results: Results) -> None:
        keys = bed.next_keys(depth // CALLS)
        results.extend(zip(keys, await bed.cache.get_many(keys), strict=True))

    return await _in_tasks(bed, seconds, CALLS, bed.most, step)


async def _batches_into(bed: Bed, seconds: float, depth: int) -> Slice:
    rows = np.full((bed.most, bed.payloads.size), 0xA5, np.uint8)

    async def step(results: Results) -> None:
        keys = bed.next_keys(depth // CALLS)
        outs = list(rows[len(results) : len(results) + len(keys)])
        results.extend(zip(keys, outs, strict=True))
        await bed.cache.get_many_into(keys, outs)

    return await _in_tasks(bed, seconds, CALLS, bed.most - depth + 1, step)


async def _stream(bed: Bed, seconds: float, depth: int) -> Slice:
    results: list[tuple[int, Any]] = []
    clock, most = time.perf_counter, bed.most
    keys = bed.next_keys(most)
    with Stopwatch() as watch:
        end = clock() + seconds
        async for key, block in bed.cache.stream(keys):
            results.append((key, block))
            if clock() >= end:
                break
    bed.at = (bed.at - most + len(results)) % len(bed.keys)
    return bed.judge(Slice(), watch, results)


RELOADS: dict[str, Callable[[Bed, float, int], Awaitable[Slice]]] = {
    "get_many": _batches,
    "get": _individually,
    "get_many_into": _batches_into,
    "stream": _stream,
}


async def reloads(
    directory: str,
    size: int,
    plan: Plan,
    *,
    loop: str,
    engine: str = "auto",
    operations: Sequence[str] = tuple(RELOADS),
    progress: Progress,
) -> list[Row]:
    """Random reads of blocks that are on disk only, at depth 64 and at depth 1."""
    plan = replace(plan, data=max(plan.data, 4 * DEPTH * size))  # in flight at most half of the pool
    count = plan.data // size
    place = os.path.join(directory, "store")
    async with tapped(place, memory=plan.data // 2, disk=2 * plan.data, engine=engine) as (cache, tap):
        payloads = Payloads(size)
        for number in range(count):
            await cache.put(number, payloads.make(number))
            progress.update(number / count, f"filling a store with blocks of {size:,} bytes")
        await cache.flush()
        bed = Bed(cache, payloads, count)
        requests = await read_requests(cache, tap, bed.keys)
        stats = cache.stats()
        what: dict[str, Any] = {"block": size, "engine": stats.engine, "loop": loop, "direct": stats.direct}
        rows: list[Row] = []
        for depth in (DEPTH, 1):
            names = operations if depth > 1 else [name for name in operations if name == "get"]
            roofline = Requests(requests, depth)
            found, ratios, roofs = await alternate(
                {name: partial(RELOADS[name], bed, plan.seconds, depth) for name in names},
                partial(roofline.play, plan.seconds),
                plan.pairs,
                partial(progress.update, text=f"reloads of {size:,} bytes, depth {depth}"),
            )
            roofline.close()
            rows += [Row.of(found[name], ratios[name], operation=name, depth=depth, **what) for name in names]
            if names:
                rows.append(Row.of(roofs, operation="read roofline", depth=depth, **what))
        return rows


# -- spills ----------------------------------------------------------------------------------------------------------

WRITE_DEPTH = 2  # batches that the store has in flight
WARM_SECONDS = 0.05  # of puts before the clock starts: the pipeline ran dry beside the roofline


class Putter:
    """Puts new blocks as fast as they go into a full pool, on a disk that is written over and over."""

    def __init__(self, cache: Cache, size: int) -> None:
        self.cache = cache
        self.payloads = Payloads(size)
        self.number = 0

    async def go_on(self, seconds: float) -> None:
        """Put for so long."""
        cache, payloads, clock = self.cache, self.payloads, time.perf_counter
        end, going = clock() + seconds, True
        while going:
            await cache.put(self.number, payloads.make(self.number))
            self.number += 1
            going = clock() < end

    async def play(self, seconds: float) -> Slice:
        """A slice; what counts is what reached the disk."""
        await self.go_on(WARM_SECONDS)
        before = self.cache.stats()
        with Stopwatch() as watch:
            await self.go_on(seconds)
        blocks = self.cache.stats().spilled_blocks - before.spilled_blocks
        return Slice(blocks, blocks * self.payloads.size, watch.seconds, watch.cpu)

    async def wrong(self) -> int:
        """Of the newest blocks, as many as half the pool takes, those that are missing or not what was put."""
        count = min(self.number, self.cache.stats().memory_capacity // 2 // self.payloads.size)
        found = 0
        for number in range(self.number - count, self.number):
            found += not self.payloads.check(number, await self.cache.get(number))
        return found


async def spills(
    directory: str, size: int, plan: Plan, *, loop: str, engine: str = "auto", progress: Progress
) -> list[Row]:
    """Sustained spilling, against writes of the same sizes in flight at a time."""
    place = os.path.join(directory, "store")
    async with tapped(place, memory=plan.data // 4, disk=plan.data, engine=engine) as (cache, tap):
        putter = Putter(cache, size)
        tap.note(True)
        while (share := cache.stats().disk_bytes_written / (plan.data * 3 / 2)) < 1:  # every segment is used again
            progress.update(share, "filling the disk")
            await putter.go_on(plan.seconds)
        tap.note(False)
        sizes = [size for _, _, size in tap.writes if size > MIB]
        with recycled(directory, plan.data) as fd:
            asked = in_a_row(fd, sizes, plan.data)
            requests = Requests(asked, WRITE_DEPTH, writes=True, blocks=sum(each[2] for each in asked) / size)
            found, ratios, roofs = await alternate(
                {"spill": partial(putter.play, plan.seconds)},
                partial(requests.play, plan.seconds),
                plan.pairs,
                partial(progress.update, text=f"spills of {size:,} bytes"),
            )
            requests.close()
        stats, wrong = cache.stats(), await putter.wrong()
    what: dict[str, Any] = {"block": size, "engine": stats.engine, "loop": loop, "direct": stats.direct}
    row = Row.of(found["spill"], ratios["spill"], operation="spill", depth=1, **what)
    row.errors += wrong
    return [row, Row.of(roofs, operation="write roofline", depth=WRITE_DEPTH, **what)]


async def small_spills(directory: str, plan: Plan, *, loop: str, engine: str = "auto") -> list[Row]:
    """Blocks of 60 bytes by `put_many`, spilled, beside the same into a pool that takes them all."""
    rounds: dict[str, list[Slice]] = {"spilled": [], "kept": []}
    ratios = []
    memory = {"spilled": SMALL_POOL, "kept": 4 * SMALL_BLOCKS * SMALL_BYTES}
    for number in range(max(2, plan.pairs // 4)):
        for which, pool in memory.items():
            place = os.path.join(directory, f"{which}-{number}")
            async with open_store(place, memory=pool, disk=SMALL_DISK, engine=engine) as cache:
                rounds[which].append(await _small_puts(cache))
                stats = cache.stats()
        ratios.append(rounds["spilled"][-1].rate / rounds["kept"][-1].rate)
    what: dict[str, Any] = {
        "block": SMALL_BYTES,
        "depth": SMALL_BATCH,
        "engine": stats.engine,
        "loop": loop,
        "direct": stats.direct,
    }
    return [
        Row.of(rounds["spilled"], ratios, operation="put_many, spilled", beside="kept in memory", **what),
        Row.of(rounds["kept"], operation="put_many, kept", **what),
    ]


async def _small_puts(cache: Cache) -> Slice:
    payloads = Payloads(SMALL_BYTES)
    numbers = range(SMALL_BLOCKS)
    found, stored = Slice(SMALL_BLOCKS, SMALL_BLOCKS * SMALL_BYTES), 0
    with Stopwatch() as watch:
        for start in range(0, SMALL_BLOCKS, SMALL_BATCH):
            stored += sum(
                await cache.put_many((key, payloads.make(key)) for key in numbers[start : start + SMALL_BATCH])
            )
    found.seconds, found.cpu = watch.seconds, watch.cpu
    for start in range(0, SMALL_BLOCKS, SMALL_BATCH):
        keys = numbers[start : start + SMALL_BATCH]
        blocks = await cache.get_many(keys)
        found.wrong += sum(not payloads.check(key, block) for key, block in zip(keys, blocks, strict=True))
    found.wrong = max(found.wrong, SMALL_BLOCKS - stored)
    return found


# -- both ------------------------------------------------------------------------------------------------------------


async def _mix(putter: Putter, seconds: float, depth: int, back: int) -> Slice:
    """One put for each cold get, of the block that was put so many before, in as many tasks as the depth."""
    cache, payloads, clock = putter.cache, putter.payloads, time.perf_counter
    results: list[tuple[int, Any]] = []
    most = cache.stats().memory_capacity // 4 // payloads.size

    async def go_on() -> None:
        going = True
        while going:
            number = putter.number
            putter.number += 1
            block = await cache.get(number - back)
            await cache.put(number, payloads.make(number))
            results.append((number - back, block))
            going = clock() < end and len(results) < most

    with Stopwatch() as watch:
        end = clock() + seconds
        await asyncio.gather(*(go_on() for _ in range(depth)))
    wrong = sum(not payloads.check(number, block) for number, block in results)
    return Slice(2 * len(results), 2 * len(results) * payloads.size, watch.seconds, watch.cpu, [], wrong)


async def mixed(
    directory: str, size: int, plan: Plan, *, loop: str, engine: str = "auto", progress: Progress
) -> list[Row]:
    """A closed loop of one put per get, against reads and writes of the same sizes in the same proportion."""
    pool = plan.data // 4
    async with tapped(os.path.join(directory, "store"), memory=pool, disk=2 * plan.data, engine=engine) as (cache, tap):
        putter = Putter(cache, size)
        while (share := cache.stats().disk_bytes_written / (plan.data * 5 / 2)) < 1:
            progress.update(share, "filling the disk")
            await putter.go_on(plan.seconds)
        back = 2 * pool // size
        tap.note(True)
        await _mix(putter, plan.seconds, DEPTH, back)
        tap.note(False)
        reads, writes = [each[2] for each in tap.reads], [each[2] for each in tap.writes if each[2] > size]
        with recycled(directory, plan.data) as fd:
            # Of each write, so many reads as there were to one.
            share = max(1, round(len(reads) / max(1, len(writes))))
            asked, kinds = [], []
            places = in_a_row(fd, writes, plan.data)
            random = np.random.Generator(np.random.PCG64(1)).integers(0, plan.data // size - 1, len(places) * share)
            for number, place in enumerate(places):
                asked += [(fd, int(each) * size, size) for each in random[number * share : (number + 1) * share]]
                asked.append(place)
                kinds += [False] * share + [True]
            requests = Requests(asked, DEPTH, writes=kinds, blocks=2 * share * len(places))
            found, ratios, roofs = await alternate(
                {"mix": partial(_mix, putter, plan.seconds, DEPTH, back)},
                partial(requests.play, plan.seconds),
                plan.pairs,
                partial(progress.update, text=f"one put per get, {size:,} bytes"),
            )
            requests.close()
        stats = cache.stats()
    what: dict[str, Any] = {"block": size, "engine": stats.engine, "loop": loop, "direct": stats.direct, "depth": DEPTH}
    return [
        Row.of(found["mix"], ratios["mix"], operation="get and put", **what),
        Row.of(roofs, operation="mixed roofline", **what),
    ]
