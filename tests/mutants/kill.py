"""Does the suite notice? Applies each fault of catalogue.py to a private copy and runs tests: ``kill.py [NAME ...]``.

A mutant is killed by the first test that fails. The same tests have to pass on the copy as it is, or a kill would mean
nothing. Exit status 1: fewer than nine in ten were killed, or an entry's text is not in its file exactly once any more.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "fuzz"))

import variant
from catalogue import (
    BATCH,
    MUTANTS,
    OPENING,
    RECLAIM,
    RECORD,
    RECOVERY,
    SCAN,
    SEGMENT,
    SNAPSHOT,
    TABLE,
    WRITE,
    Mutant,
)

COPY = variant.ROOT / "build" / "mutants"
BUILT = (RECORD, BATCH, TABLE, WRITE)
SHARE_KILLED = 0.9
SECONDS = 600  # for all tests of one mutant: what hangs is noticed, too
# In this order, so that what is quick comes first; what is nearest to a mutant's file comes before all.
NEAREST = {
    RECOVERY: ("tests/unit/test_claims.py", "tests/unit/test_footers.py", "tests/unit/test_recovery.py"),
    SEGMENT: ("tests/unit/test_segment.py", "tests/unit/test_disk.py"),
    RECLAIM: ("tests/unit/test_disk.py",),
    OPENING: ("tests/unit/test_opening.py", "tests/fault/test_late_writes.py"),
    SNAPSHOT: ("tests/unit/test_snapshot.py", "tests/unit/test_recovery.py"),
    SCAN: ("tests/fuzz/test_fuzz.py", "tests/unit/test_claims.py"),
}
TESTS = (
    "tests/unit/test_record.py",
    "tests/unit/test_record_limits.py",
    "tests/unit/test_layout.py",
    "tests/unit/test_claims.py",
    "tests/unit/test_opening.py",
    "tests/fuzz/test_fuzz.py",
    "tests/unit/test_segment.py",
    "tests/unit/test_disk.py",
    "tests/unit/test_recovery.py",
    "tests/unit/test_torn_large.py",
    "tests/unit/test_footers.py",
    "tests/unit/test_snapshot.py",
    "tests/fault/test_known_losses.py",
    "tests/fault/test_late_writes.py",
    "tests/fault/test_power_loss.py",
    "tests/fault/test_damage.py",
)


def run_tests(nearest: tuple[str, ...] = ()) -> tuple[bool, str]:
    """Run the tests in the copy: whether they passed, and the first failure."""
    files = dict.fromkeys((*nearest, *present_tests()))
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *files]
    environment = {**os.environ, "PYTHONPATH": f".{os.pathsep}tests", "ASYNCKV_TEST_SEED": "1"}
    try:
        done = subprocess.run(
            command, cwd=COPY, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return False, f"no end within {SECONDS} s"
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return done.returncode == 0, found[1] if found else done.stdout.strip()[-200:]


def present_tests() -> list[str]:
    """The files of `TESTS`; a missing one is a mistake in the table."""
    missing = [name for name in TESTS if not (COPY / name).exists()]
    if missing:
        raise SystemExit(f"no such tests: {', '.join(missing)}")
    return list(TESTS)


def build_record() -> None:
    """Build the record codec of the copy."""
    variant.build(COPY, {"ASYNCKV_EXTENSIONS": "_record", "CFLAGS": "-O1"})


def applies(mutant: Mutant) -> bool:
    """Whether the entry's old text stands in its file exactly once."""
    return (COPY / mutant.file).read_text().count(mutant.old) == 1


def try_mutant(mutant: Mutant) -> tuple[bool, str]:
    """Apply, test, take back: whether it was killed, and by what."""
    path = COPY / mutant.file
    right = path.read_text()
    path.write_text(right.replace(mutant.old, mutant.new))
    try:
        if mutant.file in BUILT:
            try:
                build_record()
            except subprocess.CalledProcessError:
                raise SystemExit(f"{mutant.name} does not compile") from None
        passed, how = run_tests(NEAREST.get(mutant.file, ()))
        return not passed, how
    finally:
        path.write_text(right)


def prepare() -> None:
    """Make the copy, with our extensions, and see that it is well."""
    COPY.mkdir(parents=True, exist_ok=True)
    variant.copy_tree(COPY)
    for built in (variant.ROOT / "asynckv").glob("*.so"):
        shutil.copy2(built, COPY / "asynckv")
    passed, how = run_tests()
    if not passed:
        raise SystemExit(f"the tests fail without any mutant: {how}")


def main() -> int:
    """Try the mutants that are named, or all."""
    names = sys.argv[1:]
    chosen = [mutant for mutant in MUTANTS if not names or mutant.name in names]
    chosen.sort(key=lambda mutant: mutant.file not in BUILT)  # so that the codec is built right again once, after them
    if len(chosen) < len(names):
        raise SystemExit(f"the mutants are {', '.join(mutant.name for mutant in MUTANTS)}")
    prepare()
    killed, gone = 0, 0
    stale = False
    for mutant in chosen:
        if not applies(mutant):
            gone += 1
            print(f"GONE      {mutant.name:32} its text is not in {mutant.file} exactly once any more", flush=True)
            continue
        if stale and mutant.file not in BUILT:
            build_record()
            stale = False
        begun = time.monotonic()
        dead, how = try_mutant(mutant)
        stale |= mutant.file in BUILT
        killed += dead
        what = "killed   " if dead else "SURVIVED "
        print(
            f"{what} {mutant.name:32} {time.monotonic() - begun:5.0f} s  {how if dead else mutant.breaks}", flush=True
        )
    print(f"{killed} of {len(chosen)} killed, {gone} do not apply any more")
    return 0 if killed >= SHARE_KILLED * len(chosen) and not gone else 1


if __name__ == "__main__":
    sys.exit(main())
