"""``asynckv doctor``: what this machine and a directory can do for a store, line by line, and what to do about it.

The facts come from `asynckv.backends.probes`; this module judges them. OK: as it should be. WARN: it works, but slower,
smaller or by other means than it could. FAIL: a store here would not open with the default options, or would be wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import xxhash

from asynckv._version import __version__
from asynckv.backends import probes
from asynckv.commands.output import (
    ENGINE_ADVICE,
    FAILED,
    OK,
    Progress,
    about,
    engine_override,
    path,
    plural,
    run,
    write,
    write_json,
)
from asynckv.config import MEMORY_SHARE_MAX, SEGMENT_MIN, SEGMENTS_MIN, Config, format_size
from asynckv.tiers.inspect import look_at

__all__ = ["Check", "add_parser"]

SECONDS = 2.0  # a speed test of one engine
KERNEL_NO_MEMLOCK = (5, 12)  # rings count against the memory cgroup from here on, no longer against RLIMIT_MEMLOCK
MEMLOCK_MIN = 1 << 20
INODES_MIN = 100  # segments of a default store, its small files, and some room
SLOW_RATE = 100e6  # bytes a second; below, loading a block rarely beats computing it again
SLOW_READ = 5e-3
PREFIX = ".asynckv-doctor-"

_MEMORY_FILE_SYSTEMS = {"tmpfs", "ramfs"}
_REMOTE_FILE_SYSTEMS = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "ceph", "glusterfs", "afs", "virtiofs"}
_KNOWN_FILE_SYSTEMS = {"ext4", "xfs", "btrfs", "f2fs", "zfs", "ext3", "ext2", "bcachefs"}


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report.

    Attributes
    ----------
    name
        What was looked at.
    status
        ``"OK"``, ``"WARN"`` or ``"FAIL"``.
    found
        What there is.
    advice
        What to do; empty when nothing has to be done.
    """

    name: str
    status: str
    found: str
    advice: str = ""


