"""Every example runs from start to end, warnings being errors; so do those in docs/testing.md."""

import re
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
    done = run(tmp_path, EXAMPLES / name)
    assert SAYS[name] in done.stdout
    assert not done.stderr


@pytest.mark.example
def test_examples_in_the_documentation(tmp_path):
    text = (EXAMPLES.parent / "docs" / "testing.md").read_text()
    simulation, faults = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert re.fullmatch(r"[0-9a-f]{64} \d+ \d+ \d+\n", run(tmp_path, "-c", simulation).stdout)
    assert "('write', 'error'): 1" in run(tmp_path, "-c", faults).stdout


def run(folder, *program):
    done = subprocess.run(
        [sys.executable, "-W", "error", *map(str, program)],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=folder,
        env={
            "PYTHONPATH": str(EXAMPLES.parent),
            "PATH": "/usr/bin:/bin",
            "TMPDIR": str(folder),
            "ASYNCKV_ENGINE": "threads",  # no warning where the kernel forbids io_uring
        },
    )
    assert done.returncode == 0, done.stderr
    return done
