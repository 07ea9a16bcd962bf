"""One store against a dictionary of allowed values, by random sequences of calls, restarts and crashes.

For every key the model knows which values a read may give now and which it may give after a crash. A miss is always
allowed by the letter of the contract (a cache may drop any block); here it has to be explained by a counter.
"""

from __future__ import annotations

import asyncio
import gc
import math
import shutil
import tempfile
from pathlib import Path
from typing import Any, ClassVar

import hypothesis.strategies as st
import numpy as np
import pytest
import uvloop
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from levels import level, parts, span, tally
from storekit import KIB, canon, check_gauges, check_idle, crash_image, payload, settle

import asynckv

pytestmark = pytest.mark.timeout(900)  # a failure is made as small as it gets before it is shown

KEYS: list[Any] = [0, 1, -7, 2**40, b"a", b"\0" * 32, "a", "key", "0", 5, b"5", "5"]
SIZES = [0, 1, 60, 500, 4000, 4096, 9000, 20_000, 33_000, 40_000]

keys = st.sampled_from(KEYS)
sizes = st.sampled_from(SIZES)
Value = Any  # a block as `canon` spells it; None is "absent"


def make_block(number: int, size: int) -> Any:
    """A new block of about this many bytes; its kind follows from its number."""
    data = payload(number, 0, size)
    if number % 3 == 0:
        return data
    if number % 3 == 1:
        return np.frombuffer(data, np.uint8)
    half = size // 2
    return asynckv.CacheBlock(number, np.frombuffer(data[:half], np.uint8), np.frombuffer(data[half:], np.int8))


