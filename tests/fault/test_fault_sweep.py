"""The Nth call of every kind fails, in every way, once and for good, below the engines, in the ring and above them.

One life of a used store under one fault, then a healthy one. In both: no wrong value, no call past its deadline,
nothing of what was flushed lost, nothing of what was deleted back, memory accounted for, no task or thread left, and
no error that the log calls ours.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import logging
import random
import shutil
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

import levels
import pytest
from sickkit import PACE, FastClock
from storekit import (
    SHM,
    allocated,
    check_gauges,
    check_idle,
    check_payload,
    crash_image,
    payload,
    recovered,
    ring_refusal,
    settle,
    until,
)

import asynckv
from asynckv.backends import ThreadsBackend, create_backend
from asynckv.backends.aio import AiofilesBackend
from asynckv.testing import FaultyBackend, FaultyFiles, ModelCache, Script, error, hang, short, slow
from asynckv.testing.fakering import FakeRing, late, partial
from asynckv.tiers.layout import SUPERBLOCK_NAME

KIB = 1 << 10
LIMIT_S = 10.0  # for one call: many deadlines, and what a busy machine adds
ERRNOS = ("EIO", "ENOSPC", "EDQUOT", "EINTR", "EAGAIN", "EINVAL", "EBADF", "ENOMEM", "EROFS")
SHORTS = {"0 bytes": short(count=0), "1 byte": short(count=1), "half": short(0.5), "n-1 bytes": short(count=-1)}
DATA = {"preadv", "pwritev", "read", "write", "read_file"}
SITES = {
    "files": {
        "preadv", "pwritev", "fdatasync", "fsync", "open", "close", "truncate", "allocate", "settle", "rename",
        "unlink", "sync_directory", "list", "stat", "free_bytes", "read_file", "write_file",
    },
    "ring": {"read", "write", "fsync", "enter"},
    "backend": {
        "read", "write", "sync", "open", "close", "truncate", "allocate", "settle", "rename", "unlink",
        "sync_directory", "list", "stat", "statvfs", "read_file", "write_file",
    },
}  # fmt: skip
FAULTS_PER_SITE = {"files": 1, "ring": 3, "backend": 1}  # at level commit, on each loop


@dataclass(frozen=True)
class Scenario:
    """How the store was left, and what it is opened with."""

    start: str
    size: int
    segments: int = 6
    superblock: str = "good"
    options: tuple[tuple[str, object], ...] = ()

    @property
    def store(self):
        return {
            "memory": 12 * self.size,
            "disk": self.segments * 64 * KIB + 24 * KIB,
            "segment": 64 * KIB,
            **dict(self.options),
        }


SCENARIOS = (
    Scenario("killed", 6000, superblock="damaged"),
    Scenario("closed", 6000),
    Scenario("fresh", 6000),
    Scenario("stranger", 4096, segments=4),
    Scenario("killed", 700, options=(("direct", False),)),
    Scenario("closed", 13_000, segments=8, options=(("persist_after", 1.0),)),
)


# Versions of each life, so that no two values are the same.
LIVES = (itertools.count(1000 * life) for life in itertools.count(1))


class Rig:
    """One engine with faults, and what lets go of that which hangs."""

    def __init__(self, layer, engine, script):
        self.layer, self.engine, self.script = layer, engine, script
        self.files, self.rings, self.backends = FaultyFiles(script), [], []

    def make(self, _engine, **settings):
        if self.layer == "files":
            kind = AiofilesBackend if self.engine == "aiofiles" else ThreadsBackend
            made = kind(files=self.files, **settings)
        elif self.layer == "ring":
            from asynckv.backends.uring import UringBackend

            made = UringBackend(ring_factory=self._ring, **settings)
        else:
            made = FaultyBackend(create_backend(self.engine, **settings), self.script, clock=settings["clock"])
        self.backends.append(made)
        return made

    def _ring(self, entries):
        self.rings.append(FakeRing(entries, script=self.script))
        return self.rings[-1]

    def release(self):
        """What hangs goes on."""
        self.files.release_all()
        for each in (*self.rings, *(b for b in self.backends if isinstance(b, FaultyBackend))):
            if not getattr(each, "closed", False):
                each.release_all()

    async def heal(self):
        """From here on all is well."""
        self.script.clear()
        self.release()
        while self.files.hanging:
            self.release()
            await asyncio.sleep(0.001)


class Life:
    """One store and the account of what it promised."""

    def __init__(self, cache, model, size):
        self.cache, self.model, self.size = cache, model, size
        self.version = next(LIVES)
        self.kept = {}  # covered by the last flush that said yes

    async def put(self, *keys):
        for key in keys:
            version = next(self.version)
            call = self.model.put(key, version)
            call.done(await bounded(self.cache.put(key, payload(key, version, self.size))))

    async def get(self, *keys):
        for key in keys:
            found = await bounded(self.cache.get(key))
            self.model.check(key, None if found is None else check_payload(key, found))
            del found
        check_account(self.cache.stats())

    async def remove(self, call, job):
        try:
            await bounded(job)
        except asynckv.DiskError:
            call.failed()
        else:
            call.done()

    async def flush(self):
        call = self.model.flush()
        try:
            await bounded(self.cache.flush())
        except asynckv.DiskError:
            call.failed()
            return False
        call.done()
        return True


async def bounded(job):
    """What a call returns; it has to end in time."""
    task = asyncio.ensure_future(job)
    await asyncio.wait([task], timeout=LIMIT_S)
    assert task.done(), "A CALL HANGS"
    return task.result()


def check_account(stats):
    check_gauges(stats)
    assert stats.memory_used + stats.memory_free + stats.memory_quarantined == stats.memory_capacity
    assert stats.pinned_blocks == 0


async def prepare(scenario, folder):
    """The store as an earlier life left it: its directory and what may be in it."""
    model = ModelCache()
    directory = folder / "kv"
    if scenario.start == "fresh":
        return None, model
    options = scenario.store
    if scenario.start == "stranger":
        options["namespace"] = asynckv.Namespace(model="another")
    async with asynckv.open(directory, **options, engine="threads") as cache:
        life = Life(cache, model, scenario.size)
        for _ in range(2):
            await life.put(*range(16))
        await life.remove(model.delete(15), cache.delete(15))
        assert await life.flush()
        if scenario.start == "killed":
            directory = crash_image(directory, folder / "image")
    if scenario.superblock == "damaged":  # so that it is read, and written
        (directory / SUPERBLOCK_NAME).write_bytes(bytes(4096))
    return directory, ModelCache() if scenario.start == "stranger" else model.crash()


async def work(life, backend):
    """Everything that a store does: reload, spill, rotate, reclaim, carry over, remove, clear."""
    cache, model = life.cache, life.model
    await life.get(0, 1, 2)
    await life.put(*range(8))
    await life.remove(model.delete(2), cache.delete(2))
    await life.flush()
    for start in range(20, 50, 10):
        await life.put(*range(start, start + 10))
        await life.get(start - 20, start, 0, 1)
    await life.remove(model.delete(30), cache.delete_many([30]))
    await life.get(2, 30, 31, 49)
    await life.remove(model.clear(), cache.clear())
    await life.get(0, 31)
    await life.put(60, 61, 62)
    if await life.flush():
        life.kept = {key: model.allowed(key) - {None} for key in (60, 61, 62)}
    with contextlib.suppress(OSError):
        await bounded(backend.free_bytes())  # nothing in a store asks for it, other programs do


async def one(scenario, image, initial, case, chance):
    """One life under a fault and one without; whether the fault was met."""
    layer, engine, site, fault, nth, sticky = case
    script = Script()
    rig = Rig(layer, engine, script)
    tasks = asyncio.all_tasks()
    with tempfile.TemporaryDirectory(dir=SHM) as folder:
        directory = Path(folder, "kv")
        if image is not None:
            shutil.copytree(image, directory)
        if site:
            script.add(site, fault, nth=nth, sticky=sticky)
        model, kept = initial.crash(), {}
        options = scenario.store | {"engine": engine if layer == "backend" else "threads"}
        try:
            cache = await bounded(_open(directory, rig, options))
        except asynckv.DiskError:
            await rig.heal()
        else:
            try:
                kept = await first_life(Life(cache, model, scenario.size), rig, chance.random() < 0.5)
            finally:
                await rig.heal()
                await cache.close()
        counts, met = script.calls.copy(), script.injected.total() > 0
        await gone(rig, tasks)
        await healthy(scenario, directory, model.crash(), kept, options)
    return met, counts


async def first_life(life, rig, heals):
    """Work under the fault, then end with it or be well again; what the last flush covered."""
    cache, model = life.cache, life.model
    await work(life, rig.backends[-1])
    if heals:
        await rig.heal()
        await until(lambda: cache.stats().disk_state == "ok")
        await life.put(70, 71)
        await flushed(life)
        life.kept |= {key: model.allowed(key) - {None} for key in (70, 71)}
        await settle(cache)
        await until(lambda: cache.stats().memory_quarantined == 0)
        check_idle(cache)
        await life.get(70, 60, 2, 30)
    await bounded(cache.close())
    check_account(cache.stats())
    return life.kept


async def flushed(life):
    """A flush of a disk that is well: a failure of before it was may still have to be told."""
    for _ in range(5):
        if await life.flush():
            return
        await asyncio.sleep(0.05)
        await until(lambda: life.cache.stats().disk_state == "ok")
    raise AssertionError("healed, and yet nothing reaches the disk")


async def _open(directory, rig, options):
    return await asynckv.open(
        directory,
        **options,
        io_timeout=0.1 * PACE,
        room_timeout=0.05 * PACE,
        _clock=FastClock(),
        _backend_factory=rig.make,
    )


async def gone(rig, tasks):
    """Nothing of a closed store is left running."""

    def left():
        rig.release()
        running = [t for t in asyncio.all_tasks() - tasks if t is not asyncio.current_task()]
        return running + [t for t in threading.enumerate() if t.name.startswith("asynckv")]

    await until(lambda: not left())


async def healthy(scenario, directory, model, kept, options):
    async with asynckv.open(directory, **(options | {"engine": "threads"})) as cache:
        await recovered(cache)
        life = Life(cache, model, scenario.size)
        for key in model.keys():  # noqa: SIM118
            found = await bounded(cache.get(key))
            version = None if found is None else check_payload(key, found)
            del found
            model.check(key, version)
            assert key not in kept or version in kept[key], f"{key} was flushed: {version}, not one of {kept[key]}"
        await life.put(80, 81)
        assert await life.flush()
        await settle(cache)
        check_idle(cache)
    assert allocated(directory) <= options["disk"]


def faults(layer, site):
    """Name and fault of everything that can happen to a call."""
    found = {name: error(getattr(errno, name)) for name in ERRNOS}
    if site == "enter":
        return found | {"half": partial(0.5)}
    found |= {
        "slow": late(0.01) if layer == "ring" else slow(0.01 if layer == "files" else 0.01 * PACE),
        "hang": hang(),
    }
    return found | (SHORTS if site in DATA else {})


class Complaints(logging.Handler):
    """What the log calls a defect of ours."""

    def __init__(self):
        super().__init__(logging.ERROR)
        self.found = []

    def emit(self, record):
        reason = record.exc_info[1] if record.exc_info else None
        if not isinstance(reason, OSError):
            self.found.append(record.getMessage() + f": {reason!r}")


@pytest.fixture
def complaints():
    handler = Complaints()
    logging.getLogger("asynckv").addHandler(handler)
    yield handler.found
    logging.getLogger("asynckv").removeHandler(handler)


@pytest.fixture
def engines(layer):
    """The engines of a layer that work here; asked before a loop runs."""
    if layer == "ring":
        pytest.importorskip("asynckv._uring", reason="THE RING IS NOT BUILT: its faults are NOT swept in this run")
    return [name for name in ENGINES[layer] if name != "io_uring" or not ring_refusal()]


ENGINES = {"files": ("threads", "aiofiles"), "ring": ("fake",), "backend": ("threads", "aiofiles", "io_uring")}


def _numbers(level, calls, chance):
    """Which call of a site fails: one, two, or each until there is none any more."""
    if level == "commit":
        return (chance.randint(1, calls), *[1] * 8)  # until it is met: how often a file is unlinked is a matter of time
    return (1, chance.randint(1, calls)) if level == "nightly" else itertools.count(1)


@pytest.mark.timeout(8 * 3600)
@pytest.mark.parametrize("layer", SITES)
async def test_every_call_fails_in_every_way(tmp_path, layer, engines, complaints, request):
    chance = random.Random(levels.seed("fault sweep"))
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: complaints.append(str(context)))
    level = levels.level()
    sampled, exhaustive = level == "commit", level == "release"
    mine = "uvloop" in request.node.name
    runs = 0
    for number, scenario in enumerate(SCENARIOS[: levels.count("fault scenarios")]):
        folder = tmp_path / str(number)
        folder.mkdir()
        image, initial = await prepare(scenario, folder)
        _, calls = await one(scenario, image, initial, (layer, engines[0], "", None, 1, False), chance)
        if number == 0:
            assert not SITES[layer] - set(calls), "the scenario misses call sites"
        for site in sorted(SITES[layer] & set(calls)):
            kinds = list(faults(layer, site).items())
            if sampled:
                kinds = chance.sample(kinds, min(len(kinds), round(FAULTS_PER_SITE[layer] * levels.scale())))
            for place, (kind, fault) in enumerate(kinds):
                ever = False
                for sticky in (chance.random() < 0.5,) if sampled else (False, True):
                    if not sampled and (place + sticky) % 2 == mine:
                        continue  # the other loop's
                    for nth in _numbers(level, calls[site], chance):
                        for engine in [engines[runs % len(engines)]] if sampled or exhaustive else engines:
                            case = (layer, engine, site, fault, nth, sticky)
                            try:
                                met, _ = await one(scenario, image, initial, case, chance)
                                assert not complaints
                            except BaseException as reason:
                                reason.add_note(
                                    f"{scenario} {layer}/{engine}: {site} no. {nth} {kind}, sticky={sticky}"
                                )
                                raise
                            runs += 1
                            ever |= met
                        if met if sampled else exhaustive and not met:
                            break
                assert ever or number, f"{site} never met {kind}"  # later scenarios need not call it each time
    levels.tally("lives under a fault at one call", runs)
    print(f"fault sweep {layer}: {runs} runs")
