"""The work of the campaign: script jobs, gangs and sweeps one after the other, and one training server.

Every second gang is one of a manifest, whose members the fleet places on hosts of their own; the others are jobs that
start `strata gang run` themselves.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import msgspec

from soak.fleet_agent.expected_state import (
    JobEvidence,
    find_attempt_problems,
    find_lifecycle_problems,
    find_problems,
    gather_evidence,
)
from soak.fleet_agent.fleet import Fleet
from soak.fleet_agent.process_kills import ProcessKiller
from soak.hub_process import STRATA
from soak.mixed.expected_state import HIGH, LOW, GangPlan, find_gang_problems, find_sweep_problems
from strata.fleet.agent.server_job import data_folder
from strata.fleet.core.job import TERMINAL, Cause
from strata.fleet.core.jobspec import JobSpec, TrainerSpec
from strata.fleet.core.manifest import parse_manifest
from strata.fleet.wire.identities import HubKeyReply, HubKeyRequest
from strata.fleet.wire.jobs import Job, JobsQuery, JobsReply, SubmitReply, SubmitRequest
from strata.fleet.wire.manifests import ManifestReply, ManifestRequest

T = TypeVar("T")

PROGRAMS: Final = Path(__file__).with_name("programs")
SCRIPTS: Final = 2
"""Script jobs that are queued or running."""
FEED_S: Final = 0.3
DRAIN_S: Final = 300.0
TRIES: Final = 1000
"""Of each job: a campaign must not use them up."""
_SERVER: Final = """
project = "serving"

[trainers.server]
command = ["{strata}", "serve", "train.toml"]
directory = "{folder}"

[[jobs]]
name = "tiny-server"
kind = "server"
model = "tiny"
trainer = "server"
allowed_hosts = ["{host}"]
"""
_SETTINGS: Final = """
[server]
poll_s = 2.0
lease_s = 1.0

[model]
path = "{model}"
name = "tiny"
slots = 64
max_lora_rank = 8

[ranks]
nproc = 2
backend = "gloo"

[limits]
pack_tenants = false  # or results would depend on who came when

[snapshots]
every_dispatches = 7
payload_grace_s = 1
"""
_SWEEP: Final = """
project = "sweeping"

[trainers.trial]
command = ["python", "trial.py"]
directory = "{programs}"

[[sweeps]]
name = "{name}"
model = "trial"
max_attempts = {tries}
max_lost = {tries}
max_infra = {tries}
hyper = {{ marks = "{marks}", pace_s = {pace_s}, number = {number} }}

[sweeps.search]
objective = {{ loss = "minimize" }}
trials = {trials}
seed = {number}
space = {{ x = {{ uniform = [{low}, {high}] }}, y = {{ uniform = [{low}, {high}] }} }}
"""


_GANG: Final = """
project = "gangs"

[trainers.gang]
command = ["python", "gang_worker.py", "{folder}", "{epochs}", "{samples}", "{pace_s}"]
directory = "{programs}"

