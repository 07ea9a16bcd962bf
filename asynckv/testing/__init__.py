"""What the project tests itself with, shipped for authors of tiers and engines and for users' own tests.

`ManualClock` moves time by hand; `FaultyBackend` and `FaultyFiles` fail by script, above and below an I/O engine;
`FakeRing` posts completions by script, below the ring engine (its faults are in `asynckv.testing.fakering`);
`RecordingBackend` keeps a journal and builds crash images from it; `ModelCache` says which values a cache may return.
The suite every engine passes is `asynckv.testing.contract` (it needs pytest and is therefore not imported here).
"""

from __future__ import annotations

from asynckv.testing.clock import ManualClock
from asynckv.testing.fakering import FakeRing
from asynckv.testing.faulty import FaultyBackend, FaultyFiles
from asynckv.testing.flying import FlyingBackend
from asynckv.testing.loop import SimulatedClock, SimulatedLoop
from asynckv.testing.memory import MemoryDisk, MemoryFiles
from asynckv.testing.model import MISS, ModelCache
from asynckv.testing.recording import Entry, Image, RecordingBackend
from asynckv.testing.script import Fault, Script, corrupt, error, hang, short, slow
from asynckv.testing.seeds import SeedError, SeedReport, run_seed
from asynckv.testing.simulated import SimulatedBackend

__all__ = [
    "MISS",
    "Entry",
    "FakeRing",
    "Fault",
    "FaultyBackend",
    "FaultyFiles",
    "FlyingBackend",
    "Image",
    "ManualClock",
    "MemoryDisk",
    "MemoryFiles",
    "ModelCache",
    "RecordingBackend",
    "Script",
    "SeedError",
    "SeedReport",
    "SimulatedBackend",
    "SimulatedClock",
    "SimulatedLoop",
    "corrupt",
    "error",
    "hang",
    "run_seed",
    "short",
    "slow",
]
