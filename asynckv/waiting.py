"""Calls that wait: for room in the pool, or for a read.

Invariants
----------
* Two queues wait for room, one of reloads and one of puts, the one with the older head first; in each only the head
  takes steps, so room is granted in order of arrival and a batch gets all it needs before the next one starts: two
  batches cannot deadlock. A put that waits for a write does not hold up a reload that finds clean room. Those behind a
  blocked head give up the blocks that they have already found.
* A waiter that leaves (cancelled, timed out) frees its interest and the room it was granted, never an extent that
  an operation still owns.
* Every key of a call ends as exactly one of memory hit, disk hit, miss, no room.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import operator
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from asynckv._core import Answers
from asynckv.clock import Stalls

if TYPE_CHECKING:
    from asynckv._core import Draft, Load, Room
    from asynckv.clock import Clock, TimerHandle
    from asynckv.scheduler import Scheduler

ABSENT, MEMORY, DISK, LOADING = range(4)
DONE, AGAIN, BLOCKED = 1, 0, -1
PENDING, MEMORY_HIT, DISK_HIT, MISS, NO_ROOM = range(5)

# What one call may do before the loop turns: some hundred microseconds of look-ups.
TURN_KEYS = 512
RELOAD_KEYS = 16  # of look-ups: what starting a reload costs
FLIGHT_BLOCKS = 128  # reloads that one call starts at once
ITEM_BYTES = 4 << 10  # of copying: what a put costs besides its bytes

WORKING_LOOK_SECONDS = 0.05  # how often those behind a working head are looked at, once they are late

_arrivals = itertools.count()


def plain_key(key: Any) -> int | bytes | str:
    """The key as the plain object that dictionaries compare by value, whatever a subclass makes of that."""
    if type(key) in (int, bytes, str):
        return key  # type: ignore[no-any-return]
    if isinstance(key, str):
        return str.__str__(key)
    return bytes.__getitem__(key, slice(None)) if isinstance(key, bytes) else int.__index__(operator.index(key))


class RoomQueue(OrderedDict["Waiter", float]):
    """Calls that wait for room, in order of arrival, with their deadlines.

    A call is given up when it has waited `timeout` seconds and the head of the queue is blocked; while the head works,
    if only over several turns, nobody behind it is.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, clock: Clock, timeout: float, on_leave: Callable[[], object]
    ) -> None:
        super().__init__()
        self._loop = loop
        self._clock = clock
        self._timeout = timeout
        self._on_leave = on_leave  # a head that leaves may have been all that was in the way
        self._working = False
        self._timer: TimerHandle | None = None  # for the first deadline
        self._stalls = Stalls(loop)
        self._pinning: set[Waiter] = set()  # those that came with blocks

    @property
    def arrival(self) -> float:
        """When the head came, in the order of all calls of the process; infinity without one."""
        return next(iter(self)).arrival if self else math.inf

    def add(self, waiter: Waiter, *, working: bool) -> None:
        """Put a call at the end; `working` when it is the head and has more to do at once."""
        if not self:
            self._working = working
        waiter.arrival = next(_arrivals)
        self[waiter] = self._clock.monotonic() + self._timeout
        if waiter.pins:
            self._pinning.add(waiter)
        if self._timer is None:
            self._arm(self._timeout)

    def discard(self, waiter: Waiter) -> None:
        """Take a call out, wherever it stands."""
        if self.pop(waiter, None) is not None:
            self._pinning.discard(waiter)
            if not self and self._timer is not None:
                self._timer.cancel()
                self._timer = None
            self._on_leave()

    def _arm(self, delay: float) -> None:
        self._stalls.armed(delay)
        self._timer = self._clock.call_later(self._loop, delay, self._expire)

    def _expire(self) -> None:
        self._timer = None
        if not self:
            return
        grace = self._stalls.grace()
        if grace:
            self._arm(grace)
            return
        now = self._clock.monotonic()
        late = [] if self._working else list(takewhile(lambda waiter: self[waiter] <= now, self))
        for waiter in late:
            self.discard(waiter)
        if self:
            left = min(self._timeout, WORKING_LOOK_SECONDS) if self._working else next(iter(self.values())) - now
            self._arm(max(0.0, left))
        for waiter in late:
            waiter.expire()

    def pump(self) -> int:
        """Let the heads work. DONE when the queue is empty, else what its head answered."""
        while self:
            head = next(iter(self))
            try:
                answer = head.step()
            except Exception as error:  # our bug: its call gets it, those behind it go on
                self.discard(head)
                if not head.future.done():
                    head.future.set_exception(error)
                continue
            if answer == AGAIN:
                break
            if answer == BLOCKED and not head.blocked():
                answer = AGAIN if self._unpin_behind(head) else BLOCKED
                break
            self.discard(head)
            if answer == BLOCKED:
                head.expire()
        else:
            answer = DONE
        self._working = answer == AGAIN
        return answer

    def _unpin_behind(self, head: Waiter) -> bool:
        """Let those who wait behind a blocked head give up their blocks, which may be all that is in its way."""
        behind = [waiter for waiter in self._pinning if waiter is not head]
        self._pinning.difference_update(behind)
        return sum(waiter.unpin() for waiter in behind) > 0


