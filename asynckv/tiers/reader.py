"""Reading blocks back: whole, verified, and read once more before they are called damaged.

Invariants
----------
* A buffer belongs to the engine until it says so; a segment counts as in use for as long.
* The checksum is computed by the engine: in a worker, or on the loop where that has read and the bytes are few.
* `released` of the caller is called once, after the last operation on the buffer ended, whatever became of the future;
  and before the future resolves, unless that was cancelled or ran past its deadline.
"""

from __future__ import annotations

import asyncio
import errno
from typing import TYPE_CHECKING

from asynckv._record import payload_span
from asynckv.backends.base import ShortTransferError
from asynckv.checksum import checksum
from asynckv.tiers.base import wait_at_most
from asynckv.tiers.layout import pages

if TYPE_CHECKING:
    from collections.abc import Callable

    from asynckv._core import Load
    from asynckv.backends.base import File, Pilot, Reading, Sink
    from asynckv.tiers.segment import Segment, SegmentSet

__all__ = ["BlockReader"]

# How an open says that the file is not there any more, or something else has its name: damage, no sick disk.
GONE = frozenset({errno.ENOENT, errno.ELOOP, errno.EINVAL, errno.EISDIR, errno.ENXIO})
READS_PER_BLOCK = 2  # a second one, because a flawed transfer is not a damaged block


def make_verify(stored: int, expected: int) -> Callable[[memoryview], bool]:
    """Make the check of a payload; it zeroes what follows the payload in the buffer."""

    def verify(buffer: memoryview) -> bool:
        body = buffer[:stored] if len(buffer) != stored else buffer
        if checksum(body) != expected:
            return False
        if len(buffer) > stored:
            buffer[stored:] = bytes(len(buffer) - stored)
        return True

    return verify


class Promise:
    """A sink for those who would rather await a future."""

    def __init__(self, loop: asyncio.AbstractEventLoop, released: Callable[[], object] | None) -> None:
        self.future: asyncio.Future[bool] = loop.create_future()
        self._released = released

    def on_released(self) -> None:
        """Pass it on."""
        if self._released is not None:
            self._released()

    def on_ended(self, result: bool, error: BaseException | None) -> None:
        """Resolve."""
        if self.future.done():
            return
        if error is None:
            self.future.set_result(result)
        elif isinstance(error, asyncio.CancelledError):
            self.future.cancel()
        else:
            self.future.set_exception(error)


class _Read:
    """One block being read; a sink of the engine's."""

    __slots__ = (
        "buffer", "file", "inner", "left", "offset", "over", "reader", "running", "segment", "sink", "verify",
    )  # fmt: skip

    def __init__(
        self,
        reader: BlockReader,
        segment: Segment,
        offset: int,
        buffer: memoryview,
        verify: Callable[[memoryview], bool],
        sink: Sink,
    ) -> None:
        self.reader = reader
        self.segment = segment
        self.offset = offset
        self.buffer = buffer
        self.verify = verify
        self.sink: Sink | None = sink
        self.left = READS_PER_BLOCK
        self.running = False  # the engine holds the buffer
        self.over = False  # no further attempt
        self.inner: Reading | None = None
        self.file: File | None = None

    def cancel(self) -> None:
        """Nobody waits any more."""
        if not self.over:
            self.over = True
            inner, self.inner = self.inner, None
            if inner is not None:
                inner.cancel()
            if not self.running:
                self._let_go()

    def attempt(self) -> None:
        """Ask the engine."""
        if self.over:
            return
        self.left -= 1
        self.running = True
        assert self.file is not None
        self.inner = self.reader.backend.read_for(self.file, self.offset, self.buffer, self, self.verify)

    def on_released(self) -> None:
        """The engine has let go of the buffer."""
        self.running = False
        if self.over:
            self._let_go()

    def on_ended(self, result: bool, error: BaseException | None) -> None:
        """The engine's answer: once more when the bytes are wrong or too few."""
        if self.over:
            return
        if error is None and result:
            self.finish(True, None)
        elif error is not None and not isinstance(error, ShortTransferError):
            self.finish(False, error)
        elif self.left and not self.running:
            self.attempt()
        else:
            self.finish(False, None)

    def finish(self, result: bool, error: BaseException | None) -> None:
        """Tell what came of it."""
        if self.over:
            return
        self.over = True
        sink = self.sink
        if not self.running:
            self._let_go()
        self.inner = None
        if sink is not None:
            sink.on_ended(result, error)

    def _let_go(self) -> None:
        sink, self.sink = self.sink, None
        if sink is None:
            return
        self.segment.release()
        self.buffer = memoryview(b"")
        sink.on_released()


