"""Kills processes of a fleet at random moments, and records which attempts may have ended because of it."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Collection
from contextlib import suppress
from typing import Final, Literal

from soak.fleet_agent.fleet import Fleet
from soak.fleet_agent.outcome import KillOutcome
from soak.fleet_agent.processes import AgentProcess, Child, wait_until
from strata.fleet.core.job import Cause

WAITS_S: Final = 60.0
EARLY: Final = 0.7
"""A lease is renewed four times in its term, so it may expire after this part of it since the death of its host."""


class ProcessKiller:
    """All processes are restarted at once, unless a kill is told to keep them away."""

    def __init__(self, fleet: Fleet, outcome: KillOutcome) -> None:
        self._fleet = fleet
        self._operator = fleet.operator
        self.outcome = outcome
        self.allowed_causes: dict[tuple[str, int], set[Cause]] = {}

    def allow(self, attempts: Collection[tuple[str, int]], *causes: Cause) -> None:
        for attempt in attempts:
            self.allowed_causes.setdefault(attempt, set()).update(causes)

    async def busy_host(self, dice: random.Random) -> tuple[AgentProcess, Child]:
        """A host whose child runs, at a random moment of it."""

        def running() -> list[tuple[AgentProcess, Child]]:
            return [(host, child) for host in self._fleet.hosts for child in host.children()]

        await wait_until(running, WAITS_S, "a child runs")
        await asyncio.sleep(dice.uniform(0.0, 1.5))
        return dice.choice(await wait_until(running, WAITS_S, "a child runs"))

    async def kill_agent(self, dice: random.Random, away_s: float = 0.0) -> None:
        host, _ = await self.busy_host(dice)
        killed_s = await host.kill()
        self.outcome.killed("agents")
        held = await self._fleet.held_attempts(host)
        await asyncio.sleep(away_s)
        await host.start()
        await self.expect_back(host, killed_s, held)

    async def expect_back(self, host: AgentProcess, silent_s: float, held: set[tuple[str, int]]) -> None:
        """A host that was away for less than its lease loses nothing; after longer it may."""
        away_s = await self._fleet.wait_seen(host, time.time()) - silent_s
        self.outcome.back_s.append(away_s)
        if away_s < self._fleet.lease_s * EARLY:
            self.outcome.kept += len(held)
        else:
            self.outcome.slow += 1
            self.allow(held, Cause.HOST_LOST)

    async def kill_child(self, dice: random.Random, what: Literal["child", "supervisor"]) -> None:
        _, child = await self.busy_host(dice)
        cause, pid = (Cause.OOM, child.pid) if what == "child" else (Cause.INFRA, child.supervisor)
        self.allow({(child.job_id, child.epoch)}, cause)
        killed_s = time.time()
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        self.outcome.killed("children" if what == "child" else "supervisors")

        def ended() -> object:
            found = self._operator.attempt(child.job_id, child.epoch)
            return found if found.ended_at_s is not None else None

        await wait_until(ended, WAITS_S, f"the hub hears of a dead {what}")
        attempt = await self._fleet.call(lambda: self._operator.attempt(child.job_id, child.epoch))
        if attempt.cause is cause and attempt.ended_at_s is not None:
            self.outcome.crash_s.append(attempt.ended_at_s - killed_s)

    async def kill_hub(self, dice: random.Random, away_s: float = 0.0) -> None:
        """However long the hub was away, the hosts keep their leases."""
        await self.busy_host(dice)
        await self._fleet.hub.kill()
        self.outcome.killed("hubs")
        await asyncio.sleep(away_s)
        await self.start_hub()

    async def start_hub(self) -> None:
        await self._fleet.hub.start()
        await self._fleet.hub.ready()

    async def kill_agent_and_hub(self, dice: random.Random) -> None:
        host, _ = await self.busy_host(dice)
        killed_s = await host.kill()
        self.outcome.killed("agents")
        await self._fleet.hub.kill()
        self.outcome.killed("hubs")
        await asyncio.gather(self.start_hub(), host.start())
        await self.expect_back(host, killed_s, await self._fleet.held_attempts(host))

    async def resume_quarantined(self) -> None:
        """Resume hosts on which supervisors of several jobs were killed: the hub takes such a host for a broken one."""
        hosts = await self._fleet.call(self._operator.hosts)
        for host in self._fleet.hosts:
            if hosts[host.host_id].state == "quarantined":
                await self._fleet.call(lambda host=host: self._operator.order(host, "resume"))  # type: ignore[misc]
