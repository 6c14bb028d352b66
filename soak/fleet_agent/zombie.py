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

from soak.fleet_agent import books, stale
from soak.fleet_agent.fleet import Fleet, Plan
from soak.fleet_agent.processes import AgentProcess, Freeze, failpoints, is_frozen, until
from soak.trials import CampaignRequest, CampaignResult, OnProgress, seeded_random, spread_s
from strata.fleet import wire
from strata.fleet.core.job import TERMINAL, Cause

LEASE_S: Final = 4.0
LIMIT_S: Final = 2.0
"""From the end of the lease to another host that has the job."""
ENDS_S: Final = 20.0
"""From waking up to a host that keeps nothing of the attempt."""
WAITS_S: Final = 60.0
SHORT: Final = 0.4
"""The part of a lease for which a host may be frozen and keeps it, although it has renewed it a quarter before."""

Fate = Literal["host", "agent", "failpoint", "short", "unclaimed", "hub"]
FATES: Final[tuple[Fate, ...]] = ("host", "failpoint", "agent", "failpoint", "short", "failpoint", "unclaimed", "hub")
_ELSEWHERE: Final = ("agent.adopt.", "agent.fail.", "agent.stop.", "agent.claim.written", "agent.state.removed")
_OVER: Final = "agent.attempt.completed"
"""Nobody else can claim the job there."""


@dataclass
class Tally:
    times: int = 0
    problems: list[str] = field(default_factory=list)
    fates: dict[str, int] = field(default_factory=dict)
    moments: set[str] = field(default_factory=set)
    claimed_s: list[float] = field(default_factory=list)
    """Beyond the lease."""
    ended_s: list[float] = field(default_factory=list)
    refused: int = 0
    """Writes that the campaign sent with the zombie's credentials."""
    dropped: int = 0
    """Attempts that the zombie itself gave up because it was refused."""

    def result(self) -> CampaignResult:
        late = sum(each > LIMIT_S for each in self.claimed_s)
        fates = ", ".join(f"{count} {fate}" for fate, count in self.fates.items())
        figures = (
            f"frozen: {fates}, at {len(self.moments)} failpoints; claimed by another host after the lease of"
            f" {LEASE_S:g} s + {spread_s(self.claimed_s)}, {late} over {LIMIT_S:g} s; {self.refused} stale writes"
            f" refused; {self.dropped} attempts dropped by woken agents, all gone after {spread_s(self.ended_s)}"
        )
        worst_s = max(self.claimed_s, default=0.0)
        return CampaignResult(times=self.times, problems=self.problems, figures=figures, worst_s=worst_s)


