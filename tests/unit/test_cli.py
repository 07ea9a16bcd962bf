"""The command line: exit statuses, JSON, and what goes where."""

import contextlib
import errno
import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import asynckv
from asynckv import BlockingCache
from asynckv.cli import main
from asynckv.commands import demo, inspect
from asynckv.commands.output import UsageError, choose_loop
from asynckv.commands.replay import count, size
from asynckv.config import memory_limit

ROOT = Path(asynckv.__file__).parent.parent
TRACE = str(Path(__file__).parents[1] / "data/one-request.jsonl")
OPTIONS = {"memory": "1MiB", "disk": "16MiB", "segment": "256KiB"}


@pytest.fixture
def store(tmp_path):
    """A closed store with 100 blocks; the key of one of them is a text that must not be shown."""
    path = tmp_path / "store"
    with BlockingCache(path, **OPTIONS) as cache:
        cache.put_many((key, os.urandom(5000)) for key in range(99))
        cache.put("the-users-secret", os.urandom(50_000))
    return path


def run_json(capsys, *arguments) -> tuple[int, dict]:
    status = main([*map(str, arguments), "--json"])
    out = capsys.readouterr()
    assert out.err == ""
    return status, json.loads(out.out)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["fly"],
        ["replay"],
        ["replay", "/nonexistent"],
        ["replay", TRACE, "--memory", "many"],
        ["replay", TRACE, "--memory", "0"],
        ["replay", TRACE, "--disk", "5KiB"],
        ["replay", TRACE, "--block-bytes", "0"],
        ["replay", TRACE, "--memory", "1MiB", "--memory-blocks", "3"],
        ["replay", TRACE, "--memory-blocks", "0"],
        ["replay", TRACE, "--limit", "-1"],
        ["replay", TRACE, "--limit", "9" * 5000],
        ["replay", TRACE, "--memory", "9" * 5000],
        ["replay", TRACE, "--memory", "1.5"],
        ["replay", TRACE, "--memory", "8 PiB"],
        ["replay", TRACE, "--memory", "-1"],
        ["replay", TRACE, "--memory", ""],
        ["replay", TRACE, "--memory", "1000TiB"],
        ["replay", TRACE, "--memory", "1MiB", "--block-bytes", "2MiB"],
        ["replay", TRACE, "--memory", "1MiB", "--block-bytes", "900TiB"],
        ["replay", TRACE, "--memory-blocks", "9" * 30],
        ["replay", TRACE, "--memory-blocks", "9" * 15],
        ["replay", TRACE, "--memory-blocks", "1", "--block-bytes", "8000TiB"],
        ["replay", TRACE, "--memory-blocks", "1", "--block-bytes", str(memory_limit() // 2)],
        ["replay", TRACE, "--policy", "psychic"],
        ["replay", TRACE, "--loop", "twisted"],
        ["replay", __file__],
        ["replay", str(ROOT)],
        ["replay", sys.executable],
        ["replay", ""],
        ["replay", "a\0b"],
        ["stats"],
        ["stats", "/nonexistent"],
        ["verify", "/nonexistent"],
    ],
    ids=lambda arguments: " ".join(arguments)[:60],
)
def test_bad_usage_is_status_2_and_says_why(arguments, capsys):
    assert main(arguments) == 2
    complaint(capsys)


def complaint(capsys) -> str:
    """Return the one line that was said; the parser says how the command is used before it."""
    out = capsys.readouterr()
    assert out.out == ""
    *usage, line, end = out.err.split("\n")
    assert end == ""
    assert re.match(r"asynckv( \w+)?: .", line)
    assert not usage or usage[0].startswith("usage: asynckv")
    assert "force" not in line, "not something that the command line has"
    return line


def test_sizes_and_counts():
    assert [size(text) for text in ("0", "007", "64KiB", "1.5 GB")] == [0, 7, 65536, 1_500_000_000]
    assert count("12") == 12


def test_a_block_that_its_padding_makes_too_large(tmp_path, capsys):
    trace = tmp_path / "trace"
    trace.write_text('{"hash_ids": [8675309]}')
    assert main(["replay", str(trace), "--memory", "1000001", "--disk", "0", "--block-bytes", "1000001"]) == 2
    line = complaint(capsys)
    assert "does not fit a pool of 1,000,001 bytes" in line
    assert "8675309" not in line


