"""Orders in which a fleet is upgraded, and goes back: hubs, agents and clients of two versions, with jobs that run on.

Every step is a SIGKILL of a process and its start by the version that the step names. All jobs that were submitted
meanwhile are compared with their expected state.
"""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

from soak.fleet_agent import expected_state
from soak.fleet_agent.fleet import Fleet, Plan
from soak.fleet_agent.processes import AgentProcess
from soak.fleet_hub.two_hubs import Person
from soak.hub_process import HubProcess
from soak.trees import CURRENT, Tree
from soak.trials import CampaignRequest, while_running
from strata.fleet.wire.identities import LocalHostReply, LocalHostRequest
from strata.hub.compose import TOKEN_FILE

PLAN: Final = Plan(steps=8, lines=5, every=4, tail=200)
SLOTS: Final = 2
LEASE_S: Final = 120.0
"""Longer than any process is away: no step may cost an attempt."""
FEED_S: Final = 0.3
Step = tuple[str, str]
"""A part, and the version that is started in its place."""
OLD: Final = "old"
NEW: Final = "new"
ORDERS: Final[Mapping[str, Sequence[Step]]] = {
    "the hub, then the agents": (("hub", NEW), ("host-0", NEW), ("host-1", NEW)),
    "the agents, then the hub": (("host-0", NEW), ("host-1", NEW), ("hub", NEW)),
    "the hub between the agents": (("host-0", NEW), ("hub", NEW), ("hub", NEW), ("host-1", NEW)),
    "the hub and back": (("hub", NEW), ("hub", OLD)),
    "the agents and back": (("hub", NEW), ("host-0", NEW), ("host-1", NEW), ("host-0", OLD), ("host-1", OLD)),
}
ORDERS_OF_TWO_HUBS: Final[Mapping[str, Sequence[Step]]] = {
    "one hub of two, then the other": (("second", NEW), ("host-1", NEW), ("hub", NEW), ("host-0", NEW)),
    "one hub of two and back": (("second", NEW), ("hub", NEW), ("hub", OLD), ("second", OLD)),
}
NEWER_SCHEMA: Final = "of a newer version; this version reads"
"""In the log of a hub that refuses tables of a later version."""

_ENROL: Final = """
import sys
from pathlib import Path
from strata.base.secret import Secret
from strata.fleet.agent.identity import save_local
state, url, host_id, name = sys.argv[1:]
save_local(Path(state), url, host_id=host_id, name=name, secret=Secret(sys.stdin.read()))
"""


@dataclass
class UpgradeOutcome:
    jobs: int = 0
    attempts: int = 0
    refused: list[str] = field(default_factory=list)
    """Parts whose older version refused in words to go back."""
    problems: list[str] = field(default_factory=list)


