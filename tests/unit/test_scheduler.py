"""The scheduler: single flight, stale reloads, room in order of arrival."""

import asyncio
import errno
import gc

import pytest
from scripted_tier import ScriptedTier, build, finish, settle

KIB = 1 << 10


@pytest.fixture(autouse=True, params=[False, True], ids=["each", "flights"])
def flies(request, monkeypatch):
    """Whether what is begun in one turn is read together."""
    monkeypatch.setattr(ScriptedTier, "flies", request.param)
    return request.param


async def to_disk(table, tier, scheduler, keys, size):
    """Put blocks, have them written, and evict them from memory."""
    for key in keys:
        assert scheduler.put_now(key, table.draft(bytes([key]) * size))
        flush = asyncio.ensure_future(scheduler.writer.flush())
        await settle()
        tier.land(tier.batches[-1])
        await flush
    room = table.room(table.capacity)
    while room.step() == 0:
        pass
    room.cancel()
    assert all(table.state(key) == 2 for key in keys)


def arrive(read, ok=True):
    """End a read with the right bytes, or with damage."""
    read.load.view[: read.load.stored] = read.load.key[:1] * read.load.stored
    read.released()
    read.future.set_result(ok)


async def test_concurrent_gets_of_one_key_share_one_read():
    table, tier, scheduler = build()
    await to_disk(table, tier, scheduler, [1], 40 * KIB)
    gets = [asyncio.ensure_future(scheduler.gather([1])) for _ in range(5)]
    await settle()
    assert len(tier.reads) == 1
    arrive(tier.reads[0])
    for got in await asyncio.gather(*gets):
        assert bytes(got[0]) == b"\1" * 40 * KIB
    assert scheduler.counters.disk_hits == 5
    assert scheduler.counters.loaded_blocks == 1
    del got, gets
    await finish(scheduler, tier)


async def test_a_put_during_a_reload_wins():
    table, tier, scheduler = build()
    await to_disk(table, tier, scheduler, [1], 40 * KIB)
    get = asyncio.ensure_future(scheduler.gather([1]))
    await settle()
    assert scheduler.put_now(1, table.draft(b"new"))
    arrive(tier.reads[0])
    assert bytes((await get)[0]) == b"new"
    del get
    await finish(scheduler, tier)


async def test_a_delete_during_a_reload_leaves_no_ghost():
    table, tier, scheduler = build()
    await to_disk(table, tier, scheduler, [1], 40 * KIB)
    get = asyncio.ensure_future(scheduler.gather([1]))
    await settle()
    removal = asyncio.ensure_future(scheduler.delete([1]))
    await settle()
    arrive(tier.reads[0])
    assert await get == [None]
    tier.land(tier.batches[-1])
    assert await removal == 1
    assert table.state(1) == 0
    assert table.used == 0
    await finish(scheduler, tier)


async def test_a_second_read_starts_while_the_first_is_stuck_and_stale():
    table, tier, scheduler = build()
    await to_disk(table, tier, scheduler, [1], 40 * KIB)
    first = asyncio.ensure_future(scheduler.gather([1]))
    await settle()
    assert scheduler.put_now(1, table.draft(b"\1" * 40 * KIB))
    flush = asyncio.ensure_future(scheduler.writer.flush())
    await settle()
    tier.land(tier.batches[-1])
    await flush
    room = table.room(970 * KIB)
    while room.step() == 0:
        pass
    room.cancel()
    assert table.state(1) == 2
    second = asyncio.ensure_future(scheduler.gather([1]))
    await settle()
    assert len(tier.reads) == 2
    arrive(tier.reads[1])
    assert (await second)[0] is not None
    arrive(tier.reads[0])
    assert (await first)[0] is not None
    del first, second
    await finish(scheduler, tier)


async def test_damage_is_a_miss_and_the_block_is_dropped(flies):
    table, tier, scheduler = build()
    await to_disk(table, tier, scheduler, [1], 40 * KIB)
    get = asyncio.ensure_future(scheduler.gather([1]))
    await settle()
    arrive(tier.reads[0], ok=False)
    if flies:  # read once more, by itself
        await settle()
        assert len(tier.reads) == 2
        arrive(tier.reads[1], ok=False)
    assert await get == [None]
    assert (scheduler.counters.corrupt_blocks, scheduler.counters.misses) == (1, 1)
    assert table.state(1) == 0
    await finish(scheduler, tier)


