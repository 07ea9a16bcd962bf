"""``asynckv stats`` and ``asynckv verify``: what lies in a store directory, and whether every byte of it is well."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any

from asynckv.commands.output import FAILED, OK, Progress, UsageError, about, path, table, write, write_json
from asynckv.config import format_size
from asynckv.errors import CorruptStoreError
from asynckv.tiers.inspect import inspect_directory, verify_directory

if TYPE_CHECKING:
    from asynckv.tiers.inspect import DirectoryReport

__all__ = ["add_parser"]

DAMAGE_SHOWN = 20


def add_parser(commands: Any) -> None:
    """Add ``stats`` and ``verify`` to the command line."""
    for name, command, text in (
        ("stats", stats, "describe what lies in a store directory, without locking or changing it"),
        ("verify", verify, "read every record and block of a store that nobody has open; damage is exit status 1"),
    ):
        parser = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        parser.add_argument("dir", type=path, metavar="DIR", help="the store directory")
        parser.add_argument("--json", action="store_true", help="print one JSON object")
        parser.set_defaults(command=command)


def stats(arguments: argparse.Namespace) -> int:
    """Run ``asynckv stats``."""
    report = _usable(inspect_directory, arguments.dir)
    _show(report, arguments, verified=False)
    return OK


def verify(arguments: argparse.Namespace) -> int:
    """Run ``asynckv verify``."""
    with Progress("verify") as progress:

        def step(done: int, total: int) -> None:
            progress.update(done / max(total, 1), format_size(done))

        report = _usable(verify_directory, arguments.dir, progress=step)
    _show(report, arguments, verified=True)
    return OK if report.ok else FAILED


def _usable(look: Any, directory: str, **options: Any) -> DirectoryReport:
    """Look at a directory; one that is no store is bad usage."""
    try:
        with about(directory):
            report: DirectoryReport = look(directory, **options)
    except CorruptStoreError as error:
        raise UsageError(str(error)) from None
    return report


def _show(report: DirectoryReport, arguments: argparse.Namespace, *, verified: bool) -> None:
    if arguments.json:
        values = dataclasses.asdict(report)
        names = ("records", "live_blocks", "live_bytes", "dead_bytes", "all_damage", "ok")
        write_json(values | {name: getattr(report, name) for name in names} | {"verified": verified})
        return
    sealed = sum(segment.state == "sealed" for segment in report.segments)
    namespaces = {segment.namespace for segment in report.segments if segment.namespace}
    rows = [
        ("store", report.store_id or "unknown: the superblock is bad"),
        ("allocated", format_size(report.allocated)),
        ("segments", f"{len(report.segments):,}, {sealed:,} of them sealed"),
        ("namespaces", f"{len(namespaces):,}"),
        ("records", f"{report.records:,}"),
        ("live blocks", f"{report.live_blocks:,}, {format_size(report.live_bytes)}"),
        ("superseded", format_size(report.dead_bytes)),
        ("index snapshot", report.snapshot),
    ]
    if verified:
        rows.append(("verified", f"{report.verified_blocks:,} blocks, {format_size(report.verified_bytes)}"))
        rows.append(("corrupt blocks", f"{report.corrupt_blocks:,}"))
    write(f"{'verified' if verified else 'statistics of'} {report.path}")
    write(table(rows))
    damage = report.all_damage
    for text in damage[:DAMAGE_SHOWN]:
        write(f"  DAMAGE: {text}")
    if len(damage) > DAMAGE_SHOWN:
        write(f"  ... and {len(damage) - DAMAGE_SHOWN:,} more damaged places")
    if verified:
        write("Every record and every block is whole." if report.ok else "FAILED: the store is damaged.")
