"""Which engine serves a directory: the ring only where it was seen to work, else threads and a warning, or an error."""

import asyncio
import errno
import logging
import os
import sys
import types

import pytest

import asynckv
from asynckv.backends import ChosenBackend, ThreadsBackend, choice, create_backend, files, probes, system
from asynckv.backends.choice import NoRingError, start_ring
from asynckv.errors import DiskError
from asynckv.testing import FaultyFiles, Script, corrupt, error, hang
from asynckv.testing.contract import BackendContract
from asynckv.testing.tools import PAGE, aligned, pattern, threads_gone, turns

SMALL = {"memory": "1MiB", "disk": "16MiB", "segment": "256KiB"}
SEEN = "asynckv.backends"


class TestChosen(BackendContract):
    """Whatever was chosen keeps all the promises, seen through the choice."""

    def make(self, **options):
        return create_backend("auto", **options)


class Ring(ThreadsBackend):
    """Stands in for the ring: faults by script, a refusal at start when there is one."""

    name = "io_uring"
    refusal = None
    script = None
    starts = 0
    files_made = None

    def __init__(self, **options):
        files = FaultyFiles(Ring.script) if Ring.script is not None else None
        Ring.files_made = files
        super().__init__(files=files, **options)

    async def start(self, directory):
        Ring.starts += 1
        if Ring.refusal is not None:
            raise Ring.refusal
        await super().start(directory)


@pytest.fixture
def ring(monkeypatch):
    """The stand-in in the place of the ring, on a kernel that is new enough."""
    for name, value in (("refusal", None), ("script", None), ("starts", 0), ("files_made", None)):
        monkeypatch.setattr(Ring, name, value)
    monkeypatch.setitem(sys.modules, "asynckv.backends.uring", types.SimpleNamespace(UringBackend=Ring))
    monkeypatch.setattr(system, "kernel_release", lambda: "6.6.1-test")
    monkeypatch.setattr(choice, "kernel_release", lambda: "6.6.1-test")
    monkeypatch.delenv("ASYNCKV_ENGINE", raising=False)
    return Ring


@pytest.fixture
def seen():
    """The warnings of the library."""
    records = []

    class Keep(logging.Handler):
        def emit(self, record):
            records.append(record)

    handler = Keep(logging.WARNING)
    logging.getLogger("asynckv").addHandler(handler)
    yield records
    logging.getLogger("asynckv").removeHandler(handler)


async def started(engine, directory, **options):
    backend = create_backend(engine, **{"timeout": 30.0, **options})
    await backend.start(directory)
    return backend


async def round_trip(backend):
    data = pattern(4 * PAGE)
    file = await backend.open("data", create=True)
    await backend.write(file, 0, [aligned(4 * PAGE, data)])
    await backend.sync(file)
    target = aligned(4 * PAGE)
    assert await backend.read(file, 0, target)
    assert target == data


def refused(number):
    return OSError(number, os.strerror(number))


async def test_a_ring_that_works_is_chosen_without_a_word(tmp_path, ring, seen):
    backend = create_backend("auto", timeout=30.0)
    assert backend.name == "auto"
    await backend.start(tmp_path)
    assert backend.name == "io_uring"
    assert await backend.list() == []
    await round_trip(backend)
    assert backend.reads_in_flight == backend.writes_in_flight == 0
    assert await backend.close() == 0
    assert not seen


@pytest.mark.parametrize(
    "number", [errno.EPERM, errno.ENOSYS, errno.EACCES, errno.ENOMEM, errno.EINVAL, errno.ETIMEDOUT]
)
async def test_a_refused_ring_means_threads_and_one_warning_with_the_reason(tmp_path, ring, seen, number):
    ring.refusal = refused(number)
    backend = await started("auto", tmp_path)
    assert backend.name == "threads"
    await round_trip(backend)
    assert await backend.close() == 0
    assert len(seen) == 1
    assert errno.errorcode[number] in seen[0].getMessage()
    assert "threads" in seen[0].getMessage()


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS, errno.EACCES])
@pytest.mark.parametrize("operation", ["pwritev", "preadv", "fdatasync"])
async def test_a_ring_that_starts_and_then_refuses(tmp_path, ring, seen, operation, number):
    """A start with direct I/O off moves nothing: the first transfers are those of the choice."""
    ring.script = Script().add(operation, error(number), sticky=True)
    before = len(os.listdir("/proc/self/fd"))
    backend = await started("auto", tmp_path, direct=False)
    assert backend.name == "threads"
    await round_trip(backend)
    assert await backend.close() == 0
    assert len(seen) == 1
    assert errno.errorcode[number] in seen[0].getMessage()
    assert os.listdir(tmp_path) == ["data"]
    assert len(os.listdir("/proc/self/fd")) <= before


