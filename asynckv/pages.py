"""The pool's memory pages: given ahead of use, and taken back, beside the loop.

The first write to a page costs a microsecond in the kernel, and a millisecond or ten where it has to make a huge page
first: a copy into fresh memory would stop the loop for as long. So the pages that come into use next are made ready
while the loop does something else; of a large pool, no more than that.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

from asynckv.beside import beside

if TYPE_CHECKING:
    from asynckv._core import Table

__all__ = ["Pages"]

# Kept ready, half of it at any moment. Tens of milliseconds of work, half a second where memory is fragmented.
AHEAD_BYTES = 256 << 20
SMALL_BYTES = 256 << 10  # of a whole pool: the loop makes its few pages ready sooner than a thread starts


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

        def done(_: object) -> None:
            self._running = None
            if not self._table.closed:
                self._table.pages_ready(*wanted)
                self.look()  # it may have been overtaken

        if self._table.capacity <= SMALL_BYTES:
            self._table.touch_pages(*wanted)
            self._table.pages_ready(*wanted)
            return
        try:
            self._running = beside(self._loop, partial(self._table.touch_pages, *wanted))
        except RuntimeError:  # no more threads: they come with the first use
            self._table.pages_ready(*wanted)
        else:
            self._running.add_done_callback(done)

    async def close(self) -> None:
        """Close the table and give its memory back, if no view holds it."""
        mapping: list[Any] = [self._table.close()]
        if self._running is not None:
            await asyncio.wait([self._running])
        if self._table.capacity <= SMALL_BYTES:
            return
        try:
            await beside(self._loop, mapping.clear)
        except RuntimeError:
            mapping.clear()
