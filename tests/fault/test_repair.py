"""`verify` says what is damaged, and `--repair` makes it whole without an older value, a deleted one or a loss.

The stores and damages are those of `test_damage`. After a repair a second look finds nothing, and the store gives
exactly what a quiet opening of the damaged files would have given.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable, Iterator

import pytest
from levels import count, seed, tally
from test_damage import PAGE, Golden, Image, Lab, both, lab, pages, patched, place, segments, take

import asynckv
from asynckv.tiers import verify_directory
from asynckv.tiers.repair import repair_directory

__all__ = ["lab"]  # the fixture


def damages(golden: Golden, draw: random.Random, number: int) -> Iterator[tuple[str, Image]]:
    """So many damaged images, of every kind in turn."""
    image = golden.image
    places = pages(image)
    names = segments(image)
    whole: list[tuple[str, Image]] = [
        (f"{name} removed", {k: v for k, v in image.items() if k != name}) for name in image
    ]
    whole += [(f"{name} zeroed", {**image, name: bytes(len(image[name]))}) for name in names]
    whole += [(f"{name} is noise", {**image, name: draw.randbytes(len(image[name]))}) for name in names]
    whole += [(f"{a} in the place of {b}", {**image, b: image[a]}) for a in names for b in names if a != b]
    draw.shuffle(whole)
    for index in range(number):
        name, page = draw.choice(places)
        data = image[name]
        size = min(PAGE, len(data) - page)
        kind = index % 5
        if kind == 0:
            at = page + draw.randrange(size)
            yield f"{name}[{at}] flipped", patched(image, name, at, bytes([data[at] ^ 1 << draw.randrange(8)]))
        elif kind == 1:
            yield f"{name}[{page}] zeroed", patched(image, name, page, bytes(size))
        elif kind == 2:
            at = page + draw.randrange(size)
            yield f"{name} cut to {at}", {**image, name: data[:at]}
        elif kind == 3 and whole:
            yield whole.pop()
        else:
            other, second = draw.choice(places)
            both_bad = patched(image, name, page, draw.randbytes(size))
            if other == name:
                both_bad = patched(both_bad, name, second, bytes(min(PAGE, len(data) - second)))
            yield f"{name}[{page}] noise, {other}[{second}] too", both_bad


@both
def test_what_a_repair_leaves(lab: Lab, clean: bool) -> None:
    draw = random.Random(seed())
    golden = lab.golden(clean=clean)
    problems, repaired = [], 0
    for what, image in damages(golden, draw, count("repaired damages")):
        place(lab.directory, image)
        try:
            report = verify_directory(lab.directory)
        except asynckv.CorruptStoreError:
            assert not segments(image)
            continue
        strict = lab.strict_raises(image)
        quiet = lab.probe(image, golden.expected)
        if report.ok:
            if quiet.lost or strict:
                problems.append(f"{what}: verify sees nothing; lost {quiet.lost}, strict raises {strict}")
            continue
        place(lab.directory, image)
        result = repair_directory(lab.directory)
        repaired += 1
        if not result.after.ok:
            problems.append(f"{what}: left after the repair: {result.after.all_damage}")
        mended = take(lab.directory)
        if lab.strict_raises(mended):
            problems.append(f"{what}: strict raises after the repair")
        found = lab.probe(mended, golden.expected)
        problems += [f"{what}, after its repair: {each}" for each in found.problems]
        if found.lost > quiet.lost:
            problems.append(f"{what}: {found.lost} blocks lost, not {quiet.lost}")
    tally("repaired damages", repaired)
    assert not problems, f"{len(problems)} problems, first " + "; ".join(problems[:6])
    assert repaired


class CutShortError(Exception):
    """Stands for the end of the process."""


@contextlib.contextmanager
def ends_at(nth: int) -> Iterator[None]:
    """The process "ends" in place of its nth rename, removal or sync."""
    left = nth

    def instead(real: Callable[..., None]) -> Callable[..., None]:
        def step(*args: object, **options: object) -> None:
            nonlocal left
            left -= 1
            if left <= 0:
                raise CutShortError
            real(*args, **options)

        return step

    with pytest.MonkeyPatch.context() as patch:
        for name in ("rename", "unlink", "fsync"):
            patch.setattr(os, name, instead(getattr(os, name)))
        yield


@both
def test_a_repair_that_is_cut_short(lab: Lab, clean: bool) -> None:
    """At each of its renames, removals and syncs: what is there then gives no wrong block, and can be repaired."""
    golden = lab.golden(clean=clean)
    image = golden.image
    for name in random.Random(seed()).sample(segments(image), 3):  # somewhere in the payloads, most of the time
        image = patched(image, name, 4 * PAGE, bytes(b ^ 1 for b in image[name][4 * PAGE : 4 * PAGE + 8]))
    quiet = lab.probe(image, golden.expected)
    for nth in range(1, 60):
        place(lab.directory, image)
        try:
            with ends_at(nth):
                repair_directory(lab.directory)
            done = True
        except CutShortError:
            done = False
        found = lab.probe(take(lab.directory), golden.expected)
        assert not found.problems, nth
        assert found.lost <= quiet.lost
        if done:
            break
        assert repair_directory(lab.directory).after.ok
    assert done
    assert nth > 3
