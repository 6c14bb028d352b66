"""Owners of jobs and projects, and what lists hide."""

from __future__ import annotations

from typing import Any

from strata.base.errors import Code
from strata.fleet.core.amounts import Capacity, Card, job_amounts
from strata.fleet.core.job import Cause, JobStatus
from strata.fleet.core.jobspec import JobSpec
from strata.fleet.core.ownership import Submitter
from strata.fleet.core.plan import ApplyPlan
from strata.fleet.core.quota import HOUR_S, OwnerUsage, Quota
from strata.fleet.ports import Store
from strata.fleet.records import Claim, JobFailure, JobFilter
from tests.conformance.fleet.fleet import LEASE_S, add, add_host, claim, hold, job, kinds, needs, plan, refusal

ANNA = Submitter(owner="anna")
BERT = Submitter(owner="bert")


async def apply(store: Store, submitter: Submitter, wanted: ApplyPlan, **more: Any) -> None:
    await store.plans.apply(wanted, f"key:{submitter.owner}", 1.0, source="m", submitter=submitter, **more)


def of_project(*specs: JobSpec, **fields: Any) -> ApplyPlan:
    return plan(*specs, project="p", **fields)


async def test_a_job_belongs_to_its_submitter_and_is_found_by_owner_and_project(store: Store) -> None:
    hers, his = job("hers", project="p"), job("his")
    await apply(store, ANNA, of_project(hers))
    await apply(store, BERT, plan(his), declared=False)
    assert [(await store.jobs.get(spec.id)).owner for spec in (hers, his)] == ["anna", "bert"]
    assert [row.id for row in await store.jobs.select(JobFilter(owner="anna"))] == [hers.id]
    assert [row.id for row in await store.jobs.select(JobFilter(project="default"))] == [his.id]
    assert {id_: each.owner for id_, each in (await store.plans.existing_jobs()).items()} == {
        hers.id: "anna",
        his.id: "bert",
    }


async def test_a_project_belongs_to_the_first_who_uses_it(store: Store) -> None:
    await apply(store, ANNA, of_project(job("a", project="p")))
    assert await store.owners.projects() == {"p": "anna"}
    for declared in (True, False):
        refused = await refusal(apply(store, BERT, of_project(job("b", project="p")), declared=declared))
        assert refused.code is Code.FORBIDDEN
    assert [row.spec.model for row in await store.jobs.select(JobFilter())] == ["a"]
    await add(store, job("c"))
    await store.plans.apply(of_project(job("d", project="p")), "operator", 1.0, source="m")
    assert await store.owners.projects() == {"p": "anna"}


async def test_a_manifest_of_the_default_project_is_for_operators(store: Store) -> None:
    refused = await refusal(apply(store, ANNA, plan(job("a"))))
    assert refused.code is Code.FORBIDDEN
    assert await store.jobs.select(JobFilter()) == []


async def test_a_submitted_job_that_a_manifest_takes_gets_the_owner_of_the_manifest(store: Store) -> None:
    spec = job("a")
    await apply(store, ANNA, plan(spec), declared=False)
    await store.plans.apply(ApplyPlan(unchanged=(spec.id,)), "operator", 2.0, source="m")
    assert (await store.jobs.get(spec.id)).owner == "operator"


async def ended_job(store: Store, spec: JobSpec, claim_id: str = "c1") -> str:
    await apply(store, ANNA, plan(spec, project=spec.project), declared=False)
    (lease,) = await claim(store, await add_host(store), claim_id=claim_id)
    assert lease.job_id == spec.id
    await store.leases.fail(hold(lease), JobFailure(cause=Cause.USER_ERROR), 1.0, chance=0.5)
    return spec.id


async def test_an_archived_job_leaves_lists_and_counts_until_it_is_requeued(store: Store) -> None:
    spec = job("a", max_attempts=1)
    job_id = await ended_job(store, spec)
    assert (await store.jobs.archive(job_id, "key:anna", 2.0)).archived
    assert (await store.jobs.archive(job_id, "key:anna", 3.0)).archived
    assert await store.jobs.select(JobFilter(hidden=False)) == []
    assert [row.id for row in await store.jobs.select(JobFilter())] == [job_id]
    assert (await store.statistics.counts()).by_status == {}
    assert (await kinds(store, job_id)).count("job.archived") == 1
    assert not (await store.jobs.requeue(job_id, "key:anna", 4.0)).archived
    assert (await store.statistics.counts()).by_status == {"pending": 1}
    refused = await refusal(store.jobs.archive(job_id, "key:anna", 5.0))
    assert (refused.code, refused.detail["status"]) == (Code.PRECONDITION, "pending")


async def test_a_superseded_job_is_hidden_once_it_has_ended(store: Store) -> None:
    old, new = job("a", name="x", max_attempts=1), job("b", name="x")
    await apply(store, ANNA, plan(old), declared=False)
    await apply(store, ANNA, plan(new, superseded=(old.id,)), declared=False)
    shown = {row.id: row.newer for row in await store.jobs.select(JobFilter(hidden=False, label="x"))}
    assert shown == {old.id: 1, new.id: 0}
    assert (await store.jobs.cancel(old.id, "", "key:anna", 2.0)).status is JobStatus.CANCELLED
    assert [row.id for row in await store.jobs.select(JobFilter(hidden=False))] == [new.id]
    assert (await store.statistics.counts()).by_status == {"pending": 1}
    assert not (await store.jobs.requeue(old.id, "key:anna", 3.0)).superseded


