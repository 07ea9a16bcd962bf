"""Races that other stores had: frees on other threads, clears in between, evictions between look-up and read."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from levels import count, rounds, seed, tally
from sickkit import SMALL, sick
from storekit import (
    BLOCK,
    blocks,
    check_idle,
    check_payload,
    child_environment,
    crash_image,
    fill,
    payload,
    ring_refusal,
    settle,
    until,
)

import asynckv
from asynckv._core import Table
from asynckv.testing import Script, hang
from asynckv.testing.tools import PAGE, Ends, aligned, pattern

RELEASERS = 8


@pytest.mark.timeout(3600)
def test_blocks_freed_on_other_threads_never_overlap_and_none_is_lost():
    # Fault kinds RACE and LEAK: frees that bypass a lock, counters of what is shared changed by several threads.
    rng = random.Random(seed("frees"))
    table = Table(1 << 20)
    stop, queue, wrong = threading.Event(), deque[Any](), []

    def release() -> None:
        while queue or not stop.is_set():
            try:
                data, view = queue.popleft()
            except IndexError:
                time.sleep(0)
                continue
            if view.tobytes() != data:
                wrong.append(data[:8])
            del view

    threads = [threading.Thread(target=release) for _ in range(RELEASERS)]
    for thread in threads:
        thread.start()
    pinned = 0
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for number in rounds("blocks freed on other threads"):
            key, rows = rng.randrange(200), rng.randrange(1, 2000)
            data = b"%08d" % number * rows
            # Many shapes: their descriptors are shared, counted and freed with the views that use them.
            stored = table.put(key, table.draft(np.frombuffer(data, np.uint8).reshape(rows, 8)))
            while len(queue) > 50:
                time.sleep(0)
            if stored:
                queue.append((data, table.get(key)))
                pinned += 1
            if number % 3 == 0:
                table.remove(key)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
    assert not wrong, "two blocks in one place"
    assert pinned > 10_000
    assert table.pinned_blocks == 0
    table.check()
    table.clear()
    table.check()
    assert table.used == 0
    assert table.put("all of it", table.draft(bytes((1 << 20) - 64)))
    table.close()


@pytest.mark.timeout(3600)
def test_clears_between_evictions_spills_and_releases_keep_the_free_list_whole():
    # Fault kind LEAK: a room freed twice, or never, when clear meets what is under way.
    rng = random.Random(seed("clears"))
    table = Table(300_000, backed=True)
    views, spills, loads = deque[Any](), deque[Any](), deque[Any]()
    ends = {"cleared": 0, "spill under clear": 0, "load under clear": 0, "view under clear": 0}
    for number in rounds("clears in the middle of things"):
        for key in rng.sample(range(40), 3):
            table.put(key, table.draft(bytes(rng.choice([0, 60, 3000, 20_000, 40_000]))))
        for key in rng.sample(range(40), 8):
            view = table.get(key)
            if view is not None and len(views) < 3:
                views.append(view)
            del view
            where = table.where(key)
            if where is not None:
                room = table.room(where[2])
                if room.step() == 1:
                    loads.append(table.begin_load(key, room))
                else:
                    room.cancel()
        if len(spills) < 4:
            spills.extend(table.take_dirty(60_000, 3))
        if rng.random() < 0.1:
            ends["cleared"] += 1
            ends["spill under clear"] += bool(spills)
            ends["load under clear"] += bool(loads)
            ends["view under clear"] += bool(views)
            table.clear()
            assert table.length == 0
        while spills and rng.random() < 0.6:
            table.finish_spill(spills.popleft(), rng.random() < 0.9, 1, 4096 + 64 * number, 0)
        while loads and rng.random() < 0.6:
            table.finish_load(loads.popleft(), rng.random() < 0.8)
        while views and rng.random() < 0.5:
            views.popleft()
        table.take_owed()
        table.check()
    for spill in spills:
        table.finish_spill(spill, False)
    for load in loads:
        table.finish_load(load, False)
    views.clear()
    table.clear()
    table.check()
    assert table.used == 0
    assert min(ends.values()) > 5, ends
    table.close()


async def test_a_segment_that_goes_between_look_up_and_read_gives_the_block_or_a_miss(tmp_path):
    # Fault kind RACE: an entry evicted between look-up and load.
    options = {"memory": "1MiB", "disk": "4MiB", "segment": "256KiB"}
    await fill(tmp_path / "kv", blocks(12), **options)
    script = Script()
    # A segment waits for its readers; one whose time is over keeps its file and its extent, and answers nobody.
    async with sick(tmp_path / "kv", script, **options, io_timeout=0.3, room_timeout=30.0) as (cache, backend):
        assert all(key in cache for key in range(12))
        script.add("read", hang(), sticky=True)
        gets = [asyncio.create_task(cache.get(key)) for key in range(2)]  # three would switch the disk off
        await until(lambda: backend.held == 2)
        script.clear()
        for key in range(1000, 1120):
            assert await cache.put(key, payload(key))
        await cache.flush()
        assert 8 not in cache, "its segment has gone"
        assert await cache.get(8) is None
        backend.release_all()
        for key, found in enumerate(await asyncio.gather(*gets)):
            assert found is None or bytes(found) == payload(key)
        del found
        gets.clear()
        await settle(cache)
        for key in range(12):
            assert await cache.get(key) is None or cache.tier(key) == "memory"
        for key in range(1000, 1120):
            found = await cache.get(key)
            assert found is None or bytes(found) == payload(key)
            del found
        assert check_idle(cache).corrupt_blocks == 0


async def test_readers_at_every_step_of_a_flush_see_whole_values(tmp_path):
    # Fault kind RACE: announced before it can be read, or after it is gone. Each step of writing is held once.
    options = {"memory": "1MiB", "disk": "4MiB", "segment": "256KiB"}
    steps = 0
    while True:
        script, store, image = Script(), tmp_path / f"kv{steps}", tmp_path / f"image{steps}"
        async with sick(store, script, **options, io_timeout=30.0) as (cache, backend):
            await cache.put_many(blocks(3).items())
            await cache.flush()
            await cache.put_many(blocks(6, version=1).items())  # more than the segment has room for
            script.add("*", hang(), nth=steps + 1)
            flushing = asyncio.create_task(cache.flush())
            await until(lambda backend=backend, flushing=flushing: backend.held or flushing.done())
            held = backend.held
            for key in range(6):
                assert cache.tier(key) == "memory"
                assert bytes(await cache.get(key)) == payload(key, 1)
            crash_image(store, image)
            backend.release_all()
            await flushing
        async with asynckv.open(image, **options) as cache:
            for key in range(6):
                found = await cache.get(key)
                if found is not None:
                    check_payload(key, found)
                else:
                    assert key >= 3, "it was flushed"
                del found
        if not held:
            break
        steps += 1
    assert steps >= 6


@pytest.mark.timeout(3600)
@pytest.mark.skipif(bool(ring_refusal()), reason="NO RING HERE: numbers of requests that wrap are NOT checked")
async def test_results_reach_their_own_reader_when_request_numbers_wrap(tmp_path):
    # Fault kind RACE: a completion goes to whoever has the number now.
    from asynckv import _uring
    from asynckv.backends.uring import UringBackend

    rings = []

    def factory(entries: int) -> Any:
        rings.append(_uring.Ring(entries, generation=2**32 - 7))
        return rings[-1]

    backend = UringBackend(ring_factory=factory, entries=8, timeout=30.0)
    await backend.start(tmp_path)
    file = await backend.open("data", create=True)
    data = pattern(128 * PAGE)
    await backend.write(file, 0, [data])
    targets = [aligned(PAGE) for _ in range(500)]
    rng = random.Random(seed("wrap"))
    for _ in range(count("reads over a ring whose numbers wrap") // len(targets)):
        pages, ends = [rng.randrange(128) for _ in targets], Ends()
        reads = [
            backend.read(file, page * PAGE, target, released=ends) for page, target in zip(pages, targets, strict=True)
        ]
        assert await asyncio.gather(*reads) == [True] * len(reads)
        assert ends.released == len(reads)
        tally("reads over a ring whose numbers wrap", len(reads))
        for page, target in zip(pages, targets, strict=True):
            assert target == data[page * PAGE : (page + 1) * PAGE]
    assert rings[0].stale == 0
    assert await backend.close() == 0


@pytest.mark.parametrize("engine", ["auto", "threads", "aiofiles"])
def test_no_descriptor_of_somebody_else_is_closed(tmp_path, engine):
    # Fault kind RACE: a number closed twice belongs to somebody else the second time.
    stop, troubles, opened = threading.Event(), [], 0

    def churn() -> None:
        nonlocal opened
        while not stop.is_set():
            numbers = [os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC) for _ in range(8)]
            opened += len(numbers)
            time.sleep(0.0003)
            for number in numbers:
                try:
                    assert os.readlink(f"/proc/self/fd/{number}") == os.devnull
                    os.close(number)
                except (OSError, AssertionError) as error:
                    troubles.append(error)

    async def life(version: int) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.005 * (version % 4)):  # some are cut while they open
                cache = await asynckv.open(tmp_path / "cut", **SMALL, engine=engine)
                await cache.close()
        async with asynckv.open(tmp_path / "kv", **SMALL, engine=engine) as cache:
            await cache.put_many(blocks(4, version=version).items())
            await cache.flush()

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for version in range(8):
            asyncio.run(life(version))
    finally:
        stop.set()
        thread.join()
    assert not troubles
    assert opened > 100


OPENER = """
import asyncio, os, sys, asynckv
async def attempt(directory):
    try:
        cache = await asynckv.open(directory, memory="256KiB", disk="4MiB", engine="threads")
    except asynckv.StoreLockedError:
        print("locked", flush=True)
        sys.stdin.readline()
        return
    assert await cache.put(os.getpid(), b"mine")
    print("open", flush=True)
    sys.stdin.readline()
    await cache.close()
