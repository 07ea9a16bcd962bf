"""Every completion a kernel may post, wrongly or late: right bytes or an error by the deadline, and all is given back.

The engine is the real one; the ring is `asynckv.testing.fakering.FakeRing`.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import random
from collections import Counter

import pytest

from asynckv.testing import Script, corrupt, error, hang, short
from asynckv.testing.clock import ManualClock
from asynckv.testing.fakering import (
    FakeRing,
    backlogged,
    duplicate,
    late,
    lost,
    missing,
    partial,
    silent,
    stale,
    unknown,
)
from asynckv.testing.tools import PAGE, Ends, aligned, pattern, raises_errno, turns

pytest.importorskip("asynckv._uring", reason="THE RING IS NOT BUILT: the io_uring engine is NOT checked in this run")

from asynckv.backends.uring import UringBackend

PAGES = 64
TIMEOUT = 1.0


class Bench:
    """An engine on a fake ring, and an account of every operation."""

    def __init__(self, directory, script=None, *, shuffle=None, entries=16, cancellable=False, **options):
        self.directory = directory
        self.script = Script() if script is None else script
        self.rings = []

        def factory(count):
            self.rings.append(
                FakeRing(count, script=self.script, shuffle=shuffle, cancellable=cancellable, generation=2**32 - 20)
            )
            return self.rings[-1]

        self.backend = UringBackend(**{"timeout": TIMEOUT, "ring_factory": factory, "entries": entries, **options})
        self.ends = Counter()
        self.outcomes = Counter()
        self.data = pattern(PAGES * PAGE)

    async def __aenter__(self):
        await self.backend.start(self.directory)
        self.ring = self.rings[0]
        return self

    async def __aexit__(self, *_):
        self.script.clear()
        self.ring.release_all() if not self.ring.closed else None
        assert await self.backend.close() == 0
        assert not self.backend.reads_in_flight
        assert not self.backend.writes_in_flight
        assert not self.backend.bounces.used
        assert set(self.ends.values()) <= {1}, "released more than once"

    async def fill(self):
        """A file of known bytes, written without faults."""
        (self.directory / "data").write_bytes(self.data)
        return await self.backend.open("data")

    async def one(self, kind, file, at, *, size=PAGE, odd=0):
        """One operation: counted by its outcome; right bytes or an error, and never after its deadline."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        name = (kind, at, len(self.ends))
        self.ends[name] = 0
        released = lambda: self.ends.update([name])  # noqa: E731
        offset = at * PAGE + odd
        try:
            if kind == "read":
                target = aligned(size)
                assert await self.backend.read(file, offset, target, released=released) is True
                assert target == self.data[offset : offset + size], "WRONG BYTES"
            elif kind == "write":
                await self.backend.write(file, offset, [self.data[offset : offset + size]], released=released)
            else:
                self.ends[name] = 1
                await self.backend.sync(file)
        except OSError as reason:
            self.outcomes[type(reason).__name__] += 1
        else:
            self.outcomes["done"] += 1
        assert loop.time() - began < self.backend.timeout + 3.0, "past its deadline"

    async def mixed(self, file, count=200, seed=1, kinds=("read", "read", "read", "write", "sync")):
        """Many operations of all kinds at once, in a few bursts."""
        chance = random.Random(seed)
        jobs = []
        for number in range(count):
            at = chance.randrange(PAGES - 4)
            kind = chance.choice(kinds)
            size = chance.choice((PAGE, 3 * PAGE))
            odd = chance.choice((0, 0, 17)) if kind == "read" else 0
            jobs.append(asyncio.ensure_future(self.one(kind, file, at, size=size, odd=odd)))
            if number % 50 == 49:
                await asyncio.sleep(0)
        await asyncio.gather(*jobs)


@pytest.fixture(params=[False, "auto"], ids=["buffered", "direct"])
def direct(request):
    return request.param


