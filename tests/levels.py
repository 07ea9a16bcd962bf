"""How much of each campaign is run: one setting for all of them.

ASYNCKV_TEST_LEVEL is ``commit`` (what `make test` runs), ``nightly`` or ``release``; ASYNCKV_TEST_SCALE multiplies each
count besides, and ASYNCKV_TEST_SEED repeats a run. A new campaign gets a row here and nothing else.
"""

from __future__ import annotations

import os
import random

LEVELS = ("commit", "nightly", "release")

# Campaign: how many at each level.
COUNTS = {
    "kills": (12, 1400, 50_000),
    "kills of a store that is written over": (6, 700, 50_000),
    "kills at each named point": (1, 20, 50),
    "power-loss images": (300, 6000, 300_000),
    "crashes during recovery": (75, 1000, 10_000),
    "operations in exhaustive sequences": (2, 3, 3),
    "seeds": (500, 20_000, 1_000_000),
    "property examples": (40, 3400, 100_000),
    "corruptions": (1500, 655_360, 2_600_000),
    "cancelled calls": (200, 10_000, 100_000),
    "lives of churn": (200, 2000, 20_000),
    "fault scenarios": (1, 6, 6),
    "fuzzed inputs": (1000, 200_000, 20_000_000),
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
