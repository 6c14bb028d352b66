from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from strata.base.errors import Code, StrataError
from strata.base.loop import every
from tests.support.manual_clock import ManualClock


@asynccontextmanager
async def running(
    clock: ManualClock,
    run_once: Callable[[], Awaitable[None]],
    *,
    interval_s: float = 10,
    max_backoff_s: float = 60,
    max_share: float = 1.0,
) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(
        every(interval_s, run_once, clock=clock, max_backoff_s=max_backoff_s, max_share=max_share)
    )
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_it_runs_at_once_and_then_at_every_interval() -> None:
    clock, runs = ManualClock(), list[float]()

    async def run_once() -> None:
        runs.append(clock.monotonic_s())

    async with running(clock, run_once):
        await clock.advance(35)
    assert runs == [0, 10, 20, 30]


@pytest.mark.parametrize(("takes_s", "runs_at"), [(4, [0, 10, 20, 30]), (13, [0, 20]), (10, [0, 10, 20, 30])])
async def test_a_slow_run_skips_the_ticks_it_missed(takes_s: float, runs_at: list[float]) -> None:
    clock, runs = ManualClock(), list[float]()

    async def run_once() -> None:
        runs.append(clock.monotonic_s())
        await clock.sleep(takes_s)

    async with running(clock, run_once):
        await clock.advance(39)
    assert runs == runs_at


@pytest.mark.parametrize(
    ("takes_s", "runs_at"), [(1, [0, 10, 20, 30, 40]), (2.25, [0, 11.25, 22.5, 33.75, 45]), (4, [0, 14, 28, 42])]
)
async def test_a_run_takes_no_more_than_its_share_of_the_time_but_is_not_put_off_for_long(
    takes_s: float, runs_at: list[float]
) -> None:
    clock, runs = ManualClock(), list[float]()

    async def run_once() -> None:
        runs.append(clock.monotonic_s())
        await clock.sleep(takes_s)

    async with running(clock, run_once, max_share=0.2):
        await clock.advance(49)
    assert runs == runs_at


async def test_a_failing_run_is_logged_and_backs_off_until_it_works_again(caplog: pytest.LogCaptureFixture) -> None:
    clock, runs = ManualClock(), list[float]()

    async def run_once() -> None:
        runs.append(clock.monotonic_s())
        if clock.monotonic_s() < 100:
            raise ValueError("broken")

    with caplog.at_level(logging.ERROR):
        async with running(clock, run_once, max_backoff_s=40):
            await clock.advance(165)
    # 10 after the first failure, then 20, 40, and never more than 40.
    assert runs == [0, 10, 30, 70, 110, 120, 130, 140, 150, 160]
    assert [record.__dict__["fields"] for record in caplog.records] == [
        {"failures_in_a_row": count} for count in (1, 2, 3, 4)
    ]
    assert all(record.exc_info for record in caplog.records)


async def test_backing_off_never_runs_more_often_than_the_interval() -> None:
    clock, runs = ManualClock(), list[float]()

    async def run_once() -> None:
        runs.append(clock.monotonic_s())
        raise ValueError

    async with running(clock, run_once, interval_s=100, max_backoff_s=5):
        await clock.advance(350)
    assert runs == [0, 100, 200, 300]


async def test_many_failures_do_not_overflow_the_pause() -> None:
    clock, runs = ManualClock(), list[float]()

    async def run_once() -> None:
        runs.append(clock.monotonic_s())
        raise ValueError

    async with running(clock, run_once, interval_s=1, max_backoff_s=2):
        await clock.advance(3000)
    assert len(runs) > 1400


async def test_cancelling_ends_it_in_a_run_and_in_a_pause() -> None:
    clock = ManualClock()

    async def run_once() -> None:
        await clock.sleep(5)

    for moment in (3, 8):
        async with running(clock, run_once) as task:
            await clock.advance(moment)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task


@pytest.mark.parametrize("interval_s", [0, -1, float("nan")])
async def test_an_interval_that_would_spin_is_refused(interval_s: float) -> None:
    async def run_once() -> None:
        raise AssertionError

    with pytest.raises(StrataError) as caught:
        await every(interval_s, run_once, clock=ManualClock())
    assert caught.value.code is Code.INVALID