HARMLESS = {
    "late": late(0.01),
    "duplicate": duplicate(),
    "stale": stale(),
    "unknown": unknown(),
    "silent": silent(),
    "backlogged": backlogged(),
    "short": short(0.4),
    "interrupted": error(errno.EINTR),
    "again": error(errno.EAGAIN),
}


@pytest.mark.parametrize("kind", HARMLESS)
async def test_harmless_scripts_change_no_result(tmp_path, direct, kind):
    script = Script()
    for operation in ("read", "write", "fsync"):
        if operation != "fsync" or kind not in ("short", "interrupted", "again"):
            script.add(operation, HARMLESS[kind], every=3)
    async with Bench(tmp_path, script, direct=direct, timeout=20.0) as bench:
        file = await bench.fill()
        was = bench.backend.direct
        await bench.mixed(file)
        # A read that is short at the same place over and over is at the end of the file, for all that anybody can tell.
        ended = bench.outcomes.pop("ShortTransferError", 0)
        assert ended <= (2 if kind == "short" else 0)
        assert bench.outcomes == {"done": 200 - ended}
        assert bench.backend.direct is was
        assert script.injected.total() > 30
        assert (tmp_path / "data").read_bytes() == bench.data
        assert bench.backend.name == "io_uring"
        if kind in ("duplicate", "stale", "unknown"):
            assert bench.ring.stale >= script.injected.total() - 2
        if kind == "backlogged":
            assert bench.ring.backlogs
        assert bench.ring.lost == 0


async def test_completions_in_any_order(tmp_path, direct):
    script = Script().add("read", late(0.003), probability=0.2).add("write", late(0.001), probability=0.2)
    async with Bench(tmp_path, script, shuffle=random.Random(3), direct=direct, timeout=20.0) as bench:
        file = await bench.fill()
        await bench.mixed(file, 400)
        assert bench.outcomes == {"done": 400}


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOMEM, errno.ENOSPC, errno.EBADF])
async def test_errors_reach_the_future_with_errno(tmp_path, direct, number):
    script = Script()
    async with Bench(tmp_path, script, direct=direct, timeout=20.0) as bench:
        file = await bench.fill()
        for operation in ("read", "write", "fsync"):
            script.add(operation, error(number), sticky=True)
        ends = Ends()
        for submit in (
            lambda: bench.backend.read(file, 0, aligned(PAGE), released=ends),
            lambda: bench.backend.write(file, 0, [aligned(PAGE)], released=ends),
            lambda: bench.backend.sync(file),
        ):
            with raises_errno(number):
                await submit()
        assert ends.released == 2
        assert script.calls["fsync"] == 1  # a failed sync is not tried again
        script.clear()
        await bench.one("read", file, 1)
        assert bench.outcomes == {"done": 1}


@pytest.mark.parametrize("number", [errno.EINTR, errno.EAGAIN])
async def test_transient_errors_end(tmp_path, number):
    script = Script().add("read", error(number), sticky=True)
    async with Bench(tmp_path, script, timeout=30.0) as bench:
        file = await bench.fill()
        with raises_errno(number):
            await bench.backend.read(file, 0, aligned(PAGE))
        assert 5 <= script.calls["read"] <= 30


@pytest.mark.parametrize("operation", ["read", "write", "fsync"])
async def test_a_missing_completion_is_a_time_out(tmp_path, operation):
    clock = ManualClock()
    script = Script()
    async with Bench(tmp_path, script, clock=clock) as bench:
        file = await bench.fill()
        script.add(operation, missing())
        ends = Ends()
        submit = {
            "read": lambda: bench.backend.read(file, 0, aligned(PAGE), released=ends),
            "write": lambda: bench.backend.write(file, 0, [aligned(PAGE)], released=ends),
            "fsync": lambda: bench.backend.sync(file),
        }[operation]
        future = submit()
        await turns()
        clock.advance(TIMEOUT + 0.1)
        with pytest.raises(TimeoutError):
            await future
        assert ends.released == 0  # the kernel may still write there
        await bench.one("read", file, 1)
        assert bench.outcomes == {"done": 1}
        bench.ring.release_all()
        await turns()
        assert ends.released == (operation != "fsync")


