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

import asynckv
from asynckv.errors import DiskError
from asynckv.testing.clients import PATIENCE, Clients
from asynckv.testing.faulty import FaultyFiles
from asynckv.testing.flying import FlyingBackend
from asynckv.testing.loop import SimulatedClock, SimulatedLoop
from asynckv.testing.memory import MemoryDisk, MemoryFiles
from asynckv.testing.model import ModelCache
from asynckv.testing.recording import RecordingBackend
from asynckv.testing.script import Fault, Script, corrupt, error, short
from asynckv.testing.simulated import SimulatedBackend
from asynckv.testing.tools import PAGE

if TYPE_CHECKING:
    from collections.abc import Callable

    from asynckv.backends.base import Backend

__all__ = ["SeedError", "SeedReport", "run_seed"]

KIB = 1 << 10
IO_TIMEOUT = 1.0
FLYING = 0.5  # of the lives: blocks are read together where they can be
ROOM_TIMEOUT = 3.0
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
        world = World(seed, calls, Path(folder) / "kv")
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


class World:
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
            "force": True,  # no look at the machine's memory
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

    def __init__(self, world: World, weather: str) -> None:
        self.world = world
        self.weather = weather
        self.random = world.random
        self.recording: RecordingBackend | None = None
        self.script = Script(self.random)
        self.healthy = weather in ("calm", "slow")
        self.loop: SimulatedLoop
        self.calls = 0

    def run(self, calls: int | None = None) -> None:
        """Open, let the clients work, close, and look whether everything is accounted for."""
        world = self.world
        world.lives += 1
        self.calls = self.random.randint(1, world.calls_max) if calls is None else calls
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

    def _backend(self, engine: str, *, direct: Any, timeout: float, clock: SimulatedClock) -> Backend:
        files = FaultyFiles(self.script, MemoryFiles(self.world.disk))
        inner = SimulatedBackend(
            files=files, clock=clock, seconds=self._seconds, direct=direct, timeout=timeout, watch=self._watch
        )
        self.recording = RecordingBackend(inner, self.world.disk.content(), lambda: self.world.disk.names)
        self.world.model.position = self.recording.position
        draw = random_module.Random(self.world.seed * 100 + self.world.lives)  # one that decides nothing else
        return FlyingBackend(self.recording) if draw.random() < FLYING else self.recording

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
                add(name, short(draw.random()), probability=draw.choice((0.05, 0.3)))
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
                cache = await asynckv.open(
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
        clients = Clients(world, cache, self.calls, healthy=self.healthy, patient=self.weather == "sick")
        look_first = draw.random() < 0.5 or not self.calls
        if look_first:
            await clients.look()
        shares = draw.randint(1, 3)
        await asyncio.gather(*(clients.work(range(share, world.keys, shares)) for share in range(shares)))
        if not look_first and self.healthy:
            await clients.look()
        await self._finish(cache, clients)

    async def _finish(self, cache: asynckv.Cache, clients: Clients) -> None:
        world = self.world
        clients.check_held()
        if self.random.random() < 0.5:
            clients.held.clear()
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
        flawed = world.rotten or self.script.injected["preadv", "corrupt"]
        if not flawed and not world.may_drop and not stats.io_errors and not stats.io_timeouts:
            assert not stats.corrupt_blocks, f"{stats.corrupt_blocks} corrupt blocks, and nothing was corrupted"
        world.excuses += stats.dropped_blocks + stats.corrupt_blocks + stats.no_room
        if not self.healthy:
            world.excuses += stats.io_errors + stats.io_timeouts
        assert stats.disk_used <= stats.disk_capacity, f"{stats.disk_used} bytes on disk, cap {stats.disk_capacity}"
        used = stats.memory_used + stats.memory_free + stats.memory_quarantined
        assert used == stats.memory_capacity, f"{used} bytes of the pool of {stats.memory_capacity} are accounted for"
        clients.check_held()
        clients.held.clear()
        gc.collect(0)
        world.trace(f"closed {stats}")