async def test_a_block_that_cannot_be_read_twice_is_forgotten():
    table, tier, scheduler = build()
    await to_disk(table, tier, scheduler, [1], 40 * KIB)
    for attempt in range(2):
        assert table.state(1) == 2, "one error may be the disk's, not the block's"
        get = asyncio.ensure_future(scheduler.gather([1]))
        await settle()
        tier.reads[attempt].released()
        tier.reads[attempt].future.set_exception(OSError(errno.EIO, "broken"))
        assert await get == [None]
    assert scheduler.counters.io_errors == 2
    assert await scheduler.gather([1]) == [None]
    assert len(tier.reads) == 2
    await finish(scheduler, tier)


async def test_a_disk_that_fails_for_all_blocks_costs_none_of_them():
    table, tier, scheduler = build()
    await to_disk(table, tier, scheduler, list(range(1, 9)), 40 * KIB)
    get = asyncio.ensure_future(scheduler.gather(list(range(1, 9))))
    await settle()
    for read in tier.reads:
        read.released()
        read.future.set_exception(OSError(errno.EIO, "broken"))
    assert await get == [None] * 8
    assert not scheduler.breaker.ok
    scheduler.breaker.probed(True)
    assert [table.state(key) for key in range(1, 9)] == [2] * 8
    await finish(scheduler, tier)


async def test_a_call_that_gives_up_wakes_the_one_behind_it():
    table, tier, scheduler = build(memory=256 * KIB)
    await to_disk(table, tier, scheduler, [1], 200 * KIB)
    await to_disk(table, tier, scheduler, [2], 10 * KIB)
    for key in (3, 4, 5):
        assert scheduler.put_now(key, table.draft(bytes(64 * KIB)))
    flush = asyncio.ensure_future(scheduler.writer.flush())
    for _ in range(10):
        await settle()
        for batch in tier.batches:
            if not batch.future.done():
                tier.land(batch)
    await flush
    views = [table.get(key) for key in (3, 4, 5)]
    large = asyncio.ensure_future(scheduler.gather([1], timeout=0.05))
    await settle()
    small = asyncio.ensure_future(scheduler.gather([2]))
    await settle()
    assert await large == [None]
    await settle()
    arrive(tier.reads[-1])
    assert (await asyncio.wait_for(small, 2))[0] is not None
    del views, small, large
    await finish(scheduler, tier)


async def test_a_reload_that_was_waited_for_counts_as_a_use():
    table, tier, scheduler = build()
    await to_disk(table, tier, scheduler, [1, 2], 40 * KIB)
    scheduler.prefetch([2])
    get = asyncio.ensure_future(scheduler.gather([1]))
    await settle()
    for read in tier.reads:
        arrive(read)
    await get
    del get
    await settle()
    room = table.room(table.capacity)
    while room.step() == 0:
        pass
    room.cancel()
    assert [carry.key[0] for carry in table.segment_candidates(0, 1 << 30)] == [1]
    await finish(scheduler, tier)


async def test_a_bad_key_far_into_a_large_batch_is_an_error_and_changes_nothing():
    table, tier, scheduler = build()
    assert scheduler.put_now(0, table.draft(b"v"))
    hits = table.memory_hits
    with pytest.raises(TypeError):
        await scheduler.gather([0] * 600 + [2.5])
    assert table.memory_hits == hits
    await finish(scheduler, tier)


async def test_closing_lets_a_large_batch_finish():
    table, tier, scheduler = build()
    assert all(await scheduler.put([(key, table.draft(b"v")) for key in range(3000)]))
    get = asyncio.ensure_future(scheduler.gather(range(3000)))
    await asyncio.sleep(0)
    await scheduler.drain()
    assert all(block is not None for block in await get)
    del get
    await finish(scheduler, tier)


async def test_a_read_past_its_deadline_is_a_miss_and_its_extent_is_quarantined():
    table, tier, scheduler = build()
    await to_disk(table, tier, scheduler, [1], 40 * KIB)
    get = asyncio.ensure_future(scheduler.gather([1]))
    await settle()
    tier.reads[0].future.set_exception(TimeoutError())
    assert await get == [None]
    assert table.quarantined == 40 * KIB
    assert table.state(1) == 2, "the disk may answer another time"
    tier.reads[0].released()
    assert table.quarantined == 0
    await finish(scheduler, tier)


