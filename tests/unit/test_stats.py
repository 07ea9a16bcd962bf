"""Stats: exactly the contract's fields, frozen, readable."""

import dataclasses
import json

import pytest

from asynckv.stats import Stats

CONTRACT = """
memory_hits, disk_hits, misses, no_room, puts, rejected_puts, evictions, spilled_blocks, spilled_bytes, loaded_blocks,
loaded_bytes, dropped_blocks, corrupt_blocks, io_errors, io_timeouts, memory_blocks, memory_used, memory_free,
memory_quarantined, memory_capacity, pinned_blocks, pinned_bytes, disk_blocks, disk_used, disk_live, disk_capacity,
disk_bytes_written, disk_state, recovering, reads_in_flight, writes_in_flight, disk_load_seconds_mean,
disk_load_seconds_p50, disk_load_seconds_p99, disk_load_seconds_max, engine, direct
"""


def test_fields_are_the_contracts():
    wanted = [name.strip() for name in CONTRACT.replace("\n", " ").split(",")]
    assert [field.name for field in dataclasses.fields(Stats)] == wanted


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Stats().puts = 1  # type: ignore[misc]


def test_hit_ratio():
    assert Stats().hit_ratio == 0.0
    assert Stats(memory_hits=2, disk_hits=1, misses=1).hit_ratio == 0.75
    assert Stats(memory_hits=1, no_room=5).hit_ratio == 1.0


def test_as_dict_is_json():
    values = json.loads(json.dumps(Stats(puts=3, memory_hits=1).as_dict()))
    assert values["puts"] == 3
    assert values["hit_ratio"] == 1.0
    assert set(values) == {field.name for field in dataclasses.fields(Stats)} | {"hit_ratio"}


def test_str_shows_every_value_once():
    text = str(Stats(puts=1234567, disk_load_seconds_p50=0.00012, direct=True, engine="threads", disk_state="ok"))
    names = [line.split()[0] for line in text.splitlines() if line.startswith("  ")]
    assert sorted(names) == sorted(Stats().as_dict())
    assert "1,234,567" in text
    assert "120.0 us" in text
    assert "threads" in text
