"""The scenario this project started from: far more blocks than the pool holds, and the oldest ones read back.

20,000 tokens, each with a key of 10 and a value of 5 floats, go into a pool of half a MiB. Tokens 0 to 19 are by then
only on disk: all of them come back from there, none is missing. Run it with ``python examples/article_scenario.py``.
"""

import asyncio
import tempfile

import numpy as np

import asynckv

TOKENS = 20_000
READ_BACK = 20


def block_of(token: int) -> asynckv.CacheBlock:
    return asynckv.CacheBlock(
        layer_id=token % 12,
        key=np.full(10, token, np.float32),
        value=np.full(5, -token, np.float32),
    )


async def main(directory: str) -> None:
    async with asynckv.open(directory, memory="512KiB", disk="64MiB") as cache:
        for token in range(TOKENS):
            await cache.put(token, block_of(token))

        for token in range(READ_BACK):
            block = await cache.get(token)
            assert block is not None, "a miss"
            assert np.array_equal(block.key, block_of(token).key)
            assert np.array_equal(block.value, block_of(token).value)
            del block  # a view pins its block in the pool: let go of it

        stats = cache.stats()
        print(f"puts         {stats.puts:>8,}")
        print(f"evictions    {stats.evictions:>8,}")
        print(f"memory hits  {stats.memory_hits:>8,}")
        print(f"disk hits    {stats.disk_hits:>8,}")
        print(f"misses       {stats.misses:>8,}")
        print(f"mean load    {stats.disk_load_seconds_mean * 1e6:>8.1f} us")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        asyncio.run(main(temporary))
