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

from soak.coord import pair
from soak.coord.pair import SETTLED_S, CoordinatorPair
from soak.coord.workers import WorkerPlan
from soak.trials import CampaignRequest, CampaignResult, OnProgress, seeded_random, spread_s
from strata.coord.settings import CoordinatorSettings
from tests.support.postgres import PostgresServer

REWOUND_EVERY: Final = 5
REFUSED: Final = "database_went_back"
"""In the log of a coordinator that refuses a database."""
MORE_ACKS: Final = 50
"""Confirmed by a primary that does not wait for its standby, before it is killed."""
ON_ITS_WAY_S: Final = 0.2
"""How long what a killed server confirmed may take to a worker."""


@dataclass
class Tally(pair.Tally):
    acked_s: list[float] = field(default_factory=list)
    frozen: int = 0
    rewound: int = 0

    def result(self, problems: list[str]) -> CampaignResult:
        figures = (
            f"from the kill of the primary to the first ack after it {spread_s(self.acked_s)};"
            f" {self.frozen} times with a frozen leader, {self.rewound} standbys without all facts refused;"
            f" {self.confirmed} acks, {self.epochs} epochs"
        )
        return CampaignResult(
            times=self.times, problems=problems, figures=figures, worst_s=max(self.acked_s, default=0.0)
        )


class Failover:
    """One trial: two database servers, of which the first is the primary, and two coordinators, of which one leads."""

    def __init__(self, servers: list[PostgresServer], both: CoordinatorPair, tally: Tally) -> None:
        self._servers = servers
        self._both = both
        self._pool = both.pool
        self._confirmed = 0
        """Acks when the primary was gone."""
        self._tally = tally

    async def run(self, number: int) -> None:
        await asyncio.sleep(seeded_random(number).uniform(0.2, 2.0))
        if number % REWOUND_EVERY == REWOUND_EVERY - 1:
            await self._rewound(number)
            self._tally.rewound += 1
        else:
            await self._promoted(number, freeze=number % 2 == 1)
        for problem in self._pool.missing_members(await self._pool.job()):
            self._problem(number, problem)

    async def _promoted(self, number: int, *, freeze: bool) -> None:
        old, new = self._servers
        leader = await self._both.leader()
        if freeze:
            leader.signal(signal.SIGSTOP)
        await self._kill_primary()
        await asyncio.to_thread(new.promote)
        self._servers.reverse()
        await self._acked_again()
        if freeze:
            self._tally.frozen += 1
            leader.signal(signal.SIGCONT)
            await self._both.step_down(leader, f"failover {number}: the frozen leader")
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
        if any([await each.is_leading() for each in self._both.coordinators]):
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
        await asyncio.sleep(ON_ITS_WAY_S)
        self._confirmed = self._pool.expected.confirmed

    async def _acked_again(self) -> None:
        """Only an ack shows a database: heartbeats are answered from memory."""
        expected, until_s = self._pool.expected, time.monotonic() + SETTLED_S
        while expected.confirmed == self._confirmed and time.monotonic() < until_s:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        self._tally.acked_s.append(time.monotonic() - self._pool.outage.since_s)
        await asyncio.wait_for(self._pool.answered_everywhere(), SETTLED_S)

    def _refusals(self) -> int:
        return sum(each.log.read_text("utf-8").count(REFUSED) for each in self._both.coordinators)

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
        plan = WorkerPlan(workers=ask.workers, channels=min(25, ask.workers), shards=20 * ask.workers, think_s=0.5)
        tally = Tally()

        async def fail_over(both: CoordinatorPair, number: int) -> None:
            await Failover(servers, both, tally).run(number)

        return await pair.run_trials(ask, tell, url, plan, tally, fail_over)
