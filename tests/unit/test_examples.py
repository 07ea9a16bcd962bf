"""Every example runs from start to end, warnings being errors."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SAYS = {
    "quickstart.py": "after a restart: 1 disk hit",
    "article_scenario.py": "disk hits          20",
    "streaming_generator.py": "identical to a run in plain memory",
}


def test_every_example_is_listed():
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(SAYS)


@pytest.mark.example
@pytest.mark.parametrize("name", sorted(SAYS))
def test_example(name, tmp_path):
    done = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLES / name)],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=tmp_path,
        env={
            "PYTHONPATH": str(EXAMPLES.parent),
            "PATH": "/usr/bin:/bin",
            "TMPDIR": str(tmp_path),
            "ASYNCKV_ENGINE": "threads",  # no warning where the kernel forbids io_uring
        },
    )
    assert done.returncode == 0, done.stderr
    assert SAYS[name] in done.stdout
    assert not done.stderr
