"""What is particular to the ``aiofiles`` engine: its tasks, and what happens when somebody cancels them."""

import asyncio
import contextlib
import gc
import logging
import threading
import warnings

import pytest
import uvloop

from asynckv.backends import aio as aio_module
from asynckv.backends import create_backend
from asynckv.backends.aio import AiofilesBackend
from asynckv.testing import FaultyFiles, error, hang
from asynckv.testing.tools import PAGE, Ends, Gate, aligned, pattern, turns


async def opened(directory, **options):
    backend = AiofilesBackend(**{"timeout": 30.0, **options})
    await backend.start(directory)
    return backend, await backend.open("data", create=True, size=4 * PAGE)


def engine_tasks(backend):
    return set(backend._tasks)


async def test_every_operation_is_one_job_of_aiofiles(tmp_path, monkeypatch):
    jobs = []
    attempt = aio_module._attempt

    def counted(op, *args, **options):
        jobs.append(op.kind)
        return attempt(op, *args, **options)

    monkeypatch.setattr(aio_module, "_attempt", counted)
    backend, file = await opened(tmp_path)
    await backend.write(file, 0, [aligned(PAGE)])
    await backend.read(file, 0, aligned(PAGE), verify=lambda view: True)
    await backend.sync(file)
    await backend.unlink("data")
    assert jobs == ["call", "call", "write", "read", "sync", "call"]
    assert await backend.close() == 0


async def test_the_executor_is_bounded_and_its_threads_are_daemons(tmp_path):
    before = set(threading.enumerate())
    backend, file = await opened(tmp_path)
    await asyncio.gather(*(backend.read(file, 0, aligned(PAGE)) for _ in range(100)))
    threads = set(threading.enumerate()) - before
    assert len(threads) == 8
    assert all(thread.daemon and thread.name.startswith("asynckv") for thread in threads)
    assert await backend.close() == 0


async def test_cancelling_every_task_of_the_loop_ends_no_operation(tmp_path):
    data = pattern(PAGE)
    backend, file = await opened(tmp_path)
    await backend.write(file, 0, [aligned(PAGE, data)])
    gate, ends = Gate(), [Ends() for _ in range(40)]
    buffers = [aligned(PAGE) for _ in ends]
    running = backend.read(file, 0, buffers[0], verify=gate, released=ends[0])
    await gate.blocked()
    queued = [backend.read(file, 0, buffers[at], released=ends[at]) for at in range(1, 39)]
    await turns(2)
    unstarted = backend.read(file, 0, buffers[39], released=ends[39])  # its task has not had a turn
    for task in engine_tasks(backend):
        task.cancel()
    await turns()
    assert not running.done()
    assert ends[0].released == 0
    gate.open()
    assert await asyncio.gather(running, *queued, unstarted) == [True] * 40
    assert [end.released for end in ends] == [1] * 40
    assert all(buffer == data for buffer in buffers)
    assert backend.reads_in_flight == 0
    assert await backend.close() == 0


async def test_a_cancel_between_the_end_of_the_job_and_its_delivery(tmp_path):
    backend, file = await opened(tmp_path)
    for spin in range(60):
        ends = Ends()
        future = backend.read(file, 0, aligned(PAGE), released=ends)
        tasks = engine_tasks(backend)
        await turns(spin % 4)
        threading.Event().wait(0.0003 * (spin % 3))  # let the worker end while the loop cannot see it
        for task in tasks:
            task.cancel()
        assert await future is True
        await turns()
        assert ends.released == 1
    assert backend.reads_in_flight == 0
    assert await backend.close() == 0


async def test_an_operation_given_up_in_the_queue_is_finished_once(tmp_path):
    backend, file = await opened(tmp_path, readers=1)
    gate, ends = Gate(), Ends()
    running = backend.read(file, 0, aligned(PAGE), verify=gate)
    await gate.blocked()
    waiting = backend.read(file, 0, aligned(PAGE), timeout=0.01, released=ends)
    with pytest.raises(TimeoutError):
        await waiting
    assert ends.released == 1
    gate.open()
    assert await running is True
    await turns()
    assert ends.released == 1
    assert backend.reads_in_flight == 0
    assert await backend.close() == 0


async def test_a_file_whose_close_waited_for_a_read_that_the_end_gave_up(tmp_path):
    """The file's close is sent off by the last of its reads, which the engine gives up when it closes itself."""
    backend, file = await opened(tmp_path, readers=1, timeout=0.05)
    other = await backend.open("other", create=True, size=PAGE)
    gate = Gate()
    running = backend.read(file, 0, aligned(PAGE), verify=gate)
    await gate.blocked()
    waiting = backend.read(other, 0, aligned(PAGE), timeout=30.0)
    closing = backend.close_file(other)
    assert await backend.close() == 1
    for late in (running, waiting):
        with pytest.raises(TimeoutError):
            await late
    with contextlib.suppress(OSError):
        await closing
    gate.open()
    for _ in range(1000):
        if not engine_tasks(backend):
            break
        await asyncio.sleep(0.002)
    assert not engine_tasks(backend)
    assert other.fd < 0


async def test_errors_below_arrive_with_errno(tmp_path):
    files = FaultyFiles()
    backend, file = await opened(tmp_path, files=files, direct=False)
    files.script.add("preadv", error(5), sticky=True)
    for _ in range(20):
        with pytest.raises(OSError) as caught:
            await backend.read(file, 0, aligned(PAGE))
        assert caught.value.errno == 5
    files.script.clear()
    assert await backend.read(file, 0, aligned(PAGE))
    assert await backend.close() == 0


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_completions_after_the_loop_is_closed_are_dropped(tmp_path, new_loop, caplog):
    files = FaultyFiles()
    backend = AiofilesBackend(files=files, timeout=30.0)
    released = []

    async def main(backend):
        await backend.start(tmp_path)
        file = await backend.open("data", create=True, size=PAGE)
        files.script.add("preadv", hang())
        backend.read(file, 0, aligned(PAGE), released=lambda: released.append(1))
        for _ in range(10_000):
            if files.hanging:
                break
            await asyncio.sleep(0.001)
        for task in engine_tasks(backend):  # what asyncio.run does at its end
            task.cancel()
        await turns()

    loop = new_loop()
    with caplog.at_level(logging.WARNING):
        loop.run_until_complete(main(backend))
        loop.close()
        files.release_all()
        while files.hanging:
            threading.Event().wait(0.001)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            del backend
            gc.collect()
    assert released == []
    assert not caplog.records


async def test_chosen_by_name(tmp_path):
    backend = create_backend("aiofiles", direct=False)
    await backend.start(tmp_path)
    assert (backend.name, backend.direct) == ("aiofiles", False)
    assert await backend.close() == 0
