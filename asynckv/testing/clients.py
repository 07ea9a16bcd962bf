"""The clients of a simulated store: they put, get, delete, cancel and hold on, and check all that they see."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from asynckv.errors import BlockTooLargeError, DiskError, NoRoomError
from asynckv.testing.model import MISS
from asynckv.testing.values import WrongBlockError, block_of, key_of, payload, version_of

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from asynckv import Cache
    from asynckv.testing.seeds import World

__all__ = ["PATIENCE", "Clients"]

SIZES = (40, 60, 700, 4096, 5000, 12_000, 16_384, 32_768)
PATIENCE = {True: 10.0, False: 120.0}  # simulated seconds one call may take: with a healthy disk, and without
PROMPT = 2.0  # with a healthy disk, while nobody holds on to what fills the pool
HELD_MAX = 3
_SHARES = {  # of all calls
    "_put": 36,
    "_put_many": 5,
    "_reserve": 3,
    "_put_too_large": 1,
    "_get": 26,
    "_get_many": 7,
    "_stream": 3,
    "_hint": 3,
    "_delete": 5,
    "_flush": 6,
    "_let_go": 2,
    "_hog": 1,
    "_check_table": 2,
}
_NAMES, _WEIGHTS = tuple(_SHARES), tuple(_SHARES.values())


class Clients:
    """Those of one life, which all draw from one source of chance.

    Parameters
    ----------
    world
        What is known of the store.
    cache
        The open store.
    calls
        How many calls they make together.
    healthy
        Whether the disk is: then nothing may fail or take long.
    patient
        Whether they wait long between two calls.
    """

    def __init__(self, world: World, cache: Cache, calls: int, *, healthy: bool, patient: bool) -> None:
        self.world = world
        self.cache = cache
        self.left = calls
        self.healthy = healthy
        self.patient = patient
        self.random = world.random
        self.held: list[tuple[int, Any, bytes]] = []
        self.let_go_at = -math.inf  # when somebody last held what others may have waited for
        self.busy = 0
        self.calm = asyncio.Event()  # unset while a clear waits for the calls under way, and during it
        self.calm.set()
        self.idle = asyncio.Event()
        self._time = asyncio.get_running_loop().time

    async def look(self) -> None:
        """Read every key as the store was found."""
        order = list(range(self.world.keys))
        self.random.shuffle(order)
        for index in order:
            await self._get(index)

    def check_held(self) -> None:
        """What is held on to is still what it was."""
        for index, block, data in self.held:
            if payload(block) != data:
                raise WrongBlockError(f"key {index}: a block changed under a view that was held")

    async def work(self, share: range) -> None:
        """Be one client, which alone changes the keys of its share."""
        draw = self.random
        while self.left > 0:
            self.left -= 1
            while not self.calm.is_set():
                await self.calm.wait()
            self.busy += 1
            self.idle.clear()
            try:
                name = draw.choices(_NAMES, _WEIGHTS)[0]
                await getattr(self, name)(draw.choice(share) if share else 0)
            finally:
                self.busy -= 1
                if not self.busy:
                    self.idle.set()
            if draw.random() < 0.015:
                await self._clear()
            if draw.random() < 0.2:
                await asyncio.sleep(10 ** draw.uniform(-5, 0.7 if self.patient else -1))

    async def _call(self, text: str, call: Awaitable[Any]) -> tuple[bool, Any]:
        """Await a call, or cancel it halfway. Returns whether it ended, and its result or its `OSError`."""
        world, draw = self.world, self.random
        world.calls += 1
        number = world.calls
        world.trace(f"{number} {text}")
        started = self._time()
        ended, result = True, None
        try:
            if draw.random() < 0.08:
                task = asyncio.ensure_future(call)
                for _ in range(draw.randrange(4)):
                    await asyncio.sleep(0)
                if draw.random() < 0.7:
                    await asyncio.sleep(10 ** draw.uniform(-5, -2.5))
                task.cancel()
                await asyncio.wait([task])
                ended = not task.cancelled()
                try:
                    result = task.result() if ended else None
                finally:
                    del task  # its error keeps this frame, and that would keep what it had until a garbage collection
            else:
                async with asyncio.timeout(PATIENCE[self.healthy]):
                    result = await call
        except DiskError as reason:
            result = reason
        except TimeoutError:
            raise AssertionError(f"{text} takes more than {PATIENCE[self.healthy]} simulated seconds") from None
        seconds = self._time() - started
        if text.startswith("get_many"):  # it may have waited for more than fits, with pins on what it had
            self.let_go_at = max(self.let_go_at, self._time())
        assert self._excused(started), f"{text} took {seconds} simulated seconds"
        world.trace(f"{number} {'ended' if ended else 'cancelled'} {seconds:.6f} {type(result).__name__}")
        return ended, result

    def _excused(self, since: float) -> bool:
        """Whether a call that waited may have waited for a sick disk, or for what is held or was until just now."""
        return bool(self.held) or not self.healthy or self._time() - max(since, self.let_go_at) <= PROMPT

    def _new(self, index: int) -> tuple[int, Any]:
        version = self.world.next_version[index]
        self.world.next_version[index] += 1
        self.world.missed.discard(index)
        return version, block_of(index, version, SIZES)

    async def _put(self, index: int) -> None:
        version, block = self._new(index)
        call = self.world.model.put(index, version)
        ended, result = await self._call(f"put {index} {version}", self.cache.put(key_of(index), block))
        self._put_ended(call, ended, result)

    def _put_ended(self, call: Any, ended: bool, result: Any) -> None:
        if not ended:
            call.failed()
            return
        call.done(result)
        if result is False:
            self.world.excuses += 1
            assert self._excused(-math.inf), "a put found no room, and nothing is held, or was just now"

    async def _put_many(self, index: int) -> None:
        chosen = self._some(index)
        fresh = [self._new(each) for each in chosen]
        calls = [self.world.model.put(each, version) for each, (version, _) in zip(chosen, fresh, strict=True)]
        items = [(key_of(each), block) for each, (_, block) in zip(chosen, fresh, strict=True)]
        ended, results = await self._call(f"put_many {chosen}", self.cache.put_many(items))
        for number, call in enumerate(calls):
            self._put_ended(call, ended, results[number] if ended else None)

    def _some(self, index: int) -> list[int]:
        """A key, now and then twice."""
        return [index] * self.random.randint(1, 2) if self.random.random() < 0.2 else [index]

    async def _reserve(self, index: int) -> None:
        version, block = self._new(index)
        if not isinstance(block, np.ndarray):
            await self._put(index)
            return
        fails = self.random.random() < 0.3
        call = self.world.model.put(index, version)

        async def reserve() -> bool:
            async with self.cache.reserve(key_of(index), block.shape, block.dtype) as array:
                array[:] = block
                await asyncio.sleep(0)
                if fails:
                    raise ZeroDivisionError
            return True

        try:
            ended, _ = await self._call(f"reserve {index} {version}", reserve())
        except ZeroDivisionError:
            call.refused()
        except NoRoomError:
            self.world.excuses += 1
            call.failed()
        else:
            if ended:
                call.done(True)
            else:
                call.failed()

    async def _put_too_large(self, index: int) -> None:
        call = self.world.model.put(index, -1)
        self.world.missed.discard(index)
        try:
            await self.cache.put(key_of(index), bytes(self.world.options["memory"] + 1))
        except BlockTooLargeError:
            call.done(False)
        else:
            raise AssertionError("larger than the pool")

    async def _get(self, index: int) -> None:
        key = key_of(index)
        if self.random.random() < 0.2:
            out = bytearray(SIZES[-1])
            ended, size = await self._call(f"get_into {index}", self.cache.get_into(key, out))
            if ended and size is not None and not isinstance(size, OSError):
                version = int.from_bytes(out[8:16], "little")
                if bytes(out[:size]) != payload(block_of(index, version, SIZES)):
                    raise WrongBlockError(f"key {index}: get_into gave other bytes than version {version}")
                self._saw(index, version)
            return
        ended, block = await self._call(f"get {index}", self.cache.get(key))
        if ended:
            self._check(index, block)

    def _check(self, index: int, block: Any) -> None:
        if block is None:
            self._saw(index, MISS)
            return
        self._saw(index, version_of(index, block, SIZES))
        if len(self.held) < HELD_MAX and self.random.random() < 0.1:
            self.held.append((index, block, payload(block)))

    def _saw(self, index: int, version: int | None) -> None:
        world = self.world
        world.model.check(index, version)
        if version is MISS:
            if not self.healthy:
                return
            if world.model.kept(index) and index not in world.missed:
                world.missed.add(index)
                world.losses += 1
        if self.healthy:
            world.model.observe(index, version)

    async def _get_many(self, index: int) -> None:
        chosen = sorted({self.random.randrange(self.world.keys) for _ in range(self.random.randint(1, 6))})
        before = [self.world.model.allowed(each) for each in chosen]
        ended, blocks = await self._call(f"get_many {chosen}", self.cache.get_many([key_of(each) for each in chosen]))
        if ended:
            for each, block, allowed in zip(chosen, blocks, before, strict=True):
                self._raced(each, block, allowed)

    def _raced(self, index: int, block: Any, before: set[Any]) -> None:
        """Others may have changed the key meanwhile."""
        if block is not None:
            version = version_of(index, block, SIZES)
            newest = max((each for each in before if each is not MISS), default=0)
            allowed = before | self.world.model.allowed(index)
            assert version in allowed or version > newest, f"key {index}: version {version} is back, not in {allowed}"

    async def _stream(self, index: int) -> None:
        chosen = [self.random.randrange(self.world.keys) for _ in range(self.random.randint(1, 6))]
        before = [self.world.model.allowed(each) for each in chosen]
        stop = self.random.randint(1, 6)

        async def stream() -> None:
            number = 0
            async for key, block in self.cache.stream([key_of(each) for each in chosen]):
                assert key == key_of(chosen[number])
                self._raced(chosen[number], block, before[number])
                del block
                number += 1
                if number == stop:
                    break

        await self._call(f"stream {chosen}", stream())

    async def _hint(self, index: int) -> None:
        keys = [key_of(self.random.randrange(self.world.keys)) for _ in range(3)]
        self.world.trace(f"prefetch {self.cache.prefetch(keys)}")
        self.cache.touch(keys)
        self.cache.match_prefix(keys)

    async def _delete(self, index: int) -> None:
        call = self.world.model.delete(index)
        self.world.missed.discard(index)
        ended, result = await self._call(f"delete {index}", self.cache.delete(key_of(index)))
        if ended and not isinstance(result, OSError):
            call.done()
        else:
            call.failed()

    async def _flush(self, index: int) -> None:
        call = self.world.model.flush()
        ended, result = await self._call("flush", self.cache.flush())
        if ended and not isinstance(result, OSError):
            call.done()
        else:
            assert not ended or not self.healthy or self.world.may_drop, f"flush: {result!r}"
            call.failed()

    async def _let_go(self, index: int) -> None:
        self.check_held()
        if self.held:
            self.held.pop(self.random.randrange(len(self.held)))
            self.let_go_at = max(self.let_go_at, self._time())

    async def _hog(self, index: int) -> None:
        """Hold what the pool holds for a while: others wait for room, and go on when it is let go."""
        keys = [key_of(each) for each in range(self.world.keys)]
        self.let_go_at = math.inf
        blocks = await self.cache.get_many([key for key in keys if self.cache.tier(key) == "memory"])
        same = [None if block is None else payload(block) for block in blocks]
        await asyncio.sleep(10 ** self.random.uniform(-3, 0))
        for block, data in zip(blocks, same, strict=True):
            if block is not None and payload(block) != data:
                raise WrongBlockError("a block changed under a view that was held")
        self.let_go_at = self._time()

    async def _check_table(self, index: int) -> None:
        self.cache._table.check()
        self.world.trace(str(len(self.cache)))

    async def _clear(self) -> None:
        if not self.calm.is_set():
            return
        self.calm.clear()
        try:
            while self.busy:
                await self.idle.wait()
            call = self.world.model.clear()
            ended, result = await self._call("clear", self.cache.clear())
            if ended and not isinstance(result, OSError):
                call.done()
            else:
                call.failed()
        finally:
            self.calm.set()
