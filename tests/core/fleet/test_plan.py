from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.base.errors import StrataError
from strata.fleet.core.job import Status
from strata.fleet.core.jobspec import HostSpec, JobSpec, TrainerSpec
from strata.fleet.core.manifest import Manifest
from strata.fleet.core.plan import KINDS, Plan, Present, plan
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
    st.sampled_from(["t", "u"]), st.sampled_from(["x", "y"]).map(lambda word: TrainerSpec(name="t", command=(word,)))
)
hosts = st.dictionaries(st.sampled_from(["h", "i"]), st.builds(HostSpec, name=st.just("h"), slots=st.integers(1, 2)))


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    jobs = {spec.id: spec for spec in draw(st.lists(specs, max_size=4))}
    return Manifest(source="m", jobs=jobs, trainers=draw(trainers), hosts=draw(hosts))


class Fleet:
    """What is there, and what applying a plan makes of it."""

    def __init__(self) -> None:
        self.jobs: dict[str, Present] = {}
        self.trainers: dict[str, TrainerSpec] = {}
        self.hosts: dict[str, HostSpec] = {}

    def plan(self, manifest: Manifest) -> Plan:
        return plan(manifest, self.jobs, trainers=self.trainers, hosts=self.hosts)

    def apply(self, made: Plan) -> None:
        self.jobs |= {job: Present(spec=spec, status=Status.PENDING) for job, spec in made.new.items()}
        for change in made.changed:
            self.jobs[change.job_id] = msgspec.structs.replace(self.jobs[change.job_id], spec=change.spec)
        self.trainers |= made.trainers
        self.hosts = {name: spec for name, spec in self.hosts.items() if name not in made.released_hosts} | made.hosts


@given(st.lists(st.tuples(manifests(), st.sampled_from(Status)), max_size=4), manifests())
def test_applying_twice_changes_nothing_and_no_job_is_ever_taken_away(
    history: list[tuple[Manifest, Status]], last: Manifest
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
    assert {job: fleet.jobs[job].spec for job in last.jobs} == last.jobs
    again = fleet.plan(last)
    assert again.empty
    assert set(again.unchanged) == set(last.jobs)
    assert len(made.new) + len(made.changed) + len(made.unchanged) == len(last.jobs)


def test_every_field_of_a_job_makes_its_id_or_can_change() -> None:
    identity = {"model", "mode", "hyper", "split_recipe", "train_hosts", "seed"}
    recorded = {"code", "data"}
    changing = {name for fields in KINDS.values() for name in fields}
    assert changing | identity | recorded == {field.name for field in msgspec.structs.fields(JobSpec)}


def manifest_of(*jobs: JobSpec, **more: Any) -> Manifest:
    return Manifest(source="m.toml", jobs={spec.id: spec for spec in jobs}, **more)


def planned(manifest: Manifest, *there: tuple[JobSpec, Status]) -> Plan:
    jobs = {spec.id: Present(spec=spec, status=status) for spec, status in there}
    return plan(manifest, jobs, trainers={}, hosts={})


A, B, C, D = (JobSpec(model=model) for model in "abcd")


def test_the_summary_counts_what_would_happen() -> None:
    urgent = msgspec.structs.replace(B, priority=5)
    made = planned(
        manifest_of(A, urgent, C), (B, Status.PENDING), (C, Status.RUNNING), (D, Status.PENDING), (A, Status.FAILED)
    )
    assert made.summary() == "~1 priority  =2 unchanged  \N{MINUS SIGN}1 orphaned, kept"
    assert planned(manifest_of(A, B)).summary() == "+2 new"
    assert planned(manifest_of()).summary() == "nothing declared, nothing there"


@pytest.mark.parametrize(
    ("status", "deferred"), [(Status.PENDING, False), (Status.CLAIMED, True), (Status.RUNNING, True)]
)
def test_new_constraints_reach_a_held_job_with_its_next_attempt(status: Status, deferred: bool) -> None:
    (change,) = planned(manifest_of(msgspec.structs.replace(A, needs=Needs(require_cuda=True))), (A, status)).changed
    assert (change.kinds, change.reclassed, change.deferred) == (("constraints",), True, deferred)


def test_a_new_priority_is_no_new_class() -> None:
    (change,) = planned(manifest_of(msgspec.structs.replace(A, priority=1)), (A, Status.PENDING)).changed
    assert not change.reclassed


def test_jobs_that_ended_or_were_submitted_one_by_one_are_no_orphans() -> None:
    jobs = {
        A.id: Present(spec=A, status=Status.COMPLETED),
        B.id: Present(spec=B, status=Status.PENDING, declared=False),
        C.id: Present(spec=C, status=Status.RUNNING),
    }
    assert plan(manifest_of(), jobs, trainers={}, hosts={}).orphaned == (C.id,)


def test_a_number_written_another_way_is_no_change() -> None:
    one, other = (JobSpec(model="a", hyper={"x": number}) for number in (1, 1.0))
    assert planned(manifest_of(other), (one, Status.PENDING)).empty


def test_a_job_of_another_manifest_may_come_first_if_it_exists() -> None:
    after = msgspec.structs.replace(A, after=(B.id,))
    assert planned(manifest_of(after), (B, Status.PENDING)).new
    with pytest.raises(StrataError, match="there is no such job"):
        planned(manifest_of(after))


def test_a_circle_through_another_manifest_is_refused() -> None:
    with pytest.raises(StrataError, match="circle"):
        planned(
            manifest_of(msgspec.structs.replace(A, after=(B.id,))),
            (msgspec.structs.replace(B, after=(A.id,)), Status.PENDING),
        )


def test_a_policy_that_is_no_longer_written_is_released() -> None:
    host = HostSpec(name="h", slots=3)
    made = plan(manifest_of(), {}, trainers={}, hosts={"h": host})
    assert made.released_hosts == ("h",)
    assert not made.empty
    assert plan(manifest_of(hosts={"h": host}), {}, trainers={}, hosts={"h": host}).empty
