"""The command line: exit statuses, JSON, and what goes where."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import asynckv
from asynckv import BlockingCache
from asynckv.cli import main
from asynckv.commands import demo
from asynckv.commands.output import UsageError, choose_loop

ROOT = Path(asynckv.__file__).parent.parent
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
        ["replay", os.devnull, "--memory", "many"],
        ["replay", os.devnull, "--memory", "0"],
        ["replay", os.devnull, "--disk", "5KiB"],
        ["replay", os.devnull, "--block-bytes", "0"],
        ["replay", os.devnull, "--memory", "1MiB", "--memory-blocks", "3"],
        ["replay", os.devnull, "--memory-blocks", "0"],
        ["replay", os.devnull, "--limit", "-1"],
        ["replay", os.devnull, "--policy", "psychic"],
        ["replay", os.devnull, "--loop", "twisted"],
        ["replay", __file__],
        ["stats"],
        ["stats", "/nonexistent"],
        ["verify", "/nonexistent"],
    ],
    ids=" ".join,
)
def test_bad_usage_is_status_2_and_says_why(arguments, capsys):
    assert main(arguments) == 2
    out = capsys.readouterr()
    assert out.out == ""
    assert "asynckv" in out.err
    assert "Traceback" not in out.err


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
        for arguments in (["replay", os.devnull, "--dir", str(store), "--memory", "1MiB", "--disk", "16MiB"],):
            assert main(arguments) == 2
            assert str(os.getpid()) in capsys.readouterr().err


def test_an_unsafe_directory_is_status_2(store, capsys):
    store.chmod(0o777)
    assert main(["replay", os.devnull, "--dir", str(store), "--memory", "1MiB", "--disk", "16MiB"]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_an_empty_trace_is_no_failure(tmp_path, capsys):
    status, results = run_json(capsys, "replay", os.devnull, "--memory", "1MiB", "--disk", "0")
    assert status == 0
    assert results["requests"] == results["accesses"] == results["block_hits"] == 0
    assert results["hit_ratio"] == 0.0


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


def test_a_reader_that_leaves_is_no_traceback(store):
    command = f"{sys.executable} -m asynckv stats {store} | true"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.stderr == ""


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
