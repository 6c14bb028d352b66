"""A feed on PostgreSQL misses nothing although transactions commit in another order than they took their numbers."""

from __future__ import annotations

import asyncio

from strata.database.events import POSTGRES, START, EventRecord, read, record
from strata.database.migrations import upgrade_postgres
from strata.database.postgres import Connections
from strata.database.transaction import PostgresDatabase, PostgresTransaction
from tests.support.feed import ARRIVES_S


def event(subject: str) -> EventRecord:
    return EventRecord(1.0, "hub", "test.happened", subject, {"n": 1})


async def test_a_slow_transaction_with_an_older_number_is_not_skipped(postgres_url: str) -> None:
    connections = Connections(postgres_url, 4, 60.0, what="hub")
    database = PostgresDatabase(connections)
    async with connections.acquire() as connection:
        await upgrade_postgres(connection, [POSTGRES])
    async with connections.transaction() as slow:
        await record(PostgresTransaction(slow), [event("slow")])
        async with connections.transaction() as quick:
            await record(PostgresTransaction(quick), [event("quick")])
        before = await read(database, START, 10)
    seen = before
    async with asyncio.timeout(ARRIVES_S):
        while len(seen) < 2:
            seen += await read(database, seen[-1].cursor if seen else START, 10)
    assert sorted(each.event.subject for each in seen) == ["quick", "slow"]
    assert [each.event.subject for each in await read(database, START, 10, subject="slow")] == ["slow"]
    await connections.close()