async def test_a_ring_with_wrong_bytes_is_not_used(tmp_path, ring, seen):
    ring.script = Script().add("preadv", corrupt(), sticky=True)
    backend = await started("auto", tmp_path, direct=False)
    assert backend.name == "threads"
    assert "other bytes" in seen[0].getMessage()
    assert await backend.close() == 0


async def test_a_ring_that_never_answers_is_not_used(tmp_path, ring, seen):
    ring.script = Script().add("preadv", hang())
    backend = await started("auto", tmp_path, direct=False, timeout=0.05)
    assert backend.name == "threads"
    assert "ETIMEDOUT" in seen[-1].getMessage()
    assert await backend.close() == 0
    ring.files_made.release_all()
    await threads_gone()
    await turns()


@pytest.mark.parametrize("unnamed", [True, False], ids=["O_TMPFILE", "no O_TMPFILE"])
async def test_the_proof_touches_nobodys_file(tmp_path, ring, monkeypatch, unnamed):
    if not unnamed:
        monkeypatch.setattr(files, "O_TMPFILE", 0)
    for name in ("probe.tmp", "speed.tmp", "probe"):
        (tmp_path / name).write_text("a user's")
    backend = await started("auto", tmp_path)
    assert backend.name == "io_uring"
    assert await backend.close() == 0
    assert (await probes.speed("auto", str(tmp_path), 0.02)).wrong == 0
    assert {each.name: each.read_text() for each in tmp_path.iterdir()} == dict.fromkeys(
        ("probe.tmp", "speed.tmp", "probe"), "a user's"
    )


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("operation", ["temporary", "pwritev"])
async def test_a_full_disk_says_nothing_against_the_ring(tmp_path, ring, seen, operation, number):
    ring.script = Script().add(operation, error(number), sticky=True)
    backend = await started("auto", tmp_path, direct=False)
    assert backend.name == "io_uring"
    assert await backend.close() == 0
    assert not seen


async def test_a_ring_that_became_threads_in_its_first_use(tmp_path, ring, seen, monkeypatch):
    """It has warned by then: once is enough."""
    monkeypatch.setattr(Ring, "name", "threads")
    backend = await started("auto", tmp_path)
    assert backend.name == "threads"
    await round_trip(backend)
    assert await backend.close() == 0
    assert not seen
    with pytest.raises(DiskError, match="first use"):
        await started("io_uring", tmp_path)
    with pytest.raises(probes.NoRingError, match="first use"):
        await probes.ring_works(str(tmp_path))


@pytest.mark.parametrize(
    ("release", "old"), [("5.15.0-91", True), ("6.0.19", True), ("6.1.0", False), ("7.0-rc1", False), ("odd", True)]
)
async def test_an_old_kernel_gets_threads_unless_forced(tmp_path, ring, seen, monkeypatch, release, old):
    monkeypatch.setattr(system, "kernel_release", lambda: release)
    monkeypatch.setattr(choice, "kernel_release", lambda: release)
    backend = await started("auto", tmp_path)
    assert backend.name == ("threads" if old else "io_uring")
    assert ring.starts == (not old)
    assert [release in record.getMessage() for record in seen] == [True] * old
    assert await backend.close() == 0
    backend = await started("io_uring", tmp_path)
    assert backend.name == "io_uring"
    assert await backend.close() == 0


async def test_a_build_without_the_header(tmp_path, seen, monkeypatch):
    monkeypatch.setitem(sys.modules, "asynckv.backends.uring", None)
    monkeypatch.setattr(choice, "old_kernel", lambda: "")
    backend = await started("auto", tmp_path)
    assert backend.name == "threads"
    assert len(seen) == 1
    assert "linux/io_uring.h" in seen[0].getMessage()
    assert await backend.close() == 0
    with pytest.raises(DiskError, match=r"linux/io_uring\.h"):
        await started("io_uring", tmp_path)


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS, errno.EACCES])
async def test_a_forced_ring_that_is_refused_is_an_error(tmp_path, ring, seen, number):
    ring.refusal = refused(number)
    backend = create_backend("io_uring")
    with pytest.raises(DiskError, match=errno.errorcode[number]) as caught:
        await backend.start(tmp_path)
    assert caught.value.errno == number
    assert await backend.close() == 0
    with pytest.raises(DiskError, match=errno.errorcode[number]):
        await asynckv.open(tmp_path / "kv", **SMALL, engine="io_uring")
    ring.refusal = None  # the failed open left no lock behind
    async with asynckv.open(tmp_path / "kv", **SMALL, engine="io_uring") as cache:
        assert cache.stats().engine == "io_uring"
    assert not seen


