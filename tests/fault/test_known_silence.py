"""Failures that other stores hid, or that ended somebody who waited; and things a store must not even begin to do."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import json
import mmap
import os
import threading
from collections import Counter
from pathlib import Path

import pytest
from sickkit import SMALL, sick
from storekit import BLOCK, MIB, blocks, check_idle, fill, payload, python, settle, until

import asynckv
from asynckv.testing import Script, corrupt, error, hang, short

PAGE = mmap.PAGESIZE


def resident_pages(directory: Path) -> int:
    """Pages of the segments that the page cache holds. Source: mincore(2)."""
    libc = ctypes.CDLL(None, use_errno=True)
    total = 0
    for path in directory.glob("*.seg"):
        size = path.stat().st_size
        with path.open("rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) as mapped:
            pages = (size + PAGE - 1) // PAGE
            answer = (ctypes.c_ubyte * pages)()
            here = ctypes.c_ubyte.from_buffer(mapped)
            assert libc.mincore(ctypes.c_void_p(ctypes.addressof(here)), ctypes.c_size_t(size), answer) == 0
            total += sum(each & 1 for each in answer)
            del here
    return total


@pytest.mark.parametrize("direct", ["auto", False])
@pytest.mark.parametrize("engine", ["auto", "threads", "aiofiles"])
async def test_direct_io_leaves_the_page_cache_alone_or_the_stats_say_buffered(tmp_path, engine, direct):
    # Fault kind SILENT: direct I/O asked for, and the page cache grows all the same.
    options = {"memory": "1MiB", "disk": "16MiB", "engine": engine, "direct": direct, "segment": "1MiB"}
    async with asynckv.open(tmp_path / "kv", **options) as cache:
        for key in range(96):
            assert await cache.put(key, payload(key, 0, 40_000))
        await cache.flush()
        before = cache.stats().loaded_blocks
        for _ in range(10):
            for key in range(0, 96, 2):
                assert await cache.get(key) is not None
        stats = cache.stats()
        assert stats.loaded_blocks > before + 200, "read from disk again and again"
        pages = resident_pages(tmp_path / "kv")
        written = 96 * 40_000 // PAGE
        if stats.direct:
            assert pages < written // 10, "hardly more than what was read to open the store"
        else:
            assert pages > written // 2, "the measure sees what is in the page cache"


@pytest.mark.parametrize("fault", ["error", "short", "flipped", "late", "refused"])
@pytest.mark.parametrize("call", ["get_into", "get_many_into"])
async def test_a_load_that_fails_leaves_the_callers_buffer_as_it_was(tmp_path, fault, call):
    # Fault kind WRONG: a failed restore has spoiled what it was restored into.
    await fill(tmp_path / "kv", blocks(6), **SMALL)
    script = Script()
    async with sick(tmp_path / "kv", script, io_timeout=0.1 if fault == "late" else 5.0) as (cache, backend):
        await cache.put(1, payload(1, 1))
        pinned = await cache.get(1)
        faults = {"error": error(errno.EIO), "short": short(0.9), "flipped": corrupt(), "late": hang()}
        script.add("read", faults.get(fault, error(errno.EACCES)), sticky=True)
        out, other = bytearray(b"\xee" * BLOCK), bytearray(b"\xdd" * BLOCK)
        if call == "get_into":
            assert await cache.get_into(3, out) is None
        else:
            assert await cache.get_many_into([1, 3, "absent"], [other, out, bytearray(8)]) == [BLOCK, None, None]
            assert other == payload(1, 1)
        assert out == b"\xee" * BLOCK
        assert bytes(pinned) == payload(1, 1), "what was there before serves on"
        assert cache.tier(3) != "memory", "nothing half read is published"
        stats = cache.stats()
        assert stats.io_errors + stats.io_timeouts + stats.corrupt_blocks == 1
        script.clear()
        backend.release_all()
        await settle(cache)
        await until(lambda: cache.stats().memory_quarantined == 0)
        assert await cache.get_into(2, out) == BLOCK
        assert out == payload(2)
        del pinned
        check_idle(cache)


@pytest.mark.parametrize(
    ("number", "engine"),
    [
        (errno.EIO, "auto"),
        (errno.EACCES, "threads"),
        (errno.ENOENT, "aiofiles"),
        (errno.EBADF, "auto"),
        (errno.ENOMEM, "threads"),
        (errno.EMFILE, "aiofiles"),
    ],
)
async def test_every_reader_is_answered_whatever_the_error_and_no_worker_is_lost(tmp_path, engine, number):
    # Fault kind HANG: an error nobody thought of ends a worker, and its readers wait for ever.
    await fill(tmp_path / "kv", blocks(24), **SMALL)
    script = Script()
    async with sick(tmp_path / "kv", script, engine=engine) as (cache, _):
        assert bytes(await cache.get(0)) == payload(0)
        workers = threads()
        for round_ in range(4):
            script.add("read", error(number), every=3)
            script.add("open", error(number), every=2)
            async with asyncio.timeout(20):
                found = await asyncio.gather(
                    *(cache.get(key) for key in range(8)),
                    cache.get_many(range(8, 16)),
                    cache.get_into(20, bytearray(BLOCK)),
                )
            assert len(found) == 10
            for key, each in enumerate(found[:8]):
                assert each is None or bytes(each) == payload(key)
            del found, each
            script.clear()
            await until(lambda: cache.stats().disk_state == "ok", 20)
            assert bytes(await cache.get(16 + round_)) == payload(16 + round_)
        assert workers <= threads()
        await settle(cache)
        check_idle(cache)


def threads() -> Counter[str]:
    """Threads of the engine by name; those that do one job each are left out."""
    return Counter(
        thread.name for thread in threading.enumerate() if thread.name.startswith(("asynckv-read", "asynckv-write"))
    )


AUDITED = """
import asyncio, json, os, sys, asynckv
seen, watching = [], False
WATCHED = ("socket.bind", "socket.connect", "socket.sendto", "socket.getaddrinfo", "subprocess.Popen", "os.exec",
           "os.posix_spawn", "os.system", "os.fork", "exec", "compile", "import", "marshal.loads", "pickle.find_class")
