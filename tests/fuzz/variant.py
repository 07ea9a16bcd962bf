"""A second build of the tree beside the normal one: ``python tests/fuzz/variant.py NAME [COMMAND ...]``.

A variant lives in ``build/NAME``: a copy of the sources with extensions of its own, so that the normal build stays as
it is. Only what changed is copied and built again. The command runs inside the copy, with the variant's environment;
``python`` in it stands for this interpreter, ``pytest`` for it with the tests that can run there. Without a command
the variant is only made.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("asynckv", "benchmarks", "docs", "examples", "tests")
LEFT_OUT = {"__pycache__", ".hypothesis", ".pytest_cache"}
BUILT = (".so", ".c", ".html")

# Name: switches of setup.py.
VARIANTS = {
    "sanitize": {"ASYNCKV_SANITIZE": "address,undefined"},
    "coverage": {"ASYNCKV_DEBUG": "1"},
}

# Leaks: the interpreter never frees all it has. Large allocations: no input of a few KiB may ask for that much.
# The quarantine is small so that the growth of memory which the fuzzers look at is their input's.
SANITIZER = {
    "PYTHONMALLOC": "malloc",
    "ASAN_OPTIONS": "detect_leaks=0:quarantine_size_mb=16:allocator_may_return_null=0:max_allocation_size_mb=2048",
    "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
}

# Tests that cannot run in the sanitized build, and why.
NOT_SANITIZED = {
    "tests/unit/test_examples.py": "starts Python with an environment of its own, which lacks the sanitizer's library",
    "tests/contract/test_cache_lifecycle.py::test_a_timer_signal_at_a_kilohertz_disturbs_nothing": (
        "a thousand signals a second leave a slow interpreter no time for anything else"
    ),
    "tests/unit/test_pages.py::test_touching_makes_pages_resident": (
        "the sanitizer's allocator moves resident memory by itself"
    ),
    "tests/fault/test_churn.py": "the sanitizer's allocator moves resident memory by itself",
    "tests/contract/test_cache_messages.py::test_a_pool_that_cannot_be_mapped": (
        "leaves less address space than the sanitizer's allocator takes"
    ),
    "tests/fault/test_allocation.py::test_c_allocations_of_a_store_fail": (
        "puts an allocator of its own in front, where the sanitizer's has to be"
    ),
    "tests/unit/test_security.py::test_lengths_that_lie_take_no_memory": (
        "ends by asking for more than there is, which the sanitizer answers by an abort"
    ),
}


def copy_tree(target: Path, root: Path = ROOT) -> None:
    """Make the sources under target equal to ours; what is equal keeps its time stamp, and so its objects."""
    wanted = [path for path in root.iterdir() if path.is_file()]
    for top in COPIED:
        for folder, folders, names in os.walk(root / top):
            folders[:] = [name for name in folders if name not in LEFT_OUT]
            wanted += [Path(folder, name) for name in names if not name.endswith(BUILT)]
    kept = set()
    for source in wanted:
        copy = target / source.relative_to(root)
        kept.add(copy)
        if not copy.exists() or copy.read_bytes() != source.read_bytes():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, copy)
    for top in COPIED:
        for folder, folders, names in os.walk(target / top):
            folders[:] = [name for name in folders if name not in LEFT_OUT]
            for name in names:
                if Path(folder, name) not in kept and not name.endswith(BUILT):
                    Path(folder, name).unlink()


def build(target: Path, switches: dict[str, str]) -> None:
    """Build the extensions of a copy in place."""
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    subprocess.run(command, cwd=target, env={**os.environ, "PYTHONPATH": ".", **switches}, check=True)


def environment(name: str) -> dict[str, str]:
    """What a process of a variant needs around it."""
    found = {**os.environ, "PYTHONPATH": f".{os.pathsep}tests"}
    if name == "sanitize":
        libraries = [_library("libasan.so"), _library("libubsan.so")]
        found.update(SANITIZER, LD_PRELOAD=" ".join(libraries))
    return found


def _library(name: str) -> str:
    compiler = os.environ.get("CC", "gcc")
    shown = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    path = shown.stdout.strip()
    if not os.path.isabs(path):
        raise SystemExit(f"{compiler} has no {name}: the sanitizer's runtime is not installed")
    return path


def make(name: str) -> Path:
    """Bring a variant up to date; its folder."""
    target = ROOT / "build" / name
    target.mkdir(parents=True, exist_ok=True)
    copy_tree(target)
    build(target, VARIANTS[name])
    return target


def main() -> int:
    """Make the variant that is named and run the command that follows."""
    if len(sys.argv) < 2 or sys.argv[1] not in VARIANTS:
        raise SystemExit(f"usage: variant.py {'|'.join(VARIANTS)} [COMMAND ...]")
    name, *command = sys.argv[1:]
    target = make(name)
    if not command:
        return 0
    if command[0] == "pytest":
        left_out = [f"--deselect={test}" for test in NOT_SANITIZED] if name == "sanitize" else []
        command[:1] = ["python", "-m", "pytest", *left_out]
    if command[0] == "python":
        command[0] = sys.executable
    return subprocess.run(command, cwd=target, env=environment(name), check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
