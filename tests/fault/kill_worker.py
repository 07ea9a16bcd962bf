"""The process that test_kill.py kills: it opens a store, shows what it holds, works on it, and tells every step.

Each line on standard output is one event, written before a call begins or after it returned:

    phase NAME                   opening, opened, verified, closing, closed, done
    put I V / put-end I          key number I, version V
    delete I / delete-end I
    clear / clear-end
    flush N / flush-end N
    saw I V                      what a get of key I gave right after open; V is - for a miss
    gauges DROPPED USED          blocks dropped for room in this process, bytes allocated on disk
    wrong TEXT                   a promise was broken inside this process
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys

import fault_history as values

import asynckv


def tell(*words: object) -> None:
    line = (" ".join(map(str, words)) + "\n").encode()
    os.write(1, line)


class Worker:
    """Some tasks that each own a share of the keys, so that every key has one order of calls."""

    def __init__(self, cache: asynckv.Cache, options: argparse.Namespace, versions: list[int]) -> None:
        self.cache = cache
        self.options = options
        self.next = versions
        self.now: list[int | None] = [None] * len(versions)
        self.known = [False] * len(versions)  # changed or seen by this process
        self.random = random.Random(options.seed)
        self.flushes = 0
        self.budget = options.operations
        self.calm = asyncio.Event()  # unset while a clear waits for the calls under way, and during it
        self.calm.set()
        self.busy = 0
        self.idle = asyncio.Event()
        self.idle.set()

    async def change_at_once(self) -> None:
        """Put, delete and flush some keys while the store still recovers, before anything was read."""
        for index in self.random.sample(range(len(self.next)), self.random.randrange(12)):
            self.known[index] = True
            what = self.random.random()
            if what < 0.8:
                await self._put(index)
            if what > 0.6:
                await self._delete(index)
            if self.random.random() < 0.1:
                await self._flush()

    async def look(self) -> None:
        """Read every key of the store as it was found."""
        order = list(range(len(self.next)))
        self.random.shuffle(order)
        for index in order:
            if self.known[index]:
                await self._get(index)
                continue
            block = await self.cache.get(values.key_of(index))
            try:
                version = None if block is None else values.version_of(index, block)
            except values.WrongBlockError as error:
                tell("wrong", error)
                continue
            self.now[index] = version
            tell("saw", index, "-" if version is None else version)

    async def work(self) -> None:
        clients = self.options.clients
        await asyncio.gather(*(self._client(range(share, len(self.next), clients)) for share in range(clients)))

    async def _client(self, share: range) -> None:
        draw = self.random
        while self.budget > 0:
            self.budget -= 1
            while not self.calm.is_set():  # a waiter may wake up after the next clear has begun
                await self.calm.wait()
            self.busy += 1
            self.idle.clear()
            try:
                what = draw.random()
                index = draw.choice(share)
                if what < 0.40:
                    await self._put(index)
                elif what < 0.90:
                    await self._get(index)
                elif what < 0.94:
                    await self._delete(index)
            finally:
                self.busy -= 1
                if not self.busy:
                    self.idle.set()
            if what >= 0.99:
                await self._clear()
            elif what >= 0.94:
                await self._flush()

    async def _put(self, index: int) -> None:
        version = self.next[index]
        self.next[index] += 1
        tell("put", index, version)
        if not await self.cache.put(values.key_of(index), values.block_of(index, version)):
            tell("wrong", f"no room for key {index}")
        self.now[index] = version
        tell("put-end", index)

    async def _get(self, index: int) -> None:
        block = await self.cache.get(values.key_of(index))
        expected = self.now[index]
        if block is None:
            if expected is not None and not self.options.may_drop:
                tell("wrong", f"key {index}: a miss, version {expected} was put")
            return
        try:
            version = values.version_of(index, block)
        except values.WrongBlockError as error:
            tell("wrong", error)
            return
        if version != expected:
            tell("wrong", f"key {index}: get gave version {version}, {expected} was put")

    async def _delete(self, index: int) -> None:
        tell("delete", index)
        self.now[index] = None
        await self.cache.delete(values.key_of(index))
        tell("delete-end", index)

    async def _clear(self) -> None:
        if not self.calm.is_set():
            return
        self.calm.clear()
        try:
            await self.idle.wait()
            tell("clear")
            self.now = [None] * len(self.now)
            await self.cache.clear()
            tell("clear-end")
        finally:
            self.calm.set()

    async def _flush(self) -> None:
        self.flushes += 1
        number = self.flushes
        tell("flush", number)
        try:
            await self.cache.flush()
        except OSError as error:
            # With a small disk, blocks that were put during the flush can push out what it wrote: it must say so.
            if not self.options.may_drop:
                tell("wrong", f"flush failed: {error}")
            return
        tell("flush-end", number)
        stats = self.cache.stats()
        tell("gauges", stats.dropped_blocks, stats.disk_used)


async def main(options: argparse.Namespace, versions: list[int]) -> None:
    tell("phase opening")
    cache = await asynckv.open(
        options.directory, memory=options.memory, disk=options.disk, segment=options.segment, io_timeout=60.0,
        room_timeout=60.0,
    )  # fmt: skip
    tell("phase opened")
    worker = Worker(cache, options, versions)
    if options.seed % 2:
        await worker.change_at_once()
    await worker.look()
    tell("phase verified")
    await worker.work()
    stats = cache.stats()
    tell("gauges", stats.dropped_blocks, stats.disk_used)
    if stats.disk_used > stats.disk_capacity:
        tell("wrong", f"{stats.disk_used} bytes on disk, the cap is {stats.disk_capacity}")
    if stats.corrupt_blocks or stats.io_errors or stats.io_timeouts:
        tell("wrong", f"{stats.corrupt_blocks} corrupt, {stats.io_errors} errors, {stats.io_timeouts} late")
    tell("phase closing")
    await cache.close()
    tell("phase closed")
    tell("phase done")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="The process that test_kill.py kills.")
    parser.add_argument("directory")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--operations", type=int, required=True)
    parser.add_argument("--memory", type=int, required=True)
    parser.add_argument("--disk", type=int, required=True)
    parser.add_argument("--segment", type=int, required=True)
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--may-drop", action="store_true")
    parser.add_argument("--uvloop", action="store_true")
    given = parser.parse_args()
    start = main(given, json.load(sys.stdin))
    if given.uvloop:
        import uvloop

        uvloop.run(start)
    else:
        asyncio.run(start)
