"""`asynckv verify`, with and without `--repair`, and `asynckv inspect`: what they say and what they leave."""

import asyncio
import json
import os
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from logkit import Disk, fill, killed

import asynckv
from asynckv import BlockingCache
from asynckv._record import KIND_CLAIM, read_chunk
from asynckv.cli import main
from asynckv.commands.output import plural
from asynckv.tiers import inspect_directory, verify_directory
from asynckv.tiers.layout import CLAIM_AT, PAGE, SegmentHeader, segment_seed
from asynckv.tiers.repair import repair_directory
from asynckv.tiers.report import describe

OPTIONS = {"memory": "1MiB", "disk": "16MiB", "segment": "256KiB"}
SECRET = "a-users-secret"


def value(number: int, version: int = 0) -> bytes:
    return bytes([number + 1, version + 1]) * 2500


@pytest.fixture
def store(tmp_path):
    """Key 0 and the secret were overwritten, key 1 deleted; all of it in one segment."""
    path = tmp_path / "store"
    with BlockingCache(path, **OPTIONS) as cache:
        for number in range(6):
            cache.put(number, value(number))
        cache.put(SECRET, value(100))
        cache.flush()
        cache.put(0, value(0, 1))
        cache.put(SECRET, value(100, 1))
        cache.delete(1)
    return path


def files(path) -> dict[str, tuple[bytes, int]]:
    return {each.name: (each.read_bytes(), each.stat().st_mtime_ns) for each in path.iterdir() if each.name != "lock"}


def damage(path, what: bytes) -> None:
    """Flip a bit of some block."""
    for segment in path.glob("*.seg"):
        data = bytearray(segment.read_bytes())
        place = data.find(what)
        if place >= 0:
            data[place + 1234] ^= 4
            segment.write_bytes(data)
            return
    raise AssertionError("no such block")


def run_json(capsys, *arguments):
    status = main([*map(str, arguments), "--json"])
    out = capsys.readouterr()
    assert out.err == ""
    return status, json.loads(out.out), out.out


def content(path):
    with BlockingCache(path, **OPTIONS) as cache:
        cache.get("a miss, which waits for the scan")
        return {key: bytes(cache.get(key) or b"") for key in [*range(6), SECRET]}


WHOLE = {**{n: value(n) for n in range(2, 6)}, 0: value(0, 1), 1: b"", SECRET: value(100, 1)}


def test_an_older_record_is_not_live_when_the_newest_is_damaged(store):
    assert verify_directory(store).live_blocks == 6
    damage(store, value(0, 1))
    report = verify_directory(store)
    assert (report.live_blocks, report.corrupt_blocks) == (5, 1)
    assert [(lost.plain, lost.stored) for lost in report.lost] == [(0, 5000)]
    (store / "index.snap").unlink()  # so that the records alone tell
    report = verify_directory(store)
    assert (report.live_blocks, [lost.plain for lost in report.lost]) == (5, [0])


def test_a_damaged_superseded_block_is_damage_and_nobodys_loss(store):
    damage(store, value(0))
    report = verify_directory(store)
    assert not report.ok
    assert (report.live_blocks, report.lost) == (6, [])


@pytest.mark.parametrize("snapshot", [True, False])
def test_a_repair_drops_the_damaged_block_and_nothing_else(store, snapshot):
    damage(store, value(0, 1))
    if not snapshot:
        (store / "index.snap").unlink()
    repair = repair_directory(store)
    assert [lost.plain for lost in repair.dropped] == [0]
    assert repair.after.ok
    assert repair.after.live_blocks == 5
    assert verify_directory(store).ok
    assert not (store / "index.snap").exists()
    assert {path.stat().st_mode & 0o777 for path in store.iterdir()} == {0o600}
    for _ in range(2):  # by its records, then by the snapshot of that opening
        assert content(store) == {**WHOLE, 0: b""}, "neither the older value nor the deleted key"
    assert repair_directory(store).rewritten == []