def maps_a_file(event, arguments):
    # The probe of direct I/O maps one page of a file without a name, and only asks whether it is in memory.
    return event == "mmap.__new__" and arguments[0] != -1 and os.fstat(arguments[0]).st_nlink
def watch(event, arguments):
    if watching and (event in WATCHED or maps_a_file(event, arguments)):
        seen.append((event, str(arguments)))
async def main():
    async with asynckv.open(sys.argv[1], memory="1MiB", disk="4MiB", segment="256KiB", engine=sys.argv[2]) as cache:
        for key in range(100):
            await cache.put(key, bytes([key]) * 60_000)
        await cache.flush()
        for key in range(100):
            await cache.get(key)
        await cache.delete(99)
        maps = [line for line in open("/proc/self/maps") if sys.argv[1] in line or "/dev/shm" in line]
        assert not maps, maps
asyncio.run(main())  # what is imported late
os.unlink(os.path.join(sys.argv[1], "index.snap"))
sys.addaudithook(watch)
watching = True
asyncio.run(main())
asyncio.run(main())
watching = False
print(json.dumps(seen))
"""


@pytest.mark.parametrize("engine", ["auto", "threads", "aiofiles"])
def test_a_store_listens_nowhere_maps_no_file_runs_nothing_and_leaves_no_name(tmp_path, engine):
    # Fault kinds SECURITY, CRASH and PROC: open ports, SIGBUS from mapped files, shared memory that outlives its owner.
    before = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    result = python(AUDITED, tmp_path / "kv", engine)
    assert json.loads(result.stdout) == []
    if before:
        assert not [name for name in set(os.listdir("/dev/shm")) - before if "asynckv" in name]


async def test_a_batch_in_which_anything_goes_wrong_tells_it_for_each_key(tmp_path):
    # Fault kind SILENT: one bad key spoils the rest, or hides among them.
    await fill(tmp_path / "kv", blocks(12), **SMALL)
    script = Script()
    async with sick(tmp_path / "kv", script) as (cache, _):
        script.add("read", error(errno.EIO), nth=3)
        found = await cache.get_many([0, 1, 2, 2, "absent", 3, 0])
        assert found[4] is None
        failed = [key for key, each in zip([0, 1, 2, 2, "absent", 3, 0], found, strict=True) if each is None]
        assert len(set(failed)) == 2, "one read failed, and one key is absent"
        for key, each in zip([0, 1, 2, 2, None, 3, 0], found, strict=True):
            assert each is None or bytes(each) == payload(key)
        del found, each
        assert cache.stats().io_errors == 1
        script.add("write", error(errno.EIO), nth=1)
        items = [("a", b"1"), ("a", b"2"), (0, b"new"), ("large", bytes(2 * MIB)), ("b", b"3")]
        assert await cache.put_many(items) == [True, True, True, False, True]
        with pytest.raises(OSError):
            await cache.flush()
        await cache.flush()
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        assert await cache.get("large") is None
        for key, data in (("a", b"2"), (0, b"new"), ("b", b"3"), (5, payload(5))):
            assert bytes(await cache.get(key)) == data
