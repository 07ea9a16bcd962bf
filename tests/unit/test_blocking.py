"""BlockingCache: the calls without await, any number of threads, and an end that is always clean."""

import gc
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np
import pytest

import asynckv
from asynckv import BlockingCache, CacheBlock, ClosedError, StoreLockedError

ROOT = Path(asynckv.__file__).parent.parent


@pytest.fixture
def cache(tmp_path):
    with BlockingCache(tmp_path / "store", memory="1MiB", disk="16MiB") as cache:
        yield cache


def block_of(key: int, size: int = 4096) -> np.ndarray:
    return np.full(size, key % 251, np.uint8)


def test_every_call(cache):
    k = np.arange(8, dtype=np.float32)
    assert cache.put(1, CacheBlock(layer_id=3, key=k, value=k + 1)) is True
    got = cache.get(1)
    assert (got.layer_id, got.key.tolist(), got.value.tolist()) == (3, k.tolist(), (k + 1).tolist())
    assert cache.get(2) is None
    assert cache.put_many([(2, b"two"), (3, b"three")]) == [True, True]
    assert cache.put_many({4: b"four"}) == [True]
    assert [bytes(each) for each in cache.get_many([2, 3])] == [b"two", b"three"]
    out = bytearray(8)
    assert cache.get_into(3, out) == 5
    assert bytes(out[:5]) == b"three"
    outs = [bytearray(4), bytearray(4)]
    assert cache.get_many_into(iter([2, 9]), iter(outs)) == [3, None]
    assert 1 in cache
    assert 9 not in cache
    assert len(cache) == 4
    assert sorted(cache.keys()) == [1, 2, 3, 4]
    assert cache.tier(1) == "memory"
    assert cache.tier(9) is None
    assert cache.match_prefix(iter([1, 2, 9, 3])) == 2
    assert cache.prefetch(iter([1, 2])) >= 0
    cache.touch(iter([1]))
    assert cache.delete(1) is True
    assert cache.delete(1) is False
    assert cache.delete_many(iter([2, 9])) == 1
    cache.flush()
    assert cache.stats().puts == 4
    cache.clear()
    assert len(cache) == 0
    assert cache, "an empty cache is not a missing one"
    assert "open" in repr(cache)


def test_request(cache):
    with cache.request([1, 2]) as request:
        assert request.get_many() == [None, None]
        assert request.put_many({1: b"a", 2: b"b"}) == [True, True]
        assert [bytes(each) for each in request.get_many()] == [b"a", b"b"]


def test_reserve_publishes_on_normal_exit_only(cache):
    with cache.reserve(5, (4, 4), np.int32) as array:
        array[:] = 7
        assert 5 not in cache
    assert cache.get(5).tolist() == [[7] * 4] * 4

    class Stop(Exception):
        pass

    with pytest.raises(Stop), cache.reserve(5, (2,), np.int32) as array:
        array[:] = 9
        raise Stop
    assert cache.get(5).shape == (4, 4)
    with cache.reserve_block(6, 2, (3,), (5,), np.float32) as block:
        block.key[:] = 1
        block.value[:] = 2
    got = cache.get(6)
    assert (got.layer_id, got.key.tolist(), got.value.tolist()) == (2, [1.0] * 3, [2.0] * 5)


def test_stream(cache):
    cache.put_many((key, block_of(key)) for key in range(20))
    assert [key for key, block in cache.stream(range(20)) if block[0] == key] == list(range(20))
    assert [key for key, _ in cache.stream([0, 1, 99, 2])] == [0, 1]
    for key, _block in cache.stream(range(20)):
        if key == 3:
            break
    with cache.stream(range(20)) as stream:
        assert next(stream)[0] == 0
    assert list(stream) == []
    del _block, stream
    wait_until(lambda: cache.stats().pinned_blocks == 0)


