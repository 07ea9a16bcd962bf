"""Whose is a segment file, as far as the fixed pages of a directory tell. No I/O here: an opening and the offline
commands decide alike, whichever way they read the pages.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from asynckv._record import KIND_CLAIM, chunk_bytes, read_chunk
from asynckv.tiers.layout import (
    CLAIM_AT,
    PAGE,
    SEGMENT_BYTES_MAX,
    Seal,
    SegmentHeader,
    SnapshotHead,
    segment_seed,
)
from asynckv.tiers.segment import LOST_NUMBERS_MAX

if TYPE_CHECKING:
    from collections.abc import Iterable

    from asynckv._record import ChunkHeader

__all__ = ["Evidence", "own_pages", "proven_header", "scannable", "voted_id"]


class Evidence:
    """What the pages of one store say of the numbers in its directory, under whatever name they lie.

    Parameters
    ----------
    store_id
        Of the store; pages of others say nothing.

    Attributes
    ----------
    highest
        The highest number that a page names.
    named
        Namespace to the numbers of its segments that pages name.
    """

    def __init__(self, store_id: bytes) -> None:
        self.store_id = store_id
        self.highest = 0
        self.named: dict[bytes, set[int]] = {}

    def _name(self, namespace: bytes, numbers: set[int], highest: int) -> None:
        self.highest = max(self.highest, highest)
        self.named.setdefault(namespace, set()).update(numbers)

    def learn(self, header: SegmentHeader | None, seal: Seal | None) -> None:
        """Note the first and the last page of a file."""
        for page in (header, seal):
            if page is not None and page.store_id == self.store_id:
                following = page.next if isinstance(page, Seal) else 0
                self._name(page.namespace, {page.number, page.previous, following}, max(page.number, following))

    def learn_snapshot(self, head: SnapshotHead | None) -> None:
        """Note the head of a snapshot."""
        if head is not None and head.store_id == self.store_id:
            self._name(head.namespace, {number for number, _ in head.segments}, head.next_number - 1)

    def learn_claim(self, number: int, claim: bytes | memoryview, spaces: Iterable[bytes]) -> bytes | None:
        """Note the claim of a segment without header and seal; the namespace that it is of, when that is known.

        Parameters
        ----------
        number
            Of the segment.
        claim
            The page.
        spaces
            Namespaces that it may be of; those that pages name are tried as well.
        """
        if not chunk_bytes(claim, 0):
            return None
        for namespace in dict.fromkeys([*spaces, *self.named]):
            seed = segment_seed(self.store_id, namespace, number)
            if read_chunk(claim, 0, KIND_CLAIM, seed, CLAIM_AT) is not None:
                self._name(namespace, {number}, number)
                return namespace
        return None

    def is_stray(self, number: int) -> bool:
        """Whether a number is so far above all that the store's pages name that no segment of it can have it."""
        return number > self.highest + LOST_NUMBERS_MAX

    def perhaps(self, namespace: bytes, number: int, size: int) -> bool:
        """Whether a file without header and seal may have been a namespace's segment. Absurd ones were nobody's."""
        if size > SEGMENT_BYTES_MAX or self.is_stray(number):
            return False
        return not any(number in numbers for space, numbers in self.named.items() if space != namespace)


def scannable(size: int) -> bool:
    """Whether a file without header and seal has room for anything that could tell whose it was."""
    return 2 * PAGE <= size <= SEGMENT_BYTES_MAX


def voted_id(pages: Iterable[SegmentHeader | Seal | None]) -> bytes:
    """The store id that most headers and seals name, for a store without a superblock; empty when there are none."""
    votes = Counter(page.store_id for page in pages if page is not None)
    return votes.most_common(1)[0][0] if votes else b""


def named(number: int, *pages: SegmentHeader | Seal | None) -> bool:
    """Whether a header or a seal says that it is of the segment with this number."""
    return any(page is not None and page.number == number for page in pages)


def own_pages(
    store_id: bytes, number: int, header: SegmentHeader | None, seal: Seal | None
) -> tuple[SegmentHeader | None, Seal | None]:
    """First and last page of a segment as far as they are this store's and this number's.

    A header that is lost is taken from the seal, its second copy; a seal of another namespace than the header is none.
    """
    if seal is not None and (seal.store_id != store_id or seal.number != number):
        seal = None
    if header is not None and (header.store_id != store_id or header.number != number):
        header = None
    if header is None and seal is not None:
        header = SegmentHeader(
            store_id=seal.store_id,
            namespace=seal.namespace,
            number=seal.number,
            oldest_live=seal.oldest_live,
            sequence=seal.sequence,
            size=seal.size,
            sealed_upto=0,
            previous=seal.previous,
        )
    if seal is not None and header is not None and seal.namespace != header.namespace:
        seal = None
    return header, seal


def proven_header(store_id: bytes, namespace: bytes, number: int, size: int, chunk: ChunkHeader) -> SegmentHeader:
    """The header that a verified claim or batch of a segment stands for."""
    return SegmentHeader(
        store_id=store_id,
        namespace=namespace,
        number=number,
        oldest_live=min(int(chunk.oldest_live), number),
        sequence=int(chunk.sequence),
        size=size,
        sealed_upto=min(int(chunk.sealed_upto), number),
        previous=min(int(chunk.previous), max(number - 1, 0)),
        claimed=True,
    )
