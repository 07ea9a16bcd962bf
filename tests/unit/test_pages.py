"""The pool's pages come ahead of its use, on a thread, and change nothing; copies are spread over turns of the loop."""

from __future__ import annotations

import asyncio
import resource
import threading
from itertools import pairwise

import pytest

import asynckv
from asynckv import pages as pages_module
from asynckv._core import Table
from asynckv.beside import beside
from asynckv.pages import Pages

KIB, MIB = 1 << 10, 1 << 20


def put(table, key, size):
    assert table.put(key, table.draft(bytes([key]) * size))


def no_thread_is_left():
    return not [thread for thread in threading.enumerate() if thread.name == "asynckv-beside"]


def test_pages_are_wanted_ahead_of_use_from_both_ends():
    table = Table(4 * MIB)
    assert table.pages_wanted(MIB) == (0, MIB)
    assert table.pages_wanted(MIB) == (0, MIB)  # asking changes nothing
    table.pages_ready(0, MIB)
    assert table.pages_wanted(MIB) == (4 * MIB - 128 * KIB, 4 * MIB)  # where small blocks come from
    table.pages_ready(4 * MIB - 128 * KIB, 4 * MIB)
    assert table.pages_wanted(MIB) is None
    for key in range(8):  # large ones from the bottom: half of what is ahead
        put(table, key, 64 * KIB)
    assert table.pages_wanted(MIB) is None
    put(table, 8, 64 * KIB)
    assert table.pages_wanted(MIB) == (MIB, 9 * 64 * KIB + MIB)
    table.pages_ready(MIB, 9 * 64 * KIB + MIB)
    for key in range(100):
        table.put(1000 + key, table.draft(b"s" * 2000))
    start, end = table.pages_wanted(MIB)
    assert end == 4 * MIB - 128 * KIB
    assert end - 260 * KIB < start < end - 190 * KIB
    assert start % 4096 == 0
    table.pages_ready(start, end)
    table.pages_ready(9 * 64 * KIB + MIB, start)  # the two ends meet
    assert table.pages_wanted(4 * MIB) is None


def test_a_hole_is_no_new_ground():
    table = Table(4 * MIB)
    for key in range(16):
        put(table, key, 64 * KIB)
    table.pages_ready(0, 2 * MIB)
    table.pages_ready(3 * MIB, 4 * MIB)
    table.remove(3)
    table.put(100, table.draft(b"small" * 20))  # into the hole, the best fit
    assert table.where(100) is None
    assert table.pages_wanted(MIB) is None


def test_touching_changes_no_byte_while_others_write():
    table = Table(8 * MIB)
    stop = threading.Event()
    toucher = threading.Thread(target=lambda: [table.touch_pages(0, 8 * MIB) for _ in iter(stop.is_set, True)])
    toucher.start()
    try:
        for turn in range(60):
            for key in range(8):
                assert table.put(key, table.draft(bytes([(key + turn) % 251]) * 1_000_000))
            for key in range(8):
                assert bytes(table.get(key)) == bytes([(key + turn) % 251]) * 1_000_000
    finally:
        stop.set()
        toucher.join()
    with pytest.raises(ValueError, match="outside"):
        table.touch_pages(0, 8 * MIB + 1)
    mapping = table.close()
    assert mapping is not None
    table.touch_pages(0, 8 * MIB)  # a thread that comes too late
    assert table.close() is None


def test_touching_makes_pages_resident():
    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()

    table = Table(128 * MIB)
    before = resident()
    table.touch_pages(0, 96 * MIB)
    assert 90 * MIB < resident() - before < 120 * MIB


@pytest.fixture
def ranges(monkeypatch):
    """The ranges that got their pages, None for what was given back; 512 KiB ahead of use."""
    found = []

    def noting(loop, job):
        found.append(getattr(job, "args", None))
        return beside(loop, job)

    monkeypatch.setattr(pages_module, "AHEAD_BYTES", 512 * KIB)
    monkeypatch.setattr(pages_module, "beside", noting)
    return found


async def test_a_store_that_fills_gets_its_pages_piece_by_piece(ranges):
    cache = await asynckv.open("unused", memory="4MiB", disk=0)
    assert ranges[0] == (0, 512 * KIB)  # before it opens
    for key in range(48):
        assert await cache.put(key, bytes([key]) * (64 * KIB))
        await asyncio.sleep(0.001)
    assert len(ranges) > 4
    assert sum(end - start for start, end in ranges) <= 4 * MIB  # none twice
    await cache.close()
    assert ranges.pop() is None  # the memory given back, beside the loop as well
    assert no_thread_is_left()


