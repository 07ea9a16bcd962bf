"""asynckv: an asyncio store for the KV-cache blocks of LLM inference, hot in one memory pool, cold on disk."""

from asynckv._version import __version__
from asynckv.blocking import BlockingCache
from asynckv.blocks import CacheBlock, Namespace, prefix_keys
from asynckv.cache import Cache, open
from asynckv.errors import (
    AsyncKVError,
    BlockTooLargeError,
    ClosedError,
    CorruptStoreError,
    DiskError,
    NoRoomError,
    StoreLockedError,
    UnsafeDirectoryError,
)
from asynckv.stats import Stats

__all__ = [
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
]