class Waiter:
    """One call that waits for room.

    Attributes
    ----------
    future
        Its result.
    arrival
        When it came, in the order of all calls of the process.
    pins
        Whether it holds blocks.
    """

    __slots__ = ("_queue", "_room", "_scheduler", "arrival", "future")
    pins = False

    future: asyncio.Future[Any]
    arrival: int

    def __init__(self, scheduler: Scheduler, queue: RoomQueue, future: asyncio.Future[Any] | None = None) -> None:
        self._scheduler = scheduler
        self._queue = queue
        self._room: Room | None = None
        self.future = scheduler.loop.create_future() if future is None else future

    def step(self) -> int:
        """Take what room there is: DONE, AGAIN next turn, or BLOCKED."""
        raise NotImplementedError

    def blocked(self) -> bool:
        """Called when blocked at the head; True when waiting longer is pointless."""
        raise NotImplementedError

    def unpin(self) -> bool:
        """Give up all blocks, to look for them again; whether there were any."""
        return False

    def expire(self) -> None:
        """No room came in time: finish with what there is."""
        raise NotImplementedError

    def cancel(self) -> None:
        """Give up: nothing stays held or pinned by this call."""
        self._queue.discard(self)
        self._drop_room()
        self.future.cancel()
        self._scheduler.kick()

    def _drop_room(self) -> None:
        if self._room is not None:
            self._room.cancel()
            self._room = None


class Calls:
    """Calls of several steps, entered by each: a close lets them take the last one.

    Attributes
    ----------
    count
        How many are under way.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.count = 0
        self._loop = loop
        self._over: asyncio.Future[None] | None = None

    def __enter__(self) -> None:
        self.count += 1

    def __exit__(self, *exc: object) -> None:
        self.count -= 1
        if not self.count and self._over is not None:
            self._over.set_result(None)
            self._over = None

    def over(self) -> asyncio.Future[None]:
        """A future that ends with the last of those under way."""
        if self._over is None:
            self._over = self._loop.create_future()
        return self._over


class Owned:
    """An operation whose bytes of the pool the engine owns until it says `released`, whatever became of its future."""

    __slots__ = ("expired", "released", "scheduler")

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.expired = False  # it ran past its deadline, and its future is done
        self.released = False

    def on_released(self) -> None:
        """The engine no longer touches the bytes."""
        self.released = True
        if self.expired and not self.scheduler.closed:
            self.give_back()
            self.scheduler.kick()

    def give_back(self) -> None:
        """End the quarantine of the bytes."""
        raise NotImplementedError


class Reload(Owned):
    """One read of one block into the pool, and those who wait for it; the sink of that read."""

    __slots__ = ("_over", "key", "load", "waiters")

    def __init__(self, scheduler: Scheduler, load: Load) -> None:
        super().__init__(scheduler)
        self.key = load.plain_key
        self.load = load
        self.waiters: list[tuple[Gather, int]] = []
        self._over: asyncio.Future[None] | None = None

    def give_back(self) -> None:
        self.load.reload = None  # which holds this
        self.scheduler.table.release_load(self.load)

    def on_ended(self, result: bool, error: BaseException | None) -> None:
        """The tier's answer."""
        try:
            self.scheduler.finish_reload(self, result, error)
        finally:
            self.end()

    def end(self) -> None:
        """The read is no longer under way."""
        if self._over is not None:
            self._over.set_result(None)

    def over(self) -> asyncio.Future[None]:
        """A future that ends with the read."""
        if self._over is None:
            self._over = self.scheduler.loop.create_future()
        return self._over


