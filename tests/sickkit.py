"""Stores over a disk that follows a script of faults, for tests at the public surface."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import asynckv
from asynckv.backends import create_backend
from asynckv.testing import FaultyBackend, Script

SMALL: dict[str, Any] = {"memory": "1MiB", "disk": "16MiB", "room_timeout": 0.3}
PACE = 20  # seconds of `FastClock` in one of ours


class FastClock:
    """The monotonic clock, many times as fast: deadlines pass early, and a sick disk is soon tried again."""

    def monotonic(self) -> float:
        return time.monotonic() * PACE

    def call_later(
        self, loop: asyncio.AbstractEventLoop, delay: float, callback: Callable[[], object]
    ) -> asyncio.TimerHandle:
        return loop.call_later(min(delay, 1e6) / PACE, callback)


@asynccontextmanager
async def sick(directory: Path, script: Script, **options: Any) -> AsyncIterator[tuple[asynckv.Cache, FaultyBackend]]:
    """A store over a disk that follows a script; healed before it is closed."""
    made: list[FaultyBackend] = []

    def factory(engine: str, **settings: Any) -> FaultyBackend:
        made.append(FaultyBackend(create_backend(engine, **settings), script, clock=settings["clock"]))
        return made[-1]

    async with asynckv.open(directory, **{**SMALL, **options}, _backend_factory=factory) as cache:
        try:
            yield cache, made[-1]
        finally:
            script.clear()
            made[-1].release_all()
