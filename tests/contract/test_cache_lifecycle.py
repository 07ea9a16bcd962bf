"""Life cycle: opening, closing with calls in progress, leaving without close, what a process keeps after it."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
import time
import warnings

import numpy as np
import pytest
from signalkit import alarms
from storekit import BLOCK, blocks, fill, payload, python, settle, until

import asynckv

SMALL = {"memory": "1MiB", "disk": "16MiB", "room_timeout": 0.3}


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_a_store_is_opened_by_async_with_or_by_await(tmp_path):
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        assert isinstance(cache, asynckv.Cache)
        await cache.put(1, b"x")
    assert cache.closed
    cache = await asynckv.open(tmp_path / "kv", **SMALL)
    assert bytes(await cache.get(1)) == b"x"
    await cache.close()


async def test_what_is_not_open_says_so(tmp_path):
    opening = asynckv.open(tmp_path / "kv", **SMALL)
    with pytest.raises(AttributeError, match="no 'put' yet: open it first"):
        opening.put(1, b"x")
    async with opening as cache:
        pass
    with pytest.raises(asynckv.ClosedError):
        async with cache:
            pass
    blocking = asynckv.BlockingCache(tmp_path / "kv", **SMALL)
    blocking.close()
    with pytest.raises(asynckv.ClosedError), blocking:
        pass


async def test_a_directory_below_a_file_is_an_error_that_says_so(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(asynckv.DiskError, match="Not a directory"):
        await asynckv.open(tmp_path / "file" / "kv", **SMALL)


async def test_a_directory_may_be_a_string_or_a_path_with_missing_parents(tmp_path):
    async with asynckv.open(str(tmp_path / "a"), **SMALL) as cache:
        await cache.put(1, b"x")
    assert (tmp_path / "a").is_dir()


async def test_close_is_idempotent_and_may_be_called_by_many_at_once(tmp_path):
    cache = await asynckv.open(tmp_path / "kv", **SMALL)
    await cache.put(1, payload(1))
    await asyncio.gather(*(cache.close() for _ in range(5)))
    await cache.close()
    assert cache.closed


async def test_an_exception_inside_the_block_still_closes_and_flushes(tmp_path):
    with pytest.raises(ZeroDivisionError):
        async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
            await cache.put(1, payload(1))
            raise ZeroDivisionError
    assert cache.closed
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        assert bytes(await cache.get(1)) == payload(1)


async def test_close_lets_waiting_calls_finish(tmp_path):
    await fill(tmp_path / "kv", blocks(8), **SMALL)
    cache = await asynckv.open(tmp_path / "kv", **SMALL)
    gets = [asyncio.create_task(cache.get(key)) for key in range(8)]
    puts = [asyncio.create_task(cache.put(key, payload(key))) for key in range(100, 130)]
    await asyncio.sleep(0)
    await cache.close()
    assert [bytes(await get) for get in gets] == [payload(key) for key in range(8)]
    assert all([await put for put in puts])
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        for key in range(100, 130):
            assert bytes(await cache.get(key)) == payload(key)


async def test_close_is_not_cut_short_by_cancellation(tmp_path):
    cache = await asynckv.open(tmp_path / "kv", **SMALL)
    await cache.put_many(blocks(12).items())
    closing = asyncio.create_task(cache.close())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.wait([closing])
    assert cache.closed
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        for key in range(12):
            assert bytes(await cache.get(key)) == payload(key)


async def test_views_outlive_the_store_many_times_over(tmp_path):
    # Fault kind UAF: a result that outlives the store is freed through a dead allocator.
    kept = []
    for round_ in range(60):
        async with asynckv.open(tmp_path / "kv", memory="256KiB", disk="1MiB") as cache:
            await cache.put(round_, payload(round_))
            await cache.put("array", np.arange(500))
            kept.append((round_, await cache.get(round_), await cache.get("array")))
        del cache
        if len(kept) > 10:
            number, view, array = kept.pop(0)
            assert bytes(view) == payload(number)
            assert (array == np.arange(500)).all()
            del view, array
    gc.collect()
    for number, view, array in kept:
        assert bytes(view) == payload(number)
        assert (array == np.arange(500)).all()


async def test_close_racing_readers_gives_values_or_closed_errors_only(tmp_path):
    # Fault kind UAF: a handle freed under a running call.
    await fill(tmp_path / "kv", blocks(24), **SMALL)
    for round_ in range(25):
        cache = await asynckv.open(tmp_path / "kv", **SMALL)
        ends = []

        async def read(start: int, cache: asynckv.Cache = cache, ends: list[int] = ends) -> None:
            key = start
            try:
                while True:
                    key = (key + 5) % 24
                    found = await cache.get(key)
                    assert found is None or bytes(found) == payload(key)
                    del found
                    await asyncio.sleep(0)
            except asynckv.ClosedError:
                ends.append(start)

        readers = [asyncio.create_task(read(start)) for start in range(8)]
        for _ in range(round_):
            await asyncio.sleep(0)
        async with asyncio.timeout(10):
            await cache.close()
            await asyncio.gather(*readers)
        assert sorted(ends) == list(range(8))


async def test_many_stores_after_each_other_leave_no_files_and_no_threads(tmp_path):
    # Fault kind LEAK: contexts kept per loop or per store.
    async def once() -> None:
        async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
            await cache.put(1, payload(1))
            await cache.flush()

    await once()
    gc.collect()
    files, threads = open_files(), threading.active_count()
    for _ in range(25):
        await once()
    gc.collect()
    assert open_files() <= files
    assert threading.active_count() <= threads


@pytest.mark.parametrize("existing", [False, True])
async def test_a_cancelled_open_leaves_no_lock_no_file_and_no_thread(tmp_path, existing):
    if existing:
        await fill(tmp_path / "kv", blocks(4), **SMALL)
    async with asynckv.open(tmp_path / "warm", **SMALL):
        pass
    gc.collect()
    files, threads = open_files(), threading.active_count()
    for turns in range(40):
        opening = asyncio.ensure_future(asynckv.open(tmp_path / "kv", **SMALL).__aenter__())
        for _ in range(turns):
            await asyncio.sleep(0.0002 if turns > 20 else 0)
        if opening.done():
            await opening.result().close()
            continue
        opening.cancel()
        await asyncio.wait([opening])
        if not opening.cancelled():
            await opening.result().close()
        del opening
    gc.collect()
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        assert await cache.put(1, payload(1, 5))
        assert bytes(await cache.get(1)) == payload(1, 5)
    assert open_files() <= files
    await until(lambda: threading.active_count() <= threads)  # a thread tells that it is done before it ends


@pytest.mark.parametrize("disk", ["16MiB", 0])
async def test_a_close_lets_calls_of_several_steps_take_the_last(tmp_path, disk):
    async with asynckv.open(tmp_path / "kv", memory="8MiB", disk=disk) as cache:
        assert all(await cache.put_many((key, payload(key)) for key in range(100)))
        outs = [bytearray(65536) for _ in range(100)]
        reading = asyncio.create_task(cache.get_many_into(range(100), outs))
        await asyncio.sleep(0)
        deleting = asyncio.create_task(cache.delete_many(range(1000, 5000)))
        await asyncio.sleep(0)
        await cache.close()
        assert await reading == [65536] * 100
        assert await deleting == 0
    assert all(bytes(out) == payload(key) for key, out in enumerate(outs))


async def test_a_store_that_was_never_closed_warns_when_it_is_collected(tmp_path):
    cache = await asynckv.open(tmp_path / "kv", memory="1MiB", disk=0)
    with pytest.warns(ResourceWarning, match="unclosed"):
        del cache
        gc.collect()


EXIT = """
import asyncio, sys, asynckv
async def main():
    cache = await asynckv.open(sys.argv[1], memory="1MiB", disk="16MiB")
    for key in range(40):
        await cache.put(key, bytes([key]) * 65536)
    if sys.argv[2] == "view":
        globals()["kept"] = [await cache.get(39)]
    if sys.argv[2] == "pending":
        globals()["tasks"] = [asyncio.create_task(cache.flush()), asyncio.create_task(cache.get(0))]
        cache.prefetch(range(8))
        await asyncio.sleep(0)
    if sys.argv[2] == "kept":
        globals()["cache"] = cache
    if sys.argv[2] == "closed":
        await cache.close()
        globals()["kept"] = cache