class Gather(Waiter):
    """The reads of one call: a list of keys, answered in order.

    `results[i]` is a block or None, `codes[i]` says how it ended.

    Parameters
    ----------
    answers
        Those of a call that is under way; without it `keys` and `counted` make new ones.
    """

    __slots__ = ("_room_bytes", "_todo", "answers")

    future: asyncio.Future[None]

    def __init__(
        self,
        scheduler: Scheduler,
        keys: Sequence[Any] = (),
        *,
        counted: bool = True,
        answers: Answers | None = None,
    ) -> None:
        super().__init__(scheduler, scheduler.load_queue, None if answers is None else answers.future)
        if answers is None:
            answers = Answers(list(keys), [None] * len(keys), range(len(keys)), self.future, counted)
        answers.gather = self
        self.answers = answers
        self._todo: deque[int] = deque()
        self._room_bytes = 0  # stored bytes of the block it is for

    @property
    def keys(self) -> list[Any]:
        return self.answers.keys

    @property
    def results(self) -> list[Any]:
        return self.answers.results

    @property
    def codes(self) -> list[int]:
        return self.answers.codes

    def start(self) -> None:
        """Answer what needs no room, some hundred keys a turn, then queue for the rest."""
        if len(self.keys) > 1:
            for key in self.keys:
                self._scheduler.table.check_key(key)
        self._look(0)

    def go_on(self, places: Sequence[int]) -> None:
        """As `start`, for some hundred places whose keys are not in memory."""
        for index in places:
            if not self._without_memory(index):
                self._todo.append(index)
        if self._todo:
            self._scheduler.enqueue_load(self)

    def _look(self, first: int) -> None:
        for index in range(first, min(first + TURN_KEYS, len(self.keys))):
            if not self._without_room(index):
                self._todo.append(index)
        if first + TURN_KEYS < len(self.keys):
            self._scheduler.looking.add(self)
            self._scheduler.loop.call_soon(self._look_on, first + TURN_KEYS)
        elif self._todo:
            self._scheduler.enqueue_load(self)

    def _look_on(self, first: int) -> None:
        self._scheduler.looking.discard(self)
        if self.future.done():
            return
        try:
            self._look(first)
        except Exception as error:
            self.broken(error)

    def broken(self, error: BaseException) -> None:
        """Something failed that is neither the disk's nor the pool's answer: the call ends with it."""
        if not self.future.done():
            self.future.set_exception(error)

    def _without_room(self, index: int) -> bool:
        """Answer a key that is in memory or nowhere, or join its reload; False for a block on disk."""
        table, key = self._scheduler.table, self.keys[index]
        block = table.get(key) if self.answers.counted else table.peek(key)
        if block is not None:
            self._settle(index, block, MEMORY_HIT)
            return True
        return self._without_memory(index)

    def _without_memory(self, index: int) -> bool:
        """As `_without_room`, for a key that is not in memory."""
        scheduler, key = self._scheduler, self.keys[index]
        state = scheduler.table.state(key)
        if state == DISK:
            return False
        reload = scheduler.current_reload(key) if state == LOADING else None
        if reload is not None:
            reload.waiters.append((self, index))
        elif scheduler.recovering:
            scheduler.await_recovery(self, index)
        else:
            self._settle(index, None, MISS)
        return True

    def cancel(self) -> None:
        self._todo.clear()
        self.answers.drop()
        super().cancel()

    def _settle(self, index: int, block: Any, code: int) -> None:
        answers = self.answers
        if self.future.done() or answers.codes[index] != PENDING:
            return
        if answers.counted:
            self._scheduler.count(code)
        answers.answer(index, block, code)

    def step(self) -> int:
        left = TURN_KEYS
        if self._room is None and self._todo:
            places = list(itertools.islice(self._todo, FLIGHT_BLOCKS))
            rest = self._scheduler.begin(self.answers, places)
            if len(rest) < len(places):
                self._todo = deque([*rest, *itertools.islice(self._todo, len(places), None)])
                if not rest and self._todo:
                    return AGAIN
        while self._todo:
            if left <= 0:
                return AGAIN
            index = self._todo[0]
            if self._without_room(index):
                left -= 1
            else:
                left -= RELOAD_KEYS
                try:
                    answer = self._room_step(self.keys[index])
                except ValueError:  # larger than the pool: written when the store had more memory
                    self._settle(index, None, NO_ROOM)
                else:
                    if answer != DONE:
                        return answer
                    room, self._room = self._room, None
                    assert room is not None
                    self._scheduler.start_reload(self.keys[index], room).waiters.append((self, index))
            self._todo.popleft()
            self._drop_room()  # claimed for a key that came or went by itself
        return DONE

    def _room_step(self, key: Any) -> int:
        where = self._scheduler.table.where(key)
        assert where is not None
        stored = where[2]
        if self._room is None or stored != self._room_bytes:  # the first step, or the key was replaced meanwhile
            self._drop_room()
            self._room = self._scheduler.table.room(stored)
            self._room_bytes = stored
        return self._room.step()

    def blocked(self) -> bool:
        """Let go of hits behind the blocked key; hopeless when only this call's own pins are in the way."""
        scheduler = self._scheduler
        first = self._todo[0]
        if self._forget(i for i in range(first + 1, len(self.keys)) if self.codes[i] == MEMORY_HIT):
            scheduler.kick()
            return False
        if self._room is not None and self._room.needs_spill:
            scheduler.writer.urge()
            return False
        if scheduler.writer.in_flight or scheduler.table.quarantined:
            return False
        mine = {plain_key(k) for k, code in zip(self.keys, self.codes, strict=True) if code in (MEMORY_HIT, DISK_HIT)}
        asked = sum(self._asked_for(load) for load in scheduler.table.loads_begun)
        return scheduler.table.pinned_blocks + scheduler.table.loads_count <= len(mine) + asked

    def _asked_for(self, load: Load) -> bool:
        if load.reload is None:
            return load.answers is self.answers
        return any(gather is self for gather, _ in load.reload.waiters)

    @property
    def pins(self) -> bool:  # type: ignore[override]
        return any(code in (MEMORY_HIT, DISK_HIT) for code in self.codes)

    def unpin(self) -> bool:
        return self._forget(i for i, code in enumerate(self.codes) if code in (MEMORY_HIT, DISK_HIT))

    def _forget(self, places: Iterable[int]) -> bool:
        """Look for these blocks again, as if they had not been found yet; whether there are any."""
        found = list(places)
        if not found:
            return False
        for i in found:
            if self.answers.counted:
                self._scheduler.uncount(self.codes[i])
            self.answers.answer(i, None, PENDING)
        self._todo = deque(sorted([*self._todo, *found]))
        return True

    def expire(self) -> None:
        """No room: from the first key on that needs it everything is left out, also what is in memory."""
        self._drop_room()
        while self._todo and self._without_room(self._todo[0]):
            self._todo.popleft()
        while self._todo:
            self._settle(self._todo.popleft(), None, NO_ROOM)

    def patience_over(self) -> None:
        """The caller's own time-out: what has not come by now is a miss."""
        self._queue.discard(self)
        self._drop_room()
        self._todo.clear()
        for index, code in enumerate(self.codes):
            if code == PENDING:
                self._settle(index, None, MISS)

    def arrived(self, index: int, load: Load) -> None:
        """A reload this call waited for ended well."""
        if not self.future.done():
            self._settle(index, self._scheduler.table.block(load), DISK_HIT)

    def failed(self, index: int) -> None:
        """A reload this call waited for ended without bytes."""
        self._settle(index, None, MISS)

    def again(self, index: int) -> None:
        """The key changed while it was being read, or recovery went on: look once more."""
        if not self.future.done() and self.codes[index] == PENDING and not self._without_room(index):
            self._todo.append(index)
            if len(self._todo) == 1:
                self._scheduler.enqueue_load(self)


