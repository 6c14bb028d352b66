"""Tables of artifacts of an older version, with rows in them, become those of today: in both databases."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

import pytest

from strata.base.errors import Code
from strata.database import events
from strata.database.migrations import Component, SqliteComponents, upgrade_postgres
from strata.database.postgres import Connections
from strata.database.sqlite import SqliteThread
from strata.fleet.artifacts.manifest import ArtifactKind, ArtifactManifest, Lineage
from strata.fleet.artifacts.ports import ArtifactIndex, Commit, LineageFilter, StorageAccount
from strata.fleet.artifacts.store import tables
from strata.fleet.artifacts.store.postgres import PostgresIndex
from strata.fleet.artifacts.store.rows import encode
from strata.fleet.artifacts.store.sqlite import SqliteIndex
from strata.fleet.store.postgres import tables as postgres_tables
from strata.fleet.store.sqlite import tables as sqlite_tables
from tests.conformance.artifacts.making import manifest_of, refusal

Rows = Sequence[tuple[str, tuple[Any, ...]]]
Upgraded = Callable[[int, Rows], Awaitable[ArtifactIndex]]


def older(component: Component, steps: int) -> Component:
    return Component(component.name, component.steps[:steps])


@pytest.fixture(params=["sqlite", "postgres"])
async def upgraded(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Upgraded]:
    async with AsyncExitStack() as stack:

        async def sqlite(steps: int, rows: Rows) -> ArtifactIndex:
            fleet, path = [events.SQLITE, sqlite_tables.COMPONENT], tmp_path / "hub.db"
            thread = await SqliteThread.open(path, SqliteComponents([*fleet, older(tables.SQLITE, steps)]))
            for statement, values in rows:
                text = statement.replace("%s", "?")
                await thread.write(lambda db, text=text, values=values: db.execute(text, values))  # type: ignore[misc]
            await thread.close()
            thread = await SqliteThread.open(path, SqliteComponents([*fleet, tables.SQLITE]))
            stack.push_async_callback(thread.close)
            return SqliteIndex(thread)

        async def postgres(steps: int, rows: Rows) -> ArtifactIndex:
            fleet = [events.POSTGRES, postgres_tables.COMPONENT]
            connections = Connections(request.getfixturevalue("postgres_url"), 8, 60.0, what="hub")
            stack.push_async_callback(connections.close)
            async with connections.acquire() as connection:
                await upgrade_postgres(connection, [*fleet, older(tables.POSTGRES, steps)])
            async with connections.transaction() as connection:
                for statement, values in rows:
                    await connection.execute(statement, values)
            async with connections.acquire() as connection:
                await upgrade_postgres(connection, [*fleet, tables.POSTGRES])
            return PostgresIndex(connections)

        yield sqlite if request.param == "sqlite" else postgres


def before(word: str) -> int:
    """How many steps there were before the one with this word."""
    return next(number for number, step in enumerate(tables.SQLITE.steps) if word in step)


ARTIFACT: Final = (
    "INSERT INTO artifact (id, manifest, size, committed_at, pinned, owner, removed_at)"
    " VALUES (%s, %s, 0, 0, '', %s, %s)"
)
LINEAGE: Final = (
    "INSERT INTO artifact_lineage (id, artifact_id, committed_at, kind, job_id, model, mode, actor, body)"
    " VALUES (%s, %s, 0, 'data', '', %s, '', %s, %s)"
)
EMPTY: Final = [manifest_of({name: b""}) for name in "abcd"]


def artifact(manifest: ArtifactManifest, owner: str, removed: float | None = None) -> tuple[str, tuple[Any, ...]]:
    return ARTIFACT, (manifest.id, manifest.encode(), owner, removed)


def named(manifest: ArtifactManifest, name: str, actor: str) -> tuple[str, tuple[Any, ...]]:
    made = Lineage(kind=ArtifactKind.DATA, model=name)
    return LINEAGE, (made.id_for(manifest.id), manifest.id, name, actor, encode(made))


async def push(index: ArtifactIndex, owner: str, actor: str, name: str) -> None:
    made = Lineage(kind=ArtifactKind.DATA, model=name, mode="new")
    account = StorageAccount(owner=owner)
    await index.commit(Commit(manifest=EMPTY[3], lineage=made, actor=actor, account=account), 1.0)


async def test_a_name_of_older_tables_is_of_the_one_who_committed_under_it(upgraded: Upgraded) -> None:
    shared, alone, old = EMPTY[:3]
    rows: Rows = [
        artifact(shared, "rob"), artifact(alone, "anna"), artifact(old, ""),
        named(shared, "x", "key:rob"), named(shared, "images", "key:anna"), named(alone, "hers", "key:anna"),
        named(old, "early", "key:anna"), named(old, "first", ""),
    ]  # fmt: skip
    index = await upgraded(before("TABLE data_name"), rows)
    for name in ("images", "early", "hers", "first"):
        assert (await refusal(push(index, "rob", "key:rob", name))).code is Code.FORBIDDEN, name
    for name in ("images", "early", "hers"):
        await push(index, "anna", "key:anna", name)
        await push(index, "anna", "key:renewed", name)
    owners = {row.lineage.model: row.owner for row in await index.lineages(LineageFilter())}
    assert owners == {"x": "key:rob", "images": "anna", "hers": "anna", "early": "anna", "first": "operator"}


async def test_what_older_tables_had_removed_is_withdrawn(upgraded: Upgraded) -> None:
    kept, gone = EMPTY[:2]
    rows: Rows = [
        artifact(kept, "anna"), artifact(gone, "anna", 7.0), named(kept, "a", "key:anna"), named(gone, "b", "key:anna")
    ]  # fmt: skip
    index = await upgraded(before("ADD COLUMN pinned_by"), rows)
    made = {row.lineage.model: row.removed_at_s for row in await index.lineages(LineageFilter(removed=True))}
    assert made == {"a": None, "b": 7.0}
    assert await index.withdraw(kept.id, "anna", "", "key:anna", 8.0)
