"""Namespace digests and prefix keys: golden vectors, an independent reading of docs/format.md, and what is refused."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import asynckv
from asynckv import Namespace, prefix_keys

FULL = Namespace(
    model="llama-3-8b", revision="main", dtype="float16", layout="NHD", block_tokens=16, tp_rank=0, tp_size=2,
    lora="sql", salt=b"tenant-7",
)  # fmt: skip

# Tokens, block_tokens, namespace; number of keys, the first and the last. The same three stand in docs/format.md.
GOLDEN = [
    (
        list(range(32)), 16, None, 2,
        "c949244d12bb8ff28dac012c7d783af9b8716e111e6dfcb00b89a7c86978abdc",
        "3b2c7142b93847f8b517e9abc54ac5adb0965e037e14a4331a2a905fc2dc7dc8",
    ),
    (
        [0, 1, 2**31, 2**63 - 1], 2, Namespace(model="\N{MICRO SIGN}"), 2,
        "2ebbe7cd70d716b87a1521bef45ee97ae28fdf71b2c85b4c62933b29e45381cc",
        "4e346007ab7333f42795e2706a4e707278ee95e9c6ff618ebcb8f9e283c784d7",
    ),
    (
        [7] * 48, 16, FULL, 3,
        "60fe10400b4b4d83f3e691baa32a39368642b3a669f509a8a45ad8dd17cbc059",
        "98d6fca7019ff17511714039c5683b18f06a2bf6d15765187e6ac612330889cb",
    ),
]  # fmt: skip


def spelled_out(tokens, block_tokens, fields):
    """Follow docs/format.md with nothing but bytes: fields are (number, type, payload) of those that are set."""

    def sha(data: bytes) -> bytes:
        return hashlib.sha256(data).digest()

    data = b"asynckv namespace 1\x00"
    for number, kind, payload in fields:
        data += bytes([number, kind]) + len(payload).to_bytes(4, "little") + payload
    key = sha(b"asynckv prefix keys 1\x00" + sha(data) + block_tokens.to_bytes(8, "little"))
    keys = []
    for start in range(0, len(tokens) // block_tokens * block_tokens, block_tokens):
        key = sha(key + b"".join(token.to_bytes(8, "little") for token in tokens[start : start + block_tokens]))
        keys.append(key)
    return keys


@pytest.mark.parametrize(("tokens", "size", "namespace", "count", "first", "last"), GOLDEN)
def test_golden_vectors(tokens, size, namespace, count, first, last):
    keys = prefix_keys(tokens, size, namespace=namespace)
    assert len(keys) == count
    assert all(type(key) is bytes and len(key) == 32 for key in keys)
    assert keys[0].hex() == first
    assert keys[-1].hex() == last


def test_golden_vectors_follow_the_written_rules():
    number = (2).to_bytes(8, "little")
    fields = [
        (1, 2, b"llama-3-8b"), (2, 2, b"main"), (3, 2, b"float16"), (4, 2, b"NHD"), (5, 1, (16).to_bytes(8, "little")),
        (6, 1, bytes(8)), (7, 1, number), (8, 2, b"sql"), (9, 3, b"tenant-7"),
    ]  # fmt: skip
    for (tokens, size, namespace, *_), spelled in zip(GOLDEN, ([], [(1, 2, b"\xc2\xb5")], fields), strict=True):
        assert prefix_keys(tokens, size, namespace=namespace) == spelled_out(tokens, size, spelled)


def test_golden_vectors_stand_in_the_documentation():
    path = Path(asynckv.__file__).parent.parent / "docs" / "format.md"
    text = path.read_text(encoding="utf-8")
    for *_, first, last in GOLDEN:
        assert first in text
        assert last in text


@pytest.mark.parametrize("seed", ["0", "1", "4242"])
def test_the_same_in_every_process(seed):
    code = (
        "from asynckv import Namespace, prefix_keys\n"
        "n = Namespace(model='m', lora=3, salt='s')\n"
        "print(n.digest().hex(), *(k.hex() for k in prefix_keys(range(64), namespace=n)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(asynckv.__file__).parent.parent,
        env={**os.environ, "PYTHONHASHSEED": seed},
    )
    namespace = Namespace(model="m", lora=3, salt="s")
    assert done.stdout.split() == [
        namespace.digest().hex(),
        *(key.hex() for key in prefix_keys(range(64), namespace=namespace)),
    ]


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int32, np.uint32, np.int64, np.uint64, ">i4", ">i8", "<u2"])
def test_arrays_and_lists_are_the_same_tokens(kind):
    tokens = list(range(100))
    array = np.array(tokens, kind)
    assert prefix_keys(array) == prefix_keys(tokens)
    assert prefix_keys(np.repeat(array, 2)[::2]) == prefix_keys(tokens)
    assert prefix_keys(list(array)) == prefix_keys(tokens)


def test_any_ordered_iterable():
    expected = prefix_keys(list(range(40)))
    assert prefix_keys(range(40)) == expected
    assert prefix_keys(tuple(range(40))) == expected
    assert prefix_keys(iter(range(40))) == expected


def test_only_full_blocks_have_keys():
    assert prefix_keys([]) == []
    assert prefix_keys(np.empty(0, np.int64)) == []
    assert prefix_keys(range(15)) == []
    assert len(prefix_keys(range(16))) == 1
    assert len(prefix_keys(range(47))) == 2
    assert len(prefix_keys(range(5), 1)) == 5


def test_equal_keys_mean_an_equal_prefix():
    one, other = list(range(64)), list(range(64))
    other[20] += 1
    keys, others = prefix_keys(one), prefix_keys(other)
    assert keys[0] == others[0]
    assert not set(keys[1:]) & set(others[1:])
    assert keys[:2] == prefix_keys(one[:32])


def test_block_sizes_and_namespaces_keep_apart():
    tokens = [5] * 64
    seen = [
        *prefix_keys(tokens, 16),
        *prefix_keys(tokens, 32),
        *prefix_keys(tokens, 16, namespace=Namespace("m")),
        *prefix_keys(tokens, 16, namespace=Namespace(revision="m")),
        *prefix_keys(tokens, 16, namespace=Namespace(block_tokens=16)),
    ]
    assert len(set(seen)) == len(seen)


@pytest.mark.parametrize(
    ("tokens", "error"),
    [
        ([1, True], TypeError),
        ([np.True_], TypeError),
        ([1.0], TypeError),
        (["1"], TypeError),
        ([None], TypeError),
        (np.ones(4, np.bool_), TypeError),
        (np.ones(4, np.float32), TypeError),
        (np.ones((2, 2), np.int64), ValueError),
        (np.array(5), ValueError),
        ("text", TypeError),
        (b"bytes", TypeError),
        ({1, 2}, TypeError),
        ({1: 2}, TypeError),
        (5, TypeError),
        ([-1], ValueError),
        (np.array([3, -1]), ValueError),
        ([2**63], ValueError),
        ([-(2**70)], ValueError),
        (np.array([2**63], np.uint64), ValueError),
    ],
)
def test_bad_tokens(tokens, error):
    with pytest.raises(error):
        prefix_keys(tokens, 1)


@pytest.mark.parametrize(
    ("size", "error"), [(0, ValueError), (-16, ValueError), (True, TypeError), (1.5, TypeError), ("16", TypeError)]
)
def test_bad_block_tokens(size, error):
    with pytest.raises(error):
        prefix_keys([1, 2], size)


def test_namespace_must_agree_on_block_tokens():
    assert prefix_keys(range(32), 8, namespace=Namespace(block_tokens=8))
    with pytest.raises(ValueError, match="block_tokens=16"):
        prefix_keys(range(32), namespace=Namespace(block_tokens=8))
    with pytest.raises(TypeError):
        prefix_keys(range(32), namespace="llama")


def test_digests_of_different_namespaces_differ():
    names = ("model", "revision", "dtype", "layout", "lora", "salt")
    spaces = [Namespace(**{name: "x"}) for name in names]
    spaces += [Namespace(**{name: 3}) for name in ("block_tokens", "tp_rank", "tp_size", "lora")]
    spaces += [Namespace(), Namespace(salt=b"x"), Namespace(salt=""), Namespace(lora="3"), Namespace("x", "x")]
    spaces += [Namespace("ab", "c"), Namespace("a", "bc")]
    digests = [space.digest() for space in spaces]
    assert all(len(digest) == 32 for digest in digests)
    assert len(set(digests)) == len(digests)


def test_namespaces_are_values():
    assert Namespace("m", tp_size=np.int32(4)) == Namespace("m", tp_size=4)
    assert hash(Namespace("m")) == hash(Namespace("m"))
    with pytest.raises(AttributeError):
        Namespace().model = "m"


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"model": 3}, TypeError),
        ({"dtype": np.float16}, TypeError),
        ({"salt": 3}, TypeError),
        ({"block_tokens": True}, TypeError),
        ({"block_tokens": "16"}, TypeError),
        ({"tp_rank": 1.0}, TypeError),
        ({"lora": 1.5}, TypeError),
        ({"block_tokens": 0}, ValueError),
        ({"tp_rank": -1}, ValueError),
        ({"tp_size": 0}, ValueError),
        ({"tp_rank": 2, "tp_size": 2}, ValueError),
        ({"lora": 2**63}, ValueError),
        ({"block_tokens": 2**63}, ValueError),
    ],
)
def test_bad_namespaces(fields, error):
    with pytest.raises(error, match=next(iter(fields))):
        Namespace(**fields)