def test_nothing_changes_when_nothing_is_damaged(store):
    before = files(store)
    assert main(["verify", "--repair", str(store)]) == 0
    assert files(store) == before


def test_the_namespaces_of_a_directory_are_mended_together(store):
    other = asynckv.Namespace(model="another", salt="s")
    with BlockingCache(store, namespace=other, **OPTIONS) as cache:
        cache.put_many((number, value(number, 7)) for number in range(6))
    damage(store, value(2, 7))
    damage(store, value(3))
    repair = repair_directory(store)
    assert sorted((lost.namespace == other.digest(), lost.plain) for lost in repair.dropped) == [(False, 3), (True, 2)]
    assert content(store) == {**WHOLE, 3: b""}
    with BlockingCache(store, namespace=other, **OPTIONS) as cache:
        assert [bytes(cache.get(n) or b"") for n in range(6)] == [b"" if n == 2 else value(n, 7) for n in range(6)]


@pytest.mark.parametrize("size", [0, 161])
@pytest.mark.parametrize("other_first", [False, True])
def test_a_destroyed_segment_of_one_namespace_costs_no_other_anything(tmp_path, size, other_first):
    """Its neighbours say whose it was, until they are written anew."""
    store, options = tmp_path / "store", OPTIONS | {"segment": "64KiB"}
    other = asynckv.Namespace(salt="other")

    def fill(namespace, keys):
        with BlockingCache(store, namespace=namespace, **options) as cache:
            cache.put_many((key, bytes([key]) * 20_000) for key in keys)

    def found(namespace):
        with BlockingCache(store, namespace=namespace, **options) as cache:
            return [key for key in range(30) if cache.get(key) is not None]

    if not other_first:
        fill(None, range(10))
    fill(other, range(10))
    fill(None, range(10, 30))
    mine = [
        each for each in inspect_directory(store).segments if each.namespace == asynckv.Namespace().digest()[:8].hex()
    ]
    os.truncate(store / mine[-5].name, size)
    repair = repair_directory(store)
    assert repair.after.ok
    assert found(other) == list(range(10))
    assert found(None)


def test_records_of_an_unknown_namespace_are_left_alone(tmp_path):
    path = tmp_path / "store"
    options = OPTIONS | {"namespace": asynckv.Namespace(model="nobody told")}
    with BlockingCache(path, **options) as cache:
        cache.put("key", value(1))
    (path / "index.snap").unlink()
    segment = next(path.glob("*.seg"))
    data = segment.read_bytes()
    segment.write_bytes(bytes(4096) + data[4096:-4096] + bytes(4096))
    with pytest.raises(asynckv.CorruptStoreError, match="open the store with that namespace"):
        repair_directory(path)
    assert main(["verify", "--repair", str(path)]) == 2
    with BlockingCache(path, **options) as cache:
        cache.get("a miss, which waits for the scan")


def test_verify_says_whose_bytes_are_gone(store, capsys):
    damage(store, value(100, 1))
    status, report, text = run_json(capsys, "verify", store)
    assert status == 1
    (lost,) = report["lost"]
    assert (lost["bytes"], lost["segment"], len(lost["digest"])) == (5000, 1, 16)
    assert SECRET not in text
    assert run_json(capsys, "verify", store, "--keys")[1]["lost"] == [lost | {"key": SECRET}]
    assert main(["verify", str(store)]) == 1
    out = capsys.readouterr().out
    assert SECRET not in out
    assert f"LOST: key with digest {lost['digest']}, 5,000 bytes in segment 1" in out
    assert main(["verify", str(store), "--keys"]) == 1
    assert f"LOST: key {SECRET!r}," in capsys.readouterr().out


