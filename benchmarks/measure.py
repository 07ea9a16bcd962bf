"""What the benchmark scripts share: memory and disk gauges, tables, JSON, and the machine's description."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from asynckv.backends import probes


def resident_bytes(pid: int | str = "self") -> int:
    """VmRSS of a process, 0 when it is gone (proc(5))."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return 0
    for line in text.splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


def resident_in_mapping(size: int) -> int:
    """Resident bytes of this process's mappings of exactly this size, such as a pool (proc(5), smaps)."""
    total = here = 0
    for line in Path("/proc/self/smaps").read_text(encoding="ascii", errors="replace").splitlines():
        name, _, rest = line.partition(":")
        if name == "Size":
            here = int(rest.split()[0]) * 1024
        elif name == "Rss" and here == size:
            total += int(rest.split()[0]) * 1024
    return total


def allocated_bytes(directory: str | os.PathLike[str]) -> int:
    """Bytes that the file system has allocated for the files of a directory; a file that is renamed counts once."""
    files: dict[tuple[int, int], int] = {}
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                try:
                    found = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                files[found.st_dev, found.st_ino] = found.st_blocks * 512
    except FileNotFoundError:
        return 0
    return sum(files.values())


def drop_page_cache(directory: str | os.PathLike[str]) -> None:
    """Ask the kernel to forget the cached pages of a directory's files, so that the next read is a cold one."""
    for path in Path(directory).iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def mix(number: int) -> int:
    """A number to a pseudo-random signed 64-bit one, one to one. Source: splitmix64 (Steele, Lea, Flood 2014)."""
    mask = (1 << 64) - 1
    z = (number + 0x9E3779B97F4A7C15) & mask
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
    return ((z ^ (z >> 31)) & mask) - (1 << 63)


def file_system(path: str | os.PathLike[str]) -> str:
    """Type of the file system that a path is on."""
    return probes.file_system(os.fspath(path)).kind


def status_value(name: str, pid: int | str = "self") -> int:
    """A number of /proc/PID/status: kB where it has a unit (proc_pid_status(5))."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    raise KeyError(name)


def machine() -> dict[str, Any]:
    """The machine that the figures belong to."""
    return {
        "cpu": probes.cpu_name(),
        "cpus": os.cpu_count(),
        "kernel": probes.kernel_release(),
        "python": platform.python_version(),
    }


def table(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Rows under heads, first column to the left, the others to the right."""
    cells = [list(heads), *([_text(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(heads))]
    lines = []
    for row in cells:
        first, *rest = (cell.ljust(width) if not at else cell.rjust(width)
                        for at, (cell, width) in enumerate(zip(row, widths, strict=True)))  # fmt: skip
        lines.append("  ".join([first, *rest]).rstrip())
    lines.insert(1, "-" * len(lines[0]))
    return "\n".join(lines)


def _text(cell: Any) -> str:
    if isinstance(cell, bool):
        return "yes" if cell else "NO"
    if isinstance(cell, float):
        return f"{cell:,.3f}" if abs(cell) < 10 else f"{cell:,.1f}"
    return f"{cell:,}" if isinstance(cell, int) else str(cell)


def finish(result: dict[str, Any], text: str, *, as_json: bool) -> int:
    """Print a result as one JSON object or as text; exit status 1 when one of its checks failed."""
    result = {**result, "machine": machine()}
    print(json.dumps(result) if as_json else text)
    failed = [name for name, good in result.get("checks", {}).items() if not good]
    if failed:
        print("checks that failed: " + ", ".join(failed), file=sys.stderr)
    return 1 if failed else 0


def note(text: str) -> None:
    """Progress, only on a terminal."""
    if sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)
