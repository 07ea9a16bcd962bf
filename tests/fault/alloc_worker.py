"""The process of test_allocation.py: allocations fail in it, one after the other. Prints how many were made to fail."""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import itertools
import random
import resource
import tempfile
from pathlib import Path

import numpy as np
from storekit import check_idle, check_payload, payload, recovered, settle

import asynckv
from asynckv._core import Table

FOR_GOOD = 1 << 40
QUIET = 12  # so many starts in a row at which nothing failed: behind the last allocation


# ours, in C: the library that was loaded first refuses them


def shim():
    library = ctypes.CDLL(None)
    library.refuse.argtypes = (ctypes.c_long, ctypes.c_long)
    library.refused.restype = ctypes.c_long
    return library


SIZES = (60, 700, 5000)
KEYS = range(600)
STORE = {"memory": "256KiB", "disk": "2MiB", "segment": "128KiB", "engine": "threads"}


async def calls(cache, log):
    """Some of every call: each ends with its result, or with one of two errors, in time."""

    async def one(job):
        try:
            async with asyncio.timeout(20):
                return await job
        except (MemoryError, asynckv.DiskError):
            log.append(1)
            return None

    for key in KEYS:
        await one(cache.put(key, payload(key, 1, SIZES[key % 3])))
    for key in (*KEYS[:100], *KEYS[-100:]):
        found = await one(cache.get(key))
        assert found is None or check_payload(key, found) == 1
        del found
    await one(cache.flush())
    await one(cache.delete_many(range(0, 600, 7)))
    for blocks in (await one(cache.get_many(range(10))), await one(cache.get_many(range(300, 310)))):
        for key, found in zip((*range(10), *range(300, 310)), blocks or (), strict=False):
            assert found is None or len(found) == SIZES[key % 3]
        del blocks
    await one(cache.clear())


async def c_life(directory, lib, first, last):
    """One life in which allocations fail, then a healthy one; how many allocations there were in the first."""
    log = []
    lib.refuse(first, last)
    try:
        cache = await asynckv.open(directory, **STORE)
    except (MemoryError, asynckv.AsyncKVError):
        lib.refuse(0, 0)
        cache = await asynckv.open(directory, **STORE)
    try:
        await calls(cache, log)
        seen = lib.seen()
        lib.refuse(0, 0)
        cache._table.check()
        assert await cache.put(9999, payload(9999, 2, 700))
        for attempt in range(20):
            try:
                await cache.flush()
                break
            except asynckv.DiskError:
                assert attempt < 19, "the store never works again"
                await asyncio.sleep(0.2)
        await settle(cache)
        gc.collect()
        check_idle(cache)
        cache._table.check()
    finally:
        lib.refuse(0, 0)
        await cache.close()
    async with asynckv.open(directory, **STORE) as cache:
        await recovered(cache)
        found = await cache.get(9999)
        assert check_payload(9999, found) == 2
        del found
    return seen


async def in_c(most):
    lib = shim()
    starts = itertools.count(1)
    if most:
        with tempfile.TemporaryDirectory() as folder:
            total = await c_life(Path(folder, "kv"), lib, FOR_GOOD, FOR_GOOD)
        print("allocations", total)
        starts = sorted(random.sample(range(1, total + 1), min(most, total)))
    met = 0
    for start in starts:
        for last in (start + 1, FOR_GOOD):
            with tempfile.TemporaryDirectory() as folder:
                before = lib.refused()
                await c_life(Path(folder, "kv"), lib, start, last)
                now = lib.refused() - before
                met += now
        if not now:
            break
    print("refused", met)


# Python's own: every one that a call of the block table makes


