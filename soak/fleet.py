"""Histories of the fleet's stores, one for each seed: a file each on SQLite, a server per process on PostgreSQL."""

from __future__ import annotations

import asyncio
from functools import lru_cache

from strata.testing.postgres import PostgresDatabases, PostgresServer
from tests.shell.fleet_proof.stores import postgres_history, sqlite_history


def sqlite(seed: int) -> str | None:
    return asyncio.run(sqlite_history(seed))


def postgres(seed: int) -> str | None:
    server, url = _server()
    return asyncio.run(postgres_history(seed, server, url))


@lru_cache(1)
def _server() -> tuple[PostgresDatabases, str]:
    """Ends with this process: its cleaner notices the death of the owner."""
    databases = PostgresDatabases(PostgresServer().__enter__().server_url)
    return databases, databases.create_database()
