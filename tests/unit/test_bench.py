"""``asynckv bench``: the roofline moves what it is told to, ratios are what they say, and a wrong byte is an error."""

import asyncio
import errno
import itertools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time

import numpy as np
import pytest

import asynckv
from asynckv.bench import article, command, contenders, disk, growth, lateness, mem, peers, requests
from asynckv.bench.figures import Row, Slice, interval, percentile
from asynckv.bench.payloads import Payloads
from asynckv.bench.requests import Requests, in_a_row, recycled
from asynckv.cli import main
from asynckv.commands.output import Progress

KIB = 1 << 10
TINY = disk.Plan(data=4 << 20, seconds=0.01, pairs=2)

roofline = pytest.importorskip("asynckv._roofline", reason="built without io_uring")


@pytest.fixture(scope="module", autouse=True)
def _ring():
    try:
        roofline.Roofline(1).close()
    except OSError as error:
        pytest.skip(f"no io_uring here: {error.strerror}")


# -- figures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [6, 7, 11, 40, 99])
def test_the_interval_holds_the_median_as_often_as_it_says(count):
    """Order statistics: x(r) <= median <= x(n + 1 - r) unless fewer than r values are on one side of it."""
    low, high = interval(range(1, count + 1))
    assert low + high == count + 1
    missed = 2 * sum(math.comb(count, k) for k in range(low)) / 2**count
    nearer = 2 * sum(math.comb(count, k) for k in range(low + 1)) / 2**count
    assert missed <= 0.05 < nearer


def test_the_interval_of_few_values_is_all_of_them():
    assert interval([3.0]) == (3.0, 3.0)
    assert interval([2.0, 9.0, 1.0]) == (1.0, 9.0)


def test_a_row_adds_up():
    slices = [Slice(10, 1 << 20, 0.5, 0.25, [1e-3, 2e-3]), Slice(30, 3 << 20, 1.5, 0.75, [3e-3, 4e-3], wrong=2)]
    row = Row.of(slices, [0.5, 0.7, 0.6], operation="get", block=1, depth=1)
    assert (row.blocks_per_second, row.bytes_per_second, row.errors) == (20.0, 2 << 20, 2)
    assert row.cpu_per_gib == pytest.approx(256.0)
    assert (row.p50, row.p99) == (2e-3, 4e-3)
    assert (row.share, row.low, row.high, row.pairs) == (0.6, 0.5, 0.7, 3)
    assert Row.of([], operation="get", block=1, depth=1).share is None


def test_percentiles():
    values = list(range(1, 101))
    random.Random(3).shuffle(values)
    assert [percentile(values, percent) for percent in (0, 1, 50, 99, 99.5, 100)] == [1, 1, 50, 99, 100, 100]
    assert percentile([], 50) == 0.0


@pytest.mark.parametrize("size", [60, 4 * KIB])
def test_every_wrong_byte_of_a_payload_shows(size):
    payloads = Payloads(size)
    block = payloads.make(5).copy()
    assert payloads.check(5, block)
    assert not payloads.check(6, block)
    assert not payloads.check(5, None)
    assert not payloads.check(5, block[:-1])
    for place in range(size):
        block[place] ^= 1
        assert not payloads.check(5, block)
        block[place] ^= 1
    distinct = {payloads.make(number).tobytes() for number in range(3000)}
    assert len(distinct) == 3000


# -- the roofline ----------------------------------------------------------------------------------------------------


@pytest.fixture
def numbered(tmp_path):
    """A file whose pages begin with their number."""
    path = tmp_path / "pages"
    path.write_bytes(b"".join(number.to_bytes(8, "little").ljust(4096, b"\1") for number in range(256)))
    fd = os.open(path, os.O_RDWR)
    yield fd
    os.close(fd)


def arrays(fd, offsets, size, writes=False):
    count = len(offsets)
    return (
        np.full(count, fd, np.int32),
        np.array(offsets, np.uint64),
        np.full(count, size, np.uint32),
        np.full(count, writes, np.uint8),
    )