async def test_reloads_and_reservations_bring_pages_too(ranges, tmp_path):
    async with asynckv.open(tmp_path / "kv", memory="4MiB", disk="16MiB") as cache:
        for key in range(40):
            async with cache.reserve(key, (64 * KIB,), "u1") as array:
                array[:] = key
            await asyncio.sleep(0.001)
        assert len([each for each in ranges if each]) > 4
    ranges.clear()
    async with asynckv.open(tmp_path / "kv", memory="4MiB", disk="16MiB") as cache:
        for key in range(40):
            assert await cache.get(key) is not None
        assert len([each for each in ranges if each]) > 4


@pytest.mark.parametrize("when", ["refused", "closed"])
async def test_pages_without_a_thread_or_a_table(monkeypatch, when):
    table = Table(MIB)
    pages = Pages(asyncio.get_running_loop(), table)
    if when == "refused":

        def start(self):
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(threading.Thread, "start", start)
        await pages.open()
        assert table.pages_wanted(pages_module.AHEAD_BYTES) is None
    else:
        pages.look()
    await pages.close()
    assert table.closed
    pages.look()
    assert no_thread_is_left()


async def test_views_outlive_the_table():
    cache = await asynckv.open("unused", memory="1MiB", disk=0)
    assert await cache.put(1, b"one" * 1000)
    view = await cache.get(1)
    await cache.close()
    assert bytes(view) == b"one" * 1000


@pytest.mark.parametrize("call", ["put", "put_many", "get_into"])
async def test_calls_share_what_one_turn_may_copy(call):
    """Eight calls of 2 MiB each in one turn of the loop: one copies, the others wait their turn, in order."""
    blocks = {key: bytes([key]) * (2 * MIB) for key in range(8)}
    async with asynckv.open("unused", memory="64MiB", disk=0) as cache:
        done = []
        outs = [bytearray(2 * MIB) for _ in blocks]

        async def one(key):
            if call == "put":
                assert await cache.put(key, blocks[key])
            elif call == "put_many":
                assert await cache.put_many({key: blocks[key]}) == [True]
            else:
                assert await cache.get_into(key, outs[key]) == 2 * MIB
                assert outs[key] == blocks[key]
            done.append(key)

        if call == "get_into":
            assert all(await cache.put_many(blocks))
            await asyncio.sleep(0)
        tasks = [asyncio.create_task(one(key)) for key in blocks]
        turns = [0]
        while len(done) < len(blocks):
            await asyncio.sleep(0)
            copied = sum(bool(out[0] or out[-1]) for out in outs) if call == "get_into" else len(cache)
            turns.append(copied)
        await asyncio.gather(*tasks)
        assert max(later - earlier for earlier, later in pairwise(turns)) <= 1
        assert sorted(done) == list(blocks)
        if call != "get_into":
            assert [bytes((await cache.get(key))[:1]) for key in blocks] == [bytes([key]) for key in blocks]


@pytest.mark.parametrize("greedy", ["put", "get_into"])
@pytest.mark.parametrize("other", ["put", "put_many", "get_into", "get from disk"])
async def test_who_copies_all_the_time_starves_nobody(tmp_path, greedy, other):
    """Four tasks take every turn's copy right again and again; another call ends all the same."""
    options = {"memory": "16MiB", "disk": "256MiB", "room_timeout": 2.0}
    async with asynckv.open(tmp_path / "kv", **options) as cache:
        for key in range(20):  # the first ones end on disk only
            assert await cache.put(key, bytes(2 * MIB))
        await cache.flush()
        assert cache.tier(0) == "disk"
        assert await cache.put(100, bytes(2 * MIB))
        running = True

        async def take(number):
            out = bytearray(2 * MIB)
            while running:
                if greedy == "put":
                    await cache.put(200, bytes(2 * MIB))
                else:
                    await cache.get_into(100, out)

        tasks = [asyncio.create_task(take(number)) for number in range(4)]
        await asyncio.sleep(0.02)
        try:
            async with asyncio.timeout(1.5):
                if other == "put":
                    assert await cache.put(300, b"small")
                elif other == "put_many":
                    assert await cache.put_many([(key, b"small") for key in range(300, 305)]) == [True] * 5
                elif other == "get_into":
                    assert await cache.get_into(100, bytearray(2 * MIB)) == 2 * MIB
                else:
                    assert await cache.get(0) is not None
        finally:
            running = False
            await asyncio.gather(*tasks)


async def test_small_copies_in_a_row_let_the_loop_turn():
    async with asynckv.open("unused", memory="1MiB", disk=0) as cache:
        assert await cache.put(1, b"x" * 60)
        out, turns = bytearray(60), 0

        def turn():
            nonlocal turns
            turns += 1
            asyncio.get_running_loop().call_soon(turn)

        asyncio.get_running_loop().call_soon(turn)
        for _ in range(20_000):
            await cache.get_into(1, out)
        assert turns >= 10
