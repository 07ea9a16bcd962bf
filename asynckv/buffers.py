"""Blocks to and from flat buffers: the payload of a block is its key's bytes, then its value's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from asynckv._core import CacheBlock


def flat_bytes(array: Any) -> memoryview:
    """The bytes of a C-contiguous array or buffer, without a copy."""
    if isinstance(array, np.ndarray):
        # Through uint8: a dtype from outside numpy has no buffer format.
        array = array.reshape(-1).view(np.uint8)
    view = memoryview(array)
    return view.cast("B") if view.nbytes else memoryview(b"")


def several(keys: Any, call: str) -> Iterable[Any]:
    """What a call for many keys was given; one key would be taken for its letters.

    Raises
    ------
    TypeError
        It is one key, or nothing that can be iterated over.
    """
    if not isinstance(keys, (str, bytes, bytearray, memoryview)):
        try:
            iter(keys)
        except TypeError:
            pass
        else:
            return keys  # type: ignore[no-any-return]
    raise TypeError(f"{call} takes an iterable of keys, not one {type(keys).__name__}; for a single key pass [key]")


def pairs_of(items: Any) -> list[tuple[Any, Any]]:
    """What `put_many` was given, as (key, block) pairs.

    Raises
    ------
    TypeError
        It is neither a mapping nor pairs.
    """
    pairs = []
    if isinstance(items, (str, bytes, bytearray, memoryview)) or not hasattr(items, "__iter__"):
        raise TypeError(f"put_many takes (key, block) pairs or a mapping, not {type(items).__name__}")
    for number, item in enumerate(items.items() if hasattr(items, "items") else items):
        try:
            if isinstance(item, (str, bytes, bytearray)):
                raise TypeError
            key, block = item
        except (TypeError, ValueError):
            what = type(item).__name__
            text = f"put_many takes (key, block) pairs or a mapping: its item {number} is {what}, not a pair"
            raise TypeError(text) from None
        pairs.append((key, block))
    return pairs


def writable_bytes(out: Any, name: str = "the buffer") -> memoryview:
    """A caller's buffer as flat writable bytes; errors call it by a name.

    Raises
    ------
    TypeError
        It is no buffer.
    ValueError
        The buffer is read-only or not C-contiguous.
    """
    if isinstance(out, CacheBlock):
        raise TypeError(f"{name} is a CacheBlock: pass one writable buffer, for the key's bytes and then the value's")
    if isinstance(out, np.ndarray):
        if out.dtype.hasobject:
            raise TypeError(f"{name} holds Python objects, not bytes")
        writable, contiguous = out.flags.writeable, out.flags.c_contiguous
    else:
        try:
            view = memoryview(out)
        except TypeError:
            raise TypeError(f"{name} is no writable buffer but {type(out).__name__}") from None
        writable, contiguous = not view.readonly, view.c_contiguous
    if not writable:
        raise ValueError(f"{name} is read-only")
    if not contiguous:
        raise ValueError(f"{name} is not C-contiguous")
    flat = flat_bytes(out)
    return flat if flat.nbytes else memoryview(bytearray())


def payload_bytes(block: Any) -> int:
    """Bytes of a block's payload."""
    return block.key.nbytes + block.value.nbytes if isinstance(block, CacheBlock) else block.nbytes


def too_small(name: str, out: memoryview, size: int) -> ValueError:
    """The error for a buffer that a block does not fit."""
    return ValueError(f"{name} has {out.nbytes} bytes, the block {size}")


def copy_payload(block: Any, out: memoryview, name: str = "the buffer") -> int:
    """Copy a block's payload to the start of `out`; bytes written.

    Raises
    ------
    ValueError
        `out` is too small; nothing was written.
    """
    parts = [flat_bytes(part) for part in ((block.key, block.value) if isinstance(block, CacheBlock) else (block,))]
    size = sum(part.nbytes for part in parts)
    if size > out.nbytes:
        raise too_small(name, out, size)
    position = 0
    for part in parts:
        out[position : position + part.nbytes] = part
        position += part.nbytes
    return size
