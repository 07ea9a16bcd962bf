"""Reading request traces: JSON Lines, plain or gzip, one request a line."""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any

import aiofiles

from asynckv.commands.output import about

__all__ = ["Request", "TraceError", "parse_request", "read_trace"]

CHUNK_BYTES = 64 << 10
INFLATED_BYTES_MAX = 4 << 20  # taken from zlib at a time, so that no file can make us hold more
LINE_BYTES_MAX = 64 << 20
_GZIP_MAGIC = b"\x1f\x8b"
_INT64_END = 1 << 63


class TraceError(ValueError):
    """A line of the trace is not a request."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a trace: when it came (milliseconds), its lengths in tokens, its prompt's blocks in order."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


def parse_request(line: bytes, number: int) -> Request:
    """Turn one line into a Request; ``number`` counts lines from 1 and is named in errors.

    Raises
    ------
    TraceError
        The line is not a JSON object with a list of 64-bit ints under ``hash_ids`` and sensible numbers beside it.
        Ids are keys: the text has none of the line's contents.
    """
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        raise TraceError(f"line {number}: not readable as JSON") from None
    if not isinstance(values, dict) or not isinstance(values.get("hash_ids"), list):
        raise TraceError(f"line {number}: not an object with a list under 'hash_ids'")
    ids = values["hash_ids"]
    for position, each in enumerate(ids, 1):
        if type(each) is not int or not -_INT64_END <= each < _INT64_END:
            raise TraceError(f"line {number}: 'hash_ids' has to hold ints of 64 bits, its entry {position} is not one")
    return Request(
        timestamp=_number(values, "timestamp", number),
        input_length=_length(values, "input_length", number),
        output_length=_length(values, "output_length", number),
        hash_ids=ids,
    )


def _number(values: dict[str, Any], name: str, number: int) -> float:
    value = values.get(name, 0)
    # The comparison keeps out NaN and the infinities, too, which Python's JSON knows.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < _INT64_END:
        raise TraceError(f"line {number}: {name!r} has to be a number from 0 to 2**63 - 1")
    return value


def _length(values: dict[str, Any], name: str, number: int) -> int:
    value = _number(values, name, number)
    if value != int(value):
        raise TraceError(f"line {number}: {name!r} has to be a whole number of tokens")
    return int(value)


async def read_trace(
    path: str | os.PathLike[str], *, progress: Callable[[float], None] | None = None
) -> AsyncGenerator[Request, None]:
    """Yield the requests of a trace file in order. Close it (`contextlib.aclosing`) when not all are taken.

    Parameters
    ----------
    path
        A JSON Lines file; gzip is recognised by its first bytes. Empty lines are skipped.
    progress
        Called with the share of the file that was read.

    Raises
    ------
    OSError
        The file cannot be read.
    TraceError
        A line is not a request, or the gzip data is damaged or cut short.
    """
    number = 0
    rest = b""
    with about(path):
        async with contextlib.aclosing(_pieces(path, progress)) as pieces:
            async for piece in pieces:
                *lines, rest = (rest + piece).split(b"\n")
                if len(rest) > LINE_BYTES_MAX:
                    raise TraceError(f"line {number + len(lines) + 1}: longer than {LINE_BYTES_MAX} bytes")
                for line in lines:
                    number += 1
                    if line.strip():
                        yield parse_request(line, number)
    if rest.strip():
        yield parse_request(rest, number + 1)


async def _pieces(
    path: str | os.PathLike[str], progress: Callable[[float], None] | None
) -> AsyncGenerator[bytes, None]:
    size = max(1, os.stat(path).st_size)
    done = 0
    async with aiofiles.open(path, "rb") as file:
        inflate: Any = None
        while chunk := await file.read(CHUNK_BYTES):
            if done == 0 and chunk.startswith(_GZIP_MAGIC):
                inflate = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
            done += len(chunk)
            if progress is not None:
                progress(done / size)
            if inflate is None:
                yield chunk
                continue
            while chunk:
                if inflate.eof:  # gzip files may be several members one after the other
                    inflate = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
                try:
                    yield inflate.decompress(chunk, INFLATED_BYTES_MAX)
                except zlib.error as error:
                    raise TraceError(f"damaged gzip data ({error})") from None
                chunk = inflate.unused_data if inflate.eof else inflate.unconsumed_tail
        if inflate is not None and not inflate.eof:
            raise TraceError("the gzip data is cut short")
