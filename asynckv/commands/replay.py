"""``asynckv replay``: a request trace, with real bytes, every one of them checked."""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterable, Iterable
from typing import Any

from asynckv.commands.output import (
    FAILED,
    OK,
    Progress,
    UsageError,
    choose_loop,
    open_store,
    path,
    plural,
    run,
    table,
    write,
    write_json,
)
from asynckv.commands.replayer import Replay, occupied_bytes
from asynckv.commands.trace import Request, TraceError, read_trace
from asynckv.config import (
    ENGINES,
    MEMORY_SHARE_MAX,
    POLICIES,
    format_size,
    memory_limit,
    parse_size,
    resolve_policy,
)
from asynckv.errors import BlockTooLargeError

__all__ = ["add_parser", "replay_requests", "report_rows"]


def size(text: str) -> int:
    """Parse a size of the command line, where plain digits are bytes."""
    try:
        return parse_size(int(text) if text.isascii() and text.isdigit() else text)
    except ValueError:
        forms = "a whole number of bytes, or one with a unit as in 512KiB, 8GiB or 8GB"
        raise argparse.ArgumentTypeError(f"{text!r:.40} is not a size: {forms}") from None


def count(text: str) -> int:
    """Parse a count of the command line, 1 or more."""
    try:
        number = parse_size(int(text)) if text.isascii() and text.isdigit() else 0
    except ValueError:
        number = 0
    if not number:
        raise argparse.ArgumentTypeError(f"{text!r:.40} is not a count of 1 or more")
    return number


def add_parser(commands: Any) -> None:
    """Add ``replay`` to the command line."""
    parser = commands.add_parser(
        "replay",
        help="replay a request trace with real bytes and check every byte of every hit",
        description=(
            "Replay a request trace (JSON Lines, optionally gzip: timestamp, input_length, output_length, hash_ids), "
            "one request after the other, with real bytes. A wrong byte is exit status 1."
        ),
    )
    parser.add_argument("trace", type=path, metavar="TRACE", help="the trace file")
    pool = parser.add_mutually_exclusive_group()
    pool.add_argument("--memory", type=size, default=size("256MiB"), metavar="SIZE", help="pool size (default 256MiB)")
    pool.add_argument("--memory-blocks", type=count, metavar="N", help="size the pool for exactly N blocks")
    parser.add_argument("--disk", type=size, default=size("4GiB"), metavar="SIZE", help="disk cap; 0 is memory only")
    parser.add_argument("--block-bytes", type=size, default=size("64KiB"), metavar="SIZE", help="size of one block")
    parser.add_argument("--policy", choices=POLICIES, default="auto", help="memory eviction policy")
    parser.add_argument("--engine", choices=ENGINES, default="auto", help="disk engine")
    parser.add_argument("--loop", choices=("asyncio", "uvloop"), help="event loop (default: uvloop when it is there)")
    parser.add_argument("--dir", type=path, metavar="DIR", help="store directory, kept (default: a temporary one)")
    parser.add_argument("--limit", type=count, metavar="N", help="stop after N requests")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(command=main)


def main(arguments: argparse.Namespace) -> int:
    """Run ``asynckv replay``."""
    if arguments.block_bytes < 1:
        raise UsageError("--block-bytes has to be at least 1")
    _check_pool(arguments)
    with open(arguments.trace, "rb"):  # before a store is made
        pass
    loop, _ = choose_loop(arguments.loop)
    with Progress("replay") as progress:
        results = run(_replay_file(arguments, progress), loop)
    results["loop"] = loop
    results["trace"] = arguments.trace
    if arguments.json:
        write_json(results)
    else:
        write(f"replay of {arguments.trace}")
        write(table(report_rows(results)))
        write(verdict(results))
    return FAILED if results["wrong_blocks"] else OK


def _check_pool(arguments: argparse.Namespace) -> None:
    """Refuse a pool that no store may have, in words of the command line and before the size of a block is tried."""
    # What a block takes up is found out in a pool for two of them.
    pool = max(arguments.memory_blocks, 2) * arguments.block_bytes if arguments.memory_blocks else arguments.memory
    most = int(memory_limit() * MEMORY_SHARE_MAX)
    if pool > most:
        raise UsageError(
            f"a pool of {format_size(pool)} is above the {format_size(most)} that this machine or its cgroup allows; "
            "choose less with --memory, --memory-blocks or --block-bytes"
        )


