"""Runs tests with line coverage of the Cython and Python files and holds each file against its bar.

``python tests/fuzz/variant.py coverage python tests/fuzz/lines.py [PYTEST ARGUMENTS]`` from the root; without arguments
all tests but `LEFT_OUT` are run. Prints the table; the exit status is 1 below a bar, or when a test fails.
"""

from __future__ import annotations

import fnmatch
import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import coverage

# What damaged bytes meet has the higher bar.
HIGH = 95
LOW = 90
HIGH_FILES = (
    "asynckv/_core*",
    "asynckv/_record*",
    "asynckv/_uring*",
    "asynckv/tiers/recovery.py",
    "asynckv/tiers/opening.py",
    "asynckv/tiers/scan.py",
    "asynckv/tiers/snapshot.py",
)
# All but what runs examples or looks at child processes, whose lines do not count, and what looks at the time that a
# step of the loop takes: a traced build is slow.
LEFT_OUT = (
    "tests/unit/test_examples.py",
    "tests/fault/test_kill.py",
    "tests/fault/test_ring_fork.py",
    "tests/contract/test_cache_room.py::test_one_large_put_over_many_small_blocks_does_not_stall_the_loop",
)
REPORT = "coverage.json"
LISTED = 200  # characters of the numbers of missing lines
# The head of a Cython function is no line that its tracer reports, so it can be neither covered nor missed.
HEAD = re.compile(
    r"\s*(cdef|cpdef|def)\b[^=]*\("
    r"|\s*(cdef|cpdef)\b.*\)\s*(noexcept|except\S*)?.*:$"
    r"|cdef "  # at the left margin: an object of the module, made before anything is traced
)


def run_tests(arguments: list[str]) -> int:
    """Run pytest under coverage; its exit status."""
    for source in Path("build/cython-debug/asynckv").glob("*.c"):  # where Cython's plugin looks for them
        shutil.copy(source, "asynckv")
    command = [sys.executable, "-m", "coverage"]
    subprocess.run([*command, "erase"], check=True)
    done = subprocess.run([*command, "run", "-m", "pytest", "-q", "--timeout", "900", *arguments], check=False)
    subprocess.run([*command, "combine", "--quiet"], check=True)
    return done.returncode


def bar_of(name: str) -> int:
    """Least share of lines, in percent, that has to be executed."""
    return HIGH if any(fnmatch.fnmatch(name, pattern) for pattern in HIGH_FILES) else LOW


def without_heads(name: str, lines: list[int]) -> list[int]:
    """Lines of a file, those left out that are heads of Cython functions."""
    if not name.endswith((".pyx", ".pxi")):
        return lines
    text = Path(name).read_text().splitlines()
    return [line for line in lines if not HEAD.match(text[line - 1])]


def table() -> tuple[str, list[str]]:
    """The table, and the files below their bar."""
    found = coverage.Coverage()
    found.load()
    found.json_report(outfile=REPORT)
    out = io.StringIO()
    below = []
    for name, each in sorted(json.loads(Path(REPORT).read_text())["files"].items()):
        executed, missing = (without_heads(name, each[f"{kind}_lines"]) for kind in ("executed", "missing"))
        count = len(executed) + len(missing)
        if not count:
            continue
        share = 100 * len(executed) / count
        mark = ""
        if share < bar_of(name):
            below.append(name)
            mark = "  BELOW"
        listed = ",".join(map(str, missing))
        out.write(f"{name:40}{count:6}{share:7.1f} %  >= {bar_of(name)}{mark}  {listed[:LISTED]}\n")
    return out.getvalue(), below


def main() -> int:
    """Run, print, judge."""
    status = run_tests(sys.argv[1:] or [f"--deselect={name}" for name in LEFT_OUT])
    text, below = table()
    print(text)
    if status:
        print(f"the tests ended with status {status}")
    if below:
        print(f"below their bar: {', '.join(below)}")
    return 1 if status or below else 0


if __name__ == "__main__":
    sys.exit(main())
