"""The process of test_ring_fork.py: it works on a store, forks while its ring is busy, and prints what came of it.

The parent goes on until it has done its operations, every byte checked. Each child tries every call of the store, the
engine and the ring, works on a store of its own, and ends in the way that it was told. Children of one busy parent
are made at moments at which requests are in the kernel.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import json
import os
import random
import signal
import traceback
import warnings
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import uvloop

import asynckv
from asynckv.testing.tools import PAGE, aligned

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
# Not by leaving the frames of the parent's loop: that would close it, with descriptors that the two share.
ENDINGS = ("_exit", "collect", "finalize", "kill")
KEYS = 192
BLOCK = 64 << 10
MEMORY = 48 * BLOCK  # a quarter of the keys: most reads are reloads
CLIENTS = 16


def value(key: int, version: int) -> bytes:
    return random.Random(key << 32 | version).randbytes(256) * (BLOCK // 256)


class Parent:
    """Clients that each own a share of the keys, and put, read and check them."""

    def __init__(self, cache: asynckv.Cache, options: argparse.Namespace) -> None:
        self.cache = cache
        self.options = options
        self.left = options.operations
        self.wrong: list[str] = []
        self.busy: list[int] = []  # requests in the kernel at each fork
        self.children: list[int] = []
        self.random = random.Random(options.seed)

    async def run(self) -> None:
        clients = [asyncio.create_task(self._client(share)) for share in range(CLIENTS)]
        step = self.options.operations // (len(ENDINGS) + 1)
        for number, ending in enumerate(ENDINGS, 1):
            while self.left > self.options.operations - number * step or not self._in_kernel():
                await asyncio.sleep(0)
                if all(client.done() for client in clients):
                    break
            self.busy.append(self._in_kernel())
            self.children.append(fork_child(self.cache, self.options, ending))
        await asyncio.gather(*clients)

    def _in_kernel(self) -> int:
        ring = engine_of(self.cache)._ring
        return 0 if ring is None else int(ring.in_flight)

    async def _client(self, share: int) -> None:
        versions = dict.fromkeys(range(share, KEYS, CLIENTS), 0)
        for key in versions:
            await self._put(key, 0)
        while self.left > 0:
            self.left -= 1
            key = self.random.choice(list(versions))
            if self.random.random() < 0.3:
                versions[key] += 1
                await self._put(key, versions[key])
            else:
                block = await self.cache.get(key)
                if block is None:
                    self.wrong.append(f"key {key} is missing")
                elif block != value(key, versions[key]):
                    self.wrong.append(f"key {key} has other bytes")

    async def _put(self, key: int, version: int) -> None:
        if not await self.cache.put(key, value(key, version)):
            self.wrong.append(f"no room for key {key}")


def engine_of(cache: asynckv.Cache) -> Any:
    """The engine itself, below the choice that was made."""
    backend: Any = cache._tier._backend  # type: ignore[union-attr]
    return getattr(backend, "inner", backend)


def fork_child(cache: asynckv.Cache, options: argparse.Namespace, ending: str) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads, from Python 3.12 on
        child = os.fork()
    if child:
        return child
    status = 1
    try:
        found = try_everything(cache)
        # No running loop is known in a child, so that it can have one of its own.
        asyncio.run(own_store(Path(options.directory).with_name(f"child-{os.getpid()}")))
        if found:
            os.write(2, f"child that ends by {ending}: {found}\n".encode())
        elif ending == "collect":
            del cache
            gc.collect()
        elif ending == "finalize":  # exit handlers, threads, finalizers: all that a usual end runs
            ctypes.pythonapi.Py_Exit(0)
        elif ending == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        status = 1 if found else 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def try_everything(cache: asynckv.Cache) -> list[str]:
    """Calls in a child that did not raise RuntimeError."""
    engine = engine_of(cache)
    ring = engine._ring
    page = aligned(PAGE)
    calls: dict[str, Callable[[], Any]] = {
        "get": lambda: cache.get(0),
        "get_into": lambda: cache.get_into(0, bytearray(BLOCK)),
        "get_many": lambda: cache.get_many([0, 1]),
        "put": lambda: cache.put(0, b"child"),
        "put_many": lambda: cache.put_many([(0, b"child")]),
        "delete": lambda: cache.delete(0),
        "delete_many": lambda: cache.delete_many([0]),
        "clear": lambda: cache.clear(),
        "flush": lambda: cache.flush(),
        "prefetch": lambda: cache.prefetch([0]),
        "match_prefix": lambda: cache.match_prefix([0]),
        "touch": lambda: cache.touch([0]),
        "stream": lambda: cache.stream([0]),
        "request": lambda: cache.request([0]),
        "close": lambda: cache.close(),
        "ring.read": lambda: ring.read("child", 0, page, 0),
        "ring.write": lambda: ring.write("child", 1, [page], 0),
        "ring.fsync": lambda: ring.fsync("child", 1),
        "ring.nop": lambda: ring.nop("child"),
        "ring.submit": lambda: ring.submit(),
        "ring.reap": lambda: ring.reap(),
        "ring.acknowledge": lambda: ring.acknowledge(),
        "ring.take_back": lambda: ring.take_back(),
        "ring.cancel_all": lambda: ring.cancel_all(),
        "ring.register_files": lambda: ring.register_files(),
    }
    quiet = []
    for name, call in calls.items():
        try:
            answer = call()
            if hasattr(answer, "__await__"):
                drive(answer)
        except RuntimeError as error:
            if type(error) is not RuntimeError:
                quiet.append(f"{name}: {error!r}")
        except BaseException as error:
            quiet.append(f"{name}: {error!r}")
        else:
            quiet.append(f"{name} gave {answer!r}")
    if ring.close() != 0:  # gives nothing up, and does nothing to the parent's
        quiet.append("ring.close")
    return quiet


def drive(awaitable: Awaitable[Any]) -> None:
    """Take one step, as a loop would."""
    awaitable.__await__().__next__()


async def own_store(directory: Path) -> None:
    async with asynckv.open(directory, memory="1MiB", disk="16MiB", segment="1MiB", engine="io_uring") as cache:
        for key in range(32):
            assert await cache.put(key, value(key, 9))
        for key in range(32):
            block = await cache.get(key)
            assert block is not None
            assert block == value(key, 9)
        assert cache.stats().disk_hits


async def main(options: argparse.Namespace) -> dict[str, Any]:
    async with asynckv.open(
        options.directory, memory=MEMORY, disk="2GiB", engine="io_uring", io_timeout=60.0, room_timeout=60.0
    ) as cache:
        parent = Parent(cache, options)
        await parent.run()
        statuses = [await asyncio.to_thread(os.waitpid, child, 0) for child in parent.children]
        await cache.flush()
        stats = cache.stats()
        ring = engine_of(cache)._ring
        return {
            "engine": stats.engine,
            "wrong": parent.wrong,
            "busy": parent.busy,
            "children": [os.waitstatus_to_exitcode(status) for _, status in statuses],
            "disk_hits": stats.disk_hits,
            "dropped": stats.dropped_blocks,
            "faults": stats.io_errors + stats.io_timeouts + stats.corrupt_blocks,
            "stale": ring.stale,
            "lost": ring.lost,
            "missed_wakes": engine_of(cache).missed_wakes,
            "in_flight": stats.reads_in_flight + stats.writes_in_flight,
        }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="The process of test_ring_fork.py.")
    parser.add_argument("directory")
    parser.add_argument("--loop", choices=list(LOOPS), required=True)
    parser.add_argument("--operations", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    given = parser.parse_args()
    with asyncio.Runner(loop_factory=LOOPS[given.loop]) as runner:
        result = runner.run(main(given))
    print(json.dumps(result))
