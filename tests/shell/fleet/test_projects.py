"""Two projects on one hub, in any order of applying, claiming, ending and requeueing: each job runs its own trainer."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strata.database import events
from strata.database.migrations import SqliteComponents
from strata.database.sqlite import SqliteThread
from strata.fleet.core.capability import Capability
from strata.fleet.core.job import Cause, JobStatus
from strata.fleet.core.manifest import parse_manifest
from strata.fleet.core.plan import ApplyOptions, ApplyPlan
from strata.fleet.records import AttemptKey, HostRow, JobCompletion, JobFailure, JobLease
from strata.fleet.service.fleet import Fleet
from strata.fleet.store.sqlite.store import build_sqlite_store
from strata.fleet.store.sqlite.tables import COMPONENT
from tests.support.manual_clock import ManualClock

MODELS: Final = ("a", "b", "c")


@dataclass(frozen=True)
class Apply:
    project: str
    script: str
    models: tuple[str, ...]
    retrain: bool


@dataclass(frozen=True)
class Act:
    """What happens to the n-th job that allows it."""

    what: str
    number: int


steps = st.lists(
    st.builds(
        Apply,
        project=st.sampled_from(["default", "p", "q"]),
        script=st.sampled_from(["one.py", "two.py"]),
        models=st.lists(st.sampled_from(MODELS), min_size=1, unique=True).map(tuple),
        retrain=st.booleans(),
    )
    | st.builds(
        Act, what=st.sampled_from(["claim", "complete", "fail", "cancel", "requeue"]), number=st.integers(0, 5)
    ),
    min_size=3,
    max_size=16,
)


def text_of(step: Apply) -> str:
    jobs = "".join(f'[[jobs]]\nmodel = "{model}"\n' for model in step.models)
    # The source is the same path in both projects: only the command tells their trainers apart.
    command = f'["python", "{step.project}-{step.script}"]'
    return f'project = "{step.project}"\n[trainers.default]\ncommand = {command}\ndirectory = "/t"\n{jobs}'


@dataclass
class World:
    """The real service on a real file, and beside it what each job has to be run with."""

    fleet: Fleet
    queued: dict[str, str] = field(default_factory=dict)
    """Job to the digest that its last plan gave it."""
    given: dict[tuple[str, int], str] = field(default_factory=dict)
    """Attempt to the digest it was claimed with."""
    held: list[JobLease] = field(default_factory=list)
    claims: int = 0

    async def apply(self, step: Apply) -> None:
        text = text_of(step)
        manifest = parse_manifest(text, "m").resolve()
        made = await self.fleet.jobs.plan_manifest(manifest, ApplyOptions(retrain=step.retrain))
        self.check_owner(made, step.project)
        await self.fleet.jobs.apply(made, "operator", source="m")
        digest = manifest.trainers["default"].digest
        takers = [change.job_id for change in made.changed if "trainer" in change.kinds]
        self.queued |= dict.fromkeys([*made.new, *made.requeued, *takers], digest)

    def check_owner(self, made: ApplyPlan, project: str) -> None:
        named = [*made.new.values(), *made.requeued.values(), *(change.spec for change in made.changed)]
        assert {spec.project for spec in named} <= {project}

    async def act(self, step: Act) -> None:
        if step.what == "claim":
            self.claims += 1
            for lease in await self.fleet.claims.claim("h", f"c{self.claims}"):
                self.given[lease.job_id, lease.epoch] = lease.trainer_digest
                assert lease.trainer is not None
                assert lease.trainer.digest == lease.trainer_digest == self.queued[lease.job_id]
                assert lease.trainer.command[1].startswith(f"{lease.spec.project}-")
                self.held.append(lease)
        elif step.what in ("complete", "fail"):
            await self.end(step)
        else:
            await self.move(step)

    async def end(self, step: Act) -> None:
        if not self.held:
            return
        lease = self.held.pop(step.number % len(self.held))
        hold = AttemptKey("h", lease.job_id, lease.epoch)
        if step.what == "complete":
            done = await self.fleet.leases.complete(hold, JobCompletion())
            assert done.trainer_digest == lease.trainer_digest
            self.queued[lease.job_id] = lease.trainer_digest
        else:
            await self.fleet.leases.fail(hold, JobFailure(cause=Cause.USER_ERROR, error="x"))
            await self.fleet.store.leases.release_backoffs(1e12)

    async def move(self, step: Act) -> None:
        ended = (JobStatus.COMPLETED, JobStatus.FAILED, JobStatus.CANCELLED)
        present = await self.fleet.store.plans.existing_jobs()
        wanted = sorted(id_ for id_, here in present.items() if (here.status in ended) == (step.what == "requeue"))
        if not wanted:
            return
        job_id = wanted[step.number % len(wanted)]
        if step.what == "requeue":
            await self.fleet.jobs.requeue(job_id, "operator")
        else:
            await self.fleet.jobs.cancel(job_id, "", "operator")
            self.held = [lease for lease in self.held if lease.job_id != job_id]

    async def check(self) -> None:
        for job_id, here in (await self.fleet.store.plans.existing_jobs()).items():
            assert here.trainer == self.queued[job_id]
            for attempt in await self.fleet.store.jobs.attempts(job_id):
                assert attempt.trainer_digest == self.given[job_id, attempt.epoch]


async def live(path: Path, history: list[Apply | Act]) -> None:
    thread = await SqliteThread.open(path, SqliteComponents((events.SQLITE, COMPONENT)))
    try:
        world = World(Fleet(build_sqlite_store(thread), ManualClock(), chance=lambda: 0.5))
        host = HostRow(id="h", name="h", capability=Capability(hostname="h"), registered_at_s=0.0)
        await world.fleet.hosts.register(host, "host:h")
        for step in history:
            await (world.apply(step) if isinstance(step, Apply) else world.act(step))
            await world.check()
    finally:
        await thread.close()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps)
def test_no_job_ever_runs_or_records_a_trainer_other_than_the_one_it_was_queued_with(
    history: list[Apply | Act],
) -> None:
    with TemporaryDirectory() as folder:
        asyncio.run(live(Path(folder) / "hub.db", history))
