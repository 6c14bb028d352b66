"""What may happen at the same time: repeated claims in one batch, reports that cross, prerequisites that end late."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psycopg

from strata.fleet.core.amounts import Amounts
from strata.fleet.core.job import Cause, JobStatus
from strata.fleet.core.jobspec import TrainerSpec
from strata.fleet.core.plan import ApplyPlan, JobChange
from strata.fleet.ports import Store
from strata.fleet.records import Claim, JobCompletion, JobFailure, Renewal
from strata.fleet.service.roster import FRESH_S, Roster
from strata.fleet.store.rows import encode
from tests.conformance.fleet.fleet import LEASE_S, ROOMY, add, add_host, all_classes, claim, hold, job, needs, plan

DONE = JobCompletion(artifact="art1")
ONE = Amounts()


async def test_a_claim_that_is_in_one_batch_twice_gets_one_set_of_leases(store: Store) -> None:
    await add_host(store)
    await add(store, *(job("m", seed=n) for n in range(4)))
    asked = Claim(host_id="host_a", claim_id="c1", classes=await all_classes(store), capacity=ROOMY, count=2)
    first, again = await store.leases.claim([asked, asked], LEASE_S, 0.0)
    assert list(again) == list(first)
    assert (await store.statistics.counts()).ready == 2


async def test_claims_of_one_batch_are_answered_in_their_order(store: Store) -> None:
    await add_host(store, "host_a")
    await add_host(store, "host_z")
    await add(store, job("low"), job("high", priority=5))
    classes = await all_classes(store)
    claims = [Claim(host_id=host, claim_id="c1", classes=classes, capacity=ROOMY) for host in ("host_z", "host_a")]
    (first,), (second,) = await store.leases.claim(claims, LEASE_S, 0.0)
    assert (first.spec.model, second.spec.model) == ("high", "low")


async def test_a_claim_may_be_called_anything(store: Store) -> None:
    names = ['a"b', "c\\d", "{e,f}", "g'h", "ü \u2028", "", "NULL"]
    await add_host(store)
    await add(store, *(job("m", seed=n) for n in range(len(names))))
    classes = await all_classes(store)
    claims = [Claim(host_id="host_a", claim_id=name, classes=classes, capacity=ROOMY) for name in names]
    first = await store.leases.claim(claims, LEASE_S, 0.0)
    assert len({lease.job_id for (lease,) in first}) == len(names)
    assert [list(each) for each in await store.leases.claim(claims, LEASE_S, 1.0)] == [list(each) for each in first]


async def test_a_batch_of_hosts_with_different_menus_gives_each_the_best_it_may_take(store: Store) -> None:
    for host in ("host_a", "host_b", "host_c"):
        await add_host(store, host)
    await add(store, *(job(model, seed=n, priority=n) for model in ("x", "y", "z") for n in range(3)))
    classes = sorted(await all_classes(store))
    menus = {"host_a": classes, "host_b": classes[:1], "host_c": classes[:2]}
    claims = [
        Claim(host_id=host, claim_id=f"c{n}", classes=dict.fromkeys(menu, ONE), capacity=ROOMY)
        for n in range(3)
        for host, menu in menus.items()
    ]
    given = await store.leases.claim(claims, LEASE_S, 0.0)
    assert len({lease.job_id for leases in given for lease in leases}) == sum(len(leases) for leases in given)
    assert (await store.statistics.counts()).ready == 9 - sum(len(leases) for leases in given)
    firsts = [leases[0].spec.priority for leases in given[:3] if leases]
    assert max(firsts) == 2
    for wanted, leases in zip(claims, given, strict=True):
        for lease in leases:
            assert lease.host_id == wanted.host_id
            assert (await store.jobs.get(lease.job_id)).class_id in wanted.classes


async def test_a_job_that_does_not_fit_lets_a_smaller_one_pass(store: Store) -> None:
    await add_host(store)
    big = [job("big", needs=needs(slots=3), priority=1, seed=n) for n in range(2)]
    await add(store, *big, job("small"))
    four = ROOMY._replace(slots=4)
    got = [*await claim(store, count=5, capacity=four), *await claim(store, claim_id="c2", count=5, capacity=four)]
    assert [lease.spec.model for lease in got] == ["big", "small"]
    assert await claim(store, claim_id="c3", capacity=four) == []


async def test_an_expired_job_joins_the_queue_when_what_it_comes_after_ends(store: Store) -> None:
    await add_host(store)
    await add_host(store, "host_b")
    needed, waiting = job("needed"), job("waiting", priority=5)
    await add(store, needed, waiting)
    (held,) = await claim(store)
    assert held.job_id == waiting.id
    later = job("waiting", priority=5, after=(needed.id,))
    change = JobChange(job_id=waiting.id, spec=later, kinds=("order",), reclassed=False, deferred=True)
    await store.plans.apply(ApplyPlan(changed=(change,)), "operator", 1.0, source="m")
    (other,) = await claim(store, "host_b", claim_id="c2", now_s=LEASE_S - 1)
    await store.leases.expire(LEASE_S)
    assert await claim(store, "host_b", claim_id="c3", now_s=LEASE_S) == []
    await store.leases.complete(hold(other), DONE, LEASE_S + 1)
    (taken,) = await claim(store, "host_b", claim_id="c4", now_s=LEASE_S + 2)
    assert (taken.job_id, taken.epoch) == (waiting.id, 2)


@asynccontextmanager
async def blocker(url: str, *statements: str) -> AsyncIterator[psycopg.AsyncConnection[tuple[int]]]:
    """Somebody else's transaction, open until the block ends."""
    async with await psycopg.AsyncConnection[tuple[int]].connect(url) as connection:
        for statement in statements:
            await connection.execute(statement.encode())
        yield connection


