"""Blocks that describe themselves: each repeats the number of its key, its version and its length.

Whatever a store yields can then be told from everything it must not yield.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Any

import numpy as np

from asynckv._core import CacheBlock

__all__ = ["SIZES", "Key", "WrongBlockError", "block_of", "key_of", "payload", "size_of", "version_of"]

SIZES = (40, 60, 700, 4096, 5000, 20_000, 32_768, 40_000, 65_536, 90_000)
_NOISE = np.random.default_rng(7).integers(0, 256, 1 << 18, dtype=np.uint8)
_HEAD = struct.Struct("<QQQ")  # key index, version, length

Key = int | str | bytes


class WrongBlockError(AssertionError):
    """A store yielded bytes that were never put under this key."""


def key_of(index: int) -> Key:
    """The key of a number: ints, 32-byte digests and strings take turns."""
    if index % 3 == 0:
        return (index * 0x9E3779B97F4A7C15 & (1 << 64) - 1) - (1 << 63)
    if index % 3 == 1:
        return hashlib.sha256(b"%d" % index).digest()
    return f"block-{index}"


def size_of(index: int, version: int, sizes: tuple[int, ...] = SIZES) -> int:
    """Payload bytes of a version of a key."""
    return sizes[(index * 31 + version * 17) % len(sizes)]


def block_of(index: int, version: int, sizes: tuple[int, ...] = SIZES) -> Any:
    """A version of a key's block: bytes, a float16 array or a CacheBlock; its first bytes tell which version it is."""
    size = size_of(index, version, sizes)
    start = (index * 7919 + version * 104_729) % (_NOISE.size - size)
    data = _NOISE[start : start + size].copy()
    data[: _HEAD.size] = np.frombuffer(_HEAD.pack(index, version, size), np.uint8)
    kind = (index + version) % 3
    if kind == 0:
        return data.tobytes()
    if kind == 1:
        return data.view(np.float16).reshape(2, -1)
    half = size // 2 // 4 * 4
    return CacheBlock(version % 1000, data[: size - half], data[size - half :].view(np.int32))


def payload(block: Any) -> bytes:
    """The bytes of a block: `key` then `value` of a CacheBlock."""
    if isinstance(block, CacheBlock):
        return block.key.tobytes() + block.value.tobytes()
    return block.tobytes() if isinstance(block, np.ndarray) else bytes(block)


def _shape(block: Any) -> tuple[Any, ...]:
    if isinstance(block, CacheBlock):
        parts = (block.key, block.value)
        return ("block", block.layer_id, *((part.dtype, part.shape) for part in parts))
    return ("array", block.dtype, block.shape) if isinstance(block, np.ndarray) else ("bytes", len(block))


def version_of(index: int, block: Any, sizes: tuple[int, ...] = SIZES) -> int:
    """The version that a block is, after comparing all of it: kind, shapes, dtypes and every byte."""
    data = payload(block)
    if len(data) < _HEAD.size:
        raise WrongBlockError(f"key {index}: a block of {len(data)} bytes")
    found, version, length = map(int, _HEAD.unpack_from(data))
    if found != index or length != len(data) or version >= 1 << 32:
        raise WrongBlockError(f"key {index}: {len(data)} bytes that say key {found}, version {version}, {length} bytes")
    wanted = block_of(index, version, sizes)
    if data != payload(wanted) or _shape(block) != _shape(wanted):
        raise WrongBlockError(f"key {index}: version {version} with wrong bytes, kind, dtype or shape")
    return version
