"""An async generator of tokens whose K/V blocks live only in asynckv, in a pool of a quarter of their size.

The model is a small transformer in numpy with seeded random weights, so the text is gibberish, but always the same
gibberish. Keys and values of every layer are cut into blocks of 16 tokens. While layer n computes, the blocks of layer
n + 1 are loading (``prefetch``); a layer takes its blocks one after the other (``stream``) and folds each into a
running softmax, so that it never holds more than a few of them. At the end the text is compared with that of a run that
kept all blocks in plain memory: it has to be identical.

Run it with ``python examples/streaming_generator.py``.
"""

import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator

import numpy as np

import asynckv

ALPHABET = " abcdefghijklmnopqrstuvwxyz.,\n"
PROMPT = "the cache of a model keeps what it has seen, so that nothing is computed twice. "
LAYERS, HEADS, HEAD_SIZE = 6, 4, 16
WIDTH = HEADS * HEAD_SIZE
BLOCK_TOKENS = 16
NEW_TOKENS = 96
BLOCK_BYTES = 2 * BLOCK_TOKENS * WIDTH * 4


class Model:
    """Weights, and the parts of a step that need no K/V."""

    def __init__(self, seed: int = 1) -> None:
        draw = np.random.default_rng(seed)

        def matrix(rows: int, columns: int) -> np.ndarray:
            return draw.normal(0, rows**-0.5, (rows, columns)).astype(np.float32)

        self.embedding = draw.normal(0, 1, (len(ALPHABET), WIDTH)).astype(np.float32)
        self.qkv = [matrix(WIDTH, 3 * WIDTH) for _ in range(LAYERS)]
        self.out = [matrix(WIDTH, WIDTH) for _ in range(LAYERS)]
        self.up = [matrix(WIDTH, 4 * WIDTH) for _ in range(LAYERS)]
        self.down = [matrix(4 * WIDTH, WIDTH) for _ in range(LAYERS)]
        self.head = matrix(WIDTH, len(ALPHABET))

    def embed(self, token: int, position: int) -> np.ndarray:
        angle = position / 10000.0 ** (np.arange(WIDTH) / WIDTH)
        return self.embedding[token] + np.sin(angle).astype(np.float32)


def normalize(x: np.ndarray) -> np.ndarray:
    return (x - x.mean()) / (x.std() + np.float32(1e-5))


class RunningAttention:
    """Softmax over keys that arrive block by block: keeps a maximum, a sum and a weighted value for each head."""

    def __init__(self, query: np.ndarray) -> None:
        self.query = query.reshape(HEADS, HEAD_SIZE) * np.float32(HEAD_SIZE**-0.5)
        self.top = np.full(HEADS, -np.inf, np.float32)
        self.total = np.zeros(HEADS, np.float32)
        self.value = np.zeros((HEADS, HEAD_SIZE), np.float32)

    def add(self, keys: np.ndarray, values: np.ndarray) -> None:
        """Fold in a block: arrays of tokens x heads x head size."""
        scores = np.einsum("hd,thd->ht", self.query, keys)
        top = np.maximum(self.top, scores.max(axis=1))
        weights = np.exp(scores - top[:, None])
        shrink = np.exp(self.top - top)
        self.total = self.total * shrink + weights.sum(axis=1)
        self.value = self.value * shrink[:, None] + np.einsum("ht,thd->hd", weights, values)
        self.top = top

    def result(self) -> np.ndarray:
        return (self.value / self.total[:, None]).reshape(WIDTH)


class PlainBlocks:
    """K/V blocks in a dictionary: what the other store is compared with."""

    def __init__(self) -> None:
        self.blocks: dict[int, asynckv.CacheBlock] = {}

    def prefetch(self, keys: list[int]) -> None:
        pass

    async def stream(self, keys: list[int]) -> AsyncIterator[tuple[int, asynckv.CacheBlock]]:
        for key in keys:
            yield key, self.blocks[key]

    async def put(self, key: int, block: asynckv.CacheBlock) -> None:
        self.blocks[key] = block


