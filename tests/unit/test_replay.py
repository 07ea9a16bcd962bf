"""Replaying traces: reading them, generating them, and counts that equal the textbook policies'."""

import contextlib
import gzip
import hashlib
import io
import json
import os
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest

import asynckv
from asynckv.cli import main
from asynckv.commands.content import Contents
from asynckv.commands.output import Progress
from asynckv.commands.replayer import Latencies, Replay, occupied_bytes
from asynckv.commands.trace import Request, TraceError, parse_request, read_trace
from asynckv.commands.tracegen import BLOCK_TOKENS, generate

# From the rules the request traces are published with: five requests, four blocks.
WORKED = [[1, 2, 3], [1, 4, 5], [1, 2, 3, 6], [7, 8], [1, 4, 5, 9]]
WORKED_LENGTHS = [1536, 1400, 2048, 1024, 2000]
WORKED_RUNS = {"lru": (3, "01100"), "fifo": (4, "01001")}


def requests_of(*prompts, lengths=None):
    lengths = lengths or [512 * len(ids) for ids in prompts]
    return [Request(0.0, length, 1, ids) for ids, length in zip(prompts, lengths, strict=True)]


def write_trace(path: Path, requests, *, compress=False) -> Path:
    lines = "".join(
        json.dumps({"timestamp": r.timestamp, "input_length": r.input_length, "output_length": r.output_length,
                    "hash_ids": r.hash_ids}) + "\n"
        for r in requests
    )  # fmt: skip
    path.write_bytes(gzip.compress(lines.encode()) if compress else lines.encode())
    return path


async def read_all(path, **options):
    return [request async for request in read_trace(path, **options)]


# -- reading


@pytest.mark.parametrize("compress", [False, True])
async def test_reads_plain_and_gzip(tmp_path, compress):
    wanted = list(generate(3, blocks=300))
    path = write_trace(tmp_path / "trace", wanted, compress=compress)
    shares = []
    assert await read_all(path, progress=shares.append) == wanted
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


async def test_reads_gzip_of_several_members_and_blank_lines(tmp_path):
    path = tmp_path / "trace"
    path.write_bytes(gzip.compress(b'{"hash_ids": [1]}\n\n') + gzip.compress(b'{"hash_ids": [2]}'))
    assert [request.hash_ids for request in await read_all(path)] == [[1], [2]]


async def test_reads_lines_longer_than_a_chunk(tmp_path):
    request = Request(1.0, 512 * 50_000, 1, list(range(50_000)))
    path = write_trace(tmp_path / "trace", [request, request], compress=True)
    assert await read_all(path) == [request, request]


async def test_damaged_gzip_is_an_error(tmp_path):
    whole = gzip.compress(os.urandom(5000).hex().encode())
    (tmp_path / "cut").write_bytes(whole[:-20])
    with pytest.raises(TraceError):
        await read_all(tmp_path / "cut")
    (tmp_path / "bad").write_bytes(whole[:30] + b"\xff" * 30 + whole[60:])
    with pytest.raises(TraceError):
        await read_all(tmp_path / "bad")


@pytest.mark.parametrize(
    "line",
    [
        b"{", b"[]", b"3", b"{}", b'{"hash_ids": 3}', b'{"hash_ids": ["1"]}', b'{"hash_ids": [true]}',
        b'{"hash_ids": [1.5]}', b'{"hash_ids": [9223372036854775808]}', b'{"hash_ids": [1], "timestamp": "x"}',
        b"\xff\xfe", b"[" * 100_000,
    ],
)  # fmt: skip
def test_bad_lines_name_their_number(line):
    with pytest.raises(TraceError, match="line 17"):
        parse_request(line, 17)


