"""A short run of every fuzzer, with the same inputs each time at the lowest level; `make fuzz` is the long one."""

from __future__ import annotations

import random

import pytest
from fuzz import TARGETS, execute
from levels import count, level, seed, tally
from mutator import CHANGES, mutate, page_starts, repair
from stores import StoreTarget
from targets import PageTarget, SegmentTarget, SnapshotTarget, TraceTarget

from asynckv.tiers.layout import SegmentHeader, decode_superblock

# Of the campaign's count, for those that take longer: a store is opened twice, a trace goes through a file.
SHARES = {StoreTarget: 0.04, TraceTarget: 0.5}


@pytest.mark.parametrize("kind", TARGETS, ids=lambda kind: kind.name)
@pytest.mark.timeout(0)
def test_changed_bytes_are_refused_or_consistent(kind):
    chosen = 1 if level() == "commit" else seed(f"fuzzing of {kind.name}")
    target = kind()
    try:
        for index in range(max(1, int(count("fuzzed inputs") * SHARES.get(kind, 1)))):
            try:
                execute(target, chosen, index)
            except Exception as error:
                error.add_note(f"FUZZ_SEED={chosen} FUZZ_INPUT={index} python tests/fuzz/fuzz.py {kind.name}")
                raise
            tally("fuzzed inputs")
    finally:
        target.close()


def test_an_input_is_made_of_its_seed_and_number_alone():
    target = PageTarget()
    first = [target.make(random.Random(f"7/{n}")) for n in range(50)]
    assert first == [target.make(random.Random(f"7/{n}")) for n in range(50)]
    assert len({data for data, _ in first}) > 40


def test_repaired_inputs_reach_what_lies_behind_the_checksums():
    """Without it the fuzzers would look at nothing but checksums."""
    target, rng = SegmentTarget(), random.Random(3)
    headers = batches = 0
    for _ in range(1500):
        data = mutate(rng, target.golden, page_starts)
        repair(data, rng, target.seed)
        header = SegmentHeader.decode(bytes(data))
        headers += header is not None and header not in {SegmentHeader.decode(each) for each in target.golden}
        batches += not target.known.issuperset(target.blocks(bytes(data)))
    assert headers > 50
    assert batches > 0


def test_every_change_is_made():
    golden = [bytes(range(256)) * 64, b"AKVCHUNK" + bytes(9000)]
    for change in CHANGES:
        made = 0
        for number in range(30):
            data = bytearray(golden[0])
            change(random.Random(number), data, number * 100, golden)
            made += bytes(data) != golden[0]
        assert made > 10, change


def test_a_wrong_value_is_a_finding():
    """The oracles can fail: bytes that nobody put, under right checksums, said to be rightful."""
    snapshot = SnapshotTarget()
    data = bytearray(snapshot.golden[0])
    at = data.index(b"filler 1")
    data[at : at + 8] = b"wronger!"
    repair(data, random.Random(0), snapshot.seed)
    snapshot.check(bytes(data), False)
    with pytest.raises(AssertionError):
        snapshot.check(bytes(data), True)
    page = PageTarget()
    other = bytearray(page.golden[0])
    other[30] ^= 1
    repair(other, random.Random(0), 0)
    assert decode_superblock(bytes(other)) is not None
    with pytest.raises(AssertionError):
        page.check(bytes(other), True)
