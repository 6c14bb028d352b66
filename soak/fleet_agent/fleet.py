"""A fleet to hurt: one hub, its operator, some hosts, and jobs whose every trace can be foretold."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from soak.fleet_agent.counting.train import after, last_words, said, weights
from soak.fleet_agent.processes import AgentProcess, is_alive, until
from soak.hub_process import READY_S, HubProcess
from soak.trials import CampaignRequest
from strata.fleet import wire
from strata.fleet.client import HubClient
from strata.fleet.core.job import TERMINAL
from strata.fleet.core.jobspec import JobSpec, TrainerSpec

T = TypeVar("T")

COUNTING: Final = Path(__file__).with_name("counting")
FINISH_S: Final = 180.0
_PAGE: Final = 4 * 1024 * 1024


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What each job does."""

    steps: int = 16
    lines: int = 20
    every: int = 4
    """Steps between checkpoints."""
    pace_s: float = 0.12
    tail: int = 3_000

    def log(self, begin: int) -> str:
        """All that a child says that begins at this step and ends well."""
        middle = "".join(said(step, self.lines) for step in range(begin, self.steps))
        return f"begins at {begin}\n{middle}{last_words(self.tail)}"

    def states(self, seed: int) -> list[int]:
        """Before the first step, after it, and so on."""
        found = [seed]
        for step in range(self.steps):
            found.append(after(found[-1], step))
        return found

    def files(self, seed: int) -> dict[str, bytes]:
        last = self.states(seed)[-1]
        return {**weights(seed, last), "result.json": f"[{self.steps}, {last}]".encode()}


class Operator:
    """Looks at the hub and tells it what to do; blocking."""

    def __init__(self, hub: HubProcess, plan: Plan, marks: Path) -> None:
        self._hub = hub
        self._plan = plan
        self.marks = marks
        self._client: HubClient | None = None

    @property
    def client(self) -> HubClient:
        if self._client is None:
            self._client = self._hub.operator()
        return self._client

    def close(self) -> None:
        if self._client is not None:
            self._client.close()

    def enrol(self, host: AgentProcess) -> None:
        body = wire.LocalHostRequest(name=host.name)
        host.enrol(self._hub.address, self.client.call("POST", "/v1/hosts/local", wire.LocalHostReply, body=body))

    def submit(self, seed: int) -> str:
        plan = self._plan
        trainer = TrainerSpec(name="counting", command=("python", "train.py"), directory=str(COUNTING))
        settings = {name: getattr(plan, name) for name in plan.__struct_fields__}
        spec = JobSpec(
            model="counting",
            hyper={**settings, "marks": str(self.marks)},
            seed=seed,
            trainer=trainer.name,
            max_attempts=1000,
            max_lost=1000,
        )
        body = wire.SubmitRequest(spec=spec, trainer=trainer)
        return self.client.call("POST", "/v1/jobs", wire.SubmitReply, body=body).job.id

    def job(self, job_id: str) -> wire.JobReply:
        return self.client.call("GET", f"/v1/job/{job_id}", wire.JobReply)

    def jobs(self) -> Sequence[wire.Job]:
        """Those that are not over."""
        query = wire.JobsQuery(status=("pending", "claimed", "running"), limit=1000)  # type: ignore[arg-type]
        return self.client.call("GET", "/v1/jobs", wire.JobsReply, query=query).jobs

    def attempt(self, job_id: str, epoch: int) -> wire.JobAttempt:
        return next(each for each in self.job(job_id).attempts if each.epoch == epoch)

    def hosts(self) -> dict[str, wire.Host]:
        found = self.client.call("GET", "/v1/workers", wire.HostsReply).hosts
        return {host.id: host for host in found}

    def order(self, host: AgentProcess, what: str) -> None:
        """`pause` or `resume` a host."""
        body = wire.HostStateRequest(reason="a trial")
        self.client.call("POST", f"/v1/host/{host.host_id}/{what}", wire.Host, body=body)

    def cancel(self, job_id: str) -> None:
        body = wire.CancelRequest(reason="a trial")
        self.client.call("POST", f"/v1/job/{job_id}/cancel", wire.Job, body=body)

    def stream(self, job_id: str, epoch: int, name: str) -> bytes:
        whole = b""
        while True:
            query = wire.StreamQuery(attempt=epoch, offset=len(whole), limit=_PAGE)
            piece = self.client.fetch(f"/v1/job/{job_id}/{name}", query=query).content
            whole += piece
            if not piece:
                return whole

    def events(self, job_id: str) -> list[wire.FeedEvent]:
        found: list[wire.FeedEvent] = []
        cursor = ""
        while True:
            query = wire.EventsQuery(after=cursor, subject=job_id, limit=1000)
            page = self.client.call("GET", "/v1/events", wire.EventsReply, query=query)
            found += page.events
            if len(page.events) < 1000:
                return found
            cursor = page.cursor

    def files(self, artifact: str) -> dict[str, bytes]:
        manifest = self.client.call("GET", f"/v1/artifact/{artifact}", wire.ArtifactReply).manifest
        return {each.path: self.file(artifact, each.path) for each in manifest.files}

    def file(self, artifact: str, path: str) -> bytes:
        query = wire.FileQuery(path=path)
        return self.client.fetch(f"/v1/artifact/{artifact}/file", query=query).content


