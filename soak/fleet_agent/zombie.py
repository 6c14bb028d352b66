"""Freeze hosts past their lease, let another one finish, and wake them up: nothing that they still send counts.

A host is frozen whole, or its agent alone while the child goes on, or its agent at a failpoint; then another host
claims the job. Beside these, frozen processes that must lose nothing: a host that is woken up within its lease or
before anybody else has claimed its job, and a hub.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Final, Literal

from soak.fleet_agent import expected_state, stale_writes
from soak.fleet_agent.fleet import Fleet, Plan
from soak.fleet_agent.processes import AgentProcess, FreezeAtFailpoint, failpoints, is_frozen, wait_until
from soak.trials import CampaignRequest, CampaignResult, OnProgress, seeded_random, spread_s
from strata.fleet.core.job import TERMINAL, Cause
from strata.fleet.wire.jobs import JobReply

LEASE_S: Final = 4.0
LIMIT_S: Final = 2.0
"""Limit from the expiry of the lease to the claim by another host."""
ENDS_S: Final = 20.0
"""Limit from waking up to a host that keeps nothing of the attempt."""
WAITS_S: Final = 60.0
SHORT: Final = 0.4
"""The part of a lease for which a frozen host keeps it, although its last renewal was a quarter of the term before."""

Scenario = Literal["host", "agent", "failpoint", "short", "unclaimed", "hub"]
SCENARIOS: Final[tuple[Scenario, ...]] = (
    "host",
    "failpoint",
    "agent",
    "failpoint",
    "short",
    "failpoint",
    "unclaimed",
    "hub",
)
_ELSEWHERE: Final = ("agent.adopt.", "agent.fail.", "agent.stop.", "agent.claim.written", "agent.state.removed")
_OVER: Final = "agent.attempt.completed"
"""At this failpoint no other host can claim the job."""


@dataclass
class ZombieOutcome:
    times: int = 0
    problems: list[str] = field(default_factory=list)
    scenarios: dict[str, int] = field(default_factory=dict)
    moments: set[str] = field(default_factory=set)
    claimed_s: list[float] = field(default_factory=list)
    """Beyond the lease."""
    ended_s: list[float] = field(default_factory=list)
    refused: int = 0
    """Rejected writes that the campaign sent with the zombie's credentials."""
    dropped: int = 0
    """Attempts that the zombie itself dropped because the hub rejected it."""

    def result(self) -> CampaignResult:
        late = sum(each > LIMIT_S for each in self.claimed_s)
        scenarios = ", ".join(f"{count} {scenario}" for scenario, count in self.scenarios.items())
        figures = (
            f"frozen: {scenarios}, at {len(self.moments)} failpoints; claimed by another host after the lease of"
            f" {LEASE_S:g} s + {spread_s(self.claimed_s)}, {late} over {LIMIT_S:g} s; {self.refused} stale writes"
            f" refused; {self.dropped} attempts dropped by woken agents, all gone after {spread_s(self.ended_s)}"
        )
        worst_s = max(self.claimed_s, default=0.0)
        return CampaignResult(times=self.times, problems=self.problems, figures=figures, worst_s=worst_s)


