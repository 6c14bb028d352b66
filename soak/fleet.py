"""Random histories of the fleet's stores, one for each seed: a SQLite file each, or a PostgreSQL server per process."""

from __future__ import annotations

import asyncio
from functools import lru_cache

from tests.shell.fleet_proof.schedule import schedule_history
from tests.shell.fleet_proof.stores import postgres_history, sqlite_history
from tests.support.postgres import PostgresDatabases, PostgresServer


def sqlite(seed: int) -> str | None:
    return asyncio.run(sqlite_history(seed))


def schedule(seed: int) -> str | None:
    return asyncio.run(schedule_history(seed))


def postgres(seed: int) -> str | None:
    server, url = _server()
    return asyncio.run(postgres_history(seed, server, url))


@lru_cache(1)
def _server() -> tuple[PostgresDatabases, str]:
    """The server ends with this process: its reaper notices the exit of the owner."""
    databases = PostgresDatabases(PostgresServer().__enter__().server_url)
    return databases, databases.create_database()