print("ready", flush=True)
for line in sys.stdin:
    asyncio.run(attempt(line.strip()))
    print("done", flush=True)
"""


@pytest.mark.timeout(3600)
def test_a_new_directory_that_many_processes_open_at_once_has_one_owner_and_is_whole(tmp_path):
    # Fault kind RACE: making a store is not safe between processes.
    async def keys(directory: Path) -> list[Any]:
        async with asynckv.open(directory, memory="256KiB", disk="4MiB", recover="strict") as cache:
            return cache.keys()

    children = [
        subprocess.Popen(
            [sys.executable, "-c", OPENER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
            env=child_environment(),
        )
        for _ in range(count("processes that open at once"))
    ]  # fmt: skip
    try:
        assert {child.stdout.readline() for child in children} == {"ready\n"}
        for round_ in rounds("openings of a new directory at once"):
            directory = tmp_path / str(round_) / "made" / "kv"
            for child in children:
                child.stdin.write(f"{directory}\n")
            said = [child.stdout.readline() for child in children]
            assert sorted(said) == ["locked\n"] * (len(children) - 1) + ["open\n"]
            for child in children:
                child.stdin.write("\n")
            assert {child.stdout.readline() for child in children} == {"done\n"}
            assert asyncio.run(keys(directory)) == [children[said.index("open\n")].pid]
    finally:
        for child in children:
            child.communicate("")
    assert [child.returncode for child in children] == [0] * len(children)


async def test_whoever_asks_while_a_block_loads_gets_the_same_answer(tmp_path):
    # Fault kind RACE: each reader looks at a changing fact for itself.
    await fill(tmp_path / "kv", blocks(8), **SMALL)
    script = Script()
    async with sick(tmp_path / "kv", script) as (cache, backend):
        for key, well in ((1, True), (2, False)):
            script.add("read", hang(), nth=1)
            gets = []
            for number in range(16):
                gets.append(asyncio.create_task(cache.get(key)))
                await asyncio.sleep(0.002 * (number % 3))
            await until(lambda: backend.held == 1)
            if not well:
                await cache.delete(key)
            backend.release_all()
            found = await asyncio.gather(*gets)
            gets.clear()
            assert [each is not None for each in found] == [well] * 16
            assert not well or all(bytes(each) == payload(key) for each in found)
            del found
        await settle(cache)
        assert check_idle(cache).memory_used == BLOCK
