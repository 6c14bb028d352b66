"""PostgreSQL is killed, its backends terminated, its replies lost: nothing confirmed is lost and nobody expires."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from time import monotonic
from typing import TypeVar
from urllib.parse import urlsplit, urlunsplit

from strata.base.errors import Code, StrataError
from strata.fleet.core.jobspec import JobSpec
from strata.fleet.core.plan import ApplyPlan
from strata.fleet.ports import Store
from strata.fleet.records import JobCompletion
from tests.conformance.fleet.fleet import LEASE_S as LONG_S
from tests.conformance.fleet.fleet import add, add_host, all_classes, claim, hold, job, refusal
from tests.shell.fleet_proof.histories import disagreements, read_tables, rows
from tests.shell.fleet_proof.outage import LEASE_S, Hub
from tests.shell.fleet_proof.stores import open_postgres
from tests.support.busy import BUSY
from tests.support.postgres import PostgresServer
from tests.support.proxy import ChaosProxy

T = TypeVar("T")
READY_S = 5.0
JOBS = 3000
AGENTS = 4


@asynccontextmanager
async def hub_at_work(url: str) -> AsyncIterator[Hub]:
    """Agents that complete one job after the other, and a host that holds two jobs for as long as it lasts.

    When all have stopped their books are compared with the tables.
    """
    store = await open_postgres(url)
    try:
        async with _at_work(Hub(store)) as hub:
            yield hub
        await check_books(hub)
    finally:
        await store.close()


@asynccontextmanager
async def _at_work(hub: Hub) -> AsyncIterator[Hub]:
    agents = [f"agent{number}" for number in range(AGENTS)]
    for host in (*agents, "holder"):
        await hub.register(host)
    specs = [JobSpec(model="m", seed=number) for number in range(JOBS)]
    await hub.fleet.jobs.apply(ApplyPlan(new={spec.id: spec for spec in specs}), "test", source="test")
    held = {lease.job_id: lease.epoch for lease in await hub.fleet.claims.claim("holder", "long", count=2)}
    async with asyncio.TaskGroup() as group:
        group.create_task(hub.tick())
        group.create_task(hub.hold("holder", held))
        for agent in agents:
            group.create_task(hub.work(agent))
        yield hub
        hub.stopping = True


async def confirmed_more(hub: Hub, count: int) -> None:
    so_far = len(hub.confirmed)
    async with asyncio.timeout(60):
        while len(hub.confirmed) < so_far + count:
            await asyncio.sleep(0.01)


async def check_books(hub: Hub) -> None:
    artifacts = dict(await rows(hub.store, "SELECT id, artifact FROM job WHERE status = 'completed'"))
    lost = [job_id for job_id, artifact in hub.confirmed.items() if artifacts.get(job_id) != artifact]
    assert lost == []
    tables = await read_tables(hub.store)
    assert disagreements(tables) == []
    assert [kind for _, kind in tables.events if kind in ("job.expired", "job.revived")] == []


async def hurt(hub: Hub, blow: Callable[[], Awaitable[None]]) -> float:
    """How long after the blow the next call was answered."""
    await confirmed_more(hub, 20)
    await blow()
    over_s = monotonic()
    await confirmed_more(hub, 20)
    return hub.answered_at_s - over_s


async def test_a_killed_database_loses_nothing_and_nobody_expires(own_postgres_server: PostgresServer) -> None:
    server = own_postgres_server

    async def kill() -> None:
        await asyncio.to_thread(server.kill)
        # Longer than a lease: whoever could not renew must not be blamed for it.
        await asyncio.sleep(LEASE_S * 1.3)
        await asyncio.to_thread(server.start)

    async with hub_at_work(server.create_database()) as hub:
        assert await hurt(hub, kill) < READY_S * BUSY
        # As long as a hub that is no longer blind needs before it lets leases run out again.
        await asyncio.sleep(LEASE_S * 1.3)


async def test_terminated_backends_lose_nothing(own_postgres_server: PostgresServer) -> None:
    url = own_postgres_server.create_database()

    async def terminate() -> None:
        await asyncio.to_thread(own_postgres_server.terminate_backends, url)

    async with hub_at_work(url) as hub:
        for _ in range(5):
            assert await hurt(hub, terminate) < READY_S * BUSY


@asynccontextmanager
async def store_behind_a_proxy(url: str) -> AsyncIterator[tuple[Store, ChaosProxy]]:
    parts = urlsplit(url)
    assert parts.hostname
    assert parts.port
    async with ChaosProxy(parts.hostname, parts.port) as proxy:
        store = await open_postgres(urlunsplit(parts._replace(netloc=f"{parts.username}@127.0.0.1:{proxy.port}")))
        yield store, proxy
        await store.close()


async def lost_reply(proxy: ChaosProxy, call: Awaitable[object]) -> StrataError:
    """The server does it all and answers; nothing of that arrives."""
    proxy.swallow_replies()
    failed = await refusal(call)
    proxy.heal()
    return failed


async def test_a_claim_whose_reply_was_lost_after_the_commit_is_answered_again(postgres_url: str) -> None:
    async with store_behind_a_proxy(postgres_url) as (store, proxy):
        await add_host(store)
        await add(store, *(job("m", seed=n) for n in range(3)))
        classes = await all_classes(store)
        assert (await lost_reply(proxy, claim(store, count=2, classes=classes))).code is Code.UNAVAILABLE
        given = await store_again(lambda: claim(store, count=2, classes=classes))
        assert [lease.epoch for lease in given] == [1, 1]
        assert (await store.statistics.counts()).ready == 1
        (first, _) = given
        assert (await store.leases.complete(hold(first), JobCompletion(artifact="a"), 1.0)).artifact == "a"
        again = await store.leases.complete(hold(first), JobCompletion(artifact="a"), LONG_S)
        assert (again.artifact, len(await store.jobs.attempts(first.job_id))) == ("a", 1)


async def store_again(call: Callable[[], Awaitable[T]]) -> T:
    """The connections that stood idle were cut with the others; the next call finds that out."""
    try:
        return await call()
    except StrataError:
        return await call()
