"""Hosts that drain for large jobs, gangs that start at once, and attempts that yield to a higher priority."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from strata.fleet.core.amounts import Capacity, Card
from strata.fleet.core.job import Cause, JobStatus
from strata.fleet.core.jobspec import GangPlace, JobSpec
from strata.fleet.core.reservation import GRANT_S, HostOffer, ReservationPlan, ReservationPlanner
from strata.fleet.ports import Store
from strata.fleet.records import JobCompletion, JobFailure, JobLease, Renewal
from tests.conformance.fleet.conftest import open_postgres
from tests.conformance.fleet.fleet import LEASE_S, add, add_host, all_classes, claim, hold, job, kinds, needs

DONE = JobCompletion(artifact="art1")
DESK = Capacity(cards=(Card("GPU-a", 24.0), Card("GPU-b", 24.0)), cores=4, ram_gib=32.0)
SMALL = needs(min_cores=1)
NOW_S = 100.0
HOSTS = ("host_a", "host_b", "host_c")


async def reserve(store: Store, *hosts: str, now_s: float = NOW_S, **settings: Any) -> ReservationPlan:
    classes = await all_classes(store, DESK)
    planner = ReservationPlanner(
        hosts={host: HostOffer(DESK, classes) for host in hosts},
        classes=classes.keys(),
        owners=tuple(await store.owners.active()),
        **settings,
    )
    return await store.leases.reserve(planner, now_s)


async def take(store: Store, host: str, claim_id: str, *, now_s: float = NOW_S, count: int = 1) -> Sequence[JobLease]:
    """As a hub claims: the classes of gangs are not among those that it names."""
    gangs = {row.id for row in await store.plans.classes() if row.requirement.gang}
    classes = {id_: each for id_, each in (await all_classes(store, DESK)).items() if id_ not in gangs}
    return await claim(store, host, now_s=now_s, claim_id=claim_id, count=count, capacity=DESK, classes=classes)


async def reserved(store: Store) -> list[tuple[str, str, str]]:
    return [(each.host_id, each.job.job_id, each.kind) for each in await store.leases.reservations()]


async def drained(store: Store) -> tuple[str, JobLease]:
    """A job that takes a whole host, and a small one that runs on the host that drains for it."""
    await add_host(store)
    await add(store, job("small", needs=SMALL))
    (lease,) = await take(store, "host_a", "c1")
    (whole,) = await add(store, job("whole"))
    await reserve(store, "host_a")
    assert await reserved(store) == [("host_a", whole, "grant")]
    return whole, lease


async def test_a_large_job_gets_its_host_beside_a_stream_of_small_ones(store: Store) -> None:
    whole, lease = await drained(store)
    (late,) = await add(store, job("late", needs=SMALL))
    assert await take(store, "host_a", "c2") == [], "the host drains"
    await store.leases.complete(hold(lease), DONE, NOW_S)
    (large,) = await take(store, "host_a", "c3", count=3)
    assert (large.job_id, large.taken.whole) == (whole, True)
    assert await take(store, "host_a", "c3", count=3) == [large], "asked again"
    assert await reserved(store) == []
    await store.leases.complete(hold(large), DONE, NOW_S)
    assert [each.job_id for each in await take(store, "host_a", "c4")] == [late]
    assert (await kinds(store, whole)).count("job.reserved") == 1


async def test_a_reservation_counts_while_its_job_waits_and_until_it_expires(store: Store) -> None:
    whole, _ = await drained(store)
    await add(store, *(job("late", seed=n, needs=SMALL) for n in range(3)))
    assert await take(store, "host_a", "c2") == []
    assert await take(store, "host_a", "c3", now_s=NOW_S + GRANT_S - 1) == []
    assert len(await take(store, "host_a", "c4", now_s=NOW_S + GRANT_S)) == 1
    await store.jobs.cancel(whole, "no longer wanted", "operator", NOW_S)
    assert len(await take(store, "host_a", "c5", count=2)) == 2
    await reserve(store, "host_a")
    assert await reserved(store) == []


async def test_a_host_that_is_free_earlier_takes_the_job_and_the_other_takes_jobs_again(store: Store) -> None:
    whole, _ = await drained(store)
    await add_host(store, "host_b")
    assert [each.job_id for each in await take(store, "host_b", "c1")] == [whole]
    await add(store, job("late", needs=SMALL))
    assert len(await take(store, "host_a", "c2")) == 1


async def test_jobs_that_fit_beside_what_is_reserved_are_granted(store: Store) -> None:
    await add_host(store)
    await add(store, job("cards", needs=needs(min_gpus=1)), job("more", needs=needs(min_gpus=1)))
    assert len(await take(store, "host_a", "c1", count=2)) == 2
    (both,) = await add(store, job("both", needs=needs(min_gpus=2)))
    await reserve(store, "host_a")
    await add(store, job("one", needs=needs(min_gpus=1)), job("none", needs=SMALL))
    (lease,) = await take(store, "host_a", "c2", count=2)
    assert lease.spec.model == "none", "only cards are reserved, and a core"
    assert await reserved(store) == [("host_a", both, "grant")]


async def test_a_host_that_could_not_set_the_job_up_does_not_get_it_by_its_reservation(store: Store) -> None:
    whole, lease = await drained(store)
    await store.leases.complete(hold(lease), DONE, NOW_S)
    (large,) = await take(store, "host_a", "c2")
    failure = JobFailure(cause=Cause.SETUP_ERROR)
    await store.leases.fail(hold(large), failure, NOW_S, chance=0.0, eligible=["host_a", "host_b"])
    assert (await store.jobs.get(whole)).status is JobStatus.PENDING
    assert await take(store, "host_a", "c3") == []
    await reserve(store, "host_a")
    assert await reserved(store) == []


def members(name: str, size: int, **fields: Any) -> list[JobSpec]:
    return [
        job(name, needs=SMALL, gang=GangPlace(name=name, size=size, index=index, min_size=size), **fields)
        for index in range(size)
    ]


async def test_members_of_a_gang_are_granted_together_and_only_by_reservations(store: Store) -> None:
    for host in ("host_a", "host_b"):
        await add_host(store, host)
    first, second = await add(store, *members("g", 2))
    assert await take(store, "host_a", "c1") == []
    await reserve(store, "host_a", now_s=1.0)
    assert await reserved(store) == [], "one host is not enough"
    await reserve(store, "host_a", "host_b", now_s=1.0)
    assert await reserved(store) == [("host_a", first, "grant"), ("host_b", second, "grant")]
    (one,) = await take(store, "host_a", "c2", now_s=2.0)
    (other,) = await take(store, "host_b", "c1", now_s=2.0)
    assert [one.job_id, other.job_id] == [first, second]
    await reserve(store, "host_a", "host_b", now_s=3.0)
    assert await reserved(store) == []


async def test_a_gang_of_which_a_host_does_not_claim_goes_back_and_is_charged_nothing(store: Store) -> None:
    for host in HOSTS:
        await add_host(store, host)
    first, second = await add(store, *members("g", 2))
    await reserve(store, "host_a", "host_b", now_s=1.0)
    (lease,) = await take(store, "host_a", "c1", now_s=2.0)
    plan = await reserve(store, *HOSTS, now_s=1.0 + GRANT_S)
    assert list(plan.returned) == [first]
    row = await store.jobs.get(first)
    assert (row.status, row.not_before_s) == (JobStatus.PENDING, 1.0 + GRANT_S)
    assert "only 1 of 2 members were claimed in time" in row.reason
    renewal = Renewal(job_id=first, epoch=lease.epoch)
    (verdict,) = await store.leases.renew("host_a", [renewal], LEASE_S, 2.0 + GRANT_S)
    assert verdict.verdict == "stale"
    assert [each.cause for each in await store.jobs.attempts(first)] == [Cause.PREEMPTED]
    await reserve(store, *HOSTS, now_s=2.0 + GRANT_S)
    assert {host for host, _, kind in await reserved(store) if kind == "grant"} == {"host_a", "host_c"}
    assert len(await take(store, "host_a", "c2", now_s=2.0 + GRANT_S)) == 1
    (other,) = await take(store, "host_c", "c1", now_s=2.0 + GRANT_S)
    assert other.job_id in (first, second)


async def test_a_gang_ends_with_a_member_that_fails(store: Store) -> None:
    for host in ("host_a", "host_b"):
        await add_host(store, host)
    first, second = await add(store, *members("g", 2, max_attempts=1))
    await reserve(store, "host_a", "host_b", now_s=1.0)
    (lease,) = await take(store, "host_a", "c1", now_s=1.0)
    await store.leases.fail(hold(lease), JobFailure(cause=Cause.USER_ERROR), 2.0, chance=0.0)
    await reserve(store, "host_a", "host_b", now_s=3.0)
    row = await store.jobs.get(second)
    assert (row.status, row.reason) == (JobStatus.CANCELLED, f"its gang ends: {first} is failed")


async def test_a_lower_priority_yields_with_its_checkpoint_and_resumes_later(store: Store) -> None:
    await add_host(store)
    (low,) = await add(store, job("low", needs=needs(min_cores=4)))
    (lease,) = await take(store, "host_a", "c1")
    await store.leases.record_checkpoint(hold(lease), "artifact1_c", 1.0)
    (high,) = await add(store, job("high", needs=needs(min_cores=4), priority=5))
    await reserve(store, "host_a")
    renewal = Renewal(job_id=low, epoch=lease.epoch, running=True)
    (held,) = await store.leases.renew("host_a", [renewal], LEASE_S, NOW_S)
    assert held.preempt == ""
    plan = await reserve(store, "host_a", now_s=NOW_S + 1, preempt=True)
    assert [each.job_id for each in plan.preempted] == [low]
    (told,) = await store.leases.renew("host_a", [renewal], LEASE_S, NOW_S + 2)
    assert (told.verdict, told.preempt) == ("held", f"yields to {high}, which has priority 5")
    assert (await reserve(store, "host_a", now_s=NOW_S + 3, preempt=True)).preempted == ()
    row = await store.leases.fail(hold(lease), JobFailure(cause=Cause.PREEMPTED), NOW_S + 4, chance=0.0)
    assert row.status is JobStatus.PENDING
    (better,) = await take(store, "host_a", "c2", now_s=NOW_S + 5)
    assert better.job_id == high
    await store.leases.complete(hold(better), DONE, NOW_S + 6)
    await store.leases.release_backoffs(NOW_S + 1e6)
    (again,) = await take(store, "host_a", "c3", now_s=NOW_S + 7)
    assert (again.job_id, again.checkpoint) == (low, "artifact1_c")
    (fresh,) = await store.leases.renew("host_a", [Renewal(job_id=low, epoch=again.epoch)], LEASE_S, NOW_S + 8)
    assert fresh.preempt == "", "the order was for the attempt before"
    assert "job.preempted" in await kinds(store, low)


async def test_two_hubs_that_plan_at_once_reserve_once(postgres_url: str) -> None:
    stores = [await open_postgres(postgres_url) for _ in range(2)]
    try:
        for host in HOSTS:
            await add_host(stores[0], host)
        await add(stores[0], *members("g", 2))
        (whole,) = await add(stores[0], job("whole"))
        await asyncio.gather(*(reserve(each, *HOSTS) for each in stores * 3))
        jobs = [job_id for _, job_id, _ in await reserved(stores[0])]
        assert len(jobs) == len(set(jobs)) == 3
        assert (await kinds(stores[0], whole)).count("job.reserved") == 1
    finally:
        for each in stores:
            await each.close()