def test_repair_says_what_it_did(store, capsys, caplog):
    damage(store, value(100, 1))
    damage(store, value(2))
    assert main(["verify", str(store), "--repair"]) == 0
    out = capsys.readouterr()
    assert out.err == ""
    assert SECRET not in out.out + caplog.text
    assert "repaired: 1 segment written anew, 0 files removed or replaced, 2 blocks dropped, 4 blocks kept" in out.out
    assert out.out.count("DROPPED: ") == 2
    assert out.out.endswith("Every record and every block is whole now.\n")
    damage(store, value(3))
    status, report, _ = run_json(capsys, "verify", store, "--repair", "--keys")
    assert (status, report["ok"], report["repair"]["ok"], report["repair"]["live_blocks"]) == (0, False, True, 3)
    assert [each["key"] for each in report["repair"]["dropped"]] == [3]
    assert run_json(capsys, "verify", store)[0] == 0


def test_files_that_nobody_can_use_go(store, capsys):
    (store / "0000000000000009.seg").write_bytes(b"noise" * 1000)  # less than any segment
    (store / "superblock").write_bytes((store / "superblock").read_bytes()[:2048] + bytes(2048))
    assert main(["verify", str(store)]) == 1
    assert main(["verify", str(store), "--repair"]) == 0
    assert not (store / "0000000000000009.seg").exists()
    assert main(["verify", str(store)]) == 0
    assert content(store) == WHOLE
    capsys.readouterr()


def test_a_file_that_may_have_been_the_newest_segment(store):
    """It may have replaced or removed anything: an opening gives nothing older, and neither report pretends to."""
    (store / "0000000000000009.seg").write_bytes(b"noise" * 10_000)
    assert verify_directory(store).live_blocks == 0
    assert repair_directory(store).after.ok
    assert content(store) == dict.fromkeys(WHOLE, b"")


def test_a_number_that_no_segment_can_have_costs_nothing(store):
    (store / "9000000000000000.seg").write_bytes(bytes(50_000))
    (store / "spare.tmp").write_bytes(bytes(9000))
    report = verify_directory(store)
    assert (report.live_blocks, report.spare_bytes, len(report.all_damage)) == (6, 9000, 1)
    assert repair_directory(store).removed == ["9000000000000000.seg"]
    assert content(store) == WHOLE


@pytest.mark.parametrize("named", [True, False])
def test_a_destroyed_file_that_is_anothers_costs_this_namespace_nothing(store, named):
    """Their snapshot names it; without that nobody can tell."""
    with BlockingCache(store, namespace=asynckv.Namespace(model="another"), **OPTIONS) as cache:
        cache.put("key", value(1))
    newest = max(store.glob("*.seg"))
    newest.write_bytes(bytes(newest.stat().st_size))
    if not named:
        (store / "index.snap").unlink()
    assert verify_directory(store).live_blocks == (6 if named else 0)
    assert repair_directory(store).after.ok
    assert content(store) == (WHOLE if named else dict.fromkeys(WHOLE, b""))


def test_blocks_in_segments_that_are_dead_are_not_live(tmp_path):
    """The snapshot lists them, and a newer segment says that they are dead: an opening removes them."""
    path = tmp_path / "store"
    with BlockingCache(path, **OPTIONS) as cache:
        for number in range(200):
            cache.put(number, value(number % 6))
    names = sorted(path.glob("*.seg"))
    assert len(names) > 3
    page = SegmentHeader.decode(names[-1].read_bytes()[:PAGE])
    with names[-1].open("r+b") as file:
        file.write(replace(page, oldest_live=page.number).encode())
    for look in (inspect_directory, verify_directory):
        report = look(path)
        assert report.ok
        assert {segment.state for segment in report.segments} == {"dead", "sealed"}
        assert 0 < report.live_blocks == report.segments[-1].live_blocks == report.segments[-1].records
    with BlockingCache(path, **OPTIONS) as cache:
        assert len(cache) == report.live_blocks
        assert not names[0].exists()


