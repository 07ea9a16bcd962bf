"""The command line of ``asynckv bench``. What it runs is imported only then, because that takes long."""

from __future__ import annotations

import argparse
from typing import Any

from asynckv.commands.output import path

__all__ = ["PARTS", "add_parser"]

PARTS = ("mem", "disk", "mix", "loop", "article", "peers")


def add_parser(commands: Any) -> None:
    """Add ``bench`` to the command line."""
    parser = commands.add_parser(
        "bench",
        help="measure the store against what the disk, the loop and memory can give, and against others",
        description=(
            "Store and roofline, a loop in C that asks the same disk for the same, alternate in slices of 0.3 seconds; "
            "a share of the roofline is the median of all pairs, with its 95 % interval. Every byte that is read is "
            "checked; a wrong or missing block is exit status 1. Let nothing else run meanwhile."
        ),
    )
    parser.add_argument(
        "part",
        nargs="?",
        default="all",
        choices=[*PARTS, "all"],
        metavar="PART",
        help=f"{', '.join(PARTS)} or all (the default)",
    )
    parser.add_argument("--dir", type=path, metavar="DIR", help="on the disk to be measured; default: here")
    parser.add_argument("--data", default="1GiB", metavar="SIZE", help="blocks in a store that is read; default 1GiB")
    parser.add_argument("--pairs", type=int, default=40, metavar="N", help="slices of each; default 40")
    parser.add_argument("--prototype", type=path, metavar="BIN", help="article: a C++ prototype to run beside it")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--out", type=path, metavar="DIR", help="write results and plots there (extra: plot)")
    parser.set_defaults(command=main)


def main(arguments: argparse.Namespace) -> int:
    """Run ``asynckv bench``."""
    from asynckv.bench import command

    return command.main(arguments)
