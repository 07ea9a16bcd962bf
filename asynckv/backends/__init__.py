"""I/O engines behind one seam; `asynckv.backends.base` states what each must promise."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asynckv.backends.base import Backend, File, ShortTransferError
from asynckv.backends.portable import ThreadsBackend

if TYPE_CHECKING:
    from asynckv.clock import Clock

__all__ = ["ENGINES", "Backend", "File", "ShortTransferError", "ThreadsBackend", "create_backend"]

ENGINES = ("auto", "threads")


def create_backend(
    engine: str = "auto",
    *,
    direct: bool | str = "auto",
    timeout: float = 5.0,
    clock: Clock | None = None,
) -> Backend:
    """Make the engine of a name, not yet started.

    Parameters
    ----------
    engine
        ``"threads"``, or ``"auto"`` for the best one that this build has.
    direct, timeout, clock
        As for `ThreadsBackend`.

    Raises
    ------
    ValueError
        No engine of that name in this build.
    """
    if engine not in ENGINES:
        raise ValueError(f"engine must be one of {', '.join(ENGINES)}, not {engine!r}")
    return ThreadsBackend(direct=direct, timeout=timeout, clock=clock)
