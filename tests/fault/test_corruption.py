"""Every byte of a golden store, damaged in ten ways: the store opens, nothing is wrong, and little is lost.

The store has every kind of record: blocks of all kinds and sizes, overwritten and deleted ones, a clear. It is there

- as a clean close leaves it, sealed, with an index snapshot,
- as a kill leaves it after a flush, unsealed; with fewer samples,
- as a power loss takes the claim of that, a recovery seals what it finds, and a kill comes before the file is cut; with
  fewer samples.

A damaged byte may cost the block whose bytes it is one of; damage of anything else costs nothing, because all else is
on disk twice. At level commit a sample of the bytes is damaged.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from levels import parts, seed, span, tally
from simkit import Simulation

import asynckv
from asynckv.testing import MemoryDisk
from asynckv.testing.values import block_of, key_of, payload
from asynckv.tiers.layout import CLAIM_AT, PAGE

SIZES = (40, 60, 700, 4096)
KEYS = range(10)
OPTIONS = {"memory": 96 << 10, "disk": 1 << 20, "segment": 128 << 10, "direct": False}
GOLDEN_BYTES = range(64 << 10, 80 << 10)
SAME_SIZE = len(SIZES)  # versions of one key that differ by this have equal sizes
WAYS = [*(lambda old, bit=bit: old ^ 1 << bit for bit in range(8)), lambda old: 0x00, lambda old: 0xFF]

Files = dict[str, bytes]


async def _build(simulation: Simulation, kind: str) -> tuple[Files, dict[int, int | None]]:
    disk = MemoryDisk()
    expected: dict[int, int | None] = dict.fromkeys(KEYS)

    async def put(cache: asynckv.Cache, index: int, version: int) -> None:
        assert await cache.put(key_of(index), block_of(index, version, SIZES))
        expected[index] = version

    cache = await simulation.open(disk)
    await put(cache, 8, 1)
    await cache.clear()
    expected.update(dict.fromkeys(KEYS))
    for index in range(7):
        await put(cache, index, 1)
    await cache.flush()
    for index in (0, 1, 6, 7):
        await put(cache, index, 1 + SAME_SIZE)
    await asyncio.gather(cache.flush(), cache.delete(key_of(4)))
    expected[4] = None
    killed = disk.content()
    await cache.close()
    if kind == "closed":
        return disk.content(), expected
    return killed if kind == "killed" else await _sealed(simulation, killed), expected


async def _sealed(simulation: Simulation, killed: Files) -> Files:
    """A recovery of these files that found no claim, killed after it wrote footer and seal."""
    (name,) = (each for each in killed if each.endswith(".seg"))
    content = killed[name]
    torn = content[:CLAIM_AT] + bytes(PAGE) + content[CLAIM_AT + PAGE :]
    disk = MemoryDisk({**killed, name: bytearray(torn)})
    cache = await simulation.open(disk)
    await simulation.values(cache, KEYS)  # some are not there, which is known when all is recovered
    files = disk.content()
    await cache.close()
    assert len(files[name]) < len(content), "it was sealed"
    files[name] += content[len(files[name]) :]
    return files


def _owner(files: Files, expected: dict[int, int | None]) -> dict[str, dict[int, int]]:
    """The key whose block each byte of a file is part of."""
    owners: dict[str, dict[int, int]] = {name: {} for name in files}
    for index, version in expected.items():
        if version is None:
            continue
        data = payload(block_of(index, version, SIZES))
        for name, content in files.items():
            at = content.find(data)
            if at >= 0:
                owners[name].update(dict.fromkeys(range(at, at + len(data)), index))
    return owners


def _damages(files: Files, part: int, most: int) -> Iterator[tuple[str, int, int]]:
    """File, offset and new value: some of those that are this part's, drawn from all over the files."""
    places = [(name, at) for name, content in sorted(files.items()) for at in range(len(content)) if name != "spare"]
    mine = range(part, len(places) * len(WAYS), len(parts()))
    for number in random.Random(seed("damages")).sample(mine, min(most, len(mine))):
        name, at = places[number // len(WAYS)]
        yield name, at, WAYS[number % len(WAYS)](files[name][at])


@pytest.mark.parametrize("part", parts())
@pytest.mark.parametrize("kind", ["closed", "killed", "sealed"])
def test_every_byte(tmp_path: Path, kind: str, part: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "asynckv")  # each damage is told of
    simulation = Simulation(tmp_path / "kv", SIZES, **OPTIONS)
    files, expected = simulation.run(_build(simulation, kind))
    assert kind != "closed" or sum(map(len, files.values())) in GOLDEN_BYTES
    assert simulation.look(files, KEYS) == expected
    owners = _owner(files, expected)
    tried = lost = 0
    most = len(span("corruptions", part)) // (1 if kind == "closed" else 10)
    for name, at, value in _damages(files, part, most):
        if value == files[name][at]:
            continue
        damaged = bytearray(files[name])
        damaged[at] = value
        where = f"{name}[{at}] {files[name][at]:#04x} -> {value:#04x}"
        found = simulation.look({**files, name: damaged}, KEYS)
        tried += 1
        for index, version in found.items():
            if version == expected[index]:
                continue
            assert version is None, f"{where}: key {index} has version {version}, not {expected[index]}"
            assert owners[name].get(at) == index, f"{where}: key {index} is lost, which is not there"
            lost += 1
    tally("corruptions", tried)
    print(f"{tried} damages, {lost} blocks lost")
