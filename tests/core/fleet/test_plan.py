from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.base.errors import StrataError
from strata.fleet.core.job import JobStatus
from strata.fleet.core.jobspec import HostSpec, JobSpec, TrainerSpec
from strata.fleet.core.manifest import JobManifest
from strata.fleet.core.plan import KINDS, ApplyOptions, ApplyPlan, ExistingJob, HostPolicy, RegisteredTrainer, plan
from strata.fleet.core.requirement import Needs

specs = st.builds(
    JobSpec,
    model=st.sampled_from(["a", "b", "c"]),
    hyper=st.sampled_from([{}, {"x": 1}, {"x": 1.0}, {"x": True}]),
    priority=st.integers(-2, 2),
    needs=st.sampled_from([Needs(), Needs(require_cuda=True), Needs(min_ram_gib=4, prefer_cuda=True)]),
    max_attempts=st.integers(1, 2),
    name=st.sampled_from(["", "n"]),
    trainer=st.sampled_from(["t", "u"]),
)
trainers = st.dictionaries(
    st.sampled_from(["t", "u"]),
    st.sampled_from(["x", "y"]).map(lambda word: TrainerSpec(name="t", command=(word,))),
    min_size=2,
)
hosts = st.dictionaries(st.sampled_from(["h", "i"]), st.builds(HostSpec, name=st.just("h"), slots=st.integers(1, 2)))


@st.composite
def manifests(draw: st.DrawFn) -> JobManifest:
    jobs = {spec.id: spec for spec in draw(st.lists(specs, max_size=4))}
    return JobManifest(source="m", jobs=jobs, trainers=draw(trainers), hosts=draw(hosts))


class Fleet:
    """What is there, and what applying a plan makes of it."""

    def __init__(self) -> None:
        self.jobs: dict[str, ExistingJob] = {}
        self.trainers: dict[str, RegisteredTrainer] = {}
        self.hosts: dict[str, HostPolicy] = {}

    def plan(self, manifest: JobManifest) -> ApplyPlan:
        return plan(manifest, self.jobs, trainers=self.trainers, hosts=self.hosts)

    def apply(self, made: ApplyPlan) -> None:
        self.trainers |= {name: registered(spec) for name, spec in made.trainers.items()}
        for job, spec in made.new.items():
            self.jobs[job] = ExistingJob(spec=spec, status=JobStatus.PENDING, trainer=self.digest(spec))
        for change in made.changed:
            here = self.jobs[change.job_id]
            digest = self.digest(change.spec) if "trainer" in change.kinds else here.trainer
            self.jobs[change.job_id] = msgspec.structs.replace(here, spec=change.spec, trainer=digest)
        self.hosts |= {name: HostPolicy(spec=spec) for name, spec in made.hosts.items()}

    def digest(self, spec: JobSpec) -> str:
        return self.trainers[spec.trainer].digest if spec.trainer in self.trainers else ""


def registered(spec: TrainerSpec) -> RegisteredTrainer:
    return RegisteredTrainer(digest=spec.digest, spec=spec)


@given(st.lists(st.tuples(manifests(), st.sampled_from(JobStatus)), max_size=4), manifests())
def test_applying_twice_changes_nothing_and_no_job_is_ever_taken_away(
    history: list[tuple[JobManifest, JobStatus]], last: JobManifest
) -> None:
    fleet = Fleet()
    for manifest, status in history:
        fleet.apply(fleet.plan(manifest))
        fleet.jobs = {job: msgspec.structs.replace(here, status=status) for job, here in fleet.jobs.items()}
    before = dict(fleet.jobs)
    made = fleet.plan(last)
    fleet.apply(made)
    assert set(fleet.jobs) == {*before, *last.jobs}
    assert all(fleet.jobs[job].status is here.status for job, here in before.items())
    for job, spec in last.jobs.items():
        # A completed job keeps the trainer that made its result.
        kept = before[job].spec.trainer if job in before and before[job].status is JobStatus.COMPLETED else spec.trainer
        assert fleet.jobs[job].spec == msgspec.structs.replace(spec, trainer=kept)
        if kept == spec.trainer and job not in made.outdated:
            assert fleet.jobs[job].trainer == fleet.trainers[spec.trainer].digest
    again = fleet.plan(last)
    assert again.empty
    assert again.outdated == made.outdated
    assert set(again.unchanged) == set(last.jobs)
    assert len(made.new) + len(made.changed) + len(made.unchanged) == len(last.jobs)


