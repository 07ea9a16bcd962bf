"""Cache: life cycle and public calls. Thin: state is in the block table, waiting in the scheduler, bytes in tiers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import warnings
import weakref
from asyncio import _get_running_loop
from collections.abc import AsyncIterator, Generator, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from asynckv._core import Table
from asynckv.buffers import copy_payload, pairs_of, payload_bytes, several, too_small, writable_bytes
from asynckv.config import SEGMENTS_MAX, Config, format_size, parse_seconds
from asynckv.errors import AsyncKVError, BlockTooLargeError, ClosedError
from asynckv.gauges import read_gauges
from asynckv.pages import Pages
from asynckv.scheduler import Scheduler
from asynckv.sessions import Request, Reservation, Stream
from asynckv.stats import Stats
from asynckv.tiers.disk import DiskTier
from asynckv.waiting import ABSENT, DISK, DISK_HIT, LOADING, MEMORY, MEMORY_HIT, TURN_KEYS, plain_key

if TYPE_CHECKING:
    from asynckv._core import Draft
    from asynckv.blocks import Namespace

__all__ = ["Cache", "open"]

log = logging.getLogger("asynckv")

# A run of calls that never suspend is cut when the loop has not turned for this long; the clock is read after
# this many of them, or after a copy this large.
YIELD_SECONDS = 0.0005
YIELD_CHECK_CALLS = 32
YIELD_CHECK_BYTES = 256 << 10


def open(
    directory: str | bytes | os.PathLike[Any],
    *,
    memory: int | str = "256MiB",
    disk: int | str = "4GiB",
    namespace: Namespace | None = None,
    policy: str = "auto",
    engine: str = "auto",
    direct: bool | str = "auto",
    io_timeout: float = 5.0,
    room_timeout: float = 5.0,
    persist_after: float | None = None,
    recover: str = "quiet",
    segment: int | str | None = None,
    force: bool = False,
    **seams: Any,
) -> Opening:
    """Open a store: `async with open(...) as cache`, or `cache = await open(...)`.

    Parameters
    ----------
    directory
        Where blocks go that memory cannot hold. Made (0700) when it is missing. One process at a time.
    memory
        Bytes of the pool, exactly; at most 80 % of what the cgroup or machine has, unless `force`. Sizes are ints or
        strings with a unit: `"512KiB"`, `"8GiB"`, or `"8GB"`, which is decimal.
    disk
        Most bytes ever allocated under the directory; 0 for memory only. Less than last time gives up the oldest
        segments: what was flushed there is gone.
    namespace
        What blocks must share to be the same: model, revision, layout, tenant.
    policy
        Eviction from memory: `"lru"`, `"fifo"`, or `"auto"`, which is lru.
    engine
        `"io_uring"`, `"threads"`, `"aiofiles"` or `"auto"`; the variable ASYNCKV_ENGINE overrides it.
    direct
        O_DIRECT: True or `"on"`, False or `"off"`, or `"auto"` for where the file system takes it.
    io_timeout
        Seconds one disk operation may take, from its submission.
    room_timeout
        Seconds a call may wait for room in the pool.
    persist_after
        Seconds after which a block is written even without pressure. None: when memory is short, by `flush` and by
        `close`.
    recover
        What becomes of the blocks that are there: `"quiet"` keeps them and skips damage, `"strict"` keeps them and
        raises when there is damage, `"none"` removes all of this namespace, whole ones too.
    segment
        Bytes of one segment file, 64 KiB to 2 GiB; None for a sixteenth of `disk`, at most 128 MiB (more above 64 GiB).
        A block that is larger stays in memory alone; there are at most 1,024 segments.
    force
        Take more memory than is wise.
    **seams
        For tests: `_clock`, `_backend_factory`, `_random`.

    Raises
    ------
    TypeError, ValueError
        An unknown option, or one with a bad value: at once, before anything is touched.
    StoreLockedError, UnsafeDirectoryError, CorruptStoreError, DiskError
        When awaited: the directory cannot be used.
    """
    options = {
        "memory": memory,
        "disk": disk,
        "namespace": namespace,
        "policy": policy,
        "engine": engine,
        "direct": direct,
        "io_timeout": io_timeout,
        "room_timeout": room_timeout,
        "persist_after": persist_after,
        "recover": recover,
        "segment": segment,
        "force": force,
    }
    config = Config.from_options(directory, options | seams)
    if engine not in ("auto", config.engine):
        log.info("asynckv: ASYNCKV_ENGINE=%s overrides engine=%r", config.engine, engine)
    return Opening(config)


def _warn_of_room(config: Config, used: int) -> None:
    """Say so when the disk cannot hold what the cap allows: blocks will be dropped earlier, or writes fail."""
    if config.disk > SEGMENTS_MAX * config.segment:
        log.warning(
            "asynckv: of disk=%s at most %s will be used, in %d segments: choose a larger segment=",
            format_size(config.disk),
            format_size(SEGMENTS_MAX * config.segment),
            SEGMENTS_MAX,
        )
    try:
        system = os.statvfs(config.directory)
    except OSError:
        return
    room = system.f_bavail * system.f_frsize + used
    if config.disk > room:
        log.warning(
            "asynckv: disk=%s is more than the %s that the file system of %r has for it: choose less, or make room",
            format_size(config.disk),
            format_size(room),
            config.directory,
        )


class Opening:
    """A store about to be opened; await it or enter it."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._cache: Cache | None = None

    def __await__(self) -> Generator[Any, None, Cache]:
        return Cache._open(self._config).__await__()

    async def __aenter__(self) -> Cache:
        self._cache = await self
        return self._cache

    async def __aexit__(self, *exc: object) -> None:
        assert self._cache is not None
        await self._cache.close()

    if not TYPE_CHECKING:  # a checker knows what there is

        def __getattr__(self, name):
            raise AttributeError(f"no {name!r} yet: open it first, `cache = await asynckv.open(...)` or `async with`")


