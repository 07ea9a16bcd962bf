"""``asynckv doctor``: every line has a status and an advice, the exit status follows, and nothing is left behind."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import asynckv
from asynckv import BlockingCache
from asynckv.backends import probes
from asynckv.cli import main
from asynckv.commands import doctor
from asynckv.tiers.inspect import look_at

ROOT = Path(asynckv.__file__).parent.parent
OPTIONS = {"memory": "1MiB", "disk": "16MiB", "segment": "256KiB"}
MACHINE = ["kernel", "memory", "RAM", "memlock", "CPU", "prefix keys", "ASYNCKV_ENGINE"]
PLACE = ["directory", "file system", "free space", "inodes"]
GIB = 1 << 30


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(doctor, "SECONDS", 0.06)
    monkeypatch.delenv("ASYNCKV_ENGINE", raising=False)


@pytest.fixture
def machine(monkeypatch):
    """No processes are started and nothing is measured: for tests of the judgement alone."""

    async def ring_works(directory):
        return True

    async def speed(engine, directory, seconds):
        return probes.Speed(engine, True, 1e9, 1e9, 1e-4, 0)

    monkeypatch.setattr(probes, "hash_seeds_agree", lambda: "")
    monkeypatch.setattr(probes, "ring_works", ring_works)
    monkeypatch.setattr(probes, "speed", speed)
    return monkeypatch


def run_json(capsys, *arguments):
    status = main(["doctor", *map(str, arguments), "--json"])
    out = capsys.readouterr()
    assert out.err == ""
    report = json.loads(out.out)
    assert status == (0 if report["ok"] else 1)
    checks = {check["name"]: check for check in report["checks"]}
    assert len(checks) == len(report["checks"])
    assert {check["status"] for check in report["checks"]} <= {"OK", "WARN", "FAIL"}
    assert report["ok"] == all(check["status"] != "FAIL" for check in report["checks"])
    assert all(check["advice"] for check in report["checks"] if check["status"] != "OK")
    return report, checks


def snapshot(directory):
    return {
        str(path): (path.stat().st_size, path.stat().st_mtime_ns, path.stat().st_ino)
        for path in sorted([directory, *directory.rglob("*")])
    }


def async_raise(error):
    async def fail(*_):
        raise error

    return fail


# the whole thing


def test_a_healthy_directory(tmp_path, capsys):
    assert main(["doctor", str(tmp_path)]) == 0
    out = capsys.readouterr()
    assert out.err == ""
    lines = out.out.splitlines()
    assert lines[0].endswith(str(tmp_path))
    assert lines[-1].endswith("0 FAIL")
    for name in (*MACHINE, *PLACE, "O_DIRECT", "io_uring", "speed, threads", "speed, aiofiles"):
        assert any(name in line and line.split()[0] in ("OK", "WARN") for line in lines), name
    assert list(tmp_path.iterdir()) == []


def test_json(tmp_path, capsys):
    report, checks = run_json(capsys, tmp_path)
    assert list(checks)[:13] == [*MACHINE, *PLACE, "O_DIRECT", "io_uring"]
    assert report["directory"] == str(tmp_path)
    assert report["version"] == asynckv.__version__
    assert {"threads", "aiofiles"} <= set(report["speed"])
    assert ("io_uring" in report["speed"]) == checks["io_uring"]["found"].startswith("works")
    for engine, figures in report["speed"].items():
        assert figures["engine"] == engine
        assert figures["write_rate"] > 0 < figures["read_rate"]
        assert 0 < figures["read_p50"] < 5
        assert figures["wrong"] == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["new", "new/one/", "./new"])
def test_a_directory_that_does_not_exist_yet(tmp_path, capsys, machine, name):
    """Its nearest parent is looked at, and nothing is made."""
    machine.chdir(tmp_path)
    report, checks = run_json(capsys, name)
    assert (report["ok"], report["directory"]) == (True, str(tmp_path))
    assert f"{name} does not exist yet" in checks["place"]["found"]
    assert str(tmp_path) in checks["place"]["found"]
    assert list(tmp_path.iterdir()) == []


def test_the_current_directory_is_the_default(tmp_path, capsys, machine):
    machine.chdir(tmp_path)
    report, _ = run_json(capsys)
    assert report["directory"] == str(tmp_path)


@pytest.mark.parametrize("arguments", [[__file__], [".", "more"], ["--fast"]], ids=" ".join)
def test_bad_usage_is_status_2(arguments, capsys):
    assert main(["doctor", *arguments]) == 2
    out = capsys.readouterr()
    assert out.out == ""
    assert "asynckv" in out.err
    assert "Traceback" not in out.err


@pytest.mark.parametrize(
    ("number", "interrupts"),
    [(signal.SIGTERM, "default_int_handler"), (signal.SIGTERM, "SIG_IGN"), (signal.SIGINT, "default_int_handler")],
)
def test_a_signal_leaves_nothing_behind(tmp_path, number, interrupts):
    # A shell starts its background jobs with SIGINT ignored.
    code = f"import signal; signal.signal(signal.SIGINT, signal.{interrupts}); "
    code += "import sys, asynckv.cli, asynckv.commands.doctor as d; d.SECONDS = 30; sys.exit(asynckv.cli.main())"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "doctor", str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    for _ in range(600):
        if any(tmp_path.iterdir()):
            break
        time.sleep(0.05)
    assert any(tmp_path.iterdir())
    time.sleep(0.3)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert b"Traceback" not in err
    assert list(tmp_path.iterdir()) == []


# stores


def test_a_store_in_use_is_only_looked_at(tmp_path, capsys):
    path = tmp_path / "store"
    with BlockingCache(path, **OPTIONS) as cache:
        cache.put(1, b"x" * 5000)
        cache.flush()
        before = snapshot(path)
        report, checks = run_json(capsys, path)
        assert checks["directory"]["status"] == "WARN"
        assert str(os.getpid()) in checks["directory"]["found"]
        assert list(checks) == [*MACHINE, *PLACE]
        assert report["speed"] == {}
        assert snapshot(path) == before
        # the lock is still ours: another process is refused, and is told who has it
        code = "import sys; from asynckv.tiers.inspect import look_at; print(*look_at(sys.argv[1]))"
        seen = subprocess.run(
            [sys.executable, "-c", code, str(path)], capture_output=True, text=True, cwd=ROOT, timeout=60
        )
        assert seen.stdout.split() == ["True", str(os.getpid())], seen.stderr
        assert cache.get(1) is not None


def test_a_closed_store_keeps_its_files(tmp_path, capsys):
    path = tmp_path / "store"
    with BlockingCache(path, **OPTIONS) as cache:
        cache.put(1, b"x" * 5000)
    before = {name: what for name, what in snapshot(path).items() if name != str(path)}
    _, checks = run_json(capsys, path)
    assert checks["directory"]["status"] == "OK"
    assert "store" in checks["directory"]["found"]
    assert {name: what for name, what in snapshot(path).items() if name != str(path)} == before
    with BlockingCache(path, **OPTIONS) as cache:
        assert cache.get(1) == b"x" * 5000


def test_an_unsafe_store_fails(tmp_path, capsys, machine):
    path = tmp_path / "store"
    with BlockingCache(path, **OPTIONS):
        pass
    path.chmod(0o770)
    _, checks = run_json(capsys, path)
    assert checks["directory"]["status"] == "FAIL"
    assert "writable" in checks["directory"]["found"]
    assert "0700" in checks["directory"]["advice"]


@pytest.mark.parametrize("what", ["writable", "symlink"])
def test_a_directory_that_is_only_good_for_a_store_below_it(tmp_path, capsys, machine, what):
    path = tmp_path / "place"
    path.mkdir()
    if what == "writable":
        path.chmod(0o777)
    else:
        path = tmp_path / "link"
        path.symlink_to(tmp_path / "place")
    report, checks = run_json(capsys, path)
    assert report["ok"]
    assert checks["directory"]["status"] == "WARN"
    assert what in checks["directory"]["found"]
    assert "below" in checks["directory"]["advice"]
    assert "O_DIRECT" in checks


def test_looking(tmp_path):
    assert look_at(tmp_path) == (False, None, "")
    tmp_path.chmod(0o777)
    store, holder, objection = look_at(tmp_path)
    assert (store, holder) == (False, None)
    assert "writable" in objection


def test_a_directory_that_nobody_may_write_to(tmp_path, capsys, machine):
    machine.setattr(os, "access", lambda *_: False)
    _, checks = run_json(capsys, tmp_path)
    assert checks["directory"]["status"] == "FAIL"
    assert list(checks) == [*MACHINE, *PLACE]


def test_a_directory_that_cannot_be_written_after_all(tmp_path, capsys, machine):
    def refuse(**_):
        raise OSError(errno.ENOSPC, "No space left on device")

    machine.setattr(doctor.tempfile, "TemporaryDirectory", refuse)
    _, checks = run_json(capsys, tmp_path)
    assert checks["writing"]["status"] == "FAIL"
    assert checks["writing"]["advice"] == "make room"


# what each line judges


def test_a_machine_with_little_memory(tmp_path, capsys, machine):
    machine.setattr(probes, "memory_limit", lambda: 64 << 20)
    machine.setattr(probes, "memory_available", lambda: (64 << 20, 1 << 20))
    machine.setattr(probes, "huge_pages", lambda: ("", 0))
    _, checks = run_json(capsys, tmp_path)
    assert checks["memory"]["status"] == "FAIL"
    assert "memory=" in checks["memory"]["advice"]
    assert checks["RAM"]["status"] == "WARN"
    machine.setattr(probes, "memory_available", lambda: (0, 0))
    assert run_json(capsys, tmp_path)[1]["RAM"]["status"] == "WARN"


def test_an_old_kernel_with_little_to_lock(tmp_path, capsys, machine):
    machine.setattr(probes, "old_kernel", lambda: "kernel 5.10.1 is older than 6.1")
    machine.setattr(probes, "kernel_version", lambda: (5, 10))
    machine.setattr(probes, "memlock_limit", lambda: 64 << 10)
    report, checks = run_json(capsys, tmp_path)
    assert report["ok"]
    assert [checks[name]["status"] for name in ("kernel", "memlock", "io_uring")] == ["WARN"] * 3
    assert "64 KiB" in checks["memlock"]["found"]
    machine.setattr(probes, "memlock_limit", lambda: None)
    assert run_json(capsys, tmp_path)[1]["memlock"]["status"] == "OK"


def test_a_single_cpu(tmp_path, capsys, machine):
    machine.setattr(probes, "cpu_flags", lambda: ("x86_64", 1, []))
    assert run_json(capsys, tmp_path)[1]["CPU"]["status"] == "WARN"


@pytest.mark.parametrize(
    ("value", "status", "found"),
    [
        (None, "OK", "not set"),
        ("", "OK", "not set"),
        ("threads", "OK", "threads"),
        ("warp", "FAIL", "'warp' is no engine"),
        ("IO_URING", "FAIL", "'IO_URING' is no engine"),
    ],
)
def test_the_engine_of_the_environment(tmp_path, capsys, machine, value, status, found):
    if value is not None:
        machine.setenv("ASYNCKV_ENGINE", value)
    report, checks = run_json(capsys, tmp_path)
    assert checks["ASYNCKV_ENGINE"]["status"] == status
    assert found in checks["ASYNCKV_ENGINE"]["found"]
    assert report["ok"] == (status == "OK")
    if status == "FAIL":
        assert "unset it" in checks["ASYNCKV_ENGINE"]["advice"]


def test_prefix_keys_that_differ(tmp_path, capsys, machine):
    machine.setattr(probes, "hash_seeds_agree", lambda: "two processes computed different keys")
    assert run_json(capsys, tmp_path)[1]["prefix keys"]["status"] == "FAIL"

    def expire():
        raise subprocess.TimeoutExpired("python", 60)

    machine.setattr(probes, "hash_seeds_agree", expire)
    assert run_json(capsys, tmp_path)[1]["prefix keys"]["status"] == "WARN"


def test_prefix_keys_of_two_processes(monkeypatch):
    assert probes.hash_seeds_agree() == ""
    monkeypatch.setattr(probes, "_KEYS_CODE", "import os\nfor _ in range(2): print(os.environ['PYTHONHASHSEED'])")
    assert "different" in probes.hash_seeds_agree()
    monkeypatch.setattr(probes, "_KEYS_CODE", "raise SystemExit('broken')")
    assert "broken" in probes.hash_seeds_agree()


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("ext4", "OK"),
        ("xfs", "OK"),
        ("btrfs", "OK"),
        ("tmpfs", "WARN"),
        ("overlay", "WARN"),
        ("nfs4", "WARN"),
        ("fuse.sshfs", "WARN"),
        ("unknown", "WARN"),
    ],
)
def test_file_systems(kind, status):
    check = doctor._file_system(probes.FileSystem(kind, "/", 100 * GIB, 0, 0))[0]
    assert (check.name, check.status) == ("file system", status)
    assert kind in check.found


@pytest.mark.parametrize(("free", "status"), [(100 * GIB, "OK"), (GIB, "WARN"), (1 << 17, "FAIL")])
def test_free_space(free, status):
    assert doctor._file_system(probes.FileSystem("ext4", "/", free, 0, 0))[1].status == status


@pytest.mark.parametrize(
    ("total", "left", "status"), [(0, 0, "OK"), (10_000, 9_000, "OK"), (10_000, 10, "WARN"), (10_000, 0, "FAIL")]
)
def test_inodes(total, left, status):
    assert doctor._file_system(probes.FileSystem("ext4", "/", GIB, total, left))[2].status == status


def test_the_file_system_of_a_directory(tmp_path):
    found = probes.file_system(str(tmp_path))
    assert found.kind != "unknown"
    assert str(tmp_path).startswith(found.mounted_on)
    assert found.free > 0
    if os.path.isdir("/dev/shm"):
        assert probes.file_system("/dev/shm").kind in ("tmpfs", "ramfs")


def test_direct_io(tmp_path, capsys, machine):
    machine.setattr(probes, "direct_io", lambda _: (False, 4096, "open: Invalid argument"))
    assert run_json(capsys, tmp_path)[1]["O_DIRECT"]["status"] == "WARN"

    def fail(_):
        raise OSError(errno.EIO, "Input/output error")

    machine.setattr(probes, "direct_io", fail)
    assert run_json(capsys, tmp_path)[1]["O_DIRECT"]["status"] == "FAIL"


def no_ring(number, cause=None):
    error = probes.NoRingError(number, f"{errno.errorcode[number]}: because")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "sysctl", "seccomp", "words"),
    [
        (no_ring(errno.ENOSYS, ImportError("none")), 0, 0, "headers"),
        (no_ring(errno.EPERM), 2, 0, "kernel.io_uring_disabled=0"),
        (no_ring(errno.EPERM), 0, 2, "seccomp profile"),
        (no_ring(errno.EACCES), None, 2, "io_uring_enter"),
        (no_ring(errno.ENOSYS), None, 2, "seccomp profile"),
        (no_ring(errno.ENOSYS), None, 0, "CONFIG_IO_URING"),
        (no_ring(errno.ENOMEM), 0, 0, "memlock"),
        (no_ring(errno.EINVAL), 0, 0, "reason"),
    ],
)
def test_why_there_is_no_ring_and_what_to_do(tmp_path, capsys, machine, error, sysctl, seccomp, words):
    machine.setattr(probes, "ring_works", async_raise(error))
    machine.setattr(probes, "io_uring_sysctl", lambda: sysctl)
    machine.setattr(probes, "seccomp_mode", lambda: seccomp)
    report, checks = run_json(capsys, tmp_path)
    assert report["ok"]
    assert checks["io_uring"]["status"] == "WARN"
    assert "because" in checks["io_uring"]["found"]
    assert words in checks["io_uring"]["advice"]
    assert "speed, io_uring" not in checks
    machine.setenv("ASYNCKV_ENGINE", "io_uring")
    assert run_json(capsys, tmp_path)[1]["io_uring"]["status"] == "FAIL"


@pytest.mark.parametrize(
    ("result", "status"),
    [
        (probes.Speed("threads", True, 1e9, 1e9, 1e-4, 0), "OK"),
        (probes.Speed("threads", False, 1e7, 1e9, 1e-4, 0), "WARN"),
        (probes.Speed("threads", True, 1e9, 1e9, 0.02, 0), "WARN"),
        (probes.Speed("other", True, 1e9, 1e9, 1e-4, 0), "WARN"),
        (probes.Speed("threads", True, 1e9, 1e9, 1e-4, 3), "FAIL"),
    ],
)
def test_speeds(tmp_path, capsys, machine, result, status):
    async def speed(*_):
        return result

    machine.setattr(probes, "speed", speed)
    report, checks = run_json(capsys, tmp_path)
    assert checks["speed, threads"]["status"] == status
    assert report["speed"]["threads"]["wrong"] == result.wrong


def test_an_engine_that_fails(tmp_path, capsys, machine):
    machine.setattr(probes, "speed", async_raise(OSError(errno.EIO, "Input/output error")))
    report, checks = run_json(capsys, tmp_path)
    assert checks["speed, threads"]["status"] == "FAIL"
    assert report["speed"] == {}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("engine", ["threads", "aiofiles"])
async def test_the_speed_test_checks_every_read(tmp_path, monkeypatch, engine):
    result = await probes.speed(engine, str(tmp_path), 0.05)
    assert (result.engine, result.wrong) == (engine, 0)
    assert list(tmp_path.iterdir()) == []

    write = probes._SpeedRun.write

    async def spoilt(run, seconds):
        rate = await write(run, seconds)
        view, _ = probes._aligned(4096)
        for at in range(0, run.written, probes.READ_BYTES):
            await run.backend.write(run.file, at + 8192, [view])
        return rate

    monkeypatch.setattr(probes._SpeedRun, "write", spoilt)
    assert (await probes.speed(engine, str(tmp_path), 0.05)).wrong > 0
