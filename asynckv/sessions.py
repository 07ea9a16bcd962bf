"""Calls with a life of their own: a request, a stream, a reservation. Each frees what it holds when it is left."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

from asynckv.beside import beside
from asynckv.checksum import checksum
from asynckv.errors import BlockTooLargeError, ClosedError, NoRoomError
from asynckv.waiting import DISK_HIT, MEMORY_HIT, Gather, plain_key

if TYPE_CHECKING:
    from asynckv._core import Draft, Room
    from asynckv.cache import Cache

# Of the pool: how far a stream reads ahead.
READ_AHEAD = 1 / 4
READ_AHEAD_BLOCKS_MAX = 256
EXTENT_BYTES_MIN = 64
LOOP_CHECKSUM_BYTES = 1 << 20  # about 0.1 ms


class Request:
    """One prompt's blocks, as the eviction policy sees them: together, and once, when the request ends."""

    def __init__(self, cache: Cache, keys: list[Any]) -> None:
        self._cache = cache
        self._id: int | None = None
        self.keys = keys

    async def __aenter__(self) -> Request:
        self._cache._enter()
        self._id = self._cache._table.request_begin()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cache._check_owner()
        if self._id is not None:
            self._cache._table.request_end(self._id)
            self._id = None

    def _check(self) -> None:
        self._cache._enter()
        if self._id is None:
            raise RuntimeError("use a request inside its `async with`")

    async def get_many(self) -> list[Any]:
        """The blocks of the request's keys, in order, as from `Cache.get_many`."""
        self._check()
        return await self._cache._get_many(self.keys)

    async def put_many(self, items: Iterable[tuple[Any, Any]]) -> list[bool]:
        """Store blocks as part of this request, as `Cache.put_many` does."""
        self._check()
        return await self._cache._put_many(items)


class Stream:
    """Blocks in order while later ones load: an asynchronous iterator."""

    def __init__(self, cache: Cache, keys: Sequence[Any]) -> None:
        self._cache = cache
        self._keys = keys
        self._next = 0
        self._ahead: deque[tuple[Any, Gather, int]] = deque()
        self._room = max(1, int(cache._table.capacity * READ_AHEAD))
        self._held = 0
        self._done = False
        self._cut = False
        self._running = False
        cache._streams.add(self)

    def __aiter__(self) -> Stream:
        return self

    def _read_ahead(self) -> None:
        while self._next < len(self._keys) and len(self._ahead) < READ_AHEAD_BLOCKS_MAX:
            key = self._keys[self._next]
            size = max(EXTENT_BYTES_MIN, self._cache._table.payload_size(key))
            if self._ahead and self._held + size > self._room:
                return
            gather = Gather(self._cache._scheduler, (key,), counted=False)
            gather.start()
            self._ahead.append((key, gather, size))
            self._held += size
            self._next += 1

    async def __anext__(self) -> tuple[Any, Any]:
        if self._cut:
            self._cache._enter()  # says that the cache is closed
        if self._done:
            raise StopAsyncIteration
        self._cache._enter()
        if self._running:
            raise RuntimeError("this stream is already being read by another task")
        self._running = True
        try:
            return await self._take()
        finally:
            self._running = False

    async def _take(self) -> tuple[Any, Any]:
        self._read_ahead()
        if not self._ahead:
            self.stop()
            raise StopAsyncIteration
        key, gather, size = self._ahead[0]
        try:
            if not gather.future.done():
                await asyncio.wait([gather.future])
            elif self._cache._turn_is_due():
                await self._cache._turn()
        except asyncio.CancelledError:
            self.stop()
            raise
        if self._done:  # stopped while it waited
            raise ClosedError("the cache was closed") if self._cut else StopAsyncIteration
        self._ahead.popleft()
        self._held -= size
        block, code = gather.results[0], gather.codes[0]
        self._cache._note_hits((code,), (key,))
        if code not in (MEMORY_HIT, DISK_HIT):
            self.stop()
            raise StopAsyncIteration
        self._read_ahead()
        return key, block

    def stop(self) -> None:
        """Cancel what is still loading and free what was read ahead."""
        if self._done:
            return
        self._done = True
        self._cache._streams.discard(self)
        _cancel_all(self._ahead)
        self._ahead.clear()

    def cut(self) -> None:
        """As `stop`, because the cache is being closed: a later step says so."""
        self._cut = not self._done
        self.stop()

    def __del__(self) -> None:
        # Dropped in the middle. Garbage collection may run on any thread, the pool belongs to the loop's: what has come
        # is freed with its last reference, only what still loads needs the loop.
        loading = [each for each in self._ahead if not each[1].future.done()]
        self._ahead.clear()
        if loading and not self._cache._loop.is_closed():
            self._cache._loop.call_soon_threadsafe(_cancel_all, loading)

    async def aclose(self) -> None:
        """As `stop`, for `contextlib.aclosing`."""
        self._cache._check_owner()
        self.stop()


def _cancel_all(ahead: Iterable[tuple[Any, Gather, int]]) -> None:
    for _, gather, _ in ahead:
        gather.cancel()


class Reservation:
    """Room in the pool that its user fills in place."""

    def __init__(self, cache: Cache, key: Any, draft: Draft) -> None:
        self._cache = cache
        self._key = plain_key(key)
        self._draft = draft
        self._room: Room | None = None
        self._entered = False

    async def __aenter__(self) -> Any:
        cache = self._cache
        cache._enter()
        if self._entered:
            raise RuntimeError("a reservation is used once")
        self._entered = True
        if not cache._table.fits(self._draft):
            raise BlockTooLargeError(
                f"a block of {self._draft.extent} bytes cannot fit a pool of {cache._table.capacity} bytes",
                key=self._key,
                operation="reserve",
            )
        self._room = await cache._scheduler.reserve(self._draft)
        if self._room is None:
            raise NoRoomError("no room in the pool within room_timeout", key=self._key, operation="reserve")
        return cache._table.reserve(self._room, self._draft)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        cache = self._cache
        cache._check_owner()
        room, self._room = self._room, None
        if room is None:
            return
        digest = None
        if kind is None and cache._tier is not None and not cache.closed:
            digest = await self._checksum(room)
        if kind is not None or cache.closed:
            room.cancel()
            cache._scheduler.kick()
            if kind is None:
                raise ClosedError("the cache was closed before the block was published", key=self._key)
            return
        cache._table.publish(room, self._key, self._draft, digest)
        cache._scheduler.counters.puts += 1
        cache._scheduler.writer.poke()
        cache._scheduler.kick()

    async def _checksum(self, room: Room) -> int:
        """Of the whole extent, in a thread when it is large; who is cancelled leaves the room to the thread."""
        cache = self._cache
        data = cache._table.extent(room)
        if data.nbytes <= LOOP_CHECKSUM_BYTES:
            return checksum(data)
        try:
            digest = beside(cache._loop, partial(checksum, data))
        except RuntimeError:  # no more threads
            return checksum(data)

        def free(_: asyncio.Future[int]) -> None:
            room.cancel()
            cache._scheduler.kick()

        try:
            return await asyncio.shield(digest)
        except BaseException:
            digest.add_done_callback(free)
            raise