async def test_direct_demanded_and_not_possible_is_an_error_whatever_was_chosen(tmp_path, ring, seen):
    ring.refusal = DiskError("direct I/O is not possible", errno=errno.EINVAL)
    if not os.path.isdir("/dev/shm"):
        pytest.skip("NO /dev/shm: a directory without direct I/O is NOT checked in this run")
    for engine in ("auto", "io_uring"):
        backend = create_backend(engine, direct=True)
        with pytest.raises(DiskError, match="direct"):
            await backend.start("/dev/shm")
        assert await backend.close() == 0
    assert not seen


async def test_a_cancelled_start_leaves_nothing(tmp_path, ring):
    before = len(os.listdir("/proc/self/fd"))
    for spin in range(12):
        backend = create_backend("auto", timeout=30.0)
        start = asyncio.ensure_future(backend.start(tmp_path))
        for _ in range(spin):
            await asyncio.sleep(0)
        await asyncio.sleep(0.0002 * spin)
        start.cancel()
        await asyncio.wait([start])
        assert await backend.close() == 0
    assert os.listdir(tmp_path) == []
    assert len(os.listdir("/proc/self/fd")) <= before


async def test_a_store_tells_what_serves_it(tmp_path, ring, seen):
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        assert cache.stats().engine == "io_uring"
    ring.refusal = refused(errno.EPERM)
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        assert cache.stats().engine == "threads"
    assert [record.name.startswith(SEEN) for record in seen] == [True]


async def test_bad_arguments():
    with pytest.raises(ValueError, match="direct"):
        create_backend("auto", direct="perhaps")
    with pytest.raises(ValueError, match="engine"):
        create_backend("steam")
    with pytest.raises(NoRingError):
        await start_ring("/nonexistent-directory")


async def test_start_twice(tmp_path, ring):
    backend = await started("auto", tmp_path)
    with pytest.raises(RuntimeError):
        await backend.start(tmp_path)
    assert await backend.close() == 0
    assert await ChosenBackend("auto").close() == 0


# the words for a refusal


@pytest.mark.parametrize(
    ("setting", "word"), [("2\n", "io_uring_disabled is 2"), ("1\n", "io_uring_group"), ("0\n", "EPERM")]
)
def test_the_sysctl_is_named(tmp_path, monkeypatch, setting, word):
    (tmp_path / "sysctl").write_text(setting)
    monkeypatch.setattr(system, "IO_URING_SYSCTL", str(tmp_path / "sysctl"))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert word in system.ring_refusal(refused(errno.EPERM))


def test_a_kernel_without_the_sysctl(tmp_path, monkeypatch):
    monkeypatch.setattr(system, "IO_URING_SYSCTL", str(tmp_path / "none"))
    assert system.io_uring_sysctl() is None
    assert "EPERM" in system.ring_refusal(refused(errno.EPERM))


@pytest.mark.parametrize("number", [errno.EPERM, errno.EACCES, errno.ENOSYS])
def test_a_seccomp_filter_is_named(monkeypatch, number):
    monkeypatch.setattr(system, "io_uring_sysctl", lambda: 0)
    monkeypatch.setattr(system, "seccomp_mode", lambda: 2)
    assert "seccomp" in system.ring_refusal(refused(number))
    monkeypatch.setattr(system, "seccomp_mode", lambda: 0)
    assert "seccomp" not in system.ring_refusal(refused(number))
    assert errno.errorcode[number] in system.ring_refusal(refused(number))


def test_the_memlock_limit_is_named(monkeypatch):
    monkeypatch.setattr(system, "memlock_limit", lambda: 64 << 10)
    assert "64 KiB" in system.ring_refusal(refused(errno.ENOMEM))


def test_what_has_no_number(tmp_path):
    assert system.ring_refusal(ValueError("odd")) == "odd"
    assert system.ring_refusal(OSError()) == "OSError"
    assert system.read_text(str(tmp_path / "none")) == ""
    assert system.seccomp_mode() in (0, 1, 2, None)
