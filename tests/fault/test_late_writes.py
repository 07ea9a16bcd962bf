"""A write of a killed process may reach the disk after the next owner has opened the store: nobody may see it happen.

The kernel does not wait for the direct writes of a ring whose process has died; where a disk prefers reads, or is
throttled, they come a second later. What the next opening shows has to be what every later opening shows.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from storekit import ring_refusal
from test_kill import copy_of_killed

import asynckv
from asynckv.backends import create_backend
from asynckv.backends.files import Files
from asynckv.testing import RecordingBackend

if TYPE_CHECKING:
    from collections.abc import Iterator

MIB = 1 << 20
OPTIONS: dict[str, Any] = {"memory": "1MiB", "disk": "16MiB", "segment": "256KiB", "direct": False}

# Waits for the end of its input, so that it can be slowed down, and then writes until it is killed.
WORKER = """
import asyncio, os, sys, asynckv

async def main():
    async with asynckv.open(sys.argv[1], memory="1MiB", disk="64MiB", segment="8MiB") as cache:
        sys.stdin.read()
        for number in range(1 << 30):
            await cache.put_many((key, os.urandom(5000)) for key in range(150))
            print(number, flush=True)
            await cache.flush()

asyncio.run(main())
"""


class Late(RecordingBackend):
    """The bytes of `late` reach a file when somebody waits for them, and otherwise when the store is closed."""

    late: dict[Path, bytes]

    def call(self, function: str, *args: Any, timeout: float | None = None) -> asyncio.Future[Any]:
        if function == "settle":
            for path in [path for path in self.late if path.name == args[0].name]:
                self.land(path)
        return super().call(function, *args, timeout=timeout)

    async def close(self) -> int:
        for path in list(self.late):
            self.land(path)
        return await super().close()

    def land(self, path: Path) -> None:
        data = self.late.pop(path)
        if path.exists():
            with path.open("r+b") as file:
                file.write(data)


def open_with_late(directory: Path, late: dict[Path, bytes]) -> asynckv.cache.OpenCache:
    def factory(*args: Any, **given: Any) -> RecordingBackend:
        backend = Late(create_backend(*args, **given))
        backend.late = late
        return backend

    return asynckv.open(directory, _backend_factory=factory, **OPTIONS)


async def kill_with_one_block(tmp_path: Path) -> None:
    """Leave a store in `killed` as a kill after one flushed block leaves it."""
    async with asynckv.open(tmp_path / "store", **OPTIONS) as cache:
        assert await cache.put(1, b"one" * 100)
        await cache.flush()
        copy_of_killed(tmp_path / "store", tmp_path / "killed")


async def what_is_there(cache: asynckv.Cache) -> list[bytes | None]:
    found = await cache.get_many(range(8))
    return [None if block is None else bytes(block) for block in found]


@pytest.mark.parametrize("last", ["put", "delete", "clear"])
async def test_what_an_opening_shows_stays(tmp_path: Path, last: str) -> None:
    """The last batch of the process before comes late: between two openings, or between two looks of one."""
    store = tmp_path / "store"
    cache = await asynckv.open(store, **OPTIONS)
    for index in range(8):
        assert await cache.put(index, b"old" * 100)
    await cache.flush()
    copy_of_killed(store, tmp_path / "killed")
    if last == "put":
        assert await cache.put(3, b"new" * 100)
        await cache.flush()
    elif last == "delete":
        await cache.delete(3)
    else:
        await cache.clear()
    late = {tmp_path / "killed" / path.name: path.read_bytes() for path in store.glob("*.seg")}
    await cache.close()

    cache = await open_with_late(tmp_path / "killed", late)
    first = await what_is_there(cache)
    copy_of_killed(tmp_path / "killed", tmp_path / "again")
    for path, data in late.items():  # nobody waited: they come now
        (tmp_path / "again" / path.name).write_bytes(data)
    await cache.close()
    async with asynckv.open(tmp_path / "again", **OPTIONS) as cache:
        assert await what_is_there(cache) == first
    async with asynckv.open(tmp_path / "killed", **OPTIONS) as cache:
        assert await what_is_there(cache) == first


async def test_a_late_header_spoils_no_later_segment(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The process before died while it wrote the first page of its next segment, into the spare file."""
    await kill_with_one_block(tmp_path)
    spare = tmp_path / "killed" / "spare"
    spare.write_bytes(bytes(256 << 10))
    late = {spare: b"\xaa" * mmap.PAGESIZE}
    with spare.open("r+b") as file:
        cache = await open_with_late(tmp_path / "killed", late)
        assert await cache.put(2, b"two" * 100)
        await cache.flush()
        assert not spare.exists()  # it is the segment now
        for data in late.values():  # nobody waited: it comes now
            file.write(data)
    copy_of_killed(tmp_path / "killed", tmp_path / "again")
    await cache.close()
    async with asynckv.open(tmp_path / "again", **OPTIONS) as cache:
        assert (await what_is_there(cache))[1:3] == [b"one" * 100, b"two" * 100]
    assert "damaged" not in caplog.text


