"""A thousand reads cancelled while they are in flight: no byte is written into memory that was given back.

One pool, handed out in extents. The moment the engine releases an extent it is filled with a canary, as if somebody
else had it now. When every completion has come, all canaries are as they were.
"""

from __future__ import annotations

import asyncio
import os
import random
from functools import partial

import pytest
from storekit import little_ring_memory, ring_refusal

from asynckv.testing import Script
from asynckv.testing.fakering import FakeRing, late
from asynckv.testing.tools import PAGE, aligned, turns

_uring = pytest.importorskip(
    "asynckv._uring", reason="THE RING IS NOT BUILT: the io_uring engine is NOT checked in this run"
)

from asynckv.backends.uring import UringBackend  # noqa: E402  (it is only there where the ring is)

NO_RING = ring_refusal()
READS = 1000
EXTENT = 4 * PAGE
FILE_BYTES = 16 << 20


def real(entries):
    if NO_RING:
        pytest.skip(f"NO RING HERE ({NO_RING}): cancelling is NOT checked on a real one in this run")
    if entries > 256 and little_ring_memory():
        pytest.skip("LITTLE LOCKED MEMORY: a large ring is NOT checked in this run")
    return _uring.Ring(entries)


def fake(entries):
    script = Script(random.Random(4))
    script.add("read", late(0.05), probability=0.5).add("read", late(0.001), probability=0.5)
    return FakeRing(entries, script=script, shuffle=random.Random(5))


def fake_cancellable(entries):
    ring = fake(entries)
    ring.cancellable = True
    return ring


@pytest.mark.parametrize("direct", ["auto", False], ids=["direct", "buffered"])
@pytest.mark.parametrize("factory", [real, fake, fake_cancellable])
@pytest.mark.parametrize("entries", [4, 1024])
async def test_canaries_survive_a_thousand_cancelled_reads(tmp_path, direct, factory, entries):
    (tmp_path / "data").write_bytes(b"d" * FILE_BYTES)
    backend = UringBackend(ring_factory=factory, direct=direct, entries=entries, timeout=30.0)
    await backend.start(tmp_path)
    file = await backend.open("data")
    os.fsync(file.fd)
    os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)  # from the disk, so that they are in flight for a while
    pool = aligned(READS * EXTENT)
    canary = b"C" * EXTENT
    released = [0] * READS
    chance = random.Random(6)

    def give_back(at):
        released[at] += 1
        pool[at * EXTENT : (at + 1) * EXTENT] = canary

    reads = []
    for at in range(READS):
        odd = chance.choice((0, 0, 0, 100))  # some go through bounce buffers
        offset = chance.randrange(FILE_BYTES // EXTENT - 1) * EXTENT + odd
        extent = pool[at * EXTENT : (at + 1) * EXTENT]
        reads.append(backend.read(file, offset, extent, released=partial(give_back, at)))
    await turns(2)  # they are on their way
    in_flight = backend.reads_in_flight
    cancelled = sum(read.cancel() for read in reads)
    assert cancelled
    for _ in range(3000):
        if not backend.reads_in_flight:
            break
        await asyncio.sleep(0.005)
    assert backend.reads_in_flight == 0
    assert released == [1] * READS
    await asyncio.sleep(0.1)  # anything that came late would come now
    assert pool == canary * READS
    if factory is not real:
        assert in_flight > READS // 2
    assert await backend.read(file, 0, pool[:EXTENT])  # all is as before
    assert pool[:EXTENT] == b"d" * EXTENT
    assert await backend.close() == 0


@pytest.mark.parametrize("factory", [real, fake])
async def test_cancelling_awaiting_tasks(tmp_path, factory):
    """The same through tasks that die, over and over, while others go on undisturbed."""
    data = os.urandom(64 * PAGE)
    (tmp_path / "data").write_bytes(data)
    backend = UringBackend(ring_factory=factory, entries=16, timeout=30.0)
    await backend.start(tmp_path)
    file = await backend.open("data")
    chance = random.Random(7)
    wrong = done = 0

    async def reader(number):
        nonlocal wrong, done
        at = chance.randrange(64)
        target = aligned(PAGE)
        assert await backend.read(file, at * PAGE, target)
        wrong += target != data[at * PAGE : (at + 1) * PAGE]
        done += 1

    for _ in range(20):
        tasks = [asyncio.ensure_future(reader(number)) for number in range(50)]
        await turns(chance.randrange(4))
        for task in tasks[::2]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert wrong == 0
    assert done >= 500
    assert await backend.close() == 0
    assert backend.reads_in_flight == 0
