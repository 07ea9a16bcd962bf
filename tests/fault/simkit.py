"""Stores in memory and simulated time: an opening costs two milliseconds, so all bytes and moments can be tried."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

import asynckv
from asynckv.backends.files import Files
from asynckv.testing import (
    MemoryDisk,
    MemoryFiles,
    RecordingBackend,
    SimulatedBackend,
    SimulatedClock,
    SimulatedLoop,
)
from asynckv.testing.values import key_of, version_of

T = TypeVar("T")

SECONDS_MAX = 5.0  # simulated, for any one call


class Simulation:
    """Runs coroutines, each in a loop of its own, on stores whose files are in memory.

    Parameters
    ----------
    directory
        Holds the lock, and nothing else.
    sizes
        Of the blocks.
    options
        Of every opening.
    """

    def __init__(self, directory: Path, sizes: tuple[int, ...], **options: Any) -> None:
        self.directory = directory
        self.sizes = sizes
        self.options = options
        self.recording: RecordingBackend

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run in a new simulated loop."""
        loop = SimulatedLoop()
        try:
            return loop.run_until_complete(main)
        finally:
            loop.close()

    async def open(
        self, disk: MemoryDisk, *, record: bool = False, files: Files | None = None, **options: Any
    ) -> asynckv.Cache:
        """Open a store whose files are those of a disk; with `record`, what is done to them is kept."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimulatedLoop)
        clock = SimulatedClock(loop)

        def factory(engine: str, **given: Any) -> Any:
            backend = SimulatedBackend(files=files or MemoryFiles(disk), seconds=lambda kind: 1e-4, **given)
            if not record:
                return backend
            self.recording = RecordingBackend(backend, disk.content())
            return self.recording

        async with asyncio.timeout(SECONDS_MAX):
            return await asynckv.open(
                self.directory,
                _clock=clock,
                _random=random.Random(7).randbytes,
                _backend_factory=factory,
                **{"force": True, **self.options, **options},  # no look at the machine's memory
            )

    async def values(self, cache: asynckv.Cache, keys: range) -> dict[int, int | None]:
        """The version that each key has now. Raises when a block is none that was ever put."""
        found: dict[int, int | None] = {}
        for index in keys:
            async with asyncio.timeout(SECONDS_MAX):
                block = await cache.get(key_of(index))
            found[index] = None if block is None else version_of(index, block, self.sizes)
        return found

    def look(self, files: Mapping[str, bytes | bytearray], keys: range, **options: Any) -> dict[int, int | None]:
        """Open a store of these files and read every key."""

        async def look() -> dict[int, int | None]:
            cache = await self.open(MemoryDisk(files), **options)
            try:
                return await self.values(cache, keys)
            finally:
                await cache.close()

        return self.run(look())
