"""Jobs with a start time: no host gets one before, and every host may once it has come."""

from __future__ import annotations

import msgspec

from strata.fleet.core.job import Cause, JobStatus
from strata.fleet.core.jobspec import JobSpec
from strata.fleet.core.plan import ApplyPlan, JobChange
from strata.fleet.ports import Store
from strata.fleet.records import JobFailure
from tests.conformance.fleet.fleet import add, add_host, claim, hold, job


async def move_start(store: Store, spec: JobSpec, now_s: float) -> None:
    change = JobChange(job_id=spec.id, spec=spec, kinds=("start",), reclassed=False, deferred=False)
    await store.plans.apply(ApplyPlan(changed=(change,)), "operator", now_s, source="manifest")


async def test_a_job_is_claimed_at_its_start_and_not_before(store: Store) -> None:
    await add_host(store)
    early, late = await add(store, job("early"), job("late", not_before_s=100.0), now_s=1.0)
    assert (await store.jobs.get(late)).not_before_s == 100.0
    first = await claim(store, count=2, claim_id="first", now_s=1.0)
    assert [lease.job_id for lease in first] == [early]
    assert await store.leases.release_backoffs(99.999) == 0
    assert await claim(store, claim_id="before", now_s=99.999) == []
    assert await store.leases.release_backoffs(100.0) == 1
    assert [lease.job_id for lease in await claim(store, claim_id="then", now_s=100.0)] == [late]


async def test_a_delay_counts_from_when_the_job_was_queued(store: Store) -> None:
    await add_host(store)
    (late,) = await add(store, job("late", delay_s=60.0), now_s=1000.0)
    assert (await store.jobs.get(late)).not_before_s == 1060.0
    assert await store.leases.release_backoffs(1059.0) == 0
    assert await store.leases.release_backoffs(1060.0) == 1


async def test_a_start_in_the_past_is_no_start(store: Store) -> None:
    await add_host(store)
    (late,) = await add(store, job("late", not_before_s=5.0), now_s=5.0)
    assert [lease.job_id for lease in await claim(store, now_s=5.0)] == [late]


async def test_a_job_waits_for_its_start_and_for_the_jobs_before_it(store: Store) -> None:
    await add_host(store)
    first = job("first")
    _, second = await add(store, first, job("second", not_before_s=50.0, after=(first.id,)))
    assert await store.leases.release_backoffs(60.0) == 0
    (lease,) = await claim(store, now_s=60.0)
    assert lease.job_id == first.id
    await store.jobs.cancel(first.id, "", "operator", 61.0)
    assert await claim(store, claim_id="c2", now_s=61.0) == []
    assert (await store.jobs.get(second)).status is JobStatus.PENDING


async def test_a_changed_start_moves_a_job_that_waits(store: Store) -> None:
    await add_host(store)
    spec = job("m", not_before_s=100.0)
    await add(store, spec, now_s=1.0)
    await move_start(store, msgspec.structs.replace(spec, not_before_s=200.0), 2.0)
    assert await store.leases.release_backoffs(150.0) == 0
    await move_start(store, msgspec.structs.replace(spec, not_before_s=0.0, delay_s=10.0), 3.0)
    assert await store.leases.release_backoffs(11.0) == 1
    await move_start(store, msgspec.structs.replace(spec, not_before_s=300.0), 12.0)
    assert await claim(store, now_s=12.0) == []
    await move_start(store, msgspec.structs.replace(spec, not_before_s=0.0), 13.0)
    assert len(await claim(store, claim_id="c2", now_s=13.0)) == 1


async def test_a_retry_waits_for_its_backoff_and_not_for_the_start(store: Store) -> None:
    await add_host(store)
    (late,) = await add(store, job("late", not_before_s=100.0), now_s=1.0)
    await store.leases.release_backoffs(100.0)
    (lease,) = await claim(store, now_s=100.0)
    failed = await store.leases.fail(hold(lease), JobFailure(cause=Cause.USER_ERROR), 101.0, chance=0.5)
    assert failed.not_before_s > 101.0
    assert failed.spec.starts_at_s(failed.created_at_s) < failed.not_before_s
    await store.jobs.cancel(late, "", "operator", 102.0)
    assert (await store.jobs.requeue(late, "operator", 103.0)).not_before_s == 100.0
    assert len(await claim(store, claim_id="c2", now_s=103.0)) == 1


async def test_a_changed_start_does_not_end_the_backoff_of_a_failure(store: Store) -> None:
    await add_host(store)
    spec = job("m", not_before_s=100.0)
    await add(store, spec, now_s=1.0)
    await store.leases.release_backoffs(100.0)
    (lease,) = await claim(store, now_s=100.0)
    failed = await store.leases.fail(hold(lease), JobFailure(cause=Cause.USER_ERROR), 101.0, chance=0.5)
    await move_start(store, msgspec.structs.replace(spec, not_before_s=0.0), 101.5)
    assert (await store.jobs.get(spec.id)).not_before_s == failed.not_before_s
    await move_start(store, msgspec.structs.replace(spec, not_before_s=9000.0), 101.6)
    assert (await store.jobs.get(spec.id)).not_before_s == 9000.0


async def test_a_job_that_is_requeued_before_its_start_waits_for_it_again(store: Store) -> None:
    await add_host(store)
    (late,) = await add(store, job("late", not_before_s=100.0), now_s=1.0)
    await store.jobs.cancel(late, "", "operator", 2.0)
    assert await store.leases.release_backoffs(1000.0) == 0
    await store.jobs.requeue(late, "operator", 3.0)
    assert await claim(store, now_s=3.0) == []
    assert await store.leases.release_backoffs(100.0) == 1
