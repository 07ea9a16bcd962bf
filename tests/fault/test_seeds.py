"""Simulated lives of a store, each decided by a seed; and five planted bugs, so that it is known what seeds find.

ASYNCKV_TEST_SEED is the first seed. One that fails names itself: `asynckv.testing.run_seed(N)` plays it again.
"""

from __future__ import annotations

import gc
import json
import logging
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from levels import count, level, seed, tally
from storekit import child_environment

from asynckv.backends.transfer import Transfers
from asynckv.scheduler import Scheduler
from asynckv.testing import SeedError, run_seed
from asynckv.tiers.disk import DiskTier
from asynckv.tiers.scan import Scan
from asynckv.tiers.segment import Segment, SegmentSet
from asynckv.waiting import Reload

PARTS = 4  # at every level
SEEDS_FOR_A_BUG = 20_000


@pytest.mark.parametrize("part", range(PARTS))
def test_no_seed_finds_anything(part: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "asynckv")  # thousands of stores warn of their sick disks: a gigabyte of records
    number = count("seeds") // PARTS
    # The same ones for every commit, so that none is blamed for what another one's would find; new ones each night.
    first = (0 if level() == "commit" else seed("seeds")) + part * number
    lives = calls = crashes = faults = 0
    for each in range(first, first + number):
        report = run_seed(each)
        lives += report.lives
        calls += report.calls
        crashes += report.crashes
        faults += report.faults
    tally("seeds", number)
    tally("calls in seeds", calls)
    print(f"{number} seeds, {lives} lives, {calls} calls, {crashes} crashes, {faults} faults")
    assert crashes > number // 2
    assert faults > number


def test_simulated_stores_use_their_files_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dead segment becomes the next one there as it does on a disk, or seeds would never see that go wrong."""
    spares = []
    bury = SegmentSet.bury

    async def watched(segments: SegmentSet, segment: Segment) -> None:
        had = segments.spare
        await bury(segments, segment)
        spares.extend([segments.spare] if segments.spare is not had else [])

    monkeypatch.setattr(SegmentSet, "bury", watched)
    first = seed("recycling seeds")
    for each in range(first, first + 60):
        run_seed(each)
        if spares:
            return
    raise AssertionError("no segment became a spare")


def test_the_same_seed_gives_the_same_trace() -> None:
    """Byte for byte, in processes whose hashes of strings, addresses, ids and garbage collections differ."""
    first = seed("traces")
    code = (
        "import gc, json, sys; from asynckv.testing import run_seed; pad = [object() for _ in range(int(sys.argv[2]))];"
        "gc.set_threshold(30 + int(sys.argv[2]));"
        "print(json.dumps([run_seed(n).trace for n in [3474981566, *range(int(sys.argv[1]), int(sys.argv[1]) + 10)]]))"
    )
    traces = []
    for number in (1, 54_321):
        command = [sys.executable, "-c", code, str(first), str(number)]
        environment = child_environment() | {"PYTHONHASHSEED": str(number)}
        done = subprocess.run(command, env=environment, capture_output=True, check=True)
        traces.append(json.loads(done.stdout))
    assert traces[0] == traces[1]
    assert traces[0][1:] == [list(run_seed(each).trace) for each in range(first, first + 10)]
    assert len({tuple(trace) for trace in traces[0]}) == 11


# Planted bugs: each takes one safeguard away, in the source's own terms.


def skip_the_sequence_check(patch: pytest.MonkeyPatch) -> None:
    """Recovery believes batches behind a gap."""
    patch.setattr(Scan, "cut", lambda self, *_: None)


def free_the_extent_early(patch: pytest.MonkeyPatch) -> None:
    """A read past its deadline gives its extent back while the disk may still write to it."""
    patch.setattr(Reload, "released", property(lambda self: True, lambda self, value: None), raising=False)


def lose_a_tombstone(patch: pytest.MonkeyPatch) -> None:
    """A batch of three blocks leaves its tombstones out, and says that it has them."""
    compose = DiskTier.compose

    def losing(self: DiskTier, spills: Any, tombstones: Any, clear: bool = False) -> Any:
        return compose(self, spills, tombstones if len(spills) != 3 else [], clear)

    patch.setattr(DiskTier, "compose", losing)


def resume_a_short_read_at_a_wrong_place(patch: pytest.MonkeyPatch) -> None:
    """After a short direct read the rest is asked for from one page before where it stopped."""
    steps = Transfers._read_aligned

    def wrong(self: Transfers, offset: int, buffer: memoryview, wanted: int, limit: int) -> Any:
        inner = steps(self, offset, buffer, wanted, limit)
        request = next(inner)
        start = offset
        try:
            while True:
                if not isinstance(request, float) and request[2] != start:
                    request = (request[0], request[1], max(request[2] - 4096, 0))
                try:
                    sent = yield request
                except OSError as reason:
                    request = inner.throw(reason)
                else:
                    request = inner.send(sent)
        except StopIteration as end:
            return end.value

    patch.setattr(Transfers, "_read_aligned", wrong)


def drop_one_wake_up(patch: pytest.MonkeyPatch) -> None:
    """A view that dies does not wake who waits for room."""
    patch.setattr(Scheduler, "_wake_from_anywhere", lambda self: None)


# The first seed that finds each: at level commit the search begins a little before it.
BUGS = {
    skip_the_sequence_check: 8565,
    free_the_extent_early: 3352,
    lose_a_tombstone: 164,
    resume_a_short_read_at_a_wrong_place: 590,
    drop_one_wake_up: 2784,
}


@pytest.mark.parametrize("plant", BUGS, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)  # a kept record would keep the store of a life that failed
    plant(monkeypatch)
    for number in range(BUGS[plant] - 10 if level() == "commit" else 0, SEEDS_FOR_A_BUG):
        found = _finds(number)
        if found:
            print(f"{plant.__name__}: found by seed {number}: {found}")
            assert _finds(number) == found
            return
    pytest.fail(f"{plant.__name__}: not found by {SEEDS_FOR_A_BUG} seeds")


def _finds(number: int) -> str:
    try:
        run_seed(number)
    except SeedError as error:
        found = str(error)
    else:
        return ""
    with warnings.catch_warnings():  # the life that failed has left its store open
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
    return found