async def _replay_file(arguments: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    share = 0.0

    def read(done: float) -> None:
        nonlocal share
        share = done

    def step(replay: Replay) -> None:
        done = max(share, replay.requests / arguments.limit) if arguments.limit else share
        progress.update(
            done,
            f"{plural(replay.requests, 'request')}, {plural(replay.block_hits, 'hit')}, {replay.wrong_blocks:,} wrong",
        )

    async with contextlib.AsyncExitStack() as stack:
        directory = arguments.dir or stack.enter_context(tempfile.TemporaryDirectory(prefix="asynckv-replay-"))
        memory = arguments.memory
        if arguments.memory_blocks is not None:
            with tempfile.TemporaryDirectory(prefix="asynckv-probe-") as probe:
                memory = arguments.memory_blocks * await occupied_bytes(probe, arguments.block_bytes)
        requests = await stack.enter_async_context(contextlib.aclosing(read_trace(arguments.trace, progress=read)))
        try:
            first = await anext(requests, None)
            if first is None:
                raise UsageError(f"{arguments.trace}: there is no request in it")
            return await replay_requests(
                _from(first, requests),
                directory,
                block_bytes=arguments.block_bytes,
                memory=memory,
                disk=arguments.disk,
                policy=arguments.policy,
                engine=arguments.engine,
                limit=arguments.limit,
                step=step,
            )
        except TraceError as error:
            raise UsageError(f"{arguments.trace}: {error}") from None


async def _from(first: Request, rest: AsyncIterable[Request]) -> AsyncGenerator[Request, None]:
    yield first
    async for each in rest:
        yield each


async def replay_requests(
    requests: AsyncIterable[Request] | Iterable[Request],
    directory: str,
    *,
    block_bytes: int,
    memory: int,
    limit: int | None = None,
    step: Any = None,
    **options: Any,
) -> dict[str, Any]:
    """Open a store, replay requests in it, close it, and return all figures by name."""
    misfit = UsageError(
        f"a block of {block_bytes:,} bytes, padding not counted, does not fit a pool of {memory:,} bytes; "
        "choose a larger --memory or a smaller --block-bytes"
    )
    if block_bytes > memory:
        raise misfit
    async with open_store(directory, memory=memory, **options) as cache:
        replay = Replay(cache, block_bytes, step)
        started = time.perf_counter()
        try:
            await replay.run(requests, limit)
        except BlockTooLargeError:  # for its padding
            raise misfit from None
        seconds = time.perf_counter() - started
    closed = time.perf_counter() - started - seconds
    stats = cache.stats()
    results = {
        **replay.as_dict(),
        "seconds": seconds,
        "close_seconds": closed,
        "evictions": stats.evictions,
        "disk_bytes_written": stats.disk_bytes_written,
        "engine": stats.engine,
        "direct": stats.direct,
        "policy": resolve_policy(options.get("policy", "auto")),
        "memory": stats.memory_capacity,
        "disk": stats.disk_capacity,
        "block_bytes": block_bytes,
    }
    here = results.keys() | {"memory_capacity", "disk_capacity"}
    results["stats"] = {name: value for name, value in stats.as_dict().items() if name not in here}
    return results


def report_rows(results: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the lines of the table that people read."""
    accesses = max(results["accesses"], 1)
    seconds = max(results["seconds"], 1e-9)
    moved = results["bytes_read"] + results["bytes_put"]

    def share(name: str) -> str:
        return f"{results[name]:,} ({results[name] / accesses:.2%})"

    def latency(name: str) -> str:
        each = results["latency_seconds"][name]
        if not each["count"]:
            return "none"
        p50, p99, longest = (each[part] * 1e6 for part in ("p50", "p99", "max"))
        return f"p50 {p50:,.1f} us, p99 {p99:,.1f} us, max {longest:,.1f} us"

    manner = "direct" if results["direct"] else "buffered"
    disk = f"{format_size(results['disk'])}, engine {results['engine']}, {manner}"
    return [
        ("requests", f"{results['requests']:,}"),
        ("blocks asked for", f"{results['accesses']:,} of {format_size(results['block_bytes'])}"),
        ("memory", f"{format_size(results['memory'])}, policy {results['policy']}"),
        ("disk", disk if results["disk"] else "none"),
        ("memory hits", share("memory_hits")),
        ("disk hits", share("disk_hits")),
        ("misses", share("misses")),
        ("prefix hits", share("prefix_hits")),
        ("wrong blocks", f"{results['wrong_blocks']:,}"),
        ("evictions", f"{results['evictions']:,}"),
        ("memory get", latency("memory")),
        ("disk get", latency("disk")),
        ("put", latency("put")),
        ("bytes moved", f"{format_size(moved)} ({moved / seconds / 1e6:,.0f} MB/s)"),
        ("disk bytes written", format_size(results["disk_bytes_written"])),
        ("time", f"{results['seconds']:.2f} s, and {results['close_seconds']:.2f} s to close"),
    ]


def verdict(results: dict[str, Any]) -> str:
    """Say in one sentence how it went."""
    if results["wrong_blocks"]:
        hits = plural(results["block_hits"], "block")
        return f"FAILED: {results['wrong_blocks']:,} of {hits} came back with wrong bytes."
    return (
        f"{plural(results['block_hits'], 'block')} came back, right to the last byte: "
        f"{results['memory_hits']:,} from memory, {results['disk_hits']:,} from disk."
    )