class StoreMachine(RuleBasedStateMachine):
    """Drives one store; subclasses choose memory only or disk."""

    OPTIONS: ClassVar[dict[str, Any]] = {}
    FITS: ClassVar[bool] = True  # all keys with their largest blocks fit the disk together
    NEW_LOOP: ClassVar[Any] = staticmethod(asyncio.new_event_loop)

    def __init__(self) -> None:
        super().__init__()
        self.loop = self.NEW_LOOP()
        self.root = Path(tempfile.mkdtemp(prefix="asynckv-property-"))
        self.directory = self.root / "kv0"
        self.opened = 0
        self.number = 0
        self.now: dict[Any, set[Value]] = {}  # key -> values that a read may give; absent: nothing but None
        self.after: dict[Any, set[Value]] = {}  # the same, were the process killed now
        self.recovered: set[Any] = set()  # keys of which the log decides, after a crash, which value they have
        self.lost: set[Any] = set()  # keys that were missed although they had a value, since it was put
        self.losses = 0
        self.excuses = 0  # drops, refusals and full pools that the stores before this one counted
        self.held: list[tuple[Any, Value]] = []
        self.open()

    # -- plumbing ------------------------------------------------------------------------------------------------

    def run(self, call: Any) -> Any:
        async def bounded() -> Any:
            async with asyncio.timeout(20):
                return await call

        return self.loop.run_until_complete(bounded())

    def open(self) -> None:
        async def opening() -> asynckv.Cache:
            return await asynckv.open(self.directory, room_timeout=0.02, **self.OPTIONS)

        self.cache = self.run(opening())

    def excused(self, stats: asynckv.Stats) -> int:
        return stats.dropped_blocks + stats.no_room

    def new_block(self, size: int) -> Any:
        self.number += 1
        return make_block(self.number, size)

    def stored(self, key: Any, block: Any) -> None:
        value = canon(block)
        self.now[key] = {value}
        self.after.setdefault(key, {None}).add(value)
        self.forget(key)

    def forget(self, key: Any) -> None:
        self.recovered.discard(key)
        self.lost.discard(key)

    def gone(self, key: Any, *, durable: bool) -> None:
        self.now.pop(key, None)
        self.forget(key)
        if durable:
            self.after.pop(key, None)
        elif key in self.after:  # what says so may have reached the disk, or not
            self.after[key].add(None)

    def seen(self, key: Any, value: Value, stats: asynckv.Stats) -> None:
        """A read gave this value."""
        if value is not None:
            assert value in self.now.get(key, ()), f"a value that was never put there, or an old one: {key!r}"
            if key in self.recovered:  # what was found is what the log holds
                self.recovered.discard(key)
                self.after[key] = {value}
            self.now[key] = {value}
        elif key in self.now and key not in self.lost and self.must(key):
            self.lost.add(key)
            self.losses += 1
            excuses = self.excuses + self.excused(stats)
            assert self.losses <= excuses, f"{key!r} is gone and no counter says why:\n{stats}"

    def must(self, key: Any) -> bool:
        """Has this key one certain value, so that a miss is a loss?"""
        return len(self.now[key]) == 1 and None not in self.now[key]

    # -- calls ---------------------------------------------------------------------------------------------------

    @initialize(some=st.lists(sizes, min_size=len(KEYS), max_size=len(KEYS)), flush=st.booleans())
    def begin_with_a_block_under_every_key(self, some: list[int], flush: bool) -> None:
        self.put_many(list(zip(KEYS, some, strict=True)))
        if flush:
            self.flush()

    @rule(key=keys, size=sizes)
    def put(self, key: Any, size: int) -> None:
        block = self.new_block(size)
        if self.run(self.cache.put(key, block)):
            self.stored(key, block)
        else:
            self.gone(key, durable=False)

    @rule(items=st.lists(st.tuples(keys, sizes), max_size=6))
    def put_many(self, items: list[tuple[Any, int]]) -> None:
        pairs = [(key, self.new_block(size)) for key, size in items]
        for (key, block), done in zip(pairs, self.run(self.cache.put_many(pairs)), strict=True):
            if done:
                self.stored(key, block)
            else:
                self.gone(key, durable=False)

    @rule(key=keys, size=sizes, fail=st.booleans())
    def reserve(self, key: Any, size: int, fail: bool) -> None:
        data = np.frombuffer(payload(self.number + 1, 0, size), np.uint8)
        self.number += 1

        async def call() -> bool:
            try:
                async with self.cache.reserve(key, data.shape, data.dtype) as array:
                    array[:] = data
                    if fail:
                        raise ZeroDivisionError
            except (ZeroDivisionError, asynckv.NoRoomError):
                return False
            return True

        if self.run(call()):
            self.stored(key, data)

    @rule(key=keys)
    def put_what_can_never_fit(self, key: Any) -> None:
        try:
            self.run(self.cache.put(key, bytes(1 << 20)))
        except asynckv.BlockTooLargeError:
            self.gone(key, durable=False)
        else:
            raise AssertionError("larger than the pool")

    @rule(key=keys)
    def get(self, key: Any) -> None:
        value = canon(self.run(self.cache.get(key)))
        self.seen(key, value, self.cache.stats())

    @rule(wanted=st.lists(keys, max_size=8))
    def get_many(self, wanted: list[Any]) -> None:
        found = [canon(block) for block in self.run(self.cache.get_many(wanted))]
        for key, value in zip(wanted, found, strict=True):
            self.seen(key, value, self.cache.stats())

    @rule(wanted=st.lists(keys, max_size=8), stop=st.integers(1, 8))
    def stream(self, wanted: list[Any], stop: int) -> None:
        async def call() -> list[tuple[Any, Value]]:
            found = []
            async for key, block in self.cache.stream(wanted):
                found.append((key, canon(block)))
                del block
                if len(found) == stop:
                    break
            return found

        found = self.run(call())
        assert [key for key, _ in found] == wanted[: len(found)]
        for key, value in found:
            assert value is not None
            self.seen(key, value, self.cache.stats())

    @rule(key=keys)
    def hold(self, key: Any) -> None:
        if len(self.held) < 3:
            block = self.run(self.cache.get(key))
            self.seen(key, canon(block), self.cache.stats())
            if block is not None:
                self.held.append((block, canon(block)))

    @rule()
    def release(self) -> None:
        if self.held:
            self.held.pop(0)

    @rule(wanted=st.lists(keys, max_size=4))
    def prefetch_and_touch(self, wanted: list[Any]) -> None:
        async def call() -> None:
            self.cache.prefetch(wanted)
            self.cache.touch(wanted)

        self.run(call())

    @rule(key=keys, size=sizes, turns=st.integers(0, 4))
    def cancelled_put(self, key: Any, size: int, turns: int) -> None:
        block = self.new_block(size)

        async def call() -> bool | None:
            task = asyncio.ensure_future(self.cache.put(key, block))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            return None if task.cancelled() else task.result()

        done = self.run(call())
        if done is True:
            self.stored(key, block)
        elif done is False:
            self.gone(key, durable=False)
        else:  # cancelled: the old value or the new one
            value = canon(block)
            self.now[key] = self.now.get(key, {None}) | {value}
            self.after.setdefault(key, {None}).add(value)
            self.recovered.discard(key)

    @rule(key=keys)
    def delete(self, key: Any) -> None:
        self.run(self.cache.delete(key))
        self.gone(key, durable=True)

    @rule()
    def clear(self) -> None:
        self.run(self.cache.clear())
        for key in KEYS:
            self.gone(key, durable=True)

    @rule()
    def flush(self) -> None:
        try:
            self.run(self.cache.flush())
        except asynckv.DiskError:
            assert not self.FITS
            return
        if self.cache.stats().disk_capacity:
            self.after = {key: set(values) for key, values in self.now.items()}

    @rule()
    def let_the_loop_run(self) -> None:
        self.run(settle(self.cache))

    # -- restarts ------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        self.run(self.cache.close())
        stats = self.cache.stats()
        self.excuses += self.excused(stats)
        assert stats.corrupt_blocks == 0
        assert stats.io_errors == 0

    @rule()
    def close_and_reopen(self) -> None:
        has_disk = bool(self.cache.stats().disk_capacity)
        self.finish()
        if not has_disk:
            for key in KEYS:
                self.gone(key, durable=True)
        elif self.FITS:
            self.after = {key: set(values) for key, values in self.now.items()}
        else:  # closing may not have got everything onto the disk
            self.rely_on_the_log()
        self.open()

    @precondition(lambda self: self.cache.stats().disk_capacity)
    @rule()
    def kill_and_reopen(self) -> None:
        self.opened += 1
        image = crash_image(self.directory, self.root / f"kv{self.opened}")
        self.finish()
        shutil.rmtree(self.directory)
        self.directory = image
        self.rely_on_the_log()
        self.open()

    def rely_on_the_log(self) -> None:
        """The process ended: keys have what reached the disk, at least what was flushed unless it was dropped."""
        for key in self.lost & self.after.keys():
            self.after[key].add(None)
        self.now = {key: set(values) for key, values in self.after.items() if values != {None}}
        self.after = {key: set(values) for key, values in self.now.items()}
        self.recovered = set(self.now)
        self.lost.clear()

    # -- invariants ----------------------------------------------------------------------------------------------

    @invariant()
    def held_views_never_change(self) -> None:
        for block, value in self.held:
            assert canon(block) == value

    @invariant()
    def gauges_make_sense(self) -> None:
        check_gauges(self.cache.stats())

    @invariant()
    def only_known_keys_are_listed(self) -> None:
        listed = self.cache.keys()
        assert len(listed) == len(self.cache) == len(set(map(repr, listed)))
        for key in listed:
            assert key in self.cache
            assert self.cache.tier(key) in ("memory", "disk")
            assert {each for each in self.now.get(key, ()) if each is not None}, f"{key!r} ought to be gone"

    def teardown(self) -> None:
        tally("property examples")
        try:
            self.held.clear()
            gc.collect()
            if not self.cache.closed:
                self.run(settle(self.cache))
                check_idle(self.cache)
                self.run(self.cache.clear())
                assert check_idle(self.cache).memory_used == 0
        finally:
            self.run(self.cache.close())
            self.loop.close()
            shutil.rmtree(self.root)


