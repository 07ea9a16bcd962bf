"""Faults in the record format and the recovery. Each has to make a test fail: see kill.py.

An entry is found by its old text, which stands in its file exactly once; a change of that file that takes the text away
takes the entry's new place along.
"""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """A fault: old text of a file replaced by new text, and what that breaks."""

    name: str
    file: str
    old: str
    new: str
    breaks: str


RECORD = "asynckv/_record.pyx"
BATCH = "asynckv/_record_batch.pxi"
TABLE = "asynckv/_record_table.pxi"
WRITE = "asynckv/_record_write.pxi"
LAYOUT = "asynckv/tiers/layout.py"
SCAN = "asynckv/tiers/scan.py"
RECOVERY = "asynckv/tiers/recovery.py"
OPENING = "asynckv/tiers/opening.py"
SNAPSHOT = "asynckv/tiers/snapshot.py"
SEGMENT = "asynckv/tiers/segment.py"
RECLAIM = "asynckv/tiers/reclaim.py"

MUTANTS = (
    # -- records
    Mutant(
        "varint-over-64-bits",
        RECORD,
        "if shift == 63 and byte > 1:",
        "if shift == 63 and byte > 127:",
        "a number of more than 64 bits is taken for its lower ones",
    ),
    Mutant(
        "chunk-longer-than-its-pages",
        RECORD,
        "whole > <uint64_t>CHUNK_MAX or HEAD + body > whole:",
        "whole > <uint64_t>CHUNK_MAX or body > whole:",
        "a body reaches behind its chunk",
    ),
    Mutant(
        "chunk-without-limit",
        RECORD,
        "or whole > <uint64_t>CHUNK_MAX or HEAD",
        "or HEAD",
        "a chunk makes its reader ask for more than 4 MiB",
    ),
    Mutant(
        "chunk-of-another-version",
        RECORD,
        " or p[16] | (p[17] << 8) != C_VERSION:",
        ":",
        "a chunk of another version is read as ours",
    ),
    Mutant(
        "claim-unchecked",
        RECORD,
        "if digest != stored:",
        "if digest != stored and kind != KIND_CLAIM:",
        "a torn claim is believed",
    ),
    Mutant(
        "trailer-anywhere",
        RECORD,
        "if header is None or begin + header.header_bytes + header.payload_bytes != file_offset:",
        "if header is None:",
        "a copy of a trailer elsewhere brings its batch back",
    ),
    Mutant(
        "records-without-limit",
        RECORD,
        "if <Py_ssize_t>n_descs > length or <Py_ssize_t>n_records > length:",
        "if <Py_ssize_t>n_descs > length:",
        "a number of records allocates more than the bytes can hold",
    ),
    Mutant(
        "key-without-limit",
        RECORD,
        "p == NULL or value == 0 or value > C_KEY_MAX:",
        "p == NULL or value == 0:",
        "a key longer than any that can be put",
    ),
    Mutant(
        "text-key-unchecked",
        RECORD,
        "if item.kind == 2 and not utf8_ok(p, <size_t>value):",
        "if False:",
        "a str key that is no UTF-8",
    ),
    Mutant("descriptor-index", RECORD, "value >= n_descs:", "value > n_descs:", "an index one behind the table"),
    Mutant(
        "payload-before-its-batch",
        RECORD,
        "value < low or value > high or",
        "value > high or",
        "a payload that lies in front of its batch",
    ),
    Mutant(
        "payload-behind-its-batch",
        RECORD,
        "value > U32 or item.offset + value > high:",
        "value > U32:",
        "a payload that reaches behind its batch",
    ),
    Mutant(
        "segment-index",
        RECORD,
        "value >= n_segments:",
        "value > n_segments:",
        "a snapshot's record names a segment that is not listed",
    ),
    Mutant(
        "bytes-left-over",
        RECORD,
        "        if p != end:\n            return -1\n",
        "",
        "a body with bytes behind its last record",
    ),
    Mutant(
        "footer-bound",
        BATCH,
        "(total // 131072 + 1) * (HEAD + PAGE)",
        "(total // 131072) * (HEAD + PAGE)",
        "a full segment has no room for its footer",
    ),
    Mutant(
        "small-payloads-unrounded",
        BATCH,
        "more_large, more_small = 0, (stored + 15) & ~<uint64_t>15",
        "more_large, more_small = 0, stored",
        "small payloads run into the pages behind them",
    ),
    Mutant(
        "staging-between-payloads",
        BATCH,
        "            memset(base + small_end, 0, begin - small_end)\n",
        "",
        "bytes of an earlier batch go to disk between payloads",
    ),
    Mutant(
        "staging-behind-a-payload",
        BATCH,
        "                    memset(base + copied + stored, 0, whole - stored)\n",
        "",
        "bytes of an earlier batch go to disk behind a payload",
    ),
    Mutant(
        "oldest-record-first",
        TABLE,
        "for i in range(records.count - 1, -1, -1):",
        "for i in range(records.count):",
        "an older value of a key in the same batch wins",
    ),
    Mutant(
        "unknown-descriptor-forgotten",
        TABLE,
        "                added += table.recover_block_c(",
        "                if desc < 0:\n                    continue\n                added += table.recover_block_c(",
        "an older value shows where nobody can rebuild the newest",
    ),
    Mutant(
        "discarded-records-in-footer",
        WRITE,
        "            if item.type:\n",
        "            if True:\n",
        "a block that was torn is in the footer of the recovered segment",
    ),
    # -- pages
    Mutant(
        "page-of-another-version",
        LAYOUT,
        "if version != FORMAT_VERSION or xxh3",
        "if xxh3",
        "a page of another version is read as ours",
    ),
    Mutant(
        "superblock-copy",
        LAYOUT,
        "for start in (0, _SUPER_COPY):",
        "for start in (0,):",
        "the second copy of the superblock is not looked at",
    ),
    Mutant(
        "seal-elsewhere",
        LAYOUT,
        "if seal.offset != offset or not LOG_START",
        "if not LOG_START",
        "a seal counts where it was copied to",
    ),
    Mutant(
        "header-of-the-future",
        LAYOUT,
        "if header.oldest_live > header.number or header.sealed_upto",
        "if header.sealed_upto",
        "one forged header makes every segment dead",
    ),
    # -- scanning
    Mutant(
        "failed-write-trusted",
        SCAN,
        "if sum(1 for batch in self.batches if batch.offset < limit) > good:",
        "if False:",
        "a write that was reported as failed counts as durable",
    ),
    Mutant(
        "durable-taken-for-torn",
        SCAN,
        "if batch.offset < limit) > good:",
        "if batch.offset < limit) >= good:",
        "damage to a durable batch is taken for a torn write",
    ),
    Mutant(
        "lost-batches-unnoticed",
        SCAN,
        "short = sum(1 for batch in self.batches if batch.offset < limit) < good",
        "short = False",
        "values that a lost batch had replaced come back",
    ),
    Mutant(
        "batch-behind-the-file",
        SCAN,
        "if end + header.header_bytes > window.size or header.payload_bytes % PAGE:",
        "if header.payload_bytes % PAGE:",
        "a batch that the file's end cuts counts as whole",
    ),
    Mutant(
        "trailer-of-an-earlier-batch",
        SCAN,
        "if header is not None and header.offset >= start:",
        "if header is not None:",
        "a batch is found twice",
    ),
    Mutant(
        "large-payload-unchecked",
        SCAN,
        "if (yield from _digest(window, offset, stored)) != checksum:",
        "if stored <= SWEEP_BYTES and (yield from _digest(window, offset, stored)) != checksum:",
        "a torn block of more than a MiB hides the value before it",
    ),
    Mutant(
        "claim-ignored",
        SCAN,
        "scan.claim_page = read_chunk(window.data, at, KIND_CLAIM, seed, CLAIM_AT)",
        "scan.claim_page = None",
        "damage to the newest durable batch is taken for a torn write",
    ),
    # -- recovery
    Mutant(
        "missing-segment-unnoticed",
        RECOVERY,
        "if segment.number < self._previous:",
        "if False:",
        "values that a missing segment had replaced come back",
    ),
    Mutant(
        "footer-too-short",
        RECOVERY,
        "return None if left else False",
        "return False",
        "a footer that lacks a chunk counts as whole",
    ),
    Mutant(
        "lossy-seal-ignored",
        RECOVERY,
        "self._cut |= bool(walked) or seal.lossy",
        "self._cut |= bool(walked)",
        "what one recovery left out comes back at the next",
    ),
    Mutant(
        "older-than-the-loss",
        RECOVERY,
        "scan, 0 if cut is None else cut, limit, ",
        "scan, 0, limit, ",
        "batches older than a lost one are shown",
    ),
    Mutant(
        "damaged-passes-for-torn",
        RECOVERY,
        "scan.leave_out_torn(seal, torn)",
        "scan.leave_out_torn(None, torn)",
        "a block that was damaged after its segment was sealed makes way for the value before it",
    ),
    Mutant(
        "condemned-forgotten",
        RECOVERY,
        "self.reclaimer.condemned.append(segment)",
        "pass",
        "what could not be removed after a loss is behind a new segment, and comes back",
    ),
    Mutant(
        "torn-block-kept",
        RECOVERY,
        "if not durable or self.strict:\n                self.reader",
        "if self.strict:\n                self.reader",
        "a torn block hides the value before it",
    ),
    Mutant(
        "oldest-batch-first",
        RECOVERY,
        "for _, records in reversed(trusted):",
        "for _, records in trusted:",
        "an older value of a key in the same segment wins",
    ),
    Mutant(
        "abandoned-segment-kept",
        RECOVERY,
        "return self._previous is not None and segment.number > self._previous",
        "return False",
        "a segment that had been given up is read",
    ),
    Mutant(
        "next-segment-unnoticed",
        RECOVERY,
        "if self._previous is None and seal.next > segment.number and seal.next >= self.set.oldest_live:",
        "if False:",
        "the newest segment is gone and the one before is shown as the newest",
    ),
    # -- opening
    Mutant(
        "unsettled-segment",
        OPENING,
        "if peek.seal is None or segment.size == peek.seal.size:",
        "if False:",
        "a write of the killed owner comes after the opening has read the segment",
    ),
    Mutant(
        "unsettled-spare",
        OPENING,
        "                    await self.backend.settle(file)\n                    self.set.spare",
        "                    self.set.spare",
        "a write of the killed owner lands in a new segment",
    ),
    Mutant(
        "dead-segments-stay",
        OPENING,
        "dead = [s for s in self.set if s.number < self.set.oldest_live]",
        "dead: list[Segment] = []",
        "a segment that had been reclaimed comes back",
    ),
    # -- snapshot
    Mutant(
        "old-snapshot",
        SNAPSHOT,
        "if any(number not in listed for number in known):",
        "if False:",
        "a snapshot from before the newest segments is used",
    ),
    Mutant(
        "snapshot-not-synced",
        SNAPSHOT,
        "            await backend.sync(file)\n            await backend.rename(TEMPORARY",
        "            await backend.rename(TEMPORARY",
        "the snapshot's name is durable before its bytes",
    ),
    Mutant(
        "snapshot-removal-not-synced",
        SNAPSHOT,
        "        await segments.backend.unlink(SNAPSHOT_NAME)\n    await segments.backend.sync_directory()\n",
        "        await segments.backend.unlink(SNAPSHOT_NAME)\n",
        "a snapshot comes back beside a newer log",
    ),
    # -- segments
    Mutant(
        "birth-not-synced",
        SEGMENT,
        "            await self.backend.sync_directory()\n        except BaseException:\n            # Under which",
        "        except BaseException:\n            # Under which",
        "batches are acknowledged in a file whose name may vanish",
    ),
    Mutant(
        "unsealed-recycled",
        SEGMENT,
        "        if segment.own and not segment.sealed:\n            return False  #",
        "        if False:\n            return False  #",
        "a file of unknown length becomes a segment",
    ),
    # -- reclaim
    Mutant(
        "carried-not-synced",
        RECLAIM,
        "            await self.log.sync_segment(active)\n",
        "            pass\n",
        "carried blocks are gone after a power loss, and so is where they came from",
    ),
    Mutant(
        "carried-unverified",
        RECLAIM,
        "                if well:\n",
        "                if True:\n",
        "a damaged block is written again with its old checksum",
    ),
)
