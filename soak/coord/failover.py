"""Kill the PostgreSQL of two coordinators under a load of workers, and promote its synchronous standby.

Every second time the coordinator that leads is frozen before, so that the other one takes over on the new primary, and
is woken up after. Every fifth time the standby has not received everything: then no coordinator may lead on it, and all
go on where they were when the right database is back.
"""

from __future__ import annotations

import asyncio
import signal
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Final

from soak.coord.expected_state import ExpectedState
from soak.coord.processes import Coordinator
from soak.coord.workers import WorkerPlan, WorkerPool
from soak.coord.zombie_leader import FINISH_S, SETTLED_S, check_journal
from soak.trials import CampaignRequest, CampaignResult, OnProgress, seeded_random, spread_s
from strata.coord.pb import coordinator_pb2 as pb
from strata.coord.settings import CoordinatorSettings
from strata.testing.postgres import PostgresServer

REWOUND_EVERY: Final = 5
REFUSED: Final = "database_went_back"
"""In the log of a coordinator that refuses a database."""
MORE_ACKS: Final = 50
"""Confirmed by a primary that does not wait for its standby, before it is killed."""

ON_ITS_WAY_S: Final = 0.2


@dataclass
class Tally:
    acked_s: list[float] = field(default_factory=list)
    frozen: int = 0
    rewound: int = 0
    times: int = 0
    confirmed: int = 0
    epochs: int = 0

    def result(self, problems: list[str]) -> CampaignResult:
        figures = (
            f"from the kill of the primary to the first ack after it {spread_s(self.acked_s)};"
            f" {self.frozen} times with a frozen leader, {self.rewound} standbys without all facts refused;"
            f" {self.confirmed} acks, {self.epochs} epochs"
        )
        return CampaignResult(
            times=self.times, problems=problems, figures=figures, worst_s=max(self.acked_s, default=0.0)
        )


