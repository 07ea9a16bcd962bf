"""What blocks could be kept in instead, each behind the same few calls, used as well as it can be from an event loop.

A call that blocks runs in a worker thread, several blocks at a time, so that none of them is slower, or later with the
loop's other work, than its users would have to put up with.
"""

from __future__ import annotations

import asyncio
import importlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import aiofiles
import numpy as np
import numpy.typing as npt

import asynckv

__all__ = ["CONTENDERS", "Contender"]

Block = npt.NDArray[np.uint8]
Take = Callable[[int, Block], object]

TASKS = 64
WORKERS = 8
CALLS = 2  # of get_many at a time
CHUNK_BYTES = 8 << 20  # handed to a worker thread, or put, at a time
CHUNK_BLOCKS = 512


class Contender(ABC):
    """A place for blocks in a directory.

    Parameters
    ----------
    directory
        Where; it exists.
    size, count
        Bytes of a block, and how many there are.
    pool
        Bytes of memory for one that manages its own; 0: all that the blocks take, as the page cache gives the others.

    Attributes
    ----------
    label, durable
        What it is, and what its `sync` promises.
    """

    label: ClassVar[str]
    durable: ClassVar[str]

    def __init__(self, directory: Path, size: int, count: int, pool: int = 0) -> None:
        self.directory = directory
        self.size = size
        self.count = count
        self.pool = pool

    @abstractmethod
    async def open(self) -> None:
        """Begin, on what an earlier `close` left."""

    @abstractmethod
    async def put_all(self, keys: Sequence[int], make: Callable[[int], Block]) -> None:
        """Store blocks; `make` returns one block's bytes, good until it made 512 more."""

    @abstractmethod
    async def sync(self) -> None:
        """Make all of it durable."""

    @abstractmethod
    async def read(self, keys: Sequence[int], take: Take) -> None:
        """Read blocks; `take` is given each, in any order, and may keep it."""

    @abstractmethod
    async def close(self) -> None:
        """Let go of everything but the directory."""

    def pieces(self, keys: Sequence[int]) -> Iterator[Sequence[int]]:
        """The keys in pieces of some megabytes."""
        step = max(1, min(CHUNK_BYTES // self.size, CHUNK_BLOCKS))
        for start in range(0, len(keys), step):
            yield keys[start : start + step]


class Asynckv(Contender):
    """This store."""

    label = "asynckv"
    durable = "flush(): fdatasync of each segment; every block carries a checksum, checked by each read"

    async def open(self) -> None:
        room = self.count * (self.size + 4096)
        options: dict[str, Any] = {"memory": self.pool or 2 * room, "disk": max(2 * room, 64 << 20)}
        self._cache = await asynckv.open(self.directory, **options, force=True)

    async def put_all(self, keys: Sequence[int], make: Callable[[int], Block]) -> None:
        for piece in self.pieces(keys):
            await self._cache.put_many((key, make(key)) for key in piece)

    async def sync(self) -> None:
        await self._cache.flush()

    async def read(self, keys: Sequence[int], take: Take) -> None:
        pieces = self.pieces(keys)

        async def go_on() -> None:
            for piece in pieces:
                for key, block in zip(piece, await self._cache.get_many(piece), strict=True):
                    take(key, block)

        await asyncio.gather(*(go_on() for _ in range(CALLS)))

    async def close(self) -> None:
        await self._cache.close()


class _Blocking(Contender):
    """One whose calls block."""

    async def open(self) -> None:
        self._workers = ThreadPoolExecutor(WORKERS)
        await self._run(self.open_now)

    async def put_all(self, keys: Sequence[int], make: Callable[[int], Block]) -> None:
        for piece in self.pieces(keys):
            await self._run(self.put_now, piece, make)

    async def read(self, keys: Sequence[int], take: Take) -> None:
        pieces = self.pieces(keys)

        async def go_on() -> None:
            for piece in pieces:
                for key, block in zip(piece, await self._run(self.read_now, piece), strict=True):
                    take(key, block)

        await asyncio.gather(*(go_on() for _ in range(WORKERS)))

    async def sync(self) -> None:
        await self._run(self.sync_now)

    async def close(self) -> None:
        await self._run(self.close_now)
        self._workers.shutdown()

    async def _run(self, job: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._workers, job, *arguments)

    def open_now(self) -> None: ...

    @abstractmethod
    def put_now(self, keys: Sequence[int], make: Callable[[int], Block]) -> None: ...

    @abstractmethod
    def read_now(self, keys: Sequence[int]) -> list[Block]: ...

    def sync_now(self) -> None:
        os.sync()

    def close_now(self) -> None: ...


class Executor(_Blocking):
    """A file for each block, by plain calls in worker threads."""

    label = "files in run_in_executor"
    durable = "sync(): all file systems, once; no checksum"

    def _path(self, key: int) -> str:
        return f"{self.directory}/{key:08d}"

    def put_now(self, keys: Sequence[int], make: Callable[[int], Block]) -> None:
        for key in keys:
            with open(self._path(key), "wb", buffering=0) as file:
                file.write(make(key).data)

    def read_now(self, keys: Sequence[int]) -> list[Block]:
        found = []
        for key in keys:
            block = np.empty(self.size, np.uint8)
            with open(self._path(key), "rb", buffering=0) as file:
                file.readinto(block.data)
            found.append(block)
        return found


class Aiofiles(Contender):
    """A file for each block, by aiofiles in many tasks."""

    label = "aiofiles, one file per block"
    durable = "sync(): all file systems, once; no checksum"

    async def open(self) -> None: ...

    async def put_all(self, keys: Sequence[int], make: Callable[[int], Block]) -> None:
        todo = iter(keys)

        async def go_on() -> None:
            for key in todo:
                data = make(key).tobytes()
                async with aiofiles.open(self.directory / f"{key:08d}", "wb") as file:
                    await file.write(data)

        await asyncio.gather(*(go_on() for _ in range(TASKS)))

    async def sync(self) -> None:
        await asyncio.to_thread(os.sync)

    async def read(self, keys: Sequence[int], take: Take) -> None:
        todo = iter(keys)

        async def go_on() -> None:
            for key in todo:
                async with aiofiles.open(self.directory / f"{key:08d}", "rb") as file:
                    take(key, np.frombuffer(await file.read(), np.uint8))

        await asyncio.gather(*(go_on() for _ in range(TASKS)))

    async def close(self) -> None: ...


class Diskcache(_Blocking):
    """PyPI's diskcache: SQLite, and files for values of 32 KiB or more."""

    label = "diskcache"
    durable = "SQLite with synchronous=NORMAL, then sync(); no checksum"

    def open_now(self) -> None:
        diskcache = importlib.import_module("diskcache")
        self._cache = diskcache.Cache(str(self.directory), eviction_policy="none", size_limit=1 << 50)

    def put_now(self, keys: Sequence[int], make: Callable[[int], Block]) -> None:
        with self._cache.transact():
            for key in keys:
                self._cache.set(key, make(key).tobytes())

    def read_now(self, keys: Sequence[int]) -> list[Block]:
        return [np.frombuffer(self._cache.get(key), np.uint8) for key in keys]

    def close_now(self) -> None:
        self._cache.close()


class Lmdb(_Blocking):
    """PyPI's lmdb: a B+ tree in a mapped file."""

    label = "lmdb"
    durable = "env.sync() at the end, none before; no checksum"

    def open_now(self) -> None:
        lmdb = importlib.import_module("lmdb")
        room = 2 * self.count * (self.size + 8192) + (64 << 20)
        self._env = lmdb.open(str(self.directory), map_size=room, sync=False, readahead=False, max_readers=64)

    def put_now(self, keys: Sequence[int], make: Callable[[int], Block]) -> None:
        with self._env.begin(write=True) as transaction:
            for key in keys:
                transaction.put(key.to_bytes(8, "big"), make(key).data)

    def read_now(self, keys: Sequence[int]) -> list[Block]:
        with self._env.begin() as transaction:
            return [np.frombuffer(transaction.get(key.to_bytes(8, "big")), np.uint8) for key in keys]

    def sync_now(self) -> None:
        self._env.sync(True)

    def close_now(self) -> None:
        self._env.close()


class Rocksdict(_Blocking):
    """PyPI's rocksdict: RocksDB, a log-structured merge tree."""

    label = "rocksdict"
    durable = "write-ahead log, flush(), then sync(); checksums of its own"

    def open_now(self) -> None:
        rocksdict = importlib.import_module("rocksdict")
        self._db = rocksdict.Rdict(str(self.directory / "db"), rocksdict.Options(raw_mode=True))

    def put_now(self, keys: Sequence[int], make: Callable[[int], Block]) -> None:
        for key in keys:
            self._db[key.to_bytes(8, "big")] = make(key).tobytes()

    def read_now(self, keys: Sequence[int]) -> list[Block]:
        return [np.frombuffer(self._db[key.to_bytes(8, "big")], np.uint8) for key in keys]

    def sync_now(self) -> None:
        self._db.flush()
        os.sync()

    def close_now(self) -> None:
        self._db.close()


CONTENDERS: dict[str, type[Contender]] = {
    "asynckv": Asynckv,
    "aiofiles": Aiofiles,
    "executor": Executor,
    "diskcache": Diskcache,
    "lmdb": Lmdb,
    "rocksdict": Rocksdict,
}
