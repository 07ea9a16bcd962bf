"""A tier whose writes, syncs and reads end when the test says so, in the order it says.

Its reads come one by one; or, where `flies` is set, together, and only what falls without an error by itself.
"""

import asyncio
from types import SimpleNamespace

from asynckv._core import Table
from asynckv.clock import MonotonicClock
from asynckv.scheduler import Scheduler


class ScriptedTier:
    """A log in memory: batches in order of composition, and what each holds."""

    flies = False

    def __init__(self):
        self.batches = []
        self.syncs = 0
        self.sync_error = None
        self.reads = []
        self.room_for = 1 << 40
        self.held = None
        self.max_block = 1 << 20
        self.oldest_segment = 1
        self.probe_answer = True

    async def prepare(self, nbytes):
        if self.held is not None:
            await self.held.wait()

    def compose(self, spills, tombstones, clear=False):
        batch = SimpleNamespace(
            segment=1,
            spills=list(spills),
            rest_spills=[],
            tombstones=list(tombstones),
            rest_tombstones=[],
            clear=clear,
            place=len(self.batches),
        )
        batch.future = asyncio.get_running_loop().create_future()
        self.batches.append(batch)
        return batch

    def submit(self, batch, *, released=None):
        batch.released = released
        return batch.future

    def land(self, batch, error=None):
        """End a batch's write."""
        batch.released()
        if error is None:
            places = [(0, 4096 * (1 + batch.place * 1000 + i), 7) for i in range(len(batch.spills))]
            batch.future.set_result(places)
        else:
            batch.future.set_exception(error)

    async def sync(self):
        self.syncs += 1
        await asyncio.sleep(0)
        if self.sync_error is not None:
            raise self.sync_error

    def read(self, load, sink):
        future = asyncio.get_running_loop().create_future()
        self.reads.append(SimpleNamespace(load=load, future=future, released=sink.on_released))
        future.add_done_callback(lambda ended: _tell(sink, ended))

    def fly(self, loads, pilot):
        if not self.flies:
            return loads
        for load in loads:
            flown = Flown(load, pilot)
            self.reads.append(flown)
            flown.future.add_done_callback(flown.ended)
        return []

    async def probe(self):
        return self.probe_answer


class Flown:
    """A read of a flight, to be ended as the others are: `released`, then the future; or the other way round."""

    def __init__(self, load, pilot):
        self.load = load
        self.pilot = pilot
        self.future = asyncio.get_running_loop().create_future()
        self.free = self.fallen = False

    def released(self):
        self.free = True
        if self.fallen:
            self.pilot.on_released(self.load)

    def ended(self, future):
        error = future.exception()
        if error is None and future.result():
            self.pilot.on_landed([self.load])
        else:
            self.fallen = True
            self.pilot.on_fallen(self.load, error, self.free)


def _tell(sink, future):
    error = future.exception()
    sink.on_ended(error is None and future.result(), error)


def build(*, memory=1 << 20, room_timeout=5.0, persist_after=None, clock=None):
    """A table, a scripted tier and the scheduler between them."""
    table = Table(memory, backed=True)
    tier = ScriptedTier()
    config = SimpleNamespace(io_timeout=5.0, room_timeout=room_timeout, persist_after=persist_after, disk=1 << 30)
    scheduler = Scheduler(asyncio.get_running_loop(), table, tier, config, clock or MonotonicClock())
    scheduler.writer.start()
    return table, tier, scheduler


async def settle():
    """Let everything that can run do so."""
    for _ in range(20):
        await asyncio.sleep(0)


async def finish(scheduler, tier):
    """End what is under way and stop the scheduler."""
    while True:
        await settle()
        open_batches = [b for b in tier.batches if not b.future.done()]
        if not open_batches:
            break
        for batch in open_batches:
            tier.land(batch)
    closing = asyncio.ensure_future(scheduler.close())
    while not closing.done():
        await settle()
        for batch in tier.batches:
            if not batch.future.done():
                tier.land(batch)
    scheduler.table.check()
    assert scheduler.table.pinned_blocks == 0