class PutWaiter(Waiter):
    """A call that waits for room for what it brings."""

    __slots__ = ()

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler, scheduler.put_queue)

    def _room_step(self, draft: Draft) -> int:
        if self._room is None:
            if self._scheduler.too_dirty(draft.extent):
                return BLOCKED
            self._room = self._scheduler.table.room(draft)
        return self._room.step()

    def blocked(self) -> bool:
        if self._room is None or self._room.needs_spill:
            self._scheduler.writer.urge()
        return False


class Putting(PutWaiter):
    """The puts of one call, stored in order as room comes."""

    __slots__ = ("_items", "_next", "results")

    future: asyncio.Future[list[bool]]

    def __init__(self, scheduler: Scheduler, items: Sequence[tuple[Any, Draft | None]]) -> None:
        super().__init__(scheduler)
        self._items = items
        self._next = 0
        self.results: list[bool] = []

    def step(self) -> int:
        scheduler = self._scheduler
        while self._next < len(self._items):
            if scheduler.turn_is_spent:
                return AGAIN
            key, draft = self._items[self._next]
            if draft is None:  # could never fit; its old value goes, as for a refused put
                self._reject(key)
                continue
            if self._room is not None or not scheduler.store(key, draft):
                answer = self._room_step(draft)
                if answer != DONE:
                    return answer
                room, self._room = self._room, None
                assert room is not None
                scheduler.fill(room, key, draft)
            self.results.append(True)
            self._next += 1
        if not self.future.done():
            self.future.set_result(self.results)
        return DONE

    def _reject(self, key: Any) -> None:
        self._scheduler.forget(key)
        self._scheduler.counters.rejected_puts += 1
        self.results.append(False)
        self._next += 1

    def expire(self) -> None:
        self._drop_room()
        while self._next < len(self._items):
            self._reject(self._items[self._next][0])
        if not self.future.done():
            self.future.set_result(self.results)


class Reserving(PutWaiter):
    """Room for one reserved block."""

    __slots__ = ("_draft",)

    future: asyncio.Future[Room | None]

    def __init__(self, scheduler: Scheduler, draft: Draft) -> None:
        super().__init__(scheduler)
        self._draft = draft

    def step(self) -> int:
        answer = self._room_step(self._draft)
        if answer == DONE and not self.future.done():
            self._scheduler.spend(0)
            self.future.set_result(self._room)
        return answer

    def expire(self) -> None:
        self._drop_room()
        if not self.future.done():
            self.future.set_result(None)