def wait_until(condition, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        gc.collect()
        time.sleep(0.005)


def test_futures(cache):
    done = cache.submit_put_many([(key, block_of(key)) for key in range(50)])
    assert done.result(timeout=30) == [True] * 50
    outs = [np.empty(4096, np.uint8) for _ in range(50)]
    future = cache.submit_get_many_into(range(50), outs)
    assert future.result(timeout=30) == [4096] * 50
    assert all((out == key % 251).all() for key, out in enumerate(outs))
    with pytest.raises(TypeError):
        cache.submit_put_many([(1, object())]).result(timeout=30)


def test_many_threads(cache):
    def work(number: int) -> int:
        wrong = 0
        for turn in range(30):
            key = number * 1000 + turn
            cache.put(key, block_of(key))
            for back in range(max(0, turn - 3), turn + 1):
                earlier = number * 1000 + back
                block = cache.get(earlier)
                if block is not None and not (block == earlier % 251).all():
                    wrong += 1
        return wrong

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(8))) == [0] * 8
    assert len(cache) == 240
    assert cache.stats().evictions > 0 or cache.stats().memory_free > 0


def test_views_may_be_dropped_on_any_thread(cache):
    cache.put(1, block_of(1))
    views = [cache.get(1) for _ in range(10)]
    assert cache.stats().pinned_blocks == 1
    thread = threading.Thread(target=views.clear)
    thread.start()
    thread.join()
    assert cache.stats().pinned_blocks == 0


def test_restart_is_warm(tmp_path):
    with BlockingCache(tmp_path / "store", memory="1MiB", disk="16MiB") as cache:
        cache.put("key", b"value")
    with BlockingCache(tmp_path / "store", memory="1MiB", disk="16MiB") as cache:
        assert bytes(cache.get("key")) == b"value"
        assert cache.stats().disk_hits == 1


def test_close_and_after(tmp_path):
    cache = BlockingCache(tmp_path / "store", memory="1MiB", disk="16MiB")
    cache.put(1, b"one")
    view = cache.get(1)
    stream = cache.stream([1])
    request = cache.request([1])
    assert not cache.closed
    cache.close()
    cache.close()
    assert cache.closed
    assert "closed" in repr(cache)
    assert cache.stats().puts == 1
    assert bytes(view) == b"one", "views outlive the cache"
    for call in (
        lambda: cache.get(1),
        lambda: cache.put(1, b"x"),
        lambda: len(cache),
        lambda: cache.submit_put_many([]),
        lambda: next(stream),
        request.get_many,
    ):
        with pytest.raises(ClosedError):
            call()
    del view


def test_closing_lets_running_calls_finish(tmp_path):
    cache = BlockingCache(tmp_path / "store", memory="1MiB", disk="64MiB")
    futures = [cache.submit_put_many([(key, block_of(key, 65536))]) for key in range(64)]
    cache.close()
    assert [future.result(timeout=0) for future in futures] == [[True]] * 64
    with BlockingCache(tmp_path / "store", memory="1MiB", disk="64MiB") as cache:
        assert len(cache) == 64


def test_cancelled_future(cache):
    future = cache.submit_get_many_into([1], [bytearray(8)])
    if future.cancel():
        with pytest.raises(CancelledError):
            future.result()
    assert cache.get(1) is None


def test_who_waits_for_futures_hears_of_one_that_was_cancelled_before_it_began(cache):
    assert cache.put("a", b"x")
    futures = []
    for _ in range(20):
        futures.append(cache.submit_get_many_into(["a"], [bytearray(1)]))
        futures[-1].cancel()
    assert not wait(futures, timeout=20).not_done


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_callback_that_ends_the_loop_closes_the_store(tmp_path):
    cache = BlockingCache(tmp_path / "store", memory="1MiB", disk="16MiB")
    assert cache.put("a", b"x")
    future = cache.submit_get_many_into(["a"], [bytearray(1)])
    future.add_done_callback(lambda _: sys.exit(3))
    future.result(20)
    cache._runner.join()
    with pytest.raises(ClosedError):
        cache.get("a")
    cache.close()
    assert cache.closed
    with BlockingCache(tmp_path / "store", memory="1MiB", disk="16MiB") as again:
        assert again.get("a") == b"x"