class Cache:
    """A store of KV-cache blocks: hot ones in a fixed pool of memory, cold ones on disk.

    Made by `asynckv.open`. Belongs to the event loop it was opened in; `asynckv.BlockingCache` serves threads.
    Every `async` call may be cancelled: it leaves no pin, no lost block and no half-written one.
    """

    _scheduler: Scheduler

    def __init__(self, config: Config) -> None:
        self._config = config
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._pid = os.getpid()
        self._table = Table(config.memory, policy=config.policy, random=config.random)
        self._monotonic = config.clock.monotonic
        self._pages = Pages(self._loop, self._table)
        self._tier: DiskTier | None = None
        self._closing: asyncio.Task[None] | None = None
        self._closed = False
        self._opened = False
        self._last_stats: Stats | None = None
        self._streams: weakref.WeakSet[Stream] = weakref.WeakSet()
        self._run_length = 0
        self._run_started = 0.0

    @classmethod
    async def _open(cls, config: Config) -> Cache:
        cache = cls(config)
        table = cache._table
        tier: DiskTier | None = None
        try:
            await cache._pages.open()
            if config.disk:
                tier = cache._tier = DiskTier(config, table)
                await tier.open()
                table.max_spill = tier.max_block
                table.backed = True
                if tier.recovering and config.recover == "strict":
                    await cls._recover_strictly(table, tier)
                _warn_of_room(config, tier.disk_used)
        except BaseException as error:
            await asyncio.shield(cache._pages.close())
            if isinstance(error, AsyncKVError):
                error.about(config.directory)
            raise
        cache._scheduler = Scheduler(cache._loop, table, tier, config, config.clock, on_turn=cache._pages.look)
        cache._opened = True
        if tier is not None:
            if tier.recovering:
                cache._scheduler.start_recovery()
            cache._scheduler.writer.start()
        return cache

    @staticmethod
    async def _recover_strictly(table: Table, tier: DiskTier) -> None:
        """Read the whole log before anything is served: damage is an error of `open`."""
        table.recovering = True
        try:
            await tier.recover(lambda: None)
        except BaseException:
            await tier.close(snapshot=False)
            raise
        table.recovering = False

    def __repr__(self) -> str:
        return f"<asynckv.Cache {self._config.directory!r} {'closed' if self._closed else 'open'}>"

    def __del__(self, _warn: Any = warnings.warn) -> None:
        if getattr(self, "_opened", False) and self._closing is None and self._pid == os.getpid():
            _warn(f"unclosed {self!r}", ResourceWarning, source=self)

    async def __aenter__(self) -> Cache:
        self._enter()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # -- guards --------------------------------------------------------------------------------------------------

    def _enter(self) -> None:
        """Refuse calls from elsewhere and after close."""
        self._check_owner()
        if self._closing is not None:
            raise ClosedError("the cache is closed")

    def _check_owner(self) -> None:
        """Refuse calls from elsewhere."""
        if _get_running_loop() is not self._loop:
            self._foreign()

    def _enter_plain(self) -> None:
        if threading.get_ident() != self._thread or (
            _get_running_loop() is not self._loop and (_get_running_loop() is not None or os.getpid() != self._pid)
        ):
            self._foreign()
        if self._closing is not None:
            raise ClosedError("the cache is closed")

    def _foreign(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError("this cache was opened in the parent process: open a store of its own in the child")
        raise RuntimeError(
            "a cache belongs to the event loop it was opened in, and is closed there: open one in each loop, or use "
            "asynckv.BlockingCache"
        )

    def _turn_is_due(self, nbytes: int = 0) -> bool:
        """After a run of calls that did not suspend: has the loop waited long enough?"""
        self._run_length += 1
        if self._run_length < YIELD_CHECK_CALLS and nbytes < YIELD_CHECK_BYTES:
            return False
        self._run_length = 0
        now = self._monotonic()
        if now - self._run_started < YIELD_SECONDS:
            return False
        self._run_started = now
        return True

    async def _turn(self) -> None:
        await asyncio.sleep(0)
        self._run_started = self._monotonic()

    # -- reading -------------------------------------------------------------------------------------------------

    async def get(self, key: Any, *, timeout: float | None = None) -> Any:
        """Read one block, from memory at once or from disk.

        Parameters
        ----------
        key
            int (signed 64 bit), bytes or str.
        timeout
            Seconds to wait for the disk; later it is a miss.

        Returns
        -------
        CacheBlock, ndarray, memoryview or None
            What was put: read-only views on the pool, without a copy. Their bytes stay valid and unchanged while any
            view lives. None is a miss, or no room to load the block into within `room_timeout`.

        Raises
        ------
        ClosedError
            The cache was closed before the call.
        """
        if _get_running_loop() is not self._loop or self._closing is not None:
            self._enter()
        if timeout is not None:
            timeout = parse_seconds(timeout, "timeout", zero=True, endless=True)
        block = self._table.get(key)
        if block is None:
            block = (await self._scheduler.gather([key], timeout, absent=True))[0]
        elif self._run_length < YIELD_CHECK_CALLS - 1:  # what most hits are, without another call
            self._run_length += 1
            return block
        if self._turn_is_due():
            try:
                await self._turn()
            except BaseException:
                block = None  # the error keeps this frame: it must not keep the block
                raise
        return block

    async def get_into(self, key: Any, out: Any) -> int | None:
        """Copy a block's payload into a writable buffer.

        Parameters
        ----------
        out
            Any writable C-contiguous buffer, at least as large as the payload: `key` then `value` of a CacheBlock.

        Returns
        -------
        int or None
            Bytes written; None on a miss. Nothing is written unless all of it is right.

        Raises
        ------
        ValueError
            The buffer is too small or read-only.
        """
        self._enter()
        with self._scheduler.calls:
            return (await self._get_many_into([key], [out], ["the buffer"]))[0]

    async def get_many(self, keys: Iterable[Any]) -> list[Any]:
        """Look up a batch of blocks, reloading those that were spilled, in one submission.

        Parameters
        ----------
        keys
            Any order, duplicates allowed.

        Returns
        -------
        list
            One entry per key, in order, as from `get`. When the pool cannot hold all of them pinned at once, the
            leading ones are served and the rest are None (counted `no_room`).
        """
        self._enter()
        request = self._table.request_begin()
        try:
            return await self._get_many(list(several(keys, "get_many")))
        finally:
            self._table.request_end(request)

    async def _get_many(self, keys: list[Any]) -> list[Any]:
        blocks = await self._scheduler.gather(keys)
        if self._turn_is_due(YIELD_CHECK_BYTES):
            try:
                await self._turn()
            except BaseException:
                blocks = []  # as in `get`
                raise
        return blocks

    async def get_many_into(self, keys: Iterable[Any], outs: Iterable[Any]) -> list[int | None]:
        """`get_into` for a batch; one result per key, in order."""
        self._enter()
        keys, outs = list(several(keys, "get_many_into")), list(outs)
        if len(keys) != len(outs):
            raise ValueError(f"{len(keys)} keys but {len(outs)} buffers")
        with self._scheduler.calls:
            return await self._get_many_into(keys, outs, [f"buffer {index}" for index in range(len(outs))])

    async def _get_many_into(self, keys: list[Any], outs: Sequence[Any], names: Sequence[str]) -> list[int | None]:
        table = self._table
        targets = []
        for number, (key, out, name) in enumerate(zip(keys, outs, names, strict=True), 1):
            if number % TURN_KEYS == 0:
                await asyncio.sleep(0)
            table.check_key(key)
            target = writable_bytes(out, name)
            size = table.payload_size(key)
            if size > target.nbytes:
                raise too_small(name, target, size)
            targets.append(target)
        results: list[int | None] = [None] * len(keys)
        # In pieces of a quarter of the pool: nothing has to stay pinned once it is copied.
        start = 0
        while start < len(keys):
            end, room = start, table.capacity // 4
            while end < len(keys) and (end == start or room > 0):
                room -= max(0, table.payload_size(keys[end]))
                end += 1
            blocks = await self._scheduler.gather(keys[start:end])
            block = None
            try:
                for index in range(start, end):
                    block, blocks[index - start] = blocks[index - start], None
                    if block is not None:
                        await self._scheduler.copy_turn(payload_bytes(block))
                        size = results[index] = copy_payload(block, targets[index], names[index])
                        if self._turn_is_due(size):
                            await self._turn()
            finally:
                block, blocks = None, []  # as in `get`
            start = end
        return results

    def request(self, keys: Iterable[Any]) -> Request:
        """One prompt: `async with cache.request(keys) as r`, with `r.get_many()` and `r.put_many(items)`.

        The keys are the prompt's blocks in order. The eviction policy sees the request as a whole, once, at exit.
        """
        self._enter_plain()
        keys = list(several(keys, "request"))
        for key in keys:
            self._table.check_key(key)
        return Request(self, keys)

    def stream(self, keys: Iterable[Any]) -> AsyncIterator[tuple[Any, Any]]:
        """`async for key, block in cache.stream(keys)`: in order, each as soon as it is there.

        Later blocks load while earlier ones are used, at most a quarter of the pool ahead. Stops at the first miss,
        damage or time-out. Leaving the loop, cancelling or dropping the iterator frees everything at once.
        """
        self._enter_plain()
        keys = list(several(keys, "stream"))
        for key in keys:
            self._table.check_key(key)
        return Stream(self, keys)

    def prefetch(self, keys: Iterable[Any]) -> int:
        """Start loading blocks into memory and return at once: how many loads were started or joined.

        Uses free or clean room only.
        """
        self._enter()
        return self._scheduler.prefetch(list(several(keys, "prefetch")))

    def match_prefix(self, keys: Iterable[Any]) -> int:
        """Length of the leading run of keys that are in some tier. No I/O, no statistics."""
        self._enter_plain()
        return self._table.match_prefix(several(keys, "match_prefix"))

    # -- writing -------------------------------------------------------------------------------------------------

    async def put(self, key: Any, block: Any) -> bool:
        """Store a block, or replace the one under this key.

        Arguments are checked before the call first suspends; the bytes are copied in one uninterrupted step once
        there is room. Puts on one key take effect in call order.

        Parameters
        ----------
        block
            A CacheBlock, an ndarray of at most 8 dimensions, or any bytes-like object. Arrays are of bool, numpy's
            ints, floats and complex, in either byte order, or of ml_dtypes' bfloat16 and float8.

        Returns
        -------
        bool
            True: stored. False: no room came within `room_timeout`, and the key is gone.

        Raises
        ------
        BlockTooLargeError
            It could never fit the pool; the key is gone.
        TypeError, ValueError
            A key or block of the wrong kind; nothing changed.
        """
        self._enter()
        draft = self._draft(key, block)
        fits = self._table.fits(draft)
        if not fits or not self._scheduler.put_now(key, draft):
            stored = (await self._scheduler.put([(key, draft if fits else None)]))[0]
            if not fits:
                pool = self._table.capacity
                raise BlockTooLargeError(
                    f"a block of {draft.extent} bytes cannot fit a pool of {pool} bytes", key=key, operation="put"
                )
            return stored
        if self._turn_is_due(draft.stored):
            await self._turn()
        return True

    def _draft(self, key: Any, block: Any) -> Draft:
        """A checked block, which may be one that could never fit."""
        self._table.check_key(key)
        return self._table.draft(block)

    async def put_many(self, items: Iterable[tuple[Any, Any]]) -> list[bool]:
        """Store a batch of (key, block) pairs, or a mapping's, in order; one result each.

        A block that could never fit counts as False here; the others are stored. A wrong type anywhere raises
        before anything is stored.
        """
        self._enter()
        return await self._put_many(items)

    async def _put_many(self, items: Any) -> list[bool]:
        table = self._table
        checked = [(key, self._draft(key, block)) for key, block in pairs_of(items)]
        drafts = [(key, draft if table.fits(draft) else None) for key, draft in checked]
        request = table.request_begin()
        try:
            stored = await self._scheduler.put(drafts) if drafts else []
        finally:
            table.request_end(request)
        if self._turn_is_due(YIELD_CHECK_BYTES):
            await self._turn()
        return stored

    def reserve(self, key: Any, shape: Any, dtype: Any) -> Reservation:
        """`async with cache.reserve(key, shape, dtype) as array`: a writable array inside the pool.

        Published under `key` on normal exit, discarded on an exception; the old value stays readable until then.
        The array must not be written after the block: such a write reads as damage once the block was on disk.

        Raises
        ------
        NoRoomError
            On entry: no room within `room_timeout`.
        """
        self._enter_plain()
        self._table.check_key(key)
        return Reservation(self, key, self._table.draft_like(shape, dtype))

    def reserve_block(self, key: Any, layer_id: int, key_shape: Any, value_shape: Any, dtype: Any) -> Reservation:
        """As `reserve`, for a CacheBlock whose `key` and `value` are writable arrays inside the pool."""
        self._enter_plain()
        self._table.check_key(key)
        return Reservation(self, key, self._table.draft_block(layer_id, key_shape, value_shape, dtype))

    # -- looking -------------------------------------------------------------------------------------------------

    def __contains__(self, key: Any) -> bool:
        self._enter_plain()
        return self._table.state(key) != ABSENT

    def __bool__(self) -> bool:
        return True  # an empty cache is a cache

    def __len__(self) -> int:
        self._enter_plain()
        return self._table.length

    def tier(self, key: Any) -> str | None:
        """`"memory"` (also when spilling or in both), `"disk"` (also while reloading), or None."""
        self._enter_plain()
        return {MEMORY: "memory", DISK: "disk", LOADING: "disk"}.get(self._table.state(key))

    def keys(self) -> list[Any]:
        """The readable keys of this namespace, in no particular order."""
        self._enter_plain()
        return self._table.keys()

    def touch(self, keys: Iterable[Any]) -> None:
        """Note a use of these blocks without reading them."""
        self._enter_plain()
        for key in several(keys, "touch"):
            self._table.touch(key)

    # -- removing ------------------------------------------------------------------------------------------------

    async def delete(self, key: Any) -> bool:
        """Remove a block from every tier, durably. True when there was one.

        Raises
        ------
        DiskError
            The block is gone from memory, but the disk could not make that durable so far. It stays owed: the next
            `flush`, `delete`, `clear` or `close` tries again.
        """
        self._enter()
        self._table.check_key(key)
        found = await self._scheduler.delete((key,)) > 0
        if self._turn_is_due():
            await self._turn()
        return found

    async def delete_many(self, keys: Iterable[Any]) -> int:
        """`delete` for a batch; how many there were."""
        self._enter()
        keys = list(several(keys, "delete_many"))
        for key in keys:
            self._table.check_key(key)
        found = await self._scheduler.delete(list(dict.fromkeys(map(plain_key, keys))))
        if self._turn_is_due(YIELD_CHECK_BYTES):
            await self._turn()
        return found

    async def clear(self) -> None:
        """Remove every block of this namespace from every tier, durably.

        Raises
        ------
        DiskError
            No key is readable any more, but the disk could not make that durable so far: a crash now may bring blocks
            back. It stays owed: the next `flush`, `delete`, `clear` or `close` tries again, and keeps what was put
            since.
        """
        self._enter()
        await self._scheduler.clear()

    # -- life cycle ----------------------------------------------------------------------------------------------

    async def flush(self) -> None:
        """Return when every put that returned before the call is on disk and synced; at once with `disk=0`.

        Raises
        ------
        DiskError
            The disk is off, a write failed, or the blocks cannot fit the disk together.
        """
        self._enter()
        if self._tier is not None:
            await self._scheduler.writer.flush()

    async def close(self) -> None:
        """Let waiting calls finish, flush, and leave the directory so that the next open starts warm.

        Views stay valid. May be called again. Not cut short by cancellation, which is delivered when it is done.
        """
        self._check_owner()
        me = asyncio.current_task()
        assert me is not None
        cancels = me.cancelling()
        while not self._closed:
            if self._closing is None or self._closing.cancelled():  # also when all tasks of the loop were cancelled
                self._closing = self._loop.create_task(self._close(), name="asynckv close")
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.shield(self._closing)
        if me.cancelling() > cancels:
            raise asyncio.CancelledError

    async def _close(self) -> None:
        for stream in list(self._streams):
            stream.cut()
        clean = await self._scheduler.close()
        stuck = 0
        if self._tier is not None:
            stuck = await self._tier.close(snapshot=clean)
        self._last_stats = self.stats()
        if stuck:
            log.warning("asynckv: %d disk operations never ended; their memory is kept", stuck)
            self._table.leak()
        await self._pages.close()
        self._closed = True

    @property
    def closed(self) -> bool:
        """Has `close` been called?"""
        return self._closing is not None

    def stats(self) -> Stats:
        """A snapshot of all counters and gauges; also after close."""
        if self._last_stats is not None:
            return self._last_stats
        if threading.get_ident() != self._thread or os.getpid() != self._pid:
            self._foreign()
        return read_gauges(self._table, self._tier, self._scheduler, self._config)

    def _note_hits(self, codes: Sequence[int], keys: Sequence[Any]) -> None:
        """Count hits that were delivered without being counted when found."""
        for code, key in zip(codes, keys, strict=True):
            if code in (MEMORY_HIT, DISK_HIT):
                self._table.touch(key)
            if code == MEMORY_HIT:
                self._scheduler.counters.memory_hits += 1
            else:
                self._scheduler.count(code)
