"""The frozen snapshot that ``Cache.stats()`` returns."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

__all__ = ["Stats"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """One moment of a cache, in seconds and bytes. Hits and misses count once for each key asked.

    ``no_room`` counts keys that were there and could not be loaded, ``rejected_puts`` puts that returned False,
    ``dropped_blocks`` blocks that left the last tier they were in for want of room, ``memory_quarantined`` bytes that a
    disk operation past its deadline may still write to, ``disk_live`` bytes of ``disk_used`` that are of use.
    When the cache is idle ``memory_used + memory_free + memory_quarantined == memory_capacity``. Pins of deleted and
    overwritten blocks count in ``pinned_blocks`` and ``pinned_bytes`` too. ``disk_load_seconds_*`` describe the last
    4,096 reloads, from submission to verified bytes. ``corrupt_blocks`` counts a segment that is missing or unreadable
    as one: nobody knows how many blocks were in it.
    """

    memory_hits: int = 0
    disk_hits: int = 0
    misses: int = 0
    no_room: int = 0
    puts: int = 0
    rejected_puts: int = 0
    evictions: int = 0
    spilled_blocks: int = 0
    spilled_bytes: int = 0
    loaded_blocks: int = 0
    loaded_bytes: int = 0
    dropped_blocks: int = 0
    corrupt_blocks: int = 0
    io_errors: int = 0
    io_timeouts: int = 0
    memory_blocks: int = 0
    memory_used: int = 0
    memory_free: int = 0
    memory_quarantined: int = 0
    memory_capacity: int = 0
    pinned_blocks: int = 0
    pinned_bytes: int = 0
    disk_blocks: int = 0
    disk_used: int = 0
    disk_live: int = 0
    disk_capacity: int = 0
    disk_bytes_written: int = 0
    disk_state: str = "none"
    recovering: bool = False
    reads_in_flight: int = 0
    writes_in_flight: int = 0
    disk_load_seconds_mean: float = 0.0
    disk_load_seconds_p50: float = 0.0
    disk_load_seconds_p99: float = 0.0
    disk_load_seconds_max: float = 0.0
    engine: str = "none"
    direct: bool = False

    @property
    def hit_ratio(self) -> float:
        """Hits in any tier, divided by hits and misses together; 0.0 when nothing was asked."""
        hits = self.memory_hits + self.disk_hits
        asked = hits + self.misses
        return hits / asked if asked else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the fields and ``hit_ratio`` by name, ready for JSON."""
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        values["hit_ratio"] = self.hit_ratio
        return values

    def __str__(self) -> str:
        values = self.as_dict()
        width = max(map(len, values))
        lines = []
        for title, names in _TABLE.items():
            lines.append(title)
            lines += [f"  {name:<{width}}  {_text(name, values[name])}" for name in names]
        return "\n".join(lines)


_TABLE = {
    "requests": (
        "memory_hits", "disk_hits", "misses", "hit_ratio", "no_room", "puts", "rejected_puts",
    ),
    "moves": (
        "evictions", "spilled_blocks", "spilled_bytes", "loaded_blocks", "loaded_bytes", "dropped_blocks",
    ),
    "memory": (
        "memory_blocks", "memory_used", "memory_free", "memory_quarantined", "memory_capacity",
        "pinned_blocks", "pinned_bytes",
    ),
    "disk": (
        "disk_state", "engine", "direct", "recovering", "disk_blocks", "disk_used", "disk_live", "disk_capacity",
        "disk_bytes_written", "reads_in_flight", "writes_in_flight", "corrupt_blocks", "io_errors", "io_timeouts",
        "disk_load_seconds_mean", "disk_load_seconds_p50", "disk_load_seconds_p99", "disk_load_seconds_max",
    ),
}  # fmt: skip

_BYTES = {"memory_used", "memory_free", "memory_quarantined", "memory_capacity"}
_BYTES |= {"disk_used", "disk_live", "disk_capacity"}


def _text(name: str, value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.2%}" if name == "hit_ratio" else f"{value * 1e6:,.1f} us"
    if isinstance(value, int):
        return f"{value:,} bytes" if name in _BYTES or name.endswith("_bytes") or "_bytes_" in name else f"{value:,}"
    return str(value)
