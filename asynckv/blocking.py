"""BlockingCache: the calls of Cache without ``await``, for any number of threads.

A daemon thread runs an event loop of its own, on uvloop when that can be imported, and the cache lives there. Every
call is handed over to that loop and waited for, so calls of different threads overlap as tasks of one loop would.

Invariants: nothing is scheduled once ``close`` has begun (one lock covers the check and the scheduling), so no caller
waits for a loop that has gone; a caller that is interrupted cancels what it asked for; what is left unclosed is closed
when the interpreter ends.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import warnings
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from asynckv.buffers import pairs_of, several
from asynckv.cache import open as open_cache
from asynckv.errors import ClosedError

if TYPE_CHECKING:
    from asynckv.cache import Cache
    from asynckv.stats import Stats

__all__ = ["BlockingCache"]

T = TypeVar("T")
Items = Iterable[tuple[Any, Any]] | Mapping[Any, Any]

_END = object()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


class _Runner:
    """The thread, its loop and the cache on it. BlockingCache holds one; it holds no BlockingCache."""

    live: set[_Runner] = set()  # noqa: RUF012 - one for the process: what atexit has to close

    def __init__(self, directory: str | os.PathLike[str], options: dict[str, Any]) -> None:
        self.cache: Cache | None = None
        self.final: Stats | None = None
        self.error: BaseException | None = None
        self._opening = partial(open_cache, directory, **options)
        self._pid = os.getpid()
        self._lock = threading.RLock()  # re-entered when garbage collection drops a stream inside _schedule
        self._accepting = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._opened: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="asynckv loop", daemon=True)

    def open(self) -> None:
        """Start the thread and wait until the store is open; raises what opening raised."""
        self._thread.start()
        try:
            self._opened.result()
        except BaseException:
            self.request_close()  # an interrupt: whatever opens later is closed again
            raise

    # -- on the loop's thread

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=_loop_factory()) as runner:
                runner.run(self._main())
        except BaseException as error:
            if self._opened.done():
                self.error = error
            else:
                self._opened.set_exception(error)
        finally:
            _Runner.live.discard(self)

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        cache = await self._opening()
        self.cache = cache
        with self._lock:
            self._accepting = True
        _Runner.live.add(self)
        self._opened.set_result(None)
        try:
            await self._stop.wait()
        finally:  # also when a callback has ended the loop
            self._accepting = False
            try:
                await cache.close()
            finally:
                self.final = cache.stats()
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _start(self, call: Callable[[Cache], Coroutine[Any, Any, T]], future: Future[T]) -> None:
        if self._loop is None or self.cache is None:
            return
        if future.cancelled():
            future.set_running_or_notify_cancel()  # who waits for several of them is told
            return
        task = self._loop.create_task(call(self.cache))
        self._tasks.add(task)
        task.add_done_callback(partial(self._finish, future))
        future.add_done_callback(partial(self._forward_cancel, task))

    def _finish(self, future: Future[T], task: asyncio.Task[T]) -> None:
        self._tasks.discard(task)
        error = CancelledError() if task.cancelled() else task.exception()
        if not future.set_running_or_notify_cancel():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(task.result())

    def _forward_cancel(self, task: asyncio.Task[T], future: Future[T]) -> None:
        if future.cancelled() and self._loop is not None:
            with suppress(RuntimeError):  # the loop has ended, and the task with it
                self._loop.call_soon_threadsafe(task.cancel)

    def _start_plain(self, call: Callable[[Cache], T], future: Future[T]) -> None:
        if self.cache is None or not future.set_running_or_notify_cancel():
            return
        try:
            result = call(self.cache)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    # -- on any thread

    def _schedule(self, start: Callable[[Any, Future[T]], None], call: Any) -> Future[T]:
        if os.getpid() != self._pid:
            raise RuntimeError("this BlockingCache belongs to the parent process; open another store in the child")
        future: Future[T] = Future()
        with self._lock:
            if not self._accepting or self._loop is None:
                raise ClosedError("the cache is closed")
            self._loop.call_soon_threadsafe(start, call, future)
        return future

    def submit(self, call: Callable[[Cache], Coroutine[Any, Any, T]]) -> Future[T]:
        """Run an asynchronous call on the loop."""
        return self._schedule(self._start, call)

    def run(self, call: Callable[[Cache], Coroutine[Any, Any, T]]) -> T:
        """Run an asynchronous call on the loop and wait for its result."""
        self._refuse_own_thread()
        return _wait(self.submit(call))

    def run_plain(self, call: Callable[[Cache], T]) -> T:
        """Run a call that never waits on the loop's thread."""
        self._refuse_own_thread()
        future: Future[T] = self._schedule(self._start_plain, call)
        return _wait(future)

    def _refuse_own_thread(self) -> None:
        if threading.current_thread() is self._thread:
            raise RuntimeError("a callback of a future runs on the cache's own thread and must not wait for the cache")

    @property
    def closed(self) -> bool:
        """Has closing begun?"""
        return not self._accepting

    def request_close(self) -> bool:
        """Begin to close, without waiting; True for the call that began it."""
        if os.getpid() != self._pid:
            return False
        with self._lock:
            first = self._accepting
            self._accepting = False
        if first and self._loop is not None and self._stop is not None:
            self._loop.call_soon_threadsafe(self._stop.set)
        elif not self._opened.done():
            self._opened.add_done_callback(lambda opened: opened.exception() or self.request_close())
        return first

    def join(self) -> None:
        """Wait for the end of the thread."""
        if os.getpid() == self._pid and threading.current_thread() is not self._thread:
            self._thread.join()