@pytest.mark.parametrize("sealed", [True, False])
def test_an_empty_segment_has_a_claim(tmp_path, sealed):
    """Without it nobody knows that it was empty: an opening leaves out what is older, unless a seal tells."""
    path = tmp_path / "store"

    async def live():
        async with Disk(path) as disk:
            await fill(disk, range(5))
        if not sealed:
            return await killed(path, tmp_path / "killed", lambda disk: disk.tier.prepare(1))
        async with Disk(path) as disk:
            await disk.tier.prepare(1)
        return path

    place = asyncio.run(live())
    (place / "index.snap").unlink(missing_ok=True)
    assert verify_directory(place).live_blocks == 5
    newest = max(place.glob("*.seg"))
    data = newest.read_bytes()
    newest.write_bytes(data[:PAGE] + bytes(PAGE) + data[2 * PAGE :])
    report = verify_directory(place)
    assert (report.ok, report.live_blocks) == (False, 5 if sealed else 0)
    repair = repair_directory(place)
    assert repair.after.ok
    assert repair.after.live_blocks == report.live_blocks
    data = newest.read_bytes()
    header = SegmentHeader.decode(data)
    assert header.claimed
    seed = segment_seed(header.store_id, header.namespace, header.number)
    assert read_chunk(data[CLAIM_AT:], 0, KIND_CLAIM, seed, CLAIM_AT) is not None


def test_no_repair_of_a_store_in_use(store, capsys):
    with BlockingCache(store, **OPTIONS):
        assert main(["verify", "--repair", str(store)]) == 2
        assert str(os.getpid()) in capsys.readouterr().err


# -- inspect ---------------------------------------------------------------------------------------------------------


def test_inspect(store, capsys):
    with BlockingCache(store, namespace=asynckv.Namespace(model="m"), **OPTIONS) as cache:
        k = np.zeros((4, 8), np.float16)
        for number in range(7):
            cache.put(number, asynckv.CacheBlock(layer_id=number * 100, key=k, value=k))
        cache.put(b"odd", np.zeros((3, 0, 5), ml_dtypes.bfloat16))
    status, report, text = run_json(capsys, "inspect", store)
    assert status == 0
    assert SECRET not in text
    assert "keys" not in report
    first = report["segments"][0]
    assert (first["number"], first["state"], first["live_blocks"]) == (1, "sealed", 6)
    assert (first["live_bytes"], first["dead_bytes"], first["tombstones"]) == (6 * 5000, 3 * 5000, 1)
    assert 0 <= first["age_seconds"] < 600
    assert sorted((each["blocks"], each["bytes"]) for each in report["namespaces"]) == [(6, 30_000), (8, 7 * 128)]
    assert [(s["kind"], s["dtype"], s["shape"], s["blocks"]) for s in report["shapes"]] == [
        ("CacheBlock", "<f2", "4x8", 7),
        ("bytes", "", "", 6),
        ("array", "bfloat16", "3x0x5", 1),
    ]
    keys = run_json(capsys, "inspect", store, "--keys")[1]["keys"]
    assert {each["key"] for each in keys} == {*range(7), SECRET, "b'odd'"}


def test_inspect_beside_a_running_store(store, capsys):
    before = files(store)
    with BlockingCache(store, **OPTIONS) as cache:
        assert main(["inspect", str(store)]) == 0
        assert files(store) == before
        cache.put("more", value(3))
        cache.flush()
        assert main(["inspect", str(store)]) == 0
        out = capsys.readouterr().out
        assert SECRET not in out
        assert " open " in out
        assert main(["inspect", "--keys", str(store)]) == 0
        assert SECRET in capsys.readouterr().out


def test_small_words():
    assert [plural(number, "block") for number in (0, 1, 2000)] == ["0 blocks", "1 block", "2,000 blocks"]
    assert describe(b"") == describe(b"\x07") == describe(b"\x01\x09f") == ("unknown", "", "")
