"""XXH3 of a block's bytes; large ones without the interpreter lock."""

from __future__ import annotations

from xxhash import xxh3_64, xxh3_64_intdigest

__all__ = ["checksum"]

SHORT_BYTES = 64 << 10


def checksum(data: memoryview) -> int:
    """XXH3 with 64 bits and no seed.

    Parameters
    ----------
    data
        Contiguous bytes.
    """
    if data.nbytes <= SHORT_BYTES:
        return int(xxh3_64_intdigest(data))
    hasher = xxh3_64()
    hasher.update(data)  # gives up the lock in every release of xxhash, the call above only in the latest
    return int(hasher.intdigest())
