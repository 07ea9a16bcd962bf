"""Reading a store's files with plain system calls, for the commands that work on a store nobody has open."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from xxhash import xxh3_64_intdigest

from asynckv._record import CHUNK_MAX
from asynckv.tiers.evidence import named, own_pages
from asynckv.tiers.layout import CLAIM_AT, PAGE, SEGMENT_BYTES_MAX, Seal, SegmentHeader
from asynckv.tiers.scan import footer_chunk

if TYPE_CHECKING:
    from collections.abc import Generator

    from asynckv._record import Records
    from asynckv.tiers.directory import Directory
    from asynckv.tiers.report import BlockPlace, SegmentReport

__all__ = ["SegmentFile", "footer_chunks", "read_range"]


class SegmentFile:
    """A segment's file and what its first and last page say of it.

    Attributes
    ----------
    report
        What becomes known of it.
    header, seal
        Its first and its last page, when they verify, whoever's they are.
    space, claim
        Of a file of which neither says that it is its own: the namespace in its first page, and its claim.
    plain
        It is a file.
    error
        Why it could not be opened; empty when it could.
    """

    def __init__(self, directory: Directory, report: SegmentReport) -> None:
        self.report = report
        self.header: SegmentHeader | None = None
        self.seal: Seal | None = None
        self.space = b""
        self.claim = memoryview(b"")
        self.plain = True
        self.error = ""
        self._directory = directory
        self._fd = -1

    @property
    def sized(self) -> bool:
        """Whether it has a size that a segment may have."""
        return PAGE <= self.report.size <= SEGMENT_BYTES_MAX

    def peek(self) -> None:
        """Read its first and its last page."""
        if not self.plain or not self.sized or not self.open():
            return
        last = self.report.size // PAGE * PAGE - PAGE
        first_page = self.read(0, PAGE)
        self.header = SegmentHeader.decode(first_page)
        if last > 0:
            self.seal = Seal.decode(self.read(last, PAGE), last)
        if last > CLAIM_AT and not named(self.report.number, self.header, self.seal):
            self.space = SegmentHeader.named_space(first_page)
            self.claim = self.read(CLAIM_AT, PAGE)
        self.close()

    def own(self, store_id: bytes) -> tuple[SegmentHeader | None, Seal | None]:
        """Header and seal as far as they are this store's and this segment's."""
        return own_pages(store_id, self.report.number, self.header, self.seal)

    def elsewhere(self, store_id: bytes) -> bool:
        """Whether its first page is that of another segment of this store."""
        header = self.header
        return header is not None and header.store_id == store_id and header.number != self.report.number

    def open(self) -> bool:
        """Open the file; it has to be a plain one. False when that fails."""
        try:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
            self._fd = os.open(self.report.name, flags, dir_fd=self._directory.fd)
        except OSError as error:
            self.error = error.strerror or str(error)
            return False
        return True

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def read(self, offset: int, length: int) -> memoryview:
        """Bytes of a range; zeros, which verify as nothing, in place of what cannot be read."""
        return read_range(self._fd, offset, length)

    def whole(self, place: BlockPlace) -> bool:
        """Whether a block's bytes are those that were written. Its place may be anything; only the file is read."""
        if place.offset + place.stored > self.report.size:
            return False
        return bool(xxh3_64_intdigest(self.read(place.offset, place.stored)) == place.checksum)

    def run(self, scanner: Generator[tuple[int, int], memoryview, Any]) -> Any:
        """Feed a scanner until it returns."""
        try:
            want = next(scanner)
            while True:
                want = scanner.send(self.read(*want))
        except StopIteration as end:
            return end.value


def read_range(fd: int, offset: int, length: int) -> memoryview:
    """Bytes of a range of a file; zeros in place of pages that cannot be read."""
    view = memoryview(bytearray(length))
    if not _fill(fd, offset, view):
        for start in range(0, length, PAGE):  # one bad sector is not to take its neighbours along
            page = view[start : start + PAGE]
            if not _fill(fd, offset + start, page):
                page[:] = bytes(len(page))
    return view


def _fill(fd: int, offset: int, view: memoryview) -> bool:
    done = 0
    try:
        while done < len(view):
            got = os.preadv(fd, [view[done:]], offset + done)
            if not got:
                break
            done += got
    except OSError:
        return False
    return True


def footer_chunks(file: SegmentFile, seed: int, seal: Seal) -> list[Records] | None:
    """The records of a sealed segment, last chunk first; None when the footer is damaged."""
    chunks: list[Records] = []
    offset, length, left = seal.footer, seal.footer_bytes, seal.records
    while length:
        chunk = None
        if length <= CHUNK_MAX and not length % PAGE:
            chunk = footer_chunk(file.read(offset, length), offset, seed, seal)
        if chunk is None:
            return None
        records, offset, length = chunk
        chunks.append(records)
        left -= len(records)
    return None if left else chunks
