"""The operations of the ``io_uring`` engine: what they ask of the ring and of a worker, and the memory they borrow."""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING, Any

from asynckv._core import Flight
from asynckv.backends.operations import Op
from asynckv.backends.transfer import BOUNCE_BYTES, IOV_MAX, Scratch, flatten

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop
    from collections.abc import Callable
    from queue import SimpleQueue

    from asynckv.backends.base import File, Prepare, Sink
    from asynckv.backends.transfer import Request, Steps
    from asynckv.backends.uring import UringBackend

__all__ = [
    "SMALL_BYTES",
    "BouncePool",
    "NoBounceError",
    "RingFlight",
    "RingOp",
    "RingRead",
    "RingSync",
    "RingWrite",
    "Told",
    "os_error",
]

# A buffered request is copied, or gets its pages, while it is submitted, at 0.5 to 10 GB/s; a direct one has its pages
# pinned, at some 15 GB/s.
BUFFERED_REQUEST = 256 << 10
DIRECT_REQUEST = 8 << 20
DIRECT_SHARE = 16
SYNC_SHARE = 16 << 10
SMALL_BYTES = 64 << 10


def os_error(result: int) -> OSError:
    """The error of a completion's negative result."""
    return OSError(-result, os.strerror(-result))


class NoBounceError(Exception):
    """No bounce buffer is free."""


class BouncePool:
    """Page-aligned memory for transfers that direct I/O does not take as they are.

    Parameters
    ----------
    limit
        Bytes that `take` hands out at a time; there is always room for one.
    returned
        Called when one comes back.
    """

    def __init__(self, limit: int, returned: Callable[[], object]) -> None:
        self.limit = limit
        self.used = 0
        self.returned = returned
        self._free: dict[int, list[memoryview]] = {SMALL_BYTES: [], BOUNCE_BYTES: []}

    def take(self, size: int, *, beyond: bool = False) -> memoryview:
        """Return a buffer for transfers of a size, maybe in parts.

        Raises
        ------
        NoBounceError
            There is none, and `beyond` does not allow to go beyond the limit.
        """
        count = SMALL_BYTES if size <= SMALL_BYTES else BOUNCE_BYTES
        if self.used and self.used + count > self.limit and not beyond:
            raise NoBounceError
        self.used += count
        free = self._free[count]
        return free.pop() if free else memoryview(mmap.mmap(-1, count))

    def give(self, view: memoryview) -> None:
        """Take a buffer back."""
        self.used -= len(view)
        free = self._free[len(view)]
        if (len(free) + 1) * len(view) <= self.limit // 2:
            free.append(view)
        self.returned()


class _OpScratch(Scratch):
    """The bounce buffer of one operation."""

    __slots__ = ("pool", "size", "taken")

    def __init__(self, pool: BouncePool, size: int, taken: memoryview | None) -> None:
        super().__init__()
        self.pool = pool
        self.size = size
        self.taken = taken

    def view(self) -> memoryview:
        """Return the buffer; valid until `give`."""
        if self.taken is None:  # not foreseen: only this address was refused
            self.taken = self.pool.take(self.size, beyond=True)
        return self.taken

    def give(self) -> None:
        """Return it to the pool; once."""
        taken, self.taken = self.taken, None
        if taken is not None:
            self.pool.give(taken)


class Told:
    """Stands for a future where a sink is told: the calls that an engine makes on one."""

    __slots__ = ("_loop", "_over", "_sink")

    def __init__(self, loop: AbstractEventLoop, sink: Sink) -> None:
        self._loop = loop
        self._sink: Sink | None = sink
        self._over = False

    def done(self) -> bool:
        """Whether the sink was told, or nobody waits any more."""
        return self._over

    def cancel(self) -> None:
        """Nobody waits any more."""
        self._over = True
        self._sink = None

    def set_result(self, result: bool) -> None:
        """Tell a result."""
        self._tell(result, None)

    def set_exception(self, error: BaseException) -> None:
        """Tell an error."""
        self._tell(False, error)

    def exception(self) -> None:
        """Nothing to be seen: the sink has it."""

    def _tell(self, result: bool, error: BaseException | None) -> None:
        self._over = True
        sink, self._sink = self._sink, None
        assert sink is not None
        try:
            sink.on_ended(result, error)
        except Exception as reason:  # other operations' results wait behind this one
            self._loop.call_exception_handler({"message": "the end of a read could not be told", "exception": reason})


