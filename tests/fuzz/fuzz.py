"""Runs the fuzzers: ``PYTHONPATH=.:tests python tests/fuzz/fuzz.py [TARGET ...]``.

FUZZ_SECONDS is the CPU time for each target, FUZZ_SEED repeats a run, FUZZ_INPUT executes one input of it alone. Each
target runs in a process of its own, so that one which the sanitizer stops is a finding like any other. The input of a
finding is written to ``fuzz-findings``.
"""

from __future__ import annotations

import mmap
import os
import random
import resource
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from stores import StoreTarget
from targets import (
    DescriptorTarget,
    PageTarget,
    RecordTarget,
    SegmentTarget,
    SnapshotTarget,
    Target,
    TraceTarget,
)

TARGETS: tuple[type[Target], ...] = (
    RecordTarget,
    PageTarget,
    SegmentTarget,
    SnapshotTarget,
    DescriptorTarget,
    TraceTarget,
    StoreTarget,
)
FINDINGS = Path("fuzz-findings")
GROWTH_MAX = 512 << 20  # bytes of resident memory that all inputs of a target may add, the sanitizer's included
HANG_SECONDS = 60  # for one input
CLOCK_EVERY = 16


def input_of(target: Target, seed: int, index: int) -> tuple[Any, bool]:
    """Input number index of a seed, and whether it is rightful."""
    return target.make(random.Random(f"{seed}/{target.name}/{index}"))


def execute(target: Target, seed: int, index: int) -> None:
    """Make one input and check it."""
    data, rightful = input_of(target, seed, index)
    target.check(data, rightful)


def save(target: Target, seed: int, index: int) -> Path:
    """Write an input to a file; a store to a directory."""
    data, _ = input_of(target, seed, index)
    FINDINGS.mkdir(exist_ok=True)
    path = FINDINGS / f"{target.name}-{seed}-{index}"
    if isinstance(data, dict):
        path.mkdir(exist_ok=True)
        for name, raw in data.items():
            (path / name).write_bytes(raw)
    else:
        path.write_bytes(data)
    return path


def work(kind: type[Target], seed: int, seconds: float, counter: mmap.mmap) -> int:
    """Execute inputs until so much CPU time is used up; the exit status."""
    target = kind()
    end = time.process_time() + seconds
    start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    index = 0
    while index % CLOCK_EVERY or time.process_time() < end:
        counter[:8] = index.to_bytes(8, "little")
        signal.alarm(HANG_SECONDS)
        try:
            execute(target, seed, index)
            grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10) - start
            assert grown <= GROWTH_MAX, f"memory grew by {grown} bytes"
        except Exception:
            traceback.print_exc()
            return 1
        index += 1
    signal.alarm(0)
    counter[:8] = index.to_bytes(8, "little")
    target.close()
    return 0


def fuzz(kind: type[Target], seed: int, seconds: float) -> bool:
    """Run one target in a child; whether nothing was found."""
    counter = mmap.mmap(-1, 8)
    sys.stdout.flush()
    child = os.fork()
    if not child:
        status = 1
        try:
            status = work(kind, seed, seconds, counter)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    _, status, used = os.wait4(child, 0)
    index = int.from_bytes(counter[:8], "little")
    spent = used.ru_utime + used.ru_stime
    if status == 0:
        print(
            f"{kind.name:12}{index:12,} inputs {spent:8.1f} CPU s {index / spent:10,.0f} a second   seed {seed}   ok",
            flush=True,
        )
        return True
    code = os.waitstatus_to_exitcode(status)
    how = f"stopped by signal {-code}" if code < 0 else f"exit status {code}"
    if code == -signal.SIGALRM:
        how = f"no end within {HANG_SECONDS} s"
    target = kind()
    path = save(target, seed, index)
    target.close()
    print(f"{kind.name:12}FOUND at input {index}: {how}; written to {path}")
    print(f"{'':12}repeat: FUZZ_SEED={seed} FUZZ_INPUT={index} ... tests/fuzz/fuzz.py {kind.name}", flush=True)
    return False


def main() -> int:
    """Run the targets that are named, or all."""
    names = sys.argv[1:] or [kind.name for kind in TARGETS]
    kinds = [kind for kind in TARGETS if kind.name in names]
    if len(kinds) != len(set(names)):
        raise SystemExit(f"the targets are {', '.join(kind.name for kind in TARGETS)}")
    seed = int(os.environ.get("FUZZ_SEED") or random.SystemRandom().randrange(1 << 32))
    only = os.environ.get("FUZZ_INPUT")
    if only is not None:
        for kind in kinds:
            target = kind()
            execute(target, seed, int(only))
            target.close()
        return 0
    seconds = float(os.environ.get("FUZZ_SECONDS") or 60)
    found = [kind.name for kind in kinds if not fuzz(kind, seed, seconds)]
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
