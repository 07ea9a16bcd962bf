"""kill -9 at random moments and at named points, then reopen: what was flushed is there, nothing wrong or old.

A worker process (kill_worker.py) tells each call over a pipe before it begins and after it returned. It is killed at a
moment drawn from a printed seed, or kills itself at a step of the store that was named (kill_points.py). The next one
on the same directory first reads every key. So stores are killed several times in a row without ever being closed, and
some kills fall into the recovery from the one before.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kill_points import AFTER, BEFORE, POINTS, Point
from levels import parts, seed, span, tally
from storekit import child_environment, ring_refusal

import asynckv
from asynckv.backends import create_backend
from asynckv.testing import ModelCache, RecordingBackend
from asynckv.testing.model import ModelCall

WORKER = Path(__file__).with_name("kill_worker.py")
KEYS = 150
RUN_SECONDS_MAX = 60.0
ENDS = ("put-end", "delete-end", "clear-end", "flush-end")  # of what the worker tells
UNLIMITED = 1_000_000
ENGINES = ("threads",) if ring_refusal() else ("threads", "io_uring")

# (phase after which the kill falls, longest delay in seconds); taken by turns, so that a short run has each of them.
MOMENTS = (
    ("verified", 0.6),
    ("opening", 0.03),
    ("verified", 0.1),
    ("opened", 0.03),
    ("verified", 1.0),
    ("closing", 0.02),
)
CLOSE_OPERATIONS = 120
POINT_OPERATIONS = 20_000  # enough to meet any point
CLEARS, MANY_CLEARS = 0.01, 0.05  # of the worker's calls

KEPT = {"memory": 1 << 20, "disk": 192 << 20, "segment": 8 << 20, "may_drop": False}
FULL = {"memory": 512 << 10, "disk": 2 << 20, "segment": 256 << 10, "may_drop": True}
SMALL_SEGMENTS = {**KEPT, "disk": 48 << 20, "segment": 512 << 10}


class Forker:
    """The process that workers are forked from; see `kill_worker.serve`."""

    def __init__(self) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.settimeout(RUN_SECONDS_MAX)
        with theirs:
            command = [sys.executable, str(WORKER), str(theirs.fileno())]
            environment = {**child_environment(), "OPENBLAS_NUM_THREADS": "1"}  # no thread before the fork
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)

    def start(self, request: dict[str, Any]) -> tuple[int, int]:
        """Begin a worker's life: its process id and the end of the pipe that it tells its steps through."""
        ours, theirs = os.pipe()
        try:
            socket.send_fds(self._channel, [json.dumps(request).encode()], [theirs])
        finally:
            os.close(theirs)
        return int(self._channel.recv(64)), ours

    def status(self) -> int:
        """Wait for the worker's end; its exit status, or the negative number of the signal."""
        return int(self._channel.recv(64))

    def close(self) -> None:
        self._channel.close()
        assert self._process.wait(RUN_SECONDS_MAX) == 0


@pytest.fixture(scope="module")
def forker() -> Iterator[Forker]:
    forker = Forker()
    yield forker
    forker.close()


def _listing(directory: Path) -> list[tuple[str, int, int]]:
    """Name, size and time of change of each file, in nanoseconds."""
    if not directory.exists():
        return []
    return sorted((each.name, each.stat().st_size, each.stat().st_mtime_ns) for each in os.scandir(directory))