if sys.argv[3] == "uvloop":
    import uvloop
    uvloop.run(main())
else:
    asyncio.run(main())
"""


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("how", ["dropped", "view", "pending", "kept", "closed"])
def test_a_process_that_exits_without_close_ends_at_once_and_cleanly(tmp_path, how, loop):
    # Fault kind SHUTDOWN: abort or hang at interpreter exit.
    started = time.monotonic()
    result = python(EXIT, tmp_path / "kv", how, loop)
    assert time.monotonic() - started < 10
    assert "Traceback" not in result.stderr
    assert "Error" not in result.stderr


async def test_after_an_exit_without_close_the_store_opens_and_serves_no_wrong_byte(tmp_path):
    python(EXIT, tmp_path / "kv", "kept", "asyncio")
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        for key in range(40):
            found = await cache.get(key)
            assert found is None or bytes(found) == bytes([key]) * 65536
            del found


async def test_leaving_with_puts_flush_and_prefetch_pending_closes_warm(tmp_path):
    script = """
import asyncio, sys, asynckv
async def main():
    async with asynckv.open(sys.argv[1], memory="1MiB", disk="16MiB") as cache:
        tasks = [asyncio.create_task(cache.put(key, bytes([key]) * 65536)) for key in range(40)]
        tasks.append(asyncio.create_task(cache.flush()))
        cache.prefetch(range(40))
        await asyncio.sleep(0)
    await asyncio.gather(*tasks)