async def test_too_much_quarantine_switches_the_disk_off():
    table, tier, scheduler = build()
    await to_disk(table, tier, scheduler, [1], 400 * KIB)
    get = asyncio.ensure_future(scheduler.gather([1]))
    await settle()
    tier.reads[0].future.set_exception(TimeoutError())
    await get
    assert not scheduler.breaker.ok
    tier.reads[0].released()
    await finish(scheduler, tier)


async def test_a_cancelled_get_leaves_no_pin_and_the_block_in_memory():
    table, tier, scheduler = build()
    await to_disk(table, tier, scheduler, [1, 2], 40 * KIB)
    get = asyncio.ensure_future(scheduler.gather([1, 2]))
    await settle()
    arrive(tier.reads[0])
    await settle()
    get.cancel()
    await settle()
    assert get.cancelled()
    assert table.pinned_blocks == 0
    arrive(tier.reads[1])
    await settle()
    assert table.state(1) == table.state(2) == 1
    await finish(scheduler, tier)


async def test_the_callers_patience_ends_before_the_disk_answers():
    table, tier, scheduler = build()
    await to_disk(table, tier, scheduler, [1], 40 * KIB)
    assert await scheduler.gather([1], timeout=0.01) == [None]
    assert scheduler.counters.misses == 1
    arrive(tier.reads[0])
    await settle()
    assert table.state(1) == 1
    await finish(scheduler, tier)


async def test_room_is_granted_to_puts_in_order_of_arrival():
    table, tier, scheduler = build(memory=256 * KIB)
    pins = []
    for key in range(4):
        assert (await scheduler.put([(key, table.draft(b"x" * 64 * KIB))])) == [True] or True
        for batch in tier.batches:
            if not batch.future.done():
                tier.land(batch)
        await settle()
        pins.append(table.get(key))
    done = []

    async def put(key, size):
        await scheduler.put([(key, table.draft(b"y" * size))])
        done.append(key)

    tasks = [asyncio.ensure_future(put(10, 128 * KIB)), asyncio.ensure_future(put(11, 64 * KIB))]
    await settle()
    pins.pop()  # room for the second, which has to wait for the first all the same
    await settle()
    assert done == []
    pins.clear()
    for _ in range(20):
        await settle()
        for batch in tier.batches:
            if not batch.future.done():
                tier.land(batch)
    await asyncio.gather(*tasks)
    assert done == [10, 11]
    await finish(scheduler, tier)


async def test_a_batch_larger_than_the_pool_serves_the_leading_keys():
    table, tier, scheduler = build(memory=256 * KIB)
    await to_disk(table, tier, scheduler, [1, 2, 3, 4, 5, 6], 64 * KIB)
    get = asyncio.ensure_future(scheduler.gather([1, 2, 3, 4, 5, 6]))
    for _ in range(10):
        await settle()
        for read in tier.reads:
            if not read.future.done():
                arrive(read)
    got = await asyncio.wait_for(get, 2)
    assert [block is not None for block in got] == [True] * 4 + [False] * 2
    assert scheduler.counters.no_room == 2
    assert scheduler.counters.disk_hits == 4
    del got, get
    await finish(scheduler, tier)


async def test_prefetch_takes_only_what_room_there_is_and_counts_joined_reads():
    table, tier, scheduler = build(memory=256 * KIB)
    await to_disk(table, tier, scheduler, [1, 2, 3, 4, 5, 6], 64 * KIB)
    assert scheduler.prefetch([1, 2]) == 2
    assert scheduler.prefetch([2, 3, 99]) == 2
    assert scheduler.prefetch([4, 5, 6]) == 1
    await settle()
    assert len(tier.reads) == 4
    for read in tier.reads:
        arrive(read)
    await finish(scheduler, tier)


async def test_while_blocks_are_read_spills_come_one_at_a_time():
    """Unless somebody waits for the room that a spill makes."""
    table, tier, scheduler = build()
    await to_disk(table, tier, scheduler, [1], 64 * KIB)
    before = len(tier.batches)
    get = asyncio.ensure_future(scheduler.gather([1]))
    await settle()
    assert len(tier.reads) == 1
    for key in range(2, 15):
        assert scheduler.put_now(key, table.draft(bytes([key]) * (64 * KIB)))
    await settle()
    assert len(tier.batches) == before + 1
    arrive(tier.reads[0])
    await get
    del get
    tier.land(tier.batches[before])
    await settle()
    assert len(tier.batches) == before + 3
    await finish(scheduler, tier)