class Run:
    """One life of the worker, from its start to its end, killed or not."""

    def __init__(
        self, model: ModelCache, forker: Forker, request: dict[str, Any], moment: tuple[str, float] | None
    ) -> None:
        self.model = model
        self.may_drop = request["may_drop"]
        self.acknowledged = self.observed = 0
        self.put: list[tuple[int, int]] = []  # key and version
        self._calls: dict[tuple[str, ...], ModelCall] = {}  # begun, by what their end is called
        self.phase = ""
        self.lines: list[str] = []
        self.wrong: list[str] = []
        self.dropped = 0
        self.disk_used = 0
        self.began = 0.0
        self.recovery_seconds = 0.0
        self.at_point = False
        self._moment = moment
        self._kill_at: float | None = None
        self._process, pipe = forker.start(request)
        self._killed = False
        over = False
        try:
            self._follow(pipe)
            over = not self.wrong
        finally:
            os.close(pipe)
            if not over:
                os.kill(self._process, signal.SIGKILL)
            self.status = forker.status()
        self.killed = self.status == -signal.SIGKILL
        if self.status != 0 and not (self.killed and (self._killed or self.at_point)):
            self.wrong.append(f"the worker ended with status {self.status} after phase {self.phase!r}")

    def _follow(self, pipe: int) -> None:
        limit = time.monotonic() + RUN_SECONDS_MAX
        rest = b""
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            while True:
                now = time.monotonic()
                due = self._kill_at if self._kill_at is not None and not self._killed else limit
                if now >= limit:
                    self.wrong.append(f"the worker hangs in phase {self.phase!r}")
                    return
                if now >= due:
                    os.kill(self._process, signal.SIGKILL)
                    self._killed = True
                    continue
                if not selector.select(due - now):
                    continue
                data = os.read(pipe, 1 << 16)
                if not data:
                    return
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self._take(line.decode())

    def _take(self, line: str) -> None:
        self.lines.append(line)
        word, *rest = line.split(" ")
        model, calls = self.model, self._calls
        if word == "phase":
            self.phase = rest[0]
            if self.phase == "opening":
                self.began = time.monotonic()
            elif self.phase == "verified":
                self.recovery_seconds = time.monotonic() - self.began
            if self._moment is not None and self._moment[0] == self.phase:
                self._kill_at = time.monotonic() + self._moment[1]
        elif word == "put":
            index, version = map(int, rest)
            self.put.append((index, version))
            calls["put-end", rest[0]] = model.put(index, version)
        elif word == "delete":
            calls["delete-end", rest[0]] = model.delete(int(rest[0]))
        elif word == "clear":
            calls["clear-end",] = model.clear()
        elif word == "flush":
            calls["flush-end", rest[0]] = model.flush()
        elif word in ENDS:
            calls.pop((word, *rest)).done()
            self.acknowledged += word == "flush-end"
        elif word == "saw":
            self._saw(int(rest[0]), None if rest[1] == "-" else int(rest[1]))
        elif word == "gauges":
            self.dropped, self.disk_used = int(rest[0]), int(rest[1])
        elif word == "point":
            self.at_point = True
        else:
            self.wrong.append(line)

    def _saw(self, index: int, version: int | None) -> None:
        model = self.model
        self.observed += 1
        allowed = model.allowed(index)
        if version not in allowed:
            self.wrong.append(f"key {index}: version {version} is back or was never put, allowed are {allowed}")
        elif version is None and not self.may_drop and model.kept(index):
            self.wrong.append(f"key {index}: lost, allowed are {allowed}")
        model.observe(index, version, final=not self.may_drop)


def copy_of_killed(store: Path, target: Path) -> None:
    """Copy an open store as a kill would leave it. The lock stays behind: closing it here would drop our own."""
    for _ in range(20):
        try:
            shutil.copytree(store, target, ignore=shutil.ignore_patterns("lock"))
        except shutil.Error:  # a segment that was listed is gone: the store is at work
            shutil.rmtree(target)
        else:
            target.chmod(0o700)
            return
    raise AssertionError("no copy of the store could be taken")