async def test_missing_completions_at_close_are_counted_and_keep_their_buffers(tmp_path):
    script = Script()
    bench = Bench(tmp_path, script, timeout=0.2)
    await bench.backend.start(tmp_path)
    file = await bench.fill()
    script.add("read", missing(), every=2)
    reads = [bench.backend.read(file, at * PAGE, aligned(PAGE)) for at in range(10)]
    done = await asyncio.gather(*reads, return_exceptions=True)
    assert [type(each) for each in done].count(TimeoutError) == 5
    assert await bench.backend.close() == 5
    ring = bench.rings[0]
    assert not ring.closed
    assert ring.in_flight == 5
    ring.release_all()
    for _ in range(100):
        if ring.closed:
            break
        await asyncio.sleep(0.005)
    assert ring.closed  # the last one let it go
    assert bench.backend.reads_in_flight == 0


async def test_what_is_cancelled_at_close_comes_back(tmp_path):
    script = Script()
    bench = Bench(tmp_path, script, cancellable=True, timeout=0.2)
    await bench.backend.start(tmp_path)
    file = await bench.fill()
    script.add("read", missing(), sticky=True)
    ends = Ends()
    future = bench.backend.read(file, 0, aligned(PAGE), timeout=60.0, released=ends)
    assert await bench.backend.close() == 0
    assert ends.released == 1
    assert isinstance(future.exception(), TimeoutError)


@pytest.mark.parametrize("operation", ["read", "write", "fsync"])
async def test_a_lost_completion_ends_the_ring(tmp_path, operation, caplog):
    script = Script()
    async with Bench(tmp_path, script, timeout=2.5) as bench:
        file = await bench.fill()
        script.add(operation, lost(), nth=5)
        with caplog.at_level(logging.WARNING):
            await bench.mixed(file, 100)
        assert bench.outcomes == {"done": 99, "TimeoutError": 1}
        assert bench.backend.name == "threads"
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert (tmp_path / "data").read_bytes() == bench.data
        # Nobody will ever tell that it has ended, so its buffer stays with the kernel: let the test end it.
        bench.ring._post(next(r.token for r in bench.ring._slots if r is not None and r.taken), PAGE)
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS, errno.EACCES, errno.EBADF, errno.ENXIO])
async def test_a_ring_that_is_refused_later_gives_way_to_threads(tmp_path, direct, number, caplog):
    script = Script()
    async with Bench(tmp_path, script, direct=direct, timeout=20.0) as bench:
        file = await bench.fill()
        script.add("read", late(0.02), probability=0.3)
        script.add("read", short(0.5), probability=0.3)
        script.add("enter", error(number), nth=4, sticky=True)
        with caplog.at_level(logging.WARNING):
            await bench.mixed(file)
            await bench.mixed(file, seed=2)
        assert bench.outcomes == {"done": 400}
        assert bench.backend.name == "threads"
        assert len(caplog.records) == 1
        assert "using threads" in caplog.text
        assert (tmp_path / "data").read_bytes() == bench.data
        assert bench.ring.closed


@pytest.mark.parametrize("number", [errno.EINTR, errno.EAGAIN, errno.EBUSY])
async def test_a_submission_that_is_refused_for_now_is_made_again(tmp_path, number):
    script = Script()
    for nth in (2, 3, 5, 8, 9):
        script.add("enter", error(number), nth=nth)
    async with Bench(tmp_path, script, timeout=20.0) as bench:
        file = await bench.fill()
        await bench.mixed(file)
        assert bench.outcomes == {"done": 200}
        assert bench.backend.name == "io_uring"
        assert script.injected.total() == 5


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EBUSY])
async def test_a_submission_that_is_refused_for_ever_is_not(tmp_path, number, caplog):
    script = Script()
    async with Bench(tmp_path, script, timeout=20.0) as bench:
        file = await bench.fill()
        script.add("enter", error(number), sticky=True)
        with caplog.at_level(logging.WARNING):
            await bench.mixed(file)
        assert bench.outcomes == {"done": 200}
        assert bench.backend.name == "threads"
        assert len(caplog.records) == 1
        assert script.calls["enter"] < 30


