"""Reads all counters and gauges of an open cache into one frozen `Stats`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asynckv.stats import Stats

if TYPE_CHECKING:
    from asynckv._core import Table
    from asynckv.config import Config
    from asynckv.scheduler import Scheduler
    from asynckv.tiers.base import Tier


def read_gauges(table: Table, tier: Tier | None, scheduler: Scheduler, config: Config) -> Stats:
    """A snapshot of everything that is counted, taken in one step.

    When idle, `memory_used + memory_free + memory_quarantined == memory_capacity`.
    """
    counters = scheduler.counters
    used, quarantined = table.used, table.quarantined  # draining releases first, so that all figures agree
    seconds = sorted(counters.load_seconds)

    def quantile(share: float) -> float:
        return seconds[min(len(seconds) - 1, int(share * len(seconds)))] if seconds else 0.0

    state = "none" if tier is None else "ok" if scheduler.breaker.ok else "off"
    return Stats(
        memory_hits=table.memory_hits + counters.memory_hits,
        disk_hits=counters.disk_hits,
        misses=counters.misses,
        no_room=counters.no_room,
        puts=counters.puts,
        rejected_puts=counters.rejected_puts,
        evictions=table.evictions,
        spilled_blocks=counters.spilled_blocks,
        spilled_bytes=counters.spilled_bytes,
        loaded_blocks=counters.loaded_blocks,
        loaded_bytes=counters.loaded_bytes,
        dropped_blocks=table.dropped_blocks + counters.dropped_blocks,
        corrupt_blocks=counters.corrupt_blocks + (tier.corrupt_blocks if tier is not None else 0),
        io_errors=counters.io_errors + (tier.io_errors if tier is not None else 0),
        io_timeouts=counters.io_timeouts + (tier.io_timeouts if tier is not None else 0),
        memory_blocks=table.memory_blocks,
        memory_used=used,
        memory_free=table.capacity - used - quarantined,
        memory_quarantined=quarantined,
        memory_capacity=table.capacity,
        pinned_blocks=table.pinned_blocks,
        pinned_bytes=table.pinned_bytes,
        disk_blocks=table.disk_blocks,
        disk_used=tier.disk_used if tier is not None else 0,
        disk_live=tier.disk_live if tier is not None else 0,
        disk_capacity=config.disk,
        disk_bytes_written=tier.bytes_written if tier is not None else 0,
        disk_state=state,
        recovering=scheduler.recovering,
        reads_in_flight=tier.reads_in_flight if tier is not None else 0,
        writes_in_flight=tier.writes_in_flight if tier is not None else 0,
        disk_load_seconds_mean=sum(seconds) / len(seconds) if seconds else 0.0,
        disk_load_seconds_p50=quantile(0.50),
        disk_load_seconds_p99=quantile(0.99),
        disk_load_seconds_max=seconds[-1] if seconds else 0.0,
        engine=tier.engine if tier is not None else "none",
        direct=tier.direct if tier is not None else False,
    )