def table_calls():
    """Name, what makes a table ready, and the call that meets the failure."""

    def table():
        made = Table(64 << 10, backed=True)
        for key in range(6):
            assert made.put(key, made.draft(bytes([key]) * 3000))
        return made

    def clean(made):
        for number, spill in enumerate(made.take_dirty(1 << 20, 100)):
            made.finish_spill(spill, True, 0, 4096 * (number + 1), 7)

    def on_disk():
        made = table()
        clean(made)
        for start in (10, 20):
            for key in range(start, start + 10):
                made.put(key, made.draft(b"x" * 3000))
            clean(made)
        assert made.state(0) == 2
        return made

    array = np.arange(700, dtype=np.float32)
    block = asynckv.CacheBlock(layer_id=1, key=array[:400], value=array[:300])

    def load(made):
        room = made.room(3000)
        while room.step() != 1:
            pass
        made.finish_load(made.begin_load(0, room), False)

    def request(made):
        made.request_end(made.request_begin())

    yield "put", table, lambda made: made.put("new", made.draft(array))
    yield "put a block", table, lambda made: made.put(b"new", made.draft(block))
    yield "overwrite", table, lambda made: made.put(3, made.draft(bytes([3]) * 2999))
    yield "get", table, lambda made: made.get(2)
    yield "get arrays", lambda: (t := table(), t.put(50, t.draft(block)))[0], lambda made: made.get(50)
    yield "remove", table, lambda made: made.remove(2)
    yield "take dirty", table, lambda made: made.take_dirty(1 << 20, 100)
    yield "load", on_disk, load
    yield "evict", on_disk, lambda made: made.put(70, made.draft(bytes(30_000)))
    yield "owe", on_disk, lambda made: (made.drop(0), made.return_owed(made.take_owed()))
    yield "carry", on_disk, lambda made: made.segment_candidates(0, 1 << 20)
    yield "drop a segment", on_disk, lambda made: made.drop_segment(0)
    yield "revert a segment", on_disk, lambda made: made.revert_segment(0, 0)
    yield "list", on_disk, lambda made: (made.keys(), made.disk_entries())
    desc = table().take_dirty(1, 1)[0].desc
    yield "intern", table, lambda made: made.release_desc(made.intern(desc))
    yield "request", table, request


def check_table(made, name, was):
    """Nothing is lost: what was dirty is still there to be written, and what is readable is right."""
    gc.collect()
    made.check()
    assert made.pinned_blocks == 0, name
    for key in range(6):
        found = made.peek(key)
        if found is not None:
            assert bytes(found) in (bytes([key]) * 3000, bytes([3]) * 2999), name
        del found
    if name in ("put", "put a block", "get", "get arrays", "take dirty", "request"):
        assert made.dirty_blocks >= was, f"{name}: blocks that wait to be written were lost"
    for spill in made.take_dirty(1 << 20, 1000):
        made.finish_spill(spill, True, 1, 4096, 7)
    assert made.put(99, made.draft(b"y" * 3000))
    made.check()
    made.clear()
    assert made.used == 0, name


def in_python(step):
    import _testcapi

    refuse, accept = _testcapi.set_nomemory, _testcapi.remove_mem_hooks
    met = 0
    for name, ready, call in table_calls():
        for for_good in (False, True):
            quiet, start = 0, random.randrange(step) + 1 - step
            while quiet * step < QUIET:
                start += step
                made = ready()
                was = made.dirty_blocks
                failed = False
                refuse(start, 0 if for_good else start + 1)
                try:
                    call(made)
                except MemoryError:
                    failed = True
                finally:
                    accept()
                quiet = 0 if failed else quiet + 1
                met += failed
                if name != "take dirty" or failed:
                    check_table(made, name, was)
    print("refused", met)


# the pool itself


async def in_pool(directory):
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (2 << 30), -1))  # threads take some, too
    try:
        async with asynckv.open(directory, memory="8GiB", disk="16MiB", force=True):
            raise AssertionError("the limit does not hold here")
    except MemoryError:
        pass
    async with asynckv.open(directory, memory="1MiB", disk="16MiB", engine="threads") as cache:
        assert await cache.put(1, payload(1))
        await cache.flush()
    print("refused 1")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["c", "python", "pool"])
    parser.add_argument("--directory")
    parser.add_argument("--most", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    random.seed(options.seed)
    if options.what == "c":
        asyncio.run(in_c(options.most))
    elif options.what == "python":
        in_python(5 if options.most else 1)
    else:
        asyncio.run(in_pool(options.directory))