class MixedFleet:
    """A fleet whose parts all run the older version first."""

    def __init__(self, request: CampaignRequest, older: Tree, *, hubs: int) -> None:
        shared = {"SHARED": str(request.folder / "shared")} if hubs > 1 else {}
        self.fleet = Fleet(request, PLAN, hosts=2, slots=SLOTS, lease_s=LEASE_S, hub=shared)
        self.hubs = {"hub": self.fleet.hub}
        if hubs > 1:
            folder = request.folder / "second"
            folder.mkdir()
            settings = {"STALE_AFTER_S": str(LEASE_S), "DRAIN_S": "1", **shared}
            self.hubs["second"] = HubProcess(folder, database=request.url, settings=settings)
        self.hosts = {host.name: host for host in self.fleet.hosts}
        self._trees = {OLD: older, NEW: CURRENT}
        self._jobs: list[str] = []
        self._numbers = itertools.count()
        self.outcome = UpgradeOutcome()

    async def start(self, hub_version: str) -> None:
        for hub in self.hubs.values():
            hub.tree = self._trees[hub_version]
        for host in self.hosts.values():
            host.tree = self._trees[OLD]
        for hub in self.hubs.values():
            await hub.first_start()
        # The last host is the last hub's.
        addresses = [self.fleet.hub.address, [*self.hubs.values()][-1].address]
        for host, address in zip(self.hosts.values(), addresses, strict=True):
            await asyncio.to_thread(self._enrol, host, address)
            await host.start()
        for host in self.hosts.values():
            await self.fleet.wait_seen(host, 0.0)

    def _enrol(self, host: AgentProcess, address: str) -> None:
        """By the older version, because an older agent may not read the files of a newer one."""
        client = self.fleet.operator.client
        body = LocalHostRequest(name=host.name)
        made = client.call("POST", "/v1/hosts/local", LocalHostReply, body=body)
        host.host_id = made.host_id
        command = [host.tree.python, "-c", _ENROL, str(host.state), address, host.host_id, host.name]
        environ = {"PYTHONPATH": host.tree.python_path}
        subprocess.run(command, input=made.secret, text=True, cwd=host.tree.root, env=environ, check=True)

    async def run(self, order: Sequence[Step]) -> None:
        enough = asyncio.Event()
        feeding = asyncio.create_task(self._keep_queue_filled(enough))
        try:
            for name, version in order:
                await while_running([feeding], self._step(name, version))
        finally:
            # Not cancelled: the hub may have a job whose submission was.
            enough.set()
            await feeding

    async def compare(self) -> None:
        """Without more steps all jobs end, each as an undisturbed run of it would."""
        operator, outcome = self.fleet.operator, self.outcome
        for job_id in self._jobs:
            found = await self.fleet.wait_ended(job_id)
            evidence = await asyncio.to_thread(expected_state.gather_evidence, operator, found)
            outcome.problems += expected_state.find_problems(evidence, PLAN, {})
            outcome.attempts += len(evidence.attempts)
        outcome.jobs = len(self._jobs)
        outcome.problems += await self.fleet.find_leftovers()
        outcome.problems += [crash for hub in self.hubs.values() for crash in hub.crashes]
        outcome.problems += [crash for host in self.hosts.values() for crash in host.crashes]

    async def close(self) -> None:
        await self.fleet.close()
        for hub in self.hubs.values():
            await hub.close()

    async def _step(self, name: str, version: str) -> None:
        if name in self.hubs:
            await self._replace_hub(self.hubs[name], name, version)
        else:
            await self._replace_agent(self.hosts[name], version)
        # A job that is submitted after the step shows that the fleet works.
        await self.fleet.wait_ended(await self.submit())

    async def _replace_hub(self, hub: HubProcess, name: str, version: str) -> None:
        await hub.kill()
        hub.tree = self._trees[version]
        await hub.start()
        if await hub.ready() is not None:
            return
        words = hub.log.read_text("utf-8")
        if version == NEW or NEWER_SCHEMA not in words:
            raise RuntimeError(f"the {version} {name} does not start, and no refusal says why: {hub.log}")
        self.outcome.refused.append(name)
        await hub.died()
        hub.crashes.clear()
        hub.tree = CURRENT
        await hub.first_start()

    async def _replace_agent(self, host: AgentProcess, version: str) -> None:
        await host.kill()
        host.tree = self._trees[version]
        since_s = time.time()
        await host.start()
        await self.fleet.wait_seen(host, since_s)

    async def submit(self) -> str:
        number = next(self._numbers)
        job_id = await self.fleet.call(lambda: self.fleet.operator.submit(number))
        self._jobs.append(job_id)
        return job_id

    async def _keep_queue_filled(self, enough: asyncio.Event) -> None:
        while not enough.is_set():
            waiting = len(self.hosts) * SLOTS - len(await self.fleet.call(self.fleet.operator.jobs))
            for _ in range(waiting):
                await self.submit()
            await asyncio.sleep(FEED_S)


@asynccontextmanager
async def mixed_fleet(
    request: CampaignRequest, older: Tree, *, hubs: int = 1, hub_version: str = OLD
) -> AsyncIterator[MixedFleet]:
    fleet = MixedFleet(request, older, hubs=hubs)
    try:
        await fleet.start(hub_version)
        yield fleet
    finally:
        await fleet.close()


async def run_order(request: CampaignRequest, older: Tree, order: Sequence[Step], *, hubs: int = 1) -> UpgradeOutcome:
    async with mixed_fleet(request, older, hubs=hubs) as fleet:
        await fleet.run(order)
        await fleet.compare()
    return fleet.outcome


async def run_commands(request: CampaignRequest, older: Tree, *, hub_version: str) -> UpgradeOutcome:
    """Every command that people use, by a client that has not the hub's version."""
    client = older if hub_version == NEW else CURRENT
    async with mixed_fleet(request, older, hub_version=hub_version) as fleet:
        hub, job_id = fleet.hubs["hub"], await fleet.submit()
        person = Person(request.folder / "anna", hub.address, client.program)
        await person.run("login", hub.address, "--name", "lab", "--token-file", str(hub.files / TOKEN_FILE))
        for words in person.every_command(job_id, 0):
            await person.run(*words)
        await fleet.compare()
    return fleet.outcome
