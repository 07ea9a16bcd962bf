"""The public names are pinned: adding or losing one is a decision."""

import inspect

import asynckv

NAMES = {
    "AsyncKVError",
    "BlockTooLargeError",
    "BlockingCache",
    "Cache",
    "CacheBlock",
    "ClosedError",
    "CorruptStoreError",
    "DiskError",
    "Namespace",
    "NoRoomError",
    "Stats",
    "StoreLockedError",
    "UnsafeDirectoryError",
    "__version__",
    "open",
    "prefix_keys",
}

CACHE = set(
    """
    clear close closed delete delete_many flush get get_into get_many get_many_into keys match_prefix prefetch put
    put_many request reserve reserve_block stats stream tier touch
    """.split()
)


def public(cls: type) -> set[str]:
    return {name for name in dir(cls) if not name.startswith("_")}


def test_all_is_exact():
    assert set(asynckv.__all__) == NAMES
    assert len(asynckv.__all__) == len(NAMES)
    assert all(hasattr(asynckv, name) for name in NAMES)


def test_cache_has_exactly_the_contracts_calls():
    assert public(asynckv.Cache) == CACHE


def test_blocking_cache_has_the_same_calls_and_two_that_return_futures():
    assert public(asynckv.BlockingCache) == CACHE | {"submit_get_many_into", "submit_put_many"}


def test_blocking_calls_take_the_same_arguments():
    for name in CACHE - {"closed"}:
        ours = inspect.signature(getattr(asynckv.BlockingCache, name)).parameters
        theirs = inspect.signature(getattr(asynckv.Cache, name)).parameters
        assert list(ours) == list(theirs), name
        assert [p.kind for p in ours.values()] == [p.kind for p in theirs.values()], name


def test_every_public_name_is_documented():
    for name in NAMES - {"__version__"}:
        assert inspect.getdoc(getattr(asynckv, name)), name
    for cls in (asynckv.Cache, asynckv.BlockingCache):
        for name in public(cls):
            assert inspect.getdoc(getattr(cls, name)), f"{cls.__name__}.{name}"


def test_errors_are_one_tree():
    for name in NAMES:
        if name.endswith("Error"):
            assert issubclass(getattr(asynckv, name), asynckv.AsyncKVError)
    assert issubclass(asynckv.BlockTooLargeError, ValueError)
    assert issubclass(asynckv.UnsafeDirectoryError, PermissionError)
    assert issubclass(asynckv.DiskError, OSError)


def test_errors_keep_what_is_known_and_never_show_the_key():
    error = asynckv.DiskError("write failed", errno=5, tier="disk", operation="write", key="secret", offset=4096)
    assert (error.errno, error.tier, error.operation, error.key, error.offset) == (5, "disk", "write", "secret", 4096)
    assert "secret" not in str(error)
    assert "secret" not in repr(error)
    assert str(error) == "write failed"
    assert asynckv.StoreLockedError("held", pid=17).pid == 17
    assert asynckv.DiskError("off").errno is None
