"""Named points in a store's life at which test_kill.py kills it, and the backend that knows when one is reached.

A step is one operation on the disk, named by what it does for the store: told by the file, the offset and what was
done to that file before. A point is "before this step is submitted" or "after it ended, before the store hears of it",
in one phase of the worker's life.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from asynckv.backends import create_backend
from asynckv.backends.base import Backend, File, Prepare, Wrapper
from asynckv.backends.files import Files
from asynckv.tiers.layout import CLAIM_AT, SNAPSHOT_NAME, SPARE_NAME, SUPERBLOCK_NAME, parse_segment_name

BEFORE, AFTER = "before", "after"


class Point(NamedTuple):
    """Where to kill: around the nth such step in a phase, on a store that was brought into a state first.

    The states: "kept" has room for all that was ever put; "full" is written over and over; "new" has no directory yet;
    "closed" was closed in order; "stray" was killed while it wrote its snapshot; "cleared" was killed after a clear of
    some segments; "long" was killed with some segments that no clear covers.
    """

    when: str
    step: str
    phase: str = "verified"
    state: str = "kept"
    nth: int = 3  # the most; drawn from 1 on

    @property
    def name(self) -> str:
        return f"{self.when} {self.step}, {self.phase}, {self.state}"


ANY = "any"  # phase

POINTS = (
    # a batch, from its composition to the answer
    Point(BEFORE, "batch", nth=40),
    Point(AFTER, "batch", nth=40),
    Point(BEFORE, "sync batch", nth=20),
    Point(AFTER, "sync batch", nth=20),
    Point(AFTER, "claim", nth=20),
    Point(BEFORE, "tombstone"),
    Point(AFTER, "tombstone"),
    Point(AFTER, "sync tombstone"),
    Point(BEFORE, "clear", nth=2),
    Point(AFTER, "clear", nth=2),
    Point(AFTER, "sync clear", nth=2),
    # a segment is born
    Point(AFTER, "make spare"),
    Point(AFTER, "header"),
    Point(AFTER, "sync header"),
    Point(AFTER, "rename spare"),
    Point(AFTER, "sync directory, rename spare"),
    # and sealed
    Point(BEFORE, "seal"),
    Point(AFTER, "seal"),
    Point(AFTER, "sync seal"),
    Point(AFTER, "truncate"),
    Point(AFTER, "sync truncate"),
    # the snapshot goes before the first new segment
    Point(AFTER, "unlink snapshot", ANY, "closed", 1),
    Point(AFTER, "sync directory, unlink snapshot", ANY, "closed", 1),
    # an old segment is reclaimed
    Point(BEFORE, "carry", state="full"),
    Point(AFTER, "carry", state="full"),
    Point(AFTER, "sync carry", state="full"),
    Point(BEFORE, "recycle", state="full"),
    Point(AFTER, "recycle", state="full"),
    Point(AFTER, "sync directory, recycle", state="full"),
    Point(AFTER, "unlink segment", state="full"),
    Point(AFTER, "sync directory, unlink segment", state="full"),
    Point(AFTER, "header", state="full", nth=20),  # of a file that was recycled, mostly
    # a store is opened
    Point(BEFORE, "superblock", "opening", "new", 1),
    Point(BEFORE, "rename superblock", "opening", "new", 1),
    Point(AFTER, "rename superblock", "opening", "new", 1),
    Point(AFTER, "superblock", "opening", "new", 1),
    Point(AFTER, "unlink stray", "opening", "stray", 1),
    Point(BEFORE, "settle", "opening", "long", 1),
    Point(AFTER, "settle", "opening", "long", 1),
    # and recovered
    Point(BEFORE, "scan", "opened", "long", 1),
    Point(AFTER, "scan", "opened", "long", 4),
    Point(BEFORE, "last seal", "opened", "long", 1),
    Point(AFTER, "last seal", "opened", "long", 1),
    Point(AFTER, "sync last seal", "opened", "long", 1),
    Point(AFTER, "truncate", "opened", "long", 1),
    Point(AFTER, "sync truncate", "opened", "long", 1),
    Point(AFTER, "unlink segment", "opened", "cleared", 2),
    Point(AFTER, "sync directory, unlink segment", "opened", "cleared", 2),
    # and closed
    Point(AFTER, "batch", "closing", nth=1),
    Point(AFTER, "claim", "closing", nth=1),
    Point(BEFORE, "last seal", "closing", nth=1),
    Point(AFTER, "last seal", "closing", nth=1),
    Point(AFTER, "sync last seal", "closing", nth=1),
    Point(AFTER, "truncate", "closing", nth=1),
    Point(AFTER, "sync truncate", "closing", nth=1),
    Point(AFTER, "make snapshot", "closing", nth=1),
    Point(AFTER, "snapshot chunk", "closing", nth=1),
    Point(AFTER, "snapshot head", "closing", nth=1),
    Point(AFTER, "sync snapshot head", "closing", nth=1),
    Point(AFTER, "rename snapshot", "closing", nth=1),
    Point(AFTER, "sync directory, rename snapshot", "closing", nth=1),
    Point(BEFORE, "close backend", "closing", nth=1),
    Point(AFTER, "close backend", "closing", nth=1),
)


def captured(prepare: Callable[..., Any]) -> dict[str, Any]:
    """What the log put into a call that prepares a write."""
    names, cells = prepare.__code__.co_freevars, prepare.__closure__ or ()
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}


class Killer:
    """Counts the steps, and kills this process at the one that was asked for.

    Parameters
    ----------
    when, step, phase, nth
        Which one; see `Point`.
    told
        Called right before the kill.
    """

    def __init__(self, when: str, step: str, phase: str, nth: int, told: Callable[[], object]) -> None:
        self.phase = "opening"  # now
        self._wanted = (when, step, phase)
        self._left = nth
        self._told = told
        plain = Files.rename  # inside of a call of the backend: a superblock takes its name

        def rename(files: Files, old: str, new: str) -> None:
            if new != SUPERBLOCK_NAME:
                plain(files, old, new)
                return
            self.reach(BEFORE, "rename superblock")
            plain(files, old, new)
            self.reach(AFTER, "rename superblock")

        Files.rename = rename  # type: ignore[method-assign]

    def reach(self, when: str, step: str) -> None:
        """This step is about to be submitted, or has ended."""
        if self._wanted in ((when, step, self.phase), (when, step, ANY)):
            self._left -= 1
            if not self._left:
                self._told()
                os.kill(os.getpid(), signal.SIGKILL)

    def backend(self, *args: Any, **options: Any) -> Backend:
        """Make a backend that tells its steps: for ``_backend_factory``."""
        return TellingBackend(self, create_backend(*args, **options))


class TellingBackend(Wrapper):
    """Tells a `Killer` of each step."""

    def __init__(self, killer: Killer, inner: Backend) -> None:
        super().__init__(inner)
        self._killer = killer
        self._last: WeakKeyDictionary[File, str] = WeakKeyDictionary()  # what was last done to it
        self._last_name = ""
        self._scanned: set[str] = set()

    def _step(self, step: str, submit: Callable[[], asyncio.Future[Any]]) -> asyncio.Future[Any]:
        self._killer.reach(BEFORE, step)
        future = submit()

        def ended(future: asyncio.Future[Any]) -> None:
            if not future.cancelled() and future.exception() is None:
                self._killer.reach(AFTER, step)

        future.add_done_callback(ended)
        return future

    def read(self, file: File, *args: Any, verify: Any = None, **options: Any) -> asyncio.Future[bool]:  # type: ignore[override]
        """A scan is the first read of a segment by the recovery, which verifies what it reads by itself."""
        step = "read"
        if self._killer.phase == "opened" and verify is None and file.name not in self._scanned:
            self._scanned.add(file.name)
            step = "scan"
        return self._step(step, lambda: self.inner.read(file, *args, verify=verify, **options))

    def write(self, file: File, offset: int, prepare: Prepare, **options: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """Told apart by the place, and batches by what is in them."""
        step = self._written(file, offset, prepare)
        if step != "claim":
            self._last[file] = step
        return self._step(step, lambda: self.inner.write(file, offset, prepare, **options))

    @staticmethod
    def _written(file: File, offset: int, prepare: Prepare) -> str:
        if file.name.startswith(SNAPSHOT_NAME):
            return "snapshot chunk" if offset else "snapshot head"
        if offset == 0:
            return "header"
        if offset == CLAIM_AT:
            return "claim"
        assert callable(prepare)
        given = captured(prepare)
        if "following" in given:  # the number of the segment that took over
            return "seal" if given["following"] else "last seal"
        if given["plan"].clear:
            return "clear"
        if given["carries"]:
            return "carry"
        return "tombstone" if given["tombstones"] else "batch"

    def sync(self, file: File, **options: Any) -> asyncio.Future[None]:  # type: ignore[override]
        """Named after what was last done to the file."""
        return self._step(f"sync {self._last.get(file, 'nothing')}", lambda: self.inner.sync(file, **options))

    def call(self, function: str, *args: Any, timeout: float | None = None) -> asyncio.Future[Any]:
        """Named after the function and the kind of file; a sync of the directory after the change before it."""
        step = function
        if function == "rename":
            step = "recycle" if args[1] == SPARE_NAME else f"rename {_kind(args[0])}"
            self._last_name = step
        elif function == "unlink":
            stray = self._killer.phase == "opening" and args[0].endswith(".tmp")
            step = self._last_name = "unlink stray" if stray else f"unlink {_kind(args[0])}"
        elif function == "open" and args[1]:
            step = f"make {_kind(args[0])}"
        elif function == "sync_directory":
            step = f"sync directory, {self._last_name}"
        elif function == "truncate":
            self._last[args[0]] = step
        elif function == "write_file":
            step = _kind(args[0])
        return self._step(step, lambda: self.inner.call(function, *args, timeout=timeout))

    async def close(self) -> int:
        """The last step of all."""
        self._killer.reach(BEFORE, "close backend")
        stuck = await self.inner.close()
        self._killer.reach(AFTER, "close backend")
        return stuck


def _kind(name: str) -> str:
    if parse_segment_name(name) is not None:
        return "segment"
    if name in (SPARE_NAME, SUPERBLOCK_NAME):
        return name
    return "snapshot"
