"""Damage: any bytes on disk give misses and a counter; opening ends; only `strict` raises."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import random
import shutil
from pathlib import Path

import pytest
from levels import scale, seed
from storekit import (
    BLOCK,
    KIB,
    blocks,
    check_idle,
    crash_image,
    files_of,
    fill,
    find_payload,
    flip,
    payload,
    settle,
    until,
)

import asynckv
from asynckv.tiers.layout import PAGE, SegmentHeader, parse_segment_name, segment_name

SMALL = {"memory": "1MiB", "disk": "4MiB", "room_timeout": 0.3}
COUNT = 12
SIZE = 6000


async def golden(directory: Path, *, clean: bool) -> Path:
    """A small store with overwritten and deleted keys, closed or as a crash leaves it."""
    async with asynckv.open(directory, **SMALL) as cache:
        await cache.put_many(blocks(COUNT + 4, SIZE, version=1).items())
        await cache.flush()
        await cache.delete_many(range(COUNT, COUNT + 4))
        await cache.put_many(blocks(COUNT, SIZE, version=2).items())
        await cache.flush()
        if not clean:
            return crash_image(directory, directory.with_name("crashed"))
    return directory


async def check_no_wrong_byte(directory: Path, *, tail_lost: bool = False, **options: object) -> int:
    """Open a damaged store, read everything, use it; how many of the live keys were found.

    With the end of the log gone and no index of it, an older state of the whole store is what there is.
    """
    found = 0
    async with asyncio.timeout(20):
        async with asynckv.open(directory, **{**SMALL, **options}) as cache:
            for key in range(COUNT + 4):
                block = await cache.get(key)
                if block is not None and tail_lost:
                    assert bytes(block) in (payload(key, 1, SIZE), payload(key, 2, SIZE))
                elif block is not None:
                    assert key < COUNT, "a deleted key came back"
                    assert bytes(block) == payload(key, 2, SIZE), "an older value came back, or wrong bytes"
                found += block is not None
                del block
            assert await cache.put(0, payload(0, 3, SIZE))
            assert bytes(await cache.get(0)) == payload(0, 3, SIZE)
            await settle(cache)
            check_idle(cache)
    return found


@pytest.mark.parametrize("clean", [True, False])
async def test_the_golden_store_is_whole_without_damage(tmp_path, clean):
    assert await check_no_wrong_byte(await golden(tmp_path / "kv", clean=clean)) == COUNT


@pytest.mark.parametrize("clean", [True, False])
async def test_any_flipped_byte_is_a_miss_or_harmless(tmp_path, clean):
    store = await golden(tmp_path / "kv", clean=clean)
    rng = random.Random(seed("flip"))
    images = 0
    for path in files_of(store):
        data = path.read_bytes()
        used = [offset for offset in range(len(data)) if data[offset]]
        for offset in rng.sample(used, min(len(used), int(14 * scale()))):
            image = tmp_path / "image"
            shutil.copytree(store, image)
            image.chmod(0o700)
            mask = rng.choice([0xFF, 1, 128, data[offset]])
            flip(image / path.name, offset, mask)
            found = await check_no_wrong_byte(image)
            assert found >= COUNT - 2, f"one flipped byte (file {path.name}, offset {offset}) lost {COUNT - found}"
            shutil.rmtree(image)
            images += 1
    assert images > 10 * min(1, scale())


@pytest.mark.parametrize("position", [0, 1, SIZE // 2, SIZE - 1])
async def test_a_flipped_byte_of_a_value_is_a_miss_and_counted(tmp_path, position):
    # Fault kind WRONG: damage of the same length accepted.
    await fill(tmp_path / "kv", blocks(4, SIZE), **SMALL)
    path, offset = find_payload(tmp_path / "kv", payload(2, size=SIZE))
    flip(path, offset + position, 1)
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        assert await cache.get(2) is None
        stats = cache.stats()
        assert (stats.corrupt_blocks, stats.misses, stats.disk_hits) == (1, 1, 0)
        for key in (0, 1, 3):
            assert bytes(await cache.get(key)) == payload(key, size=SIZE)


@pytest.mark.parametrize("call", ["get_into", "get_many", "stream", "prefetch"])
async def test_damage_reaches_no_caller_by_any_call(tmp_path, call):
    await fill(tmp_path / "kv", blocks(3, SIZE), **SMALL)
    path, offset = find_payload(tmp_path / "kv", payload(1, size=SIZE))
    flip(path, offset + SIZE - 1)
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        if call == "get_into":
            out = bytearray(b"\xee" * SIZE)
            assert await cache.get_into(1, out) is None
            assert out == b"\xee" * SIZE, "nothing is written unless all of it is right"
        elif call == "get_many":
            first, damaged, last = await cache.get_many([0, 1, 2])
            assert (bytes(first), damaged, bytes(last)) == (payload(0, size=SIZE), None, payload(2, size=SIZE))
            del first, last
        elif call == "stream":
            assert [key async for key, _ in cache.stream([0, 1, 2])] == [0]
        else:
            cache.prefetch([1])
            await settle(cache)
            assert await cache.get(1) is None
        await settle(cache)
        assert cache.stats().corrupt_blocks == 1
        check_idle(cache)


async def test_a_damaged_block_is_asked_for_at_most_twice_then_known_absent(tmp_path):
    # Fault kind HANG: a positive look-up that stays after the load failed.
    await fill(tmp_path / "kv", blocks(4, SIZE), **SMALL)
    path, offset = find_payload(tmp_path / "kv", payload(2, size=SIZE))
    flip(path, offset)
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        tries = 0
        while 2 in cache:
            tries += 1
            assert tries <= 2
            assert await cache.get(2) is None
        assert tries >= 1
        assert cache.match_prefix([0, 1, 2, 3]) == 2
        assert await cache.put(2, payload(2, 5, SIZE)), "the next put heals it"
        assert bytes(await cache.get(2)) == payload(2, 5, SIZE)
        for key in (0, 1, 3):
            assert bytes(await cache.get(key)) == payload(key, size=SIZE)
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        assert bytes(await cache.get(2)) == payload(2, 5, SIZE)


async def test_an_older_version_never_stands_in_for_a_damaged_one(tmp_path):
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        for version in range(4):
            await cache.put(1, payload(1, version, SIZE))
            await cache.flush()
        image = crash_image(tmp_path / "kv", tmp_path / "image")
    for store in (tmp_path / "kv", image):
        path, offset = find_payload(store, payload(1, 3, SIZE))
        flip(path, offset + 100)
        for _ in range(3):  # nor after further restarts
            async with asynckv.open(store, **SMALL) as cache:
                assert await cache.get(1) is None


async def test_two_values_swapped_on_disk_are_misses(tmp_path):
    # Misdirected writes: right checksums in the wrong place.
    await fill(tmp_path / "kv", blocks(4, SIZE), **SMALL)
    first, second = (find_payload(tmp_path / "kv", payload(key, size=SIZE)) for key in (1, 2))
    for (path, offset), key in ((first, 2), (second, 1)):
        with path.open("r+b") as file:
            file.seek(offset)
            file.write(payload(key, size=SIZE))
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        assert await cache.get(1) is None
        assert await cache.get(2) is None
        assert cache.stats().corrupt_blocks == 2
        assert bytes(await cache.get(3)) == payload(3, size=SIZE)


@pytest.mark.parametrize("clean", [True, False])
async def test_files_cut_at_any_length_give_no_wrong_byte(tmp_path, clean):
    store = await golden(tmp_path / "kv", clean=clean)
    rng = random.Random(seed("cut"))
    for path in files_of(store):
        size = path.stat().st_size
        for length in {0, 1, 4095, size // 2, size - 1, *(rng.randrange(size) for _ in range(int(3 * scale())))}:
            if length >= size:
                continue
            image = tmp_path / "image"
            shutil.copytree(store, image)
            image.chmod(0o700)
            os.truncate(image / path.name, length)
            await check_no_wrong_byte(image, tail_lost=not clean)
            shutil.rmtree(image)


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("damage", ["missing", "zeros", "ones", "text", "longer"])
async def test_a_file_that_is_gone_or_full_of_rubbish_gives_no_wrong_byte(tmp_path, clean, damage):
    store = await golden(tmp_path / "kv", clean=clean)
    for path in files_of(store):
        image = tmp_path / "image"
        shutil.copytree(store, image)
        image.chmod(0o700)
        victim = image / path.name
        size = victim.stat().st_size
        if damage == "missing":
            victim.unlink()
        elif damage == "longer":
            with victim.open("ab") as file:
                file.write(random.Random(1).randbytes(10_000))
        else:
            pattern = {"zeros": b"\0", "ones": b"\xff", "text": b"import os; os.abort()\n"}[damage]
            victim.write_bytes((pattern * (size // len(pattern) + 1))[:size])
        await check_no_wrong_byte(image)
        shutil.rmtree(image)


@pytest.mark.parametrize(("damage", "clean"), [("unlink", False), ("rubbish", False), ("unlink", True)])
async def test_a_segment_that_is_gone_is_counted(tmp_path, damage, clean):
    options = {**SMALL, "segment": "256KiB"}
    async with asynckv.open(tmp_path / "alive", **options) as cache:
        for number in range(4):
            await cache.put_many(blocks(COUNT, start=COUNT * number).items())
            await cache.flush()
        await settle(cache)
        store = crash_image(tmp_path / "alive", tmp_path / "kv")
    if clean:
        store = tmp_path / "alive"
    names = sorted(path for path in store.iterdir() if path.suffix == ".seg")
    assert len(names) >= 3
    if damage == "unlink":
        names[1].unlink()
    else:
        names[1].write_bytes(random.Random(1).randbytes(names[1].stat().st_size))
    async with asynckv.open(store, **options) as cache:
        await until(lambda: not cache.stats().recovering)
        assert cache.stats().corrupt_blocks >= 1  # nobody knows how many blocks were in it


async def test_a_page_of_a_segment_that_never_was_costs_nothing(tmp_path):
    """A rename that ended late: what was to be one segment lies where an older one was to be, and neither ever was."""
    options = {**SMALL, "segment": "256KiB"}
    async with asynckv.open(tmp_path / "alive", **options) as cache:
        await cache.put_many(blocks(COUNT).items())
        await cache.flush()
        await settle(cache)
        last = max(parse_segment_name(path.name) for path in (tmp_path / "alive").glob("*.seg"))
        misnamed, lost = last + 1, last + 2
        for number in (misnamed, lost):  # so that the store passes them over
            (tmp_path / "alive" / segment_name(number)).touch()
        await cache.put_many(blocks(COUNT, start=COUNT).items())
        await cache.flush()
        store = crash_image(tmp_path / "alive", tmp_path / "kv")
    (store / segment_name(lost)).unlink()
    newer = SegmentHeader.decode((store / segment_name(lost + 1)).read_bytes()[:PAGE])
    assert newer.previous == last
    page = dataclasses.replace(newer, number=lost).encode()
    (store / segment_name(misnamed)).write_bytes(page.ljust(256 * KIB, b"\0"))
    async with asynckv.open(store, **options) as cache:
        for key in range(2 * COUNT):
            assert bytes(await cache.get(key)) == payload(key)


async def test_a_segment_of_another_store_is_not_served(tmp_path):
    await fill(tmp_path / "a", {key: payload(key, 1, SIZE) for key in range(COUNT)}, **SMALL)
    await fill(tmp_path / "b", {key: payload(key, 2, SIZE) for key in range(COUNT)}, **SMALL)
    foreign, _ = find_payload(tmp_path / "a", payload(1, 1, SIZE))
    own, _ = find_payload(tmp_path / "b", payload(1, 2, SIZE))
    shutil.copyfile(foreign, own)
    async with asynckv.open(tmp_path / "b", **SMALL) as cache:
        for key in range(COUNT):
            found = await cache.get(key)
            assert found is None or bytes(found) == payload(key, 2, SIZE)
            del found


@pytest.mark.parametrize("clean", [True, False])
async def test_strict_raises_on_damage_and_holds_no_lock_after_it(tmp_path, clean):
    store = await golden(tmp_path / "kv", clean=clean)
    for path in files_of(store):
        for offset in range(0, path.stat().st_size, 512):
            flip(path, offset, 0x5A)
    with pytest.raises(asynckv.CorruptStoreError):
        async with asynckv.open(store, **SMALL, recover="strict") as cache:
            await cache.get(5)
    await check_no_wrong_byte(store)


@pytest.mark.parametrize("clean", [True, False])
async def test_strict_opens_a_store_without_damage(tmp_path, clean):
    store = await golden(tmp_path / "kv", clean=clean)
    assert await check_no_wrong_byte(store, recover="strict") == COUNT


async def test_a_damaged_store_opens_again_and_again(tmp_path):
    # Fault kind RESTART: a snapshot that causes a crash loop.
    store = await golden(tmp_path / "kv", clean=True)
    for path in files_of(store):
        if path.stat().st_size:
            flip(path, path.stat().st_size // 2)
            flip(path, 10)
    for _ in range(4):
        await check_no_wrong_byte_quietly(store)


async def check_no_wrong_byte_quietly(store: Path) -> None:
    async with asynckv.open(store, **SMALL) as cache:
        for key in range(COUNT + 4):
            found = await cache.get(key)
            assert found is None or (key < COUNT and bytes(found) == payload(key, 2, SIZE))
            del found


@pytest.mark.parametrize("damage", ["cut", "unlink", "zero"])
async def test_files_damaged_under_an_open_store_end_every_read_in_time(tmp_path, damage):
    # Fault kind HANG: an unexpected error kills a worker and its waiters are never answered.
    await fill(tmp_path / "kv", blocks(40), **SMALL)
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        for path in files_of(tmp_path / "kv"):
            if damage == "cut":
                os.truncate(path, 0)
            elif damage == "unlink":
                path.unlink()
            else:
                size = path.stat().st_size
                os.truncate(path, 0)
                os.truncate(path, size)
        async with asyncio.timeout(15):
            found = await asyncio.gather(*(cache.get(key) for key in range(40)))
        for key, each in enumerate(found):
            assert each is None or bytes(each) == payload(key)
        del found
        if damage != "unlink":  # an unlinked file that is held open still reads
            stats = cache.stats()
            assert stats.corrupt_blocks + stats.io_errors > 0
        assert await cache.put("new", b"memory serves on")
        assert bytes(await cache.get("new")) == b"memory serves on"
        await settle(cache)
        check_idle(cache)
        async with asyncio.timeout(20):
            await cache.close()


async def test_a_directory_removed_under_an_open_store_leaves_memory_serving(tmp_path):
    # Fault kind RACE: the directory is gone in the middle.
    cache = await asynckv.open(tmp_path / "kv", **SMALL)
    await cache.put_many(blocks(4).items())
    shutil.rmtree(tmp_path / "kv")
    for key in range(4):
        assert bytes(await cache.get(key)) == payload(key)
    async with asyncio.timeout(20):
        for key in range(100, 200):
            await cache.put(key, payload(key, 0, 8 * KIB))
            found = await cache.get(key)
            assert found is None or bytes(found) == payload(key, 0, 8 * KIB)
            del found
        await cache.close()


async def test_planted_code_is_never_run(tmp_path):
    # Fault kind SECURITY: a cache file that runs code when it is read.
    marker = tmp_path / "executed"
    code = f"cos\nsystem\n(S'touch {marker}'\ntR.".encode()
    store = await golden(tmp_path / "kv", clean=True)
    for path in files_of(store):
        size = path.stat().st_size
        path.write_bytes((code + b"\0" * size)[:size])
    (store / "__init__.py").write_text(f"open({str(marker)!r}, 'w')")
    async with asynckv.open(store, **SMALL) as cache:
        for key in range(COUNT):
            assert await cache.get(key) is None
    assert not marker.exists()


async def test_blocks_of_every_size_class_are_covered_by_the_checksum(tmp_path):
    sizes = [24, 64, 100, 4096, 4097, 32 * KIB, BLOCK, 100_000]
    items = {number: payload(number, 0, size) for number, size in enumerate(sizes)}
    await fill(tmp_path / "kv", items, **SMALL)
    for number, data in items.items():
        path, offset = find_payload(tmp_path / "kv", data)
        flip(path, offset + len(data) - 1, 1 << number)
    async with asynckv.open(tmp_path / "kv", **SMALL) as cache:
        assert [await cache.get(number) for number in items] == [None] * len(sizes)
        assert cache.stats().corrupt_blocks == len(sizes)
