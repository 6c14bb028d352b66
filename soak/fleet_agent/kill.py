"""Kill agents, children, supervisors, whole hosts and the hub, again and again under jobs at work; nothing may be lost.

Every second trial or so ends a process at a failpoint, where it has just changed something; the others come from
outside at a random moment. All processes start again at once, except a host that is dead: that one stays away until
others have its jobs. Every job that is over is compared with what it should be (`books`).
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import cycle, islice
from typing import Final

from soak.fleet_agent import books
from soak.fleet_agent.fleet import Fleet, Plan
from soak.fleet_agent.outcome import LEASE_S, Outcome
from soak.fleet_agent.processes import AgentProcess, Child, failpoints, until
from soak.hub_process import ArmedFailpoint
from soak.trials import CampaignRequest, CampaignResult, OnProgress, seeded_random
from strata.fleet.core.job import TERMINAL, Cause, JobStatus

SLOTS: Final = 2
AWAY: Final = 0.35
"""The part of a lease for which nobody starts a killed agent again, in some trials."""
HUB_AWAY: Final = 1.2
"""The same for the hub: all leases are too old when it starts."""
EARLY: Final = 0.7
"""A lease is renewed four times in its term, so it may run out this part of it after the death of its host."""
FIRES_S: Final = 12.0
"""A failpoint that was not reached by then is replaced by a kill from outside."""
WAITS_S: Final = 60.0
FEED_S: Final = 0.3
KINDS: Final = (
    *("failpoint", "child", "agent", "hub failpoint", "failpoint", "host", "failpoint", "supervisor"),
    *("hub", "failpoint", "away", "child", "failpoint", "both", "hub away"),
)
_FAILS: Final = "agent.fail."
_STOPS: Final = "agent.stop."
_HUB: Final = ("fleet.streams.written", "database.sqlite.", "artifacts.service.", "artifacts.disk.")
_NOT_ON_THE_WAY: Final = ("upgrade", "quarantine", "adopted")
_MOST_SKIPPED: Final = {"agent.ship.sent": 8, "agent.upload.chunk": 3, "database.sqlite.": 40, "fleet.streams": 20}


class Campaign:
    def __init__(self, fleet: Fleet, first: int, times: int) -> None:
        self._fleet = fleet
        self._operator = fleet.operator
        self._first = first
        self._times = times
        self._open: set[str] = set()
        self._cancelled: set[str] = set()
        self._seed = first * 1000
        self._blame: dict[tuple[str, int], set[Cause]] = {}
        agents, hubs = failpoints("fleet/agent"), failpoints("fleet", "database")
        hubs = [name for name in hubs if name.startswith(_HUB) and not name.endswith(_NOT_ON_THE_WAY)]
        self._agent_names = islice(cycle(agents), first % len(agents), None)
        self._hub_names = islice(cycle(hubs), first % len(hubs), None)
        self.outcome = Outcome()
        self._trials: dict[str, Callable[[random.Random], Awaitable[None]]] = {
            "agent": self._kill_agent,
            "away": lambda dice: self._kill_agent(dice, LEASE_S * AWAY),
            "failpoint": self._kill_agent_at_a_failpoint,
            "child": lambda dice: self._kill_child(dice, "child"),
            "supervisor": lambda dice: self._kill_child(dice, "supervisor"),
            "host": self._kill_host,
            "hub": self._kill_hub,
            "hub away": lambda dice: self._kill_hub(dice, LEASE_S * HUB_AWAY),
            "hub failpoint": self._kill_hub_at_a_failpoint,
            "both": self._kill_both,
        }

    async def run(self, tell: Callable[[Outcome], None]) -> Outcome:
        outcome = self.outcome
        try:
            await self._fleet.start()
            await self._hurt_and_feed(tell)
            if not outcome.problems:
                await self._drain()
        except TimeoutError as error:
            outcome.problems.append(str(error))
        finally:
            outcome.problems += self._fleet.crashes
            await self._fleet.close()
        return outcome

    async def _hurt_and_feed(self, tell: Callable[[Outcome], None]) -> None:
        tasks = [asyncio.create_task(self._hurt(tell)), asyncio.create_task(self._feed())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _hurt(self, tell: Callable[[Outcome], None]) -> None:
        outcome = self.outcome
        while outcome.kills < self._times and not outcome.problems:
            number = self._first + outcome.trials
            kind = KINDS[number % len(KINDS)]
            outcome.trials += 1
            try:
                await self._trials[kind](seeded_random(number))
            except TimeoutError as error:
                raise TimeoutError(f"trial {number}, {kind}: {error}") from error
            await self._settle()
            tell(outcome)

    # Jobs

    async def _feed(self) -> None:
        """Never let the hosts run out of jobs."""
        fleet = self._fleet
        while True:
            waiting = len(fleet.hosts) * SLOTS - 1 - len(await fleet.ask(self._operator.jobs))
            for _ in range(waiting):
                self._seed += 1
                self._open.add(await fleet.ask(lambda: self._operator.submit(self._seed)))
            await self._pardon()
            await asyncio.sleep(FEED_S)

    async def _pardon(self) -> None:
        """Waiters of several jobs were killed on one host, which looks like a broken one."""
        hosts = await self._fleet.ask(self._operator.hosts)
        for host in self._fleet.hosts:
            if hosts[host.host_id].state == "quarantined":
                await self._fleet.ask(lambda host=host: self._operator.order(host, "resume"))  # type: ignore[misc]

    async def _settle(self) -> None:
        """Compare what is over."""
        for job_id in sorted(self._open):
            found = await self._fleet.ask(lambda job_id=job_id: self._operator.job(job_id))  # type: ignore[misc]
            if found.job.status not in TERMINAL:
                continue
            self._open.remove(job_id)
            if found.job.status is JobStatus.CANCELLED and job_id in self._cancelled:
                continue
            seen = await self._fleet.ask(lambda found=found: books.gather(self._operator, found))  # type: ignore[misc]
            outcome = self.outcome
            outcome.problems += books.problems(seen, self._fleet.plan, self._blame)
            outcome.jobs += 1
            outcome.attempts += len(seen.attempts)
            outcome.log_bytes += sum(map(len, seen.logs.values()))

    async def _drain(self) -> None:
        """Nobody is hurt any more: all jobs end, and hosts keep nothing of them."""
        for job_id in sorted(self._open):
            await self._fleet.over(job_id)
        await self._settle()
        self.outcome.problems += await self._fleet.left_behind()
        refused = ("attempt_report_refused", "lease_lost")
        self.outcome.dropped = sum(host.said(words) for host in self._fleet.hosts for words in refused)

    # Victims

    async def _busy(self, dice: random.Random) -> tuple[AgentProcess, Child]:
        """A host whose child runs, at a random moment of it."""

        def look() -> list[tuple[AgentProcess, Child]]:
            return [(host, child) for host in self._fleet.hosts for child in host.children()]

        await until(look, WAITS_S, "a child runs")
        await asyncio.sleep(dice.uniform(0.0, 1.5))
        return dice.choice(await until(look, WAITS_S, "a child runs"))

    async def _kill_agent(self, dice: random.Random, away_s: float = 0.0) -> None:
        host, _ = await self._busy(dice)
        killed_s = await host.kill()
        self.outcome.killed("agents")
        held = await self._fleet.held(host)
        await asyncio.sleep(away_s)
        await host.start()
        await self._is_back(host, killed_s, held)

    async def _is_back(self, host: AgentProcess, silent_s: float, held: set[tuple[str, int]]) -> None:
        """A host that was away for less than its lease loses nothing; after longer it may."""
        away_s = await self._fleet.seen(host, time.time()) - silent_s
        self.outcome.back_s.append(away_s)
        if away_s < LEASE_S * EARLY:
            self.outcome.kept += len(held)
        else:
            self.outcome.slow += 1
            self._blamed(held, Cause.HOST_LOST)

    def _blamed(self, attempts: set[tuple[str, int]], *causes: Cause) -> None:
        for attempt in attempts:
            self._blame.setdefault(attempt, set()).update(causes)

    async def _kill_agent_at_a_failpoint(self, dice: random.Random) -> None:
        """From outside first, so that the one to die at the failpoint has something to go on with."""
        name = next(self._agent_names)
        host, _ = await self._busy(dice)
        silent_s = await host.kill()
        self.outcome.killed("agents")
        held = await self._fleet.held(host)
        await host.start(_arm(name, dice))
        if name.startswith((_FAILS, _STOPS)):
            await self._provoke(host, name)
        began_s = time.time()
        if await host.died(FIRES_S):
            self.outcome.killed("agents", name)
        else:
            await host.kill()
            self.outcome.killed("agents")
        if time.time() - began_s > LEASE_S / 2:
            # It lived long enough to renew its leases; else they are as old as the first kill.
            silent_s = time.time()
        held |= await self._fleet.held(host)
        await host.start()
        await self._is_back(host, silent_s, held)

    async def _provoke(self, host: AgentProcess, name: str) -> None:
        """Let something go wrong with a job of this host."""
        seen = await until(lambda: host.children() or not host.runs, WAITS_S, "the host has a job")
        if not isinstance(seen, list):
            return
        child = seen[0]
        if name.startswith(_FAILS):
            self._blamed({(child.job_id, child.epoch)}, Cause.OOM)
            with suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)
            self.outcome.killed("children")
        else:
            self._cancelled.add(child.job_id)
            await self._fleet.ask(lambda: self._operator.cancel(child.job_id))

    async def _kill_child(self, dice: random.Random, what: str) -> None:
        _, child = await self._busy(dice)
        cause, pid = (Cause.OOM, child.pid) if what == "child" else (Cause.INFRA, child.supervisor)
        self._blamed({(child.job_id, child.epoch)}, cause)
        killed_s = time.time()
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        self.outcome.killed("children" if what == "child" else "supervisors")

        def ended() -> object:
            found = self._operator.attempt(child.job_id, child.epoch)
            return found if found.ended_at_s is not None else None

        await until(ended, WAITS_S, f"the hub hears of a dead {what}")
        attempt = await self._fleet.ask(lambda: self._operator.attempt(child.job_id, child.epoch))
        if attempt.cause is cause and attempt.ended_at_s is not None:
            self.outcome.crash_s.append(attempt.ended_at_s - killed_s)

    async def _kill_host(self, dice: random.Random) -> None:
        """Agent, supervisors and children. It comes back when others have its jobs, and is refused."""
        host, _ = await self._busy(dice)
        killed_s = await host.kill_host()
        self.outcome.killed("hosts")
        held = await self._fleet.held(host)
        self._blamed(held, Cause.HOST_LOST)
        for job_id, epoch in sorted(held):

            def taken(job_id: str = job_id, epoch: int = epoch) -> bool:
                job = self._operator.job(job_id).job
                return job.epoch > epoch or job.status in TERMINAL

            await until(taken, WAITS_S, "another host has the job of a dead one")
            await self._was_on_time(job_id, epoch, killed_s)
        await host.start()
        await self._fleet.seen(host, time.time())

    async def _was_on_time(self, job_id: str, epoch: int, killed_s: float) -> None:
        events = await self._fleet.ask(lambda: self._operator.events(job_id))
        for event in events:
            if event.kind == "job.expired" and event.body["epoch"] == epoch:
                after_s = event.at_s - killed_s
                self.outcome.claimable_s.append(after_s - LEASE_S)
                if after_s < LEASE_S * EARLY:
                    self.outcome.problems.append(f"{job_id}: a lease of {LEASE_S:g} s ran out after {after_s:.1f} s")

    async def _kill_hub(self, dice: random.Random, away_s: float = 0.0) -> None:
        """However long it was away: that is no fault of the hosts, and they keep what they have."""
        await self._busy(dice)
        await self._fleet.hub.kill()
        self.outcome.killed("hubs")
        await asyncio.sleep(away_s)
        await self._start_hub()

    async def _start_hub(self) -> None:
        await self._fleet.hub.start()
        await self._fleet.hub.ready()

    async def _kill_hub_at_a_failpoint(self, dice: random.Random) -> None:
        name, hub = next(self._hub_names), self._fleet.hub
        await self._busy(dice)
        await hub.kill()
        self.outcome.killed("hubs")
        await hub.start(_arm(name, dice))
        if await hub.died(FIRES_S) is not None:
            self.outcome.killed("hubs", name)
        else:
            await hub.kill()
            self.outcome.killed("hubs")
        await self._start_hub()

    async def _kill_both(self, dice: random.Random) -> None:
        host, _ = await self._busy(dice)
        killed_s = await host.kill()
        self.outcome.killed("agents")
        await self._fleet.hub.kill()
        self.outcome.killed("hubs")
        await asyncio.gather(self._start_hub(), host.start())
        await self._is_back(host, killed_s, await self._fleet.held(host))


def _arm(name: str, dice: random.Random) -> ArmedFailpoint:
    most = next((most for start, most in _MOST_SKIPPED.items() if name.startswith(start)), 0)
    return ArmedFailpoint(name, dice.randint(0, most))


async def run(ask: CampaignRequest, tell: OnProgress, plan: Plan | None = None) -> CampaignResult:
    fleet = Fleet(ask, plan or Plan(), hosts=ask.workers, slots=SLOTS, lease_s=LEASE_S)
    campaign = Campaign(fleet, ask.first, ask.times)
    return (await campaign.run(lambda outcome: tell(outcome.result()))).result()