def test_more_memory_than_there_is(capsys, monkeypatch):
    def fail(*_, **__):
        raise MemoryError

    monkeypatch.setattr(asynckv, "open", fail)
    assert main(["replay", TRACE, "--memory", "1MiB"]) == 2
    assert "memory" in complaint(capsys)


@pytest.mark.parametrize("value", ["warp", "IO_URING", " ", "threads,auto"])
@pytest.mark.parametrize("command", ["demo", "replay", "stats", "verify"])
def test_a_wrong_engine_in_the_environment(store, capsys, monkeypatch, command, value):
    monkeypatch.setenv("ASYNCKV_ENGINE", value)
    arguments = {"demo": [], "replay": [TRACE, "--engine", "threads"]}.get(command, [str(store)])
    assert main([command, *arguments]) == 2
    line = complaint(capsys)
    assert f"ASYNCKV_ENGINE={value!r}" in line
    assert "unset it" in line
    assert main([command, "--help"]) == 0
    monkeypatch.setenv("ASYNCKV_ENGINE", "")
    capsys.readouterr()
    if command in ("stats", "verify"):
        assert main([command, *arguments]) == 0


def directories(tmp_path: Path) -> dict[str, str]:
    """Return names that no command may take for a directory to make anything in."""
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "nowhere").symlink_to("gone")
    names = {name: str(tmp_path / name) for name in ("file", "file/below", "loop", "nowhere")}
    return names | {"proc": "/proc/new", "device": os.devnull, "long": "x" * 300, "empty": "", "NUL": "a\0b"}


@pytest.mark.parametrize("kind", ["file", "file/below", "loop", "nowhere", "proc", "device", "long", "empty", "NUL"])
@pytest.mark.parametrize("command", ["stats", "inspect", "verify", "doctor", "replay", "demo"])
def test_what_is_no_directory_is_status_2(tmp_path, capsys, command, kind):
    if (command, kind) == ("doctor", "proc"):
        return  # it looks at the parent of what is not there yet
    name = directories(tmp_path)[kind]
    before = sorted(tmp_path.iterdir())
    arguments = {"replay": [TRACE, "--memory", "1MiB", "--dir"], "demo": ["--dir"]}.get(command, [])
    assert main([command, *arguments, name]) == 2
    line = complaint(capsys)
    assert name in line or "\0" in name
    assert "Errno" not in line
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("command", ["stats", "inspect", "verify", "demo"])
def test_only_replay_makes_a_directory(tmp_path, capsys, command):
    name = str(tmp_path / "new" / "one")
    assert main([command, *(["--dir"] if command == "demo" else []), name]) == 2
    assert name in complaint(capsys)
    assert list(tmp_path.iterdir()) == []
    assert main(["replay", TRACE, "--memory", "1MiB", "--dir", name]) == 0


@pytest.mark.parametrize("command", ["stats", "verify", "replay"])
@pytest.mark.parametrize("unsafe", ["mode", "link"])
def test_an_unsafe_store_is_status_2(store, capsys, command, unsafe):
    name = str(store)
    if unsafe == "mode":
        store.chmod(0o770)
    else:
        name += "-link"
        Path(name).symlink_to(store)
    arguments = [TRACE, "--memory", "1MiB", "--dir"] if command == "replay" else []
    assert main([command, *arguments, name]) == 2
    assert name in complaint(capsys)


@pytest.mark.parametrize(
    ("number", "status"),
    [(errno.EACCES, 2), (errno.EROFS, 2), (errno.ENOSPC, 1), (errno.EIO, 1)],
    ids=["EACCES", "EROFS", "ENOSPC", "EIO"],
)
def test_errors_of_the_system(store, capsys, monkeypatch, number, status):
    def fail(_):
        raise OSError(number, os.strerror(number), "lock")

    monkeypatch.setattr(inspect, "inspect_directory", fail)
    assert main(["stats", str(store)]) == status
    assert complaint(capsys) == f"asynckv: {store}: {os.strerror(number)}"


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["replay", "--help"], ["verify", "--help"]])
def test_help_is_status_0(arguments, capsys):
    assert main(arguments) == 0
    assert "asynckv" in capsys.readouterr().out