@pytest.mark.parametrize("depth", [1, 3, 64])
def test_the_roofline_reads_what_it_is_told_to(numbered, depth):
    ring = roofline.Roofline(depth)
    buffers = np.zeros((depth, 4096), np.uint8)
    latencies = np.full(5000, -1.0)
    offsets = [4096 * number for number in range(256)]
    moved, total, seconds = ring.run(*arrays(numbered, offsets, 4096), buffers, seconds=0.02, latencies=latencies)
    assert moved >= depth
    assert total == 4096 * moved
    assert seconds >= 0.02
    assert (latencies[: min(moved, 5000)] >= 0).all()
    assert (latencies[moved:] == -1).all()
    seen = set(buffers[:, :8].copy().view(np.uint64).ravel().tolist())
    assert seen <= set(range(256))
    assert len(seen) == depth, "each request in flight had a buffer of its own"
    ring.close()
    ring.close()
    with pytest.raises(ValueError, match="closed"):
        ring.run(*arrays(numbered, [0], 4096), buffers)


def test_the_roofline_begins_where_it_is_told_to_and_goes_round(numbered):
    ring, buffers = roofline.Roofline(1), np.zeros((1, 4096), np.uint8)
    for first in (0, 3, 7):
        moved, _, _ = ring.run(*arrays(numbered, [4096 * n for n in range(8)], 4096), buffers, first=first, seconds=0.0)
        last = (first + moved - 1) % 8
        assert int(buffers[0, :8].copy().view(np.uint64)[0]) == last
    ring.close()


def test_the_roofline_writes_what_it_is_told_to(numbered):
    ring, buffers = roofline.Roofline(2), np.full((2, 4096), 7, np.uint8)
    ring.run(*arrays(numbered, [0, 8192], 4096, writes=True), buffers, seconds=0.0)
    ring.close()
    found = os.pread(numbered, 3 * 4096, 0)
    assert found[:4096] == bytes([7]) * 4096
    assert found[4096:8192] == (1).to_bytes(8, "little").ljust(4096, b"\1"), "the page between them is as it was"
    assert found[8192:] == bytes([7]) * 4096


def test_requests_that_fail_are_an_error_and_leave_nothing_in_flight(numbered):
    ring, buffers = roofline.Roofline(8), np.zeros((8, 4096), np.uint8)
    good = [4096 * number for number in range(32)]
    with pytest.raises(OSError) as caught:
        ring.run(*arrays(numbered, [*good, 4096 * 256, *good], 4096), buffers, seconds=0.05)
    assert caught.value.errno == errno.EIO, "a read behind the end moves less than it should"
    with pytest.raises(OSError) as caught:
        ring.run(*arrays(99_999, good, 4096), buffers, seconds=0.05)
    assert caught.value.errno == errno.EBADF
    moved, _, _ = ring.run(*arrays(numbered, good, 4096), buffers, seconds=0.0)
    assert moved >= 8
    ring.close()


def test_lists_that_do_not_fit_are_refused(numbered):
    ring, buffers = roofline.Roofline(2), np.zeros((2, 4096), np.uint8)
    files, offsets, sizes, writes = arrays(numbered, [0, 4096], 4096)
    for wrong, words in (
        ((files[:1], offsets, sizes, writes, buffers), "of one length"),
        ((files, offsets, sizes, writes[:1], buffers), "of one length"),
        ((files[:0], offsets[:0], sizes[:0], writes[:0], buffers), "not empty"),
        ((files, offsets, sizes, writes, buffers[:1]), "buffers have to be 2 of 4096"),
        ((files, offsets, sizes, writes, buffers[:, :4095].copy()), "buffers have to be 2 of 4096"),
    ):
        with pytest.raises(ValueError, match=words):
            ring.run(*wrong)
    with pytest.raises(ValueError, match="first=2"):
        ring.run(files, offsets, sizes, writes, buffers, first=2)
    for depth in (0, 1025):
        with pytest.raises(ValueError, match="one to 1024"):
            roofline.Roofline(depth)
    ring.close()


def test_a_row_of_writes_and_a_recycled_file(tmp_path):
    with recycled(str(tmp_path), 1 << 20) as fd:
        assert os.fstat(fd).st_size == 1 << 20
        asked = in_a_row(fd, [4096, 8192], 1 << 20)
        assert [each[2] for each in asked[:4]] == [4096, 8192, 4096, 8192]
        assert all(a[1] + a[2] == b[1] for a, b in itertools.pairwise(asked))
        assert asked[-1][1] + asked[-1][2] <= 1 << 20
        requests = Requests(asked, 2, writes=True, blocks=2 * len(asked))
        found = requests.play(0.01)
        requests.close()
        assert found.blocks * 4096 == pytest.approx(
            found.bytes * 2 * len(asked) * 4096 / sum(a[2] for a in asked), rel=0.1
        )
    assert not os.listdir(tmp_path)


