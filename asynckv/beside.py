"""One job in a thread of its own, for the few that would stop the loop and belong to no disk engine."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

__all__ = ["beside"]

T = TypeVar("T")


def beside(loop: asyncio.AbstractEventLoop, job: Callable[[], T]) -> asyncio.Future[T]:
    """Run a job beside the loop; the thread has ended when the future resolves. Cancelling it does not stop the job.

    Raises
    ------
    RuntimeError
        The system has no more threads.
    """
    future: asyncio.Future[T] = loop.create_future()

    def end(result: T | None, error: BaseException | None) -> None:
        thread.join()  # it has nothing left to do
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result = error = None
        try:
            result = job()
        except BaseException as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(end, result, error)

    thread = threading.Thread(target=run, name="asynckv-beside", daemon=True)
    thread.start()
    return future