def test_every_field_of_a_job_makes_its_id_or_can_change() -> None:
    identity = {"model", "mode", "hyper", "split_recipe", "train_hosts", "seed", "project", "kind", "due"}
    recorded = {"code", "data"}
    changing = {name for fields in KINDS.values() for name in fields}
    assert changing | identity | recorded == {field.name for field in msgspec.structs.fields(JobSpec)}


def manifest_of(*jobs: JobSpec, **more: Any) -> JobManifest:
    return JobManifest(source="m.toml", jobs={spec.id: spec for spec in jobs}, **more)


def planned(manifest: JobManifest, *there: tuple[JobSpec, JobStatus]) -> ApplyPlan:
    jobs = {spec.id: ExistingJob(spec=spec, status=status) for spec, status in there}
    return plan(manifest, jobs, trainers={}, hosts={})


A, B, C, D = (JobSpec(model=model) for model in "abcd")


def test_the_summary_counts_what_would_happen() -> None:
    urgent = msgspec.structs.replace(B, priority=5)
    made = planned(
        manifest_of(A, urgent, C),
        (B, JobStatus.PENDING),
        (C, JobStatus.RUNNING),
        (D, JobStatus.PENDING),
        (A, JobStatus.FAILED),
    )
    assert made.summary() == "~1 priority  =2 unchanged  \N{MINUS SIGN}1 orphaned, kept"
    assert planned(manifest_of(A, B)).summary() == "+2 new"
    assert planned(manifest_of()).summary() == "nothing declared, nothing there"


@pytest.mark.parametrize(
    ("status", "deferred"), [(JobStatus.PENDING, False), (JobStatus.CLAIMED, True), (JobStatus.RUNNING, True)]
)
def test_new_constraints_reach_a_held_job_with_its_next_attempt(status: JobStatus, deferred: bool) -> None:
    (change,) = planned(manifest_of(msgspec.structs.replace(A, needs=Needs(require_cuda=True))), (A, status)).changed
    assert (change.kinds, change.reclassed, change.deferred) == (("constraints",), True, deferred)


def test_a_new_priority_is_no_new_class() -> None:
    (change,) = planned(manifest_of(msgspec.structs.replace(A, priority=1)), (A, JobStatus.PENDING)).changed
    assert not change.reclassed


def test_jobs_that_ended_or_were_submitted_one_by_one_are_no_orphans() -> None:
    jobs = {
        A.id: ExistingJob(spec=A, status=JobStatus.COMPLETED),
        B.id: ExistingJob(spec=B, status=JobStatus.PENDING, declared=False),
        C.id: ExistingJob(spec=C, status=JobStatus.RUNNING),
    }
    assert plan(manifest_of(), jobs, trainers={}, hosts={}).orphaned == (C.id,)


def test_a_number_written_another_way_is_no_change() -> None:
    one, other = (JobSpec(model="a", hyper={"x": number}) for number in (1, 1.0))
    assert planned(manifest_of(other), (one, JobStatus.PENDING)).empty


def test_a_job_of_another_manifest_may_come_first_if_it_exists() -> None:
    after = msgspec.structs.replace(A, after=(B.id,))
    assert planned(manifest_of(after), (B, JobStatus.PENDING)).new
    with pytest.raises(StrataError, match="there is no such job"):
        planned(manifest_of(after))


def test_a_circle_through_another_manifest_is_refused() -> None:
    with pytest.raises(StrataError, match="circle"):
        planned(
            manifest_of(msgspec.structs.replace(A, after=(B.id,))),
            (msgspec.structs.replace(B, after=(A.id,)), JobStatus.PENDING),
        )


