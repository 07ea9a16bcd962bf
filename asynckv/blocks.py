"""Frozen values without I/O: blocks, namespaces and the keys of a prompt's prefix.

The bytes that are hashed here are part of the disk format and of other programs' keys: docs/format.md spells them out,
three golden vectors in the tests pin them.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, fields
from hashlib import sha256
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from asynckv._core import CacheBlock

__all__ = ["CacheBlock", "Namespace", "namespace_digest", "prefix_keys"]

_NAMESPACE_TAG = b"asynckv namespace 1\0"
_PREFIX_TAG = b"asynckv prefix keys 1\0"
_TYPE_INT, _TYPE_STR, _TYPE_BYTES = 1, 2, 3
_FIELD = struct.Struct("<BBI")  # field number, type, length of what follows
_INT64 = struct.Struct("<q")
_INT64_MAX = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Namespace:
    """What blocks must share to be of use to each other; all of it optional.

    Blocks put under one namespace are never returned under another. Name everything that changes the bytes of a block:
    two programs that say the same share a store from one run to the next.

    Parameters
    ----------
    model, revision, dtype, layout
        Free text: model name, its revision, the element type of the blocks, and how tokens, heads and layers lie in
        them.
    block_tokens
        Tokens in one block, at least 1.
    tp_rank, tp_size
        Tensor-parallel position and width, for blocks that hold a share of the heads.
    lora
        Name or number of an adapter.
    salt
        Text or bytes that keep tenants apart.
    """

    model: str | None = None
    revision: str | None = None
    dtype: str | None = None
    layout: str | None = None
    block_tokens: int | None = None
    tp_rank: int | None = None
    tp_size: int | None = None
    lora: str | int | None = None
    salt: str | bytes | None = None

    def __post_init__(self) -> None:
        for name, types in _FIELD_TYPES.items():
            value = getattr(self, name)
            if value is None:
                continue
            if int in types and not isinstance(value, (bool, np.bool_, str)):
                try:
                    value = operator.index(value)
                except TypeError:
                    pass
                else:
                    object.__setattr__(self, name, value)
            if isinstance(value, bool) or not isinstance(value, types):
                wanted = " or ".join(each.__name__ for each in types)
                raise TypeError(f"Namespace {name} is {wanted}, not {type(value).__name__}")
        for name, least in (("block_tokens", 1), ("tp_rank", 0), ("tp_size", 1)):
            value = getattr(self, name)
            if value is not None and not least <= value <= _INT64_MAX:
                raise ValueError(f"Namespace {name}={value}: has to be {least} or more, and below 2**63")
        if self.tp_rank is not None and self.tp_size is not None and self.tp_rank >= self.tp_size:
            raise ValueError(f"Namespace tp_rank={self.tp_rank} is not below tp_size={self.tp_size}")
        if isinstance(self.lora, int) and not -(2**63) <= self.lora <= _INT64_MAX:
            raise ValueError("Namespace lora: a number has to fit 64 bits")

    def digest(self) -> bytes:
        """Return the 32 bytes that stand for this namespace on disk and in prefix keys.

        SHA-256 over a tag and, for each field that is not None, its number, type, length and bytes.
        Source: docs/format.md, "Prefix keys".
        """
        data = bytearray(_NAMESPACE_TAG)
        for number, field in enumerate(fields(self), 1):
            value = getattr(self, field.name)
            if value is None:
                continue
            if isinstance(value, int):
                kind, payload = _TYPE_INT, _INT64.pack(value)
            elif isinstance(value, str):
                kind, payload = _TYPE_STR, value.encode("utf-8", "surrogatepass")
            else:
                kind, payload = _TYPE_BYTES, value
            data += _FIELD.pack(number, kind, len(payload))
            data += payload
        return sha256(data).digest()


_FIELD_TYPES: dict[str, tuple[type, ...]] = {
    "model": (str,),
    "revision": (str,),
    "dtype": (str,),
    "layout": (str,),
    "block_tokens": (int,),
    "tp_rank": (int,),
    "tp_size": (int,),
    "lora": (str, int),
    "salt": (str, bytes),
}


def namespace_digest(namespace: Namespace | None) -> bytes:
    """Return the digest of a namespace; None is one too, the same as a Namespace that says nothing."""
    return (Namespace() if namespace is None else namespace).digest()


def prefix_keys(
    tokens: Iterable[SupportsIndex] | npt.NDArray[np.integer[Any]],
    block_tokens: int = 16,
    *,
    namespace: Namespace | None = None,
) -> list[bytes]:
    """Return one 32-byte key for each full block of a prompt; equal keys mean an equal prefix up to that block's end.

    A key is SHA-256 over the key before it and the block's tokens, so one key names a block and everything in front of
    it. The same on every machine, process and Python version. Tokens after the last full block get no key.
    Source: docs/format.md, "Prefix keys".

    Parameters
    ----------
    tokens
        Token numbers, zero or more each: any ordered iterable of ints, or an integer array of one dimension.
    block_tokens
        Tokens in one block.
    namespace
        Mixed into every key.

    Returns
    -------
    list of bytes
        ``len(tokens) // block_tokens`` keys.

    Raises
    ------
    TypeError
        A token is not an int (a bool is not one).
    ValueError
        A token is negative or does not fit 64 bits, the array has another number of dimensions, or the namespace names
        another ``block_tokens``.
    """
    size = _block_tokens(block_tokens, namespace)
    data = _token_bytes(tokens)
    step = 8 * size
    parent = sha256(_PREFIX_TAG + namespace_digest(namespace) + _INT64.pack(size)).digest()
    keys = []
    for start in range(0, len(data) - step + 1, step):
        state = sha256(parent)
        state.update(data[start : start + step])
        parent = state.digest()
        keys.append(parent)
    return keys


def _block_tokens(block_tokens: object, namespace: Namespace | None) -> int:
    if isinstance(block_tokens, (bool, np.bool_)):
        raise TypeError("block_tokens is an int, not bool")
    try:
        size = operator.index(block_tokens)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"block_tokens is an int, not {type(block_tokens).__name__}") from None
    if not 1 <= size < 2**31:
        raise ValueError(f"block_tokens={size}: has to be 1 or more, and below 2**31")
    if namespace is not None:
        if not isinstance(namespace, Namespace):
            raise TypeError(f"namespace is a Namespace or None, not {type(namespace).__name__}")
        if namespace.block_tokens is not None and namespace.block_tokens != size:
            raise ValueError(f"block_tokens={size}, but the namespace says block_tokens={namespace.block_tokens}")
    return size


def _token_bytes(tokens: object) -> memoryview:
    """Return the tokens as the bytes of an int64 little-endian array."""
    if isinstance(tokens, (str, bytes, bytearray, memoryview, Set, Mapping)):
        raise TypeError(f"tokens are an ordered iterable of ints or an integer array, not {type(tokens).__name__}")
    if isinstance(tokens, np.ndarray):
        if tokens.dtype.kind not in "iu":
            raise TypeError(f"tokens are an integer array, not one of {tokens.dtype}")
        if tokens.ndim != 1:
            raise ValueError(f"tokens are an array of one dimension, not {tokens.ndim}")
        if tokens.size and tokens.dtype == np.uint64 and int(tokens.max()) > _INT64_MAX:
            raise ValueError("a token does not fit 64 bits with a sign")
        array = np.ascontiguousarray(tokens, dtype="<i8")
    else:
        array = _token_array(tokens)
    if array.size and int(array.min()) < 0:
        raise ValueError("a token is negative")
    return array.data.cast("B") if array.size else memoryview(b"")


def _token_array(tokens: object) -> npt.NDArray[np.int64]:
    try:
        values = list(tokens)  # type: ignore[call-overload]
    except TypeError:
        raise TypeError(f"tokens are an ordered iterable of ints, not {type(tokens).__name__}") from None
    # numpy would take a bool or a float for a number: look at the types first, all at once.
    types = set(map(type, values))
    if types - {int}:
        for each in types:
            if issubclass(each, (bool, np.bool_)) or not hasattr(each, "__index__"):
                raise TypeError(f"a token is an int, not {each.__name__}")
        values = [operator.index(value) for value in values]
    try:
        return np.array(values, dtype="<i8")
    except OverflowError:
        raise ValueError("a token does not fit 64 bits with a sign") from None