asyncio.run(main())
"""
    started = time.monotonic()
    result = python(script, tmp_path / "kv")
    assert time.monotonic() - started < 10
    assert [line for line in result.stderr.splitlines() if not line.startswith("io_uring is not used")] == []
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        assert len(cache) == 40
        for key in range(40):
            assert bytes(await cache.get(key)) == bytes([key]) * 65536


@pytest.mark.skipif(sys.platform == "win32", reason="interval timers are POSIX")
async def test_a_timer_signal_at_a_kilohertz_disturbs_nothing(tmp_path):
    # Fault kind CRASH: EINTR not handled.
    with alarms() as seen:
        async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
            for key in range(200):
                assert await cache.put(key % 50, payload(key % 50, key))
                found = await cache.get(key * 7 % 50)
                assert found is None or len(found) == BLOCK
                del found
            await cache.flush()
            await settle(cache)
            stats = cache.stats()
            assert (stats.io_errors, stats.corrupt_blocks) == (0, 0)
    assert len(seen) > 10


def test_one_process_may_run_many_loops_one_after_the_other(tmp_path):
    async def once(round_: int) -> None:
        async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
            if round_:
                assert bytes(await cache.get(0)) == payload(0, round_ - 1)
            await cache.put(0, payload(0, round_))

    for round_ in range(10):
        asyncio.run(once(round_))


async def test_two_stores_in_one_loop_do_not_mix(tmp_path):
    async with (
        asynckv.open(tmp_path / "a", **SMALL) as a,
        asynckv.open(tmp_path / "b", **SMALL) as b,
    ):
        for key in range(40):
            await asyncio.gather(a.put(key, payload(key, 1)), b.put(key, payload(key, 2)))
        for key in range(40):
            assert bytes(await a.get(key)) == payload(key, 1)
            assert bytes(await b.get(key)) == payload(key, 2)


async def test_opening_warns_of_nothing(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
            await cache.put(1, b"x")


def test_a_store_owned_by_a_task_that_the_ending_loop_cancels_closes_warm(tmp_path):
    async def owner(ready: asyncio.Event) -> None:
        async with asynckv.open(tmp_path / "kv", memory="1MiB", disk="4MiB") as cache:
            for key in range(10):
                await cache.put(key, bytes(5000))
            ready.set()
            await asyncio.sleep(1000)

    async def leave() -> None:
        ready = asyncio.Event()
        task = asyncio.create_task(owner(ready))
        await ready.wait()
        assert not task.done()

    async def look() -> None:
        async with asynckv.open(tmp_path / "kv", memory="1MiB", disk="4MiB") as cache:
            assert sorted(cache.keys()) == list(range(10))

    asyncio.run(leave())
    asyncio.run(look())


async def test_flush_delete_and_close_work_after_every_other_task_was_cancelled(tmp_path):
    async with asynckv.open(tmp_path / "kv", memory="1MiB", disk="4MiB") as cache:
        for key in range(10):
            await cache.put(key, bytes(5000))
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            if task.get_name().startswith("asynckv"):
                task.cancel()
        await asyncio.sleep(0)
        async with asyncio.timeout(10):
            await cache.flush()
            assert await cache.delete(3)
    async with asynckv.open(tmp_path / "kv", memory="1MiB", disk="4MiB") as cache:
        assert len(cache) == 9