class Fleet:
    """All processes of a campaign, and the end of each of them."""

    def __init__(self, ask: CampaignRequest, plan: Plan, *, hosts: int, slots: int, lease_s: float) -> None:
        self.plan = plan
        self.lease_s = lease_s
        self.hub = HubProcess(ask.folder, database=ask.url, settings={"STALE_AFTER_S": str(lease_s), "DRAIN_S": "1"})
        self.hosts = [AgentProcess(ask.folder, f"host-{number}", slots) for number in range(hosts)]
        marks = ask.folder / "marks"
        marks.mkdir()
        self.operator = Operator(self.hub, plan, marks)

    async def start(self) -> None:
        await self.hub.start()
        if await self.hub.ready() is None:
            raise TimeoutError(f"the hub does not start: {self.hub.log}")
        for host in self.hosts:
            await asyncio.to_thread(self.operator.enrol, host)
            await host.start()
        for host in self.hosts:
            await self.seen(host, 0.0)

    async def ask(self, call: Callable[[], T]) -> T:
        """Of the operator; again while the hub is away."""
        found = await until(lambda: (call(),), READY_S, "the hub answers its operator")
        return found[0]

    async def held(self, host: AgentProcess) -> set[tuple[str, int]]:
        """Job and epoch of what the hub says this host has."""
        open_jobs = await self.ask(self.operator.jobs)
        return {(job.id, job.epoch) for job in open_jobs if job.host_id == host.host_id}

    async def seen(self, host: AgentProcess, since_s: float) -> float:
        """When the hub first heard of a host after this moment, by the hub's wall clock."""

        def heard() -> float:
            known = self.operator.hosts().get(host.host_id)
            return known.seen_at_s if known is not None and known.seen_at_s > since_s else 0.0

        return await until(lambda: host_ended(host) or heard(), READY_S, f"the hub hears of {host.name}")

    async def over(self, job_id: str) -> wire.JobReply:
        """The job, when it is."""

        def look() -> wire.JobReply | None:
            found = self.operator.job(job_id)
            return found if found.job.status in TERMINAL else None

        return await until(look, FINISH_S, f"{job_id} is over")

    async def left_behind(self) -> list[str]:
        """Hosts that keep something of jobs that are all over."""
        problems = []
        for host in self.hosts:
            try:
                await until(lambda host=host: host.idle() and not host.processes(), 30.0, "idle")  # type: ignore[misc]
            except TimeoutError:
                alive = [pid for pid in host.processes() if is_alive(pid)]
                problems.append(f"{host.name} keeps attempts or processes {alive} of jobs that are over")
        return problems

    @property
    def crashes(self) -> list[str]:
        return [*self.hub.crashes, *(crash for host in self.hosts for crash in host.crashes)]

    async def close(self) -> None:
        self.operator.close()
        for host in self.hosts:
            await host.close()
        await self.hub.close()


def host_ended(host: AgentProcess) -> float:
    """Nobody waits to hear of a process that is gone."""
    return 0.0 if host.runs else -1.0