async def test_a_large_batch_lets_the_loop_turn():
    table, tier, scheduler = build(memory=16 << 20)
    items = [(key, table.draft(b"v" * 100)) for key in range(5000)]
    turns = 0

    async def heartbeat():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    beating = asyncio.ensure_future(heartbeat())
    assert await scheduler.put(items) == [True] * 5000
    assert turns >= 5000 // 512
    before = turns
    got = await scheduler.gather(range(5000))
    assert all(block is not None for block in got)
    assert turns - before >= 5000 // 512
    big = [(key, table.draft(bytes(1 << 20))) for key in range(10)]
    before = turns
    assert await scheduler.put(big) == [True] * 10
    assert turns - before >= 2
    beating.cancel()
    del got
    await asyncio.wait([beating])
    await finish(scheduler, tier)


async def test_no_memory_for_one_waiter_of_a_reload_is_that_one_s_error():
    table, tier, scheduler = build()
    await to_disk(table, tier, scheduler, [1], 40 * KIB)
    gets = [asyncio.ensure_future(scheduler.gather([1])) for _ in range(3)]
    await settle()
    answers = [MemoryError()]

    class Short:
        """The table, which has no memory for the first view."""

        def __getattr__(self, name):
            return getattr(table, name)

        def block(self, load):
            if answers:
                raise answers.pop()
            return table.block(load)

    scheduler.table = Short()
    arrive(tier.reads[0])
    await asyncio.wait(gets)
    with pytest.raises(MemoryError):
        gets[0].result()
    for get in gets[1:]:
        assert bytes(get.result()[0]) == b"\1" * 40 * KIB
    scheduler.table = table
    del get, gets
    gc.collect()  # the error and its frames are a cycle
    await finish(scheduler, tier)


async def begun(scheduler, key):
    """A get that has begun to read, in a turn that is not over."""
    get = asyncio.ensure_future(scheduler.gather([key]))
    await asyncio.sleep(0)
    assert scheduler.reading
    return get


async def test_a_block_that_moves_before_its_read_is_submitted_is_read_where_it_is():
    table, tier, scheduler = build()
    await to_disk(table, tier, scheduler, [1], 40 * KIB)
    table.touch(1)
    get = await begun(scheduler, 1)
    (carry,) = table.segment_candidates(0, 1 << 20)
    assert table.finish_carry(carry, 2, 8192)
    await settle()
    assert (tier.reads[0].load.slot, tier.reads[0].load.offset) == (2, 8192)
    arrive(tier.reads[0])
    assert bytes((await get)[0]) == b"\1" * 40 * KIB
    del get
    await finish(scheduler, tier)


async def test_a_block_whose_segment_goes_before_its_read_is_submitted_is_a_miss():
    table, tier, scheduler = build()
    await to_disk(table, tier, scheduler, [1], 40 * KIB)
    get = await begun(scheduler, 1)
    assert table.drop_segment(0) == 1
    await settle()
    assert await get == [None]
    assert not tier.reads
    assert scheduler.counters.misses == 1
    assert scheduler.counters.corrupt_blocks == 0
    assert table.used == 0
    await finish(scheduler, tier)


async def test_a_call_that_waits_for_room_ends_when_all_its_keys_are_gone():
    table, tier, scheduler = build()
    await to_disk(table, tier, scheduler, [1, 2], 400 * KIB)
    assert scheduler.put_now("held", table.draft(bytes(900 * KIB)))
    view = table.get("held")
    get = asyncio.ensure_future(scheduler.gather([1, 2]))
    await settle()
    assert not tier.reads
    assert table.drop_segment(0) == 2
    scheduler.kick()
    assert await asyncio.wait_for(get, 5) == [None, None]
    assert scheduler.counters.misses == 2
    del view
    await finish(scheduler, tier)


async def test_a_read_that_cannot_be_submitted_is_its_callers_error(monkeypatch):
    table, tier, scheduler = build()
    await to_disk(table, tier, scheduler, [1, 2, 3], 40 * KIB)

    def refuse(*_):
        raise MemoryError

    monkeypatch.setattr(tier, "fly" if tier.flies else "read", refuse)
    gets = [asyncio.ensure_future(scheduler.gather(keys)) for keys in ([1], [1, 2], [3])]
    ends = await asyncio.wait_for(asyncio.gather(*gets, return_exceptions=True), 5)
    assert {type(end) for end in ends} == {MemoryError}
    monkeypatch.undo()
    assert table.used == 0
    assert not scheduler.reading
    assert all(table.state(key) == 2 for key in (1, 2, 3))
    await finish(scheduler, tier)
