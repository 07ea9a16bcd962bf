"""What SECURITY.md promises, where no other test holds it; that page names the test of each promise."""

from __future__ import annotations

import ast
import asyncio
import ctypes
import errno
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from levels import count, tally
from storekit import ring_refusal

import asynckv
from asynckv.backends import create_backend
from asynckv.testing import FaultyBackend, Script, corrupt, error
from asynckv.tiers import inspect_directory, verify_directory
from asynckv.tiers.repair import repair_directory

PACKAGE = Path(asynckv.__file__).parent
ROOT = PACKAGE.parent
SMALL: dict[str, Any] = {"memory": "1MiB", "disk": "4MiB", "segment": "256KiB", "room_timeout": 0.1}


# -- no code from data -----------------------------------------------------------------------------------------------

MODULES = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "yaml", "torch", "jsonpickle"}
CALLS = {"eval", "exec", "compile", "__import__"}
LOADERS = {("np", "load"), ("numpy", "load"), ("torch", "load"), ("np", "fromfile"), ("runpy", "run_path")}


def code_from_data(source: str) -> list[str]:
    """Names in a Python source that turn data into code or objects."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.partition(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in MODULES:
            found.append(node.module or "")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CALLS:
            found.append(node.func.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found += [f"{a}.{b}" for a, b in LOADERS if (node.value.id, node.attr) == (a, b)]
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            found.append("allow_pickle")
    return found


def code_from_data_in_cython(source: str) -> list[str]:
    """The same for what is no Python: by its words, comments and texts left out."""
    bare = re.sub(r'"""(?:.|\n)*?"""|"[^"\n]*"|#[^\n]*', "", source)
    names = "|".join(sorted(MODULES | {"allow_pickle"}))
    return re.findall(rf"\b(?:{names})\b|(?<![.\w])(?:{'|'.join(sorted(CALLS))})\s*\(|\b(?:np|numpy)\.load\b", bare)


def test_no_source_turns_data_into_code():
    for path in PACKAGE.rglob("*"):
        if path.suffix == ".py":
            assert not code_from_data(path.read_text(encoding="utf-8")), path
        elif path.suffix in (".pyx", ".pxi", ".pxd"):
            assert not code_from_data_in_cython(path.read_text(encoding="utf-8")), path


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "import yaml.loader",
        "from marshal import loads",
        "eval(text)",
        "exec(text)",
        "np.load(name)",
        "f = numpy.load",
        "f(name, allow_pickle=False)",
        "torch.load(name)",
    ],
)
def test_the_check_of_the_sources_sees(line):
    assert code_from_data(line)
    if "yaml" not in line:
        assert code_from_data_in_cython(line)
    assert not code_from_data_in_cython(f"# {line}\nre.compile(x)")


def worker(what: str, root: Path, most: int) -> None:
    command = [sys.executable, str(Path(__file__).with_name("security_worker.py")), what, str(root), str(most)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=3000, env=environment)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr[-3000:]


@pytest.mark.timeout(3100)
def test_planted_programs_are_never_run(memory_path):
    worker("planted", memory_path, count("planted programs"))
    tally("planted programs", count("planted programs"))


@pytest.mark.timeout(3100)
def test_lengths_that_lie_take_no_memory(memory_path):
    worker("lying", memory_path, count("lying lengths"))
    tally("lying lengths", count("lying lengths"))


def test_importing_and_using_opens_no_socket(tmp_path):
    code = (
        "import sys\n"
        "seen = []\n"
        "sys.addaudithook(lambda event, a: seen.append(event) if event.startswith('socket.') else None)\n"
        "import asyncio, socket, asynckv, asynckv.cli\n"
        "assert 'socket.connect' not in seen and 'socket.bind' not in seen and 'socket.getaddrinfo' not in seen\n"
        "async def main():\n"
        "    async with asynckv.open('store', memory='1MiB', disk='4MiB') as cache:\n"
        "        await cache.put(1, b'x')\n"
        "        await cache.flush()\n"
        "asyncio.run(main())\n"
        "assert not {'socket.connect', 'socket.bind', 'socket.getaddrinfo'} & set(seen), seen\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=tmp_path, env=environment)


# -- files -----------------------------------------------------------------------------------------------------------


FILES = ["superblock", "index.snap", "spare", "lock", "seg", "index.snap.tmp", "superblock.tmp"]


@pytest.mark.parametrize("name", FILES)
async def test_no_command_follows_a_planted_symlink(tmp_path, name):
    store, victim = tmp_path / "store", tmp_path / "victim"
    async with asynckv.open(store, **SMALL) as cache:
        for key in range(40):
            await cache.put(key, bytes([key]) * 9000)
    segment = min(path.name for path in store.glob("*.seg"))
    name = segment if name == "seg" else name
    victim.write_bytes(b"do not touch" * 1000)
    victim.chmod(0o644)
    (store / name).unlink(missing_ok=True)
    (store / name).symlink_to(victim)
    for look in (inspect_directory, verify_directory, repair_directory):
        try:
            await asyncio.to_thread(look, store)
        except (asynckv.AsyncKVError, OSError):
            assert name == "lock"
    if name != "lock":
        async with asynckv.open(store, **SMALL) as cache:
            for key in range(40):
                assert bytes(await cache.get(key) or bytes([key]) * 9000) == bytes([key]) * 9000
            await cache.put("new", b"x")
    assert (victim.read_bytes(), victim.stat().st_mode & 0o777) == (b"do not touch" * 1000, 0o644)


async def test_keys_are_no_part_of_any_path(tmp_path):
    keys = ["../../outside", "/etc/passwd", "a/b", "..", "nul\0", "x" * 1024, b"../up", "superblock"]
    async with asynckv.open(tmp_path / "store", **SMALL) as cache:
        for key in keys:
            assert await cache.put(key, b"payload")
        await cache.flush()
        assert [bytes(each) for each in await cache.get_many(keys)] == [b"payload"] * len(keys)
        assert await cache.delete_many(keys) == len(keys)
    names = [path.name for path in tmp_path.rglob("*")]
    assert all(re.fullmatch(r"store|superblock|lock|spare|index\.snap|\d{16}\.seg", name) for name in names), names


async def test_the_pool_is_left_out_of_core_dumps(tmp_path):
    async with asynckv.open(tmp_path / "store", **SMALL) as cache:
        await cache.put(1, np.zeros(1000, np.uint8))
        address = (await cache.get(1)).__array_interface__["data"][0]
        flags = ""
        inside = False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            place = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
            if place:
                inside = int(place[1], 16) <= address < int(place[2], 16)
            elif inside and line.startswith("VmFlags:"):
                flags = line
        assert " dd" in flags, flags


# -- memory that was used before -------------------------------------------------------------------------------------

POISON = b"somebody else's secret.."
RING = pytest.param(
    "io_uring",
    marks=pytest.mark.skipif(bool(ring_refusal()), reason=f"NO RING: its padding is not looked at: {ring_refusal()}"),
)
ODD_SIZES = (1, 63, 65, 100, 4095, 4097, 8193, 32767, 32769, 40_001, 65_537, 100_003)


@pytest.mark.parametrize("engine", ["threads", "aiofiles", RING])
@pytest.mark.parametrize("direct", ["on", "off"])
async def test_no_byte_of_earlier_blocks_reaches_the_disk(tmp_path, engine, direct):
    options = {**SMALL, "disk": "8MiB", "segment": "512KiB", "engine": engine, "direct": direct}
    try:
        cache = await asynckv.open(tmp_path / "store", **options)
    except asynckv.DiskError:
        if direct == "off":
            raise
        pytest.skip("NO DIRECT I/O HERE, so its padding is not looked at")
    async with cache:
        rooms, places = [], []
        for _ in range(8):  # nearly the whole pool is theirs once; nothing of it is ever put
            taken = cache.reserve("never", (120_000,), np.uint8)
            array = await taken.__aenter__()
            array[:] = np.frombuffer(POISON * 5000, np.uint8)
            places.append(array.__array_interface__["data"][0])
            rooms.append(taken)
            del array
        for taken in rooms:
            await taken.__aexit__(RuntimeError, RuntimeError(), None)
        assert all(ctypes.string_at(place, 9999).count(POISON) > 400 for place in places), "it is still there"
        for size in ODD_SIZES:
            assert await cache.put(size, bytes(size))
            k = np.zeros(size, np.uint8)
            assert await cache.put(-size, asynckv.CacheBlock(layer_id=1, key=k, value=np.zeros(3, np.float64)))
        await cache.flush()
        data = b"".join(path.read_bytes() for path in (tmp_path / "store").glob("*.seg"))
        assert len(data) > sum(ODD_SIZES)
        assert POISON[:8] not in data
        assert POISON[5:13] not in data
        for size in ODD_SIZES:
            assert bytes(await cache.get(size)) == bytes(size), "and readers see exactly what was stored"


# -- keys, tokens and salts are told to nobody -----------------------------------------------------------------------

CANARY = "canary-7719283746501928"
NUMBER = 7719283746501928
KEYS = [CANARY, CANARY.encode(), NUMBER]


def told(text: str) -> bool:
    return "canary" in text or str(NUMBER) in text or hex(NUMBER)[2:] in text


def chain(raised: BaseException | None) -> Iterator[BaseException]:
    """An exception and everything behind it that a traceback shows."""
    while raised is not None:
        yield raised
        raised = raised.__cause__ or (None if raised.__suppress_context__ else raised.__context__)


class Listener:
    """Runs calls that fail, and keeps what they say."""

    def __init__(self) -> None:
        self.raised = 0

    async def hear(self, call: Any) -> None:
        try:
            result = call()
            if hasattr(result, "__await__"):
                await result
        except (TypeError, ValueError, asynckv.AsyncKVError) as raised:
            self.raised += 1
            for each in chain(raised):
                assert not told(f"{each} {each!r} {each.args}"), repr(each)


@pytest.mark.parametrize("key", KEYS, ids=["str", "bytes", "int"])
async def test_no_key_in_any_message_or_log_line(tmp_path, caplog, key):
    caplog.set_level(logging.DEBUG)
    listener = Listener()
    script = Script()

    def factory(engine: str, **settings: Any) -> FaultyBackend:
        return FaultyBackend(create_backend(engine, **settings), script, clock=settings["clock"])

    async def reserve(cache: asynckv.Cache, shape: Any) -> None:
        async with cache.reserve(key, shape, np.uint8):
            raise ValueError("the caller's own")

    store = tmp_path / "store"
    async with asynckv.open(store, **SMALL, io_timeout=1.0, _backend_factory=factory) as cache:
        held = []
        for number in range(15):  # most of the pool is pinned: no room
            await cache.put(number, bytes(60_000))
            held.append(await cache.get(number))
        bad: Any = object()
        for call in (
            lambda: cache.put(key, bad),
            lambda: cache.put(key, np.array([bad])),
            lambda: cache.put(key, bytes(2 << 20)),
            lambda: cache.put(key, bytes(500_000)),
            lambda: reserve(cache, (2 << 20,)),
            lambda: reserve(cache, (500_000,)),
            lambda: reserve(cache, (-1,)),
            lambda: cache.reserve_block(key, 1 << 40, (1,), (1,), np.uint8),
            lambda: cache.put_many([(key, bytes(10)), (key, bad)]),
            lambda: cache.put_many([key]),
            lambda: cache.get_many(key),
            lambda: cache.get_many([key, (key,)]),
            lambda: cache.get((key, key)),
            lambda: cache.get([key]),
            lambda: cache.get(CANARY * 100),
            lambda: cache.get(CANARY + "\ud800"),
            lambda: cache.get(NUMBER << 64),
            lambda: cache.get(float(NUMBER)),
            lambda: asynckv.prefix_keys([NUMBER, -NUMBER], 1),
            lambda: asynckv.prefix_keys([NUMBER, NUMBER << 64], 1),
            lambda: asynckv.prefix_keys([CANARY], 1),
            lambda: asynckv.prefix_keys(CANARY, 1),
            lambda: asynckv.prefix_keys([1], 1, namespace=asynckv.Namespace(salt=CANARY, block_tokens=2)),
            lambda: asynckv.Namespace(salt=[CANARY]),
        ):
            await listener.hear(call)
        held.clear()
        assert await cache.put(key, bytes(40_000))
        for call in (lambda: cache.get_into(key, bytearray(1)), lambda: cache.get_into(key, bytes(40_000))):
            await listener.hear(call)
        # A disk that fails in every way.
        for operation in ("write", "sync"):
            script.add(operation, error(errno.EIO))
            await cache.put(key, bytes(30_000))
            await listener.hear(cache.flush)
            await listener.hear(lambda: cache.delete(key))
            script.clear()
        await listener.hear(cache.clear)
        await cache.put(key, bytes([7]) * 50_000)
        await listener.hear(cache.flush)
        for fault in (error(errno.EIO), corrupt()):
            for number in range(30):
                await cache.put(number, bytes(60_000))
            script.add("read", fault)
            await listener.hear(lambda: cache.get(key))
            await listener.hear(lambda: cache.get_many([key, 1, 2, 3]))
            script.clear()
        await cache.put(key, bytes([7]) * 50_000)
    for call in (lambda: cache.get(key), lambda: cache.put(key, b""), lambda: cache.tier(key)):
        await listener.hear(call)
    # A damaged store, by each way of opening, and the offline looks.
    for path in store.glob("*.seg"):
        path.write_bytes(path.read_bytes().replace(bytes([7]) * 64, bytes([8]) * 64))
    (store / "index.snap").unlink(missing_ok=True)
    await listener.hear(lambda: asynckv.open(store, **SMALL, recover="strict"))
    async with asynckv.open(store, **SMALL) as cache:
        await cache.get(key)
    for look in (inspect_directory, verify_directory, repair_directory):
        report = await asyncio.to_thread(look, store)
        assert not told(repr(report.all_damage if hasattr(report, "all_damage") else report.after.all_damage))
    assert listener.raised >= 26
    assert not [record.getMessage() for record in caplog.records if told(record.getMessage())]
    assert not told(caplog.text)
    assert any(record.name == "asynckv" for record in caplog.records), "a path that logs was taken"
