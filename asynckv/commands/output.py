"""What all commands share: what they are given and its errors, results, progress on terminals, exit statuses."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import os
import shutil
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping
from typing import Any, Self, TextIO, TypeVar

import asynckv
from asynckv.config import ENGINES

__all__ = [
    "ENGINE_ADVICE",
    "FAILED",
    "OK",
    "USAGE",
    "Progress",
    "UsageError",
    "about",
    "choose_loop",
    "engine_override",
    "open_store",
    "path",
    "plural",
    "run",
    "table",
    "write",
    "write_json",
]

OK, FAILED, USAGE = 0, 1, 2
ENGINE_ADVICE = f"unset it, or set it to one of {', '.join(ENGINES)}"
PROGRESS_SECONDS = 0.2
_INTERRUPT_SHOWN = "^C"  # what a terminal adds to the line of progress

T = TypeVar("T")


class UsageError(Exception):
    """The command line, or what it names, is wrong: exit status 2."""


def path(text: str) -> str:
    """Check a path of the command line.

    An empty one, often an unset variable of a script, would mean the current directory to some system calls.
    """
    if not text or "\0" in text:
        raise argparse.ArgumentTypeError("the path is empty or holds a NUL character")
    return text


@contextlib.contextmanager
def about(name: str | os.PathLike[str]) -> Iterator[None]:
    """Let errors name the path that the user gave: those about a descriptor name a part of it, or none."""
    try:
        yield
    except OSError as error:
        error.filename = os.fspath(name)
        raise


def engine_override() -> tuple[str, str]:
    """Return ASYNCKV_ENGINE, which overrides every choice of an engine, and what is wrong with it."""
    engine = os.environ.get("ASYNCKV_ENGINE", "")
    return engine, f"ASYNCKV_ENGINE={engine!r} is no engine" if engine and engine not in ENGINES else ""


@contextlib.asynccontextmanager
async def open_store(directory: str, **options: Any) -> AsyncIterator[asynckv.Cache]:
    """Open a store; an option that :func:`asynckv.open` refuses is bad usage of the command."""
    try:
        opening = asynckv.open(directory, **options)
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from None
    with about(directory):
        cache = await opening
    async with cache:
        yield cache


def write(text: str) -> None:
    """Write a line of results."""
    sys.stdout.write(text + "\n")


def write_json(values: Mapping[str, Any]) -> None:
    """Write one JSON object."""
    write(json.dumps(values, indent=2, allow_nan=False, default=str))


def plural(number: int, noun: str, several: str = "") -> str:
    """Write a count and what is counted: ``1 block``, ``2,000 blocks``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {several or noun + 's'}"


def table(rows: Iterable[tuple[str, str]], *, indent: str = "  ") -> str:
    """Lay out names and values in two columns."""
    pairs = list(rows)
    width = max((len(name) for name, _ in pairs), default=0)
    return "\n".join(f"{indent}{name:<{width}}  {value}" for name, value in pairs)


class Progress:
    """One line that is rewritten on a terminal and taken away at the end; nothing at all in a pipe.

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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.done()

    def update(self, share: float, text: str = "") -> None:
        """Show how far it is, five times a second at most."""
        if not self._shown or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + PROGRESS_SECONDS
        line = f"{self._label}: {min(max(share, 0.0), 1.0):4.0%} {text}"
        line = line[: shutil.get_terminal_size().columns - len(_INTERRUPT_SHOWN) - 1]  # a second line would stay
        self._stream.write("\r" + line.ljust(self._width))
        self._stream.flush()
        self._width = len(line)

    def done(self) -> None:
        """Take the line away."""
        if self._shown and self._width:
            self._stream.write("\r" + " " * (self._width + len(_INTERRUPT_SHOWN)) + "\r")
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
