"""A fleet for fault injection: one hub, its operator, some hosts, and jobs with deterministic output."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from soak.fleet_agent.counting.train import after, final_lines, step_lines, weights
from soak.fleet_agent.processes import AgentProcess, is_alive, wait_until
from soak.hub_process import READY_S, HubProcess
from soak.trials import CampaignRequest
from strata.fleet.client.hub_client import HubClient
from strata.fleet.core.job import TERMINAL
from strata.fleet.core.jobspec import JobSpec, TrainerSpec
from strata.fleet.records import JobAttempt
from strata.fleet.wire.artifacts import ArtifactReply, FileQuery
from strata.fleet.wire.events import EventsQuery, EventsReply, FeedEvent
from strata.fleet.wire.hosts import Host, HostsReply, HostStateRequest
from strata.fleet.wire.identities import LocalHostReply, LocalHostRequest
from strata.fleet.wire.jobs import CancelRequest, Job, JobReply, JobsQuery, JobsReply, SubmitReply, SubmitRequest
from strata.fleet.wire.streams import StreamQuery

T = TypeVar("T")

COUNTING: Final = Path(__file__).with_name("counting")
FINISH_S: Final = 180.0
_PAGE: Final = 4 * 1024 * 1024


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters of each job, and the output that follows from them."""

    steps: int = 16
    lines: int = 20
    every: int = 4
    """Steps between checkpoints."""
    pace_s: float = 0.12
    tail: int = 3_000

    def log(self, begin: int) -> str:
        """The complete log of a child that begins at this step."""
        middle = "".join(step_lines(step, self.lines) for step in range(begin, self.steps))
        return f"begins at {begin}\n{middle}{final_lines(self.tail)}"

    def states(self, seed: int) -> list[int]:
        """The states before the first step, after it, and so on."""
        states = [seed]
        for step in range(self.steps):
            states.append(after(states[-1], step))
        return states

    def files(self, seed: int) -> dict[str, bytes]:
        last = self.states(seed)[-1]
        return {**weights(seed, last), "result.json": f"[{self.steps}, {last}]".encode()}


class Operator:
    """The operator's client of the hub; blocking."""

    def __init__(self, connect: Callable[[], HubClient], plan: Plan, marks: Path) -> None:
        self._connect = connect
        self._plan = plan
        self.marks = marks
        self._client: HubClient | None = None

    @property
    def client(self) -> HubClient:
        if self._client is None:
            self._client = self._connect()
        return self._client

    def close(self) -> None:
        if self._client is not None:
            self._client.close()

    def enrol(self, host: AgentProcess, address: str) -> None:
        body = LocalHostRequest(name=host.name)
        host.enrol(address, self.client.call("POST", "/v1/hosts/local", LocalHostReply, body=body))

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
        body = SubmitRequest(spec=spec, trainer=trainer)
        return self.client.call("POST", "/v1/jobs", SubmitReply, body=body).job.id

    def job(self, job_id: str) -> JobReply:
        return self.client.call("GET", f"/v1/job/{job_id}", JobReply)

    def jobs(self) -> Sequence[Job]:
        """The jobs that have not ended."""
        query = JobsQuery(status=("pending", "claimed", "running"), limit=1000)  # type: ignore[arg-type]
        return self.client.call("GET", "/v1/jobs", JobsReply, query=query).jobs

    def attempt(self, job_id: str, epoch: int) -> JobAttempt:
        return next(each for each in self.job(job_id).attempts if each.epoch == epoch)

    def hosts(self) -> dict[str, Host]:
        found = self.client.call("GET", "/v1/workers", HostsReply).hosts
        return {host.id: host for host in found}

    def order(self, host: AgentProcess, what: str) -> None:
        """`pause` or `resume` a host."""
        body = HostStateRequest(reason="a trial")
        self.client.call("POST", f"/v1/host/{host.host_id}/{what}", Host, body=body)

    def cancel(self, job_id: str) -> None:
        body = CancelRequest(reason="a trial")
        self.client.call("POST", f"/v1/job/{job_id}/cancel", Job, body=body)

    def stream(self, job_id: str, epoch: int, name: str) -> bytes:
        whole = b""
        while True:
            query = StreamQuery(attempt=epoch, offset=len(whole), limit=_PAGE)
            piece = self.client.fetch(f"/v1/job/{job_id}/{name}", query=query).content
            whole += piece
            if not piece:
                return whole

    def events(self, job_id: str) -> list[FeedEvent]:
        found: list[FeedEvent] = []
        cursor = ""
        while True:
            query = EventsQuery(after=cursor, subject=job_id, limit=1000)
            page = self.client.call("GET", "/v1/events", EventsReply, query=query)
            found += page.events
            if len(page.events) < 1000:
                return found
            cursor = page.cursor

    def files(self, artifact: str) -> dict[str, bytes]:
        manifest = self.client.call("GET", f"/v1/artifact/{artifact}", ArtifactReply).manifest
        return {each.path: self.file(artifact, each.path) for each in manifest.files}

    def file(self, artifact: str, path: str) -> bytes:
        query = FileQuery(path=path)
        return self.client.fetch(f"/v1/artifact/{artifact}/file", query=query).content