def test_as_a_module_and_as_a_script():
    for command in ([sys.executable, "-m", "asynckv"], [sys.executable, "-c", "import asynckv.cli as c; c.main()"]):
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=60, cwd=ROOT)
        assert (done.returncode, done.stdout, done.stderr) == (0, f"asynckv {asynckv.__version__}\n", "")


def test_a_store_in_use_is_status_2(store, capsys):
    with BlockingCache(store, **OPTIONS):
        for arguments in (["replay", TRACE, "--dir", str(store), "--memory", "1MiB", "--disk", "16MiB"],):
            assert main(arguments) == 2
            assert str(os.getpid()) in capsys.readouterr().err


def test_an_unsafe_directory_is_status_2(store, capsys):
    store.chmod(0o777)
    assert main(["replay", TRACE, "--dir", str(store), "--memory", "1MiB", "--disk", "16MiB"]) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_a_trace_without_requests_is_status_2(tmp_path, capsys, text):
    trace = tmp_path / "trace"
    trace.write_text(text)
    assert main(["replay", str(trace), "--memory", "1MiB", "--dir", str(tmp_path / "new")]) == 2
    assert complaint(capsys) == f"asynckv: {trace}: there is no request in it"
    assert list(tmp_path.iterdir()) == [trace], "no store was made"


def test_each_count_is_there_once(capsys):
    status, results = run_json(capsys, "replay", TRACE, "--memory", "1MiB", "--disk", "0")
    assert status == 0
    required = """requests accesses memory_hits disk_hits misses block_hits prefix_hits wrong_blocks disk_bytes_written
    seconds engine direct policy"""
    assert set(required.split()) <= results.keys()
    assert not results.keys() & results["stats"].keys()
    assert results["stats"]["puts"] == results["misses"] == 3


def test_loops():
    assert choose_loop("asyncio")[0] == "asyncio"
    name, factory = choose_loop(None)
    assert name in ("asyncio", "uvloop")
    loop = factory()
    assert type(loop).__module__.partition(".")[0] == name
    loop.close()


def test_loop_that_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "uvloop", None)
    with pytest.raises(UsageError, match="uvloop"):
        choose_loop("uvloop")


def shell(command: str) -> tuple[int, str, str]:
    """Run a line of shell, where $A is the command; its status is the first one's of a pipe that fails."""
    line = f"set -o pipefail; A='{sys.executable} -m asynckv'; {command}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60, cwd=ROOT)
    return done.returncode, done.stdout, done.stderr


def test_a_reader_that_leaves_is_no_traceback(store):
    for unbuffered in ("", "1"):
        assert shell(f"export PYTHONUNBUFFERED={unbuffered}; (sleep 0.2; $A stats {store}) | true") == (141, "", "")
        status, out, err = shell(f"export PYTHONUNBUFFERED={unbuffered}; $A stats {store} | head -1")
        assert (out, err) == (f"statistics of {store}\n", "")
        assert status in (0, 141)


def test_results_that_cannot_be_written(store):
    for unbuffered in ("", "1"):
        status, _, err = shell(f"export PYTHONUNBUFFERED={unbuffered}; $A stats {store} >/dev/full")
        assert (status, err) == (1, "asynckv: No space left on device\n")


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams(store, closed):
    status, out, err = shell(f"$A replay {TRACE} --memory 1MiB --disk 16MiB --dir {store} {closed}")
    assert (status, [line for line in err.splitlines() if not line.startswith("io_uring is not used")]) == (0, [])
    assert bool(out) == (">&-" not in closed.replace("2>&-", ""))
    assert shell(f"$A verify {store}")[0] == 0
    assert shell(f"$A stats /nonexistent {closed}")[0] == 2


def test_names_that_the_terminal_cannot_show(tmp_path):
    for name in (b"caf\xe9", "café".encode()):
        trace = os.fsencode(tmp_path) + b"/" + name
        Path(os.fsdecode(trace)).write_text('{"hash_ids": [1]}')
        quoted = shlex.quote(os.fsdecode(trace))
        status, out, err = shell(f"export PYTHONIOENCODING=ascii; $A replay {quoted} --memory 1MiB --disk 0")
        assert (status, err) == (0, "")
        assert out.startswith("replay of ")