async def wait_until_blocked(
    connection: psycopg.AsyncConnection[tuple[int]], count: int, *calls: asyncio.Task[object]
) -> None:
    """So many calls wait for a lock of the database, or one of these has ended."""
    select = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    async with asyncio.timeout(10):
        while not any(call.done() for call in calls):
            # The statistics of a transaction are frozen at their first use.
            await connection.execute("SELECT pg_stat_clear_snapshot()")
            row = await (await connection.execute(select)).fetchone()
            if row and row[0] >= count:
                return


async def test_a_renewal_that_waited_for_the_end_of_its_attempt_revives_nothing(
    postgres_store: Store, postgres_url: str
) -> None:
    store = postgres_store
    await add_host(store)
    (job_id,) = await add(store, job("a"))
    (lease,) = await claim(store)
    await store.leases.expire(LEASE_S)
    broken = JobFailure(cause=Cause.USER_ERROR, error="no")
    renewal = Renewal(job_id=job_id, epoch=1, running=True)
    # The failure stops where it writes its event, holding the job; the renewal comes to wait for the job.
    async with blocker(postgres_url, "LOCK TABLE event IN SHARE MODE") as other:
        failing = asyncio.create_task(store.leases.fail(hold(lease), broken, LEASE_S, chance=0.0))
        await wait_until_blocked(other, 1)
        renewing = asyncio.create_task(store.leases.renew("host_a", [renewal], LEASE_S, LEASE_S))
        await wait_until_blocked(other, 2, renewing)
    assert (await failing).status is JobStatus.PENDING
    (renewed,) = await renewing
    assert renewed.verdict == "stale"
    assert (await store.jobs.get(job_id)).status is JobStatus.PENDING


async def test_a_job_added_after_one_that_ends_meanwhile_does_not_wait_for_ever(
    postgres_store: Store, postgres_url: str
) -> None:
    store = postgres_store
    await add_host(store)
    needed = job("needed")
    await add(store, needed)
    (lease,) = await claim(store)
    later = job("later", after=(needed.id,))
    trainer = TrainerSpec(name="default", command=("train",), directory="d")
    # The plan has counted what its job waits for and stops where it writes the trainer.
    async with blocker(postgres_url, "LOCK TABLE trainer IN SHARE MODE") as other:
        applying = asyncio.create_task(
            store.plans.apply(plan(later, trainers={"default": trainer}), "operator", 1.0, source="m")
        )
        await wait_until_blocked(other, 1)
        completing = asyncio.create_task(store.leases.complete(hold(lease), DONE, 2.0))
        await wait_until_blocked(other, 2, completing)
    await applying
    await completing
    assert (await store.jobs.get(later.id)).waits_for == 0
    assert len(await claim(store, claim_id="c2", now_s=3.0)) == 1


async def test_a_hub_finds_a_class_that_was_committed_after_a_later_one(
    postgres_store: Store, postgres_url: str
) -> None:
    roster, early = Roster(postgres_store.plans, postgres_store.hosts, LEASE_S), job("early").requirement
    async with await psycopg.AsyncConnection.connect(postgres_url) as other:
        cursor = await other.execute(
            "INSERT INTO req_class (key, spec) VALUES (%s, %s) RETURNING id", (early.key, encode(early))
        )
        ((class_id,),) = await cursor.fetchall()
        await add(postgres_store, job("late"))
        await roster.refresh(0.0)
        await other.commit()
    await roster.refresh(FRESH_S)
    assert roster.requirement(class_id) == early
