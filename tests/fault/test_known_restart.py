"""Restarts that other stores did not survive: files that go meanwhile, crash loops, warm keys computed again."""

from __future__ import annotations

import asyncio
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from levels import seed
from sickkit import SMALL
from storekit import (
    blocks,
    check_gauges,
    check_payload,
    child_environment,
    fill,
    flip,
    payload,
    recovered,
    settle,
)

import asynckv

LOG: dict[str, Any] = {"memory": "1MiB", "disk": "16MiB", "segment": "256KiB"}
COUNT = 60
SIZE = 50_000


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """A store of many segments: closed, and the same without its snapshot."""
    folder = tmp_path_factory.mktemp("stores")
    asyncio.run(fill(folder / "closed", {key: payload(key, 0, SIZE) for key in range(COUNT)}, **LOG))
    shutil.copytree(folder / "closed", folder / "scanned")
    (folder / "scanned" / "index.snap").unlink()
    return {True: folder / "closed", False: folder / "scanned"}


@pytest.mark.parametrize("snapshot", [True, False])
@pytest.mark.parametrize("which", ["oldest", "any"])
async def test_segments_that_somebody_deletes_during_an_opening_cost_no_other_block(tmp_path, stores, snapshot, which):
    # Fault kind RESTART: opening trips over a file that was there when it looked.
    rng = random.Random(seed("deleted"))
    found_after = 0
    for round_ in range(4):
        store = tmp_path / str(round_)
        shutil.copytree(stores[snapshot], store)
        segments = sorted(store.glob("*.seg"))
        assert len(segments) > 10
        # The newest one costs all others; it is spared once, so that something is found whatever is drawn.
        victims = segments[:4] if which == "oldest" else rng.sample(segments[: None if round_ else -1], 4)
        delay = 0.002 * round_

        def delete(victims: list[Path] = victims, delay: float = delay) -> None:
            time.sleep(delay)
            for victim in victims:
                victim.unlink()

        thread = threading.Thread(target=delete)
        thread.start()
        async with asyncio.timeout(20), asynckv.open(store, **LOG) as cache:
            await recovered(cache)
            thread.join()
            hits = set()
            for key in range(COUNT):
                found = await cache.get(key)
                assert found is None or bytes(found) == payload(key, 0, SIZE)
                if found is not None:
                    hits.add(key)
                del found
            if which == "oldest":  # four segments of at most five blocks
                assert hits >= set(range(20, COUNT))
            found_after += len(hits)
            assert await cache.put("new", b"taken")
            await cache.flush()
            check_gauges(cache.stats())
        async with asynckv.open(store, **LOG) as cache:
            assert bytes(await cache.get("new")) == b"taken"
            again = {key for key in range(COUNT) if await cache.get(key) is not None}
        assert again <= hits, "what was missed does not come back"
        shutil.rmtree(store)
    assert found_after > 0


WRITER = """
import asyncio, sys, asynckv
async def main():
    async with asynckv.open(sys.argv[1], memory="1MiB", disk="4MiB", segment="256KiB") as cache:
        kept = await cache.get(int(sys.argv[3]) - 1)
        assert kept is None or bytes(kept) == bytes([int(sys.argv[3]) - 1]) * 30_000
        del kept
        print("open", flush=True)
        while True:
            await cache.put(int(sys.argv[3]), bytes([int(sys.argv[3])]) * 30_000)
            await asyncio.gather(*(cache.put(key, bytes([key]) * 30_000) for key in range(100, 140)))
            if sys.argv[2] == "flush":
                await cache.flush()
                print("flushed", flush=True)
asyncio.run(main())
"""


def test_a_store_killed_in_its_puts_five_times_opens_each_time(tmp_path):
    # Fault kind RESTART: a crash leaves what makes the next start crash too. The snapshot is damaged on the way.
    store = tmp_path / "kv"
    for life in range(5):
        how = ("flush", "pressure")[life % 2]
        child = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(store), how, str(life)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=child_environment(),
        )  # fmt: skip
        assert child.stdout.readline() == "open\n", child.stderr.read()
        if how == "flush":
            assert child.stdout.readline() == "flushed\n"
        time.sleep(0.01 * life)
        child.kill()
        child.communicate()
        assert child.returncode == -signal.SIGKILL
        if life % 2:
            (store / "index.snap").write_bytes(random.Random(life).randbytes(20_000))
            (store / "index.snap").chmod(0o600)
        for _ in range(2):
            asyncio.run(look_at_killed(store, life if how == "flush" else None))


async def look_at_killed(store: Path, flushed: int | None) -> None:
    async with asynckv.open(store, memory="1MiB", disk="4MiB", segment="256KiB") as cache:
        await recovered(cache)
        for key in [*range(5), *range(100, 140)]:
            found = await cache.get(key)
            assert found is None or bytes(found) == bytes([key]) * 30_000
            assert found is not None or key != flushed
            del found
        await settle(cache)
        stats = cache.stats()
        check_gauges(stats)
        assert stats.corrupt_blocks == 0
        assert all(map(cache.tier, cache.keys()))
        assert len(cache.keys()) == len(cache)


