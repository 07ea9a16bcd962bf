"""What all commands share: results as a table or JSON, progress on terminals, exit statuses."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, TextIO, TypeVar

__all__ = ["FAILED", "OK", "USAGE", "Progress", "UsageError", "choose_loop", "run", "table", "write", "write_json"]

OK, FAILED, USAGE = 0, 1, 2
PROGRESS_SECONDS = 0.2

T = TypeVar("T")


class UsageError(Exception):
    """The command line, or what it names, is wrong: exit status 2."""


def write(text: str) -> None:
    """Write a line of results."""
    sys.stdout.write(text + "\n")


def write_json(values: Mapping[str, Any]) -> None:
    """Write one JSON object."""
    write(json.dumps(values, indent=2, allow_nan=False, default=str))


def table(rows: Iterable[tuple[str, str]], *, indent: str = "  ") -> str:
    """Lay out names and values in two columns."""
    pairs = list(rows)
    width = max((len(name) for name, _ in pairs), default=0)
    return "\n".join(f"{indent}{name:<{width}}  {value}" for name, value in pairs)


class Progress:
    """One line that is rewritten on a terminal; nothing at all in a pipe.

    Parameters
    ----------
    label
        What is going on.
    stream
        Where to show it; standard error unless a test says otherwise.
    """

    def __init__(self, label: str, stream: TextIO | None = None) -> None:
        self._label = label
        self._stream = sys.stderr if stream is None else stream
        self._shown = self._stream.isatty()
        self._next = 0.0
        self._width = 0

    def update(self, share: float, text: str = "") -> None:
        """Show how far it is, five times a second at most."""
        if not self._shown or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + PROGRESS_SECONDS
        line = f"{self._label}: {min(max(share, 0.0), 1.0):4.0%} {text}"
        self._stream.write("\r" + line.ljust(self._width))
        self._stream.flush()
        self._width = len(line)

    def done(self) -> None:
        """Take the line away."""
        if self._shown and self._width:
            self._stream.write("\r" + " " * self._width + "\r")
            self._stream.flush()
        self._width = 0


def choose_loop(name: str | None) -> tuple[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Return the name and the factory of the event loop: uvloop when it is there, unless one was asked for."""
    if name is None:
        name = "uvloop" if importlib.util.find_spec("uvloop") is not None else "asyncio"
    if name == "asyncio":
        return name, asyncio.new_event_loop
    try:
        import uvloop
    except ImportError as error:
        raise UsageError(f"--loop {name}: {error}") from None
    return name, uvloop.new_event_loop


def run(main: Coroutine[Any, Any, T], loop: str | None = None) -> T:
    """Run a command's coroutine on the chosen loop."""
    try:
        _, factory = choose_loop(loop)
    except UsageError:
        main.close()
        raise
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main)
