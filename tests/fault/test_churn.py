"""Stores that are opened, used and closed over and over, in event loops of their own, leave nothing in their process.

The lives are those of benchmarks/churn.py, in a process of its own: what else this one has open or in memory does not
count there. Descriptors, rings, threads, locked and pinned memory have to be what they were after the first lives, and
resident memory may grow by 4 MiB over all of them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from levels import count, tally
from storekit import child_environment, ring_refusal

CHURN = Path(__file__).parents[2] / "benchmarks" / "churn.py"
CAMPAIGN = "lives of churn"
ENGINES = ("threads", "io_uring")


@pytest.mark.parametrize("engine", ENGINES)
def test_lives_of_a_store_leave_nothing_behind(tmp_path, engine):
    if engine == "io_uring" and ring_refusal():
        pytest.skip(f"NO RING HERE ({ring_refusal()}): churn of rings is NOT checked")
    lives = count(CAMPAIGN) // len(ENGINES)
    command = [sys.executable, str(CHURN), "--lives", str(lives), "--idle", "0", "--exits", "0", "--json"]
    environment = {name: value for name, value in child_environment().items() if name != "ASYNCKV_ENGINE"}
    done = subprocess.run(
        [*command, "--engine", engine, "--dir", str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    found = json.loads(done.stdout)
    assert found["churn"]["lives"] == lives
    assert len(found["checks"]) == 6
    assert all(found["checks"].values())
    tally(CAMPAIGN, lives)
