"""How much of each campaign is run: one setting for all of them.

ASYNCKV_TEST_LEVEL is ``commit`` (what `make test` runs), ``nightly`` or ``release``; ASYNCKV_TEST_SCALE multiplies each
count besides, and ASYNCKV_TEST_SEED repeats a run. A new campaign gets a row here and tells with `tally`
how much of it was really done, which is shown at the end of the run.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator

LEVELS = ("commit", "nightly", "release")

# Campaign: how many at each level.
COUNTS = {
    "blocks freed on other threads": (20_000, 200_000, 1_000_000),
    "clears in the middle of things": (3000, 50_000, 100_000),
    "reads over a ring whose numbers wrap": (4000, 100_000, 1_000_000),
    "openings of a new directory at once": (3, 10, 50),
    "processes that open at once": (5, 16, 16),
    "prefetches that fail at each stage": (40, 300, 1000),
    "loops one after the other": (12, 100, 2000),
    "small blocks in one store": (20_000, 100_000, 1_000_000),
    "exits": (4, 100, 500),
    "closes under readers": (12, 300, 1000),
    "pages of one large transfer": (769, 769, (2 << 18) + 1),
    "times the cap that is written": (4, 10, 10),
    "kills": (12, 500, 50_000),
    "kills of a store that is written over": (6, 300, 50_000),
    "kills at each named point": (1, 20, 50),
    "power-loss images": (300, 6000, 300_000),
    "crashes during recovery": (75, 1000, 10_000),
    "operations in exhaustive sequences": (2, 3, 3),
    "crash positions in each life of a sequence": (10, 1000, 1000),
    "seeds": (500, 20_000, 1_000_000),
    "property examples": (140, 10_000, 350_000),
    "damaged images of each kind": (60, 1200, 3000),
    "corruptions": (1500, 800_000, 800_000),
    "repaired damages": (6, 1000, 50_000),
    "planted programs": (14, 200, 1000),
    "lying lengths": (25, 200, 1000),
    "cancelled calls": (10_000, 50_000, 1_000_000),
    "lives of churn": (100, 2000, 20_000),
    "fault scenarios": (1, 1, 6),
    "strange directories": (25, 500, 100_000),
    "fuzzed inputs": (1000, 20_000, 20_000_000),
}


def level() -> str:
    """The level of this run."""
    name = os.environ.get("ASYNCKV_TEST_LEVEL", "") or LEVELS[0]
    if name not in LEVELS:
        raise ValueError(f"ASYNCKV_TEST_LEVEL={name!r}: choose one of {', '.join(LEVELS)}")
    return name


def scale() -> float:
    """How many times the level's amount of work is wanted."""
    return float(os.environ.get("ASYNCKV_TEST_SCALE", "1"))


def count(campaign: str) -> int:
    """How many of a campaign are run, at least one."""
    return max(1, round(COUNTS[campaign][LEVELS.index(level())] * scale()))


def seed(what: str = "this run") -> int:
    """A printed seed: a new one each time, or the one in ASYNCKV_TEST_SEED."""
    value = int(os.environ.get("ASYNCKV_TEST_SEED") or random.SystemRandom().randrange(1 << 32))
    print(f"{what}: ASYNCKV_TEST_SEED={value} ASYNCKV_TEST_LEVEL={level()} ASYNCKV_TEST_SCALE={scale():g}")
    return value


# What this process has done of each campaign; conftest.py adds up those of all workers of a run.
tallies: Counter[str] = Counter()


def tally(campaign: str, number: int = 1) -> None:
    """Count what was really done of a campaign, for the summary at the end of the run."""
    tallies[campaign] += number


PARTS = 8  # of a campaign that takes long: what several workers can share


def rounds(campaign: str) -> Iterator[int]:
    """Numbers for a loop that does one of a campaign each time, and is told as such."""
    for number in range(count(campaign)):
        yield number
        tally(campaign)


def parts() -> range:
    """The parts of a campaign, as tests of their own; a run at the commit level has one."""
    return range(1 if level() == "commit" else PARTS)


def span(campaign: str, part: int) -> range:
    """Which of a campaign one of its parts runs; all parts together run `count(campaign)`."""
    total, whole = count(campaign), len(parts())
    return range(total * part // whole, total * (part + 1) // whole)
