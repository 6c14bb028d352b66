"""Opens the database of API keys of a training server, and makes its first key in `api.key`.

It is a SQLite file of the server's own, or a database that it shares with a hub.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from strata.base.atomic import write_file
from strata.base.clock import Clock
from strata.base.errors import Code, StrataError
from strata.database import events
from strata.database.address import is_postgres
from strata.database.migrations import SqliteComponents, upgrade_postgres
from strata.database.sqlite import SqliteThread
from strata.database.transaction import PostgresDatabase, SqliteDatabase
from strata.identity.enroll import make_key
from strata.identity.roles import OPERATOR, Role
from strata.identity.store import POSTGRES, SQLITE, IdentityStore
from strata.train.settings import ServerSettings

KEY_FILE: Final = "api.key"
CONNECTIONS: Final = 4
CALL_S: Final = 5.0


@asynccontextmanager
async def open_key_database(database: str, *, shared: bool = False) -> AsyncIterator[IdentityStore]:
    """`shared` if there are several API servers: otherwise a SQLite file is locked by one process."""
    scheme, _, rest = database.partition(":")
    if is_postgres(database):
        async with _open_postgres(database) as store:
            yield store
    elif scheme == "sqlite" and "://" not in database:
        schema = SqliteComponents((events.SQLITE, SQLITE))
        thread = await SqliteThread.open(Path(rest), schema, shared=shared)
        try:
            yield IdentityStore(SqliteDatabase(thread))
        finally:
            await thread.close()
    else:
        # Without the text itself: an address may have a password in it.
        raise StrataError(
            Code.INVALID,
            "server.identity_database is not a database Strata knows",
            hint="use sqlite:PATH or postgresql://USER@HOST/NAME",
        )


@asynccontextmanager
async def _open_postgres(url: str) -> AsyncIterator[IdentityStore]:
    # The driver is an extra of its own: a server on SQLite does without.
    from strata.database.postgres import Connections

    connections = Connections(url, CONNECTIONS, CALL_S, what="training server", by_index=True)
    try:
        async with connections.transaction() as connection:
            await upgrade_postgres(connection, (events.POSTGRES, POSTGRES))
        yield IdentityStore(PostgresDatabase(connections))
    finally:
        await connections.close()


async def create_first_key(store: IdentityStore, clock: Clock, data: Path) -> None:
    """Make a researcher's key in a file of the data folder, together with the tables: for the first client."""
    path = data / KEY_FILE
    if not path.exists() and not await store.keys():
        _, text = await make_key(store, clock, OPERATOR, name="local", role=Role.RESEARCHER)
        write_file(path, f"{text}\n".encode())


async def prepare_first_key(settings: ServerSettings, clock: Clock) -> None:
    """Make the first key before the model is loaded: a client that starts early finds it and waits for the server."""
    if settings.server.identity_database or (settings.data / KEY_FILE).exists():
        return
    async with open_key_database(settings.identity_database) as store:
        await create_first_key(store, clock, settings.data)
