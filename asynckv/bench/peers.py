"""Blocks put, made durable, read cold and read warm: this store beside what could be used instead."""

from __future__ import annotations

import importlib.util
import os
import shutil
import statistics
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from asynckv.bench.contenders import CONTENDERS, Block, Contender
from asynckv.bench.figures import Row, Slice, Stopwatch
from asynckv.bench.payloads import Payloads
from asynckv.commands.output import run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asynckv.commands.output import Progress

__all__ = ["SIZES", "compare", "missing"]

# Block bytes: how much is put in a round.
SIZES = {4 << 10: 32 << 20, 64 << 10: 256 << 20, 2 << 20: 512 << 20}
ROUNDS = 3
PHASES = ("put", "cold get", "warm get")
OURS = "asynckv"
NEEDED = ("diskcache", "lmdb", "rocksdict")
_FIELDS = dict(zip(PHASES, ("put", "cold", "warm"), strict=True))
_DROP = "/proc/sys/vm/drop_caches"


def missing(names: Sequence[str] = NEEDED) -> list[str]:
    """Those of the extra ``bench``'s packages that are not installed."""
    return [name for name in names if importlib.util.find_spec(name) is None]


@dataclass
class _Played:
    put: Slice
    cold: Slice
    warm: Slice


def forget(directory: Path) -> None:
    """Drop the cached pages of a directory's files, and where root allows those of the whole machine."""
    for folder, _, names in os.walk(directory):
        for name in names:
            with suppress(OSError), open(os.path.join(folder, name), "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with suppress(OSError), open(_DROP, "w") as file:
        file.write("1")


async def _play(kind: type[Contender], directory: Path, size: int, count: int, seed: int) -> _Played:
    payloads = Payloads(size)
    order = np.random.Generator(np.random.PCG64(seed)).permutation(count).tolist()
    contender = kind(directory, size, count)
    await contender.open()
    with Stopwatch() as watch:
        await contender.put_all(range(count), payloads.make)
        await contender.sync()
    put = Slice(count, count * size, watch.seconds, watch.cpu)
    await contender.close()
    forget(directory)
    await contender.open()
    gets = []
    for _ in ("cold", "warm"):
        found: list[tuple[int, Block]] = []
        with Stopwatch() as watch:
            await contender.read(order, partial(_keep, found))
        wrong = sum(not payloads.check(key, block) for key, block in found) + count - len(found)
        gets.append(Slice(count, count * size, watch.seconds, watch.cpu, [], wrong))
    await contender.close()
    return _Played(put, *gets)


def _keep(found: list[tuple[int, Block]], key: int, block: Block) -> None:
    found.append((key, block))


def compare(
    directory: str, *, loop: str, sizes: Iterable[int] = tuple(SIZES), rounds: int = ROUNDS, progress: Progress
) -> list[Row]:
    """All contenders in turn, some rounds of each size."""
    absent = set(missing())
    kinds = {name: kind for name, kind in CONTENDERS.items() if name not in absent}
    rows = []
    for size in sizes:
        count = SIZES[size] // size
        played: dict[str, list[_Played]] = {name: [] for name in kinds}
        for number in range(rounds):
            for place, (name, kind) in enumerate(kinds.items()):
                progress.update((number + place / len(kinds)) / rounds, f"{kind.label}, {size:,} bytes")
                home = Path(directory, f"{name}-{number}")
                home.mkdir(mode=0o700)
                try:
                    played[name].append(run(_play(kind, home, size, count, number), loop))
                finally:
                    shutil.rmtree(home)
        for phase in PHASES:
            slices = {name: [getattr(each, _FIELDS[phase]) for each in played[name]] for name in kinds}
            best = max(
                (name for name in kinds if name != OURS), key=lambda name: statistics.median(_rates(slices[name]))
            )
            for name, kind in kinds.items():
                ratios = []
                if name == OURS:
                    ratios = [
                        ours / theirs for ours, theirs in zip(_rates(slices[OURS]), _rates(slices[best]), strict=True)
                    ]
                row = Row.of(slices[name], ratios, operation=f"{phase}, {kind.label}", block=size, depth=0, loop=loop)
                row.beside = f"the best of the others, {kinds[best].label}" if ratios else ""
                rows.append(row)
    return rows


def _rates(slices: Iterable[Slice]) -> list[float]:
    return [each.rate for each in slices]