# -- the parts -------------------------------------------------------------------------------------------------------


async def test_reloads(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "DEPTH", 8)
    rows = await disk.reloads(str(tmp_path), 4 * KIB, TINY, loop="asyncio", progress=Progress("test"))
    names = [(row.operation, row.depth) for row in rows]
    deep = [(name, 8) for name in (*disk.RELOADS, "read roofline")]
    assert names == [*deep, ("get", 1), ("read roofline", 1)]
    for row in rows:
        assert row.errors == 0
        assert row.blocks_per_second > 0
        if row.operation != "read roofline":
            assert row.pairs == TINY.pairs
            assert 0 < row.low <= row.share <= row.high


async def test_a_wrong_block_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "DEPTH", 8)
    get_many = asynckv.Cache.get_many

    async def damaged(self, keys):
        found = await get_many(self, keys)
        return [None, *found[1:]]

    monkeypatch.setattr(asynckv.Cache, "get_many", damaged)
    rows = await disk.reloads(str(tmp_path), 4 * KIB, TINY, loop="asyncio", progress=Progress("test"))
    errors = {row.operation: row.errors for row in rows if row.depth == 8}
    assert errors["get_many"] > 0
    assert errors["get"] == errors["stream"] == 0


async def test_spills_and_the_mix(tmp_path):
    for job in (disk.spills, disk.mixed):
        place = tmp_path / job.__name__
        place.mkdir()
        plan = disk.Plan(data=32 << 20, seconds=0.03, pairs=2)
        row, bare = await job(str(place), 64 * KIB, plan, loop="asyncio", progress=Progress("test"))
        assert row.errors == bare.errors == 0
        assert 0 < row.low <= row.share <= row.high
        assert bare.blocks_per_second > 0


async def test_small_spills(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "SMALL_BLOCKS", 20_000)
    spilled, kept = await disk.small_spills(str(tmp_path), TINY, loop="asyncio")
    assert spilled.errors == kept.errors == 0
    assert spilled.pairs == 2


async def test_memory(tmp_path):
    rows = await mem.in_memory(str(tmp_path / "unused"), loop="asyncio", rounds=2, progress=Progress("test"))
    assert {row.operation for row in rows} >= {"hit", "put", "get_many of 64", "request of 64", "match_prefix of 64"}
    assert not any(row.errors for row in rows)
    assert all(row.p50 > 0 for row in rows)


async def test_growth(tmp_path, monkeypatch):
    monkeypatch.setattr(growth, "COUNTS", (1000, 40_000))
    monkeypatch.setattr(growth, "CALLS", 200)
    rows = await growth.growth(str(tmp_path), loop="asyncio", progress=Progress("test"))
    assert [(row.operation, row.count) for row in rows] == [
        (operation, count) for count in (1000, 40_000) for operation in ("put", "hit", "reload")
    ]
    assert not any(row.errors for row in rows)
    assert all(row.blocks_per_second > 0 for row in rows)


def test_lateness_tells_a_loop_that_was_held_up(tmp_path):
    found = lateness.late("asynckv", str(tmp_path), 64 * KIB, 4 << 20, "asyncio")
    assert found["store"]["wrong"] == 0
    assert found["store"]["beats"] > 0
    assert found["control"]["beats"] > 0


async def test_a_heartbeat_sees_what_blocks_the_loop():
    heart = lateness.Heartbeat()
    async with heart:
        await asyncio.sleep(0.02)
        time.sleep(0.05)
        await asyncio.sleep(0.02)
    assert 0.045 < max(heart.late) < 1.0
    assert heart.figures()["max_ms"] == max(heart.late) * 1e3


@pytest.mark.parametrize("name", contenders.CONTENDERS)
async def test_contenders_keep_what_they_are_given(tmp_path, name):
    if name in peers.NEEDED:
        pytest.importorskip(name)
    payloads, count = Payloads(4 * KIB), 600
    contender = contenders.CONTENDERS[name](tmp_path, 4 * KIB, count)
    for life in range(2):
        await contender.open()
        if not life:
            await contender.put_all(range(count), payloads.make)
            await contender.sync()
        found = {}
        await contender.read(range(count), found.__setitem__)
        assert len(found) == count
        assert all(payloads.check(key, block) for key, block in found.items())
        await contender.close()


