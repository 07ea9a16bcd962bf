"""The ``asynckv`` command: parsing, and what becomes of errors.

Exit status 0: done, and every check held. 1: a check failed. 2: bad usage, or a store in use.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from asynckv._version import __version__
from asynckv.commands import demo, doctor, inspect, replay
from asynckv.commands.output import FAILED, USAGE, UsageError
from asynckv.errors import AsyncKVError, StoreLockedError, UnsafeDirectoryError

__all__ = ["main"]

INTERRUPTED = 130  # 128 + SIGINT, as shells have it


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="asynckv", description="An asyncio store for KV-cache blocks: hot in memory, cold on disk."
    )
    parser.add_argument("--version", action="version", version=f"asynckv {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in (demo, replay, doctor, inspect):
        module.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    try:
        arguments = build_parser().parse_args(argv)
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else USAGE
    try:
        status: int = arguments.command(arguments)
        sys.stdout.flush()
        return status
    except (UsageError, StoreLockedError, UnsafeDirectoryError) as error:
        return _complain(error, USAGE)
    except AsyncKVError as error:
        return _complain(error, FAILED)
    except BrokenPipeError:
        # Whoever read our output has gone; the interpreter must not fail on it again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except OSError as error:
        return _complain(error, FAILED)
    except KeyboardInterrupt:
        return INTERRUPTED


def _complain(error: BaseException, status: int) -> int:
    sys.stderr.write(f"asynckv: {error}\n")
    return status
