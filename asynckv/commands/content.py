"""Block contents that describe themselves, so that any wrong byte of any block shows."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Contents"]

# 2**64 divided by the golden ratio: odd, so that id times this is a different number for each id of 64 bits.
_SPREAD = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_SEED = 20240613


class Contents:
    """Makes and checks blocks of one size.

    Word ``i`` of block ``id`` is ``base[i] + id * constant`` modulo 2**64, ``base`` being random and the same in every
    process. So each word differs from the one in the same place of any other block, and practically from every
    word in another place: swapped, shifted, torn and foreign bytes all differ.

    Parameters
    ----------
    block_bytes
        Size of every block, at least 1.
    """

    def __init__(self, block_bytes: int) -> None:
        words = -(-block_bytes // 8)
        self.block_bytes = block_bytes
        self._base = np.random.Generator(np.random.PCG64(_SEED)).integers(0, _MASK, words, np.uint64, endpoint=True)
        self._scratch = np.empty(words, np.uint64)
        self._bytes = self._scratch.view(np.uint8)[:block_bytes]
        self._whole = self._scratch[: block_bytes // 8]
        self._tail = self._bytes[self._whole.size * 8 :]

    def make(self, block_id: int) -> npt.NDArray[np.uint8]:
        """Return the bytes of a block; they are overwritten by the next call."""
        np.add(self._base, np.uint64(block_id * _SPREAD & _MASK), out=self._scratch)
        return self._bytes

    def check(self, block_id: int, block: Any) -> bool:
        """Compare all bytes of what a cache returned with what was put."""
        if not isinstance(block, np.ndarray) or block.dtype != np.uint8 or block.shape != (self.block_bytes,):
            return False
        self.make(block_id)
        words = self._whole.size
        if words and not np.array_equal(block[: words * 8].view(np.uint64), self._whole):
            return False
        return not self._tail.size or np.array_equal(block[words * 8 :], self._tail)
