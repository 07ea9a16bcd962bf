"""A journal of everything an engine changes, and the crash images that could result.

The model, conservative on purpose (what POSIX promises, not what one file system does):

* The data of a file (writes, truncations, allocations) is durable once a successful sync of that file *began* after
  they had succeeded, and has ended. Until then each may be on disk or not.
* A name (creation, rename, unlink) is durable once a successful directory sync began after it had succeeded, and has
  ended. A sync of the file does not make its name durable. A rename that survives moves the file that it was called
  for, whether or not the name that it had before survived.
* An operation that failed, timed out or was cancelled has an unknown outcome: it may be on disk in any part, whatever
  is synced later.
* Sectors of 512 bytes are written whole or not at all, except in the ``torn`` mode, where a write may also end at any
  byte. Unsynced sectors survive independently of each other and of their order.
* After a mere kill (``kill`` mode) the page cache survives: everything that had succeeded is there, and what was in
  flight is there, missing or torn.

Positions are a count of events: the beginning and the end of every operation, and every call of `position`. A crash at
position *n* means that the events up to *n* have happened and the later ones have not.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random as random_module
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from asynckv.backends.base import Backend, File, Wrapper

if TYPE_CHECKING:
    from asynckv.backends.base import Prepare

__all__ = ["MODES", "Entry", "Image", "RecordingBackend"]

SECTOR = 512
MODES = ("kill", "kept", "dropped", "subset", "torn")

_NAMES = frozenset({"create", "rename", "unlink"})
_DATA = frozenset({"write", "truncate", "allocate"})


@dataclass(eq=False)
class Entry:
    """One operation of the journal.

    Attributes
    ----------
    kind
        create, write, truncate, allocate, sync, rename, unlink, sync_directory or mark.
    begun, ended
        Positions; infinity while it runs.
    ok
        Whether it is known to have succeeded.
    file
        Number of the file's data, 0 when there is none; stays the same across renames.
    """

    kind: str
    begun: int
    file: int = 0
    name: str = ""
    new: str = ""
    offset: int = 0
    size: int = 0
    data: bytes = field(default=b"", repr=False)
    label: Any = None
    ended: float = math.inf
    ok: bool = False


@dataclass(frozen=True)
class Image:
    """A directory as a crash could have left it.

    Attributes
    ----------
    path
        The directory.
    cut
        Position of the crash.
    mode
        What became of unsynced changes.
    marks
        Labels of the marks before the crash.
    """

    path: Path
    cut: int
    mode: str
    marks: tuple[Any, ...]


class RecordingBackend(Wrapper):
    """A backend that keeps a journal of every change on its way to the inner one.

    All data is copied into memory: for tests of some megabytes.

    Parameters
    ----------
    inner
        The backend that does the work.
    content
        What the directory holds, if that is known; else `start` reads it.
    names
        The directory as it is, name to whatever tells files apart, if that can be asked at any time. Then it is known
        what became of a creation, rename or unlink that failed or came too late.

    Attributes
    ----------
    journal
        The entries, in order of their beginning.
    """

    def __init__(
        self,
        inner: Backend,
        content: Mapping[str, bytes] | None = None,
        names: Callable[[], Mapping[str, Any]] | None = None,
    ) -> None:
        super().__init__(inner)
        self._ask = names
        self.journal: list[Entry] = []
        self._events = 0
        self._lock = threading.Lock()  # writes begin in workers
        self._base: dict[str, tuple[int, bytes]]  # the directory at start: name -> (number, content)
        self._names: dict[str, int]  # the directory now
        self._numbers: WeakKeyDictionary[File, int] = WeakKeyDictionary()
        self._next_number = 1
        self._tasks: set[asyncio.Task[Any]] = set()
        self._known = content is not None
        self._note(content or {})

    async def start(self, directory: str | os.PathLike[str] | int) -> None:
        """Start the inner backend and note what the directory holds."""
        await self.inner.start(directory)
        if not self._known:
            files = await self.inner.list()
            self._note({name: await self.inner.read_file(name, size) for name, size, _ in files})

    def _note(self, content: Mapping[str, bytes]) -> None:
        self._base = {name: (self._number(), data) for name, data in content.items()}
        self._names = {name: number for name, (number, _) in self._base.items()}

    async def close(self) -> int:
        """Close the inner backend; the journal stays."""
        while self._tasks:
            await asyncio.wait(self._tasks)
        return await self.inner.close()

    # the journal

    @property
    def events(self) -> int:
        """Events so far."""
        return self._events

    def position(self) -> int:
        """Count one event and return its position: for `ModelCache`."""
        with self._lock:
            self._events += 1
            return self._events

    def mark(self, label: Any) -> int:
        """Put a label into the journal, such as "flushed up to here", and return its position."""
        entry = self._begin("mark", label=label)
        entry.ended, entry.ok = entry.begun, True
        return entry.begun

    def _begin(self, kind: str, **fields: Any) -> Entry:
        with self._lock:
            self._events += 1
            entry = Entry(kind, self._events, **fields)
            self.journal.append(entry)
            return entry

    def _number(self) -> int:
        number, self._next_number = self._next_number, self._next_number + 1
        return number

    def _ends(self, future: asyncio.Future[Any], entries: list[Entry], then: Callable[[], object]) -> None:
        """Note the end when the future resolves: before its owner hears of it, because callbacks keep their order."""
        before = None if self._ask is None else dict(self._ask())

        def done(future: asyncio.Future[Any]) -> None:
            ok = not future.cancelled() and future.exception() is None
            for entry in entries:
                entry.ended, entry.ok = self.position(), ok
                if not ok and before is not None and entry.kind in _NAMES:
                    entry.ok = self._took_effect(entry, before)
                    if entry.ok and entry.kind != "create":
                        then()
                    elif not entry.ok:
                        self.journal.remove(entry)
            if ok:
                then()

        future.add_done_callback(done)

    def _took_effect(self, entry: Entry, before: Mapping[str, Any]) -> bool:
        assert self._ask is not None
        now = self._ask()
        if entry.kind == "create":
            return entry.name in now
        old = before.get(entry.name)
        gone = old is not None and now.get(entry.name) is not old
        return gone and (entry.kind == "unlink" or now.get(entry.new) is old)

    # operations

    def write(
        self,
        file: File,
        offset: int,
        prepare: Prepare,
        *,
        timeout: float | None = None,
        released: Callable[[], object] | None = None,
    ) -> asyncio.Future[Any]:
        """Write, and keep a copy of the data; the entry begins when a worker begins."""
        entries: list[Entry] = []
        number = self._numbers.get(file, 0)

        def copied() -> tuple[Sequence[Any], Any]:
            pieces, result = prepare() if callable(prepare) else (prepare, None)
            data = b"".join(bytes(piece) for piece in pieces)
            entries.append(self._begin("write", file=number, name=file.name, offset=offset, data=data))
            return pieces, result

        future = self.inner.write(file, offset, copied, timeout=timeout, released=released)
        self._ends(future, entries, _nothing)
        return future

    def sync(self, file: File, *, timeout: float | None = None) -> asyncio.Future[None]:
        """Sync a file."""
        entry = self._begin("sync", file=self._numbers.get(file, 0), name=file.name)
        future = self.inner.sync(file, timeout=timeout)
        self._ends(future, [entry], _nothing)
        return future

    def call(self, function: str, *args: Any, timeout: float | None = None) -> asyncio.Future[Any]:
        """Run a cold call; what changes something is noted."""
        if function == "write_file":
            task = asyncio.get_running_loop().create_task(self._write_file(*args))
            self._tasks.add(task)
            task.add_done_callback(self._task_done)
            return asyncio.shield(task)
        entries: list[Entry] = []
        then: Callable[[], object] = _nothing
        if function == "open":
            return self._open(args, timeout)
        if function == "close":
            self._numbers.pop(args[0], None)
        elif function in ("allocate", "truncate"):
            file, size = args
            entries.append(self._begin(function, file=self._numbers.get(file, 0), name=file.name, size=size))
        elif function == "rename":
            old, new = args
            entries.append(self._begin("rename", file=self._names.get(old, 0), name=old, new=new))
            then = partial(self._renamed, old, new)
        elif function == "unlink":
            entries.append(self._begin("unlink", name=args[0]))
            then = partial(self._names.pop, args[0], None)
        elif function == "sync_directory":
            entries.append(self._begin("sync_directory"))
        future = self.inner.call(function, *args, timeout=timeout)
        self._ends(future, entries, then)
        return future

    def _task_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # seen, even when its owner has gone away

    def _renamed(self, old: str, new: str) -> None:
        if old in self._names:
            self._names[new] = self._names.pop(old)

    def _open(self, args: tuple[Any, ...], timeout: float | None) -> asyncio.Future[File]:
        name, create, size, *_ = (*args, False, 0)
        entries = []
        number = self._names.get(name)
        if number is None:
            number = self._number()
            if create:
                self._names[name] = number
                entries.append(self._begin("create", file=number, name=name))
        if create and size:
            entries.append(self._begin("allocate", file=number, name=name, size=size))
        future = self.inner.call("open", *args, timeout=timeout)

        def opened() -> None:
            self._numbers[future.result()] = number

        def failed(future: asyncio.Future[File]) -> None:
            created = entries and entries[0].kind == "create" and self._names.get(name) == number
            if created and not entries[0].ok and not future.cancelled() and future.exception() is not None:
                del self._names[name]

        self._ends(future, entries, opened)
        future.add_done_callback(failed)
        return future

    async def _write_file(self, name: str, data: Any) -> None:
        """The steps of `Backend.write_file`, one by one, so that a crash may fall between any two of them."""
        temporary = name + ".tmp"
        with contextlib.suppress(FileNotFoundError):
            await self.unlink(temporary)
        file = await self.open(temporary, create=True, direct=False)
        try:
            try:
                await self.write(file, 0, [memoryview(data).cast("B")])
                await self.sync(file)
            finally:
                await self.close_file(file)
            await self.rename(temporary, name)
        except OSError:
            with contextlib.suppress(OSError):
                await self.unlink(temporary)
            raise
        await self.sync_directory()

    # crash images

    def cuts(self) -> list[int]:
        """Positions at which a crash can make a difference: the beginning and the end of every entry."""
        found = {0}
        for entry in self.journal:
            found.add(entry.begun)
            if entry.ended < math.inf:
                found.add(int(entry.ended))
        return sorted(found)

    def images(
        self,
        root: str | os.PathLike[str],
        *,
        random: random_module.Random,
        cuts: Iterable[int] | None = None,
        modes: Iterable[str] = MODES,
    ) -> Iterator[Image]:
        """Build one image after the other; each is removed when the next is asked for.

        Parameters
        ----------
        root
            A directory of the test's.
        random
            Chooses what survives.
        cuts
            Positions; all of `cuts()` when left out.
        modes
            For each cut: ``kill``, ``kept`` (all that began survives), ``dropped`` (nothing unsynced survives),
            ``subset`` (each unsynced change survives whole or not), ``torn`` (each in any part).
        """
        path = Path(root) / "image"
        chosen = tuple(modes)
        for cut in self.cuts() if cuts is None else cuts:
            for mode in chosen:
                marks = tuple(entry.label for entry in self.journal if entry.kind == "mark" and entry.begun <= cut)
                self.image(path, cut=cut, mode=mode, random=random)
                try:
                    yield Image(path, cut, mode, marks)
                finally:
                    shutil.rmtree(path, ignore_errors=True)

    def image(
        self,
        path: str | os.PathLike[str],
        *,
        cut: float = math.inf,
        mode: str = "torn",
        random: random_module.Random | None = None,
    ) -> None:
        """Make a directory as a crash at a position could have left it; see `content`."""
        content = self.content(cut=cut, mode=mode, random=random)
        os.mkdir(path, 0o700)
        for name, data in content.items():
            with open(os.open(Path(path) / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(data)

    def content(
        self, *, cut: float = math.inf, mode: str = "torn", random: random_module.Random | None = None
    ) -> dict[str, bytearray]:
        """Names and content of the files that a crash at a position could have left; see the module's docstring."""
        if mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, not {mode!r}")
        chance = random_module.Random(0) if random is None else random
        entries = [entry for entry in self.journal if entry.begun <= cut]
        names = self._surviving_names(entries, cut, mode, chance)
        contents: dict[int, bytearray] = {}
        for _, number in sorted(names.items()):
            if number not in contents:
                contents[number] = self._surviving_content(number, entries, cut, mode, chance)
        return {name: contents[number] for name, number in sorted(names.items())}

    @staticmethod
    def _synced(entries: list[Entry], kind: str, number: int, cut: float) -> float:
        """The last position covered by a sync."""
        return max(
            (
                entry.begun
                for entry in entries
                if entry.kind == kind and entry.file == number and entry.ok and entry.ended <= cut
            ),
            default=-math.inf,
        )

    @staticmethod
    def _survives(entry: Entry, synced: float, cut: float, mode: str, chance: random_module.Random) -> bool:
        complete = entry.ok and entry.ended <= cut
        if (complete and (entry.ended <= synced or mode == "kill")) or mode == "kept":
            return True
        return mode != "dropped" and chance.random() < 0.5

    def _surviving_names(
        self, entries: list[Entry], cut: float, mode: str, chance: random_module.Random
    ) -> dict[str, int]:
        synced = self._synced(entries, "sync_directory", 0, cut)
        names = {name: number for name, (number, _) in self._base.items()}
        for entry in entries:
            if entry.kind not in _NAMES or not self._survives(entry, synced, cut, mode, chance):
                continue
            if entry.kind == "create":
                names.setdefault(entry.name, entry.file)
            elif entry.kind == "unlink":
                names.pop(entry.name, None)
            elif entry.file:  # a rename moves a file, not whatever has the name: that may be an older one
                if names.get(entry.name) == entry.file:
                    del names[entry.name]
                names[entry.new] = entry.file
        return names

    def _surviving_content(
        self, number: int, entries: list[Entry], cut: float, mode: str, chance: random_module.Random
    ) -> bytearray:
        content = bytearray(next((data for base, data in self._base.values() if base == number), b""))
        synced = self._synced(entries, "sync", number, cut)
        for entry in entries:
            if entry.kind not in _DATA or entry.file != number:
                continue
            complete = entry.ok and entry.ended <= cut
            certain = complete and (entry.ended <= synced or mode == "kill")
            if entry.kind == "write" and not certain and mode in ("torn", "kill"):
                _tear(content, entry, chance)
            elif self._survives(entry, synced, cut, mode, chance):
                _apply(content, entry)
        return content


