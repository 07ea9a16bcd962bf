"""A ring without a kernel: the methods of `asynckv._uring.Ring`, and completions by script.

`FakeRing` does the I/O itself, by blocking calls, when the completion is posted and not before: what is late writes
into its buffer late. The rules are those of a `Script`; operations are ``"read"``, ``"write"``, ``"fsync"`` and
``"enter"`` (the system call that submits). ::

    script = Script().add("read", late(0.02), every=3).add("enter", error(errno.EAGAIN), nth=2)
    backend = UringBackend(ring_factory=lambda entries: FakeRing(entries, script=script))
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from collections import deque
from typing import TYPE_CHECKING, Any

from asynckv.testing.script import Fault, Script
from asynckv.testing.tools import os_error

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from random import Random

    Act = Callable[[int, list[memoryview]], int]

__all__ = [
    "FakeRing", "backlogged", "duplicate", "late", "lost", "missing", "partial", "silent", "stale", "unknown",
]  # fmt: skip

_SLOT = 0xFFFFFFFF
_kept_for_good: list[FakeRing] = []


def late(seconds: float) -> Fault:
    """The completion is posted after a time; without a running loop, by `FakeRing.release_all`."""
    return Fault("late", seconds=seconds)


def duplicate() -> Fault:
    """The completion is posted twice."""
    return Fault("duplicate")


def missing() -> Fault:
    """No completion ever, and no I/O; only closing with `FakeRing` ``cancellable`` or `release_all` ends it."""
    return Fault("missing")


def stale() -> Fault:
    """A completion of the slot's last owner comes first, with another result."""
    return Fault("stale")


def unknown() -> Fault:
    """A completion of a slot that does not exist comes first."""
    return Fault("unknown")


def silent() -> Fault:
    """The completion is posted and the eventfd is not told."""
    return Fault("silent")


def backlogged() -> Fault:
    """The completion queue is full: the kernel keeps the completion until the next `reap`."""
    return Fault("backlogged")


def lost() -> Fault:
    """The completion queue is full and the kernel throws the completion away; the I/O was done."""
    return Fault("lost")


def partial(fraction: float = 0.5) -> Fault:
    """``"enter"`` takes only this share of what is queued."""
    return Fault("partial", fraction=fraction)


class _Request:
    """What a slot holds."""

    __slots__ = ("act", "fault", "fd", "kind", "tag", "taken", "token", "views")

    def __init__(self, kind: str, tag: Any, fd: int, views: list[memoryview], act: Act) -> None:
        self.kind = kind
        self.tag = tag
        self.fd = fd
        self.views = views
        self.act = act
        self.taken = False
        self.token = 0
        self.fault: Fault | None = None


