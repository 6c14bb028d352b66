"""One suite for both databases, and for the one in memory that histories use: a test takes `store`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from strata.database import events
from strata.database.migrations import SqliteComponents, upgrade_postgres
from strata.database.postgres import Connections
from strata.database.sqlite import SqliteThread
from strata.fleet.ports import Store
from strata.fleet.store.postgres import tables as postgres_tables
from strata.fleet.store.postgres.store import build_postgres_store
from strata.fleet.store.sqlite import tables as sqlite_tables
from strata.fleet.store.sqlite.store import build_sqlite_store
from tests.shell.fleet_proof.stores import open_memory


@pytest.fixture(params=["sqlite", "memory", "postgres"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    opened: Store
    if request.param == "sqlite":
        components = SqliteComponents([events.SQLITE, sqlite_tables.COMPONENT])
        opened = build_sqlite_store(await SqliteThread.open(tmp_path / "hub.db", components))
    elif request.param == "memory":
        opened = open_memory()
    else:
        opened = await open_postgres(request.getfixturevalue("postgres_url"))
    yield opened
    await opened.close()


@pytest.fixture
async def postgres_store(postgres_url: str) -> AsyncIterator[Store]:
    """For what only a database with many writers can get wrong."""
    opened = await open_postgres(postgres_url)
    yield opened
    await opened.close()


async def open_postgres(url: str) -> Store:
    connections = Connections(url, 8, 5.0, what="hub")
    async with connections.acquire() as connection:
        await upgrade_postgres(connection, [events.POSTGRES, postgres_tables.COMPONENT])
    # So few that a search of a small fleet needs its second look.
    return build_postgres_store(connections, newest_matches=8)