[[jobs]]
name = "gang-{number}"
model = "gang"
trainer = "gang"
seed = {number}
workers = 2
workers_per_host = 1
max_attempts = {tries}
max_lost = {tries}
max_infra = {tries}
"""


class QueuedGang(NamedTuple):
    """A gang that was queued: what it writes, and the jobs that it consists of."""

    number: int
    folder: Path
    jobs: tuple[str, ...]


class MixPlan(msgspec.Struct, frozen=True, kw_only=True):
    gang: GangPlan = GangPlan()
    trials: int = 5
    """Of a sweep."""
    trial_pace_s: float = 0.4


class MixedWork:
    def __init__(self, fleet: Fleet, kills: ProcessKiller, folder: Path, plan: MixPlan, first: int) -> None:
        self._fleet = fleet
        self._operator = fleet.operator
        self._kills = kills
        self._folder = folder
        self._plan = plan
        self._number = 1000 * first
        self._scripts: set[str] = set()
        self._gangs: list[QueuedGang] = []
        self._placed = False
        """Whether the last gang was one of a manifest."""
        self._sweeps: dict[str, int] = {}
        self._server = ""
        self.gangs = 0
        self.trials = 0
        """Ended and compared, as are the jobs in the outcome of the kills."""

    # The training server

    async def start_server(self, model: Path) -> None:
        folder = self._folder / "server"
        folder.mkdir()
        (folder / "train.toml").write_text(_SETTINGS.format(model=model))
        host = self._fleet.hosts[0].name
        await self._apply(_SERVER.format(strata=STRATA, folder=folder, host=host))
        (self._server,) = [job.id for job in await self._call(self._operator.jobs)]

    @property
    def server_job(self) -> str:
        return self._server

    @property
    def server_data(self) -> Path:
        return data_folder(self._fleet.hosts[0].work, self._server)

    async def make_key(self, name: str) -> str:
        body = HubKeyRequest(name=name, role="researcher")
        client = self._operator.client
        return (await self._call(lambda: client.call("POST", "/v1/keys", HubKeyReply, body=body))).secret

    async def end_server(self) -> list[str]:
        """Cancel it. What is wrong with its attempts."""
        await self._call(lambda: self._operator.cancel(self._server))
        found = await self._fleet.wait_ended(self._server)
        self._kills.allow({(self._server, found.job.epoch)}, Cause.CANCELLED)
        evidence = await self._call(lambda: gather_evidence(self._operator, found))
        return [f"server: {each}" for each in find_attempt_problems(evidence, self._kills.allowed_causes)]

    # Jobs that end

    async def keep_filled(self, until: asyncio.Event) -> None:
        """Queue what has to be queued so that all kinds of work are there."""
        while not until.is_set():
            unfinished = {job.id for job in await self._call(self._operator.jobs)}
            for _ in range(SCRIPTS - len(self._scripts & unfinished)):
                await self._queue_script()
            if not any(unfinished & {*gang.jobs} for gang in self._gangs):
                await self._queue_gang()
            if not self._sweeps or await self._trials_of(max(self._sweeps, key=self._sweeps.__getitem__)) is not None:
                await self._queue_sweep()
            await self._kills.resume_quarantined()
            await asyncio.sleep(FEED_S)

    async def _queue_script(self) -> None:
        seed = self._next_number()
        self._scripts.add(await self._call(lambda: self._operator.submit(seed)))

    async def _queue_gang(self) -> None:
        number = self._next_number()
        folder = self._folder / f"gang-{number}"
        folder.mkdir()
        self._placed = not self._placed
        if self._placed:
            await self._queue_placed_gang(number, folder)
            return
        trainer = TrainerSpec(name="gang", command=("python", "gang.py"), directory=str(PROGRAMS))
        hyper = {"folder": str(folder), "marks": str(self._operator.marks), **msgspec.to_builtins(self._plan.gang)}
        spec = JobSpec(
            model="gang",
            hyper=hyper,
            seed=number,
            trainer=trainer.name,
            max_attempts=TRIES,
            max_lost=TRIES,
            max_infra=TRIES,
        )
        self._gangs.append(QueuedGang(number, folder, (spec.id,)))
        body = SubmitRequest(spec=spec, trainer=trainer)
        await self._call(lambda: self._operator.client.call("POST", "/v1/jobs", SubmitReply, body=body))

    async def _queue_placed_gang(self, number: int, folder: Path) -> None:
        plan = msgspec.to_builtins(self._plan.gang)
        text = _GANG.format(folder=folder, programs=PROGRAMS, number=number, tries=TRIES, **plan)
        await self._apply(text)
        jobs = tuple(parse_manifest(text, "manifest.toml").resolve().jobs)
        self._gangs.append(QueuedGang(number, folder, jobs))

    async def _queue_sweep(self) -> None:
        plan, number = self._plan, self._next_number()
        name = f"sweep-{number}"
        text = _SWEEP.format(
            programs=PROGRAMS,
            name=name,
            marks=self._operator.marks,
            pace_s=plan.trial_pace_s,
            trials=plan.trials,
            tries=TRIES,
            number=number,
            low=LOW,
            high=HIGH,
        )
        await self._apply(text)
        self._sweeps[name] = number

    async def _trials_of(self, sweep: str) -> Sequence[Job] | None:
        """All trials of a sweep; None as long as one is missing or has not ended."""
        query = JobsQuery(sweep=sweep, project="sweeping", limit=1000)
        client = self._operator.client
        jobs = (await self._call(lambda: client.call("GET", "/v1/jobs", JobsReply, query=query))).jobs
        is_over = len(jobs) >= self._plan.trials and all(job.status in TERMINAL for job in jobs)
        return jobs if is_over else None

    def gang_progress(self) -> Callable[[], bool]:
        """Whether the newest gang has read more than now, or has ended."""
        if not self._gangs:
            return lambda: True
        gang = self._gangs[-1]
        ledger = gang.folder / "ledger"
        before = ledger.stat().st_size if ledger.exists() else 0

        def has_read_more() -> bool:
            grown = ledger.exists() and ledger.stat().st_size > before
            return grown or all(self._operator.job(job).job.status in TERMINAL for job in gang.jobs)

        return has_read_more

    # What has ended

    async def check_ended(self) -> list[str]:
        """Compare what has ended with its expected state. Not while a kill is under way, whose effect is not known."""
        problems = []
        for job_id in sorted(self._scripts):
            if (evidence := await self._ended(job_id)) is not None:
                self._scripts.remove(job_id)
                problems += find_problems(evidence, self._fleet.plan, self._kills.allowed_causes)
        for gang in list(self._gangs):
            if await self._is_over(gang):
                self._gangs.remove(gang)
                self.gangs += 1
                members = [each for job in gang.jobs if (each := await self._ended(job)) is not None]
                for each in members:
                    problems += find_lifecycle_problems(each, self._kills.allowed_causes)
                ledger = (gang.folder / "ledger").read_text().splitlines()
                # A member that starts again after the end of the gang has no result of its own.
                written = [model.read_bytes() for model in sorted(gang.folder.glob("model-*.json"))]
                models = [json.loads(model) for model in (written if members[1:] else members[0].files.values())]
                problems += find_gang_problems(gang.number, models, self._plan.gang, ledger)
        for sweep, number in sorted(self._sweeps.items()):
            if (jobs := await self._trials_of(sweep)) is not None:
                del self._sweeps[sweep]
                trials = [each for job in jobs if (each := await self._ended(job.id)) is not None]
                self.trials += len(trials)
                for each in trials:
                    problems += find_lifecycle_problems(each, self._kills.allowed_causes)
                problems += find_sweep_problems(sweep, number, self._plan.trials, trials)
        return problems

    async def drain(self) -> list[str]:
        """Without more kills all that was queued ends."""
        problems = await self.check_ended()
        async with asyncio.timeout(DRAIN_S):
            while (self._scripts or self._gangs or self._sweeps) and not problems:
                await asyncio.sleep(FEED_S)
                problems += await self.check_ended()
        return problems

    async def _is_over(self, gang: QueuedGang) -> bool:
        found = [await self._call(lambda job=job: self._operator.job(job)) for job in gang.jobs]  # type: ignore[misc]
        return all(each.job.status in TERMINAL for each in found)

    async def _ended(self, job_id: str) -> JobEvidence | None:
        found = await self._call(lambda: self._operator.job(job_id))
        if found.job.status not in TERMINAL:
            return None
        outcome = self._kills.outcome
        outcome.jobs += 1
        outcome.attempts += len(found.attempts)
        return await self._call(lambda: gather_evidence(self._operator, found))

    async def _apply(self, manifest: str) -> None:
        body = ManifestRequest(manifest=parse_manifest(manifest, "manifest.toml").resolve())
        client = self._operator.client
        await self._call(lambda: client.call("POST", "/v1/manifest", ManifestReply, body=body))

    async def _call(self, call: Callable[[], T]) -> T:
        return await self._fleet.call(call)

    def _next_number(self) -> int:
        self._number += 1
        return self._number
