"""The faults of the catalogue still fit the sources, so that a run of kill.py tries all of them."""

from pathlib import Path

from catalogue import MUTANTS

ROOT = Path(__file__).resolve().parents[2]


def test_every_fault_fits_its_file_once():
    assert [mutant.name for mutant in MUTANTS if (ROOT / mutant.file).read_text().count(mutant.old) != 1] == []
