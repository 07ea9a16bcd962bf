"""A disk tier with a table and a minimal writer of its own, for tests that look below the cache."""

from __future__ import annotations

import asyncio
import errno
import os
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from asynckv._core import Table
from asynckv.backends import create_backend
from asynckv.backends.base import Wrapper
from asynckv.config import Config
from asynckv.tiers.disk import DiskTier
from asynckv.tiers.reader import Promise

KIB = 1 << 10
MIB = 1 << 20
SIZES = (0, 1, 60, 1000, 4096, 5000, 32767, 32768, 40_000)


def value_of(key: object, version: int = 0, size: int = 1000) -> bytes:
    """Bytes that depend on key, version and size."""
    return random.Random(f"{key!r}/{version}/{size}").randbytes(size)


class Disk:
    """One opening of a tier; `async with Disk(path) as disk`."""

    def __init__(self, path: Path, *, memory: int = 4 * MIB, **options: Any) -> None:
        options = {"disk": 8 * MIB, "segment": 256 * KIB, "force": True, **options}
        self.config = Config(directory=str(path), memory=memory, **options)
        self.table = Table(memory)
        self.tier = DiskTier(self.config, self.table)
        self.snapshot = True
        self.most_used = 0

    async def __aenter__(self) -> Disk:
        await self.open()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def open(self, *, recover: bool = True) -> None:
        try:
            await self.tier.open()
            self.table.max_spill = self.tier.max_block
            self.table.backed = True
            self.recovered = self.tier.recovering
            if self.tier.recovering and recover:
                await self.recover()
        except BaseException:
            await self.tier.close(snapshot=False)
            self.table.close()
            raise

    async def recover(self, progress: Callable[[], None] = lambda: None) -> None:
        self.table.recovering = True
        try:
            await self.tier.recover(progress)
        finally:
            self.table.recovering = False

    async def close(self) -> None:
        await self.tier.close(snapshot=self.snapshot)
        self.table.check()
        self.table.close()

    async def write(self, tombstones: Iterable[tuple[int, bytes]] = (), *, clear: bool = False) -> None:
        """Write all that is dirty or owed; not synced."""
        owed = [*tombstones, *self.table.take_owed()]
        while self.table.dirty_blocks or owed or clear:
            await self.tier.prepare(max(self.table.dirty_bytes, 1))
            batch = self.tier.compose(self.table.take_dirty(4 * MIB, 4096), owed, clear)
            owed = list(batch.rest_tombstones) + self.table.take_owed()
            clear = clear and not batch.clear
            for spill in reversed(batch.rest_spills):
                self.table.finish_spill(spill, False)
            kept = batch.spills
            try:
                places = await self.tier.submit(batch)
            except OSError:
                for spill in reversed(kept):
                    self.table.finish_spill(spill, False)
                raise
            for spill, (slot, offset, checksum) in zip(kept, places, strict=True):
                self.table.finish_spill(spill, True, slot, offset, checksum)
            self.most_used = max(self.most_used, self.tier.disk_used)

    async def flush(self) -> None:
        await self.write()
        await self.tier.sync()

    async def put(self, key: Any, value: bytes) -> None:
        draft = self.table.draft(value)
        while not self.table.put(key, draft):
            await self.write()

    async def delete(self, key: Any) -> None:
        """Remove durably."""
        kind, raw = wire_key(key)
        if self.table.remove(key) == 2:
            await self.write([(kind, raw)])
            await self.tier.sync()

    async def clear(self) -> None:
        self.table.clear()
        self.table.take_owed()
        await self.write(clear=True)
        await self.tier.sync()

    async def get(self, key: Any) -> bytes | None:
        """From memory, else from disk; a damaged block is dropped."""
        if self.table.state(key) == 1:
            return bytes(self.table.get(key))
        place = self.table.where(key)
        if place is None:
            return None
        room = self.table.room(place[2])
        while True:
            step = room.step()
            if step == 1:
                break
            if step < 0:
                await self.write()
        load = self.table.begin_load(key, room)
        promise = Promise(asyncio.get_running_loop(), None)
        self.tier.read(load, promise)
        well = await promise.future
        if not self.table.finish_load(load, well):
            if not well:
                self.table.drop(load)
            return None
        return bytes(self.table.get(key))

    async def get_all(self, keys: Iterable[Any]) -> dict[Any, bytes]:
        found = {}
        for key in keys:
            value = await self.get(key)
            if value is not None:
                found[key] = value
        return found


def wire_key(key: Any) -> tuple[int, bytes]:
    if isinstance(key, int):
        return 0, key.to_bytes(8, "little", signed=True)
    return (2, key.encode()) if isinstance(key, str) else (1, key)


def segments_of(path: Path) -> list[Path]:
    return sorted(path.glob("*.seg"))


def allocated(path: Path) -> int:
    """What the file system says is allocated: the directory and its files."""
    total = path.stat().st_blocks * 512
    for name in os.listdir(path):
        total += (path / name).stat().st_blocks * 512
    return total


def crash_copy(path: Path, target: Path) -> Path:
    """The directory as a process that is killed now would leave it."""
    target.mkdir(mode=0o700)
    for name in os.listdir(path):
        (target / name).write_bytes((path / name).read_bytes())
    return target


async def fill(disk: Disk, keys: Iterable[Any], version: int = 0, size: int = 1000) -> None:
    """Put a version of each key and flush."""
    for key in keys:
        await disk.put(key, value_of(key, version, size))
    await disk.flush()


async def write_over(disk: Disk) -> None:
    """Five blocks, flushed; then a newer version of each, written and not synced."""
    await fill(disk, range(5))
    for key in range(5):
        await disk.put(key, value_of(key, 1, 5000))
    await disk.write()


async def killed(path: Path, target: Path, work: Callable[[Disk], Any], **options: Any) -> Path:
    """Run a workload and copy the directory before it is closed."""
    async with Disk(path, **options) as disk:
        await work(disk)
        return crash_copy(path, target)


def damage(segment: Path, offset: int, length: int = 1) -> None:
    """Change bytes of a file."""
    data = bytearray(segment.read_bytes())
    for at in range(offset, offset + length):
        data[at] ^= 0x5A
    segment.write_bytes(data)


class Failing(Wrapper):
    """An engine whose calls of one kind fail while `failing` is set."""

    def __init__(self, inner: Any, kind: str, number: int = errno.EIO) -> None:
        super().__init__(inner)
        self.kind, self.number, self.failing = kind, number, False

    def _error(self):
        future = asyncio.get_running_loop().create_future()
        future.set_exception(OSError(self.number, os.strerror(self.number)))
        return future

    def write(self, file, offset, prepare, *, timeout=None, released=None):
        if self.failing and self.kind == "write":
            if released is not None:
                released()
            return self._error()
        return self.inner.write(file, offset, prepare, timeout=timeout, released=released)

    def sync(self, file, *, timeout=None):
        return self._error() if self.failing and self.kind == "sync" else self.inner.sync(file, timeout=timeout)

    def allocate(self, file, size):
        return self._error() if self.failing and self.kind == "allocate" else self.inner.allocate(file, size)

    def open(self, name, **options):
        if self.failing and self.kind == "allocate" and options.get("create"):
            return self._error()
        return self.inner.open(name, **options)

    def rename(self, old, new):
        return self._error() if self.failing and self.kind == "rename" else self.inner.rename(old, new)

    def sync_directory(self):
        return self._error() if self.failing and self.kind == "directory" else self.inner.sync_directory()


def failing(kind: str):
    made = []

    def factory(*args, **options):
        made.append(Failing(create_backend(*args, **options), kind))
        return made[-1]

    return factory, made
