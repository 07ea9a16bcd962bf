"""Fixtures of the whole suite: both event loops, and an audit after every test."""

from __future__ import annotations

import asyncio
import gc
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import pytest_asyncio
import uvloop
from levels import COUNTS, count, level, scale, tallies
from storekit import SHM

uvloop.new_event_loop().close()  # libuv opens descriptors of its own once per process: before any audit

LEFT_SECONDS_MAX = 5.0  # for threads and tasks to end after a test, on a machine that has other things to do
CAMPAIGN_SECONDS_MAX = {"commit": 3600, "nightly": 5400, "release": 48 * 3600}  # of one test


def pytest_asyncio_loop_factories(config, item):
    """Run each async test on asyncio and on uvloop."""
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


def pytest_collection_modifyitems(items):
    """Let campaigns of more than the commit level take their time; what hangs is ended all the same.

    Their parts are spread over the run: a worker is given a stretch of it, and would do all of a campaign by itself.
    """
    if level() != "commit" or scale() > 1:
        for item in items:
            item.add_marker(pytest.mark.timeout(CAMPAIGN_SECONDS_MAX[level()]), append=False)
        parts = [item for item in items if "part" in getattr(getattr(item, "callspec", None), "params", ())]
        others = [item for item in items if item not in parts]
        parts.sort(key=lambda item: item.callspec.params["part"])
        place = {item: number / len(group) for group in (parts, others) for number, item in enumerate(group)}
        items.sort(key=place.__getitem__)


def pytest_sessionfinish(session):
    """A worker of pytest-xdist tells what it has done of each campaign when it ends."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["tallies"] = dict(tallies)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    """Add up what the workers have done."""
    tallies.update(getattr(node, "workeroutput", {}).get("tallies", {}))


def pytest_terminal_summary(terminalreporter):
    """Show what was done of each campaign, beside what each of its tests does at this level."""
    if tallies:
        terminalreporter.section(f"campaigns, level {level()}, scale {scale():g}")
        for campaign, done in sorted(tallies.items()):
            wanted = f" ({count(campaign):,} or more)" if campaign in COUNTS else ""
            terminalreporter.write_line(f"{done:>12,} {campaign}{wanted}")


def _descriptors() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # the listing's own
            continue
    return found


def _threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("asynckv")}


@pytest_asyncio.fixture
async def _no_tasks_left():
    """Fail when the test leaves a task of its own on the loop."""
    before = asyncio.all_tasks()
    yield
    until = time.monotonic() + LEFT_SECONDS_MAX
    while left := {task for task in asyncio.all_tasks() - before if task is not asyncio.current_task()}:
        if time.monotonic() > until:
            pytest.fail(f"tasks left: {left}")
        await asyncio.sleep(0.005)  # what is ending may end


@pytest.fixture(autouse=True)
def _audit(request):
    """Fail when a test leaves threads of ours or tasks behind."""
    threads = _threads()
    if request.node.get_closest_marker("asyncio") is not None:
        request.getfixturevalue("_no_tasks_left")
    yield
    until = time.monotonic() + LEFT_SECONDS_MAX
    while (left := _threads() - threads) and time.monotonic() < until:
        time.sleep(0.005)
    assert not left, f"threads left: {sorted(thread.name for thread in left)}"


@pytest.fixture(autouse=True, scope="module")
def _descriptors_stay(request):
    """Fail when a module leaves file descriptors open. Event loops are gone by then."""
    gc.collect()
    before = _descriptors()
    yield
    gc.collect()
    left = {fd: name for fd, name in _descriptors().items() if before.get(fd) != name}
    assert not left, f"descriptors left: {left}"


@pytest.fixture
def memory_path() -> Iterator[Path]:
    """A directory in memory where the system has such a place: for tests that write many little stores."""
    with tempfile.TemporaryDirectory(dir=SHM) as folder:
        yield Path(folder)


@pytest.fixture
def traces() -> Path:
    """The folder of request traces that ASYNCKV_TRACES names; without it the test is skipped, loudly."""
    folder = os.environ.get("ASYNCKV_TRACES")
    if not folder or not Path(folder).is_dir():
        pytest.skip("ASYNCKV_TRACES DOES NOT NAME A FOLDER: replay of the published traces is NOT checked in this run")
    return Path(folder)