class ZombieTrials:
    """Two hosts with one slot. The host to freeze gets the job because the other one is paused."""

    def __init__(self, fleet: Fleet, first: int) -> None:
        self._fleet = fleet
        self._operator = fleet.operator
        names = [name for name in failpoints("fleet/agent") if not name.startswith(_ELSEWHERE) and name != _OVER]
        self._names = islice(cycle(names), first % len(names), None)
        self.outcome = ZombieOutcome()

    async def run(self, number: int, scenario: Scenario) -> None:
        dice = seeded_random(number)
        victim, other = self._fleet.hosts if number % 2 else reversed(self._fleet.hosts)
        await self._order(other, "pause")
        match scenario:
            case "host" | "agent" | "failpoint":
                await self._run_replaced(number, scenario, dice, victim, other)
            case "short" | "unclaimed" | "hub":
                await self._run_unharmed(number, scenario, dice, victim)
        await self._order(other, "resume")
        self.outcome.times += 1
        self.outcome.scenarios[scenario] = self.outcome.scenarios.get(scenario, 0) + 1

    async def _order(self, host: AgentProcess, what: str) -> None:
        await self._fleet.call(lambda: self._operator.order(host, what))

    async def _submit(self, number: int) -> str:
        return await self._fleet.call(lambda: self._operator.submit(number))

    async def _at_work(self, number: int, victim: AgentProcess, dice: random.Random) -> str:
        """A job of this host, at a random moment of it."""
        job_id = await self._submit(number)
        await wait_until(victim.children, WAITS_S, "a child runs")
        await asyncio.sleep(dice.uniform(0.0, 1.0))
        return job_id

    # Hosts that are replaced

    async def _run_replaced(
        self, number: int, scenario: Scenario, dice: random.Random, victim: AgentProcess, other: AgentProcess
    ) -> None:
        if scenario == "failpoint":
            job_id = await self._frozen_at_a_failpoint(number, victim)
        else:
            job_id = await self._at_work(number, victim, dice)
            stop = victim.signal_host if scenario == "host" else victim.signal
            stop(signal.SIGSTOP)
        frozen_s = time.time()
        await self._order(other, "resume")
        found = await wait_until(lambda: self._past(job_id, 1), WAITS_S, f"trial {number}: another host has the job")
        if found.job.epoch == 1:
            self.outcome.problems.append(
                f"trial {number}, {scenario}: it was {found.job.status} before the host was frozen"
            )
            return
        self.outcome.claimed_s.append(found.attempts[1].claimed_at_s - frozen_s - LEASE_S)
        finished = dice.random() < 0.7
        if finished:
            await self._fleet.wait_ended(job_id)
        else:
            await wait_until(lambda: other.children() or self._is_over(job_id), WAITS_S, "the other host runs it")
        await self._wake(number, scenario, victim, job_id, finished=finished)
        await self._check(
            number, scenario, job_id, hosts=[victim, other], allowed_causes={(job_id, 1): {Cause.HOST_LOST}}
        )

    def _past(self, job_id: str, epoch: int) -> JobReply | None:
        found = self._operator.job(job_id)
        return found if found.job.epoch > epoch or found.job.status in TERMINAL else None

    def _is_over(self, job_id: str) -> bool:
        return self._operator.job(job_id).job.status in TERMINAL

    async def _frozen_at_a_failpoint(self, number: int, victim: AgentProcess) -> str:
        name = next(self._names)
        killed_s = await victim.kill()
        await victim.start(FreezeAtFailpoint(name))
        await self._fleet.wait_seen(victim, killed_s)
        job_id = await self._submit(number)
        await wait_until(lambda: is_frozen(victim.pid), WAITS_S, f"trial {number}: the agent froze at {name}")
        self.outcome.moments.add(name)
        return job_id

    async def _wake(
        self, number: int, scenario: Scenario, victim: AgentProcess, job_id: str, *, finished: bool
    ) -> None:
        """The hub rejects its writes and those that we send in its name, and the job does not change."""
        name = f"trial {number}, {scenario}"
        logged = victim.log.stat().st_size
        before = await self._fleet.call(lambda: self._snapshot(job_id))
        woken_s = time.monotonic()
        victim.signal_host(signal.SIGCONT)
        try:
            await wait_until(lambda: victim.is_idle() and not victim.processes(), ENDS_S, "idle")
            self.outcome.ended_s.append(time.monotonic() - woken_s)
        except TimeoutError:
            self.outcome.problems.append(f"{name}: {ENDS_S:g} s after it woke up the host keeps what it had")
        self.outcome.dropped += bool(
            victim.logged_count("lease_lost", logged) + victim.logged_count("attempt_report_refused", logged)
        )
        with victim.client() as client:
            replies = await self._fleet.call(lambda: stale_writes.send_all(client, job_id, 1))
        for call, code in stale_writes.EXPECTED.items():
            if replies[call] != code:
                self.outcome.problems.append(f"{name}: {call} was answered {replies[call]}, not {code}")
            else:
                self.outcome.refused += 1
        if finished and before != await self._fleet.call(lambda: self._snapshot(job_id)):
            self.outcome.problems.append(f"{name}: the zombie changed something: {before}")

    def _snapshot(self, job_id: str) -> object:
        """What a zombie must not change. It may add an orphan to its own attempt, and end its own log."""
        found = self._operator.job(job_id)
        streams = [self._operator.stream(job_id, found.job.epoch, name) for name in ("log", "metrics")]
        return found.job, found.attempts[1:], self._operator.events(job_id), streams

    # Processes that lose nothing

    async def _run_unharmed(self, number: int, scenario: Scenario, dice: random.Random, victim: AgentProcess) -> None:
        job_id = await self._at_work(number, victim, dice)
        allowed_causes: dict[tuple[str, int], set[Cause]] = {}
        if scenario == "hub":
            self._fleet.hub.signal(signal.SIGSTOP)
            await asyncio.sleep(LEASE_S * dice.uniform(1.2, 2.0))
            self._fleet.hub.signal(signal.SIGCONT)
        else:
            victim.signal_host(signal.SIGSTOP)
            if scenario == "short":
                await asyncio.sleep(LEASE_S * SHORT)
            else:
                allowed_causes[job_id, 1] = {Cause.HOST_LOST}
                await wait_until(
                    lambda: self._has(job_id, "job.expired"), WAITS_S, "the lease of a frozen host runs out"
                )
                await asyncio.sleep(dice.uniform(0.0, 2.0))
            victim.signal_host(signal.SIGCONT)
        await self._check(number, scenario, job_id, hosts=[victim], allowed_causes=allowed_causes)
        if scenario == "unclaimed" and not self._has(job_id, "job.revived"):
            self.outcome.problems.append(f"trial {number}: the job was not revived")

    def _has(self, job_id: str, kind: str) -> bool:
        return any(event.kind == kind for event in self._operator.events(job_id))

    async def _check(
        self,
        number: int,
        scenario: Scenario,
        job_id: str,
        *,
        hosts: list[AgentProcess],
        allowed_causes: expected_state.AllowedCauses,
    ) -> None:
        """The job was completed by the last of these hosts, and no other host had it."""
        found = await self._fleet.wait_ended(job_id)
        seen = await self._fleet.call(lambda: expected_state.gather_evidence(self._operator, found))
        problems = expected_state.find_problems(seen, self._fleet.plan, allowed_causes)
        had = [each.host_id for each in seen.attempts]
        if had != [host.host_id for host in hosts]:
            problems.append(f"{len(had)} attempts instead of {len(hosts)}")
        self.outcome.problems += [f"trial {number}, {scenario}: {problem}" for problem in problems]
        await wait_until(lambda: all(host.is_idle() for host in self._fleet.hosts), WAITS_S, "all hosts are done")


async def _all(
    trials: ZombieTrials, fleet: Fleet, request: CampaignRequest, on_progress: Callable[[ZombieOutcome], None]
) -> None:
    await fleet.start()
    scenarios = islice(cycle(SCENARIOS), request.first % len(SCENARIOS), None)
    for number, scenario in zip(range(request.first, request.first + request.times), scenarios, strict=False):
        await trials.run(number, scenario)
        on_progress(trials.outcome)
        if trials.outcome.problems:
            return
    trials.outcome.problems += await fleet.find_leftovers()


async def run(request: CampaignRequest, on_progress: OnProgress, plan: Plan | None = None) -> CampaignResult:
    fleet = Fleet(request, plan or Plan(), hosts=2, slots=1, lease_s=LEASE_S)
    trials = ZombieTrials(fleet, request.first)
    try:
        await _all(trials, fleet, request, lambda outcome: on_progress(outcome.result()))
    except TimeoutError as error:
        trials.outcome.problems.append(str(error))
    finally:
        trials.outcome.problems += fleet.crashes
        fleet.hub.signal(signal.SIGCONT)
        await fleet.close()
    return trials.outcome.result()
