"""Applying plans, reading jobs and hosts back, and the feed of events."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
import pytest

from strata.base.errors import Code
from strata.fleet.core.amounts import Amounts
from strata.fleet.core.job import Cause, JobStatus
from strata.fleet.core.jobspec import HostSpec, JobSpec, TrainerSpec
from strata.fleet.core.plan import ApplyPlan, HostPolicy, JobChange, RegisteredTrainer
from strata.fleet.ports import Store
from strata.fleet.records import JobCompletion, JobFailure, JobFilter
from tests.conformance.fleet.fleet import add, add_host, claim, hold, job, kinds, marker, needs, plan, refusal
from tests.support.feed import told_before

Requeue = Callable[[Store, JobSpec, float], Awaitable[None]]


async def test_a_plan_is_kept_whole(store: Store) -> None:
    spec = job("gbt", mode="oracle", hyper={"depth": 3, "rate": 0.1}, name="first", priority=2)
    trainer = TrainerSpec(name="default", command=("python", "train.py"), directory="trainers")
    policy = HostSpec(name="anna", allow_jobs=("gbt",), slots=2)
    whole = plan(spec, trainers={"default": trainer}, hosts={"anna": policy})
    await store.plans.apply(whole, "operator", 7.0, source="manifest.toml")
    row = await store.jobs.get(spec.id)
    assert (row.spec, row.status, row.epoch, row.created_at_s, row.declared) == (spec, JobStatus.PENDING, 0, 7.0, True)
    assert row.trainer_digest == trainer.digest
    assert row.submitted_by == "operator"
    assert await store.plans.trainers() == {
        ("default", "default"): RegisteredTrainer(digest=trainer.digest, spec=trainer)
    }
    assert await store.plans.trainer(trainer.digest) == trainer
    assert await store.plans.policies() == {"anna": HostPolicy(spec=policy)}
    assert (await store.plans.existing_jobs())[spec.id].spec == spec
    assert await kinds(store, "manifest.toml") == ["manifest.applied"]
    await add_host(store)
    (lease,) = await claim(store)
    assert (lease.trainer, lease.trainer_digest) == (trainer, trainer.digest)


async def test_an_empty_plan_writes_nothing(store: Store) -> None:
    await store.plans.apply(ApplyPlan(), "operator", 1.0, source="manifest.toml")
    assert await told_before(await marker(store), store.events.read) == []


async def test_a_plan_with_a_job_that_is_there_already_changes_nothing_at_all(store: Store) -> None:
    await add(store, job("a"))
    refused = await refusal(store.plans.apply(plan(job("b"), job("a")), "operator", 1.0, source="m"))
    assert (refused.code, refused.hint) == (Code.CONFLICT, "apply again")
    assert [row.spec.model for row in await store.jobs.select(JobFilter())] == ["a"]


async def test_a_changed_job_moves_to_its_new_place_in_the_queue(store: Store) -> None:
    await add_host(store)
    first, second = job("first", priority=1), job("second")
    await add(store, first, second)
    risen = job("second", priority=5, needs=needs(require_cuda=True))
    change = JobChange(job_id=second.id, spec=risen, kinds=("priority",), reclassed=True, deferred=False)
    await store.plans.apply(ApplyPlan(changed=(change,)), "operator", 1.0, source="m")
    cuda = {row.id: Amounts() for row in await store.plans.classes() if row.requirement.needs.require_cuda}
    assert [lease.job_id for lease in await claim(store, count=5, classes=cuda)] == [second.id]
    assert [lease.job_id for lease in await claim(store, claim_id="c2", count=5)] == [first.id]


async def test_a_change_of_a_held_job_does_not_put_it_into_the_queue(store: Store) -> None:
    await add_host(store)
    spec = job("a")
    await add(store, spec)
    await claim(store)
    change = JobChange(job_id=spec.id, spec=job("a", priority=3), kinds=("priority",), reclassed=False, deferred=True)
    await store.plans.apply(ApplyPlan(changed=(change,)), "operator", 1.0, source="m")
    assert await claim(store, claim_id="c2") == []
    assert (await store.jobs.get(spec.id)).status is JobStatus.CLAIMED


async def test_a_job_that_the_manifest_lost_is_kept_and_taken_back(store: Store) -> None:
    (job_id,) = await add(store, job("a"))
    await store.plans.apply(ApplyPlan(orphaned=(job_id,)), "operator", 1.0, source="m")
    assert (await store.jobs.get(job_id)).orphaned
    await store.plans.apply(ApplyPlan(unchanged=(job_id,)), "operator", 2.0, source="m")
    assert not (await store.jobs.get(job_id)).orphaned


async def test_a_submitted_job_is_not_declared_until_a_manifest_has_it(store: Store) -> None:
    spec = job("a")
    await store.plans.apply(plan(spec), "key:1", 1.0, source="run", declared=False)
    assert not (await store.jobs.get(spec.id)).declared
    await store.plans.apply(ApplyPlan(unchanged=(spec.id,)), "operator", 2.0, source="m")
    assert (await store.jobs.get(spec.id)).declared


async def requeue_by_plan(store: Store, spec: JobSpec, now_s: float) -> None:
    await store.plans.apply(ApplyPlan(requeued={spec.id: spec}), "operator", now_s, source="m")


async def requeue_alone(store: Store, spec: JobSpec, now_s: float) -> None:
    await store.jobs.requeue(spec.id, "operator", now_s)


REQUEUES = pytest.mark.parametrize("requeue", [requeue_by_plan, requeue_alone])


@REQUEUES
async def test_a_job_waits_again_for_a_requeued_one_that_it_comes_after(store: Store, requeue: Requeue) -> None:
    await add_host(store)
    first, other = job("first"), job("other")
    later = job("later", after=(first.id, other.id), priority=9)
    await add(store, first, other, later)
    for lease in await claim(store, count=2):
        await store.leases.complete(hold(lease), JobCompletion(artifact="art1"), 1.0)
    await requeue(store, first, 2.0)
    assert (await store.jobs.get(later.id)).waits_for == 1
    (again,) = await claim(store, claim_id="c2", count=9, now_s=2.0)
    assert again.job_id == first.id
    await store.leases.complete(hold(again), JobCompletion(artifact="art2"), 3.0)
    assert [lease.job_id for lease in await claim(store, claim_id="c3", now_s=3.0)] == [later.id]


@REQUEUES
async def test_a_job_in_its_back_off_waits_for_a_requeued_one_as_well(store: Store, requeue: Requeue) -> None:
    await add_host(store)
    first = job("first")
    later = job("later", after=(first.id,))
    await add(store, first, later)
    (lease,) = await claim(store)
    await store.leases.complete(hold(lease), JobCompletion(artifact="art1"), 1.0)
    (lease,) = await claim(store, claim_id="c2", now_s=1.0)
    await store.leases.fail(hold(lease), JobFailure(cause=Cause.USER_ERROR), 1.0, chance=0.5)
    await requeue(store, first, 1.0)
    assert await store.leases.release_backoffs(1000.0) == 0
    assert [each.job_id for each in await claim(store, claim_id="c3", count=9, now_s=1000.0)] == [first.id]


@REQUEUES
async def test_the_next_attempt_of_a_held_job_waits_for_a_requeued_one(store: Store, requeue: Requeue) -> None:
    await add_host(store)
    first = job("first")
    later = job("later", after=(first.id,))
    await add(store, first, later)
    (lease,) = await claim(store)
    await store.leases.complete(hold(lease), JobCompletion(artifact="art1"), 1.0)
    (lease,) = await claim(store, claim_id="c2", now_s=1.0)
    await requeue(store, first, 1.0)
    assert (await store.jobs.get(later.id)).status is JobStatus.CLAIMED
    await store.leases.fail(hold(lease), JobFailure(cause=Cause.USER_ERROR), 2.0, chance=0.5)
    assert await store.leases.release_backoffs(1000.0) == 0
    assert [each.job_id for each in await claim(store, claim_id="c3", count=9, now_s=1000.0)] == [first.id]


async def test_equal_requirements_share_a_class(store: Store) -> None:
    await add(store, job("a"), job("a", seed=1), job("a", needs=needs(min_ram_gib=8)))
    await add(store, job("a", seed=2))
    rows = await store.plans.classes()
    assert len(rows) == 2
    assert await store.plans.classes(rows[0].id) == [rows[1]]


async def test_jobs_are_listed_by_page_and_filter(store: Store) -> None:
    await add_host(store)
    ids = await add(store, *(job("a", seed=n) for n in range(5)), job("b", sweep="s"))
    pages, after = [], ""
    while page := await store.jobs.select(JobFilter(after=after, limit=4)):
        pages.append([row.id for row in page])
        after = page[-1].id
    assert pages == [sorted(ids)[:4], sorted(ids)[4:]]
    (lease,) = await claim(store)
    assert [row.id for row in await store.jobs.select(JobFilter(status=[JobStatus.CLAIMED]))] == [lease.job_id]
    assert [row.id for row in await store.jobs.select(JobFilter(host_id="host_a"))] == [lease.job_id]
    assert [row.spec.model for row in await store.jobs.select(JobFilter(model="b", sweep="s"))] == ["b"]
    await store.leases.complete(hold(lease), JobCompletion(), 1.0)
    counts = await store.statistics.counts()
    assert (counts.by_status, counts.ready, counts.hosts) == ({"completed": 1, "pending": 5}, 5, 1)


async def test_ids_are_found_by_their_beginning(store: Store) -> None:
    (job_id,) = await add(store, job("a"))
    tail = job_id.removeprefix("job1_")
    for prefix in (job_id, job_id[:12], tail[:6], tail):
        assert await store.jobs.find(prefix) == [job_id]
    assert await store.jobs.find("zzz") == []


async def test_a_host_keeps_its_state_when_it_registers_again(store: Store) -> None:
    await add_host(store)
    (before,) = await store.hosts.all()
    await store.hosts.set_state("host_a", "draining", "update", "operator", 2.0)
    newer = msgspec.structs.replace(before, agent_version="2", registered_at_s=5.0)
    again = await store.hosts.register(newer, "host:host_a")
    assert (again.state, again.state_reason, again.agent_version) == ("draining", "update", "2")
    await store.hosts.set_state("host_a", "left", "", "host:host_a", 6.0)
    assert (await store.hosts.register(before, "host:host_a")).state == "active"
    missing = await refusal(store.hosts.set_state("host_x", "paused", "", "operator", 1.0))
    assert missing.code is Code.NOT_FOUND


async def test_beats_only_move_forward_and_ignore_strangers(store: Store) -> None:
    await add_host(store, now_s=1.0)
    await store.hosts.record_heartbeats({"host_a": 50.0, "host_x": 50.0})
    await store.hosts.record_heartbeats({"host_a": 40.0})
    assert [(host.id, host.seen_at_s) for host in await store.hosts.all()] == [("host_a", 50.0)]
