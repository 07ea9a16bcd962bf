"""``asynckv demo``: the scenario this project started from, then a chat service's trace, both checked byte by byte."""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from typing import Any

import numpy as np

import asynckv
from asynckv.commands.output import (
    FAILED,
    OK,
    Progress,
    UsageError,
    about,
    open_store,
    path,
    plural,
    run,
    table,
    write,
    write_json,
)
from asynckv.commands.replay import replay_requests, report_rows, verdict
from asynckv.commands.replayer import Replay
from asynckv.commands.tracegen import generate
from asynckv.config import format_size

__all__ = ["add_parser"]

# The article's scenario.
ARTICLE_BLOCKS = 20_000
ARTICLE_KEY_FLOATS = 10
ARTICLE_VALUE_FLOATS = 5
ARTICLE_POOL = 512 << 10
ARTICLE_DISK = 64 << 20
ARTICLE_READS = 20

# The trace: a footprint of eight pools, all of which fits the disk.
TRACE_SEED = 7
TRACE_BLOCK = 64 << 10
TRACE_POOL = 32 << 20
TRACE_FOOTPRINT = 8
TRACE_DISK = 1 << 30


def add_parser(commands: Any) -> None:
    """Add ``demo`` to the command line."""
    parser = commands.add_parser(
        "demo",
        help="show what the store does, in a temporary directory",
        description=(
            f"Part 1 puts {ARTICLE_BLOCKS:,} small blocks into a pool that holds a part of them and reads the oldest "
            f"back from disk. Part 2 replays the trace of a chat service that asks for {TRACE_FOOTPRINT} times more "
            "than the pool holds. Every byte is checked; a wrong one is exit status 1."
        ),
    )
    parser.add_argument("--dir", type=path, metavar="DIR", help="where to make the temporary directory")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(command=main)


def main(arguments: argparse.Namespace) -> int:
    """Run ``asynckv demo``."""
    with about(arguments.dir or tempfile.gettempdir()):
        temporary = tempfile.TemporaryDirectory(prefix="asynckv-demo-", dir=arguments.dir)
    with temporary as directory, Progress("replay") as progress:
        free = shutil.disk_usage(directory).free
        if free < TRACE_DISK + ARTICLE_DISK:
            need = format_size(TRACE_DISK + ARTICLE_DISK)
            raise UsageError(f"{directory}: the demo needs {need}, only {format_size(free)} are free; see --dir")
        return run(_demo(directory, progress, quiet=arguments.json))


async def _demo(directory: str, progress: Progress, *, quiet: bool) -> int:
    article = await article_scenario(f"{directory}/article")
    if not quiet:
        write(f"1. {ARTICLE_BLOCKS:,} blocks of {ARTICLE_KEY_FLOATS} + {ARTICLE_VALUE_FLOATS} floats, a pool of "
              f"{format_size(ARTICLE_POOL)}, tokens 0 to {ARTICLE_READS - 1} read back")  # fmt: skip
        write(table(_article_rows(article)))
        write("")
        write(f"2. A chat service's trace: blocks of {format_size(TRACE_BLOCK)}, a pool of {format_size(TRACE_POOL)}, "
              f"{TRACE_FOOTPRINT} times as much asked for")  # fmt: skip
    trace = await _trace_scenario(f"{directory}/trace", progress)
    progress.done()
    if quiet:
        write_json({"article": article, "trace": trace})
    else:
        write(table(report_rows(trace)))
        write(verdict(trace))
    whole = article["wrong_blocks"] == article["misses"] == trace["wrong_blocks"] == 0
    return OK if whole and trace["disk_hits"] > 0 else FAILED


async def article_scenario(directory: str) -> dict[str, Any]:
    """Put the article's blocks, read the oldest back and compare them; return the figures."""
    async with open_store(directory, memory=ARTICLE_POOL, disk=ARTICLE_DISK) as cache:
        started = time.perf_counter()
        for token in range(ARTICLE_BLOCKS):
            await cache.put(token, _article_block(token))
        put_seconds = time.perf_counter() - started
        wrong = 0
        for token in range(ARTICLE_READS):
            block = await cache.get(token)
            if block is not None:
                wrong += not _equal(block, _article_block(token))
            del block
        stats = cache.stats()
    return {
        "blocks": ARTICLE_BLOCKS,
        "put_seconds": put_seconds,
        "memory_hits": stats.memory_hits,
        "disk_hits": stats.disk_hits,
        "misses": stats.misses,
        "wrong_blocks": wrong,
        "evictions": stats.evictions,
        "memory_blocks": stats.memory_blocks,
        "disk_load_seconds_mean": stats.disk_load_seconds_mean,
        "engine": stats.engine,
        "direct": stats.direct,
    }


def _article_block(token: int) -> asynckv.CacheBlock:
    return asynckv.CacheBlock(
        layer_id=token % 12,
        key=np.full(ARTICLE_KEY_FLOATS, token, np.float32),
        value=np.full(ARTICLE_VALUE_FLOATS, token + 0.5, np.float32),
    )


def _equal(one: asynckv.CacheBlock, other: asynckv.CacheBlock) -> bool:
    return (
        one.layer_id == other.layer_id and np.array_equal(one.key, other.key) and np.array_equal(one.value, other.value)
    )


def _article_rows(results: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        ("put", f"{results['put_seconds'] / ARTICLE_BLOCKS * 1e6:.2f} us a block"),
        ("evictions", f"{results['evictions']:,}"),
        ("memory hits", f"{results['memory_hits']:,}"),
        ("disk hits", f"{results['disk_hits']:,}"),
        ("misses", f"{results['misses']:,}"),
        ("wrong blocks", f"{results['wrong_blocks']:,}"),
        ("mean disk load", f"{results['disk_load_seconds_mean'] * 1e6:.1f} us"),
    ]


async def _trace_scenario(directory: str, progress: Progress) -> dict[str, Any]:
    blocks = TRACE_FOOTPRINT * TRACE_POOL // TRACE_BLOCK
    requests = list(generate(TRACE_SEED, blocks=blocks))

    def step(replay: Replay) -> None:
        progress.update(
            replay.requests / len(requests), f"{plural(replay.block_hits, 'hit')}, {replay.wrong_blocks:,} wrong"
        )

    return await replay_requests(
        requests, directory, block_bytes=TRACE_BLOCK, memory=TRACE_POOL, disk=TRACE_DISK, step=step
    )