@pytest.mark.parametrize(
    "value",
    [
        "Infinity", "-Infinity", "NaN", "1e999", "-1", "-0.5", "1e300", "9" * 30, "9" * 5000, '"1"', "null", "true",
        "[1]", "{}",
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["timestamp", "input_length", "output_length", "hash_ids"])
def test_numbers_that_no_request_has(tmp_path, capsys, name, value):
    if name == "hash_ids":
        line = f'{{"hash_ids": [5, {"-0.5" if value == "-1" else value}]}}'
    else:
        line = f'{{"hash_ids": [5], "{name}": {value}}}'
    trace = tmp_path / "trace"
    trace.write_text(f'{{"hash_ids": [1]}}\n\n{line}\n')
    assert main(["replay", str(trace), "--memory", "1MiB", "--disk", "0"]) == 2
    out = capsys.readouterr()
    assert out.out == ""
    assert out.err.startswith(f"asynckv: {trace}: line 3: ")
    assert out.err.count("\n") == 1


def test_numbers_that_a_request_may_have():
    request = parse_request(b'{"hash_ids": [-1], "timestamp": 0.5, "input_length": 512.0, "output_length": 0}', 1)
    assert request == Request(0.5, 512, 0, [-1])
    assert type(request.input_length) is int
    assert parse_request(b'{"hash_ids": []}', 1) == Request(0, 0, 0, [])
    for name in ("input_length", "output_length"):
        with pytest.raises(TraceError, match="whole"):
            parse_request(b'{"hash_ids": [], "%s": 1.5}' % name.encode(), 1)


def test_errors_of_a_trace_show_no_keys():
    for line in (b'{"hash_ids": [1, "8675309"]}', b'{"hash_ids": [8675309.5]}', b'{"hash_ids": [8675309}', b"8675309"):
        with pytest.raises(TraceError) as caught:
            parse_request(line, 17)
        assert "8675309" not in str(caught.value)


def is_open(path: Path) -> bool:
    names = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own
            names.append(os.readlink(f"/proc/self/fd/{fd}"))
    return str(path) in names


async def test_a_trace_is_closed_when_a_line_is_bad(tmp_path):
    path = tmp_path / "trace"
    path.write_text('{"hash_ids": [1]}\n{\n')
    with pytest.raises(TraceError):
        await read_all(path)
    assert not is_open(path)


async def test_a_trace_is_closed_when_not_all_of_it_is_read(tmp_path):
    path = write_trace(tmp_path / "trace", requests_of(*([each] for each in range(9))))
    async with contextlib.aclosing(read_trace(path)) as requests:
        await Replay(Liar(), 100).run(requests, 1)
        assert is_open(path)
    assert not is_open(path)


async def test_a_trace_that_cannot_be_read_names_itself():
    with pytest.raises(OSError) as caught:
        await read_all("/proc/self/mem")  # opens, and has nothing to read at its start
    assert caught.value.filename == "/proc/self/mem"


# -- generating


def test_generated_trace_is_seeded_and_exact():
    trace = list(generate(5, blocks=1000))
    assert trace == list(generate(5, blocks=1000))
    assert trace != list(generate(6, blocks=1000))
    assert len({each for request in trace for each in request.hash_ids}) == 1000


def test_generated_trace_has_the_properties_of_recorded_ones():
    before: dict[int, int] = {}
    highest, clock, hits, accesses = -1, 0.0, 0, 0
    for request in generate(1, blocks=3000):
        assert request.timestamp >= clock
        clock = request.timestamp
        assert len(request.hash_ids) == -(-request.input_length // BLOCK_TOKENS)
        assert len(set(request.hash_ids)) == len(request.hash_ids)
        previous = -1
        for each in request.hash_ids:
            accesses += 1
            assert each <= highest + 1
            if each > highest:
                highest = each
            else:
                hits += 1
            assert before.setdefault(each, previous) == previous
            previous = each
    assert 0.4 < hits / accesses < 0.95, "a chat asks again for what was said"


# -- contents


@pytest.mark.parametrize("size", [1, 7, 8, 9, 64, 1000, 65536])
def test_contents_show_any_wrong_byte(size):
    contents = Contents(size)
    right = contents.make(12).copy()
    assert right.shape == (size,)
    assert contents.check(12, right)
    if size >= 8:
        assert not contents.check(13, right)
        assert not contents.check(12, np.roll(right, 8)) or size == 8
    for place in {0, size // 2, size - 1}:
        wrong = right.copy()
        wrong[place] ^= 1
        assert not contents.check(12, wrong)
    assert not contents.check(12, right[:-1])
    assert not contents.check(12, right.tobytes())
    assert not contents.check(12, right.view(np.int8))
    assert Contents(size).check(12, right), "the same in every process"


def test_contents_of_distant_ids_differ():
    contents = Contents(64)
    blocks = {contents.make(each).tobytes() for each in (0, 1, -1, 2**32, 2**63 - 1, -(2**63))}
    assert len(blocks) == 6


# -- counting


def test_latencies_are_within_two_percent():
    latencies = Latencies()
    for ns in range(1, 100_001):
        latencies.add(ns)
    figures = latencies.as_dict()
    assert figures["count"] == 100_000
    assert figures["mean"] == pytest.approx(50_000.5e-9)
    assert figures["p50"] == pytest.approx(50_000e-9, rel=0.02)
    assert figures["p99"] == pytest.approx(99_000e-9, rel=0.02)
    assert figures["max"] == pytest.approx(100_000e-9)
    assert Latencies().as_dict() == {"count": 0, "mean": 0.0, "p50": 0.0, "p99": 0.0, "max": 0.0}


def test_progress_is_silent_in_a_pipe_and_cleans_up_on_a_terminal():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    pipe, terminal = io.StringIO(), Terminal()
    for stream in (pipe, terminal):
        progress = Progress("work", stream)
        progress.update(0.5, "half")
        progress.update(0.6, "too soon")
        progress.done()
    assert pipe.getvalue() == ""
    assert "work:  50% half" in terminal.getvalue()
    assert "too soon" not in terminal.getvalue()
    assert terminal.getvalue().endswith("\r")


def test_progress_goes_with_what_interrupts_it_and_fits_the_terminal(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("COLUMNS", "30")
    terminal = Terminal()
    with pytest.raises(KeyboardInterrupt), Progress("work", terminal) as progress:
        progress.update(0.5, "half of it " * 10)
        raise KeyboardInterrupt
    shown, blank, end = terminal.getvalue().split("\r")[1:]
    assert shown.startswith("work:  50% half")
    assert end == ""
    assert blank.isspace()
    assert len(shown) + len("^C") <= len(blank) < 30


def model(prompts, capacity, policy):
    """The reference policies, as the rules say: classify, touch hits, then insert what missed."""
    resident, hits, runs = OrderedDict(), 0, []
    for ids in prompts:
        present = [each in resident for each in ids]
        hits += sum(present)
        runs.append(present.index(False) if False in present else len(ids))
        if policy == "lru":
            for each, there in zip(ids, present, strict=True):
                if there:
                    resident.move_to_end(each)
        for each, there in zip(ids, present, strict=True):
            if not there:
                if len(resident) == capacity:
                    resident.popitem(last=False)
                resident[each] = None
    return hits, runs


async def replay(directory, requests, *, blocks, block_bytes=256, **options):
    memory = blocks * await occupied_bytes(f"{directory}-probe", block_bytes)
    async with asynckv.open(directory, memory=memory, **options) as cache:
        counts = Replay(cache, block_bytes)
        await counts.run(requests)
        return counts, cache.stats()


@pytest.mark.parametrize("policy", ["lru", "fifo"])
async def test_worked_example(tmp_path, policy):
    requests = requests_of(*WORKED, lengths=WORKED_LENGTHS)
    counts, stats = await replay(str(tmp_path / "s"), requests, blocks=4, disk=0, policy=policy)
    hits, runs = WORKED_RUNS[policy]
    assert (counts.block_hits, counts.disk_hits, counts.wrong_blocks) == (hits, 0, 0)
    assert counts.runs_sha256 == hashlib.sha256("".join(f"{run}\n" for run in runs).encode()).hexdigest()
    assert counts.prefix_hits == sum(map(int, runs))
    assert counts.accesses == counts.block_hits + counts.misses == 16
    assert stats.evictions == counts.misses - 4
    assert stats.memory_blocks == 4


@pytest.mark.parametrize("policy", ["lru", "fifo"])
@pytest.mark.parametrize("block_bytes", [60, 256, 32768])
async def test_memory_only_counts_equal_the_reference(tmp_path, policy, block_bytes):
    requests = list(generate(11, blocks=600))
    capacity = 90
    hits, runs = model([request.hash_ids for request in requests], capacity, policy)
    counts, stats = await replay(
        str(tmp_path / "s"), requests, blocks=capacity, block_bytes=block_bytes, disk=0, policy=policy
    )
    assert counts.block_hits == hits
    assert counts.runs_sha256 == hashlib.sha256("".join(f"{run}\n" for run in runs).encode()).hexdigest()
    assert counts.wrong_blocks == counts.lost_hits == counts.rejected_puts == 0
    assert stats.memory_blocks == capacity


async def test_two_tiers_find_everything_again(tmp_path):
    requests = list(generate(11, blocks=600))
    asked = sum(len(request.hash_ids) for request in requests)
    counts, stats = await replay(str(tmp_path / "s"), requests, blocks=90, block_bytes=4096, disk="64MiB")
    assert counts.misses == 600, "each block once"
    assert counts.memory_hits + counts.disk_hits == asked - 600
    assert counts.disk_hits > 0
    assert counts.wrong_blocks == 0
    assert stats.evictions > 0


class Liar:
    """A cache that returns one byte that was never put."""

    def __init__(self):
        self.blocks = {}

    def tier(self, key):
        return "memory" if key in self.blocks else None

    async def put(self, key, block):
        self.blocks[key] = block.copy()
        return True

    async def get(self, key):
        block = self.blocks[key].copy()
        block[-1] ^= key == 7
        return block


async def test_a_single_wrong_byte_is_seen():
    counts = Replay(Liar(), 1000)
    await counts.run(requests_of([6, 7], [6, 7], [6, 7]))
    assert (counts.block_hits, counts.wrong_blocks) == (4, 2)


# -- the command


def run_json(capsys, *arguments) -> tuple[int, dict]:
    status = main([*map(str, arguments), "--json"])
    out = capsys.readouterr()
    assert out.err == "", "quiet in a pipe"
    return status, json.loads(out.out)


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_command(tmp_path, capsys, loop):
    path = write_trace(tmp_path / "trace.gz", generate(2, blocks=400), compress=True)
    status, results = run_json(
        capsys, "replay", path, "--memory", "512KiB", "--disk", "32MiB", "--block-bytes", "8KiB", "--loop", loop
    )
    assert status == 0
    assert set(results) >= {
        "requests", "accesses", "memory_hits", "disk_hits", "misses", "block_hits", "prefix_hits", "wrong_blocks",
        "disk_bytes_written", "seconds", "engine", "direct", "policy",
    }  # fmt: skip
    assert results["wrong_blocks"] == 0
    assert results["misses"] == 400
    assert results["disk_hits"] > 0
    assert results["disk_bytes_written"] >= 400 * 8192
    assert results["policy"] == "lru"
    assert results["loop"] == loop


def test_command_limit_directory_and_table(tmp_path, capsys):
    path = write_trace(tmp_path / "trace", generate(2, blocks=400))
    store = tmp_path / "store"
    arguments = ["replay", str(path), "--memory", "512KiB", "--disk", "32MiB", "--block-bytes", "8192", "--limit", "9"]
    assert main([*arguments, "--dir", str(store)]) == 0
    out = capsys.readouterr().out
    assert "requests" in out
    assert "right to the last byte" in out
    assert any(store.iterdir()), "the directory that was named is kept"
    status, results = run_json(capsys, *arguments, "--dir", store)
    assert status == 0
    assert results["requests"] == 9
    assert results["misses"] == 0, "the second run starts warm"


def test_command_fails_on_wrong_bytes(tmp_path, capsys, monkeypatch):
    path = write_trace(tmp_path / "trace", requests_of([1], [1]))
    monkeypatch.setattr(Contents, "check", lambda self, block_id, block: False)
    status, results = run_json(capsys, "replay", path, "--memory", "1MiB", "--disk", "0")
    assert status == 1
    assert results["wrong_blocks"] == 1
    assert main(["replay", str(path), "--memory", "1MiB", "--disk", "0"]) == 1
    assert "FAILED" in capsys.readouterr().out


# -- the published traces


TRACES = os.environ.get("ASYNCKV_TRACES", "")
needs_traces = [
    pytest.mark.traces,
    pytest.mark.skipif(not TRACES, reason="ASYNCKV_TRACES IS NOT SET: THE PUBLISHED TRACES ARE NOT REPLAYED"),
]


def expected_rows():
    if not TRACES:
        return [pytest.param(None, marks=needs_traces, id="no traces")]
    rows = json.loads(Path(TRACES, "expected.json").read_text())["one_tier"]
    chosen = [
        row
        for row in rows
        if row["policy"] in ("lru", "fifo")
        and (row["trace"] != "agentic" or (row["policy"], row["memory_pct"]) == ("lru", 2))  # 1.5 million blocks each
    ]
    names = [f"{row['trace']}-{row['policy']}-{row['memory_pct']}" for row in chosen]
    return [pytest.param(row, marks=needs_traces, id=name) for row, name in zip(chosen, names, strict=True)]


@pytest.mark.parametrize("row", expected_rows())
def test_published_counts(row, capsys):
    status, results = run_json(
        capsys, "replay", Path(TRACES, f"{row['trace']}_trace.jsonl.gz"), "--memory-blocks", row["memory_blocks"],
        "--disk", "0", "--block-bytes", "256", "--policy", row["policy"],
    )  # fmt: skip
    assert status == 0
    assert results["block_hits"] == row["block_hits"]
    assert results["prefix_hits"] == row["run_hits"]
    assert results["prefix_tokens"] == row["run_tokens"]
    assert results["evictions"] == row["evictions"]
    assert results["runs_sha256"] == row["runs_sha256"]
    assert results["wrong_blocks"] == 0
