"""What the scheduler asks of a tier below memory: a log that blocks are appended to and read back from."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from asynckv._core import Load, Spill
    from asynckv.backends.base import Pilot, Sink
    from asynckv.clock import Clock

__all__ = ["LogBatch", "Tier", "WireKey", "wait_at_most"]

WireKey = tuple[int, bytes]


class LogBatch(Protocol):
    """What one call of `Tier.compose` put into the log.

    Attributes
    ----------
    segment
        Number of the segment it went to.
    spills, tombstones
        What is part of it: the leading ones of what was passed.
    rest_spills, rest_tombstones
        What found no room. The caller still owns it: spills go back to the dirty blocks, tombstones stay owed.
    clear
        Whether the clear record is part of it.
    """

    spills: list[Spill]
    tombstones: list[WireKey]
    rest_spills: list[Spill]
    rest_tombstones: list[WireKey]
    clear: bool

    @property
    def segment(self) -> int:
        """Number of the segment it went to."""


class Tier(Protocol):
    """A tier below memory. All methods belong to the loop's thread.

    Invariants: the order of `compose` calls is the order of the log; a location handed out stays readable until the
    table was told that its segment is gone; nothing is reported durable before a sync that began after its write.
    """

    recovering: bool
    max_block: int

    @property
    def corrupt_blocks(self) -> int:
        """Damaged blocks that the tier found by itself; not those that `read` reports."""

    @property
    def io_errors(self) -> int:
        """Operations of the tier's own that failed; not those whose error somebody gets."""

    @property
    def io_timeouts(self) -> int:
        """Such that ran past their deadline."""

    @property
    def engine(self) -> str:
        """Name of the I/O engine."""

    @property
    def direct(self) -> bool:
        """Whether the page cache is bypassed."""

    @property
    def oldest_segment(self) -> int:
        """Number of the oldest segment: batches of lower ones are gone."""

    @property
    def disk_used(self) -> int:
        """Allocated bytes."""

    @property
    def disk_live(self) -> int:
        """Stored bytes that the index has a place of."""

    @property
    def bytes_written(self) -> int:
        """Bytes handed to the device, padding included."""

    @property
    def reads_in_flight(self) -> int:
        """Reads that own a buffer."""

    @property
    def writes_in_flight(self) -> int:
        """Writes that own buffers."""

    async def open(self) -> None:
        """Take the directory; what is on disk is known, or `recovering` is True."""

    async def recover(self, progress: Callable[[], None]) -> None:
        """Read the log into the table, newest first."""

    def recovery_over(self) -> None:
        """Nobody waits for a recovery any more, ended or not."""

    async def prepare(self, nbytes: int) -> None:
        """Make sure that the next batch has room for blocks of `nbytes`."""

    def compose(
        self,
        spills: Sequence[Spill],
        tombstones: Sequence[WireKey],
        clear: bool = False,
    ) -> LogBatch:
        """Fix the place of a batch in the log, synchronously."""

    def submit(
        self, batch: Any, *, released: Callable[[], object] | None = None
    ) -> asyncio.Future[list[tuple[int, int, int]]]:
        """Write a batch; (slot, offset, checksum) per spill, in order."""

    async def sync(self) -> None:
        """Make every batch durable whose write had completed."""

    def read(self, load: Load, sink: Sink) -> None:
        """Read a block's bytes into its extent and verify them; a second time when they are wrong.

        The sink is told after this call returned: False when the bytes are damaged or gone, or the disk's error.
        """

    def fly(self, loads: list[Load], pilot: Pilot) -> list[Load]:
        """Start to read blocks together, those for which that is possible; the others come back, to be given to `read`.

        See `asynckv.backends.base.Backend.fly`. One that fell without an error is to be given to `read`, too.
        """

    async def probe(self) -> bool:
        """Find out whether the tier works again."""

    async def close(self, *, snapshot: bool) -> int:
        """Let go of everything; the number of operations that never ended."""


async def wait_at_most(clock: Clock, seconds: float, futures: Iterable[asyncio.Future[Any]]) -> None:
    """Wait for futures, but not for longer than so many seconds of a clock."""
    loop = asyncio.get_running_loop()
    gate: asyncio.Future[None] = loop.create_future()

    def shut() -> None:
        if not gate.done():
            gate.set_result(None)

    timer = clock.call_later(loop, seconds, shut)
    try:
        pending = {future for future in futures if not future.done()}
        while pending and not gate.done():
            await asyncio.wait({gate, *pending}, return_when=asyncio.FIRST_COMPLETED)
            pending = {future for future in pending if not future.done()}
    finally:
        timer.cancel()
