"""Tables of an older version, with rows in them, become those of today: in both databases."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from strata.database import events
from strata.database.migrations import Component, SqliteComponents, upgrade_postgres
from strata.database.postgres import Connections
from strata.database.sqlite import SqliteThread
from strata.fleet.core.jobspec import JobSpec
from strata.fleet.core.quota import Quota
from strata.fleet.ports import JobFilter, Store
from strata.fleet.store.postgres import tables as postgres_tables
from strata.fleet.store.postgres.store import PostgresStore
from strata.fleet.store.rows import encode
from strata.fleet.store.sqlite import tables as sqlite_tables
from strata.fleet.store.sqlite.store import SqliteStore

BEFORE_NUMBERS: Final = 2
"""Steps of `fleet` before attempts had numbers."""
TRIED: Final = JobSpec(model="tried")
NEW: Final = JobSpec(model="new")
NAMED: Final = JobSpec(model="named", name="my job")
_JOB: Final = (
    "INSERT INTO job (id, spec, class_id, status, epoch, created_at, changed_at, not_before, host_id, reason, artifact,"
    " declared, orphaned, waits_for, model, sweep, priority, trainer, charged, lost, excused, checkpoint)"
    " VALUES ({mark}, {mark}, 1, 'pending', {mark}, 0, 0, 0, '', '', '', {yes}, {no}, 0, '', '', 0, '', 0, 0, 0, '')"
)
_ATTEMPT: Final = (
    "INSERT INTO attempt VALUES ({mark}, {mark}, 'host_a', {mark}, 0, NULL, NULL, '', '', '', '', '', {mark})"
)
Rows = Sequence[tuple[str, tuple[Any, ...]]]
_ROWS: Final[Rows] = [
    ("INSERT INTO req_class (key, spec) VALUES ({mark}, {mark})", ("k", encode(TRIED.requirement))),
    (_JOB, (TRIED.id, encode(TRIED), 1_000_001)),
    (_JOB, (NEW.id, encode(NEW), 0)),
    (_JOB, (NAMED.id, encode(NAMED), 0)),
    (_ATTEMPT, (TRIED.id, 1, "c1", b"{}")),
    (_ATTEMPT, (TRIED.id, 2, "c2", b"{}")),
    (_ATTEMPT, (TRIED.id, 1_000_001, "c3", b"{}")),
]


Upgraded = Callable[[int, Rows], Awaitable[Store]]


def older(component: Component, steps: int) -> Component:
    return Component(component.name, component.steps[:steps])


async def upgraded_sqlite(path: Path, steps: int, rows: Rows) -> Store:
    before = SqliteComponents([events.SQLITE, older(sqlite_tables.COMPONENT, steps)])
    thread = await SqliteThread.open(path, before)
    for statement, values in rows:
        text = statement.format(mark="?", yes="1", no="0")
        await thread.write(lambda db, text=text, values=values: db.execute(text, values))  # type: ignore[misc]
    await thread.close()
    now = SqliteComponents([events.SQLITE, sqlite_tables.COMPONENT])
    return SqliteStore(await SqliteThread.open(path, now))


async def upgraded_postgres(url: str, steps: int, rows: Rows) -> Store:
    connections = Connections(url, 8, 60.0, what="hub")
    async with connections.acquire() as connection:
        before = older(postgres_tables.COMPONENT, steps)
        await upgrade_postgres(connection, [events.POSTGRES, before])
    async with connections.transaction() as connection:
        for statement, values in rows:
            await connection.execute(statement.format(mark="%s", yes="true", no="false"), values)
    async with connections.acquire() as connection:
        await upgrade_postgres(connection, [events.POSTGRES, postgres_tables.COMPONENT])
    return PostgresStore(connections)


@pytest.fixture(params=["sqlite", "postgres"])
def upgraded(request: pytest.FixtureRequest, tmp_path: Path) -> Upgraded:
    if request.param == "sqlite":
        return lambda steps, rows: upgraded_sqlite(tmp_path / "hub.db", steps, rows)
    url = request.getfixturevalue("postgres_url")
    return lambda steps, rows: upgraded_postgres(url, steps, rows)


async def test_attempts_of_older_tables_are_numbered_in_their_order(upgraded: Upgraded) -> None:
    store = await upgraded(BEFORE_NUMBERS, _ROWS)
    try:
        attempts = await store.attempts(TRIED.id)
        assert [(each.number, each.epoch) for each in attempts] == [(1, 1), (2, 2), (3, 1_000_001)]
        assert ((await store.job(TRIED.id)).attempts, (await store.job(NEW.id)).attempts) == (3, 0)
        assert [row.id for row in await store.jobs(JobFilter(label=NAMED.label))] == [NAMED.id]
    finally:
        await store.close()


async def test_projects_with_trainers_or_policies_and_no_jobs_get_an_owner(upgraded: Upgraded) -> None:
    before = next(number for number, step in enumerate(sqlite_tables.COMPONENT.steps) if "TABLE project" in step)
    rows: Rows = [
        ("INSERT INTO trainer VALUES ({mark}, {mark})", ("trainer1_x", b"{}")),
        *(("INSERT INTO trainer_name VALUES ({mark}, 't', 'trainer1_x')", (each,)) for each in ("default", "trains")),
        *(("INSERT INTO policy VALUES ({mark}, {mark}, {mark})", (each, b"{}", each)) for each in ("default", "rules")),
    ]
    store = await upgraded(before, rows)
    try:
        assert await store.projects() == {"trains": "operator", "rules": "operator"}
    finally:
        await store.close()


async def test_a_quota_from_before_priorities_above_0_were_the_operators_keeps_its_range(upgraded: Upgraded) -> None:
    before = next(number for number, step in enumerate(sqlite_tables.COMPONENT.steps) if "max_priority" in step)
    insert = "INSERT INTO quota VALUES ({mark}, {mark})"
    rows: Rows = [
        (insert, ("anna", b'{"jobs":5}')),
        (insert, ("bert", b'{"min_priority":-3,"max_priority":7}')),
        (insert, ("*", b"{}")),
    ]
    store = await upgraded(before, rows)
    try:
        assert await store.quotas() == {
            "anna": Quota(jobs=5, max_priority=100),
            "bert": Quota(min_priority=-3, max_priority=7),
            "*": Quota(max_priority=100),
        }
    finally:
        await store.close()
