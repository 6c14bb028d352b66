"""A hub whose database was away is of use again as soon as it is back."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

from strata.base.clock import SystemClock
from strata.base.errors import Code, StrataError
from strata.base.loop import every
from strata.hub.compose import Loop, open_hub
from strata.hub.settings import HubSettings
from tests.support.manual_clock import ManualClock

READY_S = 5.0
TIMES = 12


async def longest_pause_s(loop: Loop) -> float:
    """Between two turns, when all of them fail."""
    clock, turns = ManualClock(), [0.0]

    async def fail() -> None:
        turns.append(clock.monotonic_s())
        raise StrataError(Code.UNAVAILABLE, "the database is away")

    looping = asyncio.create_task(every(loop.interval_s, fail, clock=clock, max_backoff_s=loop.max_backoff_s))
    while len(turns) < TIMES:
        await clock.advance(0.5)
    looping.cancel()
    return max(later - earlier for earlier, later in itertools.pairwise(turns))


async def test_leases_and_events_go_on_within_seconds_however_long_the_database_was_away(tmp_path: Path) -> None:
    async with open_hub(HubSettings(data=tmp_path, keep_free_bytes=0), SystemClock()) as hub:
        awaited = [
            loop for loop in hub.loops if loop.run_once in (hub.context.fleet.leases.tick, hub.context.feed.run_once)
        ]
        assert len(awaited) == 2
        for loop in awaited:
            assert await longest_pause_s(loop) < READY_S
