"""Small helpers of asynchronous I/O tests."""

from __future__ import annotations

import asyncio
import math
import mmap
import os
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["PAGE", "Ends", "Gate", "aligned", "os_error", "pattern", "raises_errno", "threads_gone", "turns"]

PAGE = 4096


def aligned(size: int, fill: bytes = b"\0") -> memoryview:
    """Page-aligned writable memory."""
    memory = mmap.mmap(-1, max(size, 1))
    view = memoryview(memory)[:size]
    if fill != b"\0" and size:
        view[:] = (fill * (size // len(fill) + 1))[:size]
    return view


def os_error(number: int) -> OSError:
    """The error that a system call would raise."""
    return OSError(number, os.strerror(number))


def pattern(size: int, seed: int = 1) -> bytes:
    """Bytes in which every aligned word of four differs from the others."""
    words = np.arange(size // 4 + 1, dtype=np.uint32) + np.uint32(seed * 2654435761 & 0xFFFFFFFF)
    return words.tobytes()[:size]


class Gate:
    """A callable for `verify` or `prepare` that blocks its worker until opened."""

    nbytes = math.inf  # nothing for the loop

    def __init__(self, result: Any = True) -> None:
        self.entered = threading.Event()
        self._open = threading.Event()
        self.result = result
        self.calls = 0

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        self.entered.set()
        assert self._open.wait(30), "a test never opened its gate"
        return self.result

    def open(self) -> None:
        """Let the worker go on."""
        self._open.set()

    async def blocked(self) -> None:
        """Wait until a worker is inside."""
        await asyncio.to_thread(self.entered.wait, 30)
        assert self.entered.is_set()


class Ends:
    """Counts calls of `released`, and notes the order of releases and results."""

    def __init__(self) -> None:
        self.released = 0
        self.order: list[str] = []
        self.thread: int | None = None
        self._event = asyncio.Event()

    def __call__(self) -> None:
        self.released += 1
        self.order.append("released")
        self.thread = threading.get_ident()
        self._event.set()

    async def wait(self) -> None:
        """Wait for the first release."""
        await asyncio.wait_for(self._event.wait(), 30)


async def turns(count: int = 5) -> None:
    """Give the loop some turns."""
    for _ in range(count):
        await asyncio.sleep(0)


@contextmanager
def raises_errno(*numbers: int) -> Iterator[None]:
    """Demand an `OSError` with one of these errnos."""
    try:
        yield
    except OSError as error:
        if error.errno not in numbers:
            raise AssertionError(f"{error!r} is not one of {numbers}") from error
    else:
        raise AssertionError("nothing was raised")


async def threads_gone() -> None:
    """Wait until no thread of an engine is left."""
    for _ in range(1000):
        if not [thread for thread in threading.enumerate() if thread.name.startswith("asynckv")]:
            return
        await asyncio.sleep(0.005)
    raise AssertionError("threads are left")
