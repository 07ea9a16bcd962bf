"""Reading request traces: JSON Lines, plain or gzip, one request a line."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import aiofiles

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
        The line is not a JSON object with a list of 64-bit ints under ``hash_ids``.
    """
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"line {number}: not JSON ({error})") from None
    if not isinstance(values, dict) or not isinstance(values.get("hash_ids"), list):
        raise TraceError(f"line {number}: not an object with a list under 'hash_ids'")
    ids = values["hash_ids"]
    for each in ids:
        if type(each) is not int or not -_INT64_END <= each < _INT64_END:
            raise TraceError(f"line {number}: a block id is an int of 64 bits, not {each!r:.40}")
    return Request(
        timestamp=_number(values, "timestamp", number),
        input_length=int(_number(values, "input_length", number)),
        output_length=int(_number(values, "output_length", number)),
        hash_ids=ids,
    )


def _number(values: dict[str, Any], name: str, number: int) -> float:
    value = values.get(name, 0)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TraceError(f"line {number}: {name!r} is a number, not {value!r:.40}")
    return value


async def read_trace(
    path: str | os.PathLike[str], *, progress: Callable[[float], None] | None = None
) -> AsyncIterator[Request]:
    """Yield the requests of a trace file in order.

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
    async for piece in _pieces(path, progress):
        *lines, rest = (rest + piece).split(b"\n")
        if len(rest) > LINE_BYTES_MAX:
            raise TraceError(f"line {number + len(lines) + 1}: longer than {LINE_BYTES_MAX} bytes")
        for line in lines:
            number += 1
            if line.strip():
                yield parse_request(line, number)
    if rest.strip():
        yield parse_request(rest, number + 1)


async def _pieces(path: str | os.PathLike[str], progress: Callable[[float], None] | None) -> AsyncIterator[bytes]:
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
