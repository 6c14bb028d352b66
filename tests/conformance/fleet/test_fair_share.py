"""Claims of a fleet that several owners share."""

from __future__ import annotations

from collections.abc import Sequence

from strata.fleet.core.amounts import Capacity
from strata.fleet.core.fair_share import OwnerShares, add_up
from strata.fleet.core.jobspec import JobSpec
from strata.fleet.core.ownership import Submitter
from strata.fleet.core.plan import ApplyPlan
from strata.fleet.ports import Store
from strata.fleet.records import Claim, JobFilter, JobLease
from tests.conformance.fleet.fleet import LEASE_S, add_host, all_classes, job, plan

HOSTS = 4
CAPACITY = Capacity(cores=2, ram_gib=8.0, slots=8)


async def queue(store: Store, owner: str, *specs: JobSpec) -> None:
    submitter = Submitter(owner=owner)
    await store.plans.apply(plan(*specs), f"key:{owner}", 0.0, source="run", declared=False, submitter=submitter)


async def shares(store: Store) -> OwnerShares:
    return OwnerShares(add_up([CAPACITY] * HOSTS), await store.owners.active(), await store.owners.held())


async def claim_fairly(store: Store, *names: tuple[str, str], count: int = 1) -> Sequence[JobLease]:
    classes = await all_classes(store)
    claims = [
        Claim(host_id=host, claim_id=claim_id, classes=classes, capacity=CAPACITY, count=count)
        for host, claim_id in names
    ]
    return [lease for each in await store.leases.claim(claims, LEASE_S, 0.0, await shares(store)) for lease in each]


async def owners_of(store: Store, leases: Sequence[JobLease]) -> list[str]:
    return [(await store.jobs.get(lease.job_id)).owner for lease in leases]


async def test_owners_take_turns_whoever_queued_more(store: Store) -> None:
    await queue(store, "anna", *(job("a", seed=seed) for seed in range(6)))
    await queue(store, "bert", *(job("b", seed=seed) for seed in range(3)))
    await queue(store, "carl", job("a", seed=9))
    assert list(await store.owners.active()) == ["anna", "bert", "carl"]
    await add_host(store)
    turns = []
    for number in range(10):
        turns += await owners_of(store, await claim_fairly(store, ("host_a", f"c{number}")))
        if number == 7:
            break
    assert sorted(turns[:3]) == ["anna", "bert", "carl"]
    assert sorted(turns) == ["anna"] * 4 + ["bert"] * 3 + ["carl"]
    assert sum(leases for _, _, leases in await store.owners.held()) == 8


async def test_a_batch_of_hosts_shares_its_jobs_out(store: Store) -> None:
    await queue(store, "anna", *(job("a", seed=seed) for seed in range(9)))
    await queue(store, "bert", *(job("a", seed=seed) for seed in range(10, 14)))
    hosts = [await add_host(store, f"host_{number}") for number in range(HOSTS)]
    leases = await claim_fairly(store, *((host, "c1") for host in hosts))
    assert sorted(await owners_of(store, leases)) == ["anna", "anna", "bert", "bert"]
    again = await claim_fairly(store, *((host, "c1") for host in hosts))
    assert {each.job_id for each in again} == {each.job_id for each in leases}
    more = await claim_fairly(store, (hosts[0], "c2"), count=4)
    assert sorted(await owners_of(store, more)) == ["anna", "anna", "bert", "bert"]


async def test_priority_comes_before_the_share_and_age_after_it(store: Store) -> None:
    await queue(store, "anna", job("a", seed=0, priority=-5), job("a", seed=1, priority=-5), job("a", seed=2))
    await queue(store, "bert", job("a", seed=3, priority=-5))
    await add_host(store)
    seeds = [(await claim_fairly(store, ("host_a", f"c{n}")))[0].spec.seed for n in range(4)]
    assert seeds == [2, 3, 0, 1]


async def test_a_job_that_changes_its_owner_is_found_in_the_queue_of_the_new_one(store: Store) -> None:
    spec = job("a")
    await queue(store, "anna", spec)
    await queue(store, "bert", job("b"))
    await queue(store, "carl", job("c"))
    await store.plans.apply(ApplyPlan(unchanged=(spec.id,)), "operator", 1.0, source="m")
    assert sorted(await store.owners.active()) == ["bert", "carl", "operator"]
    await add_host(store)
    leases = [await claim_fairly(store, ("host_a", f"c{n}")) for n in range(3)]
    assert sorted(lease.job_id for each in leases for lease in each) == sorted(
        row.id for row in await store.jobs.select(JobFilter())
    )