async def test_a_write_that_never_ends_is_an_error(tmp_path: Path) -> None:
    """Serving what may still change would be wrong, so the opening says what it waits for."""
    await kill_with_one_block(tmp_path)

    class Stuck(RecordingBackend):
        def call(self, function: str, *args: Any, timeout: float | None = None) -> asyncio.Future[Any]:
            if function != "settle":
                return super().call(function, *args, timeout=timeout)
            future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            future.set_exception(TimeoutError())
            return future

    def factory(*args: Any, **given: Any) -> RecordingBackend:
        return Stuck(create_backend(*args, **given))

    with pytest.raises(asynckv.DiskError, match="does not end"):
        await asynckv.open(tmp_path / "killed", _backend_factory=factory, **OPTIONS)
    async with asynckv.open(tmp_path / "killed", **OPTIONS) as cache:  # nothing was lost, and nothing is locked
        assert (await what_is_there(cache))[1] == b"one" * 100


# -- the real thing ----------------------------------------------------------------------------------------------------

GROUPS = Path("/sys/fs/cgroup/blkio"), Path("/sys/fs/cgroup")


@contextlib.contextmanager
def throttled(path: Path, bytes_per_second: int) -> Iterator[Path]:
    """A control group whose processes write this slowly to the disk of a path; the file that takes process ids."""
    device = path.stat().st_dev
    disk = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    if (disk / "partition").exists():
        disk = disk.resolve().parent
    group = next(filter(None, (_slow_group(root, disk, bytes_per_second) for root in GROUPS)), None)
    if group is None:
        pytest.skip("SKIPPED LOUDLY: no control group can slow this disk down (needs root and the io controller)")
    try:
        yield group / "cgroup.procs"
    finally:
        group.rmdir()


def _slow_group(root: Path, disk: Path, bytes_per_second: int) -> Path | None:
    group = root / f"asynckv-test-{os.getpid()}"
    try:
        number = (disk / "dev").read_text().strip()
        group.mkdir()
    except OSError:
        return None
    try:
        if (group / "blkio.throttle.write_bps_device").exists():
            (group / "blkio.throttle.write_bps_device").write_text(f"{number} {bytes_per_second}\n")
        else:
            (group / "io.max").write_text(f"{number} wbps={bytes_per_second}\n")
    except OSError:
        group.rmdir()
        return None
    return group


def pages_of(path: Path) -> bytes:
    """What is on the device."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        with mmap.mmap(-1, os.fstat(fd).st_size) as memory:
            assert os.preadv(fd, [memory], 0) == len(memory)
            return memory[:]
    finally:
        os.close(fd)


def test_settle_waits_for_the_writes_of_a_dead_process(tmp_path: Path) -> None:
    """A worker is killed while its ring writes slowly. Once its segment is settled, nothing in it changes any more."""
    if ring_refusal():
        pytest.skip(f"NO RING HERE ({ring_refusal()}): late writes are NOT checked with a real disk in this run")
    reader, tries, late = Files(), 4, 0
    with throttled(tmp_path, MIB) as members:
        for number in range(tries):
            store = tmp_path / f"store-{number}"
            command = [sys.executable, "-c", WORKER, str(store)]
            environment = {**os.environ, "ASYNCKV_ENGINE": "io_uring"}
            with subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, process_group=0
            ) as worker:
                members.write_text(str(worker.pid))
                assert worker.stdin is not None
                assert worker.stdout is not None
                worker.stdin.close()
                for line in worker.stdout:
                    if line == b"4\n":  # and soon its batch is under way
                        break
                time.sleep(0.05)
                worker.kill()
            path = store / "0000000000000001.seg"
            before = pages_of(path)
            reader.attach(store)
            fd = reader.open(path.name, os.O_RDWR)
            reader.settle(fd)
            os.close(fd)
            reader.detach()
            settled = pages_of(path)
            late += before != settled
            time.sleep(0.3)
            assert pages_of(path) == settled, "a write came after the file was settled"
    if not late:
        pytest.skip("SKIPPED LOUDLY: no write was late here (no ring, or a disk that cannot be slowed down)")
    print(f"{late} of {tries} killed processes left a write under way")