def test_peers(tmp_path, monkeypatch):
    monkeypatch.setitem(peers.SIZES, 4 * KIB, 1 << 20)
    rows = peers.compare(str(tmp_path), loop="asyncio", sizes=[4 * KIB], rounds=1, progress=Progress("test"))
    assert not any(row.errors for row in rows)
    ours = [row for row in rows if row.operation.endswith(", asynckv")]
    assert [row.operation.partition(",")[0] for row in ours] == list(peers.PHASES)
    assert all(row.share is not None and row.beside for row in ours)


PROTOTYPE = """#!/bin/sh
echo "puts $1 in 0.5 s (1 us each), evicted 7; gets $6 in 0.1 s"
echo "memory hits 0 disk hits $6 misses 0; mean disk load 5.5 us"
"""


def test_the_article_and_its_prototype(tmp_path):
    program = tmp_path / "prototype"
    program.write_text(PROTOTYPE)
    program.chmod(0o755)
    scenario = article.Scenario(2000, 32 << 10, 1 << 10, 10, 5)
    told = article.tell(str(tmp_path), scenario, program=str(program), loop="asyncio", rounds=2, progress=Progress("t"))
    assert set(told) == {"asynckv", "asynckv, O_DIRECT", "prototype"}
    for who, stories in told.items():
        for story in stories:
            assert (story.disk_hits, story.misses, story.wrong) == (20, 0, 0), who
            assert story.evictions > 0
    assert statistics.mean(story.load_us for story in told["prototype"]) == 5.5


# -- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def _small(monkeypatch):
    monkeypatch.setattr(growth, "COUNTS", (1000,))


SMALL = """
import sys
from asynckv.bench import disk, growth, lateness
from asynckv.cli import main
growth.COUNTS = (1000, 5000)
sys.exit(main(sys.argv[1:]))
"""


def test_the_command_and_its_plots(tmp_path):
    """In a process of its own: matplotlib keeps its fonts open."""
    pytest.importorskip("matplotlib")
    out = tmp_path / "out"
    words = [sys.executable, "-c", SMALL, "bench", "mem", "--dir", tmp_path, "--pairs", "2", "--out", out]
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "no plots" not in done.stderr
    for text in ("Memory", "Verdict", "Every byte that was read was right."):
        assert text in done.stdout
    values = json.loads((out / "bench.json").read_text())
    assert values["errors"] == 0
    assert {row["operation"] for row in values["parts"]["mem"]["rows"]} >= {"hit", "reload"}
    assert sorted(os.listdir(tmp_path)) == ["out"], "nothing is left behind"
    assert sorted(os.listdir(out)) == ["bench.json", "growth.png"]
    assert (out / "growth.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("_small")
def test_a_wrong_byte_is_exit_status_1(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Payloads, "check", lambda self, number, block: False)
    assert main(["bench", "mem", "--dir", str(tmp_path), "--pairs", "1", "--json"]) == 1
    values = json.loads(capsys.readouterr().out)
    assert values["errors"] > 0
    assert "WRONG OR MISSING" in values["verdict"]


@pytest.mark.parametrize("missing", [True, False])
def test_without_io_uring_there_is_no_roofline(tmp_path, capsys, monkeypatch, missing):
    def refused(depth):
        raise PermissionError(errno.EPERM, "io_uring_setup: Operation not permitted")

    monkeypatch.setattr(requests, "Roofline", None if missing else refused)
    monkeypatch.setattr(command, "DATA_MIN", 0)
    monkeypatch.setattr(disk, "DEPTH", 8)
    assert main(["bench", "disk", "--dir", str(tmp_path), "--data", "1MiB"]) == 2
    text = capsys.readouterr().err
    assert "need io_uring" in text
    assert ("not built in" if missing else "refused here (io_uring_setup: Operation not permitted)") in text
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["disk", "--data", "1MiB"], "a store of less than 64.0 MiB shows nothing"),
        (["disk", "--data", "much"], "--data"),
        (["disk", "--pairs", "0"], "at least one pair"),
        (["disk", "--data", "900TiB"], "free; see --dir"),
        (["everything"], "invalid choice"),
        (["article", "--prototype", "/nonexistent"], "/nonexistent"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_usage(tmp_path, capsys, words, text):
    assert main(["bench", *words, "--dir", str(tmp_path)]) == 2
    assert text in capsys.readouterr().err
    assert not os.listdir(tmp_path)
