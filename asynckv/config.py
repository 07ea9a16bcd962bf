"""Options of :func:`asynckv.open`: every limit, default and unit, checked on construction.

A :class:`Config` that exists is valid: sizes are bytes, names are resolved, and what contradicts is refused with the
name of the parameter in the text.
"""

from __future__ import annotations

import math
import numbers
import operator
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

from asynckv.blocks import Namespace, namespace_digest
from asynckv.clock import Clock, MonotonicClock

__all__ = [
    "DEFAULT_POLICY",
    "ENGINES",
    "POLICIES",
    "RECOVER_MODES",
    "SIZE_FORMS",
    "Config",
    "default_segment",
    "memory_limit",
    "parse_size",
    "resolve_policy",
]

PAGE = 4096
MEMORY_MIN = 64  # one extent of the smallest kind
MEMORY_END = 1 << 46  # offsets into the pool are made for less; a process has twice as many addresses
MEMORY_SHARE_MAX = 0.8  # of what the cgroup or the machine has; more needs force=True
SEGMENTS_MIN = 4  # below that, reclaiming one segment would throw away most of the store
SEGMENT_MIN = 64 << 10
SEGMENT_MAX = 2 << 30  # offsets inside a segment are 32 bits wide, with room to spare for headers
SEGMENT_DEFAULT_MAX = 128 << 20
SEGMENTS_MAX = 1024  # files of one directory
SEGMENTS_PER_DISK = 16  # default: small enough that one reclaim costs 1/16 of the store, large enough to write in bulk

DEFAULT_POLICY = "lru"
POLICIES = ("auto", "lru", "fifo")
ENGINES = ("auto", "io_uring", "threads", "aiofiles")
RECOVER_MODES = ("none", "quiet", "strict")

SIZE_FORMS = (
    "a whole number of bytes as an int, or a string with a unit: "
    "B, KiB, MiB, GiB, TiB (powers of 1024) or kB, KB, MB, GB, TB (powers of 1000), such as '512KiB' or '8GB'"
)
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(B|[KMGT]iB|[kKMGT]B)\s*", re.ASCII)
_UNITS = {"B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SIZE_END = 1 << 63


def parse_size(value: object, name: str = "size") -> int:
    """Turn a size into bytes.

    Parameters
    ----------
    value
        An int (anything with ``__index__`` except bool), or a string with a unit.
    name
        The parameter to name in the error.

    Returns
    -------
    int
        Bytes, zero or more.

    Raises
    ------
    ValueError
        Neither form; the text names the parameter and the accepted forms.
    """
    size: int | None = None
    if isinstance(value, str):
        match = _SIZE.fullmatch(value)
        if match is not None:
            exact = Decimal(match[1]) * _UNITS[match[2]]
            size = int(exact) if exact == exact.to_integral_value() else None
    elif not isinstance(value, bool):
        try:
            size = operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            size = None
    if size is None or not 0 <= size < _SIZE_END:
        raise ValueError(f"{name}={value!r} is not a size; accepted is {SIZE_FORMS}")
    return size


def format_size(size: int) -> str:
    """Write a size with the largest binary unit that keeps it readable (``"1.5 GiB"``)."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def resolve_policy(policy: str) -> str:
    """Return the name of the eviction policy that ``policy`` stands for: ``"auto"`` means lru."""
    return DEFAULT_POLICY if policy == "auto" else policy


def default_segment(disk: int) -> int:
    """Return the segment size used for a store of ``disk`` bytes: a 16th of it, 64 KiB to 128 MiB, whole pages.

    More for a large disk, so that half as many files as there may be are enough for it.
    """
    size = min(max(disk // SEGMENTS_PER_DISK, SEGMENT_MIN), SEGMENT_DEFAULT_MAX)
    size = min(max(size, disk // (SEGMENTS_MAX // 2)), SEGMENT_MAX)
    return size // PAGE * PAGE


def _read_limit(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return int(text) if text.isdigit() else None  # version 2 writes "max" where there is no limit


def memory_limit(root: str | os.PathLike[str] = "/") -> int:
    """Return how many bytes of memory this process may count on: the least of the machine's and its cgroups' limits.

    A limit set on any group above ours binds too, so the tree is walked up to its mount. Inside a container the path in
    ``/proc/self/cgroup`` may name groups that are not visible; then the visible part of it counts.
    Source: cgroups(7), Documentation/admin-guide/cgroup-v2.rst (memory.max), cgroup-v1/memory.rst (limit_in_bytes).

    Parameters
    ----------
    root
        Where ``proc`` and ``sys`` are found; for tests.
    """
    base = Path(root)
    found = []
    machine = _machine_memory(base)
    if machine:
        found.append(machine)
    try:
        lines = (base / "proc/self/cgroup").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            mount, leaf = base / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            mount, leaf = base / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", ".", "..")]
        for depth in range(len(parts), -1, -1):
            limit = _read_limit(mount.joinpath(*parts[:depth], leaf))
            if limit is not None:
                found.append(limit)
    return min(found, default=_SIZE_END - 1)


def _machine_memory(base: Path) -> int | None:
    try:
        text = (base / "proc/meminfo").read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        text = ""
    match = re.search(r"^MemTotal:\s+(\d+) kB", text, re.MULTILINE)
    if match:
        return int(match[1]) * 1024
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None


def parse_seconds(value: object, name: str, *, zero: bool, endless: bool = False) -> float:
    """A duration as a float.

    Parameters
    ----------
    name
        What an error calls it.
    zero, endless
        Whether it may be 0, and infinite.

    Raises
    ------
    TypeError, ValueError
        It is no number, or none of the allowed ones.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} is a number of seconds, not {type(value).__name__}")
    try:
        seconds = float(value)
    except OverflowError:
        raise ValueError(f"{name} is beyond every number of seconds") from None
    if math.isnan(seconds) or seconds < 0 or (seconds == 0 and not zero) or (math.isinf(seconds) and not endless):
        wanted = ("" if endless else "finite and ") + ("zero or more" if zero else "above zero")
        raise ValueError(f"{name}={value!r}: seconds have to be {wanted}")
    return seconds


