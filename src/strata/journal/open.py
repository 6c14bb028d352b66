"""Opens a journal by its address: `sqlite:PATH`, a bare path, or `postgresql://…`."""

from __future__ import annotations

from strata.base.clock import Clock
from strata.database.address import is_postgres, sqlite_file
from strata.journal.port import Journal


async def open_journal(database: str, clock: Clock, *, create: bool = True, connections: int = 4) -> Journal:
    """Open the journal there, creating its tables unless `create` is off: a reader must not change the database.
    `connections` are for PostgreSQL: as many statements can run at once.

    Each adapter is imported only when it is needed: a base install has no database driver.
    """
    if is_postgres(database):
        from strata.journal.postgres import PostgresJournal

        return await PostgresJournal.open(database, clock, create=create, connections=connections)
    from strata.journal.sqlite import SqliteJournal

    return await SqliteJournal.open(sqlite_file(database), clock, create=create)