def _wait(future: Future[T]) -> T:
    try:
        return future.result()
    except BaseException:
        future.cancel()  # an interrupt of this thread; a no-op where the call itself raised
        raise
    finally:
        del future  # a traceback must not keep the blocks of the result pinned


def _close_all() -> None:
    """Close what was left open when the interpreter ends: the loop's thread is a daemon and would be cut off."""
    runners = list(_Runner.live)
    for runner in runners:
        runner.request_close()
    for runner in runners:
        runner.join()


atexit.register(_close_all)


class BlockingCache:
    """A cache for threads: the calls of :class:`asynckv.Cache` without ``await``.

    Opens in its constructor, is a context manager, and may be used from any number of threads at once. A store that was
    left open is closed when the interpreter ends.

    Parameters
    ----------
    directory, **options
        As for :func:`asynckv.open`.

    Raises
    ------
    TypeError, ValueError, StoreLockedError, UnsafeDirectoryError, CorruptStoreError, DiskError
        As from :func:`asynckv.open`.
    """

    def __init__(self, directory: str | os.PathLike[str], **options: Any) -> None:
        self._directory = directory
        self._runner = _Runner(directory, options)
        self._runner.open()

    def __enter__(self) -> BlockingCache:
        if self.closed:
            raise ClosedError("the cache is closed")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<asynckv.BlockingCache {str(self._directory)!r} {'closed' if self.closed else 'open'}>"

    def __del__(self, _warn: Any = warnings.warn) -> None:
        runner = getattr(self, "_runner", None)
        if runner is not None and runner.request_close():  # never waits here: this may be the loop's own thread
            _warn(f"unclosed asynckv.BlockingCache {str(self._directory)!r}", ResourceWarning, source=self)

    # -- reading

    def get(self, key: Any, *, timeout: float | None = None) -> Any:
        """Read one block; see :meth:`asynckv.Cache.get`. Views may be dropped on any thread."""
        return self._runner.run(lambda cache: cache.get(key, timeout=timeout))

    def get_into(self, key: Any, out: Any) -> int | None:
        """Copy a block's payload into a writable buffer; see :meth:`asynckv.Cache.get_into`."""
        return self._runner.run(lambda cache: cache.get_into(key, out))

    def get_many(self, keys: Iterable[Any]) -> list[Any]:
        """Read a batch of blocks in one submission; see :meth:`asynckv.Cache.get_many`."""
        wanted = list(several(keys, "get_many"))
        return self._runner.run(lambda cache: cache.get_many(wanted))

    def get_many_into(self, keys: Iterable[Any], outs: Iterable[Any]) -> list[int | None]:
        """Copy a batch of payloads into buffers; see :meth:`asynckv.Cache.get_many_into`."""
        wanted, buffers = list(several(keys, "get_many_into")), list(outs)
        return self._runner.run(lambda cache: cache.get_many_into(wanted, buffers))

    def submit_get_many_into(self, keys: Iterable[Any], outs: Iterable[Any]) -> Future[list[int | None]]:
        """Start :meth:`get_many_into` and return a future at once; the buffers belong to the call until it is done."""
        wanted, buffers = list(several(keys, "get_many_into")), list(outs)
        return self._runner.submit(lambda cache: cache.get_many_into(wanted, buffers))

    def request(self, keys: Iterable[Any]) -> BlockingRequest:
        """One prompt: ``with cache.request(keys) as r``; see :meth:`asynckv.Cache.request`."""
        wanted = list(several(keys, "request"))
        return BlockingRequest(self._runner, self._runner.run_plain(lambda cache: cache.request(wanted)))

    def stream(self, keys: Iterable[Any]) -> BlockingStream:
        """``for key, block in cache.stream(keys)``: in order, read ahead; see :meth:`asynckv.Cache.stream`."""
        wanted = list(several(keys, "stream"))
        return BlockingStream(self._runner, self._runner.run_plain(lambda cache: cache.stream(wanted)))

    def prefetch(self, keys: Iterable[Any]) -> int:
        """Start loading blocks into memory; see :meth:`asynckv.Cache.prefetch`."""
        wanted = list(several(keys, "prefetch"))
        return self._runner.run_plain(lambda cache: cache.prefetch(wanted))

    def match_prefix(self, keys: Iterable[Any]) -> int:
        """Length of the leading run present in any tier; see :meth:`asynckv.Cache.match_prefix`."""
        wanted = list(several(keys, "match_prefix"))
        return self._runner.run_plain(lambda cache: cache.match_prefix(wanted))

    # -- writing

    def put(self, key: Any, block: Any) -> bool:
        """Store or replace a block; see :meth:`asynckv.Cache.put`."""
        return self._runner.run(lambda cache: cache.put(key, block))

    def put_many(self, items: Items) -> list[bool]:
        """Store a batch of ``(key, block)`` pairs; see :meth:`asynckv.Cache.put_many`."""
        pairs = pairs_of(items)
        return self._runner.run(lambda cache: cache.put_many(pairs))

    def submit_put_many(self, items: Items) -> Future[list[bool]]:
        """Start :meth:`put_many` and return a future at once; the arrays must stay as they are until it is done."""
        pairs = pairs_of(items)
        return self._runner.submit(lambda cache: cache.put_many(pairs))

    def reserve(self, key: Any, shape: Any, dtype: Any) -> BlockingReservation:
        """``with cache.reserve(key, shape, dtype) as array``; see :meth:`asynckv.Cache.reserve`."""
        return BlockingReservation(self._runner, self._runner.run_plain(lambda cache: cache.reserve(key, shape, dtype)))

    def reserve_block(
        self, key: Any, layer_id: int, key_shape: Any, value_shape: Any, dtype: Any
    ) -> BlockingReservation:
        """``with cache.reserve_block(...) as block``; see :meth:`asynckv.Cache.reserve_block`."""
        return BlockingReservation(
            self._runner,
            self._runner.run_plain(lambda cache: cache.reserve_block(key, layer_id, key_shape, value_shape, dtype)),
        )

    # -- looking

    def __contains__(self, key: Any) -> bool:
        return self._runner.run_plain(lambda cache: key in cache)

    def __len__(self) -> int:
        return self._runner.run_plain(len)

    def __bool__(self) -> bool:
        return True

    def tier(self, key: Any) -> str | None:
        """Where a block is: ``"memory"``, ``"disk"`` or None; see :meth:`asynckv.Cache.tier`."""
        return self._runner.run_plain(lambda cache: cache.tier(key))

    def keys(self) -> list[Any]:
        """The readable keys of this namespace."""
        return self._runner.run_plain(lambda cache: list(cache.keys()))

    def touch(self, keys: Iterable[Any]) -> None:
        """Note a use without reading; see :meth:`asynckv.Cache.touch`."""
        wanted = list(several(keys, "touch"))
        self._runner.run_plain(lambda cache: cache.touch(wanted))

    # -- removing, life cycle

    def delete(self, key: Any) -> bool:
        """Remove a block from every tier, durably; see :meth:`asynckv.Cache.delete`."""
        return self._runner.run(lambda cache: cache.delete(key))

    def delete_many(self, keys: Iterable[Any]) -> int:
        """Remove a batch of blocks; see :meth:`asynckv.Cache.delete_many`."""
        wanted = list(several(keys, "delete_many"))
        return self._runner.run(lambda cache: cache.delete_many(wanted))

    def clear(self) -> None:
        """Remove every block of this namespace; see :meth:`asynckv.Cache.clear`."""
        self._runner.run(lambda cache: cache.clear())

    def flush(self) -> None:
        """Return when every earlier put is on disk and synced; see :meth:`asynckv.Cache.flush`."""
        self._runner.run(lambda cache: cache.flush())

    def close(self) -> None:
        """Let waiting calls finish, flush, close the store and end the thread. May be called again."""
        first = self._runner.request_close()
        self._runner.join()
        error = self._runner.error
        if first and error is not None:
            raise error

    @property
    def closed(self) -> bool:
        """Has :meth:`close` been called?"""
        return self._runner.closed

    def stats(self) -> Stats:
        """A snapshot of all counters and gauges; also after close."""
        try:
            return self._runner.run_plain(lambda cache: cache.stats())
        except ClosedError:
            self._runner.join()
            if self._runner.final is None:
                raise
            return self._runner.final


