from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.base.clock import Clock, SystemClock
from tests.support.manual_clock import ManualClock


async def sleep_then_note(clock: Clock, seconds: float, notes: list[tuple[float, float]]) -> None:
    await clock.sleep(seconds)
    notes.append((seconds, clock.monotonic_s()))


async def test_a_manual_clock_stands_still_until_advanced() -> None:
    clock = ManualClock(wall_s=100.0)
    await clock.advance(2.5)
    assert (clock.wall_s(), clock.monotonic_s()) == (102.5, 2.5)
    assert (clock.wall_s(), clock.monotonic_s()) == (102.5, 2.5)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=10), st.integers(0, 20))
def test_sleepers_wake_in_order_at_their_due_time_and_not_before(naps: list[int], until: int) -> None:
    async def scenario() -> list[tuple[float, float]]:
        clock, notes = ManualClock(), list[tuple[float, float]]()
        tasks = [asyncio.create_task(sleep_then_note(clock, nap, notes)) for nap in naps]
        await clock.advance(until)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return notes

    assert asyncio.run(scenario()) == [(nap, nap) for nap in sorted(naps) if nap <= until]


async def test_a_sleeper_that_sleeps_again_is_woken_within_one_advance() -> None:
    clock, seen = ManualClock(), list[float]()

    async def ticks() -> None:
        while True:
            await clock.sleep(2)
            seen.append(clock.monotonic_s())

    task = asyncio.create_task(ticks())
    await clock.advance(7)
    assert seen == [2, 4, 6]
    task.cancel()


async def test_a_cancelled_sleeper_does_not_disturb_the_others() -> None:
    clock, notes = ManualClock(), list[tuple[float, float]]()
    cancelled = asyncio.create_task(sleep_then_note(clock, 1, notes))
    kept = asyncio.create_task(sleep_then_note(clock, 2, notes))
    await clock.advance(0)
    cancelled.cancel()
    await clock.advance(3)
    await kept
    assert notes == [(2, 2)]


async def test_a_negative_sleep_is_due_at_once() -> None:
    clock, notes = ManualClock(), list[tuple[float, float]]()
    task = asyncio.create_task(sleep_then_note(clock, -1, notes))
    await clock.advance(0)
    await task
    assert notes == [(-1, 0)]


async def test_the_system_clock_moves_forward() -> None:
    clock = SystemClock()
    before = clock.monotonic_s()
    await clock.sleep(0)
    assert clock.monotonic_s() >= before
    assert clock.wall_s() == pytest.approx(clock.wall_s(), abs=60)
