"""Room and reloads: who gets memory next, and which reads are under way.

Invariants
----------
* A key has at most one current reload. Whoever asks meanwhile joins it. A put or delete makes it stale: its bytes
  are thrown away when they arrive and its waiters look again.
* The operation owns its extent until the engine says `released`, whatever became of those who waited for it.
* Dirty blocks never fill the pool: a reload always finds room that is free or clean, unless views pin it.
* What all calls together copy in one turn of the loop is bounded. Who finds the turn spent waits in line; puts and
  copies out of the pool have the first right in alternate turns, so neither starves the other.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from asynckv._core import Answers
from asynckv.errors import DiskError
from asynckv.health import READ, Breaker
from asynckv.tiers.base import wait_at_most
from asynckv.waiting import (
    ABSENT,
    AGAIN,
    BLOCKED,
    DISK,
    DISK_HIT,
    DONE,
    FLIGHT_BLOCKS,
    ITEM_BYTES,
    LOADING,
    MISS,
    NO_ROOM,
    TURN_KEYS,
    Calls,
    Gather,
    Putting,
    Reload,
    Reserving,
    RoomQueue,
    Waiter,
    plain_key,
)
from asynckv.writer import Writer

if TYPE_CHECKING:
    from collections.abc import Callable

    from asynckv._core import Draft, Load, Room, Table
    from asynckv.clock import Clock, TimerHandle
    from asynckv.config import Config
    from asynckv.tiers.base import Tier

log = logging.getLogger("asynckv")

LATENCIES_KEPT = 4096
COPY_BYTES = 2 << 20  # in one turn of the loop, by all calls together: some 0.3 ms
FAILED_READS_KEPT = 1024
PREFETCH_BLOCKS_MAX = 512
FLIGHT_BLOCK_MAX = 256 << 10  # larger ones are read one by one, and verified by a worker
# Of the pool: dirty blocks never hold more than this, so that reloads always find clean or free room.
DIRTY_LIMIT = 15 / 16
# Of the pool: what operations past their deadline may hold before the disk is switched off.
QUARANTINE_LIMIT = 1 / 4


def wire_key(key: Any) -> tuple[int, bytes]:
    """Kind and bytes of a key as the log writes them (docs/format.md, "Keys")."""
    key = plain_key(key)
    if isinstance(key, int):
        return 0, int(key).to_bytes(8, "little", signed=True)
    if isinstance(key, bytes):
        return 1, bytes(key)
    return 2, key.encode()


class Counters:
    """Plain event counts of one cache; `Stats` is a snapshot of them."""

    def __init__(self) -> None:
        self.memory_hits = 0  # correction to the table's own count: hits found but not delivered
        self.disk_hits = 0
        self.misses = 0
        self.no_room = 0
        self.puts = 0
        self.rejected_puts = 0
        self.spilled_blocks = 0
        self.spilled_bytes = 0
        self.loaded_blocks = 0
        self.loaded_bytes = 0
        self.dropped_blocks = 0  # lost by closing; others are counted by the table
        self.corrupt_blocks = 0
        self.io_errors = 0
        self.io_timeouts = 0
        self.load_seconds: deque[float] = deque(maxlen=LATENCIES_KEPT)


class Scheduler:
    """Joins the block table and a tier below it; every public call that may wait goes through here.

    Parameters
    ----------
    table, tier
        The tier is None for a store that lives in memory only.
    on_turn
        Called after each turn of the loop in which room of the pool came into use.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        table: Table,
        tier: Tier | None,
        config: Config,
        clock: Clock,
        on_turn: Callable[[], object] = lambda: None,
    ) -> None:
        self.loop = loop
        self.table = table
        self.tier = tier
        self.clock = clock
        self.counters = Counters()
        self.io_timeout = config.io_timeout
        self.breaker = Breaker(self._health_changed)
        self.load_queue = RoomQueue(loop, clock, config.room_timeout, self.kick)
        self.put_queue = RoomQueue(loop, clock, config.room_timeout, self.kick)
        self._boarding: list[Load] = []  # reads begun in this turn, that fly together
        self._failed_reads: set[Any] = set()
        self.looking: set[Gather] = set()  # large batches between two turns
        self.writer = Writer(self, config)
        self._dirty_limit = int(table.capacity * DIRTY_LIMIT)
        self._turn_due = False
        self._on_turn = on_turn
        self._copied = 0  # bytes, in this turn of the loop
        self._copiers: deque[tuple[asyncio.Future[None], int]] = deque()
        self._copies_first = False
        self.closed = False
        self.calls = Calls(loop)
        self._recovery: asyncio.Task[None] | None = None
        self._known = True  # the index holds all that the log does
        self._recovery_waiters: list[tuple[Gather, int, TimerHandle]] = []
        self._probe: asyncio.Task[bool] | None = None
        self._probe_timer: TimerHandle | None = None
        table.wake = self._wake_from_anywhere

    # -- waking the queues ---------------------------------------------------------------------------------------

    def _wake_from_anywhere(self) -> None:
        # Called by a dying view, on any thread or inside garbage collection: nothing but a call into the loop.
        try:
            self.loop.call_soon_threadsafe(self.kick)
        except RuntimeError:  # the loop is closed: nobody waits any more
            return

    def kick(self) -> None:
        """Something that may make room happened: let the queues look in the next turn, once."""
        if not self.closed and (self.load_queue or self.put_queue):
            self._next_turn()

    def _next_turn(self) -> None:
        if not self._turn_due:
            self._turn_due = True
            self.loop.call_soon(self._turn)

    def _turn(self) -> None:
        """What is done at most once in a turn of the loop."""
        self._turn_due = False
        self._copied = 0
        self._copies_first = not self._copies_first
        if self._copies_first:
            self._grant_copies()
        if not self.closed:
            self._pump()
            self._on_turn()
        self._grant_copies()

    def _pump(self) -> None:
        answers = []
        for queue in sorted((self.load_queue, self.put_queue), key=lambda queue: queue.arrival):
            answers.append(queue.pump())
            if answers[-1] == AGAIN and not self.turn_is_spent:  # a reload copies nothing
                break
        self.table.waiting = BLOCKED in answers
        if AGAIN in answers:
            self.kick()

    def enqueue_load(self, gather: Gather) -> None:
        """Let a call take room at once when nobody is before it, else queue it."""
        if gather not in self.load_queue:
            self._enqueue(self.load_queue, gather)

    def enqueue_put(self, waiter: Putting | Reserving) -> None:
        """As `enqueue_load`, for a put or a reservation."""
        self._enqueue(self.put_queue, waiter)

    def _enqueue(self, queue: RoomQueue, waiter: Waiter) -> None:
        free = not self.load_queue and not self.put_queue
        try:
            answer = waiter.step() if free else BLOCKED
        except Exception as error:
            if not waiter.future.done():
                waiter.future.set_exception(error)
            return
        if answer == DONE:
            return
        if free and answer == BLOCKED and waiter.blocked():
            waiter.expire()
            return
        queue.add(waiter, working=answer == AGAIN)
        self.table.waiting = True
        self.kick()  # what the call itself gave up while it was blocked may have made room

    # -- reads ---------------------------------------------------------------------------------------------------

    async def gather(self, keys: list[Any], timeout: float | None = None, *, absent: bool = False) -> list[Any]:
        """Blocks for these keys, None where there is none.

        Parameters
        ----------
        timeout
            Seconds after which keys that have not come count as misses.
        absent
            None of them is in memory.
        """
        if len(keys) > TURN_KEYS:
            gather = Gather(self, keys)
            gather.start()
            answers = gather.answers
        else:
            found = ([None] * len(keys), range(len(keys))) if absent else self.table.get_many(keys)
            if not found[1]:
                return found[0]
            places = found[1]
            answers = Answers(keys, found[0], places, self.loop.create_future())
            del found  # a cancelled call, whose frame lives on in the error, pins nothing
            self._answer(answers, places, patient=timeout is None)
        if not answers.missing:
            return answers.results
        timer = None
        if timeout is not None:
            timer = self.clock.call_later(self.loop, timeout, answers.gather.patience_over)
        try:
            await answers.future
            return answers.results
        except asyncio.CancelledError:
            if answers.gather is not None:
                answers.gather.cancel()
            else:
                answers.drop()
            raise
        finally:
            if timer is not None:
                timer.cancel()

    def _answer(self, answers: Answers, places: Sequence[int], *, patient: bool) -> None:
        """Start to get what is not in memory."""
        try:
            if not self.load_queue and not self.put_queue:
                places = self.begin(answers, places)
            if places or not patient:
                Gather(self, answers=answers).go_on(places)
        except BaseException:
            answers.drop()
            raise

    @property
    def reading(self) -> bool:
        """Whether the disk is asked for blocks."""
        return self.table.loads_count > 0

    def count(self, code: int) -> None:
        """Count keys that ended with `code`; memory hits are counted by the table."""
        if code == DISK_HIT:
            self.counters.disk_hits += 1
        elif code == MISS:
            self.counters.misses += 1
        elif code == NO_ROOM:
            self.counters.no_room += 1

    def uncount(self, code: int) -> None:
        """Take back a hit that was found, but not delivered."""
        if code == DISK_HIT:
            self.counters.disk_hits -= 1
        else:
            self.counters.memory_hits -= 1

    def current_reload(self, key: Any) -> Reload | None:
        load = self.table.loading(key)
        return None if load is None else self.reload_of(load)

    def reload_of(self, load: Load) -> Reload:
        """What a read is for when more is to be done at its end than to publish the bytes: `finish_reload` does it."""
        reload: Reload | None = load.reload
        if reload is None:
            answers, load.answers = load.answers, None
            reload = load.reload = Reload(self, load)
            if answers is not None and not answers.over:
                reload.waiters.append((answers.gather or Gather(self, answers=answers), load.index))
        return reload

    def start_reload(self, key: Any, room: Room) -> Reload:
        """Submit the read of a block that is on disk only, into room already granted."""
        load = self.table.begin_load(key, room, self.clock.monotonic())
        self.spend(0)
        try:
            return self._read(load)
        except BaseException as failure:
            self._abandon(load, failure)
            raise

    def _read(self, load: Load) -> Reload:
        assert self.tier is not None
        reload = self.reload_of(load)
        self.tier.read(load, reload)
        return reload

    def _abandon(self, load: Load, failure: BaseException) -> None:
        """A read could not be submitted, for want of memory, say: those who wait get the reason."""
        answers, reload = load.answers, load.reload
        load.answers = load.reload = None
        self.table.finish_load(load, False)
        if answers is not None:
            answers.fail(failure)
        if reload is not None:
            self._answer_waiters(reload, lambda gather, _: gather.broken(failure))
            reload.end()

    def begin(self, answers: Answers, places: Sequence[int], most: int = FLIGHT_BLOCKS) -> list[int]:
        """Start to read what is on disk and finds room at once, `most` blocks of it; the places that are left."""
        now = self.clock.monotonic()
        loads, left, misses = self.table.begin_loads(answers, places, FLIGHT_BLOCK_MAX, most, now)
        if answers.counted:
            self.counters.misses += misses
        if loads:
            self.spend(0)
            if not self._boarding:
                self.loop.call_soon(self._depart)
            self._boarding += loads
        return left

    def _depart(self) -> None:
        """Submit what was begun in the last turn of the loop, together."""
        loads, self._boarding = self._boarding, []
        if self.closed:
            return
        loads, stale = self.table.locate_loads(loads)
        for load in stale:  # replaced or deleted already: nothing is read
            reload = self.reload_of(load)
            load.reload = None
            self.table.finish_load(load, False)
            self._answer_waiters(reload, Gather.again)
            reload.end()
        if loads:
            self._submit(loads)

    def _submit(self, loads: list[Load]) -> None:
        assert self.tier is not None
        submitted = 0
        try:
            loads = self.tier.fly(loads, self)
            for load in loads:
                self._read(load)
                submitted += 1
        except Exception as failure:
            for load in loads[submitted:]:
                self._abandon(load, failure)

    # As the pilot of its reads, see `asynckv.backends.base.Pilot`.

    def on_landed(self, loads: list[Load]) -> None:
        """Publish blocks, and answer those who wait for them."""
        if self.closed:
            return
        counters = self.counters
        odd, nbytes, hits = self.table.land_loads(loads, self.clock.monotonic(), counters.load_seconds.append)
        counters.loaded_blocks += len(loads) - len(odd)
        counters.loaded_bytes += nbytes
        counters.disk_hits += hits
        self.breaker.success(READ)
        if self._failed_reads:
            self._failed_reads.difference_update(load.plain_key for load in loads)
        for load in odd:
            reload = self.reload_of(load)
            reload.released = True
            reload.on_ended(True, None)
        self.kick()

    def on_fallen(self, load: Load, error: BaseException | None, free: bool) -> None:
        """Try it once more by itself, or answer with what there is."""
        if self.closed:
            return
        reload = self.reload_of(load)
        if error is not None:
            reload.released = free
            reload.on_ended(False, error)
            return
        try:
            self._read(load)
        except Exception as failure:
            self._abandon(load, failure)

    def on_released(self, load: Load) -> None:
        """The bytes of one that ran past its deadline are free now."""
        reload: Reload | None = load.reload
        if reload is not None:
            reload.on_released()

    def finish_reload(self, reload: Reload, good: bool, error: BaseException | None) -> None:
        """Publish or discard the bytes of a read that ended, and answer those who wait for it."""
        if self.closed:
            return
        table, counters, load = self.table, self.counters, reload.load
        current = table.is_current(load)
        if isinstance(error, TimeoutError) and not reload.released:
            reload.expired = True
            table.expire_load(load)
        else:
            load.reload = None  # which holds it
            arrived = table.finish_load(load, good)
            if arrived:
                seconds = self.clock.monotonic() - load.started
                counters.load_seconds.append(seconds)
                counters.loaded_blocks += 1
                counters.loaded_bytes += load.stored
        if error is None:
            self.breaker.success(READ)
            self._failed_reads.discard(reload.key)
            if not good and current:  # else it was replaced, or its segment is gone
                counters.corrupt_blocks += 1
                table.drop(reload.key)
        elif isinstance(error, TimeoutError):
            counters.io_timeouts += 1
            self.breaker.failure(READ)
            if table.quarantined > table.capacity * QUARANTINE_LIMIT:
                self.breaker.trip(READ)
        else:
            counters.io_errors += 1
            self.breaker.failure(READ)
            if current and self.breaker.ok:
                self._unreadable(reload.key)
        if good and current:
            self._answer_waiters(reload, lambda gather, index: gather.arrived(index, load))
        else:
            self._answer_waiters(reload, Gather.failed if current else Gather.again)
        self.kick()
        self.writer.go_on()  # a dropped block owes a tombstone

    def _answer_waiters(self, reload: Reload, answer: Callable[[Gather, int], object]) -> None:
        for gather, index in reload.waiters:
            try:
                answer(gather, index)
            except Exception as failure:  # no memory for a view, say: the others are answered all the same
                gather.broken(failure)
        reload.waiters.clear()

    def _unreadable(self, key: Any) -> None:
        """A block that fails twice on a disk that serves others would fail for ever: forget it, as damage."""
        if key in self._failed_reads:
            self._failed_reads.discard(key)
            self.table.drop(key)
        elif len(self._failed_reads) < FAILED_READS_KEPT:
            self._failed_reads.add(key)

    def prefetch(self, keys: Sequence[Any]) -> int:
        """Start reads into free or clean room, as far as it goes; loads started or joined."""
        room_left = not self.load_queue and not self.put_queue
        places: Sequence[int] = range(len(keys))
        before = self.table.loads_count
        if room_left:
            nobody = Answers(list(keys), [], (), None, False)
            nobody.drop()
            places = self.begin(nobody, places, max(0, PREFETCH_BLOCKS_MAX - before))
        begun = self.table.loads_count - before
        for place in places:
            key = keys[place]
            state = self.table.state(key)
            if state == LOADING:
                begun += self.current_reload(key) is not None
            elif state == DISK and room_left:  # larger than what flies
                room = self._clean_room(key)
                if room is not None:
                    self.start_reload(key, room)
                    begun += 1
                room_left = room is not None and self.table.loads_count < PREFETCH_BLOCKS_MAX
        return begun

    def _clean_room(self, key: Any) -> Room | None:
        where = self.table.where(key)
        assert where is not None
        try:
            room = self.table.room(where[2])
        except ValueError:  # larger than the pool
            return None
        answer = room.step()
        while answer == AGAIN:  # what was evicted for it is not evicted in vain
            answer = room.step()
        if answer == DONE:
            return room
        room.cancel()
        return None

    # -- what one turn may copy ----------------------------------------------------------------------------------

    @property
    def turn_is_spent(self) -> bool:
        """Whether as much was copied as one turn of the loop allows: whoever wants to copy more waits for the next."""
        return self._copied >= COPY_BYTES

    def spend(self, nbytes: int) -> None:
        """Note that room of the pool came into use in this turn, and that so many bytes are copied."""
        self._copied += nbytes
        if not self._turn_due:
            self._next_turn()

    async def copy_turn(self, nbytes: int) -> None:
        """Wait for the right to copy so many bytes out of the pool, in order of arrival."""
        nbytes += ITEM_BYTES
        if not self._copiers and not self.turn_is_spent:
            self.spend(nbytes)
            return
        future: asyncio.Future[None] = self.loop.create_future()
        self._copiers.append((future, nbytes))
        self._next_turn()
        await future

    def _grant_copies(self) -> None:
        while self._copiers and not self.turn_is_spent:
            future, nbytes = self._copiers.popleft()
            if not future.done():
                self.spend(nbytes)
                future.set_result(None)
        if self._copiers:
            self._next_turn()

    # -- puts ----------------------------------------------------------------------------------------------------

    def too_dirty(self, extent: int) -> bool:
        """Would this put leave reloads without clean or free room?"""
        table = self.table
        if not table.backed:
            return False
        held = table.dirty_bytes + self.writer.bytes_in_flight
        return bool(held and held + extent > self._dirty_limit)

    def put_now(self, key: Any, draft: Draft) -> bool:
        """Store at once when nobody waits, there is room, and the turn is not spent."""
        return self._copied < COPY_BYTES and not self.load_queue and not self.put_queue and self.store(key, draft)

    def store(self, key: Any, draft: Draft) -> bool:
        """Store in room that is there at once, if any is."""
        extent = draft.extent
        if self.too_dirty(extent) or not self.table.put(key, draft):
            return False
        self._stored(extent)
        return True

    def fill(self, room: Room, key: Any, draft: Draft) -> None:
        """Store in room that was granted."""
        self.table.fill(room, key, draft)
        self._stored(draft.extent)

    def _stored(self, extent: int) -> None:
        self.counters.puts += 1
        self.spend(extent + ITEM_BYTES)
        self.writer.poke()

    async def put(self, items: Sequence[tuple[Any, Draft | None]]) -> list[bool]:
        """Store in order, waiting for room; False for what got none in time."""
        putting = Putting(self, [(plain_key(key), draft) for key, draft in items])
        self.enqueue_put(putting)
        try:
            return await putting.future
        except asyncio.CancelledError:
            putting.cancel()
            raise

    async def reserve(self, draft: Draft) -> Room | None:
        """Room for a block its user will write in place; None when none came in time."""
        reserving = Reserving(self, draft)
        self.enqueue_put(reserving)
        try:
            return await reserving.future
        except asyncio.CancelledError:
            reserving.cancel()
            raise

    def forget(self, key: Any) -> None:
        """Remove a key whose put was refused; an older record on disk gets its tombstone with the next batch."""
        if self.table.remove(key) == 2 and self.tier is not None:
            self.writer.bury(wire_key(key))
        self.kick()

    # -- removal -------------------------------------------------------------------------------------------------

    async def delete(self, keys: Sequence[Any]) -> int:
        """Remove keys from every tier, durably; how many there were."""
        with self.calls:
            return await self._delete(keys)

    async def _delete(self, keys: Sequence[Any]) -> int:
        if self.recovering:
            await self.recovered()
        count = 0
        owed: list[asyncio.Future[None]] = []
        for number, key in enumerate(keys, 1):
            if number % TURN_KEYS == 0:
                await asyncio.sleep(0)
            found = self.table.state(key) != ABSENT
            answer = self.table.remove(key)
            count += found or answer == 1
            if self.tier is not None and (answer == 2 or self.writer.is_owed(wire_key(key))):
                owed.append(self.writer.bury(wire_key(key), durable=True))
        self.kick()
        await self._durable(owed)
        return count

    async def clear(self) -> None:
        """Remove every key of this namespace from every tier, durably."""
        with self.calls:
            self.table.clear()
            self.kick()
            if self.tier is not None:
                await self._durable([self.writer.clear()])

    async def _durable(self, owed: list[asyncio.Future[None]]) -> None:
        if not owed:
            return
        await asyncio.wait(owed)
        for future in owed:
            error = None if future.cancelled() else future.exception()
            if error is not None:
                code = getattr(error, "errno", None)
                raise DiskError("the removal could not be made durable", operation="delete", errno=code) from error

    # -- recovery ------------------------------------------------------------------------------------------------

    @property
    def recovering(self) -> bool:
        return self._recovery is not None

    def start_recovery(self) -> None:
        """Scan the log in the background while the store serves."""
        self.table.recovering = True
        self._known = False
        self._recovery = self.loop.create_task(self._recover(), name="asynckv recovery")
        self._recovery.add_done_callback(lambda _: self._recovery_over())

    async def _recover(self) -> None:
        assert self.tier is not None
        try:
            await self.tier.recover(self._recovery_progress)
            self._known = True
        except Exception:
            if not self.loop.is_closed():  # else collected with it: what the cleaning up met says nothing
                log.exception("asynckv: recovery ended early; what it did not reach are misses until the next opening")
                self.counters.io_errors += 1
        finally:
            if not self.loop.is_closed():
                self._recovery_over()

    def _recovery_over(self) -> None:
        if self._recovery is None:
            return
        assert self.tier is not None
        self.tier.recovery_over()  # also when the task was cancelled before its first step
        self.table.log_unknown |= not self._known
        self.table.recovering = False
        self._recovery = None
        self._recovery_progress()
        self.writer.go_on()

    def _recovery_progress(self) -> None:
        """Let those look again whose key has turned up; all of them when the scan is over."""
        waiters, self._recovery_waiters = self._recovery_waiters, []
        for waiter in waiters:
            gather, index, timer = waiter
            if gather.future.done():
                timer.cancel()
            elif self._recovery is None or self.table.state(gather.keys[index]) != ABSENT:
                timer.cancel()
                try:
                    gather.again(index)
                except Exception as failure:
                    gather.broken(failure)
            else:
                self._recovery_waiters.append(waiter)

    def await_recovery(self, gather: Gather, index: int) -> None:
        """A key not found so far waits for the scan, at most `io_timeout`."""
        timer = self.clock.call_later(self.loop, self.io_timeout, lambda: gather.failed(index))
        self._recovery_waiters.append((gather, index, timer))

    async def recovered(self) -> None:
        """Wait for the scan, at most `io_timeout`."""
        if self._recovery is not None:
            await wait_at_most(self.clock, self.io_timeout, [self._recovery])

    # -- health --------------------------------------------------------------------------------------------------

    def _health_changed(self, ok: bool) -> None:
        self.table.backed = ok
        self.table.disk_readable = ok
        if ok:
            self.writer.poke()
        else:
            self.writer.disk_off()
            if not self.closed:
                self._probe_later()
        self.kick()

    def _probe_later(self) -> None:
        self._probe_timer = self.clock.call_later(self.loop, self.breaker.delay_s, self._begin_probe)

    def _begin_probe(self) -> None:
        self._probe = self.loop.create_task(self._ask_disk(), name="asynckv probe")
        self._probe.add_done_callback(self._probed)

    async def _ask_disk(self) -> bool:
        assert self.tier is not None
        try:
            return await self.tier.probe()
        except OSError:
            return False
        except Exception:  # our bug: the disk stays off, and is tried again
            if not self.loop.is_closed():  # as in `_recover`
                log.exception("asynckv: the probe failed")
            return False

    def _probed(self, probe: asyncio.Task[bool]) -> None:
        self._probe = None
        if self.closed or self.loop.is_closed():
            return
        if not probe.cancelled():  # else by somebody who cancelled all tasks of the loop
            self.breaker.probed(probe.result())
        if not self.breaker.ok:
            self._probe_later()

    # -- end -----------------------------------------------------------------------------------------------------

    async def drain(self) -> None:
        """Let waiting calls and reads end by themselves; each is bounded by its own deadline."""
        while True:
            waiting: set[asyncio.Future[Any]] = {w.future for q in (self.load_queue, self.put_queue) for w in q}
            waiting.update(gather.future for gather, _, _ in self._recovery_waiters)
            waiting.update(gather.future for gather in self.looking)
            if self.calls.count:
                waiting.add(self.calls.over())
            for load in self.table.loads_begun:
                reload = self.reload_of(load)
                waiting.add(reload.over())
                waiting.update(gather.future for gather, _ in reload.waiters)
            pending = [future for future in waiting if not future.done()]
            if not pending:
                return
            await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)

    async def close(self) -> bool:
        """Stop all background work; True when the disk holds everything and the index knows it."""
        await self.drain()
        if self._recovery is not None:
            await asyncio.wait([self._recovery])
        clean = await self.writer.close()
        self.closed = True
        if self.tier is not None:
            self.counters.dropped_blocks += self.table.dirty_blocks + self.table.unbacked_blocks
        if self._probe_timer is not None:
            self._probe_timer.cancel()
        if self._probe is not None:
            self._probe.cancel()
            await asyncio.wait([self._probe])
        self.table.waiting = False
        return clean and self._known and self.breaker.ok
