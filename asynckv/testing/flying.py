"""Flights for engines without a ring: each read of one is a plain read of the engine's.

What waits for flights is then tested with whatever goes wrong in that engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asynckv._core import Flight, aim, strayed
from asynckv.backends.base import ShortTransferError, Wrapper
from asynckv.tiers.reader import make_verify

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from asynckv._core import Load
    from asynckv.backends.base import Backend, File, Pilot

__all__ = ["FlyingBackend"]

LARGEST = 256 << 10  # bytes of a read that flies, as with the ring


class FlyingBackend(Wrapper):
    """An engine whose `fly` takes what a ring would take.

    Parameters
    ----------
    inner
        Does the reads, one by one.
    """

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.flown = 0  # reads that landed

    @property
    def flies(self) -> bool:
        """Always."""
        return True

    def fly(self, loads: list[Load], files: dict[int, File], pilot: Pilot, over: Callable[[], object]) -> list[Load]:
        """Read blocks together; see `Backend.fly`."""
        mask = self.alignment - 1 if self.direct else 0
        flight = Flight()
        fds = {slot: file.fd for slot, file in files.items() if file.closing is None}
        rest = aim(loads, fds, mask, 0, LARGEST, flight)
        flight.took(len(flight.loads))
        for load in flight.loads:
            _Flown(self, load, pilot, over).start(files[load.slot])
        return rest


class _Flown:
    """One read of a flight."""

    def __init__(self, backend: FlyingBackend, load: Load, pilot: Pilot, over: Callable[[], object]) -> None:
        self.backend = backend
        self.load = load
        self.pilot = pilot
        self.over = over
        self.free = self.fallen = False

    def start(self, file: File) -> None:
        """Ask the engine."""
        load = self.load
        verify = make_verify(load.stored, load.checksum)
        view = load.view[: load.span]
        read = self.backend.inner.read(file, load.offset, view, verify=verify, released=self.released)
        read.add_done_callback(self.ended)

    def released(self) -> None:
        """The engine has let go."""
        self.free = True
        flight, _ = strayed(self.load)
        if self.fallen:
            self.pilot.on_released(self.load)
        if not flight.left:
            self.over()

    def ended(self, future: asyncio.Future[bool]) -> None:
        """The engine's answer."""
        error = future.exception()
        if error is None and future.result():
            self.backend.flown += 1
            self.pilot.on_landed([self.load])
            return
        self.fallen = True
        if isinstance(error, ShortTransferError):
            error = None
        self.pilot.on_fallen(self.load, error, self.free)
