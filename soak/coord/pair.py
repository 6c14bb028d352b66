"""The frame of a campaign with two coordinators on one PostgreSQL, of which one leads, under a load of workers."""

from __future__ import annotations

import asyncio
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from soak.coord.expected_state import ExpectedState
from soak.coord.processes import Coordinator
from soak.coord.workers import WorkerPlan, WorkerPool
from soak.trials import CampaignRequest, CampaignResult, OnProgress, seeded_random
from strata.base.clock import SystemClock
from strata.coord.settings import CoordinatorSettings
from strata.journal.open import open_journal

SETTLED_S: Final = 60.0
FINISH_S: Final = 120.0


@dataclass
class Tally(ABC):
    times: int = 0
    confirmed: int = 0
    epochs: int = 0

    @abstractmethod
    def result(self, problems: list[str]) -> CampaignResult: ...


@dataclass(frozen=True)
class CoordinatorPair:
    coordinators: list[Coordinator]
    pool: WorkerPool

    async def leader(self) -> Coordinator:
        until_s = time.monotonic() + SETTLED_S
        while time.monotonic() < until_s:
            for each in self.coordinators:
                if await each.is_leading():
                    return each
            await asyncio.sleep(0.05)
        raise TimeoutError(f"no coordinator leads: {self.coordinators[0].log}")

    async def step_down(self, leader: Coordinator, what: str) -> None:
        """A leader that was frozen, named `what`, learns at its next renewal that another one leads."""
        until_s = time.monotonic() + CoordinatorSettings().lease_s
        while leading := await leader.is_leading():
            if time.monotonic() > until_s:
                break
        if leading:
            self.pool.expected.problem(f"{what} still says that it leads, a lease after it woke up")
        await leader.stands_by()


async def run_trials(
    ask: CampaignRequest,
    tell: OnProgress,
    url: str,
    plan: WorkerPlan,
    tally: Tally,
    trial: Callable[[CoordinatorPair, int], Awaitable[None]],
) -> CampaignResult:
    """One trial after the other, until one shows a problem; then all workers finish, and the journal is read."""
    both = [Coordinator(url, ask.folder, name, {}) for name in ("coordinator-a", "coordinator-b")]
    expected = ExpectedState(plan.shards * plan.shard_size)
    pool = WorkerPool([each.address for each in both], plan, expected, seeded_random(ask.first))
    pair = CoordinatorPair(both, pool)
    try:
        await both[0].start()
        await both[0].leads()
        await both[1].start()
        await both[1].stands_by()
        await pool.join()
        for number in range(ask.first, ask.first + ask.times):
            await trial(pair, number)
            tally.times += 1
            tally.confirmed, tally.epochs = expected.confirmed, pool.workers[0].epoch
            tell(tally.result(expected.summary()))
            if expected.problems:
                break
        tally.epochs = await pool.finish(FINISH_S)
        tally.confirmed = expected.confirmed
        expected.problems += await check_journal(url)
    finally:
        await pool.close()
        for each in both:
            if each.runs:
                each.signal(signal.SIGCONT)
            await each.close()
    expected.problems += [crash for each in both for crash in each.crashes]
    return tally.result(expected.summary())


async def check_journal(url: str) -> list[str]:
    """Under every epoch facts were added to the end only: none of an older epoch after one of a newer."""
    stream = CoordinatorSettings().stream
    async with await open_journal(url, SystemClock(), create=False) as journal:
        status = next(each for each in await journal.streams() if each.stream == stream)
        after, newest = status.floor, 0
        while batches := await journal.read(stream, after):
            for batch in batches:
                if batch.epoch < newest:
                    return [f"the journal has facts of epoch {batch.epoch} at {batch.first}, after epoch {newest}"]
                newest, after = batch.epoch, batch.last
    return []