class MemoryMachine(StoreMachine):
    OPTIONS: ClassVar[dict[str, Any]] = {"memory": 128 * KIB, "disk": 0}


class DiskMachine(StoreMachine):
    OPTIONS: ClassVar[dict[str, Any]] = {"memory": 128 * KIB, "disk": "4MiB", "segment": "256KiB"}


class TightDiskMachine(StoreMachine):
    """A disk so small that it is reclaimed all the time, on uvloop."""

    OPTIONS: ClassVar[dict[str, Any]] = {"memory": 96 * KIB, "disk": "384KiB", "segment": "64KiB"}
    FITS: ClassVar[bool] = False
    NEW_LOOP: ClassVar[Any] = staticmethod(uvloop.new_event_loop)


class FifoMachine(StoreMachine):
    OPTIONS: ClassVar[dict[str, Any]] = {"memory": 80 * KIB, "disk": "2MiB", "segment": "128KiB", "policy": "fifo"}


SHARES = {MemoryMachine: 2 / 7, DiskMachine: 2 / 7, TightDiskMachine: 2 / 7, FifoMachine: 1 / 7}


@pytest.mark.parametrize("part", parts())
@pytest.mark.parametrize("machine", SHARES)
def test_random_calls(machine: type[StoreMachine], part: int) -> None:
    """The machines share the examples that the level asks for."""
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=math.ceil(len(span("property examples", part)) * SHARES[machine]),
            stateful_step_count=40 if level() == "commit" else 50,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )
