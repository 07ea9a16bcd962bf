"""Ends that other stores got wrong: aborts at exit, handles freed under their readers."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import threading
import time

import pytest
import uvloop
from levels import count, rounds, seed
from sickkit import SMALL
from storekit import blocks, crash_image, fill, payload, python, recovered

import asynckv
from asynckv.backends import create_backend
from asynckv.testing import FaultyBackend, Script, hang

EXIT = """
import asyncio, random, sys, threading, asynckv
directory, how, first, engine = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
rng = random.Random(first)
options = dict(memory="1MiB", disk="16MiB", engine=engine)
async def work(cache):
    for key in range(40):
        await cache.put(key, bytes([key]) * 60_000)
    kept = [await cache.get(39)] if "view" in how else []
    calls = [
        cache.flush, lambda: cache.get(0), lambda: cache.get_many(range(8)), lambda: cache.put(50, bytes(60_000)),
        cache.clear,
    ]
    tasks = [asyncio.create_task(call()) for call in calls if rng.random() < 0.6]
    cache.prefetch(range(rng.randrange(1, 10)))
    for _ in range(rng.randrange(6)):
        await asyncio.sleep(0)
    return kept, tasks
async def main():
    cache = await asynckv.open(directory, **options)
    globals()["everything"] = [cache, *await work(cache)]
    if "closed" in how:
        await cache.close()
        await asyncio.gather(*everything[2], return_exceptions=True)
    if "raise" in how:
        raise SystemExit(0)
    if "dropped" in how:
        del globals()["everything"]
if "threads" in how:
    cache = asynckv.BlockingCache(directory, **options)
    futures = [cache.submit_put_many([(key, bytes(60_000))]) for key in range(30)]
    kept = cache.get(0)
    futures.append(cache.submit_get_many_into(range(4), [bytearray(60_000) for _ in range(4)]))
    def ask():
        try:
            while True:
                cache.get(rng.randrange(30))
        except asynckv.ClosedError:
            pass
    if "daemon" in how:
        threading.Thread(target=ask, daemon=True).start()
    if "closed" in how:
        cache.close()
else:
    asyncio.run(main())
"""

WAYS = (
    "dropped", "kept", "kept view", "closed", "closed view", "raise view",
    "threads", "threads closed", "threads daemon",
)  # fmt: skip


@pytest.mark.timeout(3600)
def test_processes_that_end_anyhow_end_well(tmp_path):
    # Fault kind SHUTDOWN: abort, traceback or hang at a clean exit, whatever is pending.
    rng = random.Random(seed("exits"))
    start = rng.randrange(len(WAYS))
    slowest = 0.0
    for number in rounds("exits"):
        how, engine = WAYS[(start + number) % len(WAYS)], ("auto", "threads", "aiofiles")[number % 3]
        began = time.monotonic()
        result = python(EXIT, tmp_path / "kv", how, rng.randrange(1 << 32), engine, check=False)
        slowest = max(slowest, time.monotonic() - began)
        assert result.returncode == 0, (how, engine, result.stderr)
        assert "Traceback" not in result.stderr, (how, engine, result.stderr)
        assert "Fatal" not in result.stderr, (how, engine, result.stderr)

        async def look() -> None:
            async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
                for key in range(51):
                    found = await cache.get(key)
                    assert found is None or bytes(found) in (bytes([key]) * 60_000, bytes(60_000))
                    del found

        asyncio.run(look())
    assert slowest < 20.0  # five on a machine of its own


HELD = """
import asyncio, sys, asynckv
from asynckv.backends import create_backend
from asynckv.testing import FaultyBackend, Script, hang
async def main():
    script, made = Script(), []
    def factory(engine, **settings):
        made.append(FaultyBackend(create_backend(engine, **settings), script, clock=settings["clock"]))
        return made[-1]
    options = dict(memory="1MiB", disk="4MiB", segment="256KiB")
    cache = await asynckv.open(sys.argv[1], **options, _backend_factory=factory)
    await cache.put_many((key, bytes(60_000)) for key in range(3))
    await cache.flush()
    await cache.put_many((key, bytes(60_000)) for key in range(10, 16))
    script.add("*", hang(), sticky=True)
    globals()["kept"] = cache, asyncio.create_task(cache.delete(0)), asyncio.create_task(cache.flush())
    while not made[0].held:
        await asyncio.sleep(0.001)
asyncio.run(main())
"""


def test_a_loop_that_ends_while_a_segment_is_made_leaves_no_traceback(tmp_path):
    # The writer begins again for the delete, and is destroyed with its loop: it must start nothing more.
    result = python(HELD, tmp_path / "kv")
    assert "Traceback" not in result.stderr, result.stderr
    assert "never" not in result.stderr, result.stderr


@pytest.mark.timeout(3600)
def test_closes_under_readers_on_threads_give_values_or_closed_errors_only(tmp_path):
    # Fault kind UAF: a handle freed under a running call.
    asyncio.run(fill(tmp_path / "kv", blocks(24), **SMALL))
    rng = random.Random(seed("closes"))
    answers = {"value": 0, "closed": 0}
    troubles: list[BaseException] = []
    for _ in rounds("closes under readers"):
        cache = asynckv.BlockingCache(tmp_path / "kv", **SMALL)
        ready = threading.Barrier(5)

        def read(number: int, cache: asynckv.BlockingCache = cache, ready: threading.Barrier = ready) -> None:
            key = number
            ready.wait()
            try:
                while True:
                    key = (key + 5) % 24
                    if number == 3:
                        for each, found in cache.stream([key, key + 1]):
                            assert bytes(found) == payload(each)
                            del found
                    found = cache.get(key) if number else cache.get_many([key, (key + 1) % 24])[0]
                    assert found is None or bytes(found) == payload(key)
                    del found
                    answers["value"] += 1
            except asynckv.ClosedError:
                answers["closed"] += 1
            except BaseException as error:
                troubles.append(error)

        threads = [threading.Thread(target=read, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        ready.wait()
        time.sleep(rng.random() * 0.02)
        cache.close()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
        assert not troubles
    assert answers["closed"] == 4 * count("closes under readers")
    assert answers["value"] > answers["closed"]


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("where", ["write", "sync", "read", "stat", "rename"])
def test_a_store_collected_with_its_closed_loop_says_nothing(tmp_path, monkeypatch, where, new_loop):
    """Its tasks are cleaned up when the loop is gone: whatever they call then fails, which is nobody's fault."""
    directory, script = tmp_path / "image", Script()
    failures = []

    class Listener(logging.Handler):
        def emit(self, record):
            if record.exc_info:
                failures.append(record.getMessage())

    # Records that were kept would keep the errors in them, and with their frames the store.
    monkeypatch.setattr(logging.getLogger("asynckv"), "propagate", False)
    monkeypatch.setattr(logging.getLogger("asynckv"), "handlers", [Listener()])

    async def leave():
        async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
            await cache.put_many((key, bytes(30_000)) for key in range(24))
            await cache.flush()
            crash_image(tmp_path / "kv", directory)

    def factory(engine, **options):
        return FaultyBackend(create_backend("threads", **options), script, clock=options["clock"])

    async def main():
        await leave()
        if where == "read":  # of the recovery
            script.add("read", hang(), nth=9, sticky=True)
        cache = await asynckv.open(directory, **SMALL, _backend_factory=factory)
        if where != "read":
            await recovered(cache)
            script.add(where, hang(), sticky=True)
        for key in range(100):
            await asyncio.wait([asyncio.ensure_future(cache.put(key, bytes(30_000)))], timeout=0.01)
        flush = asyncio.ensure_future(cache.flush())
        for _ in range(1000):
            if script.injected.total():
                break
            await asyncio.sleep(0.002)
        assert script.injected.total()
        flush.cancel()

    loop = new_loop()
    loop.run_until_complete(main())
    loop.close()
    for _ in range(100):  # what the tasks held goes some rounds later, and its threads a moment after that
        gc.collect()
        if not any(thread.name.startswith("asynckv") for thread in threading.enumerate()):
            break
        time.sleep(0.02)
    assert not failures
