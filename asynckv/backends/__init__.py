"""I/O engines behind one seam; `asynckv.backends.base` states what each must promise."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asynckv.backends.base import Backend, File, ShortTransferError
from asynckv.backends.choice import ChosenBackend
from asynckv.backends.portable import ThreadsBackend
from asynckv.config import ENGINES

if TYPE_CHECKING:
    from asynckv.clock import Clock

__all__ = ["ENGINES", "Backend", "ChosenBackend", "File", "ShortTransferError", "ThreadsBackend", "create_backend"]


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
        ``"threads"``, ``"aiofiles"``, ``"io_uring"``, or ``"auto"``: io_uring where it works and the kernel is 6.1 or
        newer, else threads. For the last two, `Backend.start` finds out; see `ChosenBackend`.
    direct, timeout, clock
        As for `ThreadsBackend`.

    Raises
    ------
    ValueError
        No engine of that name.
    """
    if engine not in ENGINES:
        raise ValueError(f"engine must be one of {', '.join(ENGINES)}, not {engine!r}")
    if engine == "threads":
        return ThreadsBackend(direct=direct, timeout=timeout, clock=clock)
    if engine == "aiofiles":
        from asynckv.backends.aio import AiofilesBackend

        return AiofilesBackend(direct=direct, timeout=timeout, clock=clock)
    return ChosenBackend(engine, direct=direct, timeout=timeout, clock=clock)
