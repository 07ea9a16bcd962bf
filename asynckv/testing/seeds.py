"""The whole store in a simulation: `run_seed` plays several lives of one store, all of it decided by one number.

What runs is the store itself, down to the engine's rules for deadlines and short transfers. Simulated are time, the
loop's order, the files and what goes wrong with them: calls that are slow, fail, move less than they should or never
end, a full disk, a power loss in the middle of anything, bits that flip while nobody looks. Several clients put, get,
delete, cancel and hold on; a model says what each of them may see, in this life and after the next crash.

The same seed gives the same trace, byte for byte, on every run of one version of the library.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import hashlib
import math
import random as random_module
import tempfile
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import asynckv
from asynckv.errors import BlockTooLargeError, DiskError, NoRoomError
from asynckv.testing.faulty import FaultyFiles
from asynckv.testing.loop import SimulatedClock, SimulatedLoop
from asynckv.testing.memory import MemoryDisk, MemoryFiles
from asynckv.testing.model import MISS, ModelCache
from asynckv.testing.recording import RecordingBackend
from asynckv.testing.script import Fault, Script, corrupt, error, short
from asynckv.testing.simulated import SimulatedBackend
from asynckv.testing.values import WrongBlockError, block_of, key_of, payload, version_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

__all__ = ["SeedError", "SeedReport", "run_seed"]

KIB = 1 << 10
PAGE = 4096
SIZES = (40, 60, 700, 4096, 5000, 12_000, 16_384, 32_768)
IO_TIMEOUT = 1.0
ROOM_TIMEOUT = 3.0
PATIENCE = {True: 10.0, False: 120.0}  # simulated seconds one call may take: with a healthy disk, and without
PROMPT = 2.0  # with a healthy disk, while nobody holds on to what fills the pool
HELD_MAX = 3
WEATHERS = ("calm", "calm", "slow", "flaky", "flaky", "sick", "full")
MODES = ("kill", "kept", "dropped", "subset", "torn", "torn")


class SeedError(AssertionError):
    """A seed has found something that must not happen; the text says how to see it again."""


@dataclass(frozen=True)
class SeedReport:
    """What became of a seed.

    Attributes
    ----------
    seed
        The seed.
    digest
        SHA-256 of the trace: every call, read and write, with its time, place and checksum.
    trace
        Its lines.
    lives, calls, crashes
        Openings, calls and crashes.
    faults
        Faults that were injected.
    """

    seed: int
    digest: str
    trace: tuple[str, ...] = field(repr=False)
    lives: int
    calls: int
    crashes: int
    faults: int


def run_seed(seed: int, *, calls: int = 60) -> SeedReport:
    """Play the lives of one store.

    Parameters
    ----------
    seed
        Decides everything.
    calls
        Most calls in one life; part of what is decided, so a seed repeats only with the same number.

    Raises
    ------
    SeedError
        A promise of the store was broken: wrong bytes, something lost or back from the dead, a call that does not end,
        memory not accounted for.
    """
    with tempfile.TemporaryDirectory(prefix="asynckv-seed-") as folder:  # holds no more than the lock
        world = _World(seed, calls, Path(folder) / "kv")
        try:
            return world.play()
        except Exception as reason:
            raise SeedError(f"run_seed({seed}, calls={calls}), life {world.lives}: {reason!r}") from reason


class _Trace:
    """Lines, with the time of the loop in front."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.time: Callable[[], float] = float

    def __call__(self, text: str) -> None:
        self.lines.append(f"{self.time():.6f} {text}")