class BlockReader:
    """Reads payloads out of segments."""

    def __init__(self, segments: SegmentSet) -> None:
        self.set = segments
        self.backend = segments.backend
        self._openers: set[asyncio.Task[None]] = set()

    def read(
        self,
        slot: int,
        offset: int,
        buffer: memoryview,
        stored: int,
        checksum: int,
        *,
        released: Callable[[], object] | None = None,
    ) -> asyncio.Future[bool]:
        """Fill the front of a buffer with a block's stored bytes.

        Parameters
        ----------
        slot, offset
            Where it is.
        buffer
            Writable; when it holds the whole pages of a page-aligned payload they are read in one piece, and zeroed
            behind the stored bytes.
        stored, checksum
            What it has to be.
        released
            Called once when nothing touches the buffer any more.

        Returns
        -------
        asyncio.Future of bool
            False when the bytes are damaged or gone; `OSError` and `TimeoutError` when the disk did not do it.
        """
        promise = Promise(asyncio.get_running_loop(), released)
        read = self.read_for(slot, offset, buffer, stored, checksum, promise)
        if read is not None:
            promise.future.add_done_callback(lambda future: read.cancel() if future.cancelled() else None)
        return promise.future

    def read_for(
        self, slot: int, offset: int, buffer: memoryview, stored: int, checksum: int, sink: Sink
    ) -> _Read | None:
        """As `read`, for a sink, which is told after this call returned; None when the block's segment is gone."""
        segment = self.set.by_slot(slot)
        if segment is None:
            sink.on_released()
            asyncio.get_running_loop().call_soon(sink.on_ended, False, None)
            return None
        span = payload_span(stored, len(buffer) >= pages(stored))
        read = _Read(self, segment, offset, buffer[:span], make_verify(stored, checksum), sink)
        segment.hold()
        if segment.file is not None:
            self.set.touch(segment)
            read.file = segment.file
            read.attempt()
        else:
            task = asyncio.get_running_loop().create_task(self._open(read))
            self._openers.add(task)
            task.add_done_callback(self._openers.discard)
        return read

    def fly(self, loads: list[Load], pilot: Pilot) -> list[Load]:
        """Read blocks together; see `Tier.fly`."""
        if not self.backend.flies:
            return loads
        files: dict[int, File] = {}
        held: list[Segment] = []
        for slot in {load.slot for load in loads}:
            segment = self.set.by_slot(slot)
            if segment is not None and segment.file is not None:
                segment.hold()
                held.append(segment)
                self.set.touch(segment)
                files[slot] = segment.file

        def over() -> None:
            for segment in held:
                segment.release()

        rest = self.backend.fly(loads, files, pilot, over)
        if len(rest) == len(loads):
            over()
        return rest

    async def _open(self, read: _Read) -> None:
        try:
            read.file = await self.set.open_file(read.segment)
        except OSError as error:
            read.finish(False, None if error.errno in GONE else error)
        except BaseException:
            read.finish(False, asyncio.CancelledError())
            raise
        else:
            read.attempt()

    async def close(self) -> None:
        """Wait for files that are being opened."""
        await wait_at_most(self.set.clock, self.backend.timeout, list(self._openers))
