"""What is given in the wrong form is refused with words that help, in every call of its kind, and changes nothing."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import asynckv

SMALL = {"memory": "1MiB", "disk": "16MiB", "segment": "256KiB", "room_timeout": 0.3}
ARRAY = np.zeros(4)

MANY: dict[str, Callable[[Any, Any], Any]] = {
    "get_many": lambda cache, keys: cache.get_many(keys),
    "get_many_into": lambda cache, keys: cache.get_many_into(keys, [bytearray(8)] * 2),
    "delete_many": lambda cache, keys: cache.delete_many(keys),
    "prefetch": lambda cache, keys: cache.prefetch(keys),
    "match_prefix": lambda cache, keys: cache.match_prefix(keys),
    "touch": lambda cache, keys: cache.touch(keys),
    "stream": lambda cache, keys: cache.stream(keys),
    "request": lambda cache, keys: cache.request(keys),
}


async def settle(result: Any) -> Any:
    return await result if hasattr(result, "__await__") else result


async def test_one_key_where_several_belong(tmp_path):
    async with asynckv.open(tmp_path / "store", **SMALL) as cache:
        for each in ("a", "b", 97, 98):
            await cache.put(each, b"letter")
        for call in MANY:
            for keys in ("ab", b"ab", bytearray(b"ab"), 5):
                words = f"{call} takes an iterable of keys, not one {type(keys).__name__};"
                with pytest.raises(TypeError, match=words):
                    await settle(MANY[call](cache, keys))
        assert len(cache) == 4


def test_one_key_where_several_belong_in_threads(tmp_path):
    with asynckv.BlockingCache(tmp_path / "store", **SMALL) as cache:
        cache.put_many({"a": b"letter", "b": b"letter"})
        for call in MANY:
            with pytest.raises(TypeError, match=f"{call} takes an iterable of keys, not one str"):
                MANY[call](cache, "ab")
        assert cache.get_many(iter(["a", "b"])) == [b"letter"] * 2


@pytest.mark.parametrize(
    ("items", "words"),
    [
        ([1, 2], "item 0 is int"),
        ([("a", b"1"), "bc"], "item 1 is str"),
        ([("a", b"1", 3)], "item 0 is tuple"),
        ("ab", "a mapping, not str"),
        (7, "a mapping, not int"),
    ],
    ids=str,
)
async def test_put_many_of_what_is_no_pairs(tmp_path, items, words):
    async with asynckv.open(tmp_path / "store", **SMALL) as cache:
        with pytest.raises(TypeError, match=f"put_many takes \\(key, block\\) pairs .*{words}"):
            await cache.put_many(items)
        assert len(cache) == 0, "nothing of it was stored"
    with asynckv.BlockingCache(tmp_path / "store", **SMALL) as blocking, pytest.raises(TypeError, match=words):
        blocking.put_many(items)


async def test_buffers_that_will_not_do(tmp_path):
    block = asynckv.CacheBlock(1, ARRAY, ARRAY)
    good = bytearray(64)
    async with asynckv.open(tmp_path / "store", **SMALL) as cache:
        await cache.put_many([(1, block), (2, block)])
        for wrong, kind, words in (
            (block, TypeError, "is a CacheBlock: pass one writable buffer"),
            (bytes(64), ValueError, "is read-only"),
            (np.zeros((8, 8))[:, ::2], ValueError, "is not C-contiguous"),
            (bytearray(63), ValueError, "has 63 bytes, the block 64"),
            (17, TypeError, "is no writable buffer but int"),
            (np.array([None] * 8), TypeError, "holds Python objects, not bytes"),
        ):
            with pytest.raises(kind, match=f"^buffer 1 {words}"):
                await cache.get_many_into([1, 2], [good, wrong])
            with pytest.raises(kind, match=f"^the buffer {words}"):
                await cache.get_into(1, wrong)
        assert not any(good), "nothing is written unless all of it is right"


@pytest.mark.parametrize(
    "arguments",
    [
        {"key": ARRAY, "value": ARRAY},
        {"layer_id": "3", "key": ARRAY, "value": ARRAY},
    ],
    ids=["missing", "text"],
)
def test_a_block_without_its_layer(arguments):
    with pytest.raises(TypeError, match=r"layer_id must be an int, not (NoneType|str)"):
        asynckv.CacheBlock(**arguments)
    with pytest.raises(TypeError, match="layer_id must be an int, not ndarray"):
        asynckv.CacheBlock(ARRAY, ARRAY)
    with pytest.raises(TypeError, match="value must be a numpy array, not NoneType"):
        asynckv.CacheBlock(1, ARRAY)


class Named(ctypes.Structure):
    _fields_ = (("Offset", ctypes.c_int), ("Other", ctypes.c_double))


class Holding(ctypes.Structure):
    _fields_ = (("plain", ctypes.py_object),)


async def test_names_of_fields_are_no_objects(tmp_path):
    async with asynckv.open(tmp_path / "store", **SMALL) as cache:
        await cache.put(1, Named(3, 4.0))
        assert bytes(await cache.get(1)) == bytes(Named(3, 4.0))
        with pytest.raises(TypeError, match="buffers of Python objects"):
            await cache.put(2, Holding(None))
        assert await cache.get_into(1, Named()) == ctypes.sizeof(Named)


async def test_a_key_that_changes_while_its_put_waits_is_the_one_of_the_call(tmp_path):
    async with asynckv.open(tmp_path / "store", **SMALL | {"memory": "64KiB", "room_timeout": 5}) as cache:
        await cache.put(1, bytes(60_000))
        view = await cache.get(1)
        key = np.array(100)
        waiting = asyncio.create_task(cache.put(key, bytes(30_000)))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        key[()] = 200
        del view
        assert await waiting
        assert 100 in cache
        assert 200 not in cache


async def test_a_block_that_can_never_fit(tmp_path):
    async with asynckv.open(tmp_path / "store", **SMALL) as cache:
        for operation in ("put", "reserve"):
            with pytest.raises(asynckv.BlockTooLargeError) as caught:
                if operation == "put":
                    await cache.put("key", bytes(2 << 20))
                else:
                    async with cache.reserve("key", (2 << 20,), np.uint8):
                        pass
            assert str(caught.value) == f"a block of {2 << 20} bytes cannot fit a pool of {1 << 20} bytes"
            assert (caught.value.key, caught.value.operation) == ("key", operation)


async def test_an_array_that_can_never_be(tmp_path):
    async with asynckv.open(tmp_path / "store", **SMALL) as cache:
        for shape, dtype, words in (
            ((2**70,), "u1", "a dimension is out of range"),
            ((2**32, 2**32), "u1", "more bytes than any machine can address"),
            ((2**62,), "f8", "more bytes than any machine can address"),
            ((2**62, 0, 2), "u1", "more bytes than any machine can address"),
        ):
            with pytest.raises(ValueError, match=words):
                cache.reserve("key", shape, dtype)
            with pytest.raises(ValueError, match=words):
                cache.reserve_block("key", 0, 4, shape, dtype)


@pytest.mark.parametrize("tier", ["memory", "disk"])
@pytest.mark.parametrize(
    ("timeout", "kind", "words"),
    [
        ("5", TypeError, "timeout is a number of seconds, not str"),
        (True, TypeError, "timeout is a number of seconds, not bool"),
        (float("nan"), ValueError, "timeout=nan: seconds have to be zero or more"),
        (-1, ValueError, "timeout=-1: seconds have to be zero or more"),
        (10**400, ValueError, "timeout is beyond every number of seconds"),
    ],
    ids=repr,
)
async def test_a_time_that_is_none(tmp_path, tier, timeout, kind, words):
    async with asynckv.open(tmp_path / "store", **SMALL) as cache:
        for key in range(16):
            await cache.put(key, bytes(100_000))
        await cache.flush()
        key = next(key for key in range(16) if cache.tier(key) == tier)
        with pytest.raises(kind, match=words):
            await cache.get(key, timeout=timeout)
        assert cache.stats().hit_ratio == 0.0, "nothing was asked"
        assert bytes(await cache.get(key, timeout=float("inf"))) == bytes(100_000)


# -- opening ---------------------------------------------------------------------------------------------------------


def damaged(path) -> None:
    (path / "superblock").write_bytes(bytes(4096))


def unsafe(path) -> None:
    path.chmod(0o770)


def strange(path) -> None:
    (path / "other").write_bytes(bytes(20 << 20))


@pytest.mark.parametrize("spoil", [damaged, unsafe, strange])
async def test_errors_of_open_name_the_directory(tmp_path, spoil):
    path = tmp_path / "store"
    async with asynckv.open(path, **SMALL) as cache:
        await cache.put(1, b"x")
    spoil(path)
    with pytest.raises(asynckv.AsyncKVError, match=str(path)) as caught:
        await asynckv.open(path, **SMALL, recover="strict")
    assert str(path) in repr(caught.value)
    path.chmod(0o700)


@pytest.mark.parametrize("where", ["file/store", "gone"])
async def test_system_errors_of_open_name_the_directory(tmp_path, where):
    (tmp_path / "file").touch()
    (tmp_path / "gone").symlink_to("nowhere")
    with pytest.raises(asynckv.AsyncKVError, match=str(tmp_path / where)) as caught:
        await asynckv.open(tmp_path / where, **SMALL)
    assert isinstance(caught.value, OSError)
    assert str(tmp_path / where) in (caught.value.strerror or "")


async def test_no_thread_can_be_started(tmp_path, monkeypatch):
    """As with RLIMIT_NPROC, which does not bind root."""
    monkeypatch.delenv("ASYNCKV_ENGINE", raising=False)
    real = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name.startswith("asynckv-") and allowed[0] <= 0:
            raise RuntimeError("can't start new thread")
        allowed[0] -= 1
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    for number in (0, 1, 3):
        allowed = [number]
        with pytest.raises(asynckv.DiskError, match=r"no thread can be started.*ulimit -u") as caught:
            await asynckv.open(tmp_path / "store", engine="threads", **SMALL)
        assert str(tmp_path) in str(caught.value)
    allowed = [1000]
    async with asynckv.open(tmp_path / "store", engine="threads", **SMALL) as cache:
        assert await cache.put(1, b"x")


async def test_a_disk_larger_than_the_file_system(tmp_path, caplog):
    room = os.statvfs(tmp_path).f_blocks * os.statvfs(tmp_path).f_frsize
    for disk, lines in ((2 * room, 1), (SMALL["disk"], 0)):
        caplog.clear()
        async with asynckv.open(tmp_path / "store", **SMALL | {"disk": disk}):
            pass
        found = [each.getMessage() for each in caplog.records if "file system" in each.getMessage()]
        assert len(found) == lines
        assert all(str(tmp_path / "store") in each and "disk=" in each for each in found)


async def test_the_engine_of_the_environment_is_logged(tmp_path, caplog, monkeypatch):
    monkeypatch.setenv("ASYNCKV_ENGINE", "threads")
    for engine, lines in (("aiofiles", 1), ("auto", 0), ("threads", 0)):
        caplog.clear()
        with caplog.at_level(logging.INFO, "asynckv"):
            async with asynckv.open(tmp_path / "store", engine=engine, **SMALL) as cache:
                assert cache.stats().engine == "threads"
        found = [each.getMessage() for each in caplog.records if "ASYNCKV_ENGINE" in each.getMessage()]
        assert found == ["asynckv: ASYNCKV_ENGINE=threads overrides engine='aiofiles'"] * lines


@pytest.mark.parametrize("memory", [1 << 46, 1 << 47, "128TiB", (1 << 63) - 1])
def test_more_memory_than_there_are_addresses(tmp_path, memory):
    with pytest.raises(ValueError, match="memory="):
        asynckv.open(tmp_path / "store", memory=memory, force=True)
    assert not (tmp_path / "store").exists()


def test_a_pool_that_cannot_be_mapped(tmp_path):
    code = (
        "import asyncio, asynckv, resource\n"
        "async def main():\n"
        "    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))\n"
        "    await asynckv.open('store', memory=16 << 30, force=True)\n"
        "try:\n"
        "    asyncio.run(main())\n"
        "except MemoryError as error:\n"
        "    print(error)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(asynckv.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=tmp_path, env=environment
    )
    assert (done.stdout, done.stderr) == (f"cannot map a memory pool of {16 << 30} bytes\n", "")
