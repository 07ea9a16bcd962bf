"""Memory that is refused, ours and Python's: a MemoryError or a miss, nothing lost, and the store goes on."""

from __future__ import annotations

import asyncio
import errno
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import levels
import pytest
from storekit import MIB, check_idle, child_environment, fill, payload, ring_refusal, settle

import asynckv

NO_RING = ring_refusal()  # not to be asked inside a loop
WORKER = Path(__file__).with_name("alloc_worker.py")
SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <string.h>
#include <sys/mman.h>

extern void *__libc_malloc(size_t), *__libc_realloc(void *, size_t), *__libc_memalign(size_t, size_t);
static long first, last, count, refusals;

void refuse(long from, long to) { count = 0; last = to; first = from; }
long refused(void) { return refusals; }
long seen(void) { return count; }

static int no(void *caller) {
    Dl_info from;
    if (!first || !dladdr(caller, &from) || !from.dli_fname || !strstr(from.dli_fname, "asynckv/_")) return 0;
    long number = __atomic_add_fetch(&count, 1, __ATOMIC_RELAXED);
    if (number < first || number >= last) return 0;
    __atomic_add_fetch(&refusals, 1, __ATOMIC_RELAXED);
    errno = ENOMEM;
    return 1;
}
void *malloc(size_t n) { return no(__builtin_return_address(0)) ? NULL : __libc_malloc(n); }
void *realloc(void *p, size_t n) { return no(__builtin_return_address(0)) ? NULL : __libc_realloc(p, n); }
int posix_memalign(void **p, size_t align, size_t n) {
    if (no(__builtin_return_address(0))) return ENOMEM;
    *p = __libc_memalign(align, n);
    return *p ? 0 : ENOMEM;
}
void *mmap(void *at, size_t n, int prot, int flags, int fd, off_t offset) {
    static void *(*real)(void *, size_t, int, int, int, off_t);
    if (!real) real = (void *(*)(void *, size_t, int, int, int, off_t))dlsym(RTLD_NEXT, "mmap");
    return no(__builtin_return_address(0)) ? MAP_FAILED : real(at, n, prot, flags, fd, offset);
}
"""
AT_LEVEL = {"commit": 4, "nightly": 60}  # of the C allocations of one life; all of them at level release


def work(*arguments, timeout=240, **environment):
    """How many allocations were refused in the worker, which has to end well."""
    path = os.pathsep.join([str(WORKER.parents[1]), child_environment()["PYTHONPATH"]])
    result = subprocess.run(
        [sys.executable, str(WORKER), *map(str, arguments)],
        env=child_environment() | {"PYTHONPATH": path} | environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return int(re.search(r"refused (\d+)", result.stdout)[1])


def test_every_python_allocation_of_the_block_table_fails():
    if importlib.util.find_spec("_testcapi") is None:
        pytest.skip("THIS PYTHON HAS NO _testcapi: allocations of Python's are NOT made to fail in this run")
    most = 0 if levels.level() != "commit" else 1
    assert work("python", "--most", most, "--seed", levels.seed("refused allocations")) > 20


@pytest.mark.timeout(4 * 3600)
def test_c_allocations_of_a_store_fail(tmp_path):
    compiler = shutil.which("cc")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("NO COMPILER: allocations in C are NOT made to fail in this run")
    (tmp_path / "shim.c").write_text(SHIM)
    shim = tmp_path / "shim.so"
    built = subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-fno-builtin", "-o", shim, tmp_path / "shim.c", "-ldl"],
        capture_output=True,
        text=True,
        check=False,
    )
    if built.returncode:
        pytest.skip(f"NO SHIM CAN BE BUILT ({built.stderr[-200:]}): allocations in C are NOT made to fail in this run")
    most = round(AT_LEVEL.get(levels.level(), 0) * levels.scale())
    seed = levels.seed("refused allocations")
    assert work("c", "--most", most, "--seed", seed, timeout=3600, LD_PRELOAD=str(shim)) >= 2


def test_a_pool_that_cannot_be_mapped_is_a_memory_error_and_a_smaller_one_works(tmp_path):
    assert work("pool", "--directory", tmp_path / "kv") == 1


@pytest.fixture
def no_threads(monkeypatch):
    """Of our own, from the Nth on: `refuse(n)`."""
    start = threading.Thread.start
    left = [1 << 30]

    def limited(thread):
        if thread.name.startswith("asynckv"):
            left[0] -= 1
            if left[0] < 0:
                raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)

    def refuse(number):
        left[0] = number

    return refuse


@pytest.mark.parametrize("number", range(9))
async def test_a_system_without_threads_is_a_clean_error_of_open(tmp_path, no_threads, number):
    no_threads(number)
    try:
        async with asynckv.open(tmp_path / "kv", memory="1MiB", disk="16MiB", engine="threads") as cache:
            assert await cache.put(1, payload(1))
            await cache.flush()
    except asynckv.DiskError as error:
        assert error.errno == errno.EAGAIN  # noqa: PT017
    no_threads(1 << 30)
    async with asynckv.open(tmp_path / "kv", memory="1MiB", disk="16MiB", engine="threads") as cache:
        assert await cache.put(1, payload(1))
        await cache.flush()
        check_idle(cache)


async def test_a_ring_without_threads_fails_what_needs_one_and_goes_on(tmp_path, no_threads, monkeypatch):
    """A large checksum is a worker's job: when there can be none, its call is told."""
    monkeypatch.delenv("ASYNCKV_ENGINE", raising=False)
    if NO_RING:
        pytest.skip(f"NO RING WORKS HERE ({NO_RING}): the io_uring engine is NOT checked in this run")
    size = MIB
    options = {"memory": "8MiB", "disk": "64MiB", "engine": "io_uring"}
    await fill(tmp_path / "kv", {1: payload(1, 0, size), 2: payload(2)}, **options)
    async with asynckv.open(tmp_path / "kv", **options) as cache:
        no_threads(0)
        async with asyncio.timeout(3):
            assert await cache.get(1) is None
        assert cache.stats().io_errors == 1
        assert bytes(await cache.get(2)) == payload(2)
        no_threads(1 << 30)
        assert bytes(await cache.get(1)) == payload(1, 0, size)
        await settle(cache)
        check_idle(cache)
