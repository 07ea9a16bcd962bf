"""The writer: log order, what a flush covers, what a failure leaves owed."""

import asyncio
import errno
import gc

import pytest
from scripted_tier import build, finish, settle

from asynckv.errors import DiskError
from asynckv.health import WRITE
from asynckv.testing import ManualClock
from asynckv.writer import RETRY_SECONDS

K = {i: (0, i.to_bytes(8, "little")) for i in range(10)}


def put(scheduler, key, size=1000, fill=b"v"):
    assert scheduler.put_now(key, scheduler.table.draft(fill * size))


async def put_and_flush(scheduler, tier):
    """Write key 1 as the first batch, durably."""
    put(scheduler, 1)
    flush = asyncio.ensure_future(scheduler.writer.flush())
    await settle()
    tier.land(tier.batches[0])
    await flush


async def test_nothing_is_written_without_a_reason():
    _table, tier, scheduler = build()
    put(scheduler, 1)
    await settle()
    assert tier.batches == []
    await finish(scheduler, tier)


async def test_writing_starts_above_half_of_the_pool_and_goes_down_to_three_eighths():
    table, tier, scheduler = build()
    size = 64 << 10
    for key in range(9):
        put(scheduler, key, size)
    await settle()
    while any(not b.future.done() for b in tier.batches):
        for batch in tier.batches:
            if not batch.future.done():
                tier.land(batch)
        await settle()
    assert table.dirty_bytes == 5 * size, "batches of an eighth of the pool"
    assert [s.key for b in tier.batches for s in b.spills] == [K[i][1] for i in range(4)], "oldest first"
    await finish(scheduler, tier)


async def test_at_most_two_batches_are_in_flight():
    _table, tier, scheduler = build()
    for key in range(15):
        put(scheduler, key, 64 << 10)
    await settle()
    assert sum(not b.future.done() for b in tier.batches) == 2
    await finish(scheduler, tier)


async def test_a_flush_ends_after_its_write_and_a_later_sync():
    _table, tier, scheduler = build()
    put(scheduler, 1)
    flush = asyncio.ensure_future(scheduler.writer.flush())
    await settle()
    assert len(tier.batches) == 1
    assert tier.syncs == 0
    assert not flush.done()
    tier.land(tier.batches[0])
    await flush
    assert tier.syncs == 1
    await finish(scheduler, tier)


async def test_a_failed_sync_fails_all_who_wait_for_one():
    """What the later ones wait for was written before it failed, and taken back with the rest."""
    _table, tier, scheduler = build()
    waiters = [asyncio.get_running_loop().create_future() for _ in range(2)]
    tier.sync_error = OSError(5, "injected")
    scheduler.writer._sync([waiters[0]])
    await asyncio.sleep(0)
    assert tier.syncs == 1
    scheduler.writer._sync([waiters[1]])
    await asyncio.wait(waiters)
    assert all(isinstance(each.exception(), DiskError) for each in waiters)
    assert tier.syncs == 1
    tier.sync_error = None
    await finish(scheduler, tier)


async def test_a_flush_does_not_wait_for_later_puts():
    _table, tier, scheduler = build()
    put(scheduler, 1)
    flush = asyncio.ensure_future(scheduler.writer.flush())
    await settle()
    put(scheduler, 2)
    tier.land(tier.batches[0])
    await flush
    assert scheduler.table.dirty_blocks == 1
    await finish(scheduler, tier)


async def test_a_flush_covers_the_replacement_of_a_block_it_was_called_for():
    _table, tier, scheduler = build()
    tier.held = asyncio.Event()
    put(scheduler, 1)
    flush = asyncio.ensure_future(scheduler.writer.flush())
    await settle()
    put(scheduler, 2)
    put(scheduler, 1, fill=b"w")  # keeps the place of the first version
    tier.held.set()
    await settle()
    assert bytes(tier.batches[0].spills[0].view)[:1] == b"w"
    tier.land(tier.batches[0])
    await settle()
    for batch in tier.batches[1:]:
        tier.land(batch)
    await flush
    await finish(scheduler, tier)


async def test_a_flush_does_not_wait_for_later_removals():
    _table, tier, scheduler = build()
    await put_and_flush(scheduler, tier)
    put(scheduler, 2)
    flush = asyncio.ensure_future(scheduler.writer.flush())
    await settle()
    removal = asyncio.ensure_future(scheduler.delete([1]))
    await settle()
    assert [batch.tombstones for batch in tier.batches[1:]] == [[], [K[1]]]
    tier.land(tier.batches[1])
    await flush
    tier.land(tier.batches[2])
    assert await removal == 1
    await finish(scheduler, tier)