@pytest.mark.proves("Never again: a manifest that did not name a host reset its policy")
def test_a_host_that_the_manifest_does_not_name_keeps_its_policy() -> None:
    host = HostSpec(name="h", slots=3)
    made = plan(manifest_of(), {}, trainers={}, hosts={"h": HostPolicy(spec=host)})
    assert made.empty
    assert plan(manifest_of(hosts={"h": host}), {}, trainers={}, hosts={"h": HostPolicy(spec=host)}).empty
    opened = manifest_of(hosts={"h": HostSpec(name="h")})
    assert plan(opened, {}, trainers={}, hosts={"h": HostPolicy(spec=host)}).hosts == {"h": HostSpec(name="h")}


def test_a_policy_of_another_project_is_changed_only_where_the_operator_takes_it_over() -> None:
    there = {"h": HostPolicy(spec=HostSpec(name="h", slots=3), project="a")}
    wanted = manifest_of(hosts={"h": HostSpec(name="h", slots=1)}, project="b")
    with pytest.raises(StrataError, match="its policy belongs to project 'a'") as refused:
        plan(wanted, {}, trainers={}, hosts=there)
    assert "--take-over" in str(refused.value.hint)
    taken = plan(wanted, {}, trainers={}, hosts=there, options=ApplyOptions(take_over=True))
    assert (taken.hosts, taken.take_over, taken.project) == ({"h": HostSpec(name="h", slots=1)}, True, "b")
    same = manifest_of(hosts={"h": HostSpec(name="h", slots=3)}, project="b")
    assert plan(same, {}, trainers={}, hosts=there).empty


OLD, NEW = (TrainerSpec(name="default", command=("python", script), directory="/t") for script in ("a.py", "b.py"))


def with_trainer(status: JobStatus, *, declared: bool = True, **options: bool) -> ApplyPlan:
    """The plan of a manifest whose trainer was changed since job A was queued, or done, with the old one."""
    jobs = {A.id: ExistingJob(spec=A, status=status, declared=declared, trainer=OLD.digest)}
    wanted = manifest_of(A, trainers={"default": NEW})
    there = {"default": registered(OLD)}
    return plan(wanted, jobs, trainers=there, hosts={}, options=ApplyOptions(**options))


def test_jobs_that_wait_take_a_changed_trainer_as_an_entry_of_the_plan() -> None:
    made = with_trainer(JobStatus.PENDING)
    assert made.summary() == "~1 trainer (1 queued job takes it)"
    assert [(change.kinds, change.deferred) for change in made.changed] == [(("trainer",), False)]
    assert [change.deferred for change in with_trainer(JobStatus.RUNNING).changed] == [True]
    failed = with_trainer(JobStatus.FAILED)
    assert ([change.ended for change in failed.changed], failed.summary()) == ([True], "~1 trainer")


def test_a_completed_job_keeps_the_trainer_that_made_its_result() -> None:
    made = with_trainer(JobStatus.COMPLETED)
    assert (made.changed, made.requeued, made.outdated) == ((), {}, (A.id,))
    assert made.summary() == "~1 trainer  =1 unchanged  =1 of an earlier trainer, kept"
    again = with_trainer(JobStatus.COMPLETED, retrain=True)
    assert (again.requeued, again.outdated, again.summary()) == ({A.id: A}, (), "~1 trainer  ~1 requeued")


def test_a_result_from_before_a_manifest_had_the_job_counts_only_if_it_is_accepted() -> None:
    assert with_trainer(JobStatus.COMPLETED, declared=False).requeued == {A.id: A}
    accepted = with_trainer(JobStatus.COMPLETED, declared=False, accept=True)
    assert (accepted.requeued, accepted.unchanged, accepted.outdated) == ({}, (A.id,), (A.id,))


def test_jobs_of_another_project_are_no_orphans_and_no_changes() -> None:
    foreign = JobSpec(model="a", project="x")
    jobs = {foreign.id: ExistingJob(spec=foreign, status=JobStatus.PENDING, trainer=OLD.digest)}
    made = plan(manifest_of(A, trainers={"default": NEW}), jobs, trainers={}, hosts={})
    assert (made.orphaned, made.changed, list(made.new)) == ((), (), [A.id])