def test_opening_errors_come_from_the_constructor(tmp_path):
    with pytest.raises(TypeError):
        BlockingCache(tmp_path / "store", memroy="1MiB")
    with pytest.raises(ValueError, match="memory"):
        BlockingCache(tmp_path / "store", memory="one")
    with BlockingCache(tmp_path / "store", memory="1MiB", disk="16MiB"):
        with pytest.raises(StoreLockedError) as caught:
            BlockingCache(tmp_path / "store", memory="1MiB", disk="16MiB")
        assert caught.value.pid == os.getpid()
    names = [thread.name for thread in threading.enumerate()]
    assert "asynckv loop" not in names


def test_callbacks_must_not_wait_for_the_cache(cache):
    seen: list[BaseException] = []
    ended = threading.Event()

    def callback(_future):
        try:
            cache.get(1)
        except RuntimeError as error:
            seen.append(error)
        ended.set()

    cache.submit_put_many([(1, b"one")]).add_done_callback(callback)
    assert ended.wait(30)
    # Done before the callback was added, it ran here and could wait; otherwise it was refused instead of hanging.
    assert len(seen) <= 1


def test_unclosed_warns_and_still_closes(tmp_path):
    cache = BlockingCache(tmp_path / "store", memory="1MiB", disk="16MiB")
    cache.put(1, b"one")
    thread = next(each for each in threading.enumerate() if each.name == "asynckv loop")
    with pytest.warns(ResourceWarning, match="unclosed"):
        del cache
        gc.collect()
    thread.join(30)
    assert not thread.is_alive()
    with BlockingCache(tmp_path / "store", memory="1MiB", disk="16MiB") as cache:
        assert bytes(cache.get(1)) == b"one"


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        env={**os.environ, "ASYNCKV_ENGINE": "threads"},  # no warning where the kernel forbids io_uring
    )


def test_interpreter_shutdown_without_close(tmp_path):
    code = (
        "import sys, asynckv\n"
        "cache = asynckv.BlockingCache(sys.argv[1], memory='1MiB', disk='16MiB')\n"
        "cache.put_many((key, bytes([key]) * 5000) for key in range(200))\n"
    )
    done = run_python(code, str(tmp_path / "store"))
    assert done.returncode == 0
    assert done.stderr == ""
    with BlockingCache(tmp_path / "store", memory="1MiB", disk="16MiB") as cache:
        assert len(cache) == 200
        assert all(bytes(cache.get(key)) == bytes([key]) * 5000 for key in range(200))


def test_threads_that_outlive_the_main_one(tmp_path):
    code = (
        "import sys, threading, time, asynckv\n"
        "cache = asynckv.BlockingCache(sys.argv[1], memory='1MiB', disk='16MiB')\n"
        "def work():\n"
        "    threading.main_thread().join()\n"
        "    time.sleep(0.05)\n"
        "    cache.put(1, b'late')\n"
        "threading.Thread(target=work).start()\n"
    )
    done = run_python(code, str(tmp_path / "store"))
    assert (done.returncode, done.stderr) == (0, "")
    with BlockingCache(tmp_path / "store", memory="1MiB", disk="16MiB") as cache:
        assert bytes(cache.get(1)) == b"late"


def test_in_a_forked_child(tmp_path):
    code = (
        "import os, sys, warnings, asynckv\n"
        "cache = asynckv.BlockingCache(sys.argv[1], memory='1MiB', disk='16MiB')\n"
        "cache.put(1, b'one')\n"
        "warnings.simplefilter('ignore')\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    try:\n"
        "        cache.get(1)\n"
        "    except RuntimeError:\n"
        "        sys.exit(0)\n"
        "    sys.exit(9)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0\n"
        "assert bytes(cache.get(1)) == b'one'\n"
        "cache.close()\n"
    )
    done = run_python(code, str(tmp_path / "store"))
    assert (done.returncode, done.stderr) == (0, "")


def test_runs_on_uvloop_when_it_is_there(cache):
    pytest.importorskip("uvloop")
    assert type(cache._runner._loop).__module__.startswith("uvloop")