def test_an_interrupt_is_status_130_and_leaves_a_clean_line(tmp_path):
    trace = tmp_path / "trace"
    trace.write_text("".join(f'{{"hash_ids": [{each}]}}\n' for each in range(500_000)))
    # A shell starts its background jobs with SIGINT ignored, and this may be one.
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); import asynckv.cli as c; "
    command = [sys.executable, "-c", f"{code}sys.exit(c.main())"]
    command += ["replay", str(trace), "--memory", "1MiB", "--disk", "0"]
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=theirs)
    os.close(theirs)
    out = b""
    with contextlib.suppress(OSError):  # what a terminal says when nobody is at its other end any more
        while piece := os.read(ours, 4096):
            if not out:
                process.send_signal(signal.SIGINT)
            out += piece
    os.close(ours)
    assert process.wait(timeout=60) == 130
    *_, shown, blank, end = out.split(b"\r")
    assert b"request" in shown
    assert (blank.strip(), end) == (b"", b"")
    assert len(blank) >= len(shown) + len("^C"), "the terminal shows that, too"
    assert list(tmp_path.iterdir()) == [trace]


def test_demo_small(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(demo, "TRACE_POOL", 2 << 20)
    monkeypatch.setattr(demo, "TRACE_DISK", 64 << 20)
    assert main(["demo", "--dir", str(tmp_path)]) == 0
    out = capsys.readouterr()
    assert out.err == ""
    lines = [line.split() for line in out.out.splitlines()]
    assert ["memory", "hits", "0"] in lines
    assert ["disk", "hits", "20"] in lines
    assert ["misses", "0"] in lines
    assert "mean disk load" in out.out
    assert "right to the last byte" in out.out.splitlines()[-1]
    assert list(tmp_path.iterdir()) == [], "the demo cleans up"


def test_demo_json(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(demo, "TRACE_POOL", 2 << 20)
    monkeypatch.setattr(demo, "TRACE_DISK", 64 << 20)
    status, results = run_json(capsys, "demo", "--dir", tmp_path)
    assert status == 0
    assert (results["article"]["memory_hits"], results["article"]["disk_hits"]) == (0, 20)
    assert results["trace"]["wrong_blocks"] == 0
    assert results["trace"]["disk_hits"] > 0


def test_demo_without_room_on_the_disk(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(demo, "TRACE_DISK", 1 << 60)
    assert main(["demo", "--dir", str(tmp_path)]) == 2
    assert "free" in capsys.readouterr().err


def test_stats_of_a_store(store, capsys):
    status, report = run_json(capsys, "stats", store)
    assert status == 0
    assert report["live_blocks"] == 100
    assert report["live_bytes"] == 99 * 5000 + 50_000
    assert report["ok"]
    assert report["allocated"] > 0
    assert main(["stats", str(store)]) == 0
    out = capsys.readouterr().out
    assert "live blocks     100" in out
    assert "secret" not in out + json.dumps(report)


def test_stats_of_a_store_in_use(store, capsys):
    with BlockingCache(store, **OPTIONS):
        assert main(["stats", str(store)]) == 0
        capsys.readouterr()
        assert main(["verify", str(store)]) == 2
        assert str(os.getpid()) in capsys.readouterr().err


def test_verify(store, capsys):
    status, report = run_json(capsys, "verify", store)
    assert status == 0
    assert (report["verified_blocks"], report["corrupt_blocks"], report["ok"]) == (100, 0, True)
    assert main(["verify", str(store)]) == 0
    assert "Every record and every block is whole." in capsys.readouterr().out


def test_verify_finds_a_flipped_bit(store, capsys):
    path = sorted(store.glob("*.seg"))[0]
    data = bytearray(path.read_bytes())
    place = data.index(b"\0" * 8, 4 * 4096) - 100  # inside the payloads, in front of the first gap
    data[place] ^= 4
    path.write_bytes(data)
    status, report = run_json(capsys, "verify", store)
    assert status == 1
    assert not report["ok"]
    assert report["all_damage"]
    assert main(["verify", str(store)]) == 1
    out = capsys.readouterr().out
    assert "DAMAGE" in out
    assert "FAILED" in out
    assert "secret" not in out


def test_a_directory_that_is_no_store_is_status_2(tmp_path, capsys):
    tmp_path.chmod(0o700)
    for command in ("stats", "verify"):
        assert main([command, str(tmp_path)]) == 2
        assert "not a store" in capsys.readouterr().err
        assert list(tmp_path.iterdir()) == []
