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
from typing import TYPE_CHECKING, Any

from asynckv._record import payload_span
from asynckv.backends.base import ShortTransferError
from asynckv.checksum import checksum
from asynckv.tiers.base import wait_at_most
from asynckv.tiers.layout import pages

if TYPE_CHECKING:
    from collections.abc import Callable

    from asynckv.backends.base import File
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


class _Read:
    """One block being read."""

    __slots__ = (
        "buffer", "done", "file", "inner", "left", "offset", "released", "result", "running", "segment", "verify",
    )  # fmt: skip

    def __init__(
        self,
        segment: Segment,
        offset: int,
        buffer: memoryview,
        verify: Callable[[memoryview], bool],
        result: asyncio.Future[bool],
        released: Callable[[], object] | None,
    ) -> None:
        self.segment = segment
        self.offset = offset
        self.buffer = buffer
        self.verify = verify
        self.result = result
        self.released = released
        self.left = READS_PER_BLOCK
        self.running = False  # the engine holds the buffer
        self.done = False  # no further attempt
        self.inner: asyncio.Future[bool] | None = None
        self.file: File | None = None

    def on_released(self) -> None:
        self.running = False
        if self.done:
            self._let_go()

    def _let_go(self) -> None:
        self.segment.release()
        released, self.released = self.released, None
        self.buffer = memoryview(b"")
        if released is not None:
            released()

    def finish(self, value: bool | BaseException | None) -> None:
        """Resolve with a result, an error, or nothing (cancelled)."""
        self.done = True
        if not self.running:
            self._let_go()
        result = self.result
        if result.done():
            return
        if isinstance(value, bool):
            result.set_result(value)
        elif value is None:
            result.cancel()
        else:
            result.set_exception(value)


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
        loop = asyncio.get_running_loop()
        result: asyncio.Future[bool] = loop.create_future()
        segment = self.set.by_slot(slot)
        if segment is None:
            if released is not None:
                released()
            result.set_result(False)
            return result
        span = payload_span(stored, len(buffer) >= pages(stored))
        read = _Read(segment, offset, buffer[:span], make_verify(stored, checksum), result, released)
        segment.hold()
        result.add_done_callback(lambda _: self._cancelled(read))
        if segment.file is not None:
            self.set.touch(segment)
            read.file = segment.file
            self._attempt(read)
        else:
            task = loop.create_task(self._open(read))
            self._openers.add(task)
            task.add_done_callback(self._openers.discard)
        return result

    async def _open(self, read: _Read) -> None:
        try:
            read.file = await self.set.open_file(read.segment)
        except OSError as error:
            read.finish(False if error.errno in GONE else error)
        except BaseException:
            read.finish(None)
            raise
        else:
            self._attempt(read)

    def _cancelled(self, read: _Read) -> None:
        # One that is not submitted yet is ended by `_attempt`, which sees the cancelled result.
        if read.result.cancelled() and not read.done and read.inner is not None:
            read.inner.cancel()

    def _attempt(self, read: _Read) -> None:
        if read.result.done():
            read.finish(None)
            return
        read.left -= 1
        read.running = True
        assert read.file is not None
        read.inner = self.backend.read(
            read.file, read.offset, read.buffer, verify=read.verify, released=read.on_released
        )
        read.inner.add_done_callback(lambda future: self._completed(read, future))

    def _completed(self, read: _Read, future: asyncio.Future[Any]) -> None:
        if future.cancelled():
            read.finish(None)
            return
        error = future.exception()
        if error is None and future.result():
            read.finish(True)
        elif error is not None and not isinstance(error, ShortTransferError):
            read.finish(error)
        elif read.left and not read.running:
            self._attempt(read)
        else:
            read.finish(False)

    async def close(self) -> None:
        """Wait for files that are being opened."""
        await wait_at_most(self.set.clock, self.backend.timeout, list(self._openers))
