"""Whole stores as inputs: a directory of changed files is inspected, verified, opened, used, opened again."""

from __future__ import annotations

import asyncio
import logging
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import frozenkit
from mutator import PAGE, mutate, page_starts, repair
from storekit import SHM
from targets import REPAIRED_SHARE, Target, image

import asynckv
from asynckv.tiers import inspect_directory, verify_directory
from asynckv.tiers.layout import SegmentHeader, parse_segment_name, segment_name, segment_seed, snapshot_seed

OPTIONS: dict[str, Any] = {**frozenkit.OPTIONS, "direct": False, "recover": "quiet"}
SECONDS_MAX = 20.0


class StoreTarget(Target):
    """Directories, as a mapping of file name to bytes."""

    name = "store"

    def __init__(self) -> None:
        self.images = [image("killed"), image("closed")]
        self.seeds: dict[str, int] = {}
        for files in self.images:
            for name, data in files.items():
                header = SegmentHeader.decode(data)
                if header is not None:
                    self.seeds[name] = segment_seed(header.store_id, header.namespace, header.number)
                    if header.namespace == asynckv.Namespace().digest():
                        self.seeds["index.snap"] = snapshot_seed(header.store_id, header.namespace)
        self.pieces = [[data for name, data in files.items() if name.endswith(".seg")] for files in self.images]
        self.put = self.everything()
        self.folder = tempfile.TemporaryDirectory(dir=SHM)  # what a sync costs is not looked at here
        self.path = Path(self.folder.name, "store")
        logging.getLogger("asynckv").setLevel(logging.CRITICAL)
        self.loop = asyncio.new_event_loop()

    def everything(self) -> dict[Any, list[Any]]:
        """All values that were ever put under each key."""
        found = {
            key: [frozenkit.plain(frozenkit.block(number, version)) for version in (1, 2)]
            for number, key in enumerate(frozenkit.keys())
        }
        found.update((f"filler {n}", [frozenkit.data(n, 3, frozenkit.FILLER_BYTES)]) for n in range(frozenkit.FILLERS))
        return found

    def close(self) -> None:
        logging.getLogger("asynckv").setLevel(logging.NOTSET)
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()
        self.folder.cleanup()

    def make(self, rng: random.Random) -> tuple[Any, bool]:
        which = rng.randrange(len(self.images))
        files = dict(self.images[which])
        rightful = rng.random() >= REPAIRED_SHARE
        for _ in range(rng.choice((1, 1, 2, 4))):
            name = rng.choice([*files, *sorted(files)[-4:]])
            if rng.random() < 0.15:
                self.shuffle(rng, files, name)
                continue
            others = [files[name]] * 3 + (self.pieces[which] if name.endswith(".seg") else [])
            data = mutate(rng, [files[name]] if rng.random() < 0.8 else others, page_starts)
            if not rightful:
                repair(data, rng, self.seeds.get(name, 0))
            files[name] = bytes(data)
        return files, rightful

    def shuffle(self, rng: random.Random, files: dict[str, bytes], name: str) -> None:
        """Files that are gone, lie under another name, or are none of ours."""
        data = files.pop(name)
        step = rng.randrange(5)
        if step == 0:
            return
        if step == 1:
            number = rng.choice((0, 1, 21, 22, 2**31, 10**15 - 1, 10**15, 10**16 - 1))
            files[segment_name(number)] = data
        elif step == 2:
            other = rng.choice(sorted(files))
            files[name], files[other] = files[other], data
        elif step == 3:
            files[name] = data
            files[rng.choice(("spare", "index.snap", "index.snap.tmp", "superblock.tmp", "stranger"))] = data
        else:
            files[name] = rng.randbytes(rng.choice((0, 1, PAGE, 3 * PAGE)))

    def check(self, data: Any, rightful: bool) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir(mode=0o700)
        for name, raw in data.items():
            (self.path / name).touch(mode=0o600)
            (self.path / name).write_bytes(raw)
        for look in (inspect_directory, verify_directory):
            try:
                report = look(self.path)
            except asynckv.CorruptStoreError:
                assert not any(name == "superblock" or parse_segment_name(name) is not None for name in data)
            else:
                assert report.live_blocks <= report.records
        self.loop.run_until_complete(asyncio.wait_for(self.use(rightful), SECONDS_MAX))

    async def use(self, rightful: bool) -> None:
        """Read all there is, write, and read that again after a reopening."""
        fresh = b"written by the fuzzer"
        async with asynckv.open(self.path, **OPTIONS) as cache:
            for key in [*frozenkit.keys(), *(f"filler {n}" for n in range(frozenkit.FILLERS))]:
                self.right(key, await cache.get(key), rightful)
            assert await cache.get("never") is None or not rightful
            for key in list(cache.keys()):
                self.right(key, await cache.get(key), rightful)
            assert await cache.put("fresh", fresh)
            await cache.flush()
            stats = cache.stats()
            assert stats.disk_state == "ok"
            assert stats.disk_used <= stats.disk_capacity
        async with asynckv.open(self.path, **OPTIONS) as cache:
            found = await cache.get("fresh")
            assert found is not None
            assert bytes(found) == fresh
            del found

    def right(self, key: Any, found: Any, rightful: bool) -> None:
        if found is not None and rightful:
            assert frozenkit.plain(found) in self.put.get(key, ()), "a value that was never put under its key"