class Fleet:
    """All processes of a campaign."""

    def __init__(
        self,
        request: CampaignRequest,
        plan: Plan,
        *,
        hosts: int,
        slots: int,
        lease_s: float,
        hub: Mapping[str, str] | None = None,
    ) -> None:
        """`hub` are more settings of the hub."""
        self.plan = plan
        self.lease_s = lease_s
        settings = {"STALE_AFTER_S": str(lease_s), "DRAIN_S": "1", **(hub or {})}
        self.hub = HubProcess(request.folder, database=request.url, settings=settings)
        self.hosts = [AgentProcess(request.folder, f"host-{number}", slots) for number in range(hosts)]
        marks = request.folder / "marks"
        marks.mkdir()
        self.operator = Operator(self.hub.operator, plan, marks)

    async def start(self) -> None:
        await self.hub.start()
        if await self.hub.ready() is None:
            raise TimeoutError(f"the hub does not start: {self.hub.log}")
        for host in self.hosts:
            await asyncio.to_thread(self.operator.enrol, host, self.hub.address)
            await host.start()
        for host in self.hosts:
            await self.wait_seen(host, 0.0)

    async def call(self, call: Callable[[], T]) -> T:
        """A call of the operator, retried while the hub is away."""
        found = await wait_until(lambda: (call(),), READY_S, "the hub answers its operator")
        return found[0]

    async def held_attempts(self, host: AgentProcess) -> set[tuple[str, int]]:
        """Job and epoch of the attempts that the hub has assigned to this host."""
        open_jobs = await self.call(self.operator.jobs)
        return {(job.id, job.epoch) for job in open_jobs if job.host_id == host.host_id}

    async def wait_seen(self, host: AgentProcess, since_s: float) -> float:
        """When the hub first saw a host after this moment, by the hub's wall clock."""

        def seen_at_s() -> float:
            known = self.operator.hosts().get(host.host_id)
            return known.seen_at_s if known is not None and known.seen_at_s > since_s else 0.0

        return await wait_until(lambda: host_ended(host) or seen_at_s(), READY_S, f"the hub hears of {host.name}")

    async def wait_ended(self, job_id: str) -> JobReply:
        """The job, when it has ended."""

        def ended() -> JobReply | None:
            found = self.operator.job(job_id)
            return found if found.job.status in TERMINAL else None

        return await wait_until(ended, FINISH_S, f"{job_id} is over")

    async def find_leftovers(self) -> list[str]:
        """Hosts that keep files or processes although all jobs have ended."""
        problems = []
        for host in self.hosts:
            try:
                await wait_until(lambda host=host: host.is_idle() and not host.processes(), 30.0, "idle")  # type: ignore[misc]
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
    """Non-zero if the process has ended: then the wait for it is over."""
    return 0.0 if host.is_running else -1.0
