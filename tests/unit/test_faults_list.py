"""docs/faults.md names tests: each has to exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {"U": "tests/unit", "C": "tests/contract", "F": "tests/fault", "A": "asynckv/testing"}


def test_every_test_that_is_named_exists():
    text = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
    names, content = 0, ""
    for match in re.finditer(r"`(?:([UCFA])/([\w.]+))?(?:::(test_\w+))?`", text):
        folder, file, name = match.groups()
        if folder:
            content = (ROOT / FOLDERS[folder] / file).read_text(encoding="utf-8")
        if name:
            assert f"def {name}(" in content, match.group()
            names += 1
    assert names > 80


def test_every_row_tells_where_it_was_seen_and_what_shows_that_it_cannot_happen():
    text = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| fault ")]
    for row in rows:
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert len(cells) == 3, row
        assert re.search(r"#\d+|CacheLib|caio", cells[1]), row
        assert all(cells), row
    assert len(rows) > 80
