"""The processes that test_kill.py kills: each opens a store, shows what it holds, works on it, and tells every step.

They are forked from one that has everything imported but no loop, no thread and no ring: a life costs a few
milliseconds to begin. It is asked over a socket (see `serve`).

Each line on standard output is one event, written before a call begins or after it returned:

    phase NAME                   opening, opened, verified, closing, closed, done
    put I V / put-end I          key number I, version V
    delete I / delete-end I
    clear / clear-end
    flush N / flush-end N
    saw I V                      what a get of key I gave right after open; V is - for a miss
    gauges DROPPED USED          blocks dropped for room in this process, bytes allocated on disk
    point                        the named point was reached; the process kills itself now
    wrong TEXT                   a promise was broken inside this process
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import random
import socket
import sys
from typing import Any

import uvloop
from kill_points import Killer

import asynckv
from asynckv.testing import values

with contextlib.suppress(ImportError):  # a system without rings
    import asynckv.backends.uring


def tell(*words: object) -> None:
    line = (" ".join(map(str, words)) + "\n").encode()
    os.write(1, line)


class Worker:
    """Some tasks that each own a share of the keys, so that every key has one order of calls."""

    def __init__(self, cache: asynckv.Cache, given: dict[str, Any]) -> None:
        self.cache = cache
        self.may_drop = given["may_drop"]
        self.clears = given["clears"]
        self.clients = given["clients"]
        self.next: list[int] = given["versions"]
        self.now: list[int | None] = [None] * len(self.next)
        self.known = [False] * len(self.next)  # changed or seen by this process
        self.random = random.Random(given["seed"])
        self.flushes = 0
        self.budget = given["operations"]
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
                await self.put(index)
            if what > 0.6:
                await self.delete(index)
            if self.random.random() < 0.1:
                await self.flush()

    async def look(self) -> None:
        """Read every key of the store as it was found."""
        order = list(range(len(self.next)))
        self.random.shuffle(order)
        for index in order:
            if self.known[index]:
                await self.get(index)
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
        shares = (range(first, len(self.next), self.clients) for first in range(self.clients))
        await asyncio.gather(*map(self._client, shares))

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
                    await self.put(index)
                elif what < 0.90:
                    await self.get(index)
                elif what < 0.94:
                    await self.delete(index)
            finally:
                self.busy -= 1
                if not self.busy:
                    self.idle.set()
            if what >= 1 - self.clears:
                await self.clear()
            elif what >= 0.94:
                await self.flush()

    async def put(self, index: int) -> None:
        version = self.next[index]
        self.next[index] += 1
        tell("put", index, version)
        if not await self.cache.put(values.key_of(index), values.block_of(index, version)):
            tell("wrong", f"no room for key {index}")
        self.now[index] = version
        tell("put-end", index)

    async def get(self, index: int) -> None:
        block = await self.cache.get(values.key_of(index))
        expected = self.now[index]
        if block is None:
            if expected is not None and not self.may_drop:
                tell("wrong", f"key {index}: a miss, version {expected} was put")
            return
        try:
            version = values.version_of(index, block)
        except values.WrongBlockError as error:
            tell("wrong", error)
            return
        if version != expected:
            tell("wrong", f"key {index}: get gave version {version}, {expected} was put")

    async def delete(self, index: int) -> None:
        tell("delete", index)
        self.now[index] = None
        await self.cache.delete(values.key_of(index))
        tell("delete-end", index)

    async def clear(self) -> None:
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

    async def flush(self) -> None:
        self.flushes += 1
        number = self.flushes
        tell("flush", number)
        try:
            await self.cache.flush()
        except OSError as error:
            # With a small disk, blocks that were put during the flush can push out what it wrote: it must say so.
            if not self.may_drop:
                tell("wrong", f"flush failed: {error}")
            return
        tell("flush-end", number)
        stats = self.cache.stats()
        tell("gauges", stats.dropped_blocks, stats.disk_used)


async def main(given: dict[str, Any]) -> None:
    def phase(name: str) -> None:
        if killer is not None:
            killer.phase = name
        tell("phase", name)

    killer = Killer(*given["point"], lambda: tell("point")) if given["point"] else None
    options = {name: given[name] for name in ("memory", "disk", "segment", "engine")}
    phase("opening")
    cache = await asynckv.open(
        given["directory"], io_timeout=60.0, room_timeout=60.0, _backend_factory=killer and killer.backend, **options
    )
    phase("opened")
    if "ASYNCKV_ENGINE" not in os.environ and cache.stats().engine != given["engine"]:
        tell("wrong", f"the engine is {cache.stats().engine}")
    worker = Worker(cache, given)
    if given["seed"] % 2:
        await worker.change_at_once()
    await worker.look()
    while cache.stats().recovering:  # noqa: ASYNC110 - nothing tells its end
        await asyncio.sleep(0.001)
    phase("verified")
    await worker.work()
    if killer is not None:  # leave one block to the close, and nothing else
        await worker.flush()
        await worker.put(0)
    stats = cache.stats()
    tell("gauges", stats.dropped_blocks, stats.disk_used)
    if stats.disk_used > stats.disk_capacity:
        tell("wrong", f"{stats.disk_used} bytes on disk, the cap is {stats.disk_capacity}")
    if stats.corrupt_blocks or stats.io_errors or stats.io_timeouts:
        tell("wrong", f"{stats.corrupt_blocks} corrupt, {stats.io_errors} errors, {stats.io_timeouts} late")
    phase("closing")
    await cache.close()
    phase("closed")
    phase("done")


def serve(channel: socket.socket) -> dict[str, Any] | None:
    """Fork a worker for each request, and tell its process id and, once it has ended, its exit status.

    A request comes with the descriptor that is to be the worker's standard output. A worker that ended keeps its
    process id until the next request, so that nobody can kill another process in its place.

    Returns
    -------
    dict or None
        In a worker its request, in this process None at the end.
    """
    while True:
        data, descriptors, _, _ = socket.recv_fds(channel, 1 << 16, 1)
        if not data:
            return None
        child = os.fork()
        if not child:
            channel.close()
            os.dup2(descriptors[0], 1)
            os.close(descriptors[0])
            given: dict[str, Any] = json.loads(data)
            return given
        os.close(descriptors[0])
        channel.send(b"%d" % child)
        ended = os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        channel.send(b"%d" % (ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status))
        channel.recv(1, socket.MSG_PEEK)
        os.waitpid(child, 0)


if __name__ == "__main__":
    gc.freeze()
    request = serve(socket.socket(fileno=int(sys.argv[1])))
    if request is not None:
        run = uvloop.run if request["uvloop"] else asyncio.run
        run(main(request))