class RingFlight(Flight):
    """Reads of blocks that go to the ring together, without an operation for each; see `Backend.fly`."""

    __slots__ = ("deadline", "direct", "files", "over")
    kind = "flight"
    claim = ()  # never given up as a whole

    def __init__(self, files: list[File], direct: bool, over: Callable[[], object], deadline: float) -> None:
        super().__init__()
        self.files = files
        self.direct = direct
        self.over = over
        self.deadline = deadline

    @property
    def requests(self) -> int:
        """Reads that have not ended."""
        return self.left

    def begin_more(self, ring: Any, budget: int) -> int:
        """Hand the ring what it has room for; the share of a turn in bytes."""
        first, scale = self.begun, DIRECT_SHARE if self.direct else 1
        self.took(ring.read_all(self.loads, first, budget * scale))
        return (self.begun - first) * self.loads[first].span // scale


class RingOp(Op):
    """What the operations on a ring share.

    Attributes
    ----------
    token
        The ring's name of the request in the kernel, 0 when there is none.
    steps
        The transfer, when one request is not enough; `request` is what it wants next.
    scratch
        The bounce buffer.
    direct
        Whether the file was direct when the first request was made.
    wanted
        The result that means that one request did it all.
    moved
        Whether the bytes are where they should be.
    """

    __slots__ = ("direct", "moved", "request", "scratch", "steps", "token", "wanted")
    engine: UringBackend
    file: File
    token: int
    steps: Steps | None
    request: Request | None
    scratch: _OpScratch | None
    direct: bool
    wanted: float
    moved: bool

    def __init__(
        self,
        engine: UringBackend,
        lane: SimpleQueue[Any],
        file: File,
        released: Callable[[], object] | None,
        future: Any = None,
    ) -> None:
        super().__init__(engine, lane, file, released, future)
        self.token = 0
        self.steps = self.request = self.scratch = None
        self.moved = False

    def begin(self, ring: Any) -> int:
        """Queue the first request; its share of a turn in bytes, -1 when there is nothing to do.

        Raises
        ------
        NoBounceError
            It has to wait for a bounce buffer.
        """
        raise NotImplementedError

    def again(self, ring: Any) -> int:
        """Queue the request that the steps want; its share."""
        request = self.request
        assert isinstance(request, tuple)
        self.request = None
        writes, views, offset = request
        fd = self.file.fd
        self.token = ring.write(self, fd, views, offset) if writes else ring.read(self, fd, views[0], offset)
        size = sum(map(len, views))
        return size // DIRECT_SHARE if self.direct else size

    def plan(self, bounce: memoryview | None) -> Steps:
        """Make the steps of a transfer that one request does not do."""
        raise NotImplementedError

    def begin_steps(self, ring: Any, odd: bool, size: int) -> int:
        """Queue the first request of the steps, which there is; `odd` ones need a bounce buffer."""
        bounce = None
        if odd:
            bounce = self.engine.bounces.take(min(size + 2 * self.engine.alignment, BOUNCE_BYTES))
        self.steps = self.plan(bounce)
        try:
            self.request = next(self.steps)
        except StopIteration:
            return -1
        return self.again(ring)

    def restart(self) -> None:
        """Forget how far the transfer got; it is whole or nothing, and doing it twice does no harm."""
        if self.steps is not None:
            self.steps.close()
        self.steps = self.request = None
        self.token = 0
        if self.scratch is not None:
            self.scratch.give()
            self.scratch = None

    def forget(self) -> None:
        if self.scratch is not None or self.steps is not None:
            self.restart()
        super().forget()


