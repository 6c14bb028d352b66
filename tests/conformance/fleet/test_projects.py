"""Trainers are immutable and named per project; a job carries the digest of the one it was queued with."""

from __future__ import annotations

import pytest

from strata.base.errors import Code
from strata.fleet.core.job import Cause, JobStatus
from strata.fleet.core.jobspec import HostSpec, JobSpec, TrainerSpec
from strata.fleet.core.plan import ApplyPlan, HostPolicy, JobChange
from strata.fleet.ports import Store
from strata.fleet.records import JobCompletion, JobFailure
from tests.conformance.fleet.fleet import add_host, claim, hold, job, plan, refusal


def trainer(script: str, name: str = "default") -> TrainerSpec:
    return TrainerSpec(name=name, command=("python", script), directory="/t")


OLD, NEW = trainer("old.py"), trainer("new.py")


async def apply(store: Store, wanted: ApplyPlan, now_s: float = 0.0, *, declared: bool = True) -> None:
    await store.plans.apply(wanted, "operator", now_s, source="m", declared=declared)


def taking(spec: JobSpec, **fields: bool) -> JobChange:
    return JobChange(job_id=spec.id, spec=spec, kinds=("trainer",), reclassed=False, deferred=False, **fields)


async def test_a_job_runs_with_the_trainer_of_its_own_project_whoever_applies_after_it(store: Store) -> None:
    await add_host(store)
    mine, theirs = job("a"), job("a", project="b")
    await apply(store, plan(mine, trainers={"default": OLD}))
    await apply(store, plan(theirs, project="b", trainers={"default": NEW}))
    leases = {lease.job_id: lease for lease in await claim(store, count=2)}
    assert (leases[mine.id].trainer, leases[theirs.id].trainer) == (OLD, NEW)
    assert {row.job_id: row.trainer_digest for each in leases for row in await store.jobs.attempts(each)} == {
        mine.id: OLD.digest,
        theirs.id: NEW.digest,
    }


async def test_a_job_that_no_plan_names_keeps_its_trainer_when_the_name_gets_another(store: Store) -> None:
    await add_host(store)
    spec = job("a")
    await apply(store, plan(spec, trainers={"default": OLD}))
    await apply(store, ApplyPlan(trainers={"default": NEW}))
    (lease,) = await claim(store)
    assert lease.trainer == OLD
    await store.leases.complete(hold(lease), JobCompletion(), 1.0)
    await store.jobs.requeue(spec.id, "operator", 2.0)
    (again,) = await claim(store, claim_id="c2", now_s=3.0)
    assert again.trainer == OLD


@pytest.mark.parametrize("declared", [True, False])
async def test_a_plan_is_refused_whole_when_another_caller_changed_its_trainer(store: Store, declared: bool) -> None:
    spec, other = job("a"), trainer("other.py")
    await apply(store, plan(trainers={"default": OLD}))
    await apply(store, plan(trainers={"default": NEW}))
    for wanted in (
        plan(spec, seen={"default": OLD.digest}),
        plan(spec, seen={"default": OLD.digest}, trainers={"default": other}),
        plan(spec, seen={"default": ""}, trainers={"default": other}),
    ):
        refused = await refusal(apply(store, wanted, declared=declared))
        assert (refused.code, "the trainer 'default'" in str(refused)) == (Code.CONFLICT, True)
    assert (await store.plans.existing_jobs(), (await store.plans.trainers())["default", "default"].digest) == (
        {},
        NEW.digest,
    )


async def test_a_plan_whose_trainer_another_caller_added_as_it_is_holds(store: Store) -> None:
    spec = job("a")
    await apply(store, plan(trainers={"default": NEW}))
    await apply(store, plan(spec, seen={"default": ""}, trainers={"default": NEW}))
    await apply(store, plan(job("b"), project="b", seen={"default": ""}))
    assert (await store.jobs.get(spec.id)).trainer_digest == NEW.digest


async def test_a_pending_job_takes_another_trainer_only_where_the_plan_says_so(store: Store) -> None:
    await add_host(store)
    taker, keeper = job("a"), job("b")
    await apply(store, plan(taker, keeper, trainers={"default": OLD}))
    await apply(store, ApplyPlan(trainers={"default": NEW}, changed=(taking(taker),), unchanged=(keeper.id,)))
    leases = {lease.job_id: lease.trainer for lease in await claim(store, count=2)}
    assert leases == {taker.id: NEW, keeper.id: OLD}


