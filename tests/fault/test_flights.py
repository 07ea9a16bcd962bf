"""Reads that fly together: each lands verified, or falls with the reason; and none keeps its bytes for ever.

The engine is the real one, the ring real or `asynckv.testing.fakering.FakeRing`; a table stands for the store.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os

import pytest
from storekit import ring_refusal, until

from asynckv._core import Answers, Table
from asynckv.backends import ThreadsBackend
from asynckv.checksum import checksum
from asynckv.testing import FlyingBackend, Script, error, short
from asynckv.testing.clock import ManualClock
from asynckv.testing.fakering import FakeRing, late, lost, missing, partial
from asynckv.testing.tools import PAGE, pattern, turns

pytest.importorskip("asynckv._uring", reason="THE RING IS NOT BUILT: its flights are NOT checked in this run")

from asynckv.backends.uring import UringBackend

REFUSAL = ring_refusal()  # not from within a running loop
TIMEOUT = 1.0
SLOT = 3
SIZES = [PAGE, 2 * PAGE, 32768, 33_000, 65_536, 100_000, PAGE, 262_144]


class Sky:
    """A table with blocks that are in a file only, an engine, and a record of what became of their reads."""

    def __init__(self, directory, sizes, *, script=None, plain=False, entries=128, **options):
        self.directory = directory
        self.script = Script() if script is None else script
        self.table = Table(8 << 20, backed=True)
        self.ring = None

        def fake(count):
            self.ring = FakeRing(count, script=self.script)
            return self.ring

        if script is None and not plain and REFUSAL:
            pytest.skip(f"NO RING WORKS HERE ({REFUSAL}): its flights are NOT checked in this run")
        factory = {} if script is None else {"ring_factory": fake}
        if plain:
            self.backend = FlyingBackend(ThreadsBackend(**{"timeout": TIMEOUT, **options}))
        else:
            self.backend = UringBackend(**{"timeout": TIMEOUT, "entries": entries, **factory, **options})
        self.blocks = [pattern(size, seed) for seed, size in enumerate(sizes, 1)]
        self.landed = []
        self.fallen = []
        self.released = []
        self.overs = 0
        self.seconds = []

    async def __aenter__(self):
        await self.backend.start(self.directory)
        data, places = bytearray(), []
        for block in self.blocks:
            places.append(len(data))
            data += block + bytes(-len(block) % PAGE)
        (self.directory / "data").write_bytes(data)
        self.file = await self.backend.open("data")
        desc = self.table.intern(b"\0")
        for key, (block, place) in enumerate(zip(self.blocks, places, strict=True)):
            name = key.to_bytes(8, "little")
            self.table.recover_block(0, name, SLOT, place, len(block), checksum(memoryview(block)), desc)
        self.table.release_desc(desc)
        return self

    async def __aexit__(self, *_):
        if self.ring is not None:
            self.script.clear()
            self.ring.closed or self.ring.release_all()
        await turns()
        assert await self.backend.close() == 0
        assert self.backend.reads_in_flight == 0
        assert self.table.loads_count == 0
        assert self.table.quarantined == 0
        assert self.file.busy == 0
        self.table.check()

    def begin(self, keys=None):
        keys = list(range(len(self.blocks))) if keys is None else keys
        future = asyncio.get_running_loop().create_future()
        answers = Answers(keys, [None] * len(keys), range(len(keys)), future)
        loads, left, misses = self.table.begin_loads(answers, range(len(keys)), 1 << 20, 1000, 0.0)
        assert (left, misses) == ([], 0)
        return answers, loads

    def fly(self, loads, file=None):
        def over():
            self.overs += 1

        return self.backend.fly(loads, {SLOT: self.file if file is None else file}, self, over)

    # The pilot.

    def on_landed(self, loads):
        self.landed += [load.plain_key for load in loads]
        odd, _, _ = self.table.land_loads(loads, 1.0, self.seconds.append)
        for load in odd:
            self.table.finish_load(load, True)

    def on_fallen(self, load, error, free):
        self.fallen.append((load.plain_key, error, free))
        if free:
            self.table.finish_load(load, False)
        else:
            self.table.expire_load(load)

    def on_released(self, load):
        self.released.append(load.plain_key)
        self.table.release_load(load)

    async def settled(self):
        await until(lambda: not self.backend.reads_in_flight and not self.table.loads_count)

    def right(self, answers):
        for key, found in zip(answers.keys, answers.results, strict=True):
            assert found is None or bytes(found) == self.blocks[key], "WRONG BYTES"
        return sum(found is not None for found in answers.results)


@pytest.fixture(params=[False, "auto"], ids=["buffered", "direct"])
def direct(request):
    return request.param


@pytest.mark.parametrize("engine", ["ring", "FakeRing", "plain"])
async def test_blocks_of_many_sizes_land_and_answer_their_call(tmp_path, direct, engine):
    script = Script() if engine == "FakeRing" else None
    async with Sky(tmp_path, SIZES, script=script, plain=engine == "plain", direct=direct) as sky:
        answers, loads = sky.begin()
        assert sky.fly(loads) == []
        assert sky.backend.reads_in_flight == len(SIZES)
        assert sky.file.busy == (len(SIZES) if engine == "plain" else 1)
        assert not sky.landed  # never before the call returned
        async with asyncio.timeout(20):
            await answers.future
        assert sky.right(answers) == len(SIZES)
        assert set(answers.codes) == {2}
        assert sorted(sky.landed) == list(range(len(SIZES)))
        assert sky.overs == 1
        assert sky.seconds == [1.0] * len(SIZES)
        assert not sky.fallen
        for key, block in enumerate(sky.blocks):  # what follows the block is zero
            view = sky.table.extent(next(load.node for load in loads if load.plain_key == key))
            assert not any(view[len(block) :])


async def test_odd_places_and_closed_files_are_for_others(tmp_path):
    async with Sky(tmp_path, [PAGE, 60, 5000, PAGE], direct="auto") as sky:
        if not sky.backend.direct:
            pytest.skip("no direct I/O here")
        answers, loads = sky.begin()
        rest = sky.fly(loads)
        assert [load.plain_key for load in rest] == [1, 2]
        for load in rest:
            sky.table.finish_load(load, False)
        await sky.settled()
        assert sky.right(answers) == 2
        other = await sky.backend.open("data")
        await sky.backend.close_file(other)
        _, loads = sky.begin([1])
        assert sky.fly(loads, other) == loads
        assert sky.overs == 1  # a flight of nobody is none
        sky.table.finish_load(loads[0], False)


async def test_more_than_the_ring_has_room_for(tmp_path, direct):
    async with Sky(tmp_path, [PAGE] * 300, entries=4, direct=direct) as sky:
        answers, loads = sky.begin()
        assert sky.fly(loads) == []
        async with asyncio.timeout(20):
            await answers.future
        assert sky.right(answers) == 300


async def test_the_bytes_verified_in_one_turn_are_bounded(tmp_path):
    async with Sky(tmp_path, [65_536] * 20, inline_bytes=100_000) as sky:
        answers, loads = sky.begin()
        assert sky.fly(loads) == []
        most = 0
        while not answers.future.done():
            before = len(sky.landed)
            await asyncio.sleep(0)
            most = max(most, len(sky.landed) - before)
        assert sky.right(answers) == 20
        assert most <= 2


@pytest.mark.parametrize("plain", [False, True], ids=["ring", "plain"])
async def test_a_wrong_byte_falls_and_the_others_land(tmp_path, direct, plain):
    async with Sky(tmp_path, SIZES, direct=direct, plain=plain) as sky:
        sky.blocks[4] = sky.blocks[4][:-1] + b"!"
        with (tmp_path / "data").open("r+b") as file:
            at = sum(len(block) + -len(block) % PAGE for block in sky.blocks[:4]) + 100
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1]))
        answers, loads = sky.begin()
        sky.fly(loads)
        await sky.settled()
        assert sky.fallen == [(4, None, True)]
        assert answers.results[4] is None
        assert sky.right(answers) == len(SIZES) - 1
        assert answers.missing == 1
        assert not answers.future.done()


@pytest.mark.parametrize("plain", [False, True], ids=["ring", "plain"])
async def test_a_file_that_ends_early(tmp_path, direct, plain):
    async with Sky(tmp_path, [PAGE, 65_536], direct=direct, plain=plain) as sky:
        os.truncate(tmp_path / "data", 3 * PAGE)
        answers, loads = sky.begin()
        sky.fly(loads)
        await sky.settled()
        assert sky.fallen == [(1, None, True)]
        assert sky.right(answers) == 1


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (error(errno.EIO), errno.EIO),
        (error(errno.EBADF), errno.EBADF),
        (error(errno.EINTR), None),
        (error(errno.EAGAIN), None),
        (error(errno.EOPNOTSUPP), None),
        (short(0.5), None),
        (short(0.0), None),
    ],
    ids=["EIO", "EBADF", "EINTR", "EAGAIN", "EOPNOTSUPP", "short", "nothing"],
)
async def test_what_falls_says_why(tmp_path, direct, fault, told):
    async with Sky(tmp_path, SIZES, script=Script().add("read", fault, nth=3), direct=direct) as sky:
        answers, loads = sky.begin()
        sky.fly(loads)
        await sky.settled()
        ((key, reason, free),) = sky.fallen
        assert key == 2
        assert (reason and reason.errno) == told
        assert free
        assert sky.right(answers) == len(SIZES) - 1


async def test_an_address_that_was_refused_once_is_not_tried_again(tmp_path):
    sizes = [60, *[PAGE] * 3]
    async with Sky(tmp_path, sizes, script=Script().add("read", error(errno.EINVAL), nth=1)) as sky:
        if not sky.backend.direct:
            pytest.skip("no direct I/O here")
        assert sky.table.put("a word", sky.table.draft(b"in the way"))  # extents behind it are not page-aligned
        _, loads = sky.begin([1])
        assert sky.fly(loads) == []
        await sky.settled()
        assert sky.fallen == [(1, None, True)]
        _, loads = sky.begin([2])
        assert sky.fly(loads) == loads
        sky.table.finish_load(loads[0], False)


async def test_past_the_deadline_the_kernel_keeps_the_bytes(tmp_path):
    clock, script = ManualClock(), Script()
    async with Sky(tmp_path, SIZES, script=script, clock=clock) as sky:
        script.add("read", missing(), nth=2)
        answers, loads = sky.begin()
        sky.fly(loads)
        await turns()
        assert sorted(sky.landed) == [0, 2, 3, 4, 5, 6, 7]
        clock.advance(TIMEOUT + 0.1)
        await turns()
        ((key, reason, free),) = sky.fallen
        assert (key, type(reason), free) == (1, TimeoutError, False)
        assert sky.table.quarantined >= SIZES[1]
        assert sky.backend.reads_in_flight == 1
        assert not sky.overs  # the file is still in use
        sky.ring.release_all()
        await turns()
        assert sky.released == [1]
        assert sky.overs == 1
        assert sky.right(answers) == len(SIZES) - 1


async def test_past_the_deadline_what_never_started_is_free(tmp_path):
    clock, script = ManualClock(), Script()
    async with Sky(tmp_path, [PAGE] * 20, script=script, entries=2, clock=clock) as sky:
        script.add("read", missing(), sticky=True)
        _, loads = sky.begin()
        sky.fly(loads)
        await turns()
        taken = sky.ring.in_flight
        assert 0 < taken < 20
        clock.advance(TIMEOUT + 0.1)
        await turns()
        assert [free for _, _, free in sky.fallen].count(False) == taken
        assert len(sky.fallen) == 20
        assert {type(reason) for _, reason, _ in sky.fallen} == {TimeoutError}
        sky.ring.release_all()
        await turns()
        assert len(sky.released) == taken


@pytest.mark.parametrize("moment", [1, 2, 3])
async def test_a_ring_that_is_refused_later(tmp_path, moment, caplog):
    script = Script()
    async with Sky(tmp_path, [PAGE] * 40, script=script, entries=8, timeout=20.0) as sky:
        script.add("read", late(0.02), every=3)
        script.add("enter", error(errno.EPERM), nth=moment, sticky=True)
        answers, loads = sky.begin()
        with caplog.at_level(logging.WARNING):
            sky.fly(loads)
            await sky.settled()
        assert len(caplog.records) == 1
        assert not sky.backend.flies
        assert sky.overs == 1
        assert len(sky.landed) + len(sky.fallen) == 40
        assert all(reason is None and free for _, reason, free in sky.fallen)
        assert sky.right(answers) == len(sky.landed)
        _, loads = sky.begin([key for key, _, _ in sky.fallen][:1])
        assert sky.fly(loads) == loads
        sky.table.finish_load(loads[0], False)


async def test_partial_submissions_lose_none(tmp_path):
    async with Sky(tmp_path, [PAGE] * 60, script=Script().add("enter", partial(0.3), every=2)) as sky:
        answers, loads = sky.begin()
        sky.fly(loads)
        async with asyncio.timeout(20):
            await answers.future
        assert sky.right(answers) == 60


async def test_a_lost_completion_ends_the_ring_and_costs_one_block(tmp_path, caplog):
    script = Script().add("read", lost(), nth=5)
    async with Sky(tmp_path, [PAGE] * 20, script=script, entries=4, timeout=0.5) as sky:
        answers, loads = sky.begin()
        with caplog.at_level(logging.WARNING):
            sky.fly(loads)
            await until(lambda: len(sky.landed) + len(sky.fallen) == 20)
        late_ones = [key for key, reason, _ in sky.fallen if isinstance(reason, TimeoutError)]
        assert late_ones == [4]
        assert sky.right(answers) == len(sky.landed)
        # Nobody will ever tell that it has ended, so its bytes stay with the kernel: let the test end it.
        sky.ring._post(next(r.token for r in sky.ring._slots if r is not None and r.taken), PAGE)
        await sky.settled()
        assert sky.released == [4]


async def test_closing_counts_what_the_kernel_keeps(tmp_path):
    script = Script()
    sky = Sky(tmp_path, [PAGE] * 10, script=script, timeout=0.2)
    await sky.__aenter__()
    script.add("read", missing(), every=2)
    answers, loads = sky.begin()
    sky.fly(loads)
    assert await sky.backend.close() == 5
    assert len(sky.landed) == 5
    assert {(type(reason), free) for _, reason, free in sky.fallen} == {(TimeoutError, False)}
    assert sky.fly(sky.begin([sky.fallen[0][0]])[1]) != []
    assert sky.right(answers) == 5
    sky.ring.release_all()
    await until(lambda: sky.ring.closed)
    assert len(sky.released) == 5
    assert sky.overs == 1


async def test_closing_a_file_waits_for_the_flight(tmp_path):
    script = Script().add("read", late(0.05), every=2)
    async with Sky(tmp_path, [PAGE] * 10, script=script, timeout=5.0) as sky:
        answers, loads = sky.begin()
        sky.fly(loads)
        await sky.backend.close_file(sky.file)
        assert sky.right(answers) == 10
        assert sky.overs == 1


async def test_a_pilot_that_raises_stops_nobody(tmp_path):
    raised = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: raised.append(context))
    async with Sky(tmp_path, [PAGE] * 10) as sky:
        _, loads = sky.begin()
        plain = sky.on_landed

        def on_landed(landed):
            plain(landed)
            raise RuntimeError("a bug")

        sky.on_landed = on_landed
        sky.fly(loads)
        await sky.settled()
        assert len(sky.landed) == 10
        assert raised
    asyncio.get_running_loop().set_exception_handler(None)


async def test_stale_reads_and_dropped_answers_publish_nothing_for_anybody(tmp_path):
    async with Sky(tmp_path, [PAGE] * 6) as sky:
        answers, loads = sky.begin([0, 1, 2])
        dropped, more = sky.begin([3, 4, 5])
        sky.fly(loads + more)
        sky.table.put(1, sky.table.draft(b"newer"))
        sky.table.remove(2)
        dropped.drop()
        await sky.settled()
        assert [answers.results[0] is not None, *answers.results[1:]] == [True, None, None]
        assert answers.missing == 2  # what is stale is for the pilot to look after
        assert dropped.results == []
        assert bytes(sky.table.get(1)) == b"newer"
        assert sky.table.get(2) is None
        assert bytes(sky.table.get(4)) == sky.blocks[4]  # it came, and stays in memory
        assert sky.table.pinned_blocks == 1
