"""A ring that the system refuses: before the store is opened and while it works, by each call, with each error.

Containers do this by default. A worker process (seccomp_worker.py) installs a filter on itself and works on a small
store; whatever was refused, it has to see the same blocks as without a filter, and one warning.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from storekit import ring_refusal

import asynckv

WORKER = Path(__file__).with_name("seccomp_worker.py")
ROOT = Path(asynckv.__file__).resolve().parents[1]
CALLS = {"io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427}
ERRORS = (errno.EPERM, errno.ENOSYS, errno.EACCES)
LOOPS = ("asyncio", "uvloop")
NOBODY = 65534
MEMLOCK = 64 << 10

pytestmark = pytest.mark.skipif(
    os.uname().machine not in ("x86_64", "aarch64"),
    reason="NO NUMBER OF seccomp(2) FOR THIS MACHINE: refused rings are NOT checked in this run",
)


def work(directory: Path, **options) -> dict:
    settings = {"directory": str(directory), "engine": "auto", "loop": "asyncio", "deny": 0, "errno": 0}
    settings |= {"when": "first", "nobody": False, "memlock": 0} | options
    environment = {name: value for name, value in os.environ.items() if name != "ASYNCKV_ENGINE"}
    environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(
        [sys.executable, "-W", "error", str(WORKER), json.dumps(settings)],
        capture_output=True,
        text=True,
        timeout=100,
        cwd="/",
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """What the store holds without any filter, on threads."""
    result = work(tmp_path_factory.mktemp("reference") / "kv", engine="threads")
    assert result["warnings"] == result["warnings_reopened"] == []
    assert None not in result["first"]
    assert result["third"].count(None) == 2  # the deleted key, asked for twice
    return result


@pytest.fixture(scope="module")
def unrefused(tmp_path_factory, reference):
    """What `auto` does here without a filter."""
    result = work(tmp_path_factory.mktemp("unrefused") / "kv")
    same(result, reference)
    assert len(result["warnings"]) == (result["opened"] != "io_uring")
    return result


def same(result: dict, reference: dict) -> None:
    for name in ("first", "second", "third"):
        assert result[name] == reference[name], name
    assert result["errors"] == [0, 0, 0, 0]
    assert result["disk_state"] == "ok"


def needs_ring(unrefused: dict) -> None:
    if unrefused["opened"] != "io_uring":
        pytest.skip(f"NO RING HERE: its refusal is NOT checked in this run ({unrefused['warnings'][0]})")


def cases():
    for number, call in enumerate(CALLS):
        for other, error in enumerate(ERRORS):
            yield pytest.param(call, error, LOOPS[(number + other) % 2], id=f"{call}-{errno.errorcode[error]}")


@pytest.mark.parametrize(("call", "error", "loop"), list(cases()))
def test_refused_before_the_store_is_opened(tmp_path, reference, unrefused, call, error, loop):
    result = work(tmp_path / "kv", deny=CALLS[call], errno=error, loop=loop)
    same(result, reference)
    needs_ring(unrefused)
    if result["opened"] == "io_uring":  # a call that this ring does without
        assert call == "io_uring_register"
        assert result["warnings"] == result["warnings_reopened"] == []
        return
    assert {result[name] for name in ("opened", "worked", "reopened")} == {"threads"}
    for warnings in (result["warnings"], result["warnings_reopened"]):  # one for each opening
        assert len(warnings) == 1
        assert errno.errorcode[error] in warnings[0]
        assert "seccomp" in warnings[0]


@pytest.mark.parametrize(("call", "error", "loop"), list(cases()))
def test_refused_while_the_store_works(tmp_path, reference, unrefused, call, error, loop):
    result = work(tmp_path / "kv", deny=CALLS[call], errno=error, loop=loop, when="later")
    same(result, reference)
    assert result["during"] == reference["first"][:12]
    needs_ring(unrefused)
    assert result["opened"] == "io_uring"
    assert result["before"] == []
    if call == "io_uring_enter":
        assert result["worked"] == "threads"
        assert len(result["warnings"]) == 1
        assert errno.errorcode[error] in result["warnings"][0] or os.strerror(error) in result["warnings"][0]
    else:  # a running ring needs no more of it
        assert result["worked"] == "io_uring"
        assert result["warnings"] == []
    if call != "io_uring_register":
        assert result["reopened"] == "threads"
        assert len(result["warnings_reopened"]) == 1


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("call", ["io_uring_setup", "io_uring_enter"])
def test_a_forced_ring_is_an_error_that_says_why(tmp_path, call, error):
    if ring_refusal():
        pytest.skip(f"THE RING IS REFUSED ALREADY ({ring_refusal()}): the error of another filter is NOT checked")
    result = work(tmp_path / "kv", engine="io_uring", deny=CALLS[call], errno=error)
    assert "io_uring" in result["refused"]
    assert result["warnings"] == []
    if "_uring is missing" not in result["refused"]:
        assert errno.errorcode[error] in result["refused"]
        assert result["errno"] == error


@pytest.mark.parametrize("engine", ["threads", "aiofiles"])
def test_other_engines_do_not_care(tmp_path, reference, engine):
    result = work(tmp_path / "kv", engine=engine, deny=CALLS["io_uring_setup"], errno=errno.EPERM)
    same(result, reference)
    assert {result[name] for name in ("opened", "worked", "reopened")} == {engine}
    assert result["warnings"] == result["warnings_reopened"] == []


@pytest.fixture
def ordinary():
    """A directory that an ordinary user can reach and owns."""
    folder = Path(tempfile.mkdtemp(prefix="asynckv-ordinary-"))
    if os.geteuid() == 0:
        os.chown(folder, NOBODY, NOBODY)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("engine", ["auto", "threads", "aiofiles"])
def test_an_ordinary_user_with_little_to_lock(ordinary, reference, unrefused, engine):
    result = work(ordinary / "kv", engine=engine, nobody=os.geteuid() == 0, memlock=MEMLOCK)
    same(result, reference)
    assert result["opened"] == (unrefused["opened"] if engine == "auto" else engine)
    assert len(result["warnings"]) == (result["opened"] != engine and result["opened"] != "io_uring")


@pytest.mark.parametrize("when", ["first", "later"])
def test_an_ordinary_user_and_a_filter(ordinary, reference, unrefused, when):
    result = work(
        ordinary / "kv",
        deny=CALLS["io_uring_enter"],
        errno=errno.EPERM,
        when=when,
        nobody=os.geteuid() == 0,
        memlock=MEMLOCK,
    )
    same(result, reference)
    assert result["worked"] == "threads"
    assert len(result["warnings"]) + len(result.get("before", ())) == 1
