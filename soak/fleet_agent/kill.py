"""Kill agents, children, supervisors, whole hosts and the hub, repeatedly under running jobs; nothing may be lost.

About every second trial kills a process at a failpoint, where it has just changed something; the others kill it from
outside at a random moment. All processes are restarted at once, except a dead host: it stays away until other hosts
have its jobs. Every job that has ended is compared with its expected state (`expected_state`).
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

from soak.fleet_agent import expected_state
from soak.fleet_agent.fleet import Fleet, Plan
from soak.fleet_agent.outcome import LEASE_S, KillOutcome
from soak.fleet_agent.process_kills import EARLY, WAITS_S, ProcessKiller
from soak.fleet_agent.processes import AgentProcess, failpoints, wait_until
from soak.hub_process import ArmedFailpoint
from soak.trials import CampaignRequest, CampaignResult, OnProgress, seeded_random
from strata.fleet.core.job import TERMINAL, Cause, JobStatus

SLOTS: Final = 2
AWAY: Final = 0.35
"""The part of a lease for which a killed agent stays away, in some trials."""
HUB_AWAY: Final = 1.2
"""The same for the hub: all leases are too old when it starts."""
FIRES_S: Final = 12.0
"""A failpoint that was not reached by then is replaced by a kill from outside."""
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


class KillCampaign:
    def __init__(self, fleet: Fleet, first: int, times: int) -> None:
        self._fleet = fleet
        self._operator = fleet.operator
        self._first = first
        self._times = times
        self._open: set[str] = set()
        self._cancelled: set[str] = set()
        self._seed = first * 1000
        agents, hubs = failpoints("fleet/agent"), failpoints("fleet", "database")
        hubs = [name for name in hubs if name.startswith(_HUB) and not name.endswith(_NOT_ON_THE_WAY)]
        self._agent_names = islice(cycle(agents), first % len(agents), None)
        self._hub_names = islice(cycle(hubs), first % len(hubs), None)
        self.outcome = KillOutcome()
        self._kills = kills = ProcessKiller(fleet, self.outcome)
        self._trials: dict[str, Callable[[random.Random], Awaitable[None]]] = {
            "agent": kills.kill_agent,
            "away": lambda dice: kills.kill_agent(dice, LEASE_S * AWAY),
            "failpoint": self._kill_agent_at_a_failpoint,
            "child": lambda dice: kills.kill_child(dice, "child"),
            "supervisor": lambda dice: kills.kill_child(dice, "supervisor"),
            "host": self._kill_host,
            "hub": kills.kill_hub,
            "hub away": lambda dice: kills.kill_hub(dice, LEASE_S * HUB_AWAY),
            "hub failpoint": self._kill_hub_at_a_failpoint,
            "both": kills.kill_agent_and_hub,
        }

    async def run(self, on_progress: Callable[[KillOutcome], None]) -> KillOutcome:
        outcome = self.outcome
        try:
            await self._fleet.start()
            await self._run_trials(on_progress)
            if not outcome.problems:
                await self._drain()
        except TimeoutError as error:
            outcome.problems.append(str(error))
        finally:
            outcome.problems += self._fleet.crashes
            await self._fleet.close()
        return outcome

    async def _run_trials(self, on_progress: Callable[[KillOutcome], None]) -> None:
        tasks = [asyncio.create_task(self._inject_faults(on_progress)), asyncio.create_task(self._keep_queue_filled())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _inject_faults(self, on_progress: Callable[[KillOutcome], None]) -> None:
        outcome = self.outcome
        while outcome.kills < self._times and not outcome.problems:
            number = self._first + outcome.trials
            kind = KINDS[number % len(KINDS)]
            outcome.trials += 1
            try:
                await self._trials[kind](seeded_random(number))
            except TimeoutError as error:
                raise TimeoutError(f"trial {number}, {kind}: {error}") from error
            await self._check_ended_jobs()
            on_progress(outcome)

    # Jobs

    async def _keep_queue_filled(self) -> None:
        """Submit jobs so that the hosts never run out of them."""
        fleet = self._fleet
        while True:
            waiting = len(fleet.hosts) * SLOTS - 1 - len(await fleet.call(self._operator.jobs))
            for _ in range(waiting):
                self._seed += 1
                self._open.add(await fleet.call(lambda: self._operator.submit(self._seed)))
            await self._kills.resume_quarantined()
            await asyncio.sleep(FEED_S)

    async def _check_ended_jobs(self) -> None:
        """Compare the jobs that have ended with their expected state."""
        for job_id in sorted(self._open):
            found = await self._fleet.call(lambda job_id=job_id: self._operator.job(job_id))  # type: ignore[misc]
            if found.job.status not in TERMINAL:
                continue
            self._open.remove(job_id)
            if found.job.status is JobStatus.CANCELLED and job_id in self._cancelled:
                continue
            seen = await self._fleet.call(lambda found=found: expected_state.gather_evidence(self._operator, found))  # type: ignore[misc]
            outcome = self.outcome
            outcome.problems += expected_state.find_problems(seen, self._fleet.plan, self._kills.allowed_causes)
            outcome.jobs += 1
            outcome.attempts += len(seen.attempts)
            outcome.log_bytes += sum(map(len, seen.logs.values()))

    async def _drain(self) -> None:
        """Without more faults all jobs end, and hosts keep nothing of them."""
        for job_id in sorted(self._open):
            await self._fleet.wait_ended(job_id)
        await self._check_ended_jobs()
        self.outcome.problems += await self._fleet.find_leftovers()
        events = ("attempt_report_refused", "lease_lost")
        self.outcome.dropped = sum(host.logged_count(event) for host in self._fleet.hosts for event in events)

    # Victims

    async def _kill_agent_at_a_failpoint(self, dice: random.Random) -> None:
        """Kill from outside first, so that the agent that dies at the failpoint has attempts to resume."""
        name = next(self._agent_names)
        host, _ = await self._kills.busy_host(dice)
        silent_s = await host.kill()
        self.outcome.killed("agents")
        held = await self._fleet.held_attempts(host)
        await host.start(_arm(name, dice))
        if name.startswith((_FAILS, _STOPS)):
            await self._provoke_failure(host, name)
        began_s = time.time()
        if await host.died(FIRES_S):
            self.outcome.killed("agents", name)
        else:
            await host.kill()
            self.outcome.killed("agents")
        if time.time() - began_s > LEASE_S / 2:
            # It lived long enough to renew its leases; else they are as old as the first kill.
            silent_s = time.time()
        held |= await self._fleet.held_attempts(host)
        await host.start()
        await self._kills.expect_back(host, silent_s, held)

    async def _provoke_failure(self, host: AgentProcess, name: str) -> None:
        """Make a job of this host fail, or cancel it."""
        seen = await wait_until(lambda: host.children() or not host.is_running, WAITS_S, "the host has a job")
        if not isinstance(seen, list):
            return
        child = seen[0]
        if name.startswith(_FAILS):
            self._kills.allow({(child.job_id, child.epoch)}, Cause.OOM)
            with suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)
            self.outcome.killed("children")
        else:
            self._cancelled.add(child.job_id)
            await self._fleet.call(lambda: self._operator.cancel(child.job_id))

    async def _kill_host(self, dice: random.Random) -> None:
        """Kill agent, supervisors and children. The host returns when others have its jobs, and is then rejected."""
        host, _ = await self._kills.busy_host(dice)
        killed_s = await host.kill_host()
        self.outcome.killed("hosts")
        held = await self._fleet.held_attempts(host)
        self._kills.allow(held, Cause.HOST_LOST)
        for job_id, epoch in sorted(held):

            def taken(job_id: str = job_id, epoch: int = epoch) -> bool:
                job = self._operator.job(job_id).job
                return job.epoch > epoch or job.status in TERMINAL

            await wait_until(taken, WAITS_S, "another host has the job of a dead one")
            await self._check_expiry_time(job_id, epoch, killed_s)
        await host.start()
        await self._fleet.wait_seen(host, time.time())

    async def _check_expiry_time(self, job_id: str, epoch: int, killed_s: float) -> None:
        events = await self._fleet.call(lambda: self._operator.events(job_id))
        for event in events:
            if event.kind == "job.expired" and event.body["epoch"] == epoch:
                after_s = event.at_s - killed_s
                self.outcome.claimable_s.append(after_s - LEASE_S)
                if after_s < LEASE_S * EARLY:
                    self.outcome.problems.append(f"{job_id}: a lease of {LEASE_S:g} s ran out after {after_s:.1f} s")

    async def _kill_hub_at_a_failpoint(self, dice: random.Random) -> None:
        name, hub = next(self._hub_names), self._fleet.hub
        await self._kills.busy_host(dice)
        await hub.kill()
        self.outcome.killed("hubs")
        await hub.start(_arm(name, dice))
        if await hub.died(FIRES_S) is not None:
            self.outcome.killed("hubs", name)
        else:
            await hub.kill()
            self.outcome.killed("hubs")
        await self._kills.start_hub()


def _arm(name: str, dice: random.Random) -> ArmedFailpoint:
    most = next((most for start, most in _MOST_SKIPPED.items() if name.startswith(start)), 0)
    return ArmedFailpoint(name, dice.randint(0, most))


async def run(request: CampaignRequest, on_progress: OnProgress, plan: Plan | None = None) -> CampaignResult:
    fleet = Fleet(request, plan or Plan(), hosts=request.workers, slots=SLOTS, lease_s=LEASE_S)
    campaign = KillCampaign(fleet, request.first, request.times)
    return (await campaign.run(lambda outcome: on_progress(outcome.result()))).result()
