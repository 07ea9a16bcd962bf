"""The last write of a store: what fails while it closes is written once more, and what is lost is counted."""

from __future__ import annotations

import asyncio
import errno

import pytest
from storekit import payload

import asynckv
from asynckv.backends import create_backend
from asynckv.testing import FaultyBackend, Script, error
from asynckv.testing.tools import turns

OPTIONS = {"memory": "1MiB", "disk": "16MiB"}


async def _close_while_a_batch_is_under_way(directory, *, sticky):
    """Close with nothing dirty but a batch on its way, whose write then fails; the stats."""
    script = Script()
    cache = await asynckv.open(
        directory,
        _backend_factory=lambda *args, **given: FaultyBackend(create_backend(*args, **given), script),
        **OPTIONS,
    )
    assert await cache.put(0, payload(0))
    await cache.flush()
    assert await cache.put(1, payload(1))
    script.add("write", error(errno.ENOMEM), sticky=sticky)
    flush = asyncio.ensure_future(cache.flush())
    while not cache._scheduler.writer.in_flight:
        await turns(1)
    await cache.close()
    with pytest.raises(asynckv.DiskError):
        await flush
    return cache.stats()


async def test_a_batch_that_fails_while_the_store_closes_is_written_again(tmp_path):
    stats = await _close_while_a_batch_is_under_way(tmp_path / "kv", sticky=False)
    assert stats.dropped_blocks == 0
    async with asynckv.open(tmp_path / "kv", **OPTIONS) as cache:
        assert bytes(await cache.get(1)) == payload(1)


async def test_what_closing_loses_is_counted_and_the_rest_is_there(tmp_path):
    stats = await _close_while_a_batch_is_under_way(tmp_path / "kv", sticky=True)
    assert stats.dropped_blocks == 1
    async with asynckv.open(tmp_path / "kv", **OPTIONS) as cache:
        assert bytes(await cache.get(0)) == payload(0)
        assert await cache.get(1) is None


@pytest.mark.parametrize("deleted", [False, True])
async def test_what_a_block_too_large_for_a_segment_replaced_stays_replaced(tmp_path, deleted):
    """The store closes without it; the older one is still in the log, which is read when the snapshot is gone."""
    options = {"memory": "96KiB", "disk": "384KiB", "segment": "64KiB"}
    for block in (b"old", bytes(40_000)):
        async with asynckv.open(tmp_path / "kv", **options) as cache:
            assert await cache.put("key", block)
    async with asynckv.open(tmp_path / "kv", **options) as cache:
        assert await cache.get("key") is None
        if deleted:
            await cache.delete("key")
    (tmp_path / "kv" / "index.snap").unlink()
    async with asynckv.open(tmp_path / "kv", **options) as cache:
        assert await cache.get("key") is None
