"""What a memory hit and a put cost at 1,000 and at 1,000,000 blocks, against dict + OrderedDict.move_to_end.

Both stores hold the same random keys, built beforehand; all calls run in short slices by turns, so that a change of the
clock frequency or a noisy neighbour falls on all of them. The figure that counts is the gain: nanoseconds at the large
size minus nanoseconds at the small one, ours divided by the reference's. `--callgrind` counts instructions instead.

- get: `await cache.get(key)`; reference `d[key]; od.move_to_end(key)`
- table get: the same without the coroutine; the same reference
- put: `await cache.put(key, block)` over a key that is there; reference `d[key] = block; od.move_to_end(key)`
- put new: a new key into a full pool, the oldest block is evicted; reference with `popitem(last=False)` and `del`
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import hashlib
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter_ns
from typing import Any

from measure import finish, mix, note, table

import asynckv

BLOCK_BYTES = 60
EXTENT_BYTES = 64
GAIN_RATIO_MAX = 1.5
INSTRUCTIONS_RATIO_MAX = 1.1

KEY_KINDS: dict[str, Callable[[int], Any]] = {
    "int": mix,
    "bytes32": lambda number: hashlib.sha256(number.to_bytes(8, "little")).digest(),
}
STEADY = ("get", "table get", "put")


class Subject:
    """One store of one size, ours or the reference, with a slice of each kind of call; a slice returns nanoseconds."""

    def __init__(self, keys: list[Any]) -> None:
        self.keys = keys

    async def slice(self, what: str, keys: Sequence[Any]) -> int:
        raise NotImplementedError

    async def close(self) -> None:
        pass


class Ours(Subject):
    """asynckv without a disk."""

    cache: asynckv.Cache

    @classmethod
    async def filled(cls, keys: list[Any], *, full: bool) -> Ours:
        ours = cls(keys)
        # `full`: the pool has room for these blocks and not one more; else some to spare, so that no put evicts.
        memory = (len(keys) + (0 if full else 64)) * EXTENT_BYTES
        ours.cache = await asynckv.open("unused", memory=memory, disk=0)
        for number, key in enumerate(keys):
            assert await ours.cache.put(key, block_of(number))
        assert len(ours.cache) == len(keys)
        assert ours.cache.stats().evictions == 0
        return ours

    async def slice(self, what: str, keys: Sequence[Any]) -> int:
        if what == "get":
            get = self.cache.get
            start = perf_counter_ns()
            for key in keys:
                await get(key)
            return perf_counter_ns() - start
        if what == "table get":
            look = self.cache._table.get
            start = perf_counter_ns()
            for key in keys:
                look(key)
            return perf_counter_ns() - start
        put, block = self.cache.put, block_of(0)
        start = perf_counter_ns()
        for key in keys:
            await put(key, block)
        return perf_counter_ns() - start

    async def close(self) -> None:
        await self.cache.close()


class Reference(Subject):
    """A dict for the blocks and an OrderedDict for their order of use."""

    def __init__(self, keys: list[Any]) -> None:
        super().__init__(keys)
        self.blocks = {key: block_of(number) for number, key in enumerate(keys)}
        self.order = OrderedDict.fromkeys(keys)

    async def slice(self, what: str, keys: Sequence[Any]) -> int:
        blocks, order, block = self.blocks, self.order, block_of(0)
        touch = order.move_to_end
        if what in ("get", "table get"):
            start = perf_counter_ns()
            for key in keys:
                blocks[key]
                touch(key)
            return perf_counter_ns() - start
        if what == "put":
            start = perf_counter_ns()
            for key in keys:
                blocks[key] = block
                touch(key)
            return perf_counter_ns() - start
        start = perf_counter_ns()
        for key in keys:
            del blocks[order.popitem(last=False)[0]]
            blocks[key] = block
            order[key] = None
        return perf_counter_ns() - start


def block_of(number: int) -> bytes:
    return number.to_bytes(8, "little") + b"\x5a" * (BLOCK_BYTES - 8)


async def _alternate(
    subjects: dict[tuple[str, int], Subject], whats: Sequence[str], given: argparse.Namespace
) -> dict[tuple[str, str, int], float]:
    """Median nanoseconds a call for each (call, subject, size)."""
    draw = random.Random(1)
    times: dict[tuple[str, str, int], list[float]] = {}
    fresh = max(given.sizes) * 2
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        for round_ in range(given.rounds + 1):
            for what in whats:
                for (who, size), subject in subjects.items():
                    if what == "put new":
                        keys = [KEY_KINDS[given.keys](number) for number in range(fresh, fresh + given.slice)]
                        fresh += given.slice
                    else:
                        keys = draw.choices(subject.keys, k=given.slice)
                    spent = await subject.slice(what, keys)
                    if round_:  # the first round warms up
                        times.setdefault((what, who, size), []).append(spent / given.slice)
            note(f"round {round_} of {given.rounds}")
    finally:
        gc.enable()
        gc.unfreeze()
    return {name: statistics.median(values) for name, values in times.items()}


async def _measure(given: argparse.Namespace) -> dict[tuple[str, str, int], float]:
    keys = {size: [KEY_KINDS[given.keys](number) for number in range(size)] for size in given.sizes}
    for each in keys.values():
        random.Random(2).shuffle(each)
    result: dict[tuple[str, str, int], float] = {}
    for whats, full in ((STEADY, False), (("put new",), True)):
        subjects: dict[tuple[str, int], Subject] = {}
        for size in given.sizes:
            note(f"filling {size:,} blocks")
            subjects["asynckv", size] = await Ours.filled(keys[size], full=full)
            subjects["reference", size] = Reference(keys[size])
        result |= await _alternate(subjects, whats, given)
        for subject in subjects.values():
            await subject.close()
    return result


def _report(given: argparse.Namespace, times: dict[tuple[str, str, int], float]) -> int:
    small, large = given.sizes
    rows, calls = [], {}
    checks = {}
    for what in (*STEADY, "put new"):
        ours = [times[what, "asynckv", size] for size in given.sizes]
        reference = [times[what, "reference", size] for size in given.sizes]
        gain, reference_gain = ours[1] - ours[0], reference[1] - reference[0]
        ratio = gain / reference_gain
        rows.append((what, *ours, gain, *reference, reference_gain, ratio))
        calls[what] = {
            "ns": ours, "gain_ns": gain, "reference_ns": reference, "reference_gain_ns": reference_gain, "ratio": ratio,
        }  # fmt: skip
        checks[f"{what.replace(' ', '_')}_gain_ratio"] = ratio <= GAIN_RATIO_MAX
    heads = ["ns a call", f"ours {small:,}", f"ours {large:,}", "gain"]
    heads += [f"dict {small:,}", f"dict {large:,}", "gain", "ratio"]
    text = table(heads, rows)
    text += f"\n{given.keys} keys, median of {given.rounds} slices of {given.slice:,} calls; limit {GAIN_RATIO_MAX}"
    result = {"sizes": given.sizes, "keys": given.keys, "calls": calls, "checks": checks}
    return finish(result, text, as_json=given.json)


# -- instructions ------------------------------------------------------------------------------------------------------


async def _child(size: int, count: int, kind: str, what: str) -> None:
    """Run under callgrind: fill without counting, then count some calls."""
    keys = [KEY_KINDS[kind](number) for number in range(size)]
    ours = await Ours.filled(keys, full=False)
    chosen = random.Random(3).choices(keys, k=count)
    gc.collect()
    gc.disable()
    _counting("on")
    await ours.slice(what, chosen)
    _counting("off")
    await ours.close()


def _counting(state: str) -> None:
    subprocess.run(["callgrind_control", "-i", state, str(os.getpid())], check=True, capture_output=True)


def _instructions(given: argparse.Namespace, size: int, count: int, what: str) -> int:
    with tempfile.TemporaryDirectory() as root:
        output = Path(root) / "callgrind.out"
        command = ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={output}"]
        command += [sys.executable, __file__, "--keys", given.keys, "--child", str(size), str(count), what]
        subprocess.run(command, check=True, capture_output=True, env={**os.environ, "PYTHONHASHSEED": "0"})
        found = re.search(r"^totals: (\d+)", output.read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        raise SystemExit("callgrind counted nothing")
    return int(found[1])


def _callgrind(given: argparse.Namespace) -> int:
    rows, calls, checks = [], {}, {}
    for what in STEADY:
        each = []
        for size in given.sizes:
            note(f"callgrind: {what}, {size:,} blocks")
            base = _instructions(given, size, 0, what)
            each.append((_instructions(given, size, given.count, what) - base) / given.count)
        ratio = each[1] / each[0]
        rows.append((what, *each, ratio))
        calls[what] = {"instructions": each, "ratio": ratio}
        checks[f"{what.replace(' ', '_')}_instructions_ratio"] = ratio <= INSTRUCTIONS_RATIO_MAX
    small, large = given.sizes
    text = table(["instructions a call", f"{small:,}", f"{large:,}", "ratio"], rows)
    text += f"\n{given.keys} keys, {given.count:,} calls, less a run without calls; limit {INSTRUCTIONS_RATIO_MAX}"
    result = {"sizes": given.sizes, "keys": given.keys, "calls": calls, "checks": checks}
    return finish(result, text, as_json=given.json)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs=2, default=[1_000, 1_000_000], metavar=("SMALL", "LARGE"))
    parser.add_argument("--keys", choices=list(KEY_KINDS), default="int")
    parser.add_argument("--slice", type=int, default=20_000, help="calls in a slice")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--callgrind", action="store_true", help="count instructions (needs valgrind)")
    parser.add_argument("--count", type=int, default=20_000, help="calls that callgrind counts")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        size, count, what = given.child
        asyncio.run(_child(int(size), int(count), given.keys, what))
        return 0
    if given.callgrind:
        return _callgrind(given)
    return _report(given, asyncio.run(_measure(given)))


if __name__ == "__main__":
    raise SystemExit(main())
