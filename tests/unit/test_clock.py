"""Both clocks: the one of real runs and the one that tests move."""

from __future__ import annotations

import asyncio
import math
import time

import pytest

from asynckv.clock import Clock, MonotonicClock, Stalls
from asynckv.testing import ManualClock


def test_both_are_clocks():
    assert isinstance(MonotonicClock(), Clock)
    assert isinstance(ManualClock(), Clock)


def test_the_real_clock_is_the_systems():
    assert MonotonicClock().monotonic() == pytest.approx(time.monotonic(), abs=0.5)


async def test_real_timers_fire_and_are_called_off():
    clock = MonotonicClock()
    loop = asyncio.get_running_loop()
    fired = []
    clock.call_later(loop, 0.05, lambda: fired.append("late"))
    clock.call_later(loop, 0.0005, lambda: fired.append("never")).cancel()
    clock.call_later(loop, -1.0, lambda: fired.append("at once"))
    assert fired == []
    for _ in range(1000):
        if len(fired) == 2:
            break
        await asyncio.sleep(0.001)
    assert fired == ["at once", "late"]


async def test_manual_timers_fire_in_order_at_their_time():
    clock = ManualClock(start=100.0)
    loop = asyncio.get_running_loop()
    fired = []

    def note(name):
        fired.append((name, clock.monotonic()))

    clock.call_later(loop, 2.0, lambda: note("b"))
    clock.call_later(loop, 1.0, lambda: note("a"))
    clock.call_later(loop, 2.0, lambda: note("c"))
    clock.call_later(loop, math.inf, lambda: note("never"))
    assert (clock.pending, clock.next_at) == (3, 101.0)
    assert clock.advance(0.5) == 0
    assert clock.advance(5.0) == 3
    assert fired == [("a", 101.0), ("b", 102.0), ("c", 102.0)]
    assert clock.monotonic() == 105.5
    assert (clock.pending, clock.next_at) == (0, math.inf)


async def test_manual_timers_set_by_timers_and_called_off():
    clock = ManualClock()
    loop = asyncio.get_running_loop()
    fired = []
    off = clock.call_later(loop, 1.0, lambda: fired.append("off"))
    clock.call_later(loop, 0.5, off.cancel)
    clock.call_later(loop, 1.0, lambda: clock.call_later(loop, 1.0, lambda: fired.append("second")))
    clock.advance(1.9)
    assert fired == []
    clock.advance(0.1)
    assert fired == ["second"]


async def test_manual_delay_of_zero_is_a_turn_of_the_loop():
    clock = ManualClock()
    loop = asyncio.get_running_loop()
    fired = []
    clock.call_later(loop, 0.0, lambda: fired.append("now"))
    clock.call_later(loop, -1.0, lambda: fired.append("never")).cancel()
    assert fired == []
    await asyncio.sleep(0)
    assert fired == ["now"]


def test_manual_time_does_not_run_backwards():
    with pytest.raises(ValueError, match="backwards"):
        ManualClock().advance(-1.0)


class TimedLoop:
    now = 0.0

    def time(self):
        return self.now


def test_a_timer_that_fires_late_waits_once_more_as_long():
    loop = TimedLoop()
    stalls = Stalls(loop)
    stalls.armed(5.0)
    loop.now = 5.01
    assert stalls.grace() == 0.0, "a busy loop"
    stalls.armed(5.0)
    loop.now += 7.0
    assert stalls.grace() == 2.0
    stalls.armed(2.0)
    loop.now += 9.0
    assert stalls.grace() == 0.0, "a loop that always stands still must not wait for ever"
    stalls.armed(1.0)
    loop.now += 3.0
    assert stalls.grace() == 2.0
