"""Frozen stores: what is in `tests/data/format-N-*.zip`, and how such an image is made.

One pair of images for each version of the format: a store that was closed, and one that was killed after a flush. They
are never made again: later code has to read them as they are. After a change of the format, raise `FORMAT_VERSION` and
run ``PYTHONPATH=.:tests python tests/frozenkit.py`` for the new pair.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

import asynckv
from asynckv._record import FORMAT_VERSION

DATA = Path(__file__).with_name("data")
OTHER = asynckv.Namespace(model="another", revision="r1", block_tokens=16, tp_rank=0, tp_size=2, salt=b"tenant")
OPTIONS: dict[str, Any] = {"memory": "1MiB", "disk": "4MiB", "segment": "64KiB", "engine": "threads"}
SIZES = (0, 1, 60, 700, 4096, 5000, 32_767, 32_768)
FILLERS = 20
FILLER_BYTES = 9000


def data(number: int, version: int, size: int) -> bytes:
    """Bytes that differ by number and version everywhere, and compress well."""
    return bytes((i * (2 * number + 1) + version * 101) & 0xFF for i in range(256)) * (size // 256) + bytes(
        (i + number * 7 + version) & 0xFF for i in range(size % 256)
    )


def keys() -> list[Any]:
    """Every kind of key, the largest and the smallest included."""
    return [0, -1, 2**63 - 1, -(2**63), "a", "grüße", "k" * 1024, b"\0", b"\xff" * 32, b"x" * 1024]


def block(number: int, version: int) -> Any:
    """A block of every kind in turn."""
    size = SIZES[(number + version) % len(SIZES)]
    raw = data(number, version, size)
    kind = number % 4
    if kind == 0:
        return raw
    if kind == 1:
        return np.frombuffer(raw, np.uint8).reshape(1, -1, 1)
    if kind == 2:
        return np.frombuffer(raw[: size // 8 * 8], "<f8")
    half = size // 2
    return asynckv.CacheBlock(-number, np.frombuffer(raw[half:], np.int8), np.frombuffer(raw[: half // 4 * 4], "<f2"))


def plain(found: Any) -> Any:
    """A block as values that compare."""
    if isinstance(found, asynckv.CacheBlock):
        return (found.layer_id, plain(found.key), plain(found.value))
    if isinstance(found, np.ndarray):
        return (found.dtype.str, found.shape, found.tobytes())
    return bytes(found)


def expected() -> dict[Any, Any]:
    """What the images hold in no namespace."""
    found = {key: plain(block(number, 2 if number % 3 else 1)) for number, key in enumerate(keys())}
    found.update((("filler", number), data(number, 3, FILLER_BYTES)) for number in range(FILLERS))
    del found["a"], found["filler", 4]
    return {f"filler {key[1]}" if isinstance(key, tuple) else key: value for key, value in found.items()}


def expected_in_other() -> dict[Any, Any]:
    """What the images hold in the other namespace."""
    return {key: plain(block(number, 9)) for number, key in enumerate(keys()[:4])}


def absent() -> list[Any]:
    """Keys that were removed or cleared."""
    return ["a", "filler 4", "never"]


async def build(directory: Path) -> dict[str, bytes]:
    """Make a store and close it; the files as a kill would have left them just before."""
    async with asynckv.open(directory, namespace=OTHER, **OPTIONS) as cache:
        for number, key in enumerate(keys()):
            await cache.put(key, block(number, 5))
        await cache.flush()
        await cache.clear()
        for number, key in enumerate(keys()[:4]):
            await cache.put(key, block(number, 9))
    async with asynckv.open(directory, **OPTIONS) as cache:
        for number, key in enumerate(keys()):
            await cache.put(key, block(number, 1))
        await cache.flush()
        for number in range(FILLERS):
            await cache.put(f"filler {number}", data(number, 3, FILLER_BYTES))
        await cache.flush()
        for number, key in enumerate(keys()):
            if number % 3:
                await cache.put(key, block(number, 2))
        await cache.flush()
        await cache.delete("a")
        await cache.delete("filler 4")
        killed = files(directory)
    return killed


def files(directory: Path) -> dict[str, bytes]:
    """Name and bytes of each file, the lock left out."""
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir()) if path.name != "lock"}


def pack(target: Path, content: dict[str, bytes]) -> None:
    """Write an image."""
    with zipfile.ZipFile(target, "x", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, raw in content.items():
            archive.writestr(zipfile.ZipInfo(name), raw, zipfile.ZIP_DEFLATED)


def unpack(image: Path, directory: Path) -> Path:
    """Make a directory of an image."""
    directory.mkdir(mode=0o700)
    with zipfile.ZipFile(image) as archive:
        for name in archive.namelist():
            path = directory / name
            path.touch(mode=0o600)
            path.write_bytes(archive.read(name))
    return directory


def main() -> None:
    """Make the pair of this version."""
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch, "store")
        killed = asyncio.run(build(directory))
        DATA.mkdir(exist_ok=True)
        for kind, content in (("killed", killed), ("closed", files(directory))):
            target = DATA / f"format-{FORMAT_VERSION}-{kind}.zip"
            pack(target, content)
            sys.stdout.write(f"{target.name}: {len(content)} files, {target.stat().st_size} bytes\n")


if __name__ == "__main__":
    main()
