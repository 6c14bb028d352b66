"""Schema migrations: versions of components, upgrades, sealed databases, and the errors of older or newer schemas.

A component is a package with tables of its own (`fleet`, `identity`); several share one database, so that one backup
holds them all. Its first step brings an empty database to the number that was first released; no step leads there from
the numbers below, which development used up. A step is never edited once released: the next change is the next step.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, LiteralString

from strata.base.errors import Code, StrataError
from strata.base.failpoint import failpoint
from strata.database.sqlite import is_empty, run_script

SCHEMA_LOCK: Final = 0x5354_5241_5441_0002
"""Advisory lock of PostgreSQL under which one process at a time creates or upgrades the tables."""


@dataclass(frozen=True)
class Component:
    name: str
    first: int
    """The number of an empty database after the first step."""
    steps: tuple[LiteralString, ...]
    """Each step after the first brings a number to the next one."""

    @property
    def version(self) -> int:
        return self.first + len(self.steps) - 1

    def in_sqlite(self) -> Component:
        """The same tables in SQLite: for steps that create tables and indexes alone, as PostgreSQL reads them."""
        return Component(self.name, self.first, tuple(map(_to_sqlite, self.steps)))

    def pending_steps(self, version: int) -> Sequence[LiteralString]:
        if not version:
            return self.steps
        check_schema(f"the tables of {self.name}", version, self.first, self.version)
        return self.steps[version - self.first + 1 :]


_SQLITE_WORDS: Final[Sequence[tuple[LiteralString, LiteralString]]] = (
    (" bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY", " INTEGER PRIMARY KEY AUTOINCREMENT"),
    (' text COLLATE "C"', " TEXT"),
    (" text", " TEXT"),
    (" bytea", " BLOB"),
    (" bigint", " INTEGER"),
    (" integer", " INTEGER"),
    (" boolean", " INTEGER"),
    (" double precision", " REAL"),
    (" WITH (fillfactor = 80)", ""),
)


def _to_sqlite(step: LiteralString) -> LiteralString:
    for postgres, sqlite in _SQLITE_WORDS:
        step = step.replace(postgres, sqlite)
    return ";".join(_to_sqlite_table(statement) for statement in step.split(";"))


def _to_sqlite_table(statement: LiteralString) -> LiteralString:
    """Keeps a table by its key, unless that is a number, and lets it take values of its types alone."""
    if "CREATE TABLE" not in statement:
        return statement
    return statement + (" STRICT" if "INTEGER PRIMARY KEY" in statement else " WITHOUT ROWID, STRICT")


def check_schema(what: str, version: int, first: int, newest: int) -> None:
    """UNSUPPORTED for a schema that no release wrote, and for one of a newer version."""
    if version < first:
        raise StrataError(
            Code.UNSUPPORTED,
            f"{what}: schema {version} of an unreleased version; this version reads {newest}",
            hint="start with a new database, or go on with the version that wrote this one",
        )
    if version > newest:
        raise StrataError(
            Code.UNSUPPORTED,
            f"{what}: schema {version} of a newer version; this version reads {newest}",
            hint="upgrade Strata",
        )


class SqliteComponents:
    """The schema of a SQLite file that holds these components."""

    what = "database"

    def __init__(self, components: Sequence[Component]) -> None:
        self._components = components

    def check_file(self, db: sqlite3.Connection, path: Path, *, create: bool) -> None:
        if create and is_empty(db):
            return
        versions = _sqlite_versions(db)
        if not versions:
            raise StrataError(
                Code.CONFLICT, f"{path} is not a database of Strata", hint="give the file of one, or a new one"
            )
        sealed = read_seal(db)
        if sealed is not None:
            raise StrataError(Code.CONFLICT, f"{path} is not to be served from: {sealed}")
        for component in self._components:
            component.pending_steps(versions.get(component.name, 0))

    def upgrade(self, db: sqlite3.Connection) -> None:
        db.execute(
            "CREATE TABLE IF NOT EXISTS strata_schema"
            " (component TEXT PRIMARY KEY, version INTEGER NOT NULL) WITHOUT ROWID, STRICT"
        )
        versions = _sqlite_versions(db)
        for component in self._components:
            for step in component.pending_steps(versions.get(component.name, 0)):
                run_script(db, step)
            db.execute(
                "INSERT INTO strata_schema VALUES (?, ?) ON CONFLICT DO UPDATE SET version = excluded.version",
                (component.name, component.version),
            )
        failpoint("database.sqlite.before_upgrade")


def seal(db: sqlite3.Connection, why: str) -> None:
    """Mark this file so that no hub serves from it: it is a backup, or it was migrated to another database."""
    db.execute("CREATE TABLE IF NOT EXISTS strata_sealed (why TEXT NOT NULL) STRICT")
    db.execute("INSERT INTO strata_sealed VALUES (?)", (why,))


def unseal(db: sqlite3.Connection) -> None:
    db.execute("DROP TABLE IF EXISTS strata_sealed")


def read_seal(db: sqlite3.Connection) -> str | None:
    """Says why this file is sealed, or None."""
    if not db.execute("SELECT 1 FROM sqlite_schema WHERE name = 'strata_sealed'").fetchone():
        return None
    row = db.execute("SELECT why FROM strata_sealed LIMIT 1").fetchone()
    return str(row[0]) if row else ""


def _sqlite_versions(db: sqlite3.Connection) -> dict[str, int]:
    if not db.execute("SELECT 1 FROM sqlite_schema WHERE name = 'strata_schema'").fetchone():
        return {}
    return dict(db.execute("SELECT component, version FROM strata_schema").fetchall())


async def upgrade_postgres(connection: Any, components: Sequence[Component], *, create: bool = True) -> None:
    """Bring the tables of a PostgreSQL database up to date, in one transaction, one process at a time."""
    async with connection.transaction():
        await connection.execute("SELECT pg_advisory_xact_lock(%s)", (SCHEMA_LOCK,))
        found = await (await connection.execute("SELECT to_regclass('strata_schema')")).fetchone()
        if found[0] is None:
            if not create:
                raise StrataError(Code.NOT_FOUND, "there are no tables of Strata in this database")
            await connection.execute(
                "CREATE TABLE strata_schema (component text PRIMARY KEY, version integer NOT NULL)"
            )
        versions = dict(await (await connection.execute("SELECT component, version FROM strata_schema")).fetchall())
        for component in components:
            for step in component.pending_steps(versions.get(component.name, 0)):
                await connection.execute(step)
            await connection.execute(
                "INSERT INTO strata_schema VALUES (%s, %s)"
                " ON CONFLICT (component) DO UPDATE SET version = excluded.version",
                (component.name, component.version),
            )
        failpoint("database.postgres.before_upgrade")
