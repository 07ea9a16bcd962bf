"""Tiers below the memory pool."""

from asynckv.tiers.base import Tier
from asynckv.tiers.disk import DiskTier
from asynckv.tiers.inspect import inspect_directory, verify_directory

__all__ = ["DiskTier", "Tier", "inspect_directory", "verify_directory"]
