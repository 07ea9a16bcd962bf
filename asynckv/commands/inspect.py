"""``asynckv stats``, ``inspect``, ``verify``: what lies in a store directory, and whether every byte of it is well."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from asynckv.commands.output import (
    FAILED,
    OK,
    Progress,
    UsageError,
    about,
    path,
    plural,
    table,
    write,
    write_json,
)
from asynckv.config import format_size
from asynckv.errors import CorruptStoreError
from asynckv.tiers.inspect import inspect_directory, verify_directory
from asynckv.tiers.repair import repair_directory
from asynckv.tiers.report import LIVE, describe, key_of_wire

if TYPE_CHECKING:
    from asynckv.tiers.repair import Repair
    from asynckv.tiers.report import DirectoryReport, LostBlock, SegmentReport

__all__ = ["add_parser"]

_SHARED = """path store_id allocated snapshot spare_bytes verified_blocks verified_bytes corrupt_blocks damage
records live_blocks live_bytes dead_bytes all_damage ok"""
SHOWN = 20  # of each kind of line that may be there by the thousand


def add_parser(commands: Any) -> None:
    """Add ``stats``, ``inspect`` and ``verify`` to the command line."""
    parsers = {}
    for name, command, text in (
        ("stats", stats, "describe what lies in a store directory, without locking or changing it"),
        (
            "inspect",
            inspect,
            "the same segment by segment, with namespaces and shapes of blocks; a store may be in use",
        ),
        ("verify", verify, "read every record and block of a store that nobody has open; damage is exit status 1"),
    ):
        parser = parsers[name] = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        parser.add_argument("dir", type=path, metavar="DIR", help="the store directory")
        parser.add_argument("--json", action="store_true", help="print one JSON object")
        parser.set_defaults(command=command)
    parsers["inspect"].add_argument("--keys", action="store_true", help="list the keys of all live blocks")
    parsers["verify"].add_argument("--keys", action="store_true", help="show keys themselves, not digests of them")
    parsers["verify"].add_argument(
        "--repair",
        action="store_true",
        help="drop what is damaged, durably; everything else is kept, and no older block comes back",
    )


def stats(arguments: argparse.Namespace) -> int:
    """Run ``asynckv stats``."""
    report = _usable(inspect_directory, arguments.dir)
    if arguments.json:
        write_json(_values(report) | {"verified": False})
    else:
        write(f"statistics of {report.path}")
        write(table(_rows(report)))
        _some([f"DAMAGE: {text}" for text in report.all_damage], "damaged place")
    return OK


# -- inspect ---------------------------------------------------------------------------------------------------------


def inspect(arguments: argparse.Namespace) -> int:
    """Run ``asynckv inspect``."""
    report = _usable(inspect_directory, arguments.dir)
    now = time.time()
    namespaces, shapes = _namespaces(report), _shapes(report)
    if arguments.json:
        segments = [
            dataclasses.asdict(each) | {"dead_bytes": each.dead_bytes, "age_seconds": max(now - each.modified, 0.0)}
            for each in report.segments
        ]
        values = _values(report) | {"segments": segments, "namespaces": namespaces, "shapes": shapes}
        write_json(values | ({"keys": _keys(report)} if arguments.keys else {}))
        return OK
    write(f"store in {report.path}")
    write(table(_rows(report)))
    write("")
    head = ("segment", "state", "namespace", "size", "live", "dead", "records", "age")
    _columns([head, *(_segment_row(each, now) for each in report.segments)])
    write("")
    rows = [(each["namespace"], f"{each['blocks']:,}", format_size(each["bytes"])) for each in namespaces]
    _columns([("namespace", "blocks", "bytes"), *rows])
    write("")
    lines = [(each["kind"], each["dtype"], each["shape"], f"{each['blocks']:,}", format_size(each["bytes"]))
            for each in shapes[:SHOWN]]  # fmt: skip
    _columns([("kind", "dtype", "shape", "blocks", "bytes"), *lines])
    if len(shapes) > SHOWN:
        write(f"  ... and {plural(len(shapes) - SHOWN, 'more shape')}")
    _some([f"DAMAGE: {text}" for text in report.all_damage], "damaged place")
    if arguments.keys:
        write("")
        keys = [(repr(each["key"]), str(each["segment"]), format_size(each["bytes"])) for each in _keys(report)]
        _columns([("key", "segment", "bytes"), *keys])
    return OK


def _segment_row(segment: SegmentReport, now: float) -> tuple[str, ...]:
    return (
        str(segment.number),
        segment.state,
        segment.namespace or "-",
        format_size(segment.size),
        format_size(segment.live_bytes),
        format_size(segment.dead_bytes),
        f"{segment.records:,}",
        _age(now - segment.modified),
    )


def _age(seconds: float) -> str:
    """A time span in its largest unit of which there is more than one."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def _namespaces(report: DirectoryReport) -> list[dict[str, Any]]:
    return [
        {"namespace": space.name, "blocks": len(space.live), "bytes": sum(place.stored for place in space.live)}
        for space in report.spaces.values()
    ]


def _shapes(report: DirectoryReport) -> list[dict[str, Any]]:
    """Shapes of live blocks, the most frequent first."""
    blocks: Counter[tuple[str, str, str]] = Counter()
    sizes: Counter[tuple[str, str, str]] = Counter()
    for space in report.spaces.values():
        for place in space.live:
            shape = describe(place.desc)
            blocks[shape] += 1
            sizes[shape] += place.stored
    return [
        {"kind": shape[0], "dtype": shape[1], "shape": shape[2], "blocks": number, "bytes": sizes[shape]}
        for shape, number in blocks.most_common()
    ]


