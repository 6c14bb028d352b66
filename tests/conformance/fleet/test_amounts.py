"""What a claim gives of a host: no card twice, and no more memory or cores than there are, whoever asks and when."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strata.base.clock import SystemClock
from strata.base.errors import StrataError
from strata.database import events
from strata.database.migrations import SqliteComponents
from strata.database.sqlite import SqliteThread
from strata.fleet.core.amounts import Capacity, Card, MoreMemory, Taken
from strata.fleet.core.capability import GIB, Capability, Gpu
from strata.fleet.core.job import Cause, JobStatus
from strata.fleet.core.plan import ApplyPlan
from strata.fleet.core.requirement import Needs
from strata.fleet.ports import Store
from strata.fleet.records import Claim, HostRow, JobCompletion, JobFailure, JobLease, Renewal
from strata.fleet.service.fleet import Fleet
from strata.fleet.store.sqlite import tables
from strata.fleet.store.sqlite.store import build_sqlite_store
from tests.conformance.fleet.conftest import open_postgres
from tests.conformance.fleet.fleet import LEASE_S, add, add_host, all_classes, claim, hold, job, needs
from tests.support.accounts import assert_within

DONE = JobCompletion(artifact="art1")
DESK = Capacity(cards=(Card("GPU-a", 24.0), Card("GPU-b", 24.0)), cores=8, ram_gib=32.0)
HOSTS: Final = {
    "host_a": DESK,
    "host_b": Capacity(cores=4, ram_gib=8.0),
    "host_c": Capacity(cards=(Card("0", 80.0),), cores=4, ram_gib=64.0, slots=3),
}
MENU: Final = (
    Needs(),
    Needs(min_cores=2),
    Needs(min_ram_gib=6),
    Needs(require_cuda=True),
    Needs(min_vram_gib=20, min_cores=1),
    Needs(min_gpus=2),
    Needs(gpu_share=0.5),
    Needs(gpu_share=0.25, min_vram_gib=10),
    Needs(prefer_cuda=True, min_cores=1),
)


async def test_two_jobs_that_need_a_card_each_get_different_ones_and_a_third_waits(store: Store) -> None:
    await add_host(store)
    await add(store, *(job("m", seed=n, needs=needs(min_vram_gib=20)) for n in range(3)))
    first = await claim(store, count=1, capacity=DESK)
    second = await claim(store, claim_id="c2", count=5, capacity=DESK)
    assert [lease.taken.cards for lease in (*first, *second)] == [("GPU-a",), ("GPU-b",)]
    assert await claim(store, claim_id="c3", capacity=DESK) == []
    assert [each.taken for each in await claim(store, count=1, capacity=DESK)] == [first[0].taken], "asked again"
    assert (await store.jobs.attempts(first[0].job_id))[0].taken == first[0].taken
    assert sorted(taken.cards for taken in (await store.hosts.held())["host_a"]) == [("GPU-a",), ("GPU-b",)]
    await store.leases.complete(hold(first[0]), DONE, 1.0)
    (third,) = await claim(store, claim_id="c4", capacity=DESK)
    assert third.taken.cards == ("GPU-a",)


async def test_two_claims_of_one_host_in_one_batch_share_what_it_has(store: Store) -> None:
    await add_host(store)
    await add(store, *(job("m", seed=n, needs=needs(min_cores=3)) for n in range(4)))
    classes = await all_classes(store, DESK)
    claims = [Claim(host_id="host_a", claim_id=f"c{n}", classes=classes, capacity=DESK) for n in range(4)]
    granted = await store.leases.claim(claims, LEASE_S, 0.0)
    assert [len(leases) for leases in granted] == [1, 1, 0, 0]


async def test_a_job_that_declares_nothing_waits_for_an_empty_host_and_lets_others_pass(store: Store) -> None:
    await add_host(store)
    await add(
        store, job("small", needs=needs(min_cores=1), priority=1), job("whole"), job("late", needs=needs(min_cores=1))
    )
    got = [*await claim(store, capacity=DESK), *await claim(store, claim_id="c2", capacity=DESK)]
    assert [lease.spec.model for lease in got] == ["small", "late"]
    for lease in got:
        await store.leases.complete(hold(lease), DONE, 1.0)
    (whole,) = await claim(store, claim_id="c3", capacity=DESK)
    assert whole.taken == Taken(whole=True, slots=0, cores=8, ram_gib=32.0, cards=("GPU-a", "GPU-b"))


async def test_an_expired_lease_gives_way_and_cannot_be_revived_on_the_card_of_another(store: Store) -> None:
    await add_host(store)
    one_card = DESK._replace(cards=DESK.cards[:1])
    old, fits = await add(store, job("old", needs=needs(require_cuda=True)), job("fits", needs=needs(min_cores=1)))
    (lost,) = await claim(store, capacity=one_card)
    (kept,) = await claim(store, claim_id="c2", capacity=one_card)
    await store.leases.expire(LEASE_S)
    (better,) = await add(store, job("new", needs=needs(require_cuda=True), priority=9), now_s=LEASE_S)
    (lease,) = await claim(store, claim_id="c3", now_s=LEASE_S, capacity=one_card)
    assert (lease.job_id, lease.taken.cards) == (better, lost.taken.cards)
    renewals = [Renewal(job_id=each.job_id, epoch=each.epoch) for each in (lost, kept, lease)]
    verdicts = [each.verdict for each in await store.leases.renew("host_a", renewals, LEASE_S, LEASE_S + 1)]
    assert verdicts == ["stale", "held", "held"], "what still fits beside it is revived"
    assert (await store.jobs.get(old)).status is JobStatus.PENDING
    assert [each.outcome for each in await store.jobs.attempts(old)] == ["lost"]
    assert (await store.jobs.get(fits)).status is not JobStatus.PENDING


async def test_a_host_that_lost_its_job_may_take_it_again(store: Store) -> None:
    await add_host(store)
    await add(store, job("whole"))
    (first,) = await claim(store, capacity=DESK)
    await store.leases.expire(LEASE_S)
    (again,) = await claim(store, claim_id="c2", now_s=LEASE_S, capacity=DESK)
    assert (again.job_id, again.epoch) == (first.job_id, 2)


async def test_a_job_that_ran_out_of_memory_moves_to_a_class_that_needs_more(store: Store) -> None:
    await add_host(store)
    await add(store, job("m"))
    before = await all_classes(store, DESK)
    memory = MoreMemory(needs(above_ram_gib=32.0), "32 GiB of memory")
    failure = JobFailure(cause=Cause.OOM, memory=memory)
    (lease,) = await claim(store, capacity=DESK)
    row = await store.leases.fail(hold(lease), failure, 1.0, chance=0.0, eligible=["host_z"])
    assert row.status is JobStatus.PENDING
    assert "needs more than 32 GiB of memory" in row.reason
    await store.leases.release_backoffs(1e6)
    assert await claim(store, claim_id="c2", capacity=DESK, classes=before) == []
    (moved,) = [each for each in await store.plans.classes() if each.id not in before]
    assert (moved.id, moved.requirement.needs) == (row.class_id, memory.needs)
    (lease,) = await claim(store, claim_id="c3", capacity=DESK)
    row = await store.leases.fail(hold(lease), failure, 2e6, chance=0.0, eligible=[])
    assert (row.status, row.reason) == (
        JobStatus.FAILED,
        "oom: it ran out of 32 GiB of memory, and no eligible host has more",
    )
    assert (await store.jobs.requeue(row.id, "operator", 3e6)).class_id in before


class History:
    """Random claims, ends, expiries and revivals on one database, by one or more hubs."""

    def __init__(self, stores: Sequence[Store], rng: random.Random) -> None:
        self.stores = stores
        self.rng = rng
        self.now_s = 0.0
        self.names = 0
        self.leases: list[JobLease] = []

    async def run(self, jobs: int, steps: int) -> None:
        for host in HOSTS:
            await add_host(self.stores[0], host)
        await add(self.stores[0], *(job("m", seed=n, needs=self.rng.choice(MENU), priority=n % 3) for n in range(jobs)))
        menus = {host: await all_classes(self.stores[0], capacity) for host, capacity in HOSTS.items()}
        self.menus = {
            host: {
                id_: amounts
                for id_, amounts in menus[host].items()
                if amounts.gpus <= len(capacity.cards) and amounts.ram_gib <= capacity.ram_gib
            }
            for host, capacity in HOSTS.items()
        }
        acts: Sequence[Callable[[], Awaitable[None]]] = (self.claim, self.claim, self.end, self.expire, self.renew)
        for _ in range(steps):
            self.now_s += 1.0
            at_once = [self.rng.choice(acts)() for _ in range(len(self.stores))]
            await asyncio.gather(*at_once)
            held = await self.stores[0].hosts.held()
            for host, capacity in HOSTS.items():
                assert_within(capacity, held.get(host, ()))

    def store(self) -> Store:
        return self.rng.choice(self.stores)

    async def claim(self) -> None:
        wanted = []
        for host in self.rng.choices(list(HOSTS), k=self.rng.randrange(1, 5)):
            self.names += 1
            wanted.append(
                Claim(
                    host_id=host,
                    claim_id=f"c{self.names}",
                    classes=self.menus[host],
                    capacity=HOSTS[host],
                    count=self.rng.choice((1, 1, 4)),
                )
            )
        for leases in await self.store().leases.claim(wanted, LEASE_S, self.now_s):
            self.leases += leases

    async def end(self) -> None:
        if self.leases:
            lease = self.leases.pop(self.rng.randrange(len(self.leases)))
            failure = JobFailure(cause=Cause.PREEMPTED)
            # Another host may have the job by now.
            with suppress(StrataError):
                await self.store().leases.fail(hold(lease), failure, self.now_s, chance=0.0)
        await self.store().leases.release_backoffs(self.now_s + 1e6)

    async def expire(self) -> None:
        self.now_s += self.rng.choice((0.0, LEASE_S))
        await self.store().leases.expire(self.now_s)

    async def renew(self) -> None:
        for host in HOSTS:
            mine = [Renewal(job_id=each.job_id, epoch=each.epoch) for each in self.leases if each.host_id == host]
            await self.store().leases.renew(host, mine, LEASE_S, self.now_s)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2**32))
def test_no_history_gives_a_card_twice_or_exceeds_a_host(tmp_path: Path, seed: int) -> None:
    async def run() -> None:
        components = SqliteComponents([events.SQLITE, tables.COMPONENT])
        path = tmp_path / f"{seed}.db"
        store = build_sqlite_store(await SqliteThread.open(path, components))
        try:
            await History([store], random.Random(seed)).run(jobs=24, steps=40)
        finally:
            await store.close()
            for file in tmp_path.glob(f"{seed}.db*"):
                file.unlink()

    asyncio.run(run())


@pytest.mark.parametrize("seed", range(3))
async def test_two_hubs_over_one_database_give_no_card_twice(postgres_url: str, seed: int) -> None:
    stores = [await open_postgres(postgres_url) for _ in range(2)]
    try:
        await History([*stores, *stores], random.Random(seed)).run(jobs=40, steps=40)
    finally:
        for store in stores:
            await store.close()


async def test_a_card_that_is_larger_than_needed_is_left_to_jobs_that_need_it(store: Store) -> None:
    fleet = Fleet(store, SystemClock())
    claims = {}
    for name, vram_gib in (("large", 80), ("small", 24)):
        gpus = (Gpu(name="card", vram_bytes=vram_gib * GIB, uuid=name),)
        capability = Capability(hostname=name, cuda="12.4", gpus=gpus, ram_bytes=64 * GIB, cores=8)
        host = HostRow(id=name, name=name, capability=capability, registered_at_s=fleet.now_s())
        await fleet.hosts.register(host, "operator")
    for name in ("large", "small"):
        claims[name] = asyncio.create_task(fleet.claims.claim(name, "c1", wait_s=30))
        await asyncio.wait([claims[name]], timeout=0.05)
    for model, vram_gib, taker in (("m20", 20, "small"), ("m60", 60, "large")):
        spec = job(model, needs=needs(min_vram_gib=vram_gib))
        await fleet.jobs.apply(ApplyPlan(new={spec.id: spec}), "operator", source="test")
        (lease,) = await asyncio.wait_for(claims[taker], 20)
        assert (lease.host_id, lease.spec.model) == (taker, model)