async def test_a_flush_waits_for_removals_that_were_owed_before_it():
    _table, tier, scheduler = build()
    await put_and_flush(scheduler, tier)
    removal = asyncio.ensure_future(scheduler.delete([1]))
    await asyncio.sleep(0)
    flush = asyncio.ensure_future(scheduler.writer.flush())
    await settle()
    assert not flush.done()
    tier.land(tier.batches[1])
    await flush
    assert await removal == 1
    await finish(scheduler, tier)


async def test_a_flush_waits_for_batches_already_in_flight():
    _table, tier, scheduler = build()
    put(scheduler, 1)
    first = asyncio.ensure_future(scheduler.writer.flush())
    await settle()
    second = asyncio.ensure_future(scheduler.writer.flush())
    await settle()
    assert not second.done()
    tier.land(tier.batches[0])
    await asyncio.gather(first, second)
    await finish(scheduler, tier)


async def test_an_empty_flush_writes_nothing():
    _table, tier, scheduler = build()
    await scheduler.writer.flush()
    assert tier.batches == []
    await finish(scheduler, tier)


@pytest.mark.parametrize("closing", [False, True], ids=["", "the store closes"])
async def test_a_flush_whose_blocks_are_deleted_meanwhile_ends(closing):
    table, tier, scheduler = build()
    tier.held = asyncio.Event()
    put(scheduler, 1)
    ends = [asyncio.ensure_future(scheduler.writer.flush())]
    await settle()
    assert table.remove(1) == 1
    if closing:
        ends.append(asyncio.ensure_future(scheduler.close()))
        await settle()
    tier.held.set()
    await asyncio.wait_for(asyncio.gather(*ends), 5)
    if not closing:
        await finish(scheduler, tier)


async def test_a_failed_write_fails_the_flush_and_the_block_is_dirty_again():
    table, tier, scheduler = build()
    put(scheduler, 1)
    flush = asyncio.ensure_future(scheduler.writer.flush())
    await settle()
    tier.land(tier.batches[0], OSError(errno.EIO, "broken"))
    with pytest.raises(DiskError) as caught:
        await flush
    assert caught.value.errno == errno.EIO
    assert table.dirty_blocks == 1
    assert scheduler.counters.io_errors == 1
    await finish(scheduler, tier)


async def test_a_failed_sync_fails_the_flush():
    _table, tier, scheduler = build()
    tier.sync_error = OSError(errno.EIO, "broken")
    put(scheduler, 1)
    flush = asyncio.ensure_future(scheduler.writer.flush())
    await settle()
    tier.land(tier.batches[0])
    with pytest.raises(DiskError):
        await flush
    tier.sync_error = None
    await finish(scheduler, tier)


async def test_three_failures_switch_the_disk_off_and_a_probe_switches_it_on():
    clock = ManualClock()
    table, tier, scheduler = build(clock=clock)
    tier.probe_answer = False
    for _ in range(3):
        put(scheduler, 1)
        flush = asyncio.ensure_future(scheduler.writer.flush())
        await settle()
        tier.land(tier.batches[-1], OSError(errno.EIO, "broken"))
        with pytest.raises(DiskError):
            await flush
    assert not scheduler.breaker.ok
    assert not table.backed
    with pytest.raises(DiskError):
        await scheduler.writer.flush()
    clock.advance(1.0)
    await settle()
    assert not scheduler.breaker.ok, "the probe failed"
    tier.probe_answer = True
    clock.advance(1.0)
    await settle()
    assert not scheduler.breaker.ok, "the wait doubles"
    clock.advance(1.0)
    await settle()
    assert scheduler.breaker.ok
    assert table.backed
    await finish(scheduler, tier)


async def test_removals_that_are_tried_again_while_the_disk_is_off_leave_nothing_behind():
    clock = ManualClock()
    _table, tier, scheduler = build(clock=clock)
    await put_and_flush(scheduler, tier)
    scheduler.breaker.trip(WRITE)

    def left() -> int:
        gc.collect()
        return sum(isinstance(each, asyncio.Future) and each.done() for each in gc.get_objects())

    before = left()
    for removal in (lambda: scheduler.delete([1]), scheduler.clear):
        for _ in range(300):
            with pytest.raises(DiskError):
                await removal()
        assert left() < before + 100
    clock.advance(1.0)
    await settle()
    assert tier.batches[1].clear
    await finish(scheduler, tier)


