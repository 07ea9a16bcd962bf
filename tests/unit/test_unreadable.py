"""A recovery from a disk that does not give back every page."""

from __future__ import annotations

import asyncio
import errno

import pytest
from logkit import KIB, Disk, fill, killed, segments_of, value_of

from asynckv.backends import create_backend
from asynckv.errors import CorruptStoreError, DiskError
from asynckv.testing import RecordingBackend
from asynckv.tiers.layout import CLAIM_AT, LOG_START, PAGE
from asynckv.tiers.recovery import TIMEOUTS_MAX


def bad(pages, error):
    """A factory of back ends in which reads that touch one of these pages of any segment fail."""

    class Bad(RecordingBackend):
        def read(self, file, offset, buffer, **options):
            if any(offset < page + PAGE and page < offset + len(buffer) for page in pages()):
                failed = asyncio.get_running_loop().create_future()
                failed.set_exception(error())
                if options.get("released") is not None:
                    options["released"]()
                return failed
            return super().read(file, offset, buffer, **options)

    return lambda *args, **options: Bad(create_backend(*args, **options))


def input_output_error():
    return OSError(errno.EIO, "the disk does not give it back")


@pytest.fixture
async def crashed(tmp_path):
    async def work(disk):
        await fill(disk, range(10), size=5000)
        await fill(disk, range(5), 1, size=5000)

    return await killed(tmp_path / "kv", tmp_path / "crashed", work)


def expected():
    return {key: value_of(key, int(key < 5), 5000) for key in range(10)}


@pytest.mark.parametrize("page", [CLAIM_AT, LOG_START])
async def test_one_bad_page_of_headers_costs_nothing(crashed, page):
    (segment,) = segments_of(crashed)
    end = segment.stat().st_size
    async with Disk(crashed, _backend_factory=bad(lambda: [page], input_output_error)) as disk:
        assert disk.recovered
        assert await disk.get_all(range(10)) == expected()
        assert disk.tier.damage == (page == LOG_START)
    assert segments_of(crashed)[0].stat().st_size < end, "it was sealed all the same"


async def test_strict_does_not_put_up_with_it(crashed):
    with pytest.raises(CorruptStoreError):
        async with Disk(crashed, recover="strict", _backend_factory=bad(lambda: [LOG_START], input_output_error)):
            pass


async def test_a_disk_that_hangs_again_and_again_is_given_up_with_nothing_lost(crashed):
    met = 0

    def late():
        nonlocal met
        met += 1
        return TimeoutError(errno.ETIMEDOUT, "no answer in time")

    with pytest.raises(DiskError) as error:
        async with Disk(crashed, _backend_factory=bad(lambda: range(LOG_START, 64 * KIB, PAGE), late)):
            pass
    assert error.value.errno == errno.ETIMEDOUT
    assert met == TIMEOUTS_MAX + 1
    async with Disk(crashed) as disk:
        assert await disk.get_all(range(10)) == expected()


async def test_a_shortage_of_our_own_is_no_damage(crashed):
    with pytest.raises(DiskError) as error:
        async with Disk(crashed, _backend_factory=bad(lambda: [LOG_START], lambda: OSError(errno.EMFILE, "too many"))):
            pass
    assert error.value.errno == errno.EMFILE
    async with Disk(crashed) as disk:
        assert await disk.get_all(range(10)) == expected()
        assert disk.tier.damage == 0
