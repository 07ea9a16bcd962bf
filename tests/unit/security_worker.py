"""Children of test_security: an audit hook stays for the life of a process, and so does a limit of its memory."""

from __future__ import annotations

import asyncio
import contextlib
import marshal
import os
import pickle
import resource
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from xxhash import xxh3_64_intdigest

import asynckv
from asynckv._record import HEADER_BYTES, KIND_BATCH, KIND_FOOTER, KIND_SNAPSHOT, chunk_seed
from asynckv.tiers import inspect_directory, verify_directory
from asynckv.tiers.layout import SegmentHeader, SnapshotHead, segment_seed, snapshot_seed
from asynckv.tiers.repair import repair_directory

OPTIONS = {"memory": "1MiB", "disk": "4MiB", "segment": "64KiB", "engine": "threads"}
PAGE = 4096
NUMBERS = [0, 1, 2**31, 2**32 - 1, 2**32, 2**63, 2**64 - 1]
EVENTS = {"exec", "compile", "import", "pickle.find_class", "marshal.loads", "marshal.load", "code.__new__"}
EVENTS |= {"os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "shelve.open", "socket.connect", "socket.bind"}


class Bomb:
    """What runs code when it is unpickled."""

    def __reduce__(self) -> tuple:
        return os.system, ("exit 1",)


def build(path: Path, blocks: dict) -> None:
    async def main() -> None:
        async with asynckv.open(path, **OPTIONS) as cache:
            await cache.put_many(blocks)
            await cache.flush()
            await cache.delete(next(iter(blocks)))

    asyncio.run(main())


def place(path: Path, files: dict[str, bytes]) -> None:
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(mode=0o700)
    for name, content in files.items():
        (path / name).write_bytes(content)


def use(path: Path, keys: list) -> None:
    """Everything that reads a store; what it says of damage does not matter here."""

    async def read(recover: str) -> None:
        async with asynckv.open(path, recover=recover, **OPTIONS) as cache:
            cache.match_prefix(keys)
            await cache.get_many(keys)
            await cache.put("more", b"x" * 5000)

    for look in (inspect_directory, verify_directory):
        with contextlib.suppress(asynckv.AsyncKVError, OSError):
            look(path)
    copy = path.with_name("copy")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(path, copy)
    copy.chmod(0o700)
    with contextlib.suppress(asynckv.AsyncKVError, OSError):
        repair_directory(copy)
    for recover in ("strict", "quiet"):
        with contextlib.suppress(asynckv.AsyncKVError, OSError):
            asyncio.run(read(recover))


# -- planted code ----------------------------------------------------------------------------------------------------


def planted(root: Path, most: int) -> None:
    """Put programs in the place of, in front of and into every file of a store, and use it under an audit hook."""
    bombs = [pickle.dumps(Bomb(), protocol) for protocol in (0, 4)]
    bombs.append(marshal.dumps(compile("import os; os.system('exit 1')", "planted", "exec")))
    bombs.append(
        b"\x93NUMPY\x01\x00v\x00{'descr': '|O', 'fortran_order': False, 'shape': (1,), }".ljust(128) + bombs[0]
    )
    bombs.append(b"!!python/object/apply:os.system ['exit 1']\n")
    blocks = {f"key {number}".encode(): bomb for number, bomb in enumerate(bombs)}
    blocks |= {bomb[:1000]: bomb * 50 for bomb in bombs}
    golden = root / "golden"
    build(golden, blocks)
    (golden / "spare").write_bytes(bytes(64 << 10))
    (golden / "index.snap.tmp").write_bytes(bombs[0])
    images = {each.name: each.read_bytes() for each in golden.iterdir()}
    use(golden, list(blocks))  # whatever is imported late is there by now
    seen: list[str] = []
    sys.addaudithook(lambda event, _: seen.append(event) if event in EVENTS else None)
    every = [
        (name, changed)
        for bomb in bombs
        for name, data in images.items()
        for changed in (bomb, data[:100] + bomb + data[100 + len(bomb) :], bomb + data, data + bomb)
    ]
    for name, changed in every[:: max(1, len(every) // most)]:
        place(root / "store", images | {name: changed})
        use(root / "store", list(blocks))
    assert not seen, sorted(set(seen))
    with contextlib.suppress(Exception):
        pickle.loads(bombs[1])
    assert "os.system" in seen, "the hook sees what it is there for"
    print("done")


# -- lying lengths ---------------------------------------------------------------------------------------------------


def patch(data: bytes, at: int, value: int, size: int) -> bytes:
    return data[:at] + (value % 256**size).to_bytes(size, "little") + data[at + size :]


def resealed_page(data: bytes, page: int, end: int) -> bytes:
    """The same with a right checksum of a fixed page."""
    digest = xxh3_64_intdigest(data[page + 16 : end], seed=0)
    return patch(data, page + 8, digest, 8)


def resealed_chunk(data: bytes, at: int, seed: int, kind: int) -> bytes:
    body = int.from_bytes(data[at + 32 : at + 36], "little")
    digest = xxh3_64_intdigest(
        data[at + 16 : at + HEADER_BYTES + min(body, len(data))], seed=chunk_seed(seed, at, kind)
    )
    return patch(data, at + 8, digest, 8)


def lies(images: dict[str, bytes]) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Images whose lengths, counts and places lie, under right checksums."""
    name = min(each for each in images if each.endswith(".seg"))
    data = images[name]
    header = SegmentHeader.decode(data[:PAGE])
    assert header is not None
    seed = segment_seed(header.store_id, header.namespace, header.number)
    seal = len(data) - PAGE
    alone = {each: content for each, content in images.items() if each != "index.snap"}
    footer = int.from_bytes(data[seal + 128 : seal + 136], "little")
    snap = images["index.snap"]
    head = SnapshotHead.decode(snap)
    assert head is not None
    start = SnapshotHead.head_bytes(len(head.segments))
    for number in [*NUMBERS, len(data), len(data) + 1]:
        for at in range(24 + 48, 24 + 48 + 48, 8):
            yield f"header {at} {number}", images | {name: resealed_page(patch(data, at, number, 8), 0, PAGE)}
        for at in range(24 + 48, 24 + 48 + 120, 8):
            page = resealed_page(patch(data, seal + at, number, 8), seal, len(data))
            yield f"seal {at} {number}", images | {name: page}
            yield f"seal {at} {number}, no snapshot", alone | {name: page}
        for at in range(24 + 48, 24 + 48 + 48 + 16, 8):
            changed = resealed_page(patch(snap, at, number, 8), 0, start)
            yield f"snapshot {at} {number}", images | {"index.snap": changed}
        sizes = [(20, 4), (24, 4), (28, 4), (32, 4), (36, 4), *((at, 8) for at in range(40, 96, 8)), (96, 4)]
        for at, size in sizes:
            for place, kind in ((2 * PAGE, KIND_BATCH), (footer, KIND_FOOTER)):
                changed = resealed_chunk(patch(data, place + at, number, size), place, seed, kind)
                yield f"chunk {kind} {at} {number}", alone | {name: changed}
            changed = patch(snap, start + at, number, size)
            body = int.from_bytes(changed[start + 32 : start + 36], "little")
            key = chunk_seed(snapshot_seed(head.store_id, head.namespace), start, KIND_SNAPSHOT)
            digest = xxh3_64_intdigest(changed[start + 16 : start + HEADER_BYTES + min(body, len(snap))], seed=key)
            yield f"snapshot chunk {at} {number}", images | {"index.snap": patch(changed, start + 8, digest, 8)}
    # In the records: each byte of the bodies as the start of a varint of the greatest values.
    for number in (2**31, 2**32, 2**63 - 1, 2**64 - 1):
        varint = bytes((number >> shift & 0x7F) | 0x80 for shift in range(0, 63, 7)) + bytes([number >> 63 & 1])
        for at in range(HEADER_BYTES, HEADER_BYTES + 60, 3):
            changed = data[: 2 * PAGE + at] + varint + data[2 * PAGE + at + len(varint) :]
            changed = resealed_chunk(changed, 2 * PAGE, seed, KIND_BATCH)
            yield f"record {at} {number}", alone | {name: changed}
            changed = snap[: start + at] + varint + snap[start + at + len(varint) :]
            body = int.from_bytes(changed[start + 32 : start + 36], "little")
            key = chunk_seed(snapshot_seed(head.store_id, head.namespace), start, KIND_SNAPSHOT)
            digest = xxh3_64_intdigest(changed[start + 16 : start + HEADER_BYTES + body], seed=key)
            yield f"snapshot record {at} {number}", images | {"index.snap": patch(changed, start + 8, digest, 8)}
    for size in (0, 1, 2047, 2048, 4095, 4097, 1 << 20):
        yield f"superblock of {size}", images | {"superblock": (images["superblock"] * 300)[:size]}


def lying(root: Path, most: int) -> None:
    """Use stores whose lengths lie, with little memory to spare."""
    golden = root / "golden"
    blocks = {f"key {number}": bytes([number]) * 700 for number in range(8)}
    build(golden, blocks)
    images = {each.name: each.read_bytes() for each in golden.iterdir()}
    use(golden, list(blocks))
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + (768 << 20)  # threads come and go; nothing here needs 2**31 bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    every = list(lies(images))
    for what, image in every[:: max(1, len(every) // most)]:
        place(root / "store", image)
        try:
            use(root / "store", list(blocks))
        except BaseException as error:
            raise AssertionError(what) from error
    # Not ru_maxrss, which begins with that of whoever started this process.
    status = Path("/proc/self/status").read_text()
    peak = int(status.split("VmHWM:")[1].split()[0]) << 10
    assert peak < 400 << 20, peak
    with contextlib.suppress(MemoryError):
        bytearray(1 << 31)
        raise AssertionError("the limit binds")
    print("done")


if __name__ == "__main__":
    {"planted": planted, "lying": lying}[sys.argv[1]](Path(sys.argv[2]), int(sys.argv[3]))