def _keys(report: DirectoryReport) -> list[dict[str, Any]]:
    return [
        {
            "namespace": space.name,
            "key": _printable(key_of_wire(*key)),
            "segment": place.segment,
            "bytes": place.stored,
        }
        for space in report.spaces.values()
        for key, place in space.keys.items()
        if place.state == LIVE
    ]


def _printable(key: object) -> object:
    """A key as JSON has it: bytes as they are written in Python."""
    return repr(key) if isinstance(key, bytes) else key


# -- verify ----------------------------------------------------------------------------------------------------------


def verify(arguments: argparse.Namespace) -> int:
    """Run ``asynckv verify``."""
    repair: Repair | None = None
    with Progress("verify") as progress:

        def step(done: int, total: int) -> None:
            progress.update(done / max(total, 1), format_size(done))

        if arguments.repair:
            with _quiet():  # what an opening warns of is in the report
                repair = _usable(repair_directory, arguments.dir, progress=step)
            report = repair.before
        else:
            report = _usable(verify_directory, arguments.dir, progress=step)
    left = report if repair is None else repair.after
    if arguments.json:
        _verify_json(report, repair, arguments)
    else:
        _verify_text(report, repair, arguments)
    return OK if left.ok else FAILED


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep warnings that nobody listens to off the terminal."""
    handler = logging.NullHandler()
    logging.getLogger("asynckv").addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger("asynckv").removeHandler(handler)


def _verify_json(report: DirectoryReport, repair: Repair | None, arguments: argparse.Namespace) -> None:
    values = _values(report) | {"verified": True}
    values["lost"] = [_lost_values(each, arguments.keys) for each in report.lost]
    if repair is not None:
        values["repair"] = {
            "ok": repair.after.ok,
            "rewritten_segments": repair.rewritten,
            "removed": repair.removed,
            "dropped": [_lost_values(each, arguments.keys) for each in repair.dropped],
            "live_blocks": repair.after.live_blocks,
            "live_bytes": repair.after.live_bytes,
            "all_damage": repair.after.all_damage,
        }
    write_json(values)


def _lost_values(block: LostBlock, keys: bool) -> dict[str, Any]:
    values = {"digest": block.digest, "namespace": block.namespace[:8].hex(), "segment": block.segment}
    return values | {"bytes": block.stored} | ({"key": _printable(block.plain)} if keys else {})


def _verify_text(report: DirectoryReport, repair: Repair | None, arguments: argparse.Namespace) -> None:
    write(f"verified {report.path}")
    checked = f"{plural(report.verified_blocks, 'block')}, {format_size(report.verified_bytes)}"
    rows = [("verified", checked), ("corrupt blocks", f"{report.corrupt_blocks:,}")]
    write(table([*_rows(report), *rows]))
    _some([f"DAMAGE: {text}" for text in report.all_damage], "damaged place")
    _some([f"LOST: {_lost_text(each, arguments.keys)}" for each in report.lost], "lost block")
    if report.ok:
        write("Every record and every block is whole.")
    elif repair is None:
        write("FAILED: the store is damaged. An opening leaves out what is damaged; --repair drops it for good.")
    else:
        write(
            f"repaired: {plural(len(repair.rewritten), 'segment')} written anew, "
            f"{plural(len(repair.removed), 'file')} removed or replaced, "
            f"{plural(len(repair.dropped), 'block')} dropped, {plural(repair.after.live_blocks, 'block')} kept"
        )
        _some([f"DROPPED: {_lost_text(each, arguments.keys)}" for each in repair.dropped], "dropped block")
        _some([f"DAMAGE LEFT: {text}" for text in repair.after.all_damage], "damaged place")
        write("Every record and every block is whole now." if repair.after.ok else "FAILED: damage is left.")


def _lost_text(block: LostBlock, keys: bool) -> str:
    name = f"key {block.plain!r}" if keys else f"key with digest {block.digest}"
    return f"{name}, {plural(block.stored, 'byte')} in segment {block.segment}"


# -- shared ----------------------------------------------------------------------------------------------------------


def _usable(look: Any, directory: str, **options: Any) -> Any:
    """Look at a directory; one that is no store is bad usage."""
    try:
        with about(directory):
            return look(directory, **options)
    except CorruptStoreError as error:
        raise UsageError(str(error)) from None


def _values(report: DirectoryReport) -> dict[str, Any]:
    """What JSON has of a report; no keys."""
    names = _SHARED.split()
    values = {name: getattr(report, name) for name in names}
    return values | {"segments": [dataclasses.asdict(segment) for segment in report.segments]}


def _rows(report: DirectoryReport) -> list[tuple[str, str]]:
    sealed = sum(segment.state == "sealed" for segment in report.segments)
    rows = [
        ("store", report.store_id or "unknown: the superblock is bad"),
        ("allocated", format_size(report.allocated)),
        ("segments", f"{len(report.segments):,}, {sealed:,} of them sealed"),
        ("namespaces", f"{len(report.spaces):,}"),
        ("records", f"{report.records:,}"),
        ("live blocks", f"{report.live_blocks:,}, {format_size(report.live_bytes)}"),
        ("superseded", format_size(report.dead_bytes)),
        ("index snapshot", report.snapshot),
    ]
    ages = sorted(time.time() - segment.modified for segment in report.segments)
    if ages:
        rows.append(("segment ages", f"{_age(ages[0])} to {_age(ages[-1])} since the last write"))
    return rows


def _some(lines: list[str], what: str) -> None:
    for line in lines[:SHOWN]:
        write(f"  {line}")
    if len(lines) > SHOWN:
        write(f"  ... and {plural(len(lines) - SHOWN, 'more ' + what)}")


def _columns(rows: list[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        write("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
