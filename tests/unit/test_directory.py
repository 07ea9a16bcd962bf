"""The directory of a store: refused when unsafe, held by one owner, measured whole."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys

import pytest

from asynckv.errors import StoreLockedError, UnsafeDirectoryError
from asynckv.tiers.directory import Directory


def test_it_is_made_private(tmp_path):
    path = tmp_path / "a" / "b"
    directory = Directory.open(path)
    assert path.stat().st_mode & 0o777 == 0o700
    directory.lock()
    assert (path / "lock").stat().st_mode & 0o777 == 0o600
    assert (path / "lock").read_text() == f"{os.getpid()}\n"
    directory.close()
    directory.close()
    assert (path / "lock").exists()


def test_a_missing_one_is_not_made_unless_asked(tmp_path):
    with pytest.raises(FileNotFoundError):
        Directory.open(tmp_path / "none", create=False)


@pytest.mark.parametrize("slash", ["", "/", "//"])
def test_a_symlink_is_refused(tmp_path, slash):
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(UnsafeDirectoryError) as caught:
        Directory.open(str(tmp_path / "link") + slash)
    assert isinstance(caught.value, PermissionError)


def test_a_dangling_symlink_and_a_file_are_refused(tmp_path):
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "file").write_text("")
    for name in ("link", "file"):
        with pytest.raises(UnsafeDirectoryError):
            Directory.open(tmp_path / name)


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o722])
def test_one_that_others_can_write_is_refused(tmp_path, mode):
    path = tmp_path / "kv"
    path.mkdir()
    path.chmod(mode)
    with pytest.raises(UnsafeDirectoryError):
        Directory.open(path)


def test_one_of_another_user_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "kv"
    path.mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(UnsafeDirectoryError):
        Directory.open(path)


def test_a_second_owner_in_this_process_is_refused_and_the_first_keeps_the_lock(tmp_path):
    first = Directory.open(tmp_path / "kv")
    first.lock()
    second = Directory.open(tmp_path / "kv")
    with pytest.raises(StoreLockedError) as caught:
        second.lock()
    assert caught.value.pid == os.getpid()
    assert not second.locked
    second.close()
    assert _try_in_other_process(tmp_path / "kv") == f"locked {os.getpid()}"
    first.close()
    assert _try_in_other_process(tmp_path / "kv") == "free"


CODE = """
import sys
from asynckv.errors import StoreLockedError
from asynckv.tiers.directory import Directory
directory = Directory.open(sys.argv[1])
try:
    directory.lock()
    print("free")
except StoreLockedError as error:
    print("locked", error.pid)
"""


def _try_in_other_process(path) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(path)], capture_output=True, text=True, check=True, env=environment
    )
    return done.stdout.strip()


def test_a_forked_child_does_not_inherit_the_lock(tmp_path):
    directory = Directory.open(tmp_path / "kv")
    directory.lock()
    context = multiprocessing.get_context("fork")
    queue = context.Queue()

    def child() -> None:
        mine = Directory.open(tmp_path / "kv")
        try:
            mine.lock()
            queue.put(None)
        except StoreLockedError as error:
            queue.put(error.pid)

    process = context.Process(target=child)
    process.start()
    assert queue.get(timeout=20) == os.getpid()
    process.join()
    queue.close()
    queue.join_thread()
    assert _try_in_other_process(tmp_path / "kv") == f"locked {os.getpid()}", "the child's exit let nothing go"
    directory.close()


@pytest.mark.parametrize("kind", ["symlink", "fifo", "directory"])
def test_a_lock_that_is_no_file_is_refused(tmp_path, kind):
    path = tmp_path / "kv"
    path.mkdir(mode=0o700)
    if kind == "symlink":
        (path / "lock").symlink_to(tmp_path / "elsewhere")
    elif kind == "fifo":
        os.mkfifo(path / "lock")
    else:
        (path / "lock").mkdir()
    directory = Directory.open(path)
    with pytest.raises(UnsafeDirectoryError):
        directory.lock()
    directory.close()
    assert not (tmp_path / "elsewhere").exists()


def test_a_lock_file_that_was_replaced_is_noticed(tmp_path):
    directory = Directory.open(tmp_path / "kv")
    directory.lock()
    (tmp_path / "kv" / "lock").unlink()
    directory.close()
    again = Directory.open(tmp_path / "kv")
    again.lock()
    assert (tmp_path / "kv" / "lock").exists()
    again.close()
