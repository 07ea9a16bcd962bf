"""A scan of any bytes ends soon."""

from __future__ import annotations

import struct

import pytest

from asynckv._record import CHUNK_MAX, KIND_BATCH, KIND_FOOTER, PAGE_BYTES
from asynckv.tiers.scan import WINDOW_MAX, scan_segment

SIZE = 8 << 20


@pytest.mark.parametrize("whole", [PAGE_BYTES, 1 << 20, CHUNK_MAX // 2, CHUNK_MAX // 2 + PAGE_BYTES, CHUNK_MAX])
@pytest.mark.parametrize("kind", [KIND_BATCH, KIND_FOOTER])
def test_pages_that_all_claim_to_begin_a_long_chunk_are_not_read_again_and_again(whole, kind):
    data = bytearray(SIZE)
    for at in range(0, SIZE, PAGE_BYTES):
        struct.pack_into("<8sQHBxIIII", data, at, b"AKVCHUNK", 0, 1, kind, 0, 0, whole, 0)
        struct.pack_into("<Q", data, at + 56, at)
    view = memoryview(data)
    read = 0
    scanner = scan_segment(SIZE, 7)
    offset, length = next(scanner)
    with pytest.raises(StopIteration) as end:
        while True:
            read += length
            offset, length = scanner.send(view[offset : offset + length])
    assert end.value.value.batches == []
    assert SIZE - PAGE_BYTES <= read <= 3 * SIZE + WINDOW_MAX
