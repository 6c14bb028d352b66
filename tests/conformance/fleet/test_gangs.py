"""A gang in the database: its members are cancelled, requeued and archived together, or not at all."""

from __future__ import annotations

from strata.base.errors import Code
from strata.fleet.core.job import JobStatus
from strata.fleet.core.jobspec import GangPlace, JobSpec, gang_members
from strata.fleet.core.ownership import Submitter
from strata.fleet.core.quota import Quota
from strata.fleet.ports import Store
from strata.fleet.records import JobCompletion
from tests.conformance.fleet.fleet import add, add_host, claim, hold, job, kinds, refusal

GANG = gang_members(job("m", gang=GangPlace(name="sft", size=3, index=0, min_size=1)))


async def statuses(store: Store) -> list[JobStatus]:
    return [(await store.jobs.get(spec.id)).status for spec in GANG]


async def run(store: Store) -> list[int]:
    specs = [(await store.jobs.get(spec.id)).spec for spec in GANG]
    return [spec.gang.run for spec in specs if spec.gang is not None]


async def complete(store: Store, count: int, claim_id: str = "c1") -> list[str]:
    """The labels of members that a host claims and completes."""
    leases = await claim(store, count=count, claim_id=claim_id)
    for lease in leases:
        await store.leases.complete(hold(lease), JobCompletion(), 1.0)
    return [lease.spec.label for lease in leases]


async def test_cancelling_a_member_cancels_the_gang(store: Store) -> None:
    await add(store, *GANG)
    await add_host(store)
    assert await complete(store, 1) == ["sft/0"]
    row = await store.jobs.cancel(GANG[2].id, "no use", "operator", 2.0)
    assert (row.id, row.status) == (GANG[2].id, JobStatus.CANCELLED)
    assert await statuses(store) == [JobStatus.COMPLETED, JobStatus.CANCELLED, JobStatus.CANCELLED]
    assert await kinds(store, GANG[1].id) == ["job.created", "job.cancelled"]
    await store.jobs.cancel(GANG[2].id, "again", "operator", 3.0)
    assert await kinds(store, GANG[1].id) == ["job.created", "job.cancelled"]


async def test_a_cancelled_gang_goes_on_in_its_run_and_a_completed_one_begins_the_next(store: Store) -> None:
    await add(store, *GANG)
    await add_host(store)
    await store.jobs.cancel(GANG[0].id, "", "operator", 1.0)
    await store.jobs.requeue(GANG[1].id, "operator", 2.0)
    assert await statuses(store) == [JobStatus.PENDING] * 3
    assert await run(store) == [0, 0, 0]
    assert await complete(store, 3) == ["sft/0", "sft/1", "sft/2"]
    row = await store.jobs.requeue(GANG[1].id, "operator", 3.0)
    assert row.id == GANG[1].id
    assert await statuses(store) == [JobStatus.PENDING] * 3
    assert await run(store) == [1, 1, 1]
    leases = await claim(store, count=3, claim_id="c2")
    assert [lease.spec.gang.run for lease in leases if lease.spec.gang is not None] == [1, 1, 1]


async def test_only_members_that_have_ended_are_requeued(store: Store) -> None:
    await add(store, *GANG)
    await add_host(store)
    await complete(store, 1)
    await store.jobs.requeue(GANG[0].id, "operator", 2.0)
    assert await statuses(store) == [JobStatus.PENDING] * 3
    assert await run(store) == [0, 0, 0]
    assert (await refusal(store.jobs.requeue(GANG[0].id, "operator", 3.0))).code is Code.PRECONDITION


async def test_a_gang_is_requeued_within_the_quota_of_its_owner_or_not_at_all(store: Store) -> None:
    owner = Submitter(owner="ada")
    await add(store, *GANG)
    await store.jobs.cancel(GANG[0].id, "", "operator", 1.0)
    await store.owners.set_quota("ada", Quota(jobs=2), "operator", 1.0)
    assert (await refusal(store.jobs.requeue(GANG[0].id, "ada", 2.0, submitter=owner))).code is Code.EXHAUSTED
    assert await statuses(store) == [JobStatus.CANCELLED] * 3


async def test_a_gang_is_archived_as_a_whole_once_all_members_have_ended(store: Store) -> None:
    await add(store, *GANG)
    await add_host(store)
    await complete(store, 2)
    assert (await refusal(store.jobs.archive(GANG[0].id, "operator", 2.0))).code is Code.PRECONDITION
    await complete(store, 1, "c2")
    await store.jobs.archive(GANG[0].id, "operator", 2.0)
    rows = [await store.jobs.get(spec.id) for spec in GANG]
    assert [row.archived for row in rows] == [True] * 3


async def test_jobs_that_train_alone_are_not_a_gang(store: Store) -> None:
    one, other = JobSpec(model="m"), JobSpec(model="m", seed=1)
    await add(store, one, other)
    await store.jobs.cancel(one.id, "", "operator", 1.0)
    assert (await store.jobs.get(other.id)).status is JobStatus.PENDING