class Campaign:
    """Kills of one kind of store; a new directory whenever the old one has been written half full."""

    def __init__(self, tmp_path: Path, forker: Forker, seed: int, options: dict[str, Any]) -> None:
        self.random = random.Random(seed)
        self.tmp_path = tmp_path
        self.forker = forker
        self.options = options
        self.may_drop = options["may_drop"]
        self.lives_begun = self.kills = self.stores = self.acknowledged = self.observed = 0
        self.slowest = 0.0
        self.turn = 0  # which loop and engine
        self.phases: Counter[str] = Counter()
        self._fresh()

    def _fresh(self) -> None:
        if self.stores:
            shutil.rmtree(self.directory, ignore_errors=True)  # not there when it was killed early
        self.stores += 1
        self.directory = self.tmp_path / f"store-{self.stores}"
        self.disk_used = 0
        self.lives: deque[Any] = deque(maxlen=3)
        self.model = ModelCache()
        self.versions = [1] * KEYS

    def _run(
        self,
        operations: int = UNLIMITED,
        *,
        moment: tuple[str, float] | None = None,
        point: Point | None = None,
        nth: int = 0,
        clears: float = CLEARS,
    ) -> Run:
        request = {
            **self.options,
            "directory": str(self.directory),
            "versions": self.versions,
            "seed": self.random.randrange(1 << 32),
            "operations": operations,
            "clients": 3,
            "clears": clears,
            "point": point and [point.when, point.step, point.phase, nth or self.random.randint(1, point.nth)],
            "uvloop": bool(self.turn & 1),
            "engine": ENGINES[self.turn // 2 % len(ENGINES)],
        }
        self.lives_begun += 1
        files = _listing(self.directory)
        run = Run(self.model, self.forker, request, moment)
        self.lives.append((files, request, moment, run.lines))
        if run.wrong:  # too rare to be made again at will: what the last lives did and found
            print("\n".join(map(repr, [*self.lives, _listing(self.directory)])))
        self.model = self.model.crash()
        for index, version in run.put:
            self.versions[index] = version + 1
        self.kills += run.killed
        self.acknowledged += run.acknowledged
        self.observed += run.observed
        self.slowest = max(self.slowest, run.recovery_seconds)
        where = f"store {self.stores}, kill {self.kills}, moment {moment}, point {point}"
        assert not run.wrong, f"{where}: " + "; ".join(run.wrong[:5])
        assert self.may_drop or run.dropped == 0, f"{where}: {run.dropped} blocks dropped although all fit"
        self.disk_used = max(self.disk_used, run.disk_used)
        return run

    def _renew(self) -> None:
        """Begin a new store when all that was ever put might not fit this one much longer."""
        if not self.may_drop and self.disk_used > self.options["disk"] // 2:
            self._finish_store()
            self._fresh()

    def kill(self, number: int) -> bool:
        """One run of the worker that ends in a kill, unless it has ended before its moment came."""
        self._renew()
        self.turn = self.random.randrange(4)
        phase, delay = MOMENTS[number % len(MOMENTS)]
        operations = CLOSE_OPERATIONS if phase == "closing" else UNLIMITED
        run = self._run(operations, moment=(phase, self.random.uniform(0, delay)))
        self.phases[run.phase] += 1
        return run.killed

    def kill_at(self, point: Point) -> None:
        """Bring the store into the state that the point is met in, and kill it there."""
        self._renew()
        if point.state == "new":
            self._finish_store()
            self._fresh()
        elif point.state == "closed":
            self._run(CLOSE_OPERATIONS // 2)
        elif point.state == "stray":
            self._reach(Point(AFTER, "snapshot chunk", "closing", nth=1))
        elif point.state == "cleared":
            self._run(2 * CLOSE_OPERATIONS, clears=0)
            self._reach(Point(AFTER, "sync clear", nth=1))
        elif point.state == "long":
            self._reach(Point(BEFORE, "seal"), nth=4)
        self._reach(point)

    def _reach(self, point: Point, nth: int = 0) -> None:
        """Have the store killed at a point, met for the nth time; 0 draws how often."""
        clears = MANY_CLEARS if "clear" in point.step else 0.0
        operations = CLOSE_OPERATIONS if point.phase == "closing" else POINT_OPERATIONS
        run = self._run(operations, point=point, nth=nth, clears=clears)
        assert run.at_point, f"{point.name}: never reached"

    def _finish_store(self) -> None:
        """Reopen after the last kill, work, close; then reopen what was closed."""
        for _ in range(2):
            assert self._run(CLOSE_OPERATIONS).phase == "done"

    def finish(self) -> None:
        """End the last store, and tell what was done."""
        self._finish_store()
        shutil.rmtree(self.directory)
        print(
            f"{self.kills} kills in {self.lives_begun} lives on {self.stores} stores, last phases {dict(self.phases)}, "
            f"{self.acknowledged} flushes acknowledged, {self.observed} values checked after reopening, the slowest "
            f"opening and check took {self.slowest:.2f} s"
        )
        assert self.acknowledged > 0
        assert self.observed > 0


def kill_at_random(campaign: Campaign, name: str, part: int) -> None:
    """A part of a campaign of random kills; a few runs end before their moment comes, and do not count."""
    wanted = len(span(name, part))
    number = killed = 0
    while killed < wanted:
        done = campaign.kill(number)
        number += 1
        killed += done
        tally(name, done)
        assert number < 2 * wanted + len(MOMENTS), f"{killed} kills in {number} runs"
    campaign.finish()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", parts())
def test_flushed_blocks_survive_kill(tmp_path: Path, forker: Forker, part: int) -> None:
    """All that was ever put fits the disk: a flushed block is there, with its flushed value or a later one."""
    kill_at_random(Campaign(tmp_path, forker, seed(), KEPT), "kills", part)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", parts())
def test_nothing_old_comes_back_when_segments_are_reused(tmp_path: Path, forker: Forker, part: int) -> None:
    """A disk that is written over and over: blocks may be dropped, but none is ever wrong or older than its floor."""
    kill_at_random(Campaign(tmp_path, forker, seed(), FULL), "kills of a store that is written over", part)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", parts())
def test_kills_at_every_named_point(tmp_path: Path, forker: Forker, part: int) -> None:
    """Each point is reached as often as asked for, by each loop and each engine in turn."""
    first = seed()
    campaigns = {
        "full": Campaign(tmp_path / "full", forker, first, FULL),
        "others": Campaign(tmp_path / "others", forker, first, SMALL_SEGMENTS),
    }
    for round_ in span("kills at each named point", part):
        for index, point in enumerate(POINTS):
            campaign = campaigns.get(point.state, campaigns["others"])
            campaign.turn = round_ + index
            campaign.kill_at(point)
            tally("kills at all named points together")
        tally("kills at each named point")
    for campaign in campaigns.values():
        campaign.finish()


async def test_delete_of_a_block_put_while_recovering(tmp_path: Path) -> None:
    """The log holds an older block of the key, which recovery meets after the put: the delete needs its tombstone."""
    options: dict[str, Any] = {"memory": "1MiB", "disk": "16MiB"}
    cache = await asynckv.open(tmp_path / "first", **options)
    assert await cache.put(3, b"old" * 100)
    await cache.flush()
    copy_of_killed(tmp_path / "first", tmp_path / "killed")
    await cache.close()
    cache = await asynckv.open(tmp_path / "killed", **options)
    assert await cache.put(3, b"new" * 100)
    assert await cache.delete(3)
    copy_of_killed(tmp_path / "killed", tmp_path / "killed again")
    await cache.close()
    async with asynckv.open(tmp_path / "killed again", **options) as cache:
        assert await cache.get(3) is None


@pytest.mark.parametrize("slow", ["before", "after"])
async def test_flush_while_recovery_drops_segments(tmp_path: Path, slow: str) -> None:
    """Recovery gives up what a clear covers while the first flush makes a new segment: each has a file of its own.

    Making the file is slow, so that recovery is done with some segments meanwhile.
    """
    options: dict[str, Any] = {"memory": "1MiB", "disk": "16MiB", "segment": "64KiB", "direct": False}
    cache = await asynckv.open(tmp_path / "first", **options)
    for index in range(40):
        assert await cache.put(index, bytes([index]) * 8192)
    await cache.flush()
    await cache.clear()
    assert await cache.put(1, b"one" * 100)
    await cache.flush()
    copy_of_killed(tmp_path / "first", tmp_path / "killed")
    await cache.close()

    class SlowSpare(RecordingBackend):
        def call(self, function: str, *args: Any, timeout: float | None = None) -> asyncio.Future[Any]:
            if function == "open" and args[0] == "spare":
                return asyncio.ensure_future(self._late(function, *args))
            return super().call(function, *args, timeout=timeout)

        async def _late(self, *args: Any) -> Any:
            await asyncio.sleep(0.1 if slow == "before" else 0)
            file = await super().call(*args)
            await asyncio.sleep(0.1 if slow == "after" else 0)
            return file

    def factory(*args: Any, **given: Any) -> RecordingBackend:
        return SlowSpare(create_backend(*args, **given))

    cache = await asynckv.open(tmp_path / "killed", _backend_factory=factory, **options)
    assert await cache.put(2, b"two" * 100)
    await cache.flush()
    copy_of_killed(tmp_path / "killed", tmp_path / "killed again")
    await cache.close()
    async with asynckv.open(tmp_path / "killed again", **options) as cache:
        for index, data in ((1, b"one" * 100), (2, b"two" * 100)):
            block = await cache.get(index)
            assert block is not None, f"block {index} was flushed and is lost"
            assert bytes(block) == data
            del block
        assert len(cache) == 2
