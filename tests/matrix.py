"""The suite where things differ: each engine, refused rings, an ordinary user, each file system. `make test-matrix`.

``python tests/matrix.py [NAME ...]`` runs the places that are named, or all. Each is one run of pytest with the
arguments in PYTEST_ARGS. What cannot be had here (no root, no mkfs) is left out and said. Exit status 1: somewhere a
test failed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
IMAGE_BYTES = 16 << 30  # sparse
MEMLOCK = 64 << 10
NOBODY = 65534
SYSTEM_CALLS = {"setup": 425, "enter": 426, "register": 427}

Place = Callable[[], contextlib.AbstractContextManager[tuple[list[str], Path, dict[str, str]]]]


class LeftOutError(Exception):
    """This place cannot be had here; the text says why."""


@contextlib.contextmanager
def plain(**environment: str) -> Iterator[tuple[list[str], Path, dict[str, str]]]:
    """A folder of the usual file system. Yields the command, the folder and what the environment has besides."""
    with tempfile.TemporaryDirectory(prefix="asynckv-matrix-") as folder:
        os.chmod(folder, 0o755)  # some tests become an ordinary user
        yield [sys.executable], Path(folder), environment


@contextlib.contextmanager
def refused(call: str, error: str) -> Iterator[tuple[list[str], Path, dict[str, str]]]:
    """A seccomp filter answers one of the ring's system calls with an error, from the start."""
    with plain() as (command, folder, environment):
        yield [*command, __file__, "--refuse", call, error, *command], folder, environment


@contextlib.contextmanager
def ordinary_user() -> Iterator[tuple[list[str], Path, dict[str, str]]]:
    """Another user, who may lock next to no memory."""
    if os.geteuid():
        raise LeftOutError("only root can become somebody else")
    become = ["prlimit", f"--memlock={MEMLOCK}:{MEMLOCK}"]
    become += ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    with plain() as (command, folder, environment):
        os.chown(folder, NOBODY, NOBODY)
        try:
            code = "import subprocess, sys, asynckv; subprocess.run([sys.executable, '-c', ''], check=True)"
            subprocess.run([*become, *command, "-c", code], cwd=ROOT, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as reason:
            raise LeftOutError(f"another user cannot run {sys.executable} in {ROOT}") from reason
        yield [*become, *command], folder, {**environment, "HOME": str(folder)}


@contextlib.contextmanager
def mounted(kind: str) -> Iterator[tuple[list[str], Path, dict[str, str]]]:
    """A file system of its own, on a sparse image where it needs a device."""
    if os.geteuid():
        raise LeftOutError("only root can mount")
    with plain() as (command, folder, environment):
        target = folder / "mount"
        target.mkdir()
        if kind == "tmpfs":
            mount = ["mount", "-t", "tmpfs", "-o", f"size={IMAGE_BYTES // 2}", "tmpfs"]
        elif kind == "overlay":
            layers = [folder / name for name in ("lower", "upper", "work")]
            for layer in layers:
                layer.mkdir()
            names = "lowerdir={},upperdir={},workdir={}".format(*layers)
            mount = ["mount", "-t", "overlay", "-o", names, "overlay"]
        else:
            image = folder / "image"
            with image.open("wb") as file:
                file.truncate(IMAGE_BYTES)
            if shutil.which(f"mkfs.{kind}") is None:
                raise LeftOutError(f"mkfs.{kind} is missing")
            _run([f"mkfs.{kind}", "-q", str(image)])
            mount = ["mount", "-o", "loop", str(image)]
        _run([*mount, str(target)])
        try:
            yield command, target, environment
        finally:
            _run(["umount", str(target)])


def _run(command: list[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as reason:
        text = getattr(reason, "stderr", None) or str(reason).encode()
        raise LeftOutError(f"{shlex.join(command)}: {text.decode(errors='replace').strip()}") from None


PLACES: dict[str, Place] = {
    "io_uring": lambda: plain(ASYNCKV_ENGINE="io_uring"),
    "threads": lambda: plain(ASYNCKV_ENGINE="threads"),
    "aiofiles": lambda: plain(ASYNCKV_ENGINE="aiofiles"),
    "setup-EPERM": lambda: refused("setup", "EPERM"),
    "enter-ENOSYS": lambda: refused("enter", "ENOSYS"),
    "register-EACCES": lambda: refused("register", "EACCES"),
    "ordinary-user": ordinary_user,
    **{kind: lambda kind=kind: mounted(kind) for kind in ("ext4", "xfs", "btrfs", "tmpfs", "overlay")},
}


def run(name: str) -> str:
    """Run the suite in one place; a line about it that begins with OK, FAIL or LEFT OUT."""
    started = time.monotonic()
    place = PLACES[name]
    try:
        with place() as (command, folder, environment):
            given = {**os.environ, **environment}
            given |= {"TMPDIR": str(folder), "HYPOTHESIS_STORAGE_DIRECTORY": str(folder / "hypothesis")}
            given |= {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
            arguments = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "tmp_path_retention_policy=failed"]
            arguments += [f"--basetemp={folder / 'tests'}", *shlex.split(os.environ.get("PYTEST_ARGS", ""))]
            if place is ordinary_user:
                arguments += ["-n", "0"]  # the limit is for all processes of the user together
            status = subprocess.run([*command, *arguments], cwd=ROOT, env=given).returncode
    except LeftOutError as reason:
        return f"LEFT OUT  {name}: {reason}"
    return f"{'FAIL' if status else 'OK':8}  {name}: {time.monotonic() - started:.0f} s"


def refuse(call: str, error: str, command: list[str]) -> None:
    """Put the filter on this process and become the command."""
    sys.path.insert(0, str(ROOT / "tests" / "fault"))
    from seccomp_worker import deny

    # Not libuv's own ring, which waits in its calls and ends the process when it is refused.
    deny(SYSTEM_CALLS[call], getattr(errno, error), [], only_without_wait=call == "enter")
    os.execv(command[0], command)


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--refuse"]:
        refuse(arguments[1], arguments[2], arguments[3:])
    unknown = set(arguments) - set(PLACES)
    if unknown:
        print(f"no such place: {', '.join(sorted(unknown))}; there are {', '.join(PLACES)}")
        return 2
    lines = []
    for name in arguments or PLACES:
        print(f"== {name}", flush=True)
        lines.append(run(name))
    print("\n".join(["", *lines]))
    return int(any(line.startswith("FAIL") for line in lines))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