class RingRead(RingOp):
    """Fill a buffer through the ring and verify it."""

    __slots__ = ("buffer", "offset", "verify")
    kind = "read"
    offset: int
    buffer: memoryview | None
    verify: Callable[[memoryview], bool] | None

    def begin(self, ring: Any) -> int:
        buffer, file, offset = self.buffer, self.file, self.offset
        assert buffer is not None
        direct = self.direct = file.direct and self.engine.transfers.uses_direct(file)
        size = len(buffer)
        odd = direct and (offset | size) & (self.engine.transfers.alignment - 1) != 0
        if odd or size > (DIRECT_REQUEST if direct else BUFFERED_REQUEST):
            return self.begin_steps(ring, odd, size)
        self.wanted = size
        self.token = ring.read(self, file.fd, buffer, offset)
        return size // DIRECT_SHARE if direct else size

    def plan(self, bounce: memoryview | None) -> Steps:
        assert self.buffer is not None
        self.scratch = _OpScratch(self.engine.bounces, len(self.buffer), bounce)
        limit = DIRECT_REQUEST if self.direct else BUFFERED_REQUEST
        return self.engine.transfers.read_steps(self.file, self.offset, self.buffer, self.scratch, limit)

    def run(self, scratch: Scratch) -> bool:
        """Verify what the ring has read; read it first, when there is no ring any more."""
        buffer = self.buffer
        assert buffer is not None
        if not self.moved:
            self.engine.transfers.read(self.file, self.offset, buffer, scratch)
        return True if self.verify is None else self.verify(buffer)

    def forget(self) -> None:
        if self.scratch is not None or self.steps is not None:
            self.restart()
        self.released = self.result = self.error = self.buffer = self.verify = None


class RingWrite(RingOp):
    """Prepare pieces, on the loop or in a worker, and write them through the ring."""

    __slots__ = ("ends", "offset", "prepare", "value", "views")
    kind = "write"
    offset: int
    prepare: Prepare | None
    views: list[memoryview] | None  # the pieces that are not empty, once they are known
    ends: list[int]  # where each ends, counted from the start of the first
    value: Any  # the result

    def is_short(self, limit: int) -> bool:
        """Whether preparing takes so little that it is done on the loop; see `asynckv.backends.base`."""
        prepare = self.prepare
        return not callable(prepare) or 0 <= getattr(prepare, "nbytes", -1) <= limit

    def begin(self, ring: Any) -> int:
        file, offset, views, ends = self.file, self.offset, self.views, self.ends
        assert views is not None
        direct = self.direct = file.direct and self.engine.transfers.uses_direct(file)
        if not ends:
            return -1
        size = ends[-1]
        mask = self.engine.transfers.alignment - 1
        odd = direct and (offset & mask != 0 or any(end & mask for end in ends))
        if odd or size > (DIRECT_REQUEST if direct else BUFFERED_REQUEST) or len(views) > IOV_MAX:
            return self.begin_steps(ring, odd, size)
        self.wanted = size
        self.token = ring.write(self, file.fd, views, offset)
        return size // DIRECT_SHARE if direct else size

    def plan(self, bounce: memoryview | None) -> Steps:
        assert self.views is not None
        self.scratch = _OpScratch(self.engine.bounces, self.ends[-1], bounce)
        limit = DIRECT_REQUEST if self.direct else BUFFERED_REQUEST
        return self.engine.transfers.write_steps(self.file, self.offset, self.views, self.ends, self.scratch, limit)

    def run(self, scratch: Scratch) -> Any:
        """Prepare, once; and write, when there is no ring any more."""
        prepare, self.prepare = self.prepare, None
        if prepare is not None:
            pieces, self.value = prepare() if callable(prepare) else (prepare, None)
            self.views, self.ends = flatten(pieces)
        if not self.engine.ring_works:
            assert self.views is not None
            self.engine.transfers.write(self.file, self.offset, self.views, scratch)
            self.moved = True
        return self.value

    def forget(self) -> None:
        super().forget()
        self.prepare = self.views = self.value = None
        self.ends = []


class RingSync(RingOp):
    """Make a file durable through the ring."""

    __slots__ = ()
    kind = "sync"

    def begin(self, ring: Any) -> int:
        self.wanted = 0
        self.direct = self.file.direct
        self.token = ring.fsync(self, self.file.fd)
        return SYNC_SHARE

    def run(self, scratch: Scratch) -> None:
        """Sync, when there is no ring any more."""
        self.engine.transfers.sync(self.file)
