"""Opens the journal of a database address: `sqlite:PATH` (or a bare path), `postgresql://…`."""

from __future__ import annotations

from pathlib import Path

from strata.base.clock import Clock
from strata.base.errors import Code, StrataError
from strata.journal.port import Journal


async def open_journal(database: str, clock: Clock, *, create: bool = True, connections: int = 4) -> Journal:
    """Open the journal there, creating its tables unless `create` is off: a reader must not change the database.
    `connections` are for PostgreSQL: as many statements can run at once.

    Each adapter is imported only when it is needed: a base install has no database driver.
    """
    scheme, separator, rest = database.partition(":")
    if scheme in ("postgresql", "postgres") and separator:
        from strata.journal.postgres import PostgresJournal

        return await PostgresJournal.open(database, clock, create=create, connections=connections)
    if "://" in database or not database:
        raise StrataError(
            Code.INVALID,
            f"{scheme + '://…' if scheme else 'nothing'} is not a database Strata knows",
            hint="use sqlite:PATH or postgresql://USER@HOST/NAME",
        )
    from strata.journal.sqlite import SqliteJournal

    path = Path(rest if scheme == "sqlite" and separator else database)
    return await SqliteJournal.open(path, clock, create=create)
