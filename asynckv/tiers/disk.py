"""The disk tier: an append-only log of segments in one directory. docs/format.md draws the bytes.

This module is the front; the parts are `directory` (safety, lock), `opening` (what is there), `recovery` and
`snapshot` (back to the index), `log` (append, sync, seal), `reclaim` (room), `reader` (read and verify), `segment`
(files, account). Beside it are the offline commands, `inspect` and `repair`, with `offline` and `report`; what a page
or a batch proves both take from `evidence` and `scan`.

Order of things that keeps every promise through a crash; each part says more at its head:

1. a segment's name is durable before its first batch, and its header states what is dead;
2. a location is handed out after the write, and called durable after a sync that began later;
3. a seal is written after a sync of everything it speaks of;
4. a segment dies in this order: copies durable, name gone durably, index, readers, file;
5. the snapshot is gone before the log changes, unless it alone tells that a segment is missing.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from typing import TYPE_CHECKING

from asynckv.backends import create_backend
from asynckv.errors import DiskError
from asynckv.tiers.directory import Directory
from asynckv.tiers.layout import PAGE, SegmentHeader
from asynckv.tiers.log import Batch, LogWriter
from asynckv.tiers.opening import Opening
from asynckv.tiers.reader import BlockReader
from asynckv.tiers.reclaim import Reclaimer
from asynckv.tiers.recovery import Recovery
from asynckv.tiers.snapshot import load_snapshot, remove_snapshot, save_snapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from asynckv._core import Load, Spill, Table
    from asynckv.backends.base import Backend, Pilot, Sink
    from asynckv.config import Config
    from asynckv.tiers.base import WireKey
    from asynckv.tiers.log import CarryItem
    from asynckv.tiers.segment import Segment

__all__ = ["DiskTier"]

_log = logging.getLogger("asynckv")


class DiskTier:
    """A store's disk. See `asynckv.tiers.base.Tier` for what the scheduler relies on.

    Parameters
    ----------
    config
        Checked options, with directory and clock.
    table
        The block table that locations belong to.

    Attributes
    ----------
    recovering
        Not all of the log has been read yet.
    corrupt_blocks
        Damaged blocks found by opening, recovery and when carrying over, each place that has taken an unknown
        number of them counted as one; those of `read` are for the caller to count.
    """

    def __init__(self, config: Config, table: Table) -> None:
        self._config = config
        self._table = table
        self._clock = config.clock
        self._directory: Directory | None = None
        self._backend: Backend | None = None
        self._opening: Opening | None = None
        self._recovery: Recovery | None = None
        self._closed = False
        self._snapshot_valid = False
        self._gone = 0  # segments that the snapshot lists and that are missing
        self.recovering = False
        self.max_block = LogWriter.largest_block(config.segment)

    # -- life ----------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Take the directory, see what is there, hold the cap; the index is filled here when a snapshot is valid.

        Raises
        ------
        StoreLockedError, UnsafeDirectoryError
            The directory is not to be had.
        CorruptStoreError
            With ``recover="strict"``.
        DiskError
            The disk refuses.
        """
        try:
            self._directory = Directory.open(self._config.directory)
            self._directory.lock()
            await self._start()
        except BaseException as error:
            await asyncio.shield(self._let_go())
            if isinstance(error, OSError) and not hasattr(error, "tier"):
                raise DiskError(
                    f"the store cannot be opened: {error.strerror or error}", operation="open", errno=error.errno
                ) from error
            raise

    async def _start(self) -> None:
        assert self._directory is not None
        config, mode = self._config, self._config.recover
        backend = self._backend = self._make_backend()
        await backend.start(self._directory.fd)
        opening = self._opening = Opening(
            backend,
            self._directory,
            cap=config.disk,
            segment_bytes=config.segment,
            namespace=config.namespace_digest,
            random=config.random,
            clock=self._clock,
            strict=mode == "strict",
            logger=_log,
        )
        await opening.run()
        self._set = opening.set
        self._log = LogWriter(self._set, self._table)
        self._log.sequence = opening.next_sequence
        self._reader = BlockReader(self._set)
        self._reclaimer = Reclaimer(self._set, self._log, self._reader, self._table, _log)
        segments_go = mode == "none" or self._set.charged > config.disk
        if opening.snapshot_size >= 0 and segments_go and opening.snapshot_whole:  # else it tells what is missing
            await self._drop_snapshot()
            opening.snapshot_size = -1
        if opening.snapshot_size >= 0:
            self._reclaimer.before_first_segment = self._drop_snapshot
        if mode == "none":
            await opening.start_empty()
        await opening.enforce_cap(self._reclaimer)
        if not self._set.own():
            return
        if opening.snapshot_size >= 0 and await self._load_snapshot(opening) and mode != "strict":
            return
        if self._snapshot_valid:  # strict: the recovery may drop what the snapshot lists
            await self._reclaimer.drop_snapshot()
        self.recovering = True
        self._reclaimer.recovering = True
        self._reclaimer.recovered.clear()
        self._recovery = Recovery(
            self._set,
            self._log,
            self._reclaimer,
            self._table,
            opening.seals,
            opening.displaced,
            opening.unreadable,
            strict=mode == "strict",
            logger=_log,
        )

    def _make_backend(self) -> Backend:
        config = self._config
        factory = config.backend_factory or create_backend
        made: Backend = factory(config.engine, direct=config.direct, timeout=config.io_timeout, clock=self._clock)
        return made

    async def _load_snapshot(self, opening: Opening) -> bool:
        self._table.recovering = True
        try:
            head = await load_snapshot(self._set, self._table, opening.snapshot_size)
        except OSError as error:
            self._set.met(error)
            _log.warning("asynckv: the index snapshot could not be read: %s", error)
            return False
        except ValueError as error:
            opening.damaged(str(error))
            return False
        if head is None:  # of another namespace
            return False
        known = {segment.number for segment in self._set.own()}
        for number, _ in head.segments:
            if number not in known and number >= self._set.oldest_live:
                self._gone += 1
                opening.damaged(f"segment {number} is missing")
                self._set.lost = max(self._set.lost, number)
        self._set.doubtful = 0
        for segment in self._set.own():
            if segment.number not in opening.seals:
                opening.damaged(f"the seal of segment {segment.number} is damaged")
            self._vouch(segment)
        self._set.next_number = max(self._set.next_number, head.next_number)
        self._log.sequence = max(self._log.sequence, head.sequence)
        self._table.recovering = False
        self._snapshot_valid = True
        self._tell_unusable()
        return True

    def _vouch(self, segment: Segment) -> None:
        """The snapshot names it: it was ours and sealed, whatever its first and last page are now."""
        segment.sealed = True
        if segment.header is None:
            segment.header = SegmentHeader(
                store_id=self._set.store_id,
                namespace=self._set.namespace,
                number=segment.number,
                oldest_live=0,
                sequence=0,
                size=self._config.segment,
                sealed_upto=0,
                previous=0,
            )

    async def _drop_snapshot(self) -> None:
        assert self._opening is not None
        self._snapshot_valid = False
        await remove_snapshot(self._set, self._opening.snapshot_charge)

    async def recover(self, progress: Callable[[], None]) -> None:
        """Read the segments into the table, newest first; the table's `recovering` is for the caller to set and reset.

        Parameters
        ----------
        progress
            Called after each segment.
        """
        recovery = self._recovery
        if recovery is None:
            return
        try:
            await recovery.run(progress)
        finally:
            self.recovery_over()
        self._tell_unusable()

    def recovery_over(self) -> None:
        """Nobody waits for a recovery any more, ended or not."""
        self.recovering = self._reclaimer.recovering = False
        self._reclaimer.recovered.set()

    def _tell_unusable(self) -> None:
        if self._table.unusable_blocks:
            self._table.log_unknown = True
            _log.warning(
                "asynckv: open: %d blocks are misses, of dtypes that are unknown here: is ml_dtypes installed?",
                self._table.unusable_blocks,
            )

    async def close(self, *, snapshot: bool) -> int:
        """Seal, write the snapshot, unlock. Operations that never ended are counted, not waited for."""
        if self._closed:
            return 0
        self._closed = True
        try:
            if self._backend is not None and hasattr(self, "_reader"):
                await self._finish(snapshot)
        finally:
            stuck = await asyncio.shield(self._let_go())
        return stuck

    async def _finish(self, snapshot: bool) -> None:
        await self._reader.close()
        active, self._set.active = self._set.active, None
        try:
            self._check_lock()
            if active is not None:  # an empty one, too: the seal of the one before names it
                self._reclaimer.seal_behind(active)
            await self._reclaimer.drain()
            await self._reclaimer.remove_stillborn()
            await self._reclaimer.drop_condemned()  # a snapshot would list them
            for segment in self._set.own():
                if segment.retired:  # its name is gone, which could not be made durable
                    await self._reclaimer.drop(segment)
            if self._recovery is not None:
                await self._recovery.drop_cleared()
            whole = not self.recovering and all(s.sealed for s in self._set.own())
            whole = whole and not self._table.unusable_blocks  # who can use them has to find them
            if snapshot and whole and not self._snapshot_valid:
                await save_snapshot(self._set, self._table, self._log.sequence, _log)
        except OSError as error:
            self._set.met(error)
            _log.warning("asynckv: closing the store left work for the next opening: %s", error)

    async def _let_go(self) -> int:
        stuck = 0
        if self._backend is not None:
            if hasattr(self, "_set"):
                await self._set.close()
            stuck = await self._backend.close()
        if self._directory is not None:
            self._directory.close()
        return stuck

    # -- appending -----------------------------------------------------------------------------------------------

    async def prepare(self, nbytes: int) -> None:
        """Make sure that the next batch can begin with a block of `nbytes` (or the largest that a segment takes).

        Rotates, reclaims and carries over as needed. While the store recovers it may wait for that.

        Raises
        ------
        DiskError
            The disk refuses, or there is no room below the cap.
        """
        self._check_lock()
        try:
            await self._reclaimer.prepare(nbytes)
        except DiskError:
            raise
        except TimeoutError as error:
            raise DiskError("making room took too long", operation="allocate", errno=errno.ETIMEDOUT) from error
        except OSError as error:
            raise DiskError("no room could be made in the log", operation="allocate", errno=error.errno) from error

    def compose(
        self,
        spills: Iterable[Spill],
        tombstones: Iterable[WireKey],
        clear: bool = False,
        carries: Iterable[CarryItem] = (),
    ) -> Batch:
        """Fix a batch's place in the log. What does not fit is in its ``rest_spills`` and ``rest_tombstones``.

        Log order within the batch: clear, tombstones, blocks.
        """
        batch = self._log.compose(spills, tombstones, clear, carries)
        if clear and self._recovery is not None:
            self._recovery.stop(batch)
        return batch

    def submit(
        self, batch: Batch, *, released: Callable[[], object] | None = None
    ) -> asyncio.Future[list[tuple[int, int, int]]]:
        """Write a batch; (slot, offset, checksum) for each of its spills."""
        return self._log.submit(batch, released=released)

    async def sync(self) -> None:
        """Make everything durable whose write completed before the call; see `LogWriter.sync`."""
        await self._log.sync()
        self._check_lock()

    def _check_lock(self) -> None:
        """Write nothing, and promise nothing, when another process has taken the store over."""
        if self._directory is not None and not self._directory.renew():
            raise DiskError("the lock was lost to another process", operation="write", errno=errno.ESTALE)

    async def probe(self) -> bool:
        """Append an empty batch, sync it and read it back."""
        try:
            await self.prepare(0)
            batch = self._log.compose((), (), empty_ok=True)
            segment, offset = batch.home, batch.end - 2 * PAGE
            await self._log.submit(batch)
            await self._log.sync_segment(segment)
            file = await self._set.open_file(segment)
            page = memoryview(bytearray(PAGE))
            segment.hold()
            await self._set.backend.read(file, offset, page, released=segment.release)
        except OSError:
            return False
        return bytes(page) == batch.piece.ljust(PAGE, b"\0")

    # -- reading -------------------------------------------------------------------------------------------------

    def read(self, load: Load, sink: Sink) -> None:
        """Read a block's bytes into its extent and verify them; see `Tier.read`."""
        self._reader.read_for(load.slot, load.offset, load.view, load.stored, load.checksum, sink)

    def fly(self, loads: list[Load], pilot: Pilot) -> list[Load]:
        """Read blocks together; see `Tier.fly`."""
        return self._reader.fly(loads, pilot)

    # -- figures -------------------------------------------------------------------------------------------------

    @property
    def engine(self) -> str:
        """The engine's name."""
        return self._backend.name if self._backend is not None else "none"

    @property
    def direct(self) -> bool:
        """Whether reads and writes bypass the page cache."""
        return self._backend is not None and bool(self._backend.direct)

    @property
    def reads_in_flight(self) -> int:
        """Reads that the engine still owns a buffer of."""
        return self._backend.reads_in_flight if self._backend is not None else 0

    @property
    def writes_in_flight(self) -> int:
        """Writes that the engine still owns buffers of."""
        return self._backend.writes_in_flight if self._backend is not None else 0

    @property
    def oldest_segment(self) -> int:
        """Number of the oldest segment of this namespace; of the next one when there is none."""
        own = self._set.own()
        return own[0].number if own else self._set.next_number

    @property
    def disk_used(self) -> int:
        """Bytes allocated in the directory, dead space and strangers included."""
        return self._set.used if hasattr(self, "_set") else 0

    @property
    def disk_live(self) -> int:
        """Stored bytes that the index has a place of."""
        if not hasattr(self, "_set") or self._table.closed:
            return 0
        return sum(self._table.segment_live(segment.slot)[1] for segment in self._set.own())

    @property
    def bytes_written(self) -> int:
        """Bytes handed to the device, padding included."""
        return self._set.bytes_written if hasattr(self, "_set") else 0

    @property
    def corrupt_blocks(self) -> int:
        """Damaged blocks that opening, recovery or carrying over met."""
        found = self._gone + (self._recovery.corrupt_blocks if self._recovery is not None else 0)
        return found + (self._reclaimer.corrupt_blocks if hasattr(self, "_reclaimer") else 0)

    @property
    def io_errors(self) -> int:
        """Operations that failed, of opening, recovery and what is done in the background."""
        return self._set.io_errors if hasattr(self, "_set") else 0

    @property
    def io_timeouts(self) -> int:
        """Such that ran past their deadline."""
        return self._set.io_timeouts if hasattr(self, "_set") else 0

    @property
    def damage(self) -> int:
        """Damaged places that opening and recovery met."""
        found = self._opening.damage if self._opening is not None else 0
        return found + (self._recovery.damage if self._recovery is not None else 0)
