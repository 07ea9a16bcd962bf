"""Forks while the ring is busy: the parent goes on unharmed, the child's calls raise, and its end harms nothing.

fork_worker.py is the parent; it makes a child for each way to end. ASYNCKV_TEST_SCALE multiplies its operations (5
gives 10,000), ASYNCKV_TEST_SEED repeats a run.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fork_worker import ENDINGS, LOOPS
from levels import scale, seed
from storekit import child_environment, ring_refusal

if ring_refusal():
    pytest.skip(f"NO RING HERE ({ring_refusal()}): forks are NOT checked with a busy ring", allow_module_level=True)

WORKER = Path(__file__).with_name("fork_worker.py")
OPERATIONS = 2000


@pytest.mark.parametrize("loop", list(LOOPS))
def test_forks_while_the_ring_is_busy(tmp_path, loop):
    command = [sys.executable, str(WORKER), str(tmp_path / "store"), "--loop", loop]
    command += ["--operations", str(int(OPERATIONS * scale())), "--seed", str(seed("forks"))]
    environment = {**child_environment(), "ASYNCKV_ENGINE": "io_uring"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["engine"] == "io_uring"
    assert found["wrong"] == []
    assert found["children"] == [-signal.SIGKILL if ending == "kill" else 0 for ending in ENDINGS], done.stderr
    assert found["disk_hits"]
    assert found["faults"] == found["stale"] == found["lost"] == found["missed_wakes"] == found["in_flight"] == 0
    if not all(found["busy"]):  # the file system ends every request at once
        pytest.skip("NOTHING WAS IN THE KERNEL: a fork beside a busy ring is NOT checked in this run")
