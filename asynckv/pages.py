"""The pool's memory pages: given ahead of use, and taken back, by a thread beside the loop.

The first write to a page costs a microsecond in the kernel, and a millisecond or ten where it has to make a huge page
first: a copy into fresh memory would stop the loop for as long. So the pages that come into use next are made ready
while the loop does something else; what will never be used takes none.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from asynckv._core import Table

__all__ = ["Pages"]

# Kept ready, half of it at any moment. Tens of milliseconds of work, half a second where memory is fragmented.
AHEAD_BYTES = 256 << 20


class Pages:
    """Keeps the next part of a pool ready.

    Parameters
    ----------
    loop, table
        The pool is the table's.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, table: Table) -> None:
        self._loop = loop
        self._table = table
        self._running: asyncio.Future[None] | None = None

    async def open(self) -> None:
        """Make the first part ready."""
        self.look()
        if self._running is not None:
            await asyncio.shield(self._running)

    def look(self) -> None:
        """Something of the pool was taken: begin with the next part when it is time."""
        if self._running is not None or self._table.closed:
            return
        wanted = self._table.pages_wanted(AHEAD_BYTES)
        if wanted is None:
            return

        def done(_: asyncio.Future[None]) -> None:
            self._running = None
            if not self._table.closed:
                self._table.pages_ready(*wanted)
                self.look()  # it may have been overtaken

        self._running = self._beside(partial(self._table.touch_pages, *wanted))
        self._running.add_done_callback(done)

    def _beside(self, job: Callable[[], object]) -> asyncio.Future[None]:
        """Run a job that cannot fail in a thread of its own."""
        future: asyncio.Future[None] = self._loop.create_future()

        def end() -> None:
            if not future.done():
                future.set_result(None)

        def run() -> None:
            job()
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(end)

        try:
            threading.Thread(target=run, name="asynckv-pages", daemon=True).start()
        except RuntimeError:  # no more threads
            job()
            end()
        return future

    async def close(self) -> None:
        """Close the table and give its memory back, if no view holds it."""
        mapping: list[Any] = [self._table.close()]
        if self._running is not None:
            await asyncio.wait([self._running])
        await self._beside(mapping.clear)
