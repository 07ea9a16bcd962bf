"""Memory and disk stay within their caps while a trace is replayed: resident bytes and allocated bytes every 50 ms."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measure import allocated_bytes, finish, note, resident_bytes, table

from asynckv.config import parse_size

INTERVAL = 0.05
RESIDENT_ALLOWANCE = 96 << 20  # interpreter, numpy, index and buffers beside the pool


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace")
    parser.add_argument("--memory", default="256MiB")
    parser.add_argument("--disk", default="4GiB")
    parser.add_argument("--block-bytes", default="64KiB")
    parser.add_argument("--limit", type=int, help="requests to replay (default: all)")
    parser.add_argument("--loop", choices=["asyncio", "uvloop"], default="uvloop")
    parser.add_argument("--dir", help="where the store goes (default: a temporary directory)")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.dir) as root:
        return _measure(given, Path(root) / "store")


def _measure(given: argparse.Namespace, directory: Path) -> int:
    command = [sys.executable, "-m", "asynckv", "replay", given.trace, "--memory", given.memory, "--disk", given.disk]
    command += ["--block-bytes", given.block_bytes, "--loop", given.loop, "--dir", str(directory), "--json"]
    if given.limit:
        command += ["--limit", str(given.limit)]
    memory, disk = parse_size(given.memory, "memory"), parse_size(given.disk, "disk")
    resident_max = allocated_max = samples = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while process.poll() is None:
            resident_max = max(resident_max, resident_bytes(process.pid))
            allocated_max = max(allocated_max, allocated_bytes(directory))
            samples += 1
            if samples % 100 == 0:
                note(
                    f"{samples * INTERVAL:.0f} s: {resident_max >> 20} MiB resident, {allocated_max >> 20} MiB on disk"
                )
            time.sleep(INTERVAL)
        output = process.stdout.read()
    allocated_max = max(allocated_max, allocated_bytes(directory))
    replay = json.loads(output) if output.strip() else {}
    checks = {
        "replay_exit_status_0": process.returncode == 0,
        "resident_below_pool_plus_96_mib": 0 < resident_max < memory + RESIDENT_ALLOWANCE,
        "allocated_never_above_cap": allocated_max <= disk,
        "no_wrong_block": replay.get("wrong_blocks") == 0,
    }
    result = {
        "resident_bytes_max": resident_max,
        "resident_bytes_limit": memory + RESIDENT_ALLOWANCE,
        "allocated_bytes_max": allocated_max,
        "allocated_bytes_limit": disk,
        "samples": samples,
        "replay": replay,
        "checks": checks,
    }
    rows = [
        ("resident MiB", resident_max / 2**20, (memory + RESIDENT_ALLOWANCE) / 2**20),
        ("allocated MiB", allocated_max / 2**20, disk / 2**20),
    ]
    text = table(["", "maximum", "limit"], rows)
    text += f"\n{samples} samples, one each {INTERVAL * 1000:.0f} ms; exit status of the replay {process.returncode}\n"
    text += ", ".join(
        f"{name} {replay.get(name, '?')}"
        for name in ("requests", "memory_hits", "disk_hits", "misses", "wrong_blocks", "seconds")
    )
    return finish(result, text, as_json=given.json)


if __name__ == "__main__":
    raise SystemExit(main())