class FakeRing:
    """Behaves as `asynckv._uring.Ring` does, except for what a script says.

    Parameters
    ----------
    entries, limit, generation
        As for the real one.
    script
        What goes wrong.
    shuffle
        Post the completions of one submission in a random order.
    cancellable
        Whether `cancel` and `cancel_all` end what is late or missing; real disk I/O mostly cannot be cancelled.
    """

    opcodes = frozenset(range(64))
    features = 0

    def __init__(
        self,
        entries: int = 128,
        *,
        limit: int = 0,
        generation: int = 1,
        script: Script | None = None,
        shuffle: Random | None = None,
        cancellable: bool = False,
    ) -> None:
        self.script = Script() if script is None else script
        self.shuffle = shuffle
        self.cancellable = cancellable
        self.sq_entries = entries
        self.cq_entries = 2 * entries
        self.capacity = max(self.cq_entries - 2, 1)
        if 0 < limit < self.capacity:
            self.capacity = limit
        self.eventfd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.stale = self.lost = self.backlogs = self.enters = self.queued = self.in_flight = 0
        self.closed = False
        self._generations = [generation] * self.capacity
        self._slots: list[_Request | None] = [None] * self.capacity
        self._free = list(range(self.capacity - 1, -1, -1))
        self._queue: deque[_Request] = deque()
        self._forged: list[int] = []
        self._completions: deque[tuple[int, int]] = deque()
        self._kept: deque[tuple[int, int]] = deque()  # the backlog
        self._held: dict[int, _Request] = {}  # late or missing, by token

    # requests

    def read(self, tag: Any, fd: int, buffer: memoryview | bytearray, offset: int) -> int:
        """See `Ring.read`."""
        view = memoryview(buffer).cast("B")
        if view.readonly:
            raise BufferError("the buffer is read-only")
        return self._add("read", tag, fd, [view], lambda number, views: os.preadv(number, views, offset))

    def read_all(self, requests: list[Any], first: int, most: int) -> int:
        """See `Ring.read_all`; each request has its memory as `view`."""
        number = first
        while number < len(requests) and self._free and (most > 0 or number == first):
            request = requests[number]
            request.token = self.read(request, request.fd, request.view[: request.span], request.offset)
            most -= request.span
            number += 1
        return number

    def write(self, tag: Any, fd: int, buffers: Sequence[memoryview | bytes | bytearray], offset: int) -> int:
        """See `Ring.write`."""
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        return self._add("write", tag, fd, views, lambda number, views: os.pwritev(number, views, offset))

    def fsync(self, tag: Any, fd: int, datasync: bool = True) -> int:
        """See `Ring.fsync`."""
        sync = os.fdatasync if datasync else os.fsync
        return self._add("fsync", tag, fd, [], lambda number, _: sync(number) or 0)

    def nop(self, tag: Any) -> int:
        """See `Ring.nop`."""
        return self._add("nop", tag, -1, [], lambda *_: 0)

    def _add(self, kind: str, tag: Any, fd: int, views: list[memoryview], act: Act) -> int:
        self._check()
        if not self._free:
            raise RuntimeError("no room in the ring")
        slot = self._free.pop()
        request = self._slots[slot] = _Request(kind, tag, fd, views, act)
        request.token = self._generations[slot] << 32 | slot
        self._queue.append(request)
        self.queued += 1
        return request.token

    def cancel(self, token: int) -> bool:
        """See `Ring.cancel`; at once."""
        self._check()
        if self.cancellable and self._held.pop(token, None) is not None:
            self._post(token, -errno.ECANCELED)
        return True

    def cancel_all(self) -> bool:
        """See `Ring.cancel_all`; at once."""
        for token in list(self._held):
            self.cancel(token)
        return True

    def forge(self, token: int) -> bool:
        """See `Ring.forge`."""
        self._check()
        self._forged.append(token)
        return True

    @property
    def room(self) -> int:
        """Requests that fit now."""
        return len(self._free)

    # submission

    def submit(self) -> int:
        """See `Ring.submit`."""
        self._check()
        for token in self._forged:
            self._post(token, 0)
        self._forged.clear()
        count = min(len(self._queue), self.sq_entries)
        if not count:
            return 0
        self.enters += 1
        fault = self.script.next("enter")
        if fault is not None and fault.action == "error":
            raise os_error(fault.errno)
        if fault is not None and fault.action == "partial":
            count = fault.part(count)
        batch = [self._queue.popleft() for _ in range(count)]
        for request in batch:
            request.taken = True
            request.fault = self.script.next(request.kind) if request.kind != "nop" else None
            self.queued -= 1
            self.in_flight += 1
        if self.shuffle is not None:
            self.shuffle.shuffle(batch)
        for request in batch:
            self._execute(request)
        return count

    def _execute(self, request: _Request) -> None:
        fault = request.fault
        action = "" if fault is None else fault.action
        if fault is not None and action in ("late", "missing", "hang"):
            self._held[request.token] = request
            if action == "late":
                with contextlib.suppress(RuntimeError):  # no loop: until `release_all`
                    asyncio.get_running_loop().call_later(fault.seconds, self._release, request.token)
            return
        token = request.token
        if action == "stale":
            generation = (token >> 32) - 1 or _SLOT
            self._post(generation << 32 | token & _SLOT, 12345)
        elif action == "unknown":
            self._post(1 << 32 | self.capacity + 7, 12345)
        result = self._do(request)
        if action == "lost":
            self.lost += 1
            self._tell()
        elif action == "backlogged":
            self._kept.append((token, result))
            self._tell()
        else:
            self._post(token, result, tell=action != "silent")
            if action == "duplicate":
                self._post(token, result)

    def _do(self, request: _Request) -> int:
        """Do the I/O: the result as the kernel gives it."""
        fault, views = request.fault, request.views
        if fault is not None and fault.action == "error":
            return -fault.errno
        if fault is not None and fault.action == "short":
            return self._do_part(request, _first(views, fault.part(sum(map(len, views)))))
        try:
            result = request.act(request.fd, views)
        except OSError as error:
            return -(error.errno or errno.EIO)
        if fault is not None and fault.action == "corrupt" and result:
            at, mask = self.script.bit(result)
            views[0][at] ^= mask
        return result

    def _do_part(self, request: _Request, views: list[memoryview]) -> int:
        """Move the first bytes only, past the page cache or not: a part need not be aligned."""
        if not views:
            return 0
        fd = os.open(f"/proc/self/fd/{request.fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            return request.act(fd, views)
        finally:
            os.close(fd)

    def _post(self, token: int, result: int, *, tell: bool = True) -> None:
        self._completions.append((token, result))
        if tell:
            self._tell()

    def _tell(self) -> None:
        os.eventfd_write(self.eventfd, 1)

    def _release(self, token: int) -> None:
        request = self._held.pop(token, None)
        if request is not None and not self.closed:
            self._post(token, self._do(request))

    @property
    def held(self) -> int:
        """Requests that the script holds back."""
        return len(self._held)

    def release_all(self) -> None:
        """Post everything that is late or missing, its I/O done now."""
        for token in list(self._held):
            self._release(token)

    def take_back(self) -> list[Any]:
        """See `Ring.take_back`."""
        self._check()
        tags = [request.tag for request in self._queue]
        for request in self._queue:
            self.queued -= 1
            self._free_slot(request.token & _SLOT)
        self._queue.clear()
        return tags

    # completion

    @property
    def ready(self) -> bool:
        """Whether completions wait to be reaped."""
        self._check()
        return bool(self._completions or self._kept)

    def acknowledge(self) -> bool:
        """See `Ring.acknowledge`."""
        self._check()
        try:
            os.eventfd_read(self.eventfd)
        except BlockingIOError:
            return False
        return True

    def reap(self, limit: int = 64) -> list[tuple[Any, int]]:
        """See `Ring.reap`."""
        self._check()
        if self._kept:
            self.backlogs += 1
            self._completions.extend(self._kept)
            self._kept.clear()
        found = []
        for _ in range(min(limit, len(self._completions))):
            token, result = self._completions.popleft()
            slot = token & _SLOT
            request = self._slots[slot] if slot < self.capacity else None
            if request is None or not request.taken or request.token != token:
                self.stale += 1
                continue
            self.in_flight -= 1
            self._free_slot(slot)
            found.append((request.tag, result))
        return found

    def _free_slot(self, slot: int) -> None:
        self._slots[slot] = None
        self._generations[slot] = self._generations[slot] + 1 & _SLOT or 1
        self._free.append(slot)

    # the rest

    def register_buffers(self, buffers: Sequence[memoryview | bytearray]) -> bool:
        """Has nowhere to register them."""
        return False

    def register_files(self, places: int = 64) -> bool:
        """Has nowhere to register them."""
        return False

    def fix_file(self, fd: int) -> bool:
        """Has nowhere to register it."""
        return False

    def unfix_file(self, fd: int) -> None:
        """Has nowhere it could be registered."""

    def close(self, timeout: float = 1.0) -> int:
        """See `Ring.close`; does not wait."""
        if self.closed:
            return 0
        self.take_back()
        self.cancel_all()
        self.reap(len(self._completions) + len(self._kept))
        if self.in_flight:
            return self.in_flight
        self.closed = True
        if self in _kept_for_good:
            _kept_for_good.remove(self)
        os.close(self.eventfd)
        self.eventfd = -1
        return 0

    def keep(self) -> None:
        """See `Ring.keep`."""
        if self not in _kept_for_good:
            _kept_for_good.append(self)

    def _check(self) -> None:
        if self.closed:
            raise RuntimeError("the ring is closed")

    def __del__(self) -> None:
        if not self.closed and self.eventfd >= 0:
            os.close(self.eventfd)


def _first(views: list[memoryview], size: int) -> list[memoryview]:
    """The first bytes of some views."""
    chosen = []
    for view in views:
        if size <= 0:
            break
        chosen.append(view[:size])
        size -= len(view)
    return chosen