def _choice(value: object, name: str, choices: tuple[str, ...]) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} is a string, one of {', '.join(choices)}; not {type(value).__name__}")
    if value not in choices:
        raise ValueError(f"{name}={value!r} is unknown; accepted is one of {', '.join(choices)}")
    return value


def _directory(value: object) -> str:
    if not isinstance(value, (str, bytes, os.PathLike)):
        raise TypeError(f"directory is a path, not {type(value).__name__}")
    path = os.fsdecode(value)
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        raise ValueError(f"directory={path!r} is no name of a file") from None
    if not path or "\0" in path:
        raise ValueError("directory is empty or holds a NUL character")
    return path


@dataclass(frozen=True, kw_only=True)
class Config:
    """The checked options of one cache.

    The fields are what :func:`asynckv.open` was called with, in bytes and seconds, after ``policy="auto"`` was resolved
    and ``ASYNCKV_ENGINE`` was looked at.
    ``_clock``, ``_backend_factory`` and ``_random`` are the seams that tests put their own clock, disk and random bytes
    into; they are no part of the public interface.

    Raises
    ------
    TypeError, ValueError
        An option is wrong; the text names it.
    """

    directory: str
    memory: int = 256 << 20
    disk: int = 4 << 30
    namespace: Namespace | None = None
    policy: str = "auto"
    engine: str = "auto"
    direct: bool | Literal["auto"] = "auto"
    io_timeout: float = 5.0
    room_timeout: float = 5.0
    persist_after: float | None = None
    recover: str = "quiet"
    segment: int = 0
    force: bool = False
    _clock: Clock | None = None
    _backend_factory: Callable[..., Any] | None = None
    _random: Callable[[int], bytes] | None = None

    def __post_init__(self) -> None:
        put = object.__setattr__
        if not isinstance(self.force, bool):
            raise TypeError(f"force is True or False, not {type(self.force).__name__}")
        put(self, "directory", _directory(self.directory))
        put(self, "memory", self._checked_memory())
        put(self, "disk", parse_size(self.disk, "disk"))
        put(self, "segment", self._checked_segment())
        if self.namespace is not None and not isinstance(self.namespace, Namespace):
            raise TypeError(f"namespace is a Namespace or None, not {type(self.namespace).__name__}")
        put(self, "policy", resolve_policy(_choice(self.policy, "policy", POLICIES)))
        put(self, "engine", self._checked_engine())
        put(self, "direct", self._checked_direct())
        put(self, "io_timeout", parse_seconds(self.io_timeout, "io_timeout", zero=False))
        put(self, "room_timeout", parse_seconds(self.room_timeout, "room_timeout", zero=True))
        if self.persist_after is not None:
            put(self, "persist_after", parse_seconds(self.persist_after, "persist_after", zero=False))
        _choice(self.recover, "recover", RECOVER_MODES)

    def _checked_memory(self) -> int:
        memory = parse_size(self.memory, "memory")
        if memory < MEMORY_MIN:
            raise ValueError(f"memory={self.memory!r}: the pool has to be at least {MEMORY_MIN} bytes")
        if memory >= MEMORY_END:
            raise ValueError(f"memory={self.memory!r}: no process can map a pool of {format_size(MEMORY_END)} or more")
        if not self.force:
            limit = memory_limit()
            if memory > limit * MEMORY_SHARE_MAX:
                raise ValueError(
                    f"memory={self.memory!r} is above {MEMORY_SHARE_MAX:.0%} of the {format_size(limit)} that the "
                    f"cgroup or the machine has; choose less, or pass force=True"
                )
        return memory

    def _checked_segment(self) -> int:
        if self.segment is None or (isinstance(self.segment, int) and self.segment == 0):
            segment = default_segment(self.disk)
        else:
            segment = -(-parse_size(self.segment, "segment") // PAGE) * PAGE
            if not SEGMENT_MIN <= segment <= SEGMENT_MAX:
                low, high = format_size(SEGMENT_MIN), format_size(SEGMENT_MAX)
                raise ValueError(f"segment={self.segment!r}: a segment is between {low} and {high}")
        if 0 < self.disk < SEGMENTS_MIN * segment:
            raise ValueError(
                f"disk={self.disk} bytes is below {SEGMENTS_MIN} segments of {segment} bytes; "
                f"choose disk=0 for memory only, more disk, or a smaller segment (least: {SEGMENT_MIN} bytes)"
            )
        return segment

    def _checked_engine(self) -> str:
        engine = _choice(self.engine, "engine", ENGINES)
        override = os.environ.get("ASYNCKV_ENGINE", "")
        return _choice(override, "ASYNCKV_ENGINE", ENGINES) if override else engine

    def _checked_direct(self) -> bool | Literal["auto"]:
        names: Mapping[object, bool | Literal["auto"]] = {"auto": "auto", "on": True, "off": False}
        if isinstance(self.direct, bool):
            return self.direct
        if isinstance(self.direct, str) and self.direct in names:
            return names[self.direct]
        raise ValueError(f"direct={self.direct!r} is unknown; accepted is one of True, False, 'on', 'off', 'auto'")

    @classmethod
    def from_options(cls, directory: object, options: Mapping[str, Any]) -> Config:
        """Build a Config from the arguments of :func:`asynckv.open`.

        Raises
        ------
        TypeError
            An option is unknown.
        """
        known = {field.name for field in fields(cls)} - {"directory"}
        for name in options:
            if name not in known:
                public = sorted(each for each in known if not each.startswith("_"))
                raise TypeError(f"asynckv.open() has no option {name!r}; the options are {', '.join(public)}")
        return cls(directory=directory, **options)  # type: ignore[arg-type]

    @property
    def namespace_digest(self) -> bytes:
        """The 32 bytes that name this namespace on disk."""
        return namespace_digest(self.namespace)

    @property
    def clock(self) -> Clock:
        """The clock in use: the monotonic one, unless a test brought its own."""
        return MonotonicClock() if self._clock is None else self._clock

    @property
    def backend_factory(self) -> Callable[..., Any] | None:
        """The backend factory of a test, or None for the chosen engine's."""
        return self._backend_factory

    @property
    def random(self) -> Callable[[int], bytes]:
        """Where store ids and hash seeds come from: ``n -> n random bytes``."""
        return os.urandom if self._random is None else self._random