@pytest.mark.parametrize("fraction", [0.0, 0.3, 0.9])
async def test_partial_submissions(tmp_path, fraction):
    script = Script().add("enter", partial(fraction), every=2)
    async with Bench(tmp_path, script, timeout=20.0) as bench:
        file = await bench.fill()
        await bench.mixed(file, 300)
        assert bench.outcomes == {"done": 300}
        assert bench.backend.name == "io_uring"


async def test_short_transfers_resume_at_aligned_boundaries(tmp_path):
    requests = []

    class Watched(FakeRing):
        def read(self, tag, fd, buffer, offset):
            requests.append((offset, len(buffer)))
            return super().read(tag, fd, buffer, offset)

        def write(self, tag, fd, buffers, offset):
            requests.append((offset, sum(map(len, buffers))))
            return super().write(tag, fd, buffers, offset)

    script = Script()
    backend = UringBackend(ring_factory=lambda entries: Watched(entries, script=script), timeout=10.0)
    await backend.start(tmp_path)
    try:
        if not backend.direct:
            pytest.skip("NO DIRECT I/O IN THE TEMPORARY DIRECTORY: resuming is NOT checked in this run")
        file = await backend.open("data", create=True)
        data = pattern(9 * PAGE)
        source, target = aligned(9 * PAGE, data), aligned(9 * PAGE)
        script.add("write", short(0.7)).add("read", short(0.7)).add("read", short(0.3), nth=2)
        await backend.write(file, 0, [source[: 4 * PAGE], source[4 * PAGE :]])
        assert await backend.read(file, 0, target)
        assert target == data
        assert script.injected.total() == 3
        assert len(requests) >= 5
        assert not any((offset | size) % backend.alignment for offset, size in requests)
    finally:
        await backend.close()


@pytest.mark.parametrize("kind", ["read", "write"])
@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
async def test_refused_direct_io_falls_back_once_and_warns_once(tmp_path, caplog, kind, number):
    script = Script()
    async with Bench(tmp_path, script, timeout=20.0) as bench:
        if not bench.backend.direct:
            pytest.skip("NO DIRECT I/O IN THE TEMPORARY DIRECTORY: the fallback is NOT checked in this run")
        file = await bench.fill()
        assert file.direct
        # Each of eight goes straight and through a bounce buffer, until one of them is refused twice.
        for nth in range(1, 17):
            script.add(kind, error(number), nth=nth)
        with caplog.at_level(logging.WARNING):
            await asyncio.gather(*(bench.one(kind, file, at) for at in range(8)))
            script.clear()
            assert not bench.backend.direct
            assert not file.direct
            await bench.backend.write(file, 100, [bench.data[100:103]])
        assert bench.outcomes["done"] >= 6  # those refused when buffered have a true error
        assert len(caplog.records) == 1
        assert bench.backend.name == "io_uring"
        await bench.mixed(file)


async def test_one_refused_address_is_bounced(tmp_path):
    script = Script()
    async with Bench(tmp_path, script) as bench:
        file = await bench.fill()
        if not bench.backend.direct:
            pytest.skip("NO DIRECT I/O IN THE TEMPORARY DIRECTORY: bouncing is NOT checked in this run")
        script.add("read", error(errno.EINVAL)).add("write", error(errno.EINVAL))
        await bench.one("read", file, 3)
        await bench.one("write", file, 3)
        assert bench.outcomes == {"done": 2}
        assert bench.backend.direct


async def test_corruption_is_what_verify_is_for(tmp_path):
    script = Script()
    async with Bench(tmp_path, script) as bench:
        file = await bench.fill()
        script.add("read", corrupt())
        verify = lambda view: view == bench.data[:PAGE]  # noqa: E731
        assert await bench.backend.read(file, 0, aligned(PAGE), verify=verify) is False
        assert await bench.backend.read(file, 0, aligned(PAGE), verify=verify) is True


