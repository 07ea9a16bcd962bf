"""Blocks that cost nothing to make, and whose every byte can be checked."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Payloads"]

_SEED = 20240613
BANK_BYTES = 32 << 20
BANK_BLOCKS = 1024
WORD = 8


class Payloads:
    """Blocks of one size: some of random bytes in turn, with the number of the block at the front.

    The bytes of a block stay as they are until 32 MiB more of them, or 1,024, were made. Making one is a store of eight
    bytes, so that a benchmark times the cache and not its own random numbers.

    Parameters
    ----------
    size
        Bytes of every block, at least 8.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        count = max(2, min(BANK_BLOCKS, BANK_BYTES // size))
        random = np.random.Generator(np.random.PCG64(_SEED))
        self._bank = [np.frombuffer(random.bytes(size), np.uint8).copy() for _ in range(count)]
        self._heads = [each[:WORD].view(np.int64) for each in self._bank]

    def make(self, number: int) -> npt.NDArray[np.uint8]:
        """The bytes of a block, until another is made: a cache copies them."""
        place = number % len(self._bank)
        self._heads[place][0] = number
        return self._bank[place]

    def check(self, number: int, block: Any) -> bool:
        """Whether all bytes are those of this block."""
        if not isinstance(block, np.ndarray) or block.dtype != np.uint8 or block.shape != (self.size,):
            return False
        return np.array_equal(self.make(number), block)