async def test_an_attempt_keeps_the_trainer_it_was_given_and_its_result_says_so(store: Store) -> None:
    await add_host(store)
    spec = job("a")
    await apply(store, plan(spec, trainers={"default": OLD}))
    (lease,) = await claim(store)
    await apply(store, ApplyPlan(trainers={"default": NEW}, changed=(taking(spec),)))
    # The reply was lost: the same claim gets the same trainer.
    (same,) = await claim(store)
    assert (same.trainer, same.trainer_digest) == (OLD, OLD.digest)
    assert (await store.jobs.get(spec.id)).trainer_digest == NEW.digest
    done = await store.leases.complete(hold(lease), JobCompletion(), 1.0)
    assert done.trainer_digest == OLD.digest
    assert [row.trainer_digest for row in await store.jobs.attempts(spec.id)] == [OLD.digest]


async def test_the_next_attempt_has_the_trainer_that_the_plan_gave_the_job(store: Store) -> None:
    await add_host(store)
    spec = job("a")
    await apply(store, plan(spec, trainers={"default": OLD}))
    (lease,) = await claim(store)
    await apply(store, ApplyPlan(trainers={"default": NEW}, changed=(taking(spec),)))
    await store.leases.fail(hold(lease), JobFailure(cause=Cause.USER_ERROR, error="x"), 1.0, chance=0.5)
    await store.leases.release_backoffs(1000.0)
    (again,) = await claim(store, claim_id="c2", now_s=1000.0)
    assert again.trainer == NEW
    assert [row.trainer_digest for row in await store.jobs.attempts(spec.id)] == [OLD.digest, NEW.digest]


async def test_a_result_that_came_in_after_the_plan_keeps_its_trainer(store: Store) -> None:
    await add_host(store)
    spec = job("a")
    await apply(store, plan(spec, trainers={"default": OLD}))
    (lease,) = await claim(store)
    await store.leases.complete(hold(lease), JobCompletion(), 1.0)
    await apply(store, ApplyPlan(trainers={"default": NEW}, changed=(taking(spec),)))
    assert (await store.jobs.get(spec.id)).trainer_digest == OLD.digest


async def test_a_job_whose_result_does_not_count_runs_again_from_the_beginning(store: Store) -> None:
    await add_host(store)
    spec = job("a")
    await apply(store, plan(spec, trainers={"default": OLD}), declared=False)
    (lease,) = await claim(store)
    await store.leases.record_checkpoint(hold(lease), "artifact1_" + "c" * 64, 1.0)
    await store.leases.complete(hold(lease), JobCompletion(), 1.0)
    await apply(store, ApplyPlan(trainers={"default": NEW}, requeued={spec.id: spec}), 2.0)
    row = await store.jobs.get(spec.id)
    assert (row.status, row.artifact, row.declared) == (JobStatus.PENDING, "", True)
    (again,) = await claim(store, claim_id="c2", now_s=3.0)
    assert (again.trainer, again.checkpoint) == (NEW, "")


async def test_a_job_that_runs_is_not_the_manifests_before_it_has_ended(store: Store) -> None:
    await add_host(store)
    spec = job("a")
    await apply(store, plan(spec, trainers={"default": OLD}), declared=False)
    (lease,) = await claim(store)
    await apply(store, ApplyPlan(trainers={"default": NEW}, changed=(taking(spec),)))
    await store.leases.complete(hold(lease), JobCompletion(), 1.0)
    row = await store.jobs.get(spec.id)
    assert (row.declared, row.trainer_digest) == (False, OLD.digest)


async def test_a_policy_of_another_project_is_not_changed_by_a_plan_that_does_not_know_of_it(store: Store) -> None:
    mine, theirs = HostSpec(name="desk", slots=2), HostSpec(name="desk", slots=3)
    await apply(store, ApplyPlan(project="a", hosts={"desk": mine}))
    refused = await refusal(apply(store, ApplyPlan(project="b", trainers={"default": NEW}, hosts={"desk": theirs})))
    assert (refused.code, refused.hint) == (Code.CONFLICT, "apply again")
    assert await store.plans.policies() == {"desk": HostPolicy(spec=mine, project="a")}
    assert await store.plans.trainers() == {}
    await apply(store, ApplyPlan(project="b", hosts={"desk": theirs}, take_over=True))
    assert await store.plans.policies() == {"desk": HostPolicy(spec=theirs, project="b")}
