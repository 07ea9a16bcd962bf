"""What is fuzzed: for each reader of foreign bytes its right inputs, its repairs, and what must hold of any answer.

An input is *rightful* when no checksum was repaired after the changes: then nothing may come out that was not put in.
Of other inputs what comes out has to be consistent: it encodes to bytes that give the same again.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import struct
import tempfile
import zipfile
from collections.abc import Coroutine, Generator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from mutator import PAGE, mutate, page_starts, repair
from xxhash import xxh3_64_intdigest

from asynckv import _record as rec
from asynckv._core import Table
from asynckv.commands.trace import TraceError, parse_request, read_trace
from asynckv.tiers.layout import (
    LOG_START,
    Seal,
    SegmentHeader,
    SnapshotHead,
    decode_superblock,
    encode_superblock,
    segment_seed,
    snapshot_seed,
)
from asynckv.tiers.scan import WINDOW_MAX, footer_chunk, scan_segment, verify_batch
from asynckv.tiers.snapshot import load_snapshot

DATA = Path(__file__).parents[1] / "data"
REPAIRED_SHARE = 0.5
POOL = 1 << 16
Record = tuple[int, int, bytes, bytes | None, int, int, int, int]


def image(kind: str) -> dict[str, bytes]:
    """Files of a frozen store."""
    with zipfile.ZipFile(DATA / f"format-1-{kind}.zip") as archive:
        return {name: archive.read(name) for name in archive.namelist()}


class Target:
    """One reader.

    Attributes
    ----------
    name
        Of the target.
    golden
        Inputs that are right.
    """

    name = ""
    golden: Sequence[bytes] = ()

    def make(self, rng: random.Random) -> tuple[Any, bool]:
        """An input, and whether it is rightful."""
        data = mutate(rng, self.golden, self.spots)
        rightful = rng.random() >= REPAIRED_SHARE
        if not rightful:
            data = self.repaired(data, rng)
        return bytes(data), rightful

    def spots(self, data: bytes) -> Sequence[int]:
        """Where structures begin."""
        return page_starts(data)

    def repaired(self, data: bytearray, rng: random.Random) -> bytearray:
        """The input with right checksums."""
        repair(data, rng, 0)
        return data

    def check(self, data: Any, rightful: bool) -> None:
        """Read an input; AssertionError or whatever else is raised is a finding."""
        raise NotImplementedError

    def close(self) -> None:
        """Give back what the target holds."""


# -- records -------------------------------------------------------------------------------------------------------

SEED = 0x0123_4567_89AB_CDEF
OFFSET = 2 * PAGE
SEGMENTS = 3
DESCS = (
    b"\0",
    b"\x01\x03<f2\x01\x08",
    b"\x01\x08bfloat16\x03\x02\x00\x81\x01",
    b"\x02\x05\x03|u1\x01\x0a\x03<f8\x02\x01\x02",
)
KINDS = (rec.KIND_BATCH, rec.KIND_TRAILER, rec.KIND_FOOTER, rec.KIND_SNAPSHOT, rec.KIND_CLAIM)


def values_of(records: rec.Records) -> list[Record]:
    """All records as plain values."""
    return [records.get(index) for index in range(len(records))]


def encoded(values: Sequence[Record], numbered: bool, kind: int) -> bytes:
    """A chunk of these records."""
    writer = rec.RecordWriter()
    for kind_of_record, key_kind, key, desc, offset, stored, checksum, segment in values:
        if kind_of_record == rec.BLOCK:
            assert desc is not None
            writer.add_block(key_kind, key, desc, offset, stored, checksum, segment if numbered else -1)
        elif kind_of_record == rec.TOMBSTONE:
            writer.add_tombstone(key_kind, key)
        else:
            assert kind_of_record == rec.CLEAR
            writer.add_clear()
    return writer.to_bytes(kind, SEED, OFFSET, sequence=7, payload_bytes=PAGE)


def table_of(records: rec.Records, slots: int | list[int | None]) -> Table:
    """A table that was told of these records, and checked."""
    table = Table(POOL)
    table.recovering = True
    rec.apply_records(table, records, slots)
    table.check()
    table.keys()
    table.recovering = False
    table.check()
    return table


class RecordTarget(Target):
    """Chunks of every kind: header, body, piece, and what a table makes of them."""

    name = "record"

    def __init__(self) -> None:
        self.golden = [
            encoded(self.records(count, kind == rec.KIND_SNAPSHOT), kind == rec.KIND_SNAPSHOT, kind)
            for kind in KINDS
            for count in (0, 1, 5, 70)
            if kind != rec.KIND_CLAIM or not count
        ]
        self.known = {
            tuple(values_of(records)) for data in self.golden for _, records in self.parsed(data) if records is not None
        }

    def records(self, count: int, numbered: bool) -> list[Record]:
        keys = [(0, struct.pack("<q", -5)), (1, b"k"), (1, b"\xff" * 32), (2, "grüße".encode()), (1, b"x" * 1024)]
        values: list[Record] = [] if numbered or not count else [(rec.CLEAR, 0, b"", None, 0, 0, 0, 0)]
        for index in range(count):
            kind, key = keys[index % len(keys)]
            if not numbered and index % 3 == 1:
                values.append((rec.TOMBSTONE, kind, key, None, 0, 0, 0, 0))
            else:
                desc = DESCS[index % len(DESCS)]
                stored = (100, 16, 0, 32)[index % len(DESCS)]
                place = LOG_START + PAGE * (index + 1)
                values.append((rec.BLOCK, kind, key, desc, place, stored, index * 2**57, index % SEGMENTS * numbered))
        return values

    def repaired(self, data: bytearray, rng: random.Random) -> bytearray:
        repair(data, rng, SEED)
        if data[:8] == b"AKVCHUNK" and rng.random() < 0.5:  # as if it belonged here
            data[56:64] = OFFSET.to_bytes(8, "little")
            repair(data, random.Random(0), SEED)
        return data

    def parsed(self, data: bytes) -> Generator[tuple[rec.ChunkHeader, rec.Records | None], None, None]:
        for kind in KINDS:
            header = rec.read_chunk(data, 0, kind, SEED, OFFSET)
            if header is not None:
                numbered = SEGMENTS if kind == rec.KIND_SNAPSHOT else 0
                yield header, rec.parse_body(data, 0, header, LOG_START, 2**32 - 1, numbered)

    def check(self, data: Any, rightful: bool) -> None:
        claimed = rec.chunk_bytes(data, 0)
        assert 0 <= claimed <= rec.CHUNK_MAX
        assert claimed % PAGE == 0
        hit = rec.find_chunk(data, 0, len(data) + PAGE)
        assert hit == -1 or data[hit : hit + 8] == b"AKVCHUNK"
        trailer = rec.read_trailer(data, 0, SEED, OFFSET + PAGE + 2 * PAGE)
        assert trailer is None or trailer.offset < OFFSET + 3 * PAGE
        for header, records in self.parsed(data):
            piece = data[: rec.HEADER_BYTES + header.body_bytes]
            if records is None:
                assert not rightful, "a right checksum over a body that does not parse"
                continue
            values = values_of(records)
            assert not rightful or tuple(values) in self.known
            assert len(values) == header.n_records <= header.body_bytes
            numbered = header.kind == rec.KIND_SNAPSHOT
            for kind, _, key, desc, offset, stored, _, segment in values:
                assert key in piece
                assert kind != rec.BLOCK or (desc is not None and desc in piece)
                assert kind != rec.BLOCK or LOG_START <= offset <= offset + stored < 2**32
                assert segment < SEGMENTS
            again = encoded(values, numbered, header.kind)
            (_, copy), *others = self.parsed(again)
            assert not others
            assert copy is not None
            assert values_of(copy) == values
            if not numbered:
                assert values_of(rec.parse_piece(piece)) == values
            table = table_of(records, list(range(SEGMENTS)) if numbered else 0)
            try:
                listed = {(kind, key, offset, stored) for kind, key, _, offset, stored, _, _ in self.entries(table)}
                assert listed <= {(v[1], v[2], v[4], v[5]) for v in values}
                back, _ = rec.write_disk_entries(table, 0, {slot: slot for slot in range(SEGMENTS)})
                assert back.count == len(listed)
            finally:
                table.close()

    def entries(self, table: Table) -> list[tuple[int, bytes, int, int, int, int, int]]:
        return table.disk_entries(0, 1 << 20)[1]


# -- fixed pages ---------------------------------------------------------------------------------------------------


class PageTarget(Target):
    """Superblock, segment header, seal, head of a snapshot."""

    name = "page"
    # Where the fields end; behind them and before the checksum's end anything may stand.
    FIELDS: ClassVar = {SegmentHeader: 24 + 96, Seal: 24 + 168}

    def __init__(self) -> None:
        files = image("closed")
        segments = [data for name, data in files.items() if name.endswith(".seg")][:6]
        self.golden = [files["superblock"], files["index.snap"][:PAGE]]
        for data in segments:
            self.golden += [data[:PAGE], data[-PAGE:]]
        self.offsets = [len(data) - PAGE for data in segments]
        self.known = {item for data in self.golden for item in self.decoded(data)}
        assert len(self.known) == len(self.golden)

    def make(self, rng: random.Random) -> tuple[Any, bool]:
        data, rightful = super().make(rng)
        # A page's checksum begins behind its magic: another magic before the rest of a right page is no damage of ours.
        return data, rightful and not any(data[8:PAGE] == each[8:PAGE] and data[:8] != each[:8] for each in self.golden)

    def decoded(self, data: bytes) -> list[Any]:
        found = [decode_superblock(data), SegmentHeader.decode(data), SnapshotHead.decode(data)]
        return [each for each in (*found, *(Seal.decode(data, offset) for offset in self.offsets)) if each is not None]

    def check(self, data: Any, rightful: bool) -> None:
        for item in self.decoded(data):
            assert not rightful or item in self.known
            if isinstance(item, bytes):
                assert item in data
                assert decode_superblock(encode_superblock(item)) == item
                continue
            raw = item.encode()
            if isinstance(item, Seal):
                assert Seal.decode(raw, item.offset) == item
            else:
                assert type(item).decode(raw) == item
            end = self.FIELDS.get(type(item), 120)
            assert raw[24:end] == data[24:end]


# -- segments ------------------------------------------------------------------------------------------------------

NUMBER = 500


class SegmentTarget(Target):
    """Whole segments: the scan, the payloads, the footer's chain."""

    name = "segment"

    def __init__(self) -> None:
        files = image("killed")
        self.golden = []
        known = SegmentHeader.decode(files["0000000000000010.seg"])
        assert known is not None
        self.header = known
        self.seed = segment_seed(known.store_id, known.namespace, NUMBER)
        for data in files.values():
            header = SegmentHeader.decode(data)
            if header is not None and header.namespace == known.namespace:
                self.golden.append(self.renumbered(data, header))
        self.known: set[tuple[Any, ...]] = set()
        for data in self.golden:
            self.known.update(self.blocks(data))
        assert len(self.known) > 20

    def renumbered(self, data: bytes, header: SegmentHeader) -> bytes:
        """The segment under the one number that all inputs have, so that a part of one may stand in another."""
        seed = segment_seed(header.store_id, header.namespace, header.number)
        whole = bytearray(data)
        for at in page_starts(whole):
            kind = whole[at + 18]
            if whole[at : at + 8] == b"AKVCHUNK":
                offset = int.from_bytes(whole[at + 56 : at + 64], "little")
                assert rec.read_chunk(whole, at, kind, seed, offset) is not None
            else:
                whole[at + 72 : at + 80] = NUMBER.to_bytes(8, "little")
        repair(whole, _Never(), self.seed)
        return bytes(whole)

    def repaired(self, data: bytearray, rng: random.Random) -> bytearray:
        repair(data, rng, self.seed)
        return data

    def drive(self, scanner: Generator[tuple[int, int], memoryview, Any], data: bytes) -> Any:
        """Answer a scanner out of memory; its requests have to be few and inside."""
        left = 4 * (len(data) // PAGE) + 8
        bytes_left = 3 * len(data) + WINDOW_MAX
        try:
            offset, length = next(scanner)
            while True:
                left -= 1
                bytes_left -= length
                assert left, "a scan does not end"
                assert bytes_left >= 0, "a scan reads the same again and again"
                assert 0 < length <= WINDOW_MAX
                assert 0 <= offset <= offset + length <= len(data)
                assert offset % PAGE == length % PAGE == 0
                offset, length = scanner.send(memoryview(data)[offset : offset + length])
        except StopIteration as end:
            return end.value

    def blocks(self, data: bytes) -> list[tuple[int, bytes, bytes | None, bytes]]:
        """Blocks whose payload verifies: key kind, key, descriptor, stored bytes."""
        size = len(data)
        scan = self.drive(scan_segment(size, self.seed), data)
        position = LOG_START
        for found in scan.batches:
            assert position <= found.offset < found.end <= size
            position = found.end
        assert scan.end == position
        assert scan.known_durable(self.header, None, 0, ended=False) <= max(LOG_START, scan.claim[0])
        for cut in (scan.cut(1), scan.cut(1, len(scan.batches) + 1, 9), scan.cut(0, scan.footer_batches, 2**64 - 1)):
            assert cut is None or 0 <= cut <= len(scan.batches)
        result = []
        for found in scan.batches:
            bad = set(self.drive(verify_batch(found), data))
            records = found.records()
            for index, offset, stored, checksum in records.locations():
                value = data[offset : offset + stored]
                assert len(value) == stored
                assert (xxh3_64_intdigest(value) == checksum) == (index not in bad)
                if index not in bad:
                    _, kind, key, desc, *_ = records.get(index)
                    result.append((kind, key, desc, value))
        return result

    def footer(self, data: bytes) -> list[tuple[int, bytes, bytes | None]]:
        """Blocks that the footer lists, followed as the recovery follows it."""
        last = len(data) // PAGE * PAGE - PAGE
        seal = Seal.decode(data[last:], last) if last > 0 else None
        result: list[tuple[int, bytes, bytes | None]] = []
        if seal is None:
            return result
        offset, length = seal.footer, seal.footer_bytes
        while length and length <= rec.CHUNK_MAX and not length % PAGE and not offset % PAGE:
            assert LOG_START <= offset < offset + length <= last
            chunk = footer_chunk(memoryview(data)[offset : offset + length], offset, self.seed, seal)
            if chunk is None:
                break
            records, before, length = chunk
            assert not length or before + length <= offset
            offset = before
            for kind, key_kind, key, desc, place, stored, _, _ in values_of(records):
                assert kind != rec.BLOCK or LOG_START <= place <= place + stored <= seal.data_end
                if kind == rec.BLOCK:
                    result.append((key_kind, key, desc))
        return result

    def check(self, data: Any, rightful: bool) -> None:
        blocks = self.blocks(data)
        listed = self.footer(data)
        if rightful:
            assert self.known.issuperset(blocks)
            assert {known[:3] for known in self.known}.issuperset(listed)


class _Never(random.Random):
    """A source of chance in which nothing happens."""

    def random(self) -> float:
        return 1.0


# -- the index snapshot --------------------------------------------------------------------------------------------


class SnapshotTarget(Target):
    """The index snapshot, through the code that an opening uses."""

    name = "snapshot"

    def __init__(self) -> None:
        whole = image("closed")["index.snap"]
        head = SnapshotHead.decode(whole)
        assert head is not None
        self.seed = snapshot_seed(head.store_id, head.namespace)
        self.own = [SimpleNamespace(number=number, slot=slot) for slot, (number, _) in enumerate(head.segments)]
        self.data = b""
        self.most = 0
        self.set = SimpleNamespace(store_id=head.store_id, namespace=head.namespace, backend=self, own=lambda: self.own)
        self.golden = [whole, self.two_chunks(whole, head)]
        self.known: set[tuple[Any, ...]] = set()
        for data in self.golden:
            self.known.update(self.loaded(data) or ())
        assert len(self.known) > 20

    def two_chunks(self, whole: bytes, head: SnapshotHead) -> bytes:
        """A snapshot with a second chunk, which lies behind a gap."""
        start = head.head_bytes(len(head.segments))
        writer = rec.RecordWriter()
        for index in range(9):
            writer.add_block(1, b"second %d" % index, DESCS[0], LOG_START + 16 * index, 16, index, 1)
        place = start + head.chunk_bytes
        more = SnapshotHead(
            head.store_id,
            head.namespace,
            head.next_number,
            head.sequence,
            head.entries + writer.count,
            2,
            head.chunk_bytes,
            head.segments,
        )
        data = bytearray(more.encode() + whole[start:])
        data += bytes(place - len(data)) + writer.to_bytes(rec.KIND_SNAPSHOT, self.seed, place)
        return bytes(data)

    def repaired(self, data: bytearray, rng: random.Random) -> bytearray:
        repair(data, rng, self.seed)
        return data

    # What the loader asks of a back end.

    async def open(self, name: str, *, direct: bool) -> bytes:
        return self.data

    async def read(self, file: bytes, offset: int, view: memoryview) -> None:
        assert offset >= 0
        self.most = max(self.most, len(view))
        part = file[offset : offset + len(view)]
        view[: len(part)] = part

    async def close_file(self, file: bytes) -> None:
        return None

    def loaded(self, data: bytes) -> list[tuple[Any, ...]] | None:
        """The entries, None when the snapshot is refused."""
        self.data, self.most = data, 0
        table = Table(POOL)
        table.recovering = True
        try:
            head = finish(load_snapshot(self.set, table, len(data)))  # type: ignore[arg-type]
            table.recovering = False
        except ValueError:
            head = None
        finally:
            assert self.most <= 1 << 18
            table.check()
            entries = table.disk_entries(0, 1 << 20)[1]
            descs = [table.desc_bytes(each[6]) for each in entries]
            table.close()
        for _, _, slot, offset, stored, _, _ in entries:
            assert slot < len(self.own)
            assert LOG_START <= offset <= offset + stored < 2**32
        result = [(*each[:6], desc) for each, desc in zip(entries, descs, strict=True)]
        assert head is None or len(result) <= head.entries
        return result

    def check(self, data: Any, rightful: bool) -> None:
        entries = self.loaded(data)
        assert not rightful or self.known.issuperset(entries or ())


def finish(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine that waits for nothing but its turn."""
    for _ in range(1 << 16):
        try:
            coroutine.send(None)
        except StopIteration as end:
            return end.value
    raise AssertionError("a coroutine does not end")


# -- descriptors ---------------------------------------------------------------------------------------------------


class DescriptorTarget(Target):
    """Block descriptors: parsed, turned into views over a pool, written again."""

    name = "descriptor"

    def __init__(self) -> None:
        arrays = [b"\x03%b\x01\x08" % name for name in (b"<f2", b">c8", b"|b1", b"<f8")]
        arrays += [b"\x08bfloat16\x03\x02\x00\x81\x01", b"\x0dfloat8_e4m3fn\x00", b"\x04<f16\x08" + b"\x01" * 8]
        self.golden = [b"\0", *(b"\x01" + each for each in arrays)]
        self.golden += [b"\x02" + layer + a + b for layer in (b"\0", b"\x05") for a in arrays[:5] for b in arrays[2:]]
        self.golden.append(b"\x02\xff\xff\xff\xff\x0f" + arrays[0] + arrays[1])

    def spots(self, data: bytes) -> Sequence[int]:
        return (0,)

    def make(self, rng: random.Random) -> tuple[Any, bool]:
        data, _ = super().make(rng)
        return data[: rng.choice((255, 255, 600))], False  # there is no checksum

    def repaired(self, data: bytearray, rng: random.Random) -> bytearray:
        return data

    def check(self, data: Any, rightful: bool) -> None:
        table = Table(POOL, backed=True)
        try:
            self.use(table, data)
            table.check()
        finally:
            table.close()

    def use(self, table: Table, raw: bytes) -> None:
        try:
            desc = table.intern(raw)
        except ValueError:
            return
        assert table.desc_bytes(desc) == raw
        for stored in {0, 16, *self.sizes(table, raw)}:
            if stored > POOL or not table.recover_block(1, b"%d" % stored, 1, LOG_START, stored, 0, desc):
                continue
            key = b"%d" % stored
            room = table.room(stored)
            while room.step() == 0:
                pass
            if not room.done:
                room.cancel()
                continue
            load = table.begin_load(key, room)
            load.view[:] = bytes(len(load.view))
            assert table.finish_load(load, True)
            block = table.get(key)
            assert table.copy_into(key, bytearray(table.payload_size(key))) == table.payload_size(key)
            draft = table.draft(block)
            assert draft.stored == stored
            if table.put(b"again", draft):
                spill = table.take_dirty(1 << 30, 1)[0]
                assert spill.desc == raw, "a descriptor that is not the one that a put makes"
                assert table.finish_spill(spill, False) is False
                table.remove(b"again")
            del block
        table.release_desc(desc)

    def sizes(self, table: Table, raw: bytes) -> list[int]:
        """Stored lengths worth a try: products of small numbers that are in the descriptor."""
        found = {1}
        for byte in raw:
            found |= {byte * each for each in found if byte and byte * each <= 4096}
            if len(found) > 64:
                break
        return sorted(found | {each + 8 for each in found})[:40]


# -- traces --------------------------------------------------------------------------------------------------------


class TraceTarget(Target):
    """Request traces, line by line and as files, plain and compressed."""

    name = "trace"

    def __init__(self) -> None:
        rows: list[dict[str, Any]] = [
            {"timestamp": 27 * i, "input_length": 900 + i, "output_length": 52, "hash_ids": list(range(i, 3 * i))}
            for i in range(12)
        ]
        rows.append({"timestamp": 1.5, "hash_ids": [2**63 - 1, -(2**63), 0]})
        text = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
        self.golden = [text, text + b"\n\n" + text[:-1], gzip.compress(text, mtime=0) * 2]
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name, "trace")
        self.loop = asyncio.new_event_loop()

    def close(self) -> None:
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()
        self.folder.cleanup()

    def spots(self, data: bytes) -> Sequence[int]:
        return [0] if data[:1] != b"{" else [at for at in range(len(data)) if data[at] in b"[]{}:,"]

    def make(self, rng: random.Random) -> tuple[Any, bool]:
        data, _ = super().make(rng)
        if rng.random() < 0.2:
            word = rng.choice(
                (b"1e999", b"-1", b"NaN", b"9" * 5000, b"[" * 5000, b'"\\ud800"', b"2.5", b"true", b"null")
            )
            at = rng.randrange(len(data) + 1)
            data = data[:at] + word + data[at + rng.randrange(8) :]
        return data, False

    def repaired(self, data: bytearray, rng: random.Random) -> bytearray:
        return bytearray(gzip.compress(bytes(data), 1, mtime=0)) if data[:1] == b"{" and rng.random() < 0.3 else data

    async def read(self) -> list[Any]:
        return [request async for request in read_trace(self.path)]

    def check(self, data: Any, rightful: bool) -> None:
        for number, line in enumerate(data.split(b"\n"), 1):
            try:
                self.sane(parse_request(line, number), number)
            except TraceError:
                continue
        if data[:2] == b"\x1f\x8b" or len(data) % 8 == 0:
            self.path.write_bytes(data)
            try:
                for request in self.loop.run_until_complete(self.read()):
                    self.sane(request, 1)
            except TraceError:
                pass

    def sane(self, request: Any, number: int) -> None:
        assert 0 <= request.timestamp < 2**63
        assert type(request.input_length) is type(request.output_length) is int
        assert all(type(each) is int and -(2**63) <= each < 2**63 for each in request.hash_ids)
        fields = {name: getattr(request, name) for name in ("timestamp", "input_length", "output_length", "hash_ids")}
        assert parse_request(json.dumps(fields).encode(), number) == request