class Trials:
    """Two hosts with one slot. The one that is to be frozen gets the job because the other one is paused."""

    def __init__(self, fleet: Fleet, first: int) -> None:
        self._fleet = fleet
        self._operator = fleet.operator
        names = [name for name in failpoints("fleet/agent") if not name.startswith(_ELSEWHERE) and name != _OVER]
        self._names = islice(cycle(names), first % len(names), None)
        self.tally = Tally()

    async def run(self, number: int, fate: Fate) -> None:
        dice = seeded_random(number)
        victim, other = self._fleet.hosts if number % 2 else reversed(self._fleet.hosts)
        await self._order(other, "pause")
        match fate:
            case "host" | "agent" | "failpoint":
                await self._loses(number, fate, dice, victim, other)
            case "short" | "unclaimed" | "hub":
                await self._keeps(number, fate, dice, victim)
        await self._order(other, "resume")
        self.tally.times += 1
        self.tally.fates[fate] = self.tally.fates.get(fate, 0) + 1

    async def _order(self, host: AgentProcess, what: str) -> None:
        await self._fleet.ask(lambda: self._operator.order(host, what))

    async def _submit(self, number: int) -> str:
        return await self._fleet.ask(lambda: self._operator.submit(number))

    async def _at_work(self, number: int, victim: AgentProcess, dice: random.Random) -> str:
        """A job of this host, at a random moment of it."""
        job_id = await self._submit(number)
        await until(victim.children, WAITS_S, "a child runs")
        await asyncio.sleep(dice.uniform(0.0, 1.0))
        return job_id

    # Hosts that are replaced

    async def _loses(
        self, number: int, fate: Fate, dice: random.Random, victim: AgentProcess, other: AgentProcess
    ) -> None:
        if fate == "failpoint":
            job_id = await self._frozen_at_a_failpoint(number, victim)
        else:
            job_id = await self._at_work(number, victim, dice)
            stop = victim.signal_host if fate == "host" else victim.signal
            stop(signal.SIGSTOP)
        frozen_s = time.time()
        await self._order(other, "resume")
        found = await until(lambda: self._past(job_id, 1), WAITS_S, f"trial {number}: another host has the job")
        if found.job.epoch == 1:
            self.tally.problems.append(f"trial {number}, {fate}: it was {found.job.status} before the host was frozen")
            return
        self.tally.claimed_s.append(found.attempts[1].claimed_at_s - frozen_s - LEASE_S)
        finished = dice.random() < 0.7
        if finished:
            await self._fleet.over(job_id)
        else:
            await until(lambda: other.children() or self._is_over(job_id), WAITS_S, "the other host runs it")
        await self._wake(number, fate, victim, job_id, finished=finished)
        await self._check(number, fate, job_id, hosts=[victim, other], blame={(job_id, 1): {Cause.HOST_LOST}})

    def _past(self, job_id: str, epoch: int) -> wire.JobReply | None:
        found = self._operator.job(job_id)
        return found if found.job.epoch > epoch or found.job.status in TERMINAL else None

    def _is_over(self, job_id: str) -> bool:
        return self._operator.job(job_id).job.status in TERMINAL

    async def _frozen_at_a_failpoint(self, number: int, victim: AgentProcess) -> str:
        name = next(self._names)
        killed_s = await victim.kill()
        await victim.start(Freeze(name))
        await self._fleet.seen(victim, killed_s)
        job_id = await self._submit(number)
        await until(lambda: is_frozen(victim.pid), WAITS_S, f"trial {number}: the agent froze at {name}")
        self.tally.moments.add(name)
        return job_id

    async def _wake(self, number: int, fate: Fate, victim: AgentProcess, job_id: str, *, finished: bool) -> None:
        """Its own writes are refused, so are those that we send in its name, and the job stays as it is."""
        name = f"trial {number}, {fate}"
        logged = victim.log.stat().st_size
        before = await self._fleet.ask(lambda: self._picture(job_id))
        woken_s = time.monotonic()
        victim.signal_host(signal.SIGCONT)
        try:
            await until(lambda: victim.idle() and not victim.processes(), ENDS_S, "idle")
            self.tally.ended_s.append(time.monotonic() - woken_s)
        except TimeoutError:
            self.tally.problems.append(f"{name}: {ENDS_S:g} s after it woke up the host keeps what it had")
        self.tally.dropped += bool(victim.said("lease_lost", logged) + victim.said("attempt_report_refused", logged))
        with victim.client() as client:
            answers = await self._fleet.ask(lambda: stale.send_all(client, job_id, 1))
        for call, code in stale.EXPECTED.items():
            if answers[call] != code:
                self.tally.problems.append(f"{name}: {call} was answered {answers[call]}, not {code}")
            else:
                self.tally.refused += 1
        if finished and before != await self._fleet.ask(lambda: self._picture(job_id)):
            self.tally.problems.append(f"{name}: the zombie changed something: {before}")

    def _picture(self, job_id: str) -> object:
        """All that a zombie must not change: it may keep an orphan beside its own attempt, and end its own log."""
        found = self._operator.job(job_id)
        streams = [self._operator.stream(job_id, found.job.epoch, name) for name in ("log", "metrics")]
        return found.job, found.attempts[1:], self._operator.events(job_id), streams

    # Processes that lose nothing

    async def _keeps(self, number: int, fate: Fate, dice: random.Random, victim: AgentProcess) -> None:
        job_id = await self._at_work(number, victim, dice)
        blame: dict[tuple[str, int], set[Cause]] = {}
        if fate == "hub":
            self._fleet.hub.signal(signal.SIGSTOP)
            await asyncio.sleep(LEASE_S * dice.uniform(1.2, 2.0))
            self._fleet.hub.signal(signal.SIGCONT)
        else:
            victim.signal_host(signal.SIGSTOP)
            if fate == "short":
                await asyncio.sleep(LEASE_S * SHORT)
            else:
                blame[job_id, 1] = {Cause.HOST_LOST}
                await until(lambda: self._has(job_id, "job.expired"), WAITS_S, "the lease of a frozen host runs out")
                await asyncio.sleep(dice.uniform(0.0, 2.0))
            victim.signal_host(signal.SIGCONT)
        await self._check(number, fate, job_id, hosts=[victim], blame=blame)
        if fate == "unclaimed" and not self._has(job_id, "job.revived"):
            self.tally.problems.append(f"trial {number}: the job was not revived")

    def _has(self, job_id: str, kind: str) -> bool:
        return any(event.kind == kind for event in self._operator.events(job_id))

    async def _check(
        self, number: int, fate: Fate, job_id: str, *, hosts: list[AgentProcess], blame: books.Blame
    ) -> None:
        """The job is complete, by the last of these hosts, and no other had it."""
        found = await self._fleet.over(job_id)
        seen = await self._fleet.ask(lambda: books.gather(self._operator, found))
        problems = books.problems(seen, self._fleet.plan, blame)
        had = [each.host_id for each in seen.attempts]
        if had != [host.host_id for host in hosts]:
            problems.append(f"{len(had)} attempts instead of {len(hosts)}")
        self.tally.problems += [f"trial {number}, {fate}: {problem}" for problem in problems]
        await until(lambda: all(host.idle() for host in self._fleet.hosts), WAITS_S, "all hosts are done")


async def _all(trials: Trials, fleet: Fleet, ask: CampaignRequest, tell: Callable[[Tally], None]) -> None:
    await fleet.start()
    fates = islice(cycle(FATES), ask.first % len(FATES), None)
    for number, fate in zip(range(ask.first, ask.first + ask.times), fates, strict=False):
        await trials.run(number, fate)
        tell(trials.tally)
        if trials.tally.problems:
            return
    trials.tally.problems += await fleet.left_behind()


async def run(ask: CampaignRequest, tell: OnProgress, plan: Plan | None = None) -> CampaignResult:
    fleet = Fleet(ask, plan or Plan(), hosts=2, slots=1, lease_s=LEASE_S)
    trials = Trials(fleet, ask.first)
    try:
        await _all(trials, fleet, ask, lambda tally: tell(tally.result()))
    except TimeoutError as error:
        trials.tally.problems.append(str(error))
    finally:
        trials.tally.problems += fleet.crashes
        fleet.hub.signal(signal.SIGCONT)
        await fleet.close()
    return trials.tally.result()