def _nothing() -> None:
    pass


def _apply(content: bytearray, entry: Entry) -> None:
    if entry.kind == "write":
        _put(content, entry.offset, entry.data)
    elif entry.kind == "truncate":
        del content[entry.size :]
        content.extend(bytes(entry.size - len(content)))
    elif len(content) < entry.size:
        content.extend(bytes(entry.size - len(content)))


def _put(content: bytearray, offset: int, data: bytes) -> None:
    if not data:
        return
    if len(content) < offset:
        content.extend(bytes(offset - len(content)))
    content[offset : offset + len(data)] = data


def _tear(content: bytearray, entry: Entry, chance: random_module.Random) -> None:
    """Apply a part of a write: a prefix up to a sector or up to any byte, or sectors chosen one by one."""
    data, size = entry.data, len(entry.data)
    way = chance.randrange(5)
    if way == 0 or not size:
        return
    if way == 1:
        _put(content, entry.offset, data)
    elif way == 2:
        _put(content, entry.offset, data[: chance.randrange(size + 1)])
    elif way == 3:
        end = chance.randrange(size // SECTOR + 1) * SECTOR - entry.offset % SECTOR
        _put(content, entry.offset, data[: max(end, 0)])
    else:
        at = 0
        keep = chance.random()
        while at < size:
            end = min((entry.offset + at) // SECTOR * SECTOR + SECTOR - entry.offset, size)
            if chance.random() < keep:
                _put(content, entry.offset + at, data[at:end])
            at = end
