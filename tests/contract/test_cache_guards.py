"""Guards: the store belongs to one loop of one process, and says so; calls after close; bad options."""

from __future__ import annotations

import asyncio
import os
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from storekit import blocks, check_idle, payload

import asynckv

SMALL = {"memory": "1MiB", "disk": "16MiB", "room_timeout": 0.3}

# Every call of the contract but close, closed and stats.
COROUTINES: dict[str, Callable[[asynckv.Cache], Any]] = {
    "put": lambda cache: cache.put(1, b"x"),
    "get": lambda cache: cache.get(1),
    "get absent": lambda cache: cache.get(999),
    "get_into": lambda cache: cache.get_into(1, bytearray(1 << 16)),
    "get_many": lambda cache: cache.get_many([1, 2]),
    "get_many_into": lambda cache: cache.get_many_into([1], [bytearray(1 << 16)]),
    "put_many": lambda cache: cache.put_many([(1, b"x")]),
    "delete": lambda cache: cache.delete(1),
    "delete_many": lambda cache: cache.delete_many([1]),
    "clear": lambda cache: cache.clear(),
    "flush": lambda cache: cache.flush(),
}
PLAIN: dict[str, Callable[[asynckv.Cache], Any]] = {
    "prefetch": lambda cache: cache.prefetch([1]),
    "match_prefix": lambda cache: cache.match_prefix([1]),
    "in": lambda cache: 1 in cache,
    "len": len,
    "tier": lambda cache: cache.tier(1),
    "keys": lambda cache: cache.keys(),
    "touch": lambda cache: cache.touch([1]),
}


async def _stream(cache: asynckv.Cache) -> None:
    async for _ in cache.stream([1]):
        pass


async def _reserve(cache: asynckv.Cache) -> None:
    async with cache.reserve(5, (4,), np.uint8) as array:
        array[:] = 1


async def _reserve_block(cache: asynckv.Cache) -> None:
    async with cache.reserve_block(5, 1, (4,), (4,), np.uint8) as block:
        block.key[:] = block.value[:] = 1


async def _request(cache: asynckv.Cache) -> None:
    async with cache.request([1]) as request:
        await request.get_many()


COMPOUND = {"stream": _stream, "reserve": _reserve, "reserve_block": _reserve_block, "request": _request}


def _drive(call: Any) -> Any:
    """Run a coroutine up to its first suspension, without a loop."""
    try:
        call.send(None)
    finally:
        call.close()


@pytest.mark.parametrize("name", [*COROUTINES, *COMPOUND])
async def test_a_waiting_call_after_close_raises_closed_error(tmp_path, name):
    cache = await asynckv.open(tmp_path / "kv", **SMALL)
    await cache.put(1, b"x")
    await cache.close()
    with pytest.raises(asynckv.ClosedError):
        await {**COROUTINES, **COMPOUND}[name](cache)


@pytest.mark.parametrize("name", PLAIN)
async def test_a_plain_call_after_close_raises_closed_error(tmp_path, name):
    cache = await asynckv.open(tmp_path / "kv", **SMALL)
    await cache.put(1, b"x")
    await cache.close()
    with pytest.raises(asynckv.ClosedError):
        PLAIN[name](cache)


@pytest.mark.parametrize("name", [*COROUTINES, *COMPOUND, *PLAIN, "close"])
async def test_a_call_from_another_thread_raises_and_changes_nothing(tmp_path, name):
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        await cache.put(1, payload(1))
        errors: list[BaseException | None] = []

        def foreign() -> None:
            try:
                if name in PLAIN:
                    PLAIN[name](cache)
                else:
                    _drive({**COROUTINES, **COMPOUND, "close": lambda c: c.close()}[name](cache))
            except BaseException as error:
                errors.append(error)
            else:
                errors.append(None)

        thread = threading.Thread(target=foreign)
        thread.start()
        thread.join()
        assert type(errors[0]) is RuntimeError
        assert not cache.closed
        assert bytes(await cache.get(1)) == payload(1)
        check_idle(cache)


@pytest.mark.parametrize("name", [*COROUTINES, *COMPOUND, *PLAIN, "close"])
async def test_a_call_from_another_loop_raises_and_changes_nothing(tmp_path, name):
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        await cache.put(1, payload(1))
        errors: list[BaseException | None] = []

        async def call() -> None:
            if name in PLAIN:
                PLAIN[name](cache)
            else:
                await {**COROUTINES, **COMPOUND, "close": lambda c: c.close()}[name](cache)

        def foreign() -> None:
            try:
                asyncio.run(call())
            except BaseException as error:
                errors.append(error)
            else:
                errors.append(None)

        thread = threading.Thread(target=foreign)
        thread.start()
        thread.join()
        assert type(errors[0]) is RuntimeError
        assert not cache.closed
        assert bytes(await cache.get(1)) == payload(1)


