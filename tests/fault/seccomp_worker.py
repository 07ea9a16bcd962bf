"""The process of test_seccomp.py: it gives up rights, works on a small store, and prints what it saw as JSON.

The one argument is a JSON object:

    directory       of the store
    engine          as for asynckv.open
    loop            asyncio or uvloop
    deny, errno     a system call that a seccomp filter answers with an error; 0 for no filter
    when            "first": before the store is opened; "later": after it was opened and used
    nobody          become an ordinary user
    memlock         limit of locked memory in bytes; 0 leaves it
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import hashlib
import json
import logging
import os
import random
import resource
import struct
import sys
import tempfile
from typing import Any

import uvloop

import asynckv

PR_SET_NO_NEW_PRIVS = 38
SECCOMP_SET_MODE_FILTER = 1
SECCOMP_FILTER_FLAG_TSYNC = 1
SECCOMP_RET_ERRNO = 0x00050000
SECCOMP_RET_ALLOW = 0x7FFF0000
SYS_SECCOMP = {"x86_64": 317, "aarch64": 277}
# linux/bpf_common.h: load a word at an absolute offset; jump if equal; return.
LOAD, JUMP_EQUAL, RETURN = 0x20, 0x15, 0x06

KEYS = 60
BLOCK = 40_000
OPTIONS = {"memory": "512KiB", "disk": "32MiB", "segment": "512KiB"}


class Program(ctypes.Structure):
    """struct sock_fprog of seccomp(2)."""

    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def rings_of_the_loop() -> list[int]:
    """Descriptors of the rings that are not ours: libuv has one, and aborts when that one is refused."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}") == "anon_inode:[io_uring]":
                found.append(int(name))
    return found


def deny(number: int, error: int, spared: list[int], *, only_without_wait: bool = False) -> None:
    """Make every thread of this process get an error from one system call, except on some descriptors.

    With `only_without_wait`, io_uring_enter is let through when it is to wait for completions.
    """
    jumps = [(JUMP_EQUAL, len(spared) - at, 0, fd) for at, fd in enumerate(spared)]
    waits = ((LOAD, 0, 0, 32), (JUMP_EQUAL, 0, len(jumps) + 2, 0)) if only_without_wait else ()  # args[2]
    instructions = (
        (LOAD, 0, 0, 0),  # seccomp_data.nr
        (JUMP_EQUAL, 0, len(jumps) + 2 + len(waits), number),
        *waits,
        (LOAD, 0, 0, 16),  # the low half of seccomp_data.args[0]; both architectures are little-endian
        *jumps,
        (RETURN, 0, 0, SECCOMP_RET_ERRNO | error),
        (RETURN, 0, 0, SECCOMP_RET_ALLOW),
    )
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in instructions))
    program = Program(len(instructions), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
    place = SYS_SECCOMP[os.uname().machine]
    if libc.syscall(place, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, ctypes.byref(program)):
        raise OSError(ctypes.get_errno(), "seccomp")


async def warm_up(engine: str) -> None:
    """Use everything once: what is imported on first use the ordinary user may not be able to read."""
    with tempfile.TemporaryDirectory() as folder:
        async with asynckv.open(folder, **OPTIONS, engine=engine) as cache:
            await cache.put(1, b"1")
            await cache.flush()


def become_ordinary(nobody: bool, memlock: int) -> None:
    """Give up root and the right to lock memory."""
    if memlock:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (memlock, memlock))
    if nobody:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)


class Warnings(logging.Handler):
    """Keeps the texts of warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def take(self) -> list[str]:
        texts, self.texts = self.texts, []
        return texts


def block(key: int, version: int = 0) -> bytes:
    return random.Random(1000 * version + key).randbytes(BLOCK + key)


async def read_all(cache: asynckv.Cache) -> list[str | None]:
    """The digest of every block, one after the other and in one batch."""
    found = []
    for key in range(KEYS):
        data = await cache.get(key)
        found.append(None if data is None else hashlib.sha256(data).hexdigest()[:16])
        del data
    for first in range(0, KEYS, 6):
        many = await cache.get_many(range(first, first + 6))
        found += [None if data is None else hashlib.sha256(data).hexdigest()[:16] for data in many]
        del many
    return found


async def work(options: dict[str, Any], warnings: Warnings) -> dict[str, Any]:
    refuse = options["deny"]
    spared = rings_of_the_loop() if options["loop"] == "uvloop" else []
    result: dict[str, Any] = {}
    if refuse and options["when"] == "first":
        deny(refuse, options["errno"], spared)
    async with asynckv.open(options["directory"], **OPTIONS, engine=options["engine"]) as cache:
        result["opened"] = cache.stats().engine
        for key in range(KEYS):
            assert await cache.put(key, block(key))
        result["first"] = await read_all(cache)
        if refuse and options["when"] == "later":
            result["before"] = warnings.take()
            reads = [asyncio.ensure_future(cache.get(key)) for key in range(12)]  # some are in flight just now
            await asyncio.sleep(0)
            deny(refuse, options["errno"], spared)
            result["during"] = [hashlib.sha256(await read).hexdigest()[:16] for read in reads]
            del reads
        for key in range(0, KEYS, 3):
            assert await cache.put(key, block(key, 1))
        await cache.delete(1)
        await cache.flush()
        result["second"] = await read_all(cache)
        stats = cache.stats()
        result["worked"] = stats.engine
        result["errors"] = [stats.io_errors, stats.io_timeouts, stats.corrupt_blocks, stats.dropped_blocks]
        result["disk_state"] = stats.disk_state
    result["warnings"] = warnings.take()
    async with asynckv.open(options["directory"], **OPTIONS, engine=options["engine"]) as cache:
        result["third"] = await read_all(cache)
        result["reopened"] = cache.stats().engine
    result["warnings_reopened"] = warnings.take()
    return result


def main() -> None:
    options = json.loads(sys.argv[1])
    warnings = Warnings()
    logging.getLogger("asynckv").addHandler(warnings)
    if options["nobody"]:
        asyncio.run(warm_up(options["engine"]))
        warnings.take()
    become_ordinary(options["nobody"], options["memlock"])
    factory = uvloop.new_event_loop if options["loop"] == "uvloop" else asyncio.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        try:
            result = runner.run(work(options, warnings))
        except asynckv.DiskError as error:
            result = {"refused": str(error), "errno": error.errno, "warnings": warnings.take()}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
