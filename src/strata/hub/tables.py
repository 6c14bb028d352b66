"""All tables of a hub, in one SQLite file or one PostgreSQL database, and the stores on them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from strata.base.errors import Code, StrataError
from strata.database import events
from strata.database.migrations import SqliteComponents, upgrade_postgres
from strata.database.sqlite import SqliteThread
from strata.fleet import sqlite_tables
from strata.fleet.artifacts import tables as artifact_tables
from strata.fleet.artifacts.ports import Index
from strata.fleet.artifacts.sqlite import SqliteIndex
from strata.fleet.ports import Store
from strata.fleet.sqlite import SqliteStore
from strata.hub import records
from strata.identity import sqlite as identity_sqlite
from strata.identity.ports import IdentityStore

CONNECTIONS: Final = 16
CALL_S: Final = 5.0


@dataclass(frozen=True, kw_only=True)
class Tables:
    fleet: Store
    identity: IdentityStore
    index: Index
    records: records.Records
    newest_event: Callable[[], Awaitable[str]]


@asynccontextmanager
async def open_tables(database: str) -> AsyncIterator[Tables]:
    scheme, separator, rest = database.partition(":")
    if scheme in ("postgresql", "postgres") and separator:
        async with _open_postgres(database) as tables:
            yield tables
    elif "://" in database or not database:
        raise StrataError(
            Code.INVALID,
            f"{scheme + '://…' if scheme else 'nothing'} is not a database Strata knows",
            hint="use sqlite:PATH or postgresql://USER@HOST/NAME",
        )
    else:
        async with _open_sqlite(Path(rest if scheme == "sqlite" and separator else database)) as tables:
            yield tables


@asynccontextmanager
async def _open_sqlite(path: Path) -> AsyncIterator[Tables]:
    components = SqliteComponents(
        [events.SQLITE, identity_sqlite.COMPONENT, sqlite_tables.COMPONENT, artifact_tables.SQLITE, records.SQLITE]
    )
    thread = await SqliteThread.open(path, components)
    try:
        yield Tables(
            fleet=SqliteStore(thread),
            identity=identity_sqlite.SqliteIdentity(thread),
            index=SqliteIndex(thread),
            records=records.SqliteRecords(thread),
            newest_event=partial(events.newest_sqlite, thread),
        )
    finally:
        await thread.close()


@asynccontextmanager
async def _open_postgres(url: str) -> AsyncIterator[Tables]:
    # The driver is an extra of its own: a hub on SQLite does without.
    from strata.database.postgres import Connections, check_durable
    from strata.fleet import postgres_tables
    from strata.fleet.artifacts.postgres import PostgresIndex
    from strata.fleet.postgres import PostgresStore
    from strata.identity import postgres as identity_postgres

    connections = Connections(url, CONNECTIONS, CALL_S, what="hub")
    components = [
        events.POSTGRES,
        identity_postgres.COMPONENT,
        postgres_tables.COMPONENT,
        artifact_tables.POSTGRES,
        records.POSTGRES,
    ]
    try:
        async with connections.transaction() as connection:
            await check_durable(connection)
            await upgrade_postgres(connection, components)
        yield Tables(
            fleet=PostgresStore(connections),
            identity=identity_postgres.PostgresIdentity(connections),
            index=PostgresIndex(connections),
            records=records.PostgresRecords(connections),
            newest_event=partial(events.newest_postgres, connections),
        )
    finally:
        await connections.close()
