"""The index in one file, written on a clean close, so that the next opening reads no segment.

Invariants
----------
* It is a hint. Anything wrong with it, and the segments are scanned; records of it that were applied by then are the
  newest of their keys and stay.
* It is gone, durably, before the first new segment exists, but for one that lists a missing segment: that goes after,
  because until then nothing else may tell. One that is there all the same does not list the new segment,
  and is refused.
* It is written under another name, synced, renamed; and only when it fits below the cap.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from asynckv._record import (
    KIND_SNAPSHOT,
    apply_records,
    parse_body,
    read_chunk,
    write_disk_entries,
)
from asynckv.tiers.layout import CHUNK_STRIDE, LOG_START, PAGE, SNAPSHOT_NAME, SnapshotHead, snapshot_seed

if TYPE_CHECKING:
    import logging

    from asynckv._core import Table
    from asynckv.backends.base import Backend, File
    from asynckv.tiers.segment import SegmentSet

__all__ = ["load_snapshot", "peek_snapshot", "remove_snapshot", "save_snapshot"]

HEAD_MAX = 64 << 10
TEMPORARY = SNAPSHOT_NAME + ".tmp"
ENTRY_BYTES_GUESS = 48  # for the decision whether the spare file has to make room


async def save_snapshot(segments: SegmentSet, table: Table, sequence: int, log: logging.Logger) -> bool:
    """Write the snapshot if it fits; every segment has been sealed."""
    own = segments.own()
    if not own:
        return False
    guess = SnapshotHead.head_bytes(len(own)) + table.disk_blocks * ENTRY_BYTES_GUESS + CHUNK_STRIDE
    if segments.charged + guess > segments.cap:
        await segments.drop_spare()
    backend = segments.backend
    file = await backend.open(TEMPORARY, create=True)
    try:
        written = await _write(segments, table, sequence, file)
        if written:
            await backend.sync(file)
            await backend.rename(TEMPORARY, SNAPSHOT_NAME)
            await backend.sync_directory()
            segments.overhead += written
            return True
        log.info("asynckv: no room for the index snapshot; the next opening scans the segments")
        await backend.unlink(TEMPORARY)
        return False
    except OSError:
        with contextlib.suppress(OSError):
            await backend.unlink(TEMPORARY)
        raise
    finally:
        with contextlib.suppress(OSError):
            await backend.close_file(file)


async def _write(segments: SegmentSet, table: Table, sequence: int, file: File) -> int:
    own = segments.own()
    seed = snapshot_seed(segments.store_id, segments.namespace)
    index = {segment.slot: i for i, segment in enumerate(own)}
    start = place = SnapshotHead.head_bytes(len(own))
    room = segments.cap - segments.charged - PAGE  # one page for the file system's own needs
    entries = chunks = 0
    cursor: int | None = 0
    while cursor is not None:
        writer, cursor = write_disk_entries(table, cursor, index)
        if not writer.count and chunks:
            break
        data = writer.to_bytes(KIND_SNAPSHOT, seed, place)
        if place + len(data) > room:
            return 0
        await segments.backend.write(file, place, [data])
        segments.bytes_written += len(data)
        entries += writer.count
        chunks += 1
        end = place + len(data)
        place = start + chunks * CHUNK_STRIDE
    head = SnapshotHead(
        store_id=segments.store_id,
        namespace=segments.namespace,
        next_number=segments.next_number,
        sequence=sequence,
        entries=entries,
        chunks=chunks,
        chunk_bytes=CHUNK_STRIDE,
        segments=tuple((segment.number, segment.size) for segment in own),
    )
    data = head.encode()
    await segments.backend.write(file, 0, [data])
    segments.bytes_written += len(data)
    return end


async def load_snapshot(segments: SegmentSet, table: Table, size: int) -> SnapshotHead | None:
    """Fill the table from the snapshot. None when it is of another namespace.

    Raises
    ------
    ValueError
        It is damaged, or not about the segments that are there.
    """
    backend = segments.backend
    file = await backend.open(SNAPSHOT_NAME, direct=False)
    try:
        head = await _read_head(segments, file, size)
        if head is None:
            return None
        known = {segment.number: segment for segment in segments.own()}
        listed = {number for number, _ in head.segments}
        if any(number not in listed for number in known):
            raise ValueError("the index snapshot is older than the log")
        slots = [known[number].slot if number in known else None for number, _ in head.segments]
        seed = snapshot_seed(segments.store_id, segments.namespace)
        start = SnapshotHead.head_bytes(len(head.segments))
        total = 0
        for chunk in range(head.chunks):
            place = start + chunk * CHUNK_STRIDE
            data = bytearray(max(min(CHUNK_STRIDE, size - place), 0))
            await backend.read(file, place, memoryview(data))
            header = read_chunk(data, 0, KIND_SNAPSHOT, seed, place)
            records = None if header is None else parse_body(data, 0, header, LOG_START, n_segments=len(slots))
            if records is None:
                raise ValueError("the index snapshot is damaged")
            total += len(records)
            apply_records(table, records, slots)
            await asyncio.sleep(0)
        if total != head.entries:
            raise ValueError("the index snapshot is damaged")
        return head
    finally:
        with contextlib.suppress(OSError):
            await backend.close_file(file)


async def peek_snapshot(backend: Backend, size: int) -> SnapshotHead | None:
    """Read the head, whatever store and namespace it is of; None when it is damaged."""
    data = bytearray(min(size, HEAD_MAX) // PAGE * PAGE)
    file = await backend.open(SNAPSHOT_NAME, direct=False)
    try:
        await backend.read(file, 0, memoryview(data))
    finally:
        with contextlib.suppress(OSError):
            await backend.close_file(file)
    return SnapshotHead.decode(data)


async def _read_head(segments: SegmentSet, file: File, size: int) -> SnapshotHead | None:
    if size < 2 * PAGE:
        raise ValueError("the index snapshot is cut short")
    data = bytearray(min(size, HEAD_MAX) // PAGE * PAGE)
    await segments.backend.read(file, 0, memoryview(data))
    head = SnapshotHead.decode(data)
    if head is None or head.store_id != segments.store_id:
        raise ValueError("the index snapshot is damaged")
    if head.namespace != segments.namespace:
        return None
    if not head.fits(size):
        raise ValueError("the index snapshot is damaged")
    return head


async def remove_snapshot(segments: SegmentSet, charge: int) -> None:
    """Remove the snapshot, durably."""
    with contextlib.suppress(FileNotFoundError):
        await segments.backend.unlink(SNAPSHOT_NAME)
    await segments.backend.sync_directory()
    segments.overhead -= charge