async def test_a_durable_removal_answers_after_write_and_sync():
    _table, tier, scheduler = build()
    await put_and_flush(scheduler, tier)
    removal = asyncio.ensure_future(scheduler.delete([1]))
    await settle()
    assert tier.batches[1].tombstones == [K[1]]
    assert not removal.done()
    tier.land(tier.batches[1])
    assert await removal == 1
    assert tier.syncs == 2
    await finish(scheduler, tier)


class Scarce:
    """A table that has no memory for one list of dirty blocks."""

    def __init__(self, table):
        self.table = table
        self.refused = False

    def __getattr__(self, name):
        return getattr(self.table, name)

    def take_dirty(self, max_bytes, max_blocks):
        if not self.refused:
            self.refused = True
            raise MemoryError
        return self.table.take_dirty(max_bytes, max_blocks)


async def test_a_tombstone_is_kept_when_there_is_no_memory_for_the_blocks_behind_it():
    table, tier, scheduler = build()
    await put_and_flush(scheduler, tier)
    scheduler.writer.table = scarce = Scarce(table)
    put(scheduler, 2)
    removal = asyncio.ensure_future(scheduler.delete([1]))
    flush = asyncio.ensure_future(scheduler.writer.flush())
    with pytest.raises(DiskError):
        await flush
    assert scarce.refused
    await asyncio.sleep(2 * RETRY_SECONDS)
    await settle()
    assert tier.batches[1].tombstones == [K[1]]
    tier.land(tier.batches[1])
    assert await removal == 1
    await finish(scheduler, tier)


async def test_a_removal_of_what_was_never_written_writes_nothing():
    _table, tier, scheduler = build()
    put(scheduler, 1)
    assert await scheduler.delete([1]) == 1
    assert await scheduler.delete([1]) == 0
    assert tier.batches == []
    await finish(scheduler, tier)


async def test_a_failed_tombstone_stays_owed_unless_the_key_was_put_again():
    _table, tier, scheduler = build()
    for key in (1, 2):
        put(scheduler, key)
    flush = asyncio.ensure_future(scheduler.writer.flush())
    await settle()
    tier.land(tier.batches[0])
    await flush
    removal = asyncio.ensure_future(scheduler.delete([1, 2]))
    await settle()
    put(scheduler, 2, fill=b"w")
    flush = asyncio.ensure_future(scheduler.writer.flush())
    await settle()
    assert [s.key for s in tier.batches[2].spills] == [K[2][1]]
    tier.land(tier.batches[2])
    tier.land(tier.batches[1], OSError(errno.EIO, "broken"))
    with pytest.raises(DiskError):
        await removal
    with pytest.raises(DiskError):
        await flush
    await settle()
    scheduler.writer.poke()
    await settle()
    assert tier.batches[3].tombstones == [K[1]], "the tombstone of key 2 would bury its new block"
    await finish(scheduler, tier)


async def test_blocks_wait_while_tombstones_are_left_over():
    _table, tier, scheduler = build()
    keys = [b"%04d" % i * 200 for i in range(400)]
    for key in keys:
        put(scheduler, key, 10)
    flush = asyncio.ensure_future(scheduler.writer.flush())
    await settle()
    for batch in tier.batches:
        tier.land(batch)
    await flush
    seen = len(tier.batches)
    tier.held = asyncio.Event()
    removal = asyncio.ensure_future(scheduler.delete(keys))
    await settle()
    put(scheduler, keys[-1], 10)
    tier.held.set()
    flush = asyncio.ensure_future(scheduler.writer.flush())
    await settle()
    for _ in range(50):
        await settle()
        for batch in tier.batches[seen:]:
            if not batch.future.done():
                tier.land(batch)
    await asyncio.gather(removal, flush)
    order = [("t", k) for b in tier.batches[seen:] for _, k in b.tombstones if k == keys[-1]]
    places = [
        (b.place, what)
        for b in tier.batches[seen:]
        for what in [*(("t", k) for _, k in b.tombstones), *(("b", s.key) for s in b.spills)]
        if what[1] == keys[-1]
    ]
    assert order, "the tombstone was written"
    kinds = [what[0] for _, what in places]
    assert kinds.index("b") > max(i for i, kind in enumerate(kinds) if kind == "t"), "the block comes last"
    await finish(scheduler, tier)


async def test_a_clear_covers_the_tombstones_owed_before_it():
    _table, tier, scheduler = build()
    await put_and_flush(scheduler, tier)
    tier.held = asyncio.Event()
    removal = asyncio.ensure_future(scheduler.delete([1]))
    clearing = asyncio.ensure_future(scheduler.clear())
    await settle()
    tier.held.set()
    await settle()
    assert tier.batches[1].clear
    assert tier.batches[1].tombstones == []
    tier.land(tier.batches[1])
    await asyncio.gather(removal, clearing)
    await finish(scheduler, tier)


