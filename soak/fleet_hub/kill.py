"""Kill the hub again and again under load, and audit that it keeps every write that it acknowledged.

Every second kill comes at a random moment from outside, the others at a failpoint, where the process ends itself. Every
tenth time nobody starts it again before all leases have run out; every twentieth time it is frozen for as long before.
After each round all jobs are let come to their end and everything is compared; only kills of rounds that were compared
are counted.
"""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from soak.fleet_hub.expected_state import ExpectedState
from soak.fleet_hub.workers import LEASE_S, SEEDS_PER_TRIAL, Outcome, Workers, settings
from soak.hub_process import ROOT, STRATA, ArmedFailpoint, HubProcess
from soak.trials import CampaignRequest, CampaignResult, Database, OnProgress, seeded_random, spread_s
from tests.support.webhook_receiver import WebhookReceiver

ROUND: Final = 20
FIRES_S: Final = 15.0
"""A failpoint that was not reached by then is replaced by a kill from outside."""
BLACKOUT_EVERY: Final = 10
FREEZE_EVERY: Final = 20
CALM_EVERY: Final = 6
CALM_S: Final = 2.2 * LEASE_S
"""So often, and for so long, the hub is left alone: it lets leases run out only after it could see for a full one."""
OUTSIDE: Final = "from outside"
_HITS: Final = {"http.before_reply": 150, "renew": 30, "sqlite": 60, "streams": 15}
"""How often a failpoint may be passed before it kills; the others happen a few times in a second."""
_FEW: Final = 6
_RARE: Final = ("apply", "cancel", "checkpoint", "expire", "ripen", "sweep", "fail.", "register", "webhook")
_NEVER: Final = ("upgrade", "quarantine", "adopted", "collect", "restore", "move", "backup", "schedule")
"""A new database needs no upgrade, nothing is damaged on purpose, these chunks are not in a bucket, and there are no
schedules."""


def failpoints(database: Database) -> Sequence[str]:
    """Every failpoint in the source that this campaign can reach."""
    other = {"sqlite": "postgres", "postgres": "sqlite"}[database]
    layers = [ROOT / "src/strata" / layer for layer in ("fleet", "hub", "database")]
    sources = [path for layer in layers for path in layer.rglob("*.py")]
    sources = [path for path in sources if "agent" not in path.parts and path.name != "objects.py"]
    named = {name for path in sources for name in re.findall(r'failpoint\("([^"]+)"\)', path.read_text("utf-8"))}
    return sorted(name for name in named if f".{other}." not in name and not any(word in name for word in _NEVER))


@dataclass(frozen=True)
class Kill:
    number: int
    pause_s: float
    """Of a kill from outside: how long after the hub was ready."""
    arm: ArmedFailpoint | None
    down_s: float
    """How long nobody starts it again."""
    frozen_s: float = 0.0
    """How long it is stopped before that pause."""


def schedule(database: Database, first: int, kills: int) -> list[Kill]:
    """The same numbers give the same kills, so that a campaign can go on where another one ended."""
    names = failpoints(database)
    made = []
    for number in range(first, first + kills):
        rng = seeded_random(number)
        arm = None
        if number % 2:
            name = names[number // 2 % len(names)]
            most = next((hits for word, hits in _HITS.items() if word in name), _FEW)
            arm = ArmedFailpoint(name, rng.randint(0, 0 if any(word in name for word in _RARE) else most))
        blackout = number % BLACKOUT_EVERY == BLACKOUT_EVERY - 1
        down_s = LEASE_S * rng.uniform(1.2, 1.6) if blackout else rng.uniform(0.0, 0.4)
        frozen_s = LEASE_S * 1.3 if number % FREEZE_EVERY == 4 else 0.0
        pause_s = CALM_S if number % CALM_EVERY == 2 or frozen_s else rng.uniform(0.0, 2.0)
        made.append(Kill(number, pause_s, arm, down_s, frozen_s))
    return made


@dataclass
class KillOutcome(Outcome):
    serving_s: list[float] = field(default_factory=list)
    """From the start of the process to its first answer."""
    moments: dict[str, int] = field(default_factory=dict)
    blackouts: int = 0
    """Times that the hub was away for longer than a lease, killed or frozen."""
    memory_mb: float = 0.0

    def result(self) -> CampaignResult:
        at_failpoints = sum(count for moment, count in self.moments.items() if moment != OUTSIDE)
        figures = (
            f"restart to serving {spread_s(self.serving_s)}; {at_failpoints} kills at"
            f" {len(self.moments.keys() - {OUTSIDE})} failpoints; {self.blackouts} outages longer than a lease;"
            f" {self.counts()}; {self.memory_mb:.0f} MB"
        )
        worst_s = max(self.serving_s, default=0.0)
        return CampaignResult(times=self.times, problems=self.problems, figures=figures, worst_s=worst_s)


class Campaign:
    def __init__(self, hub: HubProcess, expected: ExpectedState) -> None:
        self._hub = hub
        self._expected = expected
        self.outcome = KillOutcome()

    async def kill(self, kills: Sequence[Kill]) -> None:
        """The hub is armed for a kill when it starts, so the first one of a round begins with a restart."""
        outcome = self.outcome
        await self._restart(kills[0].arm, 0.0)
        for turn, kill in enumerate(kills):
            moment = await self._kill_hub(kill)
            outcome.moments[moment] = outcome.moments.get(moment, 0) + 1
            outcome.blackouts += kill.down_s > LEASE_S or kill.frozen_s > LEASE_S
            arm = kills[turn + 1].arm if turn + 1 < len(kills) else None
            await self._restart(arm, kill.down_s)
            if self._expected.problems:
                # The rest would only follow from these.
                return
        outcome.memory_mb = max(outcome.memory_mb, self._hub.memory_mb())

    async def _kill_hub(self, kill: Kill) -> str:
        hub = self._hub
        if kill.frozen_s:
            hub.signal(signal.SIGSTOP)
            await asyncio.sleep(kill.frozen_s)
            hub.signal(signal.SIGCONT)
        died_s = await hub.died(kill.pause_s if kill.arm is None else FIRES_S)
        if died_s is not None:
            return OUTSIDE if kill.arm is None else kill.arm.failpoint
        await hub.kill()
        return OUTSIDE

    async def _restart(self, arm: ArmedFailpoint | None, down_s: float) -> None:
        if self._hub.runs:
            await self._hub.kill()
        await asyncio.sleep(down_s)
        await self._hub.start(arm)
        ready_s = await self._hub.ready()
        if ready_s is not None:
            self.outcome.serving_s.append(ready_s - self._hub.started_s)


async def run(
    ask: CampaignRequest,
    tell: OnProgress,
    *,
    kills: Sequence[Kill] = (),
    per_round: int = ROUND,
    program: Sequence[str] = (STRATA,),
) -> CampaignResult:
    """`kills` other than the next ones of the schedule, and a `program` that lacks a safeguard, are for tests."""
    receiver = WebhookReceiver()
    database = ask.url if ask.database == "postgres" else ""
    hub = HubProcess(ask.folder, database=database, config=settings(ask.folder, receiver), program=program)
    workers = Workers(hub, receiver, ask.workers, seeded_random(ask.first), ask.first * SEEDS_PER_TRIAL)
    try:
        wanted = kills or schedule(ask.database, ask.first, ask.times)
        campaign = Campaign(hub, workers.expected)
        async for result in workers.rounds(wanted, per_round, campaign.kill, campaign.outcome):
            tell(result)
    finally:
        receiver.close()
    return campaign.outcome.result()
