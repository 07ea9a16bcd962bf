"""kill -9 at random moments, then reopen: what `flush` acknowledged is there, nothing is wrong, nothing comes back.

A worker process (kill_worker.py) tells each call over a pipe before it begins and after it returned; the parent kills
it at a moment drawn from a printed seed and starts the next one on the same directory, which first reads every key. So
stores are killed several times in a row without ever being closed, and some kills fall into the recovery from the one
before.

ASYNCKV_TEST_SCALE multiplies the number of kills (17 gives 204), ASYNCKV_TEST_SEED repeats a run.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import pytest
from fault_history import History
from levels import scale, seed

import asynckv
from asynckv.backends import create_backend
from asynckv.testing import RecordingBackend

WORKER = Path(__file__).with_name("kill_worker.py")
KILLS = 12
KEYS = 150
RUN_SECONDS_MAX = 60.0
UNLIMITED = 1_000_000

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


def _listing(directory: Path) -> list[tuple[str, int, int]]:
    """Name, size and time of change of each file, in nanoseconds."""
    if not directory.exists():
        return []
    return sorted((each.name, each.stat().st_size, each.stat().st_mtime_ns) for each in os.scandir(directory))


class Run:
    """One life of the worker, from its start to its end, killed or not."""

    def __init__(self, history: History, command: list[str], moment: tuple[str, float] | None) -> None:
        self.history = history
        self.phase = ""
        self.lines: list[str] = []
        self.wrong: list[str] = []
        self.dropped = 0
        self.disk_used = 0
        self._moment = moment
        self._kill_at: float | None = None
        self.killed = False
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps([key.next for key in history.keys]).encode())
        process.stdin.close()
        try:
            self._follow(process)
        finally:
            if process.poll() is None:
                process.kill()
            self.status = process.wait()
            process.stdout.close()
        if not self.killed and self.status != 0:
            self.wrong.append(f"the worker ended with status {self.status} after phase {self.phase!r}")

    def _follow(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        limit = time.monotonic() + RUN_SECONDS_MAX
        rest = b""
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while True:
                now = time.monotonic()
                due = self._kill_at if self._kill_at is not None and not self.killed else limit
                if now >= limit:
                    self.wrong.append(f"the worker hangs in phase {self.phase!r}")
                    return
                if now >= due:
                    os.kill(process.pid, signal.SIGKILL)
                    self.killed = True
                    continue
                if not selector.select(due - now):
                    continue
                data = os.read(process.stdout.fileno(), 1 << 16)
                if not data:
                    return
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self._take(line.decode())

    def _take(self, line: str) -> None:
        self.lines.append(line)
        word, *rest = line.split(" ")
        history = self.history
        if word == "phase":
            self.phase = rest[0]
            if self._moment is not None and self._moment[0] == self.phase:
                self._kill_at = time.monotonic() + self._moment[1]
        elif word == "put":
            history.begin_put(int(rest[0]), int(rest[1]))
        elif word == "put-end":
            history.end_put(int(rest[0]))
        elif word == "delete":
            history.begin_delete(int(rest[0]))
        elif word == "delete-end":
            history.end_delete(int(rest[0]))
        elif word == "clear":
            history.begin_clear()
        elif word == "clear-end":
            history.end_clear()
        elif word == "flush":
            history.begin_flush(int(rest[0]))
        elif word == "flush-end":
            history.end_flush(int(rest[0]))
        elif word == "saw":
            problem = history.observe(int(rest[0]), None if rest[1] == "-" else int(rest[1]))
            if problem:
                self.wrong.append(problem)
        elif word == "gauges":
            self.dropped, self.disk_used = int(rest[0]), int(rest[1])
        else:
            self.wrong.append(line)


def copy_of_killed(store: Path, target: Path) -> None:
    """Copy an open store as a kill would leave it. The lock stays behind: closing it here would drop our own."""
    shutil.copytree(store, target, ignore=shutil.ignore_patterns("lock"))
    target.chmod(0o700)


class Campaign:
    """Kills of one kind of store; a new directory whenever the old one has been written half full."""

    def __init__(self, tmp_path: Path, seed: int, *, memory: int, disk: int, segment: int, may_drop: bool) -> None:
        self.random = random.Random(seed)
        self.tmp_path = tmp_path
        self.options = ["--memory", str(memory), "--disk", str(disk), "--segment", str(segment)]
        if may_drop:
            self.options.append("--may-drop")
        self.disk = disk
        self.may_drop = may_drop
        self.kills = self.stores = self.acknowledged = self.observed = 0
        self.phases: dict[str, int] = {}
        self._fresh()

    def _fresh(self) -> None:
        self.stores += 1
        self.directory = self.tmp_path / f"store-{self.stores}"
        self.lives: deque[Any] = deque(maxlen=3)
        self.history = History(KEYS, may_drop=self.may_drop)

    def _command(self, operations: int) -> list[str]:
        command = [sys.executable, str(WORKER), str(self.directory), "--seed", str(self.random.randrange(1 << 32))]
        command += ["--operations", str(operations), *self.options]
        return command + ["--uvloop"] * self.random.randrange(2)

    def _run(self, operations: int, moment: tuple[str, float] | None) -> Run:
        acknowledged, observed = self.history.acknowledged, self.history.observed
        files = _listing(self.directory)
        run = Run(self.history, self._command(operations), moment)
        self.lives.append((files, moment, run.lines))
        if run.wrong:  # too rare to be made again at will: what the last lives did and found
            print("\n".join(map(repr, [*self.lives, _listing(self.directory)])))
        self.history.crash()
        self.acknowledged += self.history.acknowledged - acknowledged
        self.observed += self.history.observed - observed
        where = f"store {self.stores}, kill {self.kills}, moment {moment}"
        assert not run.wrong, f"{where}: " + "; ".join(run.wrong[:5])
        assert self.may_drop or run.dropped == 0, f"{where}: {run.dropped} blocks dropped although all fit"
        return run

    def kill(self, number: int) -> None:
        """One run of the worker that ends in a kill."""
        phase, delay = MOMENTS[number % len(MOMENTS)]
        operations = CLOSE_OPERATIONS if phase == "closing" else UNLIMITED
        run = self._run(operations, (phase, self.random.uniform(0, delay)))
        self.kills += run.killed and run.status == -signal.SIGKILL
        self.phases[run.phase] = self.phases.get(run.phase, 0) + 1
        if not self.may_drop and run.disk_used > self.disk // 2:
            self.finish()
            self._fresh()

    def finish(self) -> None:
        """Reopen after the last kill, work, close; then reopen what was closed."""
        for _ in range(2):
            assert self._run(CLOSE_OPERATIONS, None).phase == "done"
        shutil.rmtree(self.directory)


@pytest.mark.timeout(3600)
def test_flushed_blocks_survive_kill(tmp_path: Path) -> None:
    """All that was ever put fits the disk: a flushed block is there, with its flushed value or a later one."""
    campaign = Campaign(tmp_path, seed(), memory=1 << 20, disk=192 << 20, segment=8 << 20, may_drop=False)
    for number in range(round(KILLS * scale())):
        campaign.kill(number)
    campaign.finish()
    print(
        f"{campaign.kills} kills on {campaign.stores} stores, last phases {campaign.phases}, "
        f"{campaign.acknowledged} flushes acknowledged, {campaign.observed} values checked after reopening"
    )
    assert campaign.kills >= round(KILLS * scale()) * 0.7  # a few runs end before their moment comes
    assert campaign.acknowledged > 0


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


@pytest.mark.timeout(3600)
def test_nothing_old_comes_back_when_segments_are_reused(tmp_path: Path) -> None:
    """A disk that is written over and over: blocks may be dropped, but none is ever wrong or older than its floor."""
    campaign = Campaign(tmp_path, seed(), memory=512 << 10, disk=2 << 20, segment=256 << 10, may_drop=True)
    for number in range(round(KILLS / 2 * scale())):
        campaign.kill(number)
    campaign.finish()
    print(f"{campaign.kills} kills, last phases {campaign.phases}, {campaign.observed} values checked after reopening")
    assert campaign.observed > 0
