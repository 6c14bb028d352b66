"""Connections to PostgreSQL: which of them survive a refusal, a caller that leaves, and a statement that fails."""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import AsyncIterator

import psycopg
import pytest

from strata.base.errors import Code, StrataError
from strata.database.postgres import Connections, check_database

PID = "SELECT pg_backend_pid()"
ASLEEP = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'PgSleep'"


@pytest.fixture
async def connections(postgres_url: str) -> AsyncIterator[Connections]:
    opened = Connections(postgres_url, 2, 60.0, what="test")
    yield opened
    await opened.close()


async def backends(connections: Connections) -> set[int]:
    """Of both connections, opened if need be."""
    async with connections.acquire() as one, connections.acquire() as other:
        found = [await (await each.execute(PID)).fetchone() for each in (one, other)]
    return {row[0] for row in found if row}


async def test_a_refusal_inside_a_transaction_undoes_it_and_keeps_every_connection(connections: Connections) -> None:
    before = await backends(connections)

    async def refused() -> None:
        async with connections.transaction() as connection:
            await connection.execute("CREATE TABLE t (n int)")
            raise StrataError(Code.STALE, "somebody else has it")

    with pytest.raises(StrataError):
        await refused()
    assert await connections.run("SELECT to_regclass('t')::text", {}) == [(None,)]
    assert await backends(connections) == before


async def test_a_caller_that_leaves_costs_its_own_connection_and_no_other(connections: Connections) -> None:
    before = await backends(connections)
    leaving = asyncio.create_task(connections.run("SELECT pg_sleep(60)", {}))
    async with asyncio.timeout(30):
        while not await connections.run(ASLEEP, {}):
            pass
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert len(await backends(connections) & before) == 1


async def test_whoever_waits_for_an_answer_leaves_the_processor_alone(connections: Connections) -> None:
    await connections.run("SELECT 1", {})
    before_s = time.thread_time()
    await connections.run("SELECT pg_sleep(0.5)", {})
    assert time.thread_time() - before_s < 0.1


async def test_a_table_that_was_empty_when_its_plan_was_made_is_looked_up_by_its_index(postgres_url: str) -> None:
    connections = Connections(postgres_url, 1, 60.0, what="test", by_index=True)
    await connections.write("CREATE TABLE t (n int PRIMARY KEY)", {})
    await connections.write("VACUUM ANALYZE t", {})
    for number in range(8):
        await connections.run("SELECT 1 FROM t WHERE n = %(n)s", {"n": number})
    ((plan,), *_) = await connections.run("EXPLAIN SELECT 1 FROM t WHERE n = 7", {})
    assert "Index" in plan
    assert await connections.run("SHOW jit", {}) == [("off",)]
    await connections.close()


async def test_statements_of_a_pipeline_commit_together_or_not_at_all(connections: Connections) -> None:
    await connections.write("CREATE TABLE t (n int PRIMARY KEY)", {})
    async with connections.pipeline() as connection:
        await connection.execute("INSERT INTO t VALUES (1)")
        await connection.execute("INSERT INTO t VALUES (2)")

    async def clash() -> None:
        async with connections.pipeline() as connection:
            await connection.execute("INSERT INTO t VALUES (3)")
            await connection.execute("INSERT INTO t VALUES (1)")

    with pytest.raises(StrataError):
        await clash()
    assert await connections.run("SELECT n FROM t ORDER BY n", {}) == [(1,), (2,)]


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me:hun%ter2@db.example/x",
        "postgresql://me:hunter2@[::1/x",
        "postgresql://db.example/x?password=hunter2%zz",
        "postgresql://me:secret@hunter2@db.example/x",
        "postgresql://me:hunter2/secret@db.example/x",
    ],
)
def test_an_address_that_cannot_be_read_is_refused_without_a_word_of_it(url: str) -> None:
    with pytest.raises(StrataError) as refused:
        Connections(url, 1, 5.0, what="test")
    told = "".join(traceback.format_exception(refused.value))
    assert refused.value.code is Code.INVALID
    assert "hun" not in told, "what a driver says of it repeats the password"
    assert "%25" in (refused.value.hint or "")


@pytest.mark.parametrize(
    "url", ["postgresql://a:1,b:2/x", "postgresql://me@[::1]:5432/x", "postgresql:///x?host=@abstract", "host=/tmp"]
)
def test_every_form_of_an_address_that_the_driver_reads_is_taken(url: str) -> None:
    Connections(url, 1, 5.0, what="test")


async def test_a_database_of_another_encoding_is_refused_by_its_encoding(connections: Connections) -> None:
    ((name,),) = await connections.run("SELECT current_database()", {})
    ascii_name = f"{name}_ascii"
    await connections.write(f"CREATE DATABASE {ascii_name} ENCODING 'SQL_ASCII' TEMPLATE template0 LOCALE 'C'", {})
    async with connections.acquire() as connection:
        await check_database(connection)
        url = f"{connection.info.dsn} dbname={ascii_name}"
    async with await psycopg.AsyncConnection.connect(url) as connection:
        with pytest.raises(StrataError, match="the encoding SQL_ASCII, and Strata needs UTF8"):
            await check_database(connection)
    await connections.write(f"DROP DATABASE {ascii_name} WITH (FORCE)", {})
