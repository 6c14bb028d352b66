"""Inject faults into the PostgreSQL of a running hub under load: kill it, terminate its backends, lose its replies.

A proxy stands between the two, so that a reply can be lost after the COMMIT it tells of. After each round all jobs come
to their end and everything is compared, as in the campaign that kills the hub.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit, urlunsplit

from soak.fleet_hub.expected_state import ExpectedState
from soak.fleet_hub.workers import LEASE_S, SEEDS_PER_TRIAL, Outcome, Workers, settings
from soak.hub_process import HubProcess
from soak.trials import CampaignRequest, CampaignResult, OnProgress, seeded_random, spread_s
from tests.support.postgres import PostgresServer
from tests.support.proxy import ChaosProxy
from tests.support.webhook_receiver import WebhookReceiver

ROUND: Final = 5
LIMIT_S: Final = 5.0
"""From the database that is back to the first write of a host that is answered."""
BACK_S: Final = 60.0
CALM_EVERY: Final = 5
CALM_S: Final = 2.2 * LEASE_S
"""So often, and for so long, nothing is hurt: the hub lets leases run out only after it could see for a full one."""


@dataclass
class DatabaseUnderTest:
    """The database of the hub, and the proxy between the two."""

    server: PostgresServer
    url: str
    proxy: ChaosProxy


async def kill(site: DatabaseUnderTest, away_s: float) -> None:
    """SIGKILL to the server and all its children."""
    await asyncio.to_thread(site.server.kill)
    await asyncio.sleep(away_s)
    await asyncio.to_thread(site.server.start)


async def kill_for_longer(site: DatabaseUnderTest, away_s: float) -> None:
    """It stays away for longer than a lease lasts."""
    await kill(site, LEASE_S * 1.2 + away_s)


async def terminate(site: DatabaseUnderTest, away_s: float) -> None:
    """All backends of the hub end, several times in a row."""
    until_s = time.monotonic() + away_s
    while True:
        await asyncio.to_thread(site.server.terminate_backends, site.url)
        if time.monotonic() > until_s:
            return
        await asyncio.sleep(0.1)


async def lose_replies(site: DatabaseUnderTest, away_s: float) -> None:
    """The database does and confirms everything; the hub hears nothing of it."""
    site.proxy.swallow_replies()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(5.0):
            await site.proxy.swallowed(at_least=1)
    await asyncio.sleep(away_s / 4)
    site.proxy.heal()


async def cut_connections(site: DatabaseUnderTest, away_s: float) -> None:
    """Connections are reset, and new ones refused."""
    site.proxy.refuse()
    site.proxy.cut()
    await asyncio.sleep(away_s)
    site.proxy.heal()


async def stall(site: DatabaseUnderTest, away_s: float) -> None:
    """Nothing arrives and nothing closes, for longer than the hub waits for an answer."""
    site.proxy.stall()
    await asyncio.sleep(5.5 + away_s)
    site.proxy.heal()


FAULTS: Final[Sequence[Callable[[DatabaseUnderTest, float], Awaitable[None]]]] = (
    kill,
    terminate,
    lose_replies,
    kill_for_longer,
    lose_replies,
    cut_connections,
    stall,
)


@dataclass
class PostgresOutcome(Outcome):
    back_s: list[float] = field(default_factory=list)
    kinds: dict[str, int] = field(default_factory=dict)

    def result(self) -> CampaignResult:
        late = [each for each in self.back_s if each > LIMIT_S]
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.kinds.items()))
        back = f"database back to a write answered {spread_s(self.back_s)}, {len(late)} over {LIMIT_S:g} s"
        figures = f"{back}; {kinds}; {self.counts()}"
        worst_s = max(self.back_s, default=0.0)
        return CampaignResult(times=self.times, problems=self.problems, figures=figures, worst_s=worst_s)


class Campaign:
    def __init__(self, site: DatabaseUnderTest, expected: ExpectedState) -> None:
        self._site = site
        self._expected = expected
        self.outcome = PostgresOutcome()

    async def inject_faults(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            await self._inject_fault(number)
            if self._expected.problems:
                return

    async def _inject_fault(self, number: int) -> None:
        rng, outcome, expected = seeded_random(number), self.outcome, self._expected
        await asyncio.sleep(CALM_S if number % CALM_EVERY == 0 else rng.uniform(0.5, 2.0))
        fault = FAULTS[number % len(FAULTS)]
        await fault(self._site, rng.uniform(0.1, 2.0))
        over_s = time.monotonic()
        outcome.kinds[fault.__name__] = outcome.kinds.get(fault.__name__, 0) + 1
        while expected.answered_s < over_s and time.monotonic() < over_s + BACK_S:  # noqa: ASYNC110 - set by threads
            await asyncio.sleep(0.01)
        if expected.answered_s < over_s:
            expected.problem(f"no host was answered within {BACK_S:g} s after {fault.__name__} (fault {number})")
        else:
            outcome.back_s.append(expected.answered_s - over_s)


async def run(ask: CampaignRequest, tell: OnProgress, *, per_round: int = ROUND) -> CampaignResult:
    """With a server of its own, since it is killed."""
    receiver = WebhookReceiver()
    with PostgresServer() as server:
        url = server.create_database()
        async with ChaosProxy("127.0.0.1", server.port) as proxy:
            parts = urlsplit(url)
            through = urlunsplit(parts._replace(netloc=f"{parts.username}@127.0.0.1:{proxy.port}"))
            hub = HubProcess(ask.folder, database=through, config=settings(ask.folder, receiver))
            workers = Workers(hub, receiver, ask.workers, seeded_random(ask.first), ask.first * SEEDS_PER_TRIAL)
            campaign = Campaign(DatabaseUnderTest(server, url, proxy), workers.expected)
            numbers = range(ask.first, ask.first + ask.times)
            try:
                async for result in workers.rounds(numbers, per_round, campaign.inject_faults, campaign.outcome):
                    tell(result)
            finally:
                receiver.close()
    return campaign.outcome.result()
