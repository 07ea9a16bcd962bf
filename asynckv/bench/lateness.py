"""How late a loop's other work gets: a 1 ms heartbeat while blocks are put and read, beside a control process.

A beat is late by the time since it was due, less the time that its thread was runnable and did not run (the run delay
of /proc/self/task/TID/schedstat), which is the machine's doing. The control beats in another process at the same time,
in a loop of the same kind that does nothing else.

``python -m asynckv.bench.lateness`` is one such process.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from asynckv.bench.contenders import CONTENDERS, Block
from asynckv.bench.figures import percentile
from asynckv.bench.payloads import Payloads
from asynckv.commands.output import run

__all__ = ["Companion", "Heartbeat", "control", "late"]

BEAT_SECONDS = 0.001
POOL_BYTES = 256 << 20


class Heartbeat:
    """Beats in the running loop for as long as its ``async with`` lasts; may be used again.

    Attributes
    ----------
    late
        Seconds that each beat came too late.
    delay
        Seconds of run delay taken off.
    """

    def __init__(self) -> None:
        self.late: list[float] = []
        self.delay = 0.0
        self._fd = -1
        self._task: asyncio.Task[None] | None = None

    def _run_delay(self) -> float:
        return int(os.pread(self._fd, 64, 0).split()[1]) * 1e-9

    async def _beat(self) -> None:
        last, last_delay = time.perf_counter(), self._run_delay()
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            now, delay = time.perf_counter(), self._run_delay()
            self.late.append(max(0.0, now - last - BEAT_SECONDS - (delay - last_delay)))
            self.delay += delay - last_delay
            last, last_delay = now, delay

    async def __aenter__(self) -> Self:
        self._fd = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        self._task = asyncio.create_task(self._beat(), name="heartbeat")
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait([self._task])
        os.close(self._fd)

    def figures(self) -> dict[str, float]:
        """Milliseconds, and the number of beats."""
        return {
            "beats": len(self.late),
            "p50_ms": percentile(self.late, 50) * 1e3,
            "p99_ms": percentile(self.late, 99) * 1e3,
            "p999_ms": percentile(self.late, 99.9) * 1e3,
            "max_ms": max(self.late, default=0.0) * 1e3,
            "run_delay_s": self.delay,
        }


async def _alone() -> dict[str, Any]:
    """The control: beat until standard input closes."""
    async with Heartbeat() as heart:
        sys.stdout.write("beating\n")
        sys.stdout.flush()
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    return heart.figures()


async def _at_work(name: str, directory: str, size: int, total: int) -> dict[str, Any]:
    """Put so many bytes of blocks, make them durable and read them all, with a heart that beats meanwhile."""
    count, payloads, wrong, seen = total // size, Payloads(size), 0, 0
    order = np.random.Generator(np.random.PCG64(count)).permutation(count).tolist()

    def take(key: int, block: Block) -> None:
        nonlocal wrong, seen
        seen += 1
        wrong += block is None or int(block[:8].view(np.int64)[0]) != key

    contender = CONTENDERS[name](Path(directory), size, count, pool=POOL_BYTES)
    gc.collect()
    await contender.open()
    heart, start = Heartbeat(), time.perf_counter()
    async with heart:
        await contender.put_all(range(count), payloads.make)
        await contender.sync()
        await contender.read(order, take)
    seconds = time.perf_counter() - start
    await contender.close()
    return heart.figures() | {"seconds": seconds, "wrong": wrong + count - seen}


class Companion:
    """A process beside, for as long as a ``with`` lasts: it says when it is ready, and what it found at the end.

    Attributes
    ----------
    found
        What it printed at the end, as JSON.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self.found: Any = None
        self._words = [sys.executable, *words]

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(self._words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self._process.stdout.readline()
        return self

    def __exit__(self, *exc: object) -> None:
        output, _ = self._process.communicate()
        if exc == (None, None, None):
            self.found = json.loads(output)


def control(loop: str) -> Companion:
    """A heart that beats in a loop of this kind, in a process of its own."""
    return Companion(["-m", __spec__.name, "--loop", loop])


def late(name: str, directory: str, size: int, total: int, loop: str) -> dict[str, Any]:
    """Figures of a contender and of a control that beat beside it, in processes of their own."""
    words = [sys.executable, "-m", __spec__.name, "--loop", loop, "--name", name, "--directory", directory]
    words += ["--size", str(size), "--total", str(total)]
    with control(loop) as beside:
        done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
    return {"name": name, "loop": loop, "block": size, "store": json.loads(done.stdout), "control": beside.found}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--loop", required=True)
    parser.add_argument("--name")
    parser.add_argument("--directory")
    parser.add_argument("--size", type=int)
    parser.add_argument("--total", type=int)
    given = parser.parse_args()
    work = _at_work(given.name, given.directory, given.size, given.total) if given.name else _alone()
    sys.stdout.write(json.dumps(run(work, given.loop)) + "\n")
