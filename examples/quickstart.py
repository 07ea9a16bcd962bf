"""First contact: put a block, get it back, look at the statistics; then find it again after a restart.

Run it with ``python examples/quickstart.py [DIRECTORY]``.
"""

import asyncio
import sys
import tempfile

import numpy as np

import asynckv


async def main(directory: str) -> None:
    k = np.arange(16 * 8 * 64, dtype=np.float16).reshape(16, 8, 64)

    async with asynckv.open(directory, memory="16MiB", disk="64MiB") as cache:
        await cache.put(42, asynckv.CacheBlock(layer_id=3, key=k, value=k))
        block = await cache.get(42)  # CacheBlock, or None on a miss
        print(block.layer_id, block.key.shape, cache.stats().memory_hits)
        assert await cache.get(43) is None

    # Closing flushed it: the next open, in this process or another one, starts warm.
    async with asynckv.open(directory, memory="16MiB", disk="64MiB") as cache:
        block = await cache.get(42)
        assert block is not None
        assert np.array_equal(block.key, k)
        print("after a restart:", cache.stats().disk_hits, "disk hit")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        asyncio.run(main(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            asyncio.run(main(temporary))