async def test_a_superseded_job_that_a_manifest_has_again_is_shown(store: Store) -> None:
    old, new = job("a", name="x"), job("b", name="x")
    await add(store, old)
    await store.plans.apply(plan(new, superseded=(old.id,)), "operator", 1.0, source="m")
    await store.jobs.cancel(old.id, "", "operator", 2.0)
    await store.plans.apply(ApplyPlan(unchanged=(old.id,)), "operator", 3.0, source="m")
    assert len(await store.jobs.select(JobFilter(hidden=False))) == 2


async def test_a_plan_beyond_the_quota_changes_nothing(store: Store) -> None:
    await store.owners.set_quota("anna", Quota(jobs=2, max_priority=5), "operator", 0.0)
    assert await store.owners.quotas() == {"anna": Quota(jobs=2, max_priority=5)}
    await apply(store, ANNA, plan(job("a")), declared=False)
    for wanted in (plan(job("b"), job("c"), project="p"), plan(job("d", priority=6), project="p")):
        refused = await refusal(apply(store, ANNA, wanted))
        assert refused.detail["quota"] in ("jobs", "priority")
    assert (await store.owners.projects(), list(await store.plans.existing_jobs())) == ({}, [job("a").id])
    assert await store.owners.usage("anna", 60.0, 1.0) == OwnerUsage(jobs=1)
    await apply(store, BERT, plan(job("e"), job("f"), job("g")), declared=False)
    assert sorted(await store.owners.active()) == ["anna", "bert"]
    await store.owners.set_quota("anna", None, "operator", 0.0)
    await apply(store, ANNA, plan(job("b"), job("c")), declared=False)


async def test_requeued_jobs_count_and_ended_ones_do_not(store: Store) -> None:
    await store.owners.set_quota("*", Quota(jobs=1), "operator", 0.0)
    first = job("a")
    await apply(store, ANNA, plan(first), declared=False)
    await store.jobs.cancel(first.id, "", "key:anna", 1.0)
    await apply(store, ANNA, plan(job("b")), declared=False)
    refused = await refusal(store.jobs.requeue(first.id, "key:anna", 2.0, submitter=ANNA))
    assert refused.code is Code.EXHAUSTED
    assert (await store.jobs.requeue(first.id, "operator", 2.0)).status is JobStatus.PENDING


async def test_gpu_hours_end_with_the_lease_of_a_host_that_is_gone(store: Store) -> None:
    await apply(store, ANNA, plan(job("a", needs=needs(min_gpus=1))), declared=False)
    await add_host(store)
    await claim(store, now_s=1000.0)
    await store.leases.expire(1000.0 + HOUR_S)
    used = await store.owners.usage("anna", 86_400.0, 1000.0 + 10 * HOUR_S)
    assert round(used.gpu_hours * HOUR_S, 6) == LEASE_S
    everybody = await store.owners.usages(86_400.0, 1000.0 + 10 * HOUR_S)
    assert (everybody.attempts, round(everybody.by_owner["anna"].gpu_hours * HOUR_S, 6)) == (1, LEASE_S)


async def test_gpu_hours_are_counted_from_attempts_within_the_window(store: Store) -> None:
    await apply(store, ANNA, plan(job("a", needs=needs(min_gpus=2), max_attempts=1)), declared=False)
    await add_host(store)
    capacity = Capacity(cards=(Card("g0", 24.0), Card("g1", 24.0)), cores=8, ram_gib=64.0)
    classes = {row.id: job_amounts(row.requirement.needs, capacity) for row in await store.plans.classes()}
    wanted = Claim(host_id="host_a", claim_id="c1", classes=classes, capacity=capacity)
    ((lease,),) = await store.leases.claim([wanted], 1e6, 1000.0)
    running = await store.owners.usage("anna", 86_400.0, 1000.0 + HOUR_S)
    assert (running.jobs, round(running.gpu_hours, 6)) == (1, 2.0)
    together = (await store.owners.usages(86_400.0, 1000.0 + HOUR_S)).by_owner
    assert {owner: (each.jobs, round(each.gpu_hours, 6)) for owner, each in together.items()} == {"anna": (1, 2.0)}
    await store.leases.fail(hold(lease), JobFailure(cause=Cause.USER_ERROR), 1000.0 + 2 * HOUR_S, chance=0.5)
    for later_s, hours in ((3 * HOUR_S, 4.0), (25 * HOUR_S, 2.0), (27 * HOUR_S, 0.0)):
        assert round((await store.owners.usage("anna", 24 * HOUR_S, 1000.0 + later_s)).gpu_hours, 6) == hours
        used = (await store.owners.usages(24 * HOUR_S, 1000.0 + later_s)).by_owner
        assert round(sum(each.gpu_hours for each in used.values()), 6) == hours
    await store.owners.set_quota("anna", Quota(gpu_hours=4.0, window_s=86_400.0), "operator", 0.0)
    later = plan(job("b"))
    refused = await refusal(
        store.plans.apply(later, "key:anna", 1000.0 + 3 * HOUR_S, source="m", declared=False, submitter=ANNA)
    )
    assert refused.detail["quota"] == "gpu_hours"
    await store.plans.apply(later, "key:anna", 1000.0 + 25 * HOUR_S, source="m", declared=False, submitter=ANNA)


async def test_without_a_quota_of_its_own_an_owner_cannot_go_before_all_others(store: Store) -> None:
    refused = await refusal(apply(store, ANNA, plan(job("a", priority=1)), declared=False))
    assert (refused.code, refused.detail["quota"]) == (Code.FORBIDDEN, "priority")
    await apply(store, ANNA, plan(job("a", priority=-100), job("b")), declared=False)
    await store.owners.set_quota("anna", Quota(max_priority=10), "operator", 0.0)
    await apply(store, ANNA, plan(job("c", priority=10)), declared=False)
