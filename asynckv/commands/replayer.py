"""Replays requests against a cache with real bytes, and counts what the cache made of them.

The rules, one request after the other: classify all ids, without changing anything; read every hit in ascending
position and check every byte of it, dropping each view before the next step; put the missing ids in ascending position.
With a memory-only cache the counts are those of the textbook policies.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import AsyncIterable, Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from asynckv.commands.content import Contents
from asynckv.commands.output import open_store
from asynckv.commands.trace import Request

if TYPE_CHECKING:
    import asynckv

__all__ = ["Latencies", "Replay", "occupied_bytes"]

TRACE_BLOCK_TOKENS = 512
_FINE_BITS = 6  # 64 steps per power of two: figures are within 1.6 %


class Latencies:
    """Counts durations in steps of 1.6 % of their size: percentiles of any number of samples in a few KiB."""

    def __init__(self) -> None:
        self.count = 0
        self.total_ns = 0
        self.max_ns = 0
        self._counts: dict[int, int] = {}

    def add(self, ns: int) -> None:
        """Note one duration."""
        self.count += 1
        self.total_ns += ns
        if ns > self.max_ns:
            self.max_ns = ns
        shift = ns.bit_length() - _FINE_BITS - 1
        step = ns if shift <= 0 else (shift << _FINE_BITS) + (ns >> shift)
        self._counts[step] = self._counts.get(step, 0) + 1

    def quantile(self, share: float) -> float:
        """Return the duration, in seconds, that ``share`` of the samples do not exceed."""
        left = share * self.count
        for step in sorted(self._counts):
            left -= self._counts[step]
            if left <= 0:
                shift = max((step >> _FINE_BITS) - 1, 0)
                return min((step - (shift << _FINE_BITS)) << shift, self.max_ns) / 1e9
        return self.max_ns / 1e9

    def as_dict(self) -> dict[str, float]:
        """Return count, mean, p50, p99 and max, in seconds."""
        return {
            "count": self.count,
            "mean": self.total_ns / self.count / 1e9 if self.count else 0.0,
            "p50": self.quantile(0.50),
            "p99": self.quantile(0.99),
            "max": self.max_ns / 1e9,
        }


@dataclass
class Replay:
    """One replay and its counts.

    Parameters
    ----------
    cache
        The cache to ask.
    block_bytes
        Size of every block.
    progress
        Called after each request.
    """

    cache: asynckv.Cache
    block_bytes: int
    progress: Callable[[Replay], None] | None = None
    requests: int = 0
    accesses: int = 0
    memory_hits: int = 0
    disk_hits: int = 0
    misses: int = 0
    prefix_hits: int = 0
    prefix_tokens: int = 0
    wrong_blocks: int = 0
    lost_hits: int = 0
    rejected_puts: int = 0
    bytes_read: int = 0
    bytes_put: int = 0
    latencies: dict[str, Latencies] = field(default_factory=lambda: {n: Latencies() for n in ("memory", "disk", "put")})

    def __post_init__(self) -> None:
        self._contents = Contents(self.block_bytes)
        self._runs = hashlib.sha256()

    async def run(self, requests: AsyncIterable[Request] | Iterable[Request], limit: int | None = None) -> None:
        """Replay requests in order, at most ``limit`` of them."""
        if limit is not None and limit <= 0:
            return
        async with contextlib.aclosing(_each(requests)) as each:
            async for request in each:
                await self.replay(request)
                if self.progress is not None:
                    self.progress(self)
                if limit is not None and self.requests >= limit:
                    return

    async def replay(self, request: Request) -> None:
        """Replay one request."""
        tier = self.cache.tier
        ids = request.hash_ids
        tiers = [tier(each) for each in ids]
        missing = []
        run = None
        for position, (each, where) in enumerate(zip(ids, tiers, strict=True)):
            if where is None or not await self._read(each, where):
                missing.append(each)
                if run is None:
                    run = position
        run = len(ids) if run is None else run
        for each in missing:
            await self._put(each)
        self.requests += 1
        self.accesses += len(ids)
        self.misses += len(missing)
        self.prefix_hits += run
        self.prefix_tokens += min(TRACE_BLOCK_TOKENS * run, request.input_length)
        self._runs.update(b"%d\n" % run)

    async def _read(self, block_id: int, where: str) -> bool:
        """Read and check one block that was present; False when it is not to be had any more."""
        started = time.perf_counter_ns()
        block = await self.cache.get(block_id)
        elapsed = time.perf_counter_ns() - started
        if block is None:
            self.lost_hits += 1
            return False
        self.latencies[where].add(elapsed)
        if not self._contents.check(block_id, block):
            self.wrong_blocks += 1
        del block
        self.bytes_read += self.block_bytes
        if where == "memory":
            self.memory_hits += 1
        else:
            self.disk_hits += 1
        return True

    async def _put(self, block_id: int) -> None:
        block = self._contents.make(block_id)
        started = time.perf_counter_ns()
        stored = await self.cache.put(block_id, block)
        self.latencies["put"].add(time.perf_counter_ns() - started)
        self.bytes_put += self.block_bytes
        if not stored:
            self.rejected_puts += 1

    @property
    def block_hits(self) -> int:
        """Hits in any tier."""
        return self.memory_hits + self.disk_hits

    @property
    def runs_sha256(self) -> str:
        """SHA-256 over every request's leading run, in decimal, each followed by a newline."""
        return self._runs.hexdigest()

    def as_dict(self) -> dict[str, Any]:
        """Return the counts by name."""
        return {
            "requests": self.requests,
            "accesses": self.accesses,
            "memory_hits": self.memory_hits,
            "disk_hits": self.disk_hits,
            "misses": self.misses,
            "block_hits": self.block_hits,
            "hit_ratio": self.block_hits / self.accesses if self.accesses else 0.0,
            "prefix_hits": self.prefix_hits,
            "prefix_tokens": self.prefix_tokens,
            "wrong_blocks": self.wrong_blocks,
            "lost_hits": self.lost_hits,
            "rejected_puts": self.rejected_puts,
            "bytes_read": self.bytes_read,
            "bytes_put": self.bytes_put,
            "runs_sha256": self.runs_sha256,
            "latency_seconds": {name: each.as_dict() for name, each in self.latencies.items()},
        }


async def _each(requests: AsyncIterable[Request] | Iterable[Request]) -> Any:
    if isinstance(requests, AsyncIterable):
        async for request in requests:
            yield request
    else:
        for request in requests:
            yield request


async def occupied_bytes(directory: str, block_bytes: int) -> int:
    """Return what one block of this size takes up in a pool, padding included, by asking a cache."""
    # Twice the size and some pages: more than any alignment adds.
    async with open_store(directory, memory=2 * block_bytes + 16384, disk=0) as cache:
        await cache.put(0, Contents(block_bytes).make(0))
        return cache.stats().memory_used
