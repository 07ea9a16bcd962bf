"""The ``asynckv`` command: parsing, and what becomes of errors.

Exit status 0: done, and every check held. 1: a check failed, or the machine did. 2: bad usage, or a store in use.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import os
import sys
from collections.abc import Sequence

from asynckv._version import __version__
from asynckv.bench import parser as bench
from asynckv.commands import demo, doctor, inspect, replay
from asynckv.commands.output import ENGINE_ADVICE, FAILED, USAGE, UsageError, engine_override
from asynckv.errors import AsyncKVError, StoreLockedError, UnsafeDirectoryError

__all__ = ["main"]

INTERRUPTED = 130  # 128 + SIGINT, as shells have it
READER_GONE = 141  # 128 + SIGPIPE
STDERR = 2

# What the system says of things that are not there or not ours to use: the command line named the wrong one. Other
# errors, such as a full or broken disk, are the machine's.
_REFUSALS = {
    errno.EACCES,
    errno.EEXIST,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.ENOENT,
    errno.ENOSYS,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
}


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="asynckv", description="An asyncio store for KV-cache blocks: hot in memory, cold on disk."
    )
    parser.add_argument("--version", action="version", version=f"asynckv {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in (demo, replay, doctor, inspect, bench):
        module.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    _open_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # the name of a file need not be text
    status = _run(argv)
    try:
        sys.stdout.flush()
    except OSError as error:
        # The interpreter must not fail on it again when it flushes at exit.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
        status = status or _explain(error)
    return status


def _open_streams() -> None:
    """Open what whoever started us had closed, before a file of the event loop or of a store takes its descriptor."""
    if None in (sys.stdin, sys.stdout, sys.stderr):
        while (spare := os.open(os.devnull, os.O_RDWR)) <= STDERR:
            pass
        os.close(spare)
    for descriptor, name in ((1, "stdout"), (STDERR, "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(descriptor, "w", closefd=False))


def _run(argv: Sequence[str] | None) -> int:
    try:
        arguments = build_parser().parse_args(argv)
        _, wrong = engine_override()
        if wrong and arguments.command is not doctor.main:
            raise UsageError(f"{wrong}; {ENGINE_ADVICE}")
        status: int = arguments.command(arguments)
        return status
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else USAGE
    except KeyboardInterrupt:
        return INTERRUPTED
    except (UsageError, AsyncKVError, OSError, MemoryError) as error:
        return _explain(error)


def _explain(error: Exception) -> int:
    """Say in a line what went wrong; returns the exit status."""
    text, status = str(error), FAILED
    if isinstance(error, BrokenPipeError):
        return READER_GONE
    if isinstance(error, UsageError | StoreLockedError | UnsafeDirectoryError):
        status = USAGE
    elif isinstance(error, MemoryError):
        text, status = f"not enough memory{f': {text}' if text else ''}; choose smaller sizes", USAGE
    elif isinstance(error, OSError):
        text = error.strerror or text
        if error.filename is not None and os.fsdecode(error.filename) not in text:
            text = f"{os.fsdecode(error.filename)}: {text}"
        if error.errno in _REFUSALS:
            status = USAGE
    with contextlib.suppress(OSError):
        sys.stderr.write(f"asynckv: {text}\n")
    return status