def keys_of(layer: int, tokens: int) -> list[int]:
    """Return the keys of all blocks of a layer that hold ``tokens`` tokens."""
    return [layer << 32 | index for index in range(-(-tokens // BLOCK_TOKENS))]


async def append(store, layer: int, position: int, last, key: np.ndarray, value: np.ndarray) -> asynckv.CacheBlock:
    """Add a token to the layer's last block, or begin a new one, and put the block."""
    key, value = key.reshape(1, HEADS, HEAD_SIZE), value.reshape(1, HEADS, HEAD_SIZE)
    if position % BLOCK_TOKENS:
        key, value = np.concatenate([last.key, key]), np.concatenate([last.value, value])
    block = asynckv.CacheBlock(layer_id=layer, key=key, value=value)
    await store.put(layer << 32 | position // BLOCK_TOKENS, block)
    return block


async def step(model: Model, store, token: int, position: int) -> np.ndarray:
    """Run one token through all layers; returns the scores of the next one."""
    x = model.embed(token, position)
    for layer in range(LAYERS):
        query, key, value = np.split(normalize(x) @ model.qkv[layer], 3)
        if layer + 1 < LAYERS:
            store.prefetch(keys_of(layer + 1, position))  # loads while this layer computes
        attention = RunningAttention(query)
        wanted = keys_of(layer, position)
        seen, last = 0, None
        async for _, block in store.stream(wanted):
            seen += 1
            if seen == len(wanted) and position % BLOCK_TOKENS:
                last = block  # not full yet: the new token goes in first
            else:
                attention.add(block.key, block.value)
            del block
        if seen != len(wanted):
            raise RuntimeError(f"layer {layer}: a K/V block was lost")  # a real server would compute it again
        block = await append(store, layer, position, last, key, value)
        attention.add(block.key, block.value)
        del block, last
        x = x + attention.result() @ model.out[layer]
        x = x + np.maximum(normalize(x) @ model.up[layer], 0) @ model.down[layer]
    return normalize(x) @ model.head


async def generate(model: Model, store, prompt: str, count: int) -> AsyncIterator[str]:
    """Yield ``count`` characters that continue the prompt, each as soon as it is known."""
    draw = np.random.default_rng(2)
    position = 0
    scores = np.zeros(len(ALPHABET), np.float32)
    for letter in prompt:
        scores = await step(model, store, ALPHABET.index(letter), position)
        position += 1
    for _ in range(count):
        chance = np.exp((scores - scores.max()).astype(np.float64))
        token = int(draw.choice(len(ALPHABET), p=chance / chance.sum()))
        yield ALPHABET[token]
        scores = await step(model, store, token, position)
        position += 1


async def main(directory: str) -> None:
    model = Model()
    total = LAYERS * len(keys_of(0, len(PROMPT) + NEW_TOKENS)) * BLOCK_BYTES
    pieces = []
    async with asynckv.open(directory, memory=total // 4, disk="64MiB") as cache:
        async for piece in generate(model, cache, PROMPT, NEW_TOKENS):
            pieces.append(piece)
            sys.stdout.write(piece)
            sys.stdout.flush()
        stats = cache.stats()
    plain = [piece async for piece in generate(model, PlainBlocks(), PROMPT, NEW_TOKENS)]
    print()
    print(f"K/V blocks: {total:,} bytes; pool: {stats.memory_capacity:,} bytes; evictions: {stats.evictions:,}")
    print(f"blocks from memory: {stats.memory_hits:,}; from disk: {stats.disk_hits:,}")
    assert stats.evictions > 0
    assert stats.loaded_blocks > 0
    assert pieces == plain, "the text differs from that of a run in plain memory"
    print("identical to a run in plain memory")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        asyncio.run(main(temporary))
