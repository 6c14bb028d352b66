"""One suite for both places of bytes and both databases: a test takes `chunks`, `place`, or both through `place`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from strata.database import events
from strata.database.migrations import SqliteComponents, upgrade_postgres
from strata.database.postgres import Connections
from strata.database.sqlite import SqliteThread
from strata.database.transaction import PostgresDatabase, SqliteDatabase
from strata.fleet.artifacts import tables
from strata.fleet.artifacts.disk import DiskChunks
from strata.fleet.artifacts.index import ArtifactIndex
from strata.fleet.artifacts.objects import ObjectChunks
from strata.fleet.artifacts.ports import ChunkStore
from strata.fleet.artifacts.service import Artifacts
from strata.fleet.ports import Store
from strata.fleet.store.postgres import tables as postgres_tables
from strata.fleet.store.postgres.store import build_postgres_store
from strata.fleet.store.sqlite import tables as sqlite_tables
from strata.fleet.store.sqlite.store import build_sqlite_store
from strata.objects import Bucket
from tests.conformance.artifacts.making import Place
from tests.support.manual_clock import ManualClock
from tests.support.s3 import S3Server


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


async def open_chunks(request: pytest.FixtureRequest, kind: str, folder: Path) -> ChunkStore:
    if kind == "disk":
        return await DiskChunks.open(folder / "artifacts", keep_free_bytes=1 << 20)
    server: S3Server = request.getfixturevalue("s3_server")
    return ObjectChunks(Bucket(server.store(server.create_bucket()), "fleet/artifacts"))


@pytest.fixture(params=["disk", "s3"])
async def chunks(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[ChunkStore]:
    opened = await open_chunks(request, request.param, tmp_path)
    yield opened
    await opened.close()


@pytest.fixture(params=["sqlite disk", "postgres s3"])
async def place(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Place]:
    database, bytes_in = request.param.split()
    fleet: Store
    async with AsyncExitStack() as stack:
        if database == "sqlite":
            components = SqliteComponents([events.SQLITE, sqlite_tables.COMPONENT, tables.SQLITE])
            thread = await SqliteThread.open(tmp_path / "hub.db", components)
            stack.push_async_callback(thread.close)
            index, fleet = ArtifactIndex(SqliteDatabase(thread)), build_sqlite_store(thread)
        else:
            connections = Connections(request.getfixturevalue("postgres_url"), 8, 5.0, what="hub")
            stack.push_async_callback(connections.close)
            async with connections.acquire() as connection:
                await upgrade_postgres(connection, [events.POSTGRES, postgres_tables.COMPONENT, tables.POSTGRES])
            index, fleet = ArtifactIndex(PostgresDatabase(connections)), build_postgres_store(connections)
        chunks = await open_chunks(request, bytes_in, tmp_path)
        stack.push_async_callback(chunks.close)
        clock = ManualClock()
        yield Place(Artifacts(index, chunks, clock, grace_s=1000.0), index, chunks, clock, fleet)