class BlockingRequest:
    """One prompt's blocks; what :meth:`BlockingCache.request` returns."""

    def __init__(self, runner: _Runner, request: Any) -> None:
        self._runner = runner
        self._request = request

    def __enter__(self) -> BlockingRequest:
        _enter(self._runner, self._request)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(ClosedError):  # closed meanwhile: the policy that was to be told has gone
            self._runner.run(lambda cache: self._request.__aexit__(kind, error, None))

    def get_many(self) -> list[Any]:
        """Read the blocks of the request's keys, in order."""
        return self._runner.run(lambda cache: self._request.get_many())

    def put_many(self, items: Items) -> list[bool]:
        """Store blocks as part of this request."""
        pairs = pairs_of(items)
        return self._runner.run(lambda cache: self._request.put_many(pairs))


class BlockingReservation:
    """Room in the pool that its user fills in place; what :meth:`BlockingCache.reserve` returns."""

    def __init__(self, runner: _Runner, reservation: Any) -> None:
        self._runner = runner
        self._reservation = reservation

    def __enter__(self) -> Any:
        return _enter(self._runner, self._reservation)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._runner.run(lambda cache: self._reservation.__aexit__(kind, error, None))
        except ClosedError:
            if error is None:
                raise


def _enter(runner: _Runner, manager: Any) -> Any:
    future = runner.submit(lambda cache: manager.__aenter__())
    try:
        return _wait(future)
    except BaseException as error:
        # Interrupted just when the loop had entered: leave again, as if the block had raised.
        if future.done() and not future.cancelled() and future.exception() is None:
            kind = type(error)
            runner.submit(lambda cache: manager.__aexit__(kind, kind(), None))
        raise


class BlockingStream(Iterator[tuple[Any, Any]]):
    """Blocks in order while later ones load; dropping it, or leaving its ``with``, frees what was read ahead."""

    def __init__(self, runner: _Runner, stream: Any) -> None:
        self._runner = runner
        self._stream = stream

    def __iter__(self) -> BlockingStream:
        return self

    def __next__(self) -> tuple[Any, Any]:
        stream = self._stream
        if stream is None:
            raise StopIteration
        item = self._runner.run(lambda cache: _advance(stream))
        if item is _END:
            self._stream = None
            raise StopIteration
        pair: tuple[Any, Any] = item
        return pair

    def __enter__(self) -> BlockingStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_stream", None) is not None:
            self.close()

    def close(self) -> None:
        """Stop reading ahead; never waits."""
        stream, self._stream = self._stream, None
        if stream is not None:
            # After close, or in a forked child, nothing is held any more.
            with suppress(ClosedError, RuntimeError):
                self._runner.submit(lambda cache: stream.aclose())


async def _advance(stream: Any) -> Any:
    try:
        return await anext(stream)
    except StopAsyncIteration:
        return _END