async def test_a_snapshot_that_was_damaged_never_keeps_a_store_from_opening(tmp_path, stores):
    # Fault kind RESTART: the same bad snapshot is read again at each start.
    rng = random.Random(seed("snapshot"))
    store = tmp_path / "kv"
    shutil.copytree(stores[True], store)
    for round_ in range(10):
        snapshot = store / "index.snap"
        assert snapshot.exists(), "each clean close leaves a new one"
        size = snapshot.stat().st_size
        if round_ % 3 == 0:
            snapshot.write_bytes(snapshot.read_bytes()[: rng.randrange(size)])
        else:
            for _ in range(round_):
                flip(snapshot, rng.randrange(size), 1 << rng.randrange(8))
        async with asynckv.open(store, **LOG) as cache:
            for key in range(COUNT):
                assert bytes(await cache.get(key)) == payload(key, 0, SIZE), "the log has it all"
            await cache.put("round", b"%d" % round_)


async def test_ranks_that_share_a_directory_never_read_the_bytes_of_another(tmp_path):
    # Fault kind KEY: file names or keys without the rank. One owner at a time, so one rank after the other.
    keys = asynckv.prefix_keys(range(64), 16)
    for version in range(2):
        for rank in range(4):
            namespace = asynckv.Namespace(model="m", tp_rank=rank, tp_size=4)
            async with asynckv.open(tmp_path / "kv", **SMALL, namespace=namespace) as cache:
                await recovered(cache)
                for number, key in enumerate(keys):
                    found = await cache.get(key)
                    expected = payload(number, 10 * rank, 5000) if version else None
                    assert (None if found is None else bytes(found)) == expected
                    del found
                    await cache.put(key, payload(number, 10 * rank, 5000))


async def test_every_way_to_read_is_warm_after_a_restart(tmp_path):
    # Fault kind SILENT: restored, and computed again all the same.
    await fill(tmp_path / "kv", blocks(12), **SMALL)
    for way in ("get", "get_many", "get_into", "get_many_into", "stream", "prefetch", "request"):
        computed = 0
        async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
            assert cache.match_prefix(range(12)) == 12
            found: list[Any] = []
            if way == "get":
                found = [bytes(await cache.get(key)) for key in range(12)]
            elif way == "get_many":
                found = [bytes(each) for each in await cache.get_many(range(12))]
            elif way in ("get_into", "get_many_into"):
                outs = [bytearray(1 << 16) for _ in range(12)]
                if way == "get_into":
                    for key, out in enumerate(outs):
                        assert await cache.get_into(key, out) == 1 << 16
                else:
                    assert await cache.get_many_into(range(12), outs) == [1 << 16] * 12
                found = [bytes(out) for out in outs]
            elif way == "stream":
                found = [bytes(block) async for _, block in cache.stream(range(12))]
            elif way == "request":
                async with cache.request(range(12)) as request:
                    found = [bytes(each) for each in await request.get_many()]
            else:
                assert cache.prefetch(range(12)) == 12
                await settle(cache)
                assert all(cache.tier(key) == "memory" for key in range(12))
                found = [bytes(await cache.get(key)) for key in range(12)]
            for key in range(12):
                if key >= len(found):
                    computed += 1
                else:
                    check_payload(key, found[key])
            stats = cache.stats()
            assert computed == stats.misses == 0
            assert stats.loaded_bytes == 12 << 16
            assert stats.disk_hits == (0 if way == "prefetch" else 12)


@pytest.mark.parametrize("state", ["missing", "empty", "a lock only", "a spare only"])
async def test_nothing_to_restore_is_an_empty_store(tmp_path, state):
    # Fault kind WRONG: a restore from nothing crashes, or spoils what there is.
    store = tmp_path / "kv"
    if state != "missing":
        store.mkdir(mode=0o700)
    if state == "a lock only":
        (store / "lock").touch(0o600)
    if state == "a spare only":
        (store / "spare").write_bytes(bytes(1 << 20))
    async with asynckv.open(store, **SMALL) as cache:
        assert await cache.get(1) is None
        assert (len(cache), cache.keys(), cache.match_prefix([1, 2])) == (0, [], 0)
        assert await cache.put("empty", b"")
        assert await cache.put("array", np.empty((0, 4), np.float16))
        await cache.flush()
        assert cache.stats().corrupt_blocks == 0
    async with asynckv.open(store, **SMALL, recover="strict") as cache:
        assert bytes(await cache.get("empty")) == b""
        assert (await cache.get("array")).shape == (0, 4)
