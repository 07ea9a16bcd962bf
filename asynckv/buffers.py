"""Blocks to and from flat buffers: the payload of a block is its key's bytes, then its value's."""

from __future__ import annotations

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


def writable_bytes(out: Any) -> memoryview:
    """A caller's buffer as flat writable bytes.

    Raises
    ------
    ValueError
        The buffer is read-only or not C-contiguous.
    """
    if isinstance(out, np.ndarray):
        writable, contiguous = out.flags.writeable, out.flags.c_contiguous
    else:
        view = memoryview(out)
        writable, contiguous = not view.readonly, view.c_contiguous
    if not writable:
        raise ValueError("the buffer is read-only")
    if not contiguous:
        raise ValueError("the buffer is not C-contiguous")
    flat = flat_bytes(out)
    return flat if flat.nbytes else memoryview(bytearray())


def payload_bytes(block: Any) -> int:
    """Bytes of a block's payload."""
    return block.key.nbytes + block.value.nbytes if isinstance(block, CacheBlock) else block.nbytes


def copy_payload(block: Any, out: memoryview) -> int:
    """Copy a block's payload to the start of `out`; bytes written.

    Raises
    ------
    ValueError
        `out` is too small; nothing was written.
    """
    parts = [flat_bytes(part) for part in ((block.key, block.value) if isinstance(block, CacheBlock) else (block,))]
    size = sum(part.nbytes for part in parts)
    if size > out.nbytes:
        raise ValueError(f"the buffer has {out.nbytes} bytes, the block {size}")
    position = 0
    for part in parts:
        out[position : position + part.nbytes] = part
        position += part.nbytes
    return size
