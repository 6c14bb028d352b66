"""What only the PostgreSQL journal has: many processes, its own clock, settings it must not trust."""

from __future__ import annotations

import asyncio

import psycopg
import pytest

from strata.base.clock import SystemClock
from strata.base.errors import Code, StrataError
from strata.journal.group_commit import Writer
from strata.journal.postgres import PostgresJournal
from tests.support.busy import BUSY
from tests.support.ports import reserve_port
from tests.support.postgres import PostgresServer
from tests.support.proxy import ChaosProxy


async def test_many_processes_may_open_a_new_database_at_once(postgres_url: str) -> None:
    journals = await asyncio.gather(*(PostgresJournal.open(postgres_url, SystemClock()) for _ in range(8)))
    for journal in journals:
        await journal.close()


async def test_a_look_creates_nothing(postgres_url: str) -> None:
    with pytest.raises(StrataError) as caught:
        await PostgresJournal.open(postgres_url, SystemClock(), create=False)
    assert caught.value.code is Code.NOT_FOUND
    async with await psycopg.AsyncConnection.connect(postgres_url) as connection:
        rows = await (await connection.execute("SELECT 1 FROM pg_tables WHERE schemaname = 'public'")).fetchall()
    assert rows == []


async def test_a_role_that_commits_asynchronously_is_overruled(postgres_url: str) -> None:
    async with await psycopg.AsyncConnection.connect(postgres_url, autocommit=True) as connection:
        name = postgres_url.rsplit("/", 1)[1]
        await connection.execute(f'ALTER DATABASE "{name}" SET synchronous_commit = off'.encode())
    async with await PostgresJournal.open(postgres_url, SystemClock()) as journal:
        assert await journal._connections.run("SHOW synchronous_commit", {}) == [("on",)]


async def test_a_newer_schema_is_refused(postgres_url: str) -> None:
    async with await PostgresJournal.open(postgres_url, SystemClock()):
        pass
    async with await psycopg.AsyncConnection.connect(postgres_url, autocommit=True) as connection:
        await connection.execute("UPDATE journal_schema SET version = 99")
    with pytest.raises(StrataError, match="journal: schema 99 of a newer version; this version reads 1") as caught:
        await PostgresJournal.open(postgres_url, SystemClock())
    assert caught.value.code is Code.UNSUPPORTED


async def test_a_server_that_is_not_there_is_unavailable_and_its_password_stays_secret() -> None:
    with reserve_port() as port:
        url = f"postgresql://someone:hunter2@127.0.0.1:{port.getsockname()[1]}/nowhere"
        with pytest.raises(StrataError) as caught:
            await PostgresJournal.open(url, SystemClock())
    assert caught.value.code is Code.UNAVAILABLE
    assert "hunter2" not in str(caught.value)


async def test_two_openings_see_each_other_and_the_epoch_decides(postgres_url: str) -> None:
    async with (
        await PostgresJournal.open(postgres_url, SystemClock()) as here,
        await PostgresJournal.open(postgres_url, SystemClock()) as there,
    ):
        old = await here.lead("s", "here", 0.0)
        await here.append("s", old.epoch, 0, [b"x"])
        waiting = asyncio.create_task(here.wait_for_growth("s", 1, 10.0))
        new = await there.lead("s", "there", 60.0)
        await there.append("s", new.epoch, 1, [b"y"])
        assert await waiting == 2
        with pytest.raises(StrataError) as caught:
            await here.append("s", old.epoch, 2, [b"z"])
        assert caught.value.code is Code.STALE


async def test_a_cancelled_call_ends(postgres_url: str) -> None:
    """However often it is cancelled at an unlucky moment: a standby told to stop must stop."""
    async with await PostgresJournal.open(postgres_url, SystemClock()) as journal:
        await journal.lead("s", "a", 60.0)

        async def ask_for_ever() -> None:
            while True:
                await journal.confirm("s", 1)

        for steps in range(200):
            asking = asyncio.create_task(ask_for_ever())
            for _ in range(steps % 40):
                await asyncio.sleep(0)
            asking.cancel()
            async with asyncio.timeout(5):
                await asyncio.wait([asking])
            assert asking.cancelled()


async def test_an_outage_is_over_when_the_database_is_back(own_postgres_server: PostgresServer) -> None:
    """Not seconds later, however long it lasted: nothing here backs off for long."""
    url = own_postgres_server.create_database()
    async with await PostgresJournal.open(url, SystemClock()) as journal:
        writer = Writer(journal, await journal.lead("s", "a", 60.0), SystemClock())
        await writer.append([b"before"])
        await asyncio.to_thread(own_postgres_server.stop, "immediate")
        waiting = writer.submit([b"meanwhile"])
        await asyncio.sleep(5.0)
        await asyncio.to_thread(own_postgres_server.start)
        async with asyncio.timeout(2.0 * BUSY):
            assert await waiting == 2


async def test_a_database_that_falls_silent_does_not_outlast_a_deadline(own_postgres_server: PostgresServer) -> None:
    url = own_postgres_server.create_database()
    async with ChaosProxy("127.0.0.1", own_postgres_server.port) as proxy:
        through = url.replace(f":{own_postgres_server.port}", f":{proxy.port}")
        async with await PostgresJournal.open(through, SystemClock(), call_s=1.0) as journal:
            lead = await journal.lead("s", "a", 60.0)
            proxy.stall()
            started_s = SystemClock().monotonic_s()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await journal.confirm("s", lead.epoch)
            with pytest.raises(StrataError) as caught:
                await journal.load_snapshot("s")
            assert caught.value.code is Code.UNAVAILABLE
            assert SystemClock().monotonic_s() - started_s < 3.0 * BUSY
            proxy.cut()
            proxy.heal()
            await journal.confirm("s", lead.epoch)
