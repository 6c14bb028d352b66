"""Components share a database; each takes the steps it has not taken, once, or the whole upgrade did not happen."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from strata.base.errors import Code, StrataError
from strata.database.migrations import Component, SqliteComponents, upgrade_postgres
from strata.database.postgres import Connections
from strata.database.sqlite import SqliteThread

ONE = Component("one", 1, ("CREATE TABLE first (a INTEGER);",))
ONE_LATER = Component(
    "one", 1, (*ONE.steps, "ALTER TABLE first ADD COLUMN b INTEGER; CREATE TABLE second (a INTEGER);")
)
RELEASED = Component("one", 7, ONE.steps)
RELEASED_LATER = Component("one", 7, ONE_LATER.steps)
OTHER = Component("other", 1, ("CREATE TABLE third (a INTEGER);",))
BROKEN = Component("other", 1, ("CREATE TABLE third (a INTEGER); CREATE TABLE first (a INTEGER);",))


async def opened(path: Path, *components: Component, create: bool = True) -> SqliteThread:
    return await SqliteThread.open(path, SqliteComponents(components), create=create)


async def tables(path: Path, *components: Component) -> list[str]:
    thread = await opened(path, *components, create=False)
    try:
        rows = await thread.read(lambda db: db.execute("SELECT name FROM sqlite_schema ORDER BY name").fetchall())
    finally:
        await thread.close()
    return [name for (name,) in rows]


async def test_a_file_takes_the_steps_it_lacks_and_keeps_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "strata.db"
    first = await opened(path, ONE)
    await first.write(lambda db: db.execute("INSERT INTO first VALUES (7)"))
    await first.close()
    second = await opened(path, ONE_LATER, OTHER)
    assert await second.read(lambda db: db.execute("SELECT a, b FROM first").fetchall()) == [(7, None)]
    await second.close()
    assert await tables(path, ONE_LATER) == ["first", "second", "strata_schema", "third"]


async def test_a_file_of_a_newer_version_is_refused_untouched(tmp_path: Path) -> None:
    path = tmp_path / "strata.db"
    await (await opened(path, ONE_LATER)).close()
    with pytest.raises(StrataError, match="of one: schema 2 of a newer version; this version reads 1") as refused:
        await opened(path, ONE)
    assert refused.value.code is Code.UNSUPPORTED


async def test_a_file_of_an_unreleased_version_is_refused_untouched(tmp_path: Path) -> None:
    path = tmp_path / "strata.db"
    await (await opened(path, ONE_LATER)).close()
    with pytest.raises(StrataError, match="of one: schema 2 of an unreleased version; this version reads 7") as refused:
        await opened(path, RELEASED)
    assert (refused.value.code, "new database" in str(refused.value.hint)) == (Code.UNSUPPORTED, True)
    assert await tables(path, ONE_LATER) == ["first", "second", "strata_schema"]


async def test_an_empty_file_gets_the_number_of_the_first_release_and_goes_on_from_there(tmp_path: Path) -> None:
    path = tmp_path / "strata.db"
    await (await opened(path, RELEASED)).close()
    later = await opened(path, RELEASED_LATER)
    assert await later.read(lambda db: db.execute("SELECT * FROM strata_schema").fetchall()) == [("one", 8)]
    await later.close()
    assert await tables(path, RELEASED_LATER) == ["first", "second", "strata_schema"]


async def test_a_foreign_file_is_refused_untouched(tmp_path: Path) -> None:
    path = tmp_path / "foreign.db"
    foreign = sqlite3.connect(path)
    foreign.execute("CREATE TABLE theirs (a)")
    foreign.close()
    before = path.read_bytes()
    with pytest.raises(StrataError, match="is not a database of Strata"):
        await opened(path, ONE)
    assert path.read_bytes() == before


async def test_a_step_that_fails_takes_no_part_of_the_upgrade(tmp_path: Path) -> None:
    path = tmp_path / "strata.db"
    await (await opened(path, ONE)).close()
    with pytest.raises(StrataError, match="already exists"):
        await opened(path, ONE_LATER, BROKEN)
    assert await tables(path, ONE) == ["first", "strata_schema"]


@pytest.fixture
async def connections(postgres_url: str) -> AsyncIterator[Connections]:
    connections = Connections(postgres_url, 2, 60.0, what="database")
    yield connections
    await connections.close()


async def postgres_tables(connections: Connections) -> list[Any]:
    rows = await connections.run("SELECT tablename FROM pg_tables WHERE schemaname = 'public' ORDER BY 1", {})
    return [name for (name,) in rows]


async def test_postgres_takes_the_steps_it_lacks_and_refuses_other_versions(connections: Connections) -> None:
    async with connections.acquire() as connection:
        await upgrade_postgres(connection, [ONE])
        await upgrade_postgres(connection, [ONE_LATER, OTHER])
        await upgrade_postgres(connection, [ONE_LATER, OTHER])
    assert await postgres_tables(connections) == ["first", "second", "strata_schema", "third"]
    with pytest.raises(StrataError, match="of one: schema 2 of a newer version; this version reads 1"):
        async with connections.acquire() as connection:
            await upgrade_postgres(connection, [ONE])
    with pytest.raises(StrataError, match="of one: schema 2 of an unreleased version; this version reads 7"):
        async with connections.acquire() as connection:
            await upgrade_postgres(connection, [RELEASED])


async def test_postgres_takes_no_part_of_an_upgrade_whose_step_fails(connections: Connections) -> None:
    async with connections.acquire() as connection:
        await upgrade_postgres(connection, [ONE])
    with pytest.raises(Exception, match="already exists"):
        async with connections.acquire() as connection:
            await upgrade_postgres(connection, [ONE_LATER, BROKEN])
    assert await postgres_tables(connections) == ["first", "strata_schema"]