async def test_every_call_in_a_forked_child_raises_and_the_parent_goes_on(tmp_path):
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        await cache.put_many(blocks(4).items())
        await cache.flush()
        view = await cache.get(1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # 3.12: threads and fork; that is what is tested
            child = os.fork()
        if child == 0:
            status = 0
            try:
                every = {**COROUTINES, **COMPOUND, "close": lambda c: c.close()}
                for number, call in enumerate(every.values(), 1):
                    try:
                        _drive(call(cache))
                    except RuntimeError:
                        continue
                    except BaseException:
                        pass
                    status = status or number
                for number, call in enumerate(PLAIN.values(), 101):
                    try:
                        call(cache)
                    except RuntimeError:
                        continue
                    except BaseException:
                        pass
                    status = status or number
                del view  # a dead parent's view: dropping it must not touch the pool
            finally:
                os._exit(status)
        _, status = os.waitpid(child, 0)
        assert os.WIFEXITED(status), "the child died of a signal"
        assert os.WEXITSTATUS(status) == 0, "the number of the call that did not raise RuntimeError"
        assert bytes(view) == payload(1)
        for key in range(4):
            assert bytes(await cache.get(key)) == payload(key)
        assert await cache.put(9, payload(9))
        await cache.flush()
        del view


async def test_a_forked_child_that_exits_does_not_free_the_directory(tmp_path):
    async with asynckv.open(tmp_path / "kv", **SMALL):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        with pytest.raises(asynckv.StoreLockedError):
            await asynckv.open(tmp_path / "kv", **SMALL)


async def test_stats_and_closed_work_from_anywhere_at_any_time(tmp_path):
    cache = await asynckv.open(tmp_path / "kv", **SMALL)
    assert cache.closed is False
    await cache.put(1, b"x")
    await cache.close()
    assert cache.closed is True
    assert cache.stats().puts == 1


def test_plain_calls_while_the_loop_stands_still_work_or_change_nothing(tmp_path):
    with asyncio.Runner() as runner:

        async def opening() -> asynckv.Cache:
            async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
                await cache.put_many(blocks(4).items())
            return await asynckv.open(tmp_path / "kv", **SMALL)

        cache = runner.run(opening())
        refused = 0
        for call in PLAIN.values():
            try:
                call(cache)
            except RuntimeError:
                refused += 1

        async def rest() -> None:
            for key in range(4):
                assert bytes(await cache.get(key)) == payload(key)
            check_idle(cache)
            await cache.clear()
            assert check_idle(cache).memory_used == 0
            await cache.close()

        runner.run(rest())
        assert refused <= 1, "only prefetch has to have the loop running"


def test_an_unknown_option_is_a_type_error_at_once(tmp_path):
    with pytest.raises(TypeError, match="memroy"):
        asynckv.open(tmp_path / "kv", memroy="1MiB")
    assert not (tmp_path / "kv").exists()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("memory", "many"), ("memory", "12"), ("memory", -1), ("memory", 0), ("memory", "1 gigabyte"), ("memory", None),
        ("disk", "-1MiB"), ("disk", "4Gib"), ("disk", ""), ("disk", -5), ("segment", "x"),
        ("policy", "best"), ("engine", "warp"), ("recover", "maybe"), ("direct", "perhaps"),
        ("io_timeout", -1), ("room_timeout", float("nan")), ("persist_after", -1.0),
    ],
)  # fmt: skip
def test_a_bad_option_value_is_an_error_that_names_the_option(tmp_path, name, value):
    with pytest.raises(ValueError, match=name):
        asynckv.open(tmp_path / "kv", **{name: value})
    assert not (tmp_path / "kv").exists()


@pytest.mark.parametrize("value", ["1024", "fast", "12 XB"])
def test_a_bad_size_names_the_accepted_forms(tmp_path, value):
    with pytest.raises(ValueError, match=r"memory.*KiB.*GB"):
        asynckv.open(tmp_path / "kv", memory=value)


@pytest.mark.parametrize(
    ("text", "size"),
    [("1MiB", 1 << 20), ("1MB", 10**6), ("512KiB", 512 << 10), (65536, 65536), (np.int64(65536), 65536)],
)
async def test_sizes_are_ints_or_strings_with_a_unit(tmp_path, text, size):
    async with asynckv.open(tmp_path / "kv", memory=text, disk=0) as cache:
        assert cache.stats().memory_capacity == size


def test_a_disk_below_four_segments_is_refused(tmp_path):
    with pytest.raises(ValueError, match="disk"):
        asynckv.open(tmp_path / "kv", disk="3MiB", segment="1MiB")
    with pytest.raises(ValueError, match="disk"):
        asynckv.open(tmp_path / "kv", disk=1000)


def test_a_pool_larger_than_the_machine_is_refused(tmp_path):
    with pytest.raises(ValueError, match="memory"):
        asynckv.open(tmp_path / "kv", memory="4096GiB", disk=0)


def test_all_errors_share_one_base():
    for error in (
        asynckv.ClosedError, asynckv.BlockTooLargeError, asynckv.NoRoomError, asynckv.StoreLockedError,
        asynckv.CorruptStoreError, asynckv.UnsafeDirectoryError, asynckv.DiskError,
    ):  # fmt: skip
        assert issubclass(error, asynckv.AsyncKVError)
    assert issubclass(asynckv.BlockTooLargeError, ValueError)
    assert issubclass(asynckv.UnsafeDirectoryError, PermissionError)
    assert issubclass(asynckv.DiskError, OSError)


async def test_every_way_to_build_a_store_works_or_says_why_not(tmp_path):
    # Fault kind CRASH: start-up dies for some settings.
    memories = [64, 65, 4096, 100_000, 1 << 20]
    disks = [0, 1 << 18, (1 << 18) + 1, 1_000_003, 1 << 22]
    segments: list[Any] = [None, 1 << 16, 100_000, 1 << 20]
    opened, refusals = 0, []
    for number, (memory, disk, segment) in enumerate((m, d, s) for m in memories for d in disks for s in segments):
        options = {} if segment is None else {"segment": segment}
        try:
            opening = asynckv.open(tmp_path / f"kv{number}", memory=memory, disk=disk, room_timeout=0.05, **options)
        except ValueError as error:
            refusals.append(str(error))
            continue
        opened += 1
        async with opening as cache:
            assert await cache.put(1, b"x" * min(memory, 50))
            assert bytes(await cache.get(1)) == b"x" * min(memory, 50)
            if disk:
                await cache.flush()
    assert opened >= 60
    assert all("disk" in text or "segment" in text for text in refusals)