async def test_a_full_ring_of_hung_requests_keeps_deadlines(tmp_path):
    """What waits in front of the ring is given up at its deadline and released at once."""
    clock = ManualClock()
    script = Script()
    async with Bench(tmp_path, script, clock=clock, entries=4) as bench:
        file = await bench.fill()
        script.add("read", hang(), sticky=True)
        ends = [Ends() for _ in range(20)]
        reads = [bench.backend.read(file, at * PAGE, aligned(PAGE), released=end) for at, end in enumerate(ends)]
        await turns()
        clock.advance(TIMEOUT + 0.1)
        done = await asyncio.gather(*reads, return_exceptions=True)
        assert [type(each) for each in done] == [TimeoutError] * 20
        held = bench.ring.held
        assert 0 < held <= bench.ring.capacity
        assert sum(end.released for end in ends) == 20 - held
        assert bench.backend.reads_in_flight == held
        calls = script.calls["read"]
        script.clear()
        bench.ring.release_all()
        await asyncio.sleep(0.05)
        assert [end.released for end in ends] == [1] * 20
        assert script.calls["read"] == calls  # none of those given up was ever started


async def test_everything_at_once(tmp_path):
    """All kinds by chance: right bytes or an error, each released once, none past its deadline."""
    chance = random.Random(11)
    script = Script(chance)
    for operation in ("read", "write", "fsync"):
        for fault in (late(0.005), duplicate(), stale(), unknown(), silent(), backlogged(), error(errno.EIO)):
            script.add(operation, fault, probability=0.04)
    for operation in ("read", "write"):
        script.add(operation, short(0.5), probability=0.05).add(operation, error(errno.EAGAIN), probability=0.02)
    for fault in (partial(0.5), error(errno.EAGAIN), error(errno.EINTR), error(errno.EBUSY)):
        script.add("enter", fault, probability=0.05)
    async with Bench(tmp_path, script, shuffle=chance, timeout=20.0) as bench:
        file = await bench.fill()
        for seed in range(5):
            await bench.mixed(file, 400, seed)
        assert set(bench.outcomes) <= {"done", "OSError"}
        assert bench.outcomes["done"] > 1500
        assert (tmp_path / "data").read_bytes() == bench.data
    assert math.isclose(bench.outcomes.total(), 2000)


def test_the_fake_has_every_method_of_the_real_one():
    from asynckv import _uring

    for name in dir(_uring.Ring):
        if not name.startswith("_") and name not in ("abandon_in_child", "wait_for_one", "reserve"):
            assert hasattr(FakeRing, name) or hasattr(FakeRing(), name), name


async def test_lost_wake_ups_are_found_by_the_timer(tmp_path):
    script = Script().add("read", silent(), sticky=True)
    clock = ManualClock()

    class Deaf(FakeRing):
        """Completions never come at once, and are never announced."""

        def submit(self):
            count = super().submit()
            self.waiting = getattr(self, "waiting", [])
            self.waiting += self._completions
            self._completions.clear()
            return count

    rings = []

    def factory(entries):
        rings.append(Deaf(entries))
        return rings[-1]

    class Started(UringBackend):
        def _open_ring(self):
            super()._open_ring()
            rings[0].script = script

    backend = Started(ring_factory=factory, clock=clock, timeout=5.0)
    await backend.start(tmp_path)
    rings[0]._completions.extend(rings[0].waiting)  # that of the start
    rings[0].waiting.clear()
    (tmp_path / "data").write_bytes(b"x" * PAGE)
    file = await backend.open("data")
    future = backend.read(file, 0, aligned(PAGE))
    await turns()
    assert not future.done()
    rings[0]._completions.extend(rings[0].waiting)
    rings[0].waiting.clear()
    await turns()
    assert not future.done()
    clock.advance(0.06)
    assert await future is True
    assert backend.missed_wakes == 1
    assert await backend.close() == 0