class _World:
    """One store, its disk and what is known of it, through all its lives."""

    def __init__(self, seed: int, calls: int, directory: Path) -> None:
        self.seed = seed
        self.calls_max = calls
        self.directory = directory
        self.random = draw = random_module.Random(seed)
        self.trace = _Trace()
        self.model = ModelCache()
        self.disk = MemoryDisk()
        self.keys = draw.randint(4, 24)
        self.next_version = [1] * self.keys
        small = self.may_drop = draw.random() < 0.4
        self.options: dict[str, Any] = {
            "memory": draw.choice((80, 96, 128, 256)) * KIB,
            "disk": 512 * KIB if small else 8192 * KIB,
            "segment": 64 * KIB if small else 128 * KIB,
            "policy": draw.choice(("lru", "fifo")),
            "direct": draw.choice((True, "auto", False)),
            "persist_after": draw.choice((None, None, 0.05)),
            "io_timeout": IO_TIMEOUT,
            "room_timeout": ROOM_TIMEOUT,
        }
        self.lives = self.calls = self.crashes = self.faults = 0
        self.losses = self.excuses = 0
        self.missed: set[int] = set()  # losses counted already
        self.rotten = False

    def play(self) -> SeedReport:
        draw = self.random
        for _ in range(draw.randint(1, 3)):
            life = _Life(self, draw.choice(WEATHERS))
            life.run()
            self._end(life)
        last = _Life(self, "calm")
        last.run(calls=0)
        if not self.may_drop and not self.excuses and self.losses:
            raise AssertionError(f"{self.losses} blocks are gone and no counter says why")
        if self.losses > self.excuses:
            raise AssertionError(f"{self.losses} blocks are gone, counters explain {self.excuses}")
        digest = hashlib.sha256("\n".join(self.trace.lines).encode()).hexdigest()
        return SeedReport(self.seed, digest, tuple(self.trace.lines), self.lives, self.calls, self.crashes, self.faults)

    def _end(self, life: _Life) -> None:
        """What the next life finds: all of it, or what a crash in the middle of this one could have left."""
        draw, journal = self.random, life.recording
        if journal is None:
            return
        cut: float = math.inf
        mode = "kept"
        if draw.random() < 0.7:
            cuts = journal.cuts()
            cut = draw.choice(cuts)
            mode = draw.choice(MODES)
            self.crashes += 1
        files = journal.content(cut=cut, mode=mode, random=draw)
        self.model = self.model.crash(cut, may_drop=self.may_drop and cut < math.inf)
        # Not after a power loss: what that tears looks the same as what rots (docs/format.md).
        if (cut == math.inf or mode == "kill") and life.healthy and draw.random() < 0.5:
            self._rot(files)
        self.disk = MemoryDisk(files)
        self.trace(f"end {cut} {mode} {[(name, zlib.crc32(data)) for name, data in files.items()]}")

    def _rot(self, files: dict[str, bytearray]) -> None:
        """Damage files at rest: bits flip, pages are lost or lie in the place of others, ends are missing."""
        draw = self.random
        self.rotten = True
        self.excuses += 100 * self.keys
        for name in sorted(files):
            for _ in range(draw.choice((0, 0, 1, 2, 4))):
                self._spoil(files, name)

    def _spoil(self, files: dict[str, bytearray], name: str) -> None:
        draw = self.random
        data = files.get(name)
        if not data:
            return
        page, other = (draw.randrange(len(data)) // PAGE * PAGE for _ in range(2))
        run = draw.randint(1, 4) * PAGE
        what = draw.randrange(5)
        if what == 0:
            data[page + draw.randrange(min(PAGE, len(data) - page))] ^= 1 << draw.randrange(8)
        elif what == 1:
            data[page : page + run] = bytes(len(data[page : page + run]))
        elif what == 2:
            first, second = data[page : page + PAGE], data[other : other + PAGE]
            if len(first) == len(second):
                data[page : page + PAGE], data[other : other + PAGE] = second, first
        elif what == 3:
            del data[max(page, PAGE) :]
        elif not name.endswith(".seg"):  # nothing tells that there was a newest segment (docs/format.md)
            del files[name]


class _Life:
    """One opening of the store, with clients, up to its close."""

    def __init__(self, world: _World, weather: str) -> None:
        self.world = world
        self.weather = weather
        self.random = world.random
        self.recording: RecordingBackend | None = None
        self.script = Script(self.random)
        self.healthy = weather in ("calm", "slow")
        self.cache: asynckv.Cache
        self.loop: SimulatedLoop
        self.held: list[tuple[int, Any, bytes]] = []
        self.let_go_at = 0.0  # when somebody last held the whole pool
        self.left = 0
        self.busy = 0
        self.calm = asyncio.Event()
        self.idle = asyncio.Event()

    def run(self, calls: int | None = None) -> None:
        """Open, let the clients work, close, and look whether everything is accounted for."""
        world = self.world
        world.lives += 1
        self.left = self.random.randint(1, world.calls_max) if calls is None else calls
        world.trace(f"life {world.lives} {self.weather}")
        loop = self.loop = SimulatedLoop()
        world.trace.time = loop.time
        try:
            loop.run_until_complete(self._live())
            left = asyncio.all_tasks(loop)
            assert not left, f"tasks are left: {left}"
        finally:
            self._bury(loop)
        world.faults += self.script.injected.total()

    def _bury(self, loop: SimulatedLoop) -> None:
        for task in asyncio.all_tasks(loop):  # after a failure
            task.cancel()
        loop.set_exception_handler(lambda *_: None)
        loop.call_soon(loop.stop)
        loop.run_forever()
        loop.close()

    # the disk

    def _backend(self, engine: str, *, direct: Any, timeout: float, clock: SimulatedClock) -> RecordingBackend:
        files = FaultyFiles(self.script, MemoryFiles(self.world.disk))
        inner = SimulatedBackend(
            files=files, clock=clock, seconds=self._seconds, direct=direct, timeout=timeout, watch=self._watch
        )
        self.recording = RecordingBackend(inner, self.world.disk.content(), lambda: self.world.disk.names)
        self.world.model.position = self.recording.position
        return self.recording

    def _seconds(self, kind: str) -> float:
        draw = self.random
        seconds = 10 ** draw.uniform(-4.7, -3.0)
        if self.weather != "calm" and draw.random() < 0.1:
            seconds = 10 ** draw.uniform(-3.0, -1.0)
        if self.weather == "sick" and draw.random() < 0.04:
            seconds = draw.choice((0.9, 1.1, 2.0, 7.0))
            if kind != "call" and draw.random() < 0.3:
                seconds = math.inf
        return seconds

    def _watch(self, op: Any) -> None:
        if op.kind == "read" and op.buffer is not None:
            data = op.buffer
            self.world.trace(f"read {op.file.name} {op.offset} {len(data)} {zlib.crc32(data)} {op.error!r}")

    def _darken(self) -> None:
        """Let things go wrong from here on."""
        draw, add = self.random, self.script.add
        if self.weather == "flaky":
            for name in ("preadv", "pwritev"):
                add(name, short(draw.random()), probability=0.05)
                add(name, error(draw.choice((errno.EINTR, errno.EAGAIN))), probability=0.05)
            if draw.random() < 0.5:
                add("preadv", corrupt(), probability=0.02)
            for name in ("preadv", "pwritev", "fdatasync", "open", "allocate", "unlink", "rename", "sync_directory"):
                if draw.random() < 0.5:
                    add(name, self._error(errno.EIO, errno.ENOSPC, errno.ENOMEM), probability=0.02)
        elif self.weather == "sick":
            add("*", self._error(errno.EIO, errno.EROFS, errno.EDQUOT), probability=draw.choice((0.02, 0.3)))
        elif self.weather == "full":
            self.world.may_drop = True
            self.world.disk.capacity = self.world.disk.used + draw.randrange(0, 400 * KIB)

    def _error(self, *numbers: int) -> Fault:
        number = self.random.choice(numbers)
        self.world.may_drop |= number in (errno.ENOSPC, errno.EDQUOT)
        return error(number)

    def _brighten(self) -> None:
        self.script.clear()
        self.world.disk.capacity = 1 << 40

    # the life

    async def _live(self) -> None:
        world, draw = self.world, self.random
        clock = SimulatedClock(self.loop)
        if not self.healthy and draw.random() < 0.3:
            self._darken()
        try:
            async with asyncio.timeout(PATIENCE[self.healthy]):
                self.cache = await asynckv.open(
                    world.directory,
                    _clock=clock,
                    _random=draw.randbytes,
                    _backend_factory=self._backend,
                    **world.options,
                )
        except DiskError:
            assert not self.healthy, "a healthy disk was refused"
            world.trace("refused")
            return
        if not self.healthy:
            self._darken()
        self.calm.set()
        look_first = draw.random() < 0.5 or not self.left
        if look_first:
            await self._look()
        shares = draw.randint(1, 3)
        await asyncio.gather(*(self._client(range(share, world.keys, shares)) for share in range(shares)))
        if not look_first and self.healthy:
            await self._look()
        await self._finish()

    async def _look(self) -> None:
        """Read every key as the store was found."""
        order = list(range(self.world.keys))
        self.random.shuffle(order)
        for index in order:
            await self._get(index)

    async def _finish(self) -> None:
        world, cache = self.world, self.cache
        for each in self.held:
            self._still_same(each)
        if self.random.random() < 0.5:
            self.held.clear()
        if self.random.random() < 0.5:
            self._brighten()
        call = world.model.flush()
        async with asyncio.timeout(PATIENCE[self.healthy]):
            await cache.close()
        stats = cache.stats()
        if self.healthy:
            call.done()
            assert stats.io_errors == stats.io_timeouts == 0, f"{stats.io_errors} errors, {stats.io_timeouts} late"
            if not world.may_drop and not world.excuses:
                assert not stats.dropped_blocks, f"{stats.dropped_blocks} blocks were dropped although all fit"
        if not world.rotten and not world.may_drop and not self.script.injected["preadv", "corrupt"]:
            assert not stats.corrupt_blocks, f"{stats.corrupt_blocks} corrupt blocks, and nothing was corrupted"
        world.excuses += stats.dropped_blocks + stats.corrupt_blocks + stats.no_room
        if not self.healthy:
            world.excuses += stats.io_errors + stats.io_timeouts
        assert stats.disk_used <= stats.disk_capacity, f"{stats.disk_used} bytes on disk, cap {stats.disk_capacity}"
        used = stats.memory_used + stats.memory_free + stats.memory_quarantined
        assert used == stats.memory_capacity, f"{used} bytes of the pool of {stats.memory_capacity} are accounted for"
        for each in self.held:
            self._still_same(each)
        self.held.clear()
        gc.collect(0)
        world.trace(f"closed {stats}")

    # clients

    async def _client(self, share: range) -> None:
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
                await asyncio.sleep(10 ** draw.uniform(-5, 0.7 if self.weather == "sick" else -1))

    async def _call(self, text: str, call: Awaitable[Any]) -> tuple[bool, Any]:
        """Await a call, or cancel it halfway. Returns whether it ended, and its result or its `OSError`."""
        world, draw = self.world, self.random
        world.calls += 1
        number = world.calls
        world.trace(f"{number} {text}")
        started = self.loop.time()
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
                if ended:
                    result = task.result()
            else:
                async with asyncio.timeout(PATIENCE[self.healthy]):
                    result = await call
        except DiskError as reason:
            result = reason
        except TimeoutError:
            raise AssertionError(f"{text} takes more than {PATIENCE[self.healthy]} simulated seconds") from None
        seconds = self.loop.time() - started
        late = self.loop.time() - max(started, self.let_go_at) > PROMPT
        late &= not text.startswith("get_many")  # which waits for more than fits
        assert not late or self.held or not self.healthy, f"{text} took {seconds} simulated seconds"
        world.trace(f"{number} {'ended' if ended else 'cancelled'} {seconds:.6f} {type(result).__name__}")
        return ended, result

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
            assert self.held or not self.healthy, "a put found no room, and nothing is held"

    async def _put_many(self, index: int) -> None:
        chosen = self._some(index)
        fresh = [self._new(each) for each in chosen]
        calls = [self.world.model.put(each, version) for each, (version, _) in zip(chosen, fresh, strict=True)]
        items = [(key_of(each), block) for each, (_, block) in zip(chosen, fresh, strict=True)]
        ended, results = await self._call(f"put_many {chosen}", self.cache.put_many(items))
        for number, call in enumerate(calls):
            self._put_ended(call, ended, results[number] if ended else None)

    def _some(self, index: int) -> list[int]:
        """Neighbours of a key that belong to the same client."""
        return [index] * self.random.randint(1, 2) if self.random.random() < 0.2 else [index]

    async def _reserve(self, index: int) -> None:
        version, block = self._new(index)
        data = np.frombuffer(payload(block), np.uint8)
        wanted = block if isinstance(block, np.ndarray) else data
        if isinstance(block, asynckv.CacheBlock) or not isinstance(block, np.ndarray):
            await self._put(index)
            return
        fails = self.random.random() < 0.3
        call = self.world.model.put(index, version)

        async def reserve() -> bool:
            async with self.cache.reserve(key_of(index), wanted.shape, wanted.dtype) as array:
                array[:] = wanted
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
        for each in self.held:
            self._still_same(each)
        if self.held:
            self.held.pop(self.random.randrange(len(self.held)))

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
        self.let_go_at = self.loop.time()

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

    @staticmethod
    def _still_same(held: tuple[int, Any, bytes]) -> None:
        index, block, data = held
        if payload(block) != data:
            raise WrongBlockError(f"key {index}: a block changed under a view that was held")


_SHARES = {
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