class Campaign:
    """Two database servers and two coordinators, of which one each leads; `primary` is the first of the servers."""

    def __init__(self, servers: list[PostgresServer], coordinators: list[Coordinator], pool: WorkerPool) -> None:
        self._servers = servers
        self._coordinators = coordinators
        self._pool = pool
        self._confirmed = 0
        """Acks when the primary was gone."""
        self.tally = Tally()

    async def trial(self, number: int) -> None:
        await asyncio.sleep(seeded_random(number).uniform(0.2, 2.0))
        if number % REWOUND_EVERY == REWOUND_EVERY - 1:
            await self._rewound(number)
            self.tally.rewound += 1
        else:
            await self._promoted(number, freeze=number % 2 == 1)
        job = await self._pool.job()
        if (job.generation, job.world_size) != (self._pool.generation, len(self._pool.workers)):
            self._problem(number, f"generation {job.generation} has {job.world_size} workers")
        lost = [each.message for each in job.incidents if each.kind != pb.INCIDENT_KIND_FAILOVER]
        if lost:
            self._problem(number, f"{len(lost)} incidents, such as: {'; '.join(lost[-3:])}")

    async def _promoted(self, number: int, *, freeze: bool) -> None:
        old, new = self._servers
        leader = await self._leader()
        if freeze:
            leader.signal(signal.SIGSTOP)
        await self._kill_primary()
        await asyncio.to_thread(new.promote)
        self._servers.reverse()
        await self._acked_again()
        if freeze:
            self.tally.frozen += 1
            leader.signal(signal.SIGCONT)
            await self._steps_down(number, leader)
        await asyncio.to_thread(old.follow, new)
        await asyncio.to_thread(new.wait_for_standby)

    async def _rewound(self, number: int) -> None:
        primary, standby = self._servers
        await asyncio.to_thread(standby.stop, "immediate")
        await asyncio.to_thread(primary.commit_alone)
        confirmed = self._pool.expected.confirmed
        until_s = time.monotonic() + SETTLED_S
        # The expected state has no callback, and neither has a log.
        while self._pool.expected.confirmed < confirmed + MORE_ACKS and time.monotonic() < until_s:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        refused_before = self._refusals()
        await self._kill_primary()
        await asyncio.to_thread(standby.start)
        await asyncio.to_thread(standby.promote)
        until_s = time.monotonic() + SETTLED_S
        while self._refusals() == refused_before and time.monotonic() < until_s:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        # Long enough for the other coordinator to try as well.
        await asyncio.sleep(2 * CoordinatorSettings().lease_s)
        if any([await each.is_leading() for each in self._coordinators]):
            self._problem(number, "a coordinator leads on a database that has lost facts")
        if self._refusals() == refused_before:
            self._problem(number, "no coordinator said that the database has lost facts")
        await asyncio.to_thread(standby.kill)
        await asyncio.to_thread(primary.start)
        await asyncio.wait_for(self._pool.answered_everywhere(), SETTLED_S)
        await asyncio.to_thread(standby.follow, primary)
        await asyncio.to_thread(primary.wait_for_standby)

    async def _kill_primary(self) -> None:
        self._pool.down(time.monotonic())
        await asyncio.to_thread(self._servers[0].kill)
        # What it confirmed may still be on its way to a worker.
        await asyncio.sleep(ON_ITS_WAY_S)
        self._confirmed = self._pool.expected.confirmed

    async def _acked_again(self) -> None:
        """Only an ack shows a database: heartbeats are answered from memory."""
        expected, until_s = self._pool.expected, time.monotonic() + SETTLED_S
        while expected.confirmed == self._confirmed and time.monotonic() < until_s:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        self.tally.acked_s.append(time.monotonic() - self._pool.outage.since_s)
        await asyncio.wait_for(self._pool.answered_everywhere(), SETTLED_S)

    async def _leader(self) -> Coordinator:
        until_s = time.monotonic() + SETTLED_S
        while time.monotonic() < until_s:
            for each in self._coordinators:
                if await each.is_leading():
                    return each
            await asyncio.sleep(0.05)
        raise TimeoutError(f"no coordinator leads: {self._coordinators[0].log}")

    async def _steps_down(self, number: int, leader: Coordinator) -> None:
        """It learns at its next renewal that another one leads."""
        until_s = time.monotonic() + CoordinatorSettings().lease_s
        while leading := await leader.is_leading():
            if time.monotonic() > until_s:
                break
        if leading:
            self._problem(number, "the frozen leader still says that it leads, a lease after it woke up")
        await leader.stands_by()

    def _refusals(self) -> int:
        return sum(each.log.read_text("utf-8").count(REFUSED) for each in self._coordinators)

    def _problem(self, number: int, what: str) -> None:
        self._pool.expected.problem(f"failover {number}: {what}")


async def run(ask: CampaignRequest, tell: OnProgress) -> CampaignResult:
    with ExitStack() as stack:
        servers = [PostgresServer(), PostgresServer()]
        for server in servers:
            stack.callback(server.close)
        await asyncio.to_thread(servers[0].start)
        await asyncio.to_thread(servers[1].follow, servers[0])
        await asyncio.to_thread(servers[0].wait_for_standby)
        hosts = ",".join(f"127.0.0.1:{server.port}" for server in servers)
        url = f"postgresql://postgres@{hosts}/postgres?target_session_attrs=read-write"
        return await _run(ask, tell, servers, url)


async def _run(ask: CampaignRequest, tell: OnProgress, servers: list[PostgresServer], url: str) -> CampaignResult:
    both = [Coordinator(url, ask.folder, name, {}) for name in ("coordinator-a", "coordinator-b")]
    plan = WorkerPlan(workers=ask.workers, channels=min(25, ask.workers), shards=20 * ask.workers, think_s=0.5)
    expected = ExpectedState(plan.shards * plan.shard_size)
    pool = WorkerPool([each.address for each in both], plan, expected, seeded_random(ask.first))
    campaign = Campaign(servers, both, pool)
    tally = campaign.tally
    try:
        await both[0].start()
        await both[0].leads()
        await both[1].start()
        await both[1].stands_by()
        await pool.join()
        for number in range(ask.first, ask.first + ask.times):
            await campaign.trial(number)
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