async def test_blocks_are_written_when_they_are_older_than_persist_after():
    clock = ManualClock()
    _table, tier, scheduler = build(persist_after=10.0, clock=clock)
    put(scheduler, 1)
    clock.advance(5.0)
    await settle()
    assert tier.batches == []
    clock.advance(5.0)
    await settle()
    assert [s.key for s in tier.batches[0].spills] == [K[1][1]]
    await finish(scheduler, tier)


async def test_a_late_write_keeps_its_extents_until_the_engine_lets_go():
    table, tier, scheduler = build()
    put(scheduler, 1, 64 << 10)
    flush = asyncio.ensure_future(scheduler.writer.flush())
    await settle()
    late = tier.batches[0]
    late.future.set_exception(TimeoutError())
    with pytest.raises(DiskError):
        await flush
    assert scheduler.counters.io_timeouts == 1
    table.remove(1)
    assert table.quarantined == 64 << 10
    late.released()
    assert table.quarantined == 0
    await finish(scheduler, tier)


@pytest.mark.parametrize("step", ["write", "sync"])
async def test_a_clear_that_failed_stays_owed_and_buries_nothing_that_was_put_after_it(step):
    _table, tier, scheduler = build()
    await put_and_flush(scheduler, tier)
    clearing = asyncio.ensure_future(scheduler.clear())
    await settle()
    put(scheduler, 2)
    flush = asyncio.ensure_future(scheduler.writer.flush())
    await settle()
    assert len(tier.batches) == 2, "nothing is composed before it is known what becomes of the clear"
    assert tier.batches[1].clear
    assert not tier.batches[1].spills
    if step == "sync":
        tier.sync_error = OSError(errno.EIO, "broken")
    tier.land(tier.batches[1], OSError(errno.EIO, "broken") if step == "write" else None)
    for waiting in (clearing, flush):
        with pytest.raises(DiskError):
            await waiting
    put(scheduler, 3)
    scheduler.forget(3)
    assert not scheduler.writer._tombstones, "the clear comes before whatever is written next"
    tier.sync_error = None
    removal = asyncio.ensure_future(scheduler.delete([1]))
    await settle()
    assert tier.batches[2].clear, "again"
    tier.land(tier.batches[2])
    await settle()
    if not removal.done():
        assert tier.batches[3].tombstones == [K[1]]
        tier.land(tier.batches[3])
    assert await removal == 0
    flush = asyncio.ensure_future(scheduler.writer.flush())
    await settle()
    assert [spill.key for spill in tier.batches[-1].spills] == [K[2][1]]
    tier.land(tier.batches[-1])
    await flush
    assert sum(batch.clear for batch in tier.batches) == 2
    await finish(scheduler, tier)


async def test_an_error_of_ours_in_the_tier_fails_the_flush_and_costs_nothing():
    table, tier, scheduler = build()
    put(scheduler, 1)
    compose, submit = tier.compose, tier.submit
    for name in ("compose", "submit"):

        def broken(*_, **__):
            raise MemoryError

        setattr(tier, name, broken)
        with pytest.raises(DiskError):
            await asyncio.wait_for(scheduler.writer.flush(), 5)
        assert table.dirty_blocks == 1
        tier.compose, tier.submit = compose, submit
        tier.batches.clear()
        scheduler.breaker.success(WRITE)
    flush = asyncio.ensure_future(scheduler.writer.flush())
    while not flush.done():
        await asyncio.sleep(0.01)
        for batch in tier.batches:
            if not batch.future.done():
                tier.land(batch)
    await flush
    await finish(scheduler, tier)


async def test_a_writer_cancelled_in_the_middle_goes_on_with_the_flush():
    _table, tier, scheduler = build()
    tier.held = asyncio.Event()
    put(scheduler, 1)
    flush = asyncio.ensure_future(scheduler.writer.flush())
    await settle()
    scheduler.writer._task.cancel()
    await settle()
    tier.held.set()
    await settle()
    tier.land(tier.batches[0])
    await asyncio.wait_for(flush, 5)
    await finish(scheduler, tier)


async def test_an_error_of_ours_in_a_sync_reaches_those_who_wait():
    _table, tier, scheduler = build()
    put(scheduler, 1)
    tier.sync_error = MemoryError()
    flush = asyncio.ensure_future(scheduler.writer.flush())
    await settle()
    tier.land(tier.batches[0])
    with pytest.raises(DiskError):
        await asyncio.wait_for(flush, 5)
    tier.sync_error = None
    await finish(scheduler, tier)