def add_parser(commands: Any) -> None:
    """Add ``doctor`` to the command line."""
    text = "say what this machine and a directory can do for a store, and what to do about the rest"
    parser = commands.add_parser(
        "doctor",
        help=text,
        description=(
            f"{text[0].upper() + text[1:]}. Each line is OK, WARN or FAIL; a FAIL is exit status 1. Each engine is "
            f"measured for {SECONDS:.0f} seconds in a temporary directory below DIR, which is removed again. "
            "A store in use is only looked at."
        ),
    )
    parser.add_argument(
        "dir", type=path, metavar="DIR", nargs="?", default=".", help="where a store is or will be; default: here"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(command=main)


def main(arguments: argparse.Namespace) -> int:
    """Run ``asynckv doctor``."""
    directory, missing = _nearest(arguments.dir)
    with about(arguments.dir):
        os.close(os.open(directory, os.O_PATH | os.O_DIRECTORY))  # raises for what is none; needs no right to read it
    speeds: dict[str, Any] = {}
    with Progress("doctor") as progress, _signals_unwind():
        checks = _examine(directory, speeds, progress)
    if missing:
        found = f"{arguments.dir} does not exist yet: looked at {os.path.abspath(directory)}, where it would be made"
        checks.insert(0, Check("place", "OK", found))
    counts = {status: sum(check.status == status for check in checks) for status in ("OK", "WARN", "FAIL")}
    if arguments.json:
        values = {"directory": os.path.abspath(directory), "version": __version__, "ok": not counts["FAIL"]}
        write_json(values | {"checks": [asdict(check) for check in checks], "speed": speeds})
    else:
        write(f"asynckv {__version__} on {os.path.abspath(directory)}")
        _show(checks)
        write(f"{counts['OK']} OK, {counts['WARN']} WARN, {counts['FAIL']} FAIL")
    return FAILED if counts["FAIL"] else OK


def _nearest(directory: str) -> tuple[str, bool]:
    """The directory, or of its parents the nearest that exists, and whether it is such a parent."""
    place = directory
    while True:
        try:
            os.lstat(place)
        except FileNotFoundError:
            place = os.path.dirname(place.rstrip("/")) or ("/" if place.startswith("/") else ".")
        except OSError:
            return directory, False
        else:
            return place, place != directory


def _show(checks: list[Check]) -> None:
    width = max(len(check.name) for check in checks)
    for check in checks:
        write(f"  {check.status:<4}  {check.name:<{width}}  {check.found}")
        if check.advice:
            write(f"        {'':<{width}}  -> {check.advice}")


@contextlib.contextmanager
def _signals_unwind() -> Iterator[None]:
    """Let a polite end of the process unwind the stack, so that the temporary directory goes, too.

    By way of SIGINT: an exception raised by a handler could end an event loop in the middle of a callback.
    """
    received: list[int] = []

    def leave(number: int, _frame: object) -> None:
        received.append(number)
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a background job of a shell
            signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.raise_signal(signal.SIGINT)

    numbers = (signal.SIGTERM, signal.SIGHUP)
    try:
        before = [signal.signal(number, leave) for number in numbers]
    except ValueError:  # not the main thread: somebody else owns the signals
        yield
        return
    try:
        yield
    except KeyboardInterrupt:
        if received:
            sys.exit(128 + received[0])
        raise
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _examine(directory: str, speeds: dict[str, Any], progress: Progress) -> list[Check]:
    progress.update(0.0, "machine")
    checks = [_kernel(), _memory(), _ram(), _memlock(), _cpu(), _prefix_keys(), _override()]
    place, usable = _directory(directory)
    checks += place
    checks += _file_system(probes.file_system(directory))
    if not usable:
        return checks
    try:
        temporary = tempfile.TemporaryDirectory(prefix=PREFIX, dir=directory)
    except OSError as error:
        checks.append(Check("writing", "FAIL", f"no directory can be made here: {error.strerror}", _room_advice(error)))
        return checks
    with temporary as inside:
        checks.append(_direct(inside))
        ring, engines = run(_ring(inside)), ["threads", "aiofiles"]
        checks.append(ring)
        if ring.found.startswith(_WORKS):
            engines.insert(0, "io_uring")
        for number, engine in enumerate(engines):
            progress.update(number / len(engines), f"speed of {engine}")
            checks.append(_speed(engine, inside, speeds))
    return checks


# -- the machine -----------------------------------------------------------------------------------------------------


def _kernel() -> Check:
    old = probes.old_kernel()
    if old:
        return Check("kernel", "WARN", old, "engine='auto' uses threads on this kernel; upgrade it for io_uring")
    return Check("kernel", "OK", probes.kernel_release())


def _memory() -> Check:
    limit, default = probes.memory_limit(), Config.memory
    most = int(limit * MEMORY_SHARE_MAX)
    text = f"the cgroup or the machine has {format_size(limit)}, a pool may have {format_size(most)}"
    if default > most:
        return Check("memory", "FAIL", text, f"the default, {format_size(default)}, is refused: pass memory= with less")
    return Check("memory", "OK", f"{text}, the default is {format_size(default)}")


def _ram() -> Check:
    total, free = probes.memory_available()
    setting, reserved = probes.huge_pages()
    huge = f"huge pages: {setting or 'none'}, {reserved} reserved"
    if not total:
        return Check("RAM", "WARN", f"unknown; {huge}", "mount /proc")
    text = f"{format_size(total)}, {format_size(free)} of it available; {huge}"
    if free < Config.memory:
        return Check("RAM", "WARN", text, "less is available than the default pool takes: the machine may swap")
    return Check("RAM", "OK", text)


def _memlock() -> Check:
    limit = probes.memlock_limit()
    text = "unlimited" if limit is None else f"{limit >> 10} KiB"
    if probes.kernel_version() >= KERNEL_NO_MEMLOCK:
        return Check("memlock", "OK", f"{text}; rings need none of it on this kernel")
    if limit is not None and limit < MEMLOCK_MIN:
        return Check("memlock", "WARN", text, "raise it (ulimit -l) if the ring is refused with ENOMEM")
    return Check("memlock", "OK", text)


def _cpu() -> Check:
    machine, usable, present = probes.cpu_flags()
    text = (
        f"{machine}, {plural(usable, 'CPU')} usable; has {' '.join(present) or 'no known features'}; "
        "used: the baseline of "
        f"{machine}, and for checksums XXH3 {xxhash.XXHASH_VERSION}"
    )
    if usable < 2:
        return Check("CPU", "WARN", text, "the event loop and the threads of an engine share one CPU")
    return Check("CPU", "OK", text)


def _prefix_keys() -> Check:
    try:
        reason = probes.hash_seeds_agree()
    except (OSError, subprocess.SubprocessError) as error:
        reason = f"a second process could not be started: {error}"
        return Check("prefix keys", "WARN", reason, "run this where Python may start processes")
    if reason:
        return Check("prefix keys", "FAIL", reason, "do not share blocks between processes; please report this")
    return Check("prefix keys", "OK", "equal in two processes with different hash seeds")


def _override() -> Check:
    engine, wrong = engine_override()
    if wrong:
        return Check("ASYNCKV_ENGINE", "FAIL", wrong, ENGINE_ADVICE)
    return Check("ASYNCKV_ENGINE", "OK", f"{engine}, whatever engine= says" if engine else "not set")


# -- the directory ---------------------------------------------------------------------------------------------------


def _directory(directory: str) -> tuple[list[Check], bool]:
    """Look at the directory; whether it may be written to."""
    try:
        store, holder, objection = look_at(directory)
    except OSError as error:
        return [Check("directory", "FAIL", f"cannot be read: {error.strerror}", "run this as its owner")], False
    if holder is not None:
        who = f"process {holder}" if holder else "another process"
        advice = "not written to: for the other checks stop that process, or name a directory beside the store"
        return [Check("directory", "WARN", f"a store in use by {who}, only looked at", advice)], False
    if store and objection:
        advice = "make it a plain directory of yours: chown, chmod 0700"
        return [Check("directory", "FAIL", f"a store that will not open: {objection}", advice)], False
    if not os.access(directory, os.W_OK | os.X_OK):
        advice = "name a directory of yours"
        return [Check("directory", "FAIL", f"not writable for user {os.geteuid()}", advice)], False
    if objection:
        advice = "make the store in a directory below it, or make this one a plain directory of yours: chmod 0700"
        return [Check("directory", "WARN", f"writable, but refused as a store: {objection}", advice)], True
    return [Check("directory", "OK", "a store that nobody has open" if store else "writable, not a store")], True


def _file_system(found: probes.FileSystem) -> list[Check]:
    kind, text = found.kind, f"{found.kind} on {found.mounted_on or 'an unknown mount'}"
    if kind in _MEMORY_FILE_SYSTEMS:
        system = Check("file system", "WARN", text, "this is memory, lost at a restart: name a directory on a disk")
    elif kind in _REMOTE_FILE_SYSTEMS or kind.startswith("fuse"):
        system = Check("file system", "WARN", text, "not a local disk: locks, syncs and latency depend on its server")
    elif kind == "overlay":
        system = Check("file system", "WARN", text, "a container's layer, gone with it: mount a volume for the store")
    elif kind in _KNOWN_FILE_SYSTEMS:
        system = Check("file system", "OK", text)
    else:
        system = Check("file system", "WARN", text, "not one that this was tested on")
    return [system, _free_space(found.free), _inodes(found)]


def _free_space(free: int) -> Check:
    text = f"{format_size(free)}, the default store takes up to {format_size(Config.disk)}"
    if free < SEGMENTS_MIN * SEGMENT_MIN:
        return Check("free space", "FAIL", text, "not even the smallest store fits: make room")
    if free < Config.disk:
        return Check("free space", "WARN", text, f"make room, or pass disk= with at most {format_size(free)}")
    return Check("free space", "OK", text)


def _inodes(found: probes.FileSystem) -> Check:
    if not found.inodes:
        return Check("inodes", "OK", "made as needed")
    text = f"{found.inodes_free:,} of {found.inodes:,} left"
    if not found.inodes_free:
        return Check("inodes", "FAIL", text, "no file can be made: remove some")
    if found.inodes_free < INODES_MIN:
        return Check("inodes", "WARN", text, "remove files, or pass segment= for fewer and larger ones")
    return Check("inodes", "OK", text)


def _direct(directory: str) -> Check:
    try:
        works, alignment, reason = probes.direct_io(directory)
    except OSError as error:
        return Check("O_DIRECT", "FAIL", f"cannot be tried: {error.strerror}", _room_advice(error))
    if works:
        return Check("O_DIRECT", "OK", f"works, aligned to {alignment} bytes")
    return Check(
        "O_DIRECT", "WARN", reason, "blocks go through the page cache, which costs memory and a copy: use another disk"
    )


_WORKS = "works"


async def _ring(directory: str) -> Check:
    try:
        direct = await probes.ring_works(directory)
    except probes.NoRingError as error:
        forced = os.environ.get("ASYNCKV_ENGINE") == "io_uring"
        return Check("io_uring", "FAIL" if forced else "WARN", str(error.strerror), _ring_advice(error))
    text = f"{_WORKS}: a write, a read and a sync through a ring, {'direct' if direct else 'buffered'}"
    old = probes.old_kernel()
    if old:
        return Check("io_uring", "WARN", f"{text}; but {old}", "engine='io_uring' forces it")
    return Check("io_uring", "OK", text)


def _ring_advice(error: probes.NoRingError) -> str:
    """What makes a ring possible, by why there is none."""
    otherwise = "; threads are used until then, and engine='threads' chooses them without a warning"
    if isinstance(error.__cause__, ImportError):
        return "install the kernel's headers (linux-libc-dev, kernel-headers) and build again" + otherwise
    if error.errno == errno.EPERM and probes.io_uring_sysctl():
        return "sysctl -w kernel.io_uring_disabled=0, or ask who set it" + otherwise
    if error.errno in (errno.EPERM, errno.EACCES, errno.ENOSYS) and probes.seccomp_mode():
        names = "io_uring_setup, io_uring_enter and io_uring_register"
        return f"allow {names} in the seccomp profile of the container" + otherwise
    if error.errno == errno.ENOSYS:
        return "use a kernel with CONFIG_IO_URING" + otherwise
    if error.errno == errno.ENOMEM:
        return "raise the memlock limit (ulimit -l)" + otherwise
    return "see the reason" + otherwise


def _speed(engine: str, directory: str, speeds: dict[str, Any]) -> Check:
    name = f"speed, {engine}"
    try:
        result = run(probes.speed(engine, directory, SECONDS))
    except OSError as error:
        return Check(name, "FAIL", f"failed: {error.strerror or error}", _room_advice(error))
    speeds[engine] = asdict(result)
    text = (
        f"writes {result.write_rate / 1e6:,.0f} MB/s; random reads of 64 KiB {result.read_rate / 1e6:,.0f} MB/s, "
        f"p50 alone {result.read_p50 * 1e6:,.0f} us; {'direct' if result.direct else 'buffered'}"
    )
    if result.wrong:
        return Check(
            name,
            "FAIL",
            f"{text}; {plural(result.wrong, 'WRONG READ', 'WRONG READS')}",
            "do not use this disk; check the system log",
        )
    if result.engine != engine:
        return Check(name, "WARN", f"{text}; {result.engine} did it", "the ring was refused half-way; see io_uring")
    if min(result.write_rate, result.read_rate) < SLOW_RATE or result.read_p50 > SLOW_READ:
        return Check(name, "WARN", text, "a slow disk: computing a block again may take less time than loading it")
    return Check(name, "OK", text)


def _room_advice(error: OSError) -> str:
    return "make room" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "check the disk and the system log"
