"""Migrates a hub's database between SQLite and PostgreSQL: opens both; `strata.fleet.store.migrate` copies the rows."""

from __future__ import annotations

from pathlib import Path

from strata.base.errors import Code, StrataError
from strata.database.migrations import SqliteComponents, upgrade_postgres
from strata.database.sqlite import SqliteThread
from strata.fleet.store import migrate
from strata.fleet.store.backup import require_absent
from strata.hub.tables import SQLITE, is_postgres, postgres_components, postgres_connections, upgrade_existing


async def migrate_database(source: str, target: str, now_s: float) -> migrate.MigratedRows:
    """`sqlite:PATH` and `postgresql://…`, either way round. No hub may use either meanwhile."""
    if is_postgres(source) == is_postgres(target):
        raise StrataError(Code.INVALID, "a database moves from SQLite to PostgreSQL, or from PostgreSQL to SQLite")
    if is_postgres(target):
        thread = await SqliteThread.open(_path(source), SqliteComponents(SQLITE), create=False)
        try:
            async with postgres_connections(target) as connections:
                async with connections.transaction() as connection:
                    await upgrade_postgres(connection, postgres_components())
                return await migrate.to_postgres(thread, connections, now_s)
        finally:
            await thread.close()
    path = _path(target)
    require_absent(path)
    return await _to_sqlite(source, path)


async def _to_sqlite(source: str, path: Path) -> migrate.MigratedRows:
    """The file gets its name when it is whole."""
    beside = path.with_name(f"{path.name}.partial")
    beside.unlink(missing_ok=True)
    try:
        async with postgres_connections(source) as connections:
            await upgrade_existing(connections)
            thread = await SqliteThread.open(beside, SqliteComponents(SQLITE))
            try:
                moved = await migrate.to_sqlite(connections, thread)
            finally:
                # Closing it brings the write-ahead log home, so the one file is all there is.
                await thread.close()
        beside.chmod(0o600)
        beside.rename(path)
    finally:
        for leftover in (beside, Path(f"{beside}-wal")):
            leftover.unlink(missing_ok=True)
    return moved


def _path(database: str) -> Path:
    return Path(database.removeprefix("sqlite:"))
