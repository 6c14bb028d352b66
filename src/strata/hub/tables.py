"""Opens all tables of a hub on SQLite or PostgreSQL: connections (16), timeouts of calls (5 s) and of maintenance (1
h), components and their versions, upgrades.
"""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from strata.base.errors import Code, StrataError
from strata.database import events
from strata.database.address import is_postgres, sqlite_file
from strata.database.migrations import Component, SqliteComponents, read_seal, upgrade_postgres
from strata.database.sqlite import SqliteThread
from strata.database.transaction import Database, PostgresDatabase, SqliteDatabase
from strata.fleet.artifacts import tables as artifact_tables
from strata.fleet.artifacts.index import ArtifactIndex
from strata.fleet.execs import ExecStore
from strata.fleet.ports import Store
from strata.fleet.store import execs as exec_table
from strata.fleet.store.backup import backup_sqlite
from strata.fleet.store.sqlite import tables as fleet_sqlite
from strata.fleet.store.sqlite.store import build_sqlite_store
from strata.hub import cursor_store, schedules, secret_store, sweep_store
from strata.identity import store as identity_store

if TYPE_CHECKING:
    from strata.database.postgres import Connections

CONNECTIONS: Final = 16
CALL_S: Final = 5.0
UPKEEP_S: Final = 3600.0
"""Timeout of one maintenance statement: migrating and fencing touch every row."""
SQLITE: Final = (
    events.SQLITE,
    identity_store.SQLITE,
    fleet_sqlite.COMPONENT,
    artifact_tables.SQLITE,
    cursor_store.SQLITE,
    secret_store.SQLITE,
    sweep_store.SQLITE,
    schedules.SQLITE,
    exec_table.SQLITE,
)


@dataclass(frozen=True, kw_only=True)
class Tables:
    fleet: Store
    identity: identity_store.IdentityStore
    index: ArtifactIndex
    cursors: cursor_store.CursorStore
    secrets: secret_store.SecretRows
    sweeps: sweep_store.SweepStore
    schedules: schedules.ScheduleStore
    execs: ExecStore
    newest_event: Callable[[], Awaitable[str]]
    copy: Callable[[Path, float], Awaitable[int]] | None = None
    """Copies the database into a new file; PostgreSQL has tools of its own."""


@asynccontextmanager
async def open_tables(database: str, *, observe: Callable[[float], None] | None = None) -> AsyncIterator[Tables]:
    """`observe` is called with the seconds that each read and each transaction took."""
    if is_postgres(database):
        async with _open_postgres(database, observe) as tables:
            yield tables
    else:
        async with _open_sqlite(sqlite_file(database), observe) as tables:
            yield tables


@asynccontextmanager
async def _open_sqlite(path: Path, observe: Callable[[float], None] | None) -> AsyncIterator[Tables]:
    thread = await SqliteThread.open(path, SqliteComponents(SQLITE))
    thread.observe = observe
    try:
        yield _tables_on(SqliteDatabase(thread), build_sqlite_store(thread), copy=partial(backup_sqlite, thread))
    finally:
        await thread.close()


@asynccontextmanager
async def _open_postgres(url: str, observe: Callable[[float], None] | None) -> AsyncIterator[Tables]:
    # The driver is an extra of its own: a hub on SQLite does without.
    from strata.database.postgres import Connections, check_database
    from strata.fleet.store.postgres.store import build_postgres_store

    connections = Connections(url, CONNECTIONS, CALL_S, what="hub", by_index=True)
    connections.observe = observe
    try:
        async with connections.transaction() as connection:
            await check_database(connection)
            await upgrade_postgres(connection, postgres_components())
        yield _tables_on(PostgresDatabase(connections), build_postgres_store(connections))
    finally:
        await connections.close()


def _tables_on(database: Database, fleet: Store, copy: Callable[[Path, float], Awaitable[int]] | None = None) -> Tables:
    return Tables(
        fleet=fleet,
        identity=identity_store.IdentityStore(database),
        index=ArtifactIndex(database),
        cursors=cursor_store.CursorStore(database),
        secrets=secret_store.SecretRows(database),
        sweeps=sweep_store.SweepStore(database),
        schedules=schedules.ScheduleStore(database),
        execs=exec_table.ExecTable(database),
        newest_event=partial(events.newest, database),
        copy=copy,
    )


def postgres_components() -> Sequence[Component]:
    from strata.fleet.store.postgres import tables as fleet_postgres

    return (
        events.POSTGRES,
        identity_store.POSTGRES,
        fleet_postgres.COMPONENT,
        artifact_tables.POSTGRES,
        cursor_store.POSTGRES,
        secret_store.POSTGRES,
        sweep_store.POSTGRES,
        schedules.POSTGRES,
        exec_table.POSTGRES,
    )


@asynccontextmanager
async def postgres_connections(url: str, *, call_s: float = UPKEEP_S) -> AsyncIterator[Connections]:
    """Opens connections for maintenance commands: doctor, restore (which fences) and migration."""
    from strata.database.postgres import Connections

    connections = Connections(url, 2, call_s, what="upkeep")
    try:
        yield connections
    finally:
        await connections.close()


async def upgrade_existing(connections: Connections) -> None:
    """Bring the tables up to date; NOT_FOUND if there are none."""
    async with connections.transaction() as connection:
        await upgrade_postgres(connection, postgres_components(), create=False)


class ReadOnlySchema:
    """A SQLite file that is read as it is: of whatever version, and it stays that."""

    what = "database"

    def check_file(self, db: sqlite3.Connection, path: Path, *, create: bool) -> None:
        del create
        if not db.execute("SELECT 1 FROM sqlite_schema WHERE name = 'strata_schema'").fetchone():
            raise StrataError(Code.CONFLICT, f"{path} is not a database of Strata")
        sealed = read_seal(db)
        if sealed is not None:
            raise StrataError(Code.CONFLICT, f"{path} is not to be served from: {sealed}")

    def upgrade(self, db: sqlite3.Connection) -> None:
        """Nothing."""


_VERSIONS: Final = "SELECT component, version FROM strata_schema"


async def sqlite_versions(path: Path) -> Mapping[str, int]:
    """Returns the version of each component, as it is; CONFLICT while a hub uses the file.

    Opened as a hub opens it: a reader of another kind would leave files of its own beside it.
    """
    thread = await SqliteThread.open(path, ReadOnlySchema(), create=False)
    try:
        return dict(await thread.read(lambda db: db.execute(_VERSIONS).fetchall()))
    finally:
        await thread.close()


async def postgres_versions(url: str) -> Mapping[str, int]:
    async with postgres_connections(url, call_s=CALL_S) as connections:
        return dict(await connections.run(_VERSIONS, {}))


def outdated_components(versions: Mapping[str, int], components: Sequence[Component]) -> list[str]:
    """Returns what the next start of a hub would upgrade; UNSUPPORTED if the tables are newer than this version."""
    return [each.name for each in components if each.pending_steps(versions.get(each.name, 0))]
