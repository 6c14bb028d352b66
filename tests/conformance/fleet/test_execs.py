"""Commands in running jobs: run at most once, by the host that holds the lease, and not beyond it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import pytest

from strata.database import events
from strata.database.migrations import SqliteComponents, upgrade_postgres
from strata.database.postgres import Connections
from strata.database.sqlite import SqliteThread
from strata.database.transaction import PostgresDatabase, SqliteDatabase
from strata.fleet.execs import MAX_OPEN, REPORT_S, START_S, ExecRow, ExecStore, RequestedExec
from strata.fleet.ports import Store
from strata.fleet.records import JobLease, Renewal
from strata.fleet.store import execs as exec_table
from strata.fleet.store.postgres import tables as postgres_tables
from strata.fleet.store.postgres.store import build_postgres_store
from strata.fleet.store.sqlite import tables as sqlite_tables
from strata.fleet.store.sqlite.store import build_sqlite_store
from tests.conformance.fleet.fleet import LEASE_S, add, add_host, claim, job, kinds


class Tables(NamedTuple):
    fleet: Store
    execs: ExecStore


@pytest.fixture(params=["sqlite", "postgres"])
async def tables(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Tables]:
    if request.param == "sqlite":
        components = SqliteComponents([events.SQLITE, sqlite_tables.COMPONENT, exec_table.SQLITE])
        thread = await SqliteThread.open(tmp_path / "hub.db", components)
        opened = Tables(build_sqlite_store(thread), exec_table.ExecTable(SqliteDatabase(thread)))
    else:
        connections = Connections(request.getfixturevalue("postgres_url"), 8, 60.0, what="hub", by_index=True)
        async with connections.acquire() as connection:
            await upgrade_postgres(connection, [events.POSTGRES, postgres_tables.COMPONENT, exec_table.POSTGRES])
        opened = Tables(build_postgres_store(connections), exec_table.ExecTable(PostgresDatabase(connections)))
    yield opened
    await opened.fleet.close()


async def running(tables: Tables) -> JobLease:
    await add_host(tables.fleet)
    await add(tables.fleet, job("m"))
    (lease,) = await claim(tables.fleet)
    await tables.fleet.leases.renew("host_a", [Renewal(job_id=lease.job_id, epoch=1, running=True)], LEASE_S, 1.0)
    return lease


def wanted(lease: JobLease) -> RequestedExec:
    return RequestedExec(job_id=lease.job_id, command=("ls", "-l", "ä b"), timeout_s=30.0, actor="key:anna")


async def requested(tables: Tables, lease: JobLease, exec_id: str = "e1", now_s: float = 2.0) -> ExecRow:
    row = await tables.execs.add(exec_id, wanted(lease), now_s)
    assert row is not None
    return row


async def test_a_command_goes_from_its_request_to_its_exit_status(tables: Tables) -> None:
    lease = await running(tables)
    row = await requested(tables, lease)
    assert (row.job_id, row.epoch, row.host_id, row.run) == (lease.job_id, 1, "host_a", "")
    assert (row.command, row.timeout_s, row.actor) == (("ls", "-l", "ä b"), 30.0, "key:anna")
    assert await tables.execs.open_execs() == [row]
    started = await tables.execs.start("e1", "host_a", "r1", 3.0)
    assert started is not None
    assert (started.run, started.expires_at_s) == ("r1", 33.0 + REPORT_S)
    ended = await tables.execs.end("e1", "host:host_a", 4.0, run="r1", status=3)
    assert ended is not None
    assert (ended.status, ended.error, ended.ended_at_s) == (3, "", 4.0)
    assert await tables.execs.open_execs() == []
    assert await tables.execs.find("e1") == ended
    assert await tables.execs.find("e2") is None
    assert (await kinds(tables.fleet, lease.job_id))[-2:] == ["job.exec_requested", "job.exec_ended"]


async def test_only_a_job_that_runs_takes_commands(tables: Tables) -> None:
    await add_host(tables.fleet)
    await add(tables.fleet, job("m"))
    (lease,) = await claim(tables.fleet)
    assert await tables.execs.add("e1", wanted(lease), 1.0) is None, "it is claimed, and does not run yet"
    await tables.fleet.jobs.cancel(lease.job_id, "", "operator", 2.0)
    assert await tables.execs.add("e2", wanted(lease), 3.0) is None


async def test_a_job_has_a_few_commands_at_a_time(tables: Tables) -> None:
    lease = await running(tables)
    for number in range(MAX_OPEN):
        await requested(tables, lease, f"e{number}")
    assert await tables.execs.add("more", wanted(lease), 2.0) is None
    await tables.execs.end("e0", "hub", 3.0)
    assert await tables.execs.add("more", wanted(lease), 4.0) is not None


async def test_requests_at_the_same_time_do_not_get_more(tables: Tables) -> None:
    lease = await running(tables)
    rows = await asyncio.gather(*(tables.execs.add(f"e{number}", wanted(lease), 2.0) for number in range(3 * MAX_OPEN)))
    assert sum(row is not None for row in rows) == len(await tables.execs.open_execs()) == MAX_OPEN


async def test_a_command_is_started_once_and_a_repeated_start_gets_the_same_reply(tables: Tables) -> None:
    lease = await running(tables)
    await requested(tables, lease)
    assert await tables.execs.start("e1", "host_b", "r0", 3.0) is None, "it is another host's"
    first = await tables.execs.start("e1", "host_a", "r1", 3.0)
    assert first is not None
    assert await tables.execs.start("e1", "host_a", "r1", 3.0) == first
    assert await tables.execs.start("e1", "host_a", "r2", 4.0) is None, "another process of the agent"
    assert await tables.execs.end("e1", "host:host_a", 5.0, run="r2", status=0) is None
    assert await tables.execs.end("e1", "host:host_a", 5.0, run="r1", status=1) is not None
    assert await tables.execs.end("e1", "hub", 6.0, error="late") is None, "of two ends the first counts"
    assert await tables.execs.start("e1", "host_a", "r1", 7.0) is None


async def test_a_command_ends_with_the_lease_of_its_job(tables: Tables) -> None:
    lease = await running(tables)
    await requested(tables, lease, "before")
    await requested(tables, lease, "begun")
    assert await tables.execs.start("begun", "host_a", "r1", 3.0) is not None
    await tables.fleet.leases.expire(LEASE_S + 2)
    assert await tables.execs.start("before", "host_a", "r2", LEASE_S + 2) is None
    await add_host(tables.fleet, "host_b")
    (later,) = await claim(tables.fleet, "host_b", now_s=LEASE_S + 3)
    await tables.fleet.leases.renew(
        "host_b", [Renewal(job_id=later.job_id, epoch=2, running=True)], LEASE_S, LEASE_S + 4
    )
    assert await tables.execs.start("before", "host_a", "r2", LEASE_S + 4) is None, "the job runs elsewhere"
    await tables.execs.expire(LEASE_S + 5)
    assert await tables.execs.open_execs() == []
    begun = await tables.execs.find("begun")
    assert begun is not None
    assert (begun.status, begun.error) == (None, "the lease of its job has ended")


@pytest.mark.parametrize(
    ("started", "late_s", "reason"),
    [
        (False, START_S, "its host did not start it in time"),
        (True, 30.0 + REPORT_S + 1, "its host did not report its end"),
    ],
)
async def test_a_host_that_is_silent_holds_up_no_person(
    tables: Tables, started: bool, late_s: float, reason: str
) -> None:
    lease = await running(tables)
    await requested(tables, lease)
    if started:
        assert await tables.execs.start("e1", "host_a", "r1", 3.0) is not None
    await tables.execs.expire(2.0 + late_s - 1)
    assert len(await tables.execs.open_execs()) == 1
    await tables.execs.expire(2.0 + late_s)
    row = await tables.execs.find("e1")
    assert row is not None
    assert (row.error, await tables.execs.start("e1", "host_a", "r1", 2.0 + late_s)) == (reason, None)


async def test_commands_that_ended_a_day_ago_are_forgotten(tables: Tables) -> None:
    lease = await running(tables)
    await requested(tables, lease, "old")
    await tables.execs.end("old", "hub", 3.0)
    await requested(tables, lease, "new", exec_table.KEPT_S)
    assert await tables.execs.find("old") is not None
    await requested(tables, lease, "newer", exec_table.KEPT_S + 4)
    assert await tables.execs.find("old") is None
