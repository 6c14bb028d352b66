"""API keys: the database they lie in, and the routes that make, list and revoke them.

The database is a SQLite file of the server's own, or one that it shares with a hub. The routes have the paths of a hub:
`strata keys` works with either. `strata.identity.authenticate` verifies keys.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from strata.base.atomic import write_file
from strata.base.clock import Clock
from strata.base.errors import Code, StrataError
from strata.base.secret import Secret, read_secret
from strata.database import events
from strata.database.migrations import SqliteComponents, upgrade_postgres
from strata.database.sqlite import SqliteThread
from strata.http.route import ADMIN, KIB, Route
from strata.identity import sqlite as identity_sqlite
from strata.identity.enroll import make_key
from strata.identity.ports import ApiKey, IdentityStore
from strata.identity.roles import OPERATOR, Role
from strata.train.api.context import ApiCall
from strata.train.wire import bodies, replies

TOKEN_FILE: Final = "operator.token"  # noqa: S105 - the name of a file
KEY_FILE: Final = "api.key"
CONNECTIONS: Final = 4
CALL_S: Final = 5.0


@asynccontextmanager
async def open_key_database(database: str, *, shared: bool = False) -> AsyncIterator[IdentityStore]:
    """`shared` if there are several API servers: otherwise a SQLite file is locked by one process."""
    scheme, separator, rest = database.partition(":")
    if scheme in ("postgresql", "postgres") and separator:
        async with _open_postgres(database) as store:
            yield store
    elif scheme == "sqlite" and "://" not in database:
        schema = SqliteComponents((events.SQLITE, identity_sqlite.COMPONENT))
        thread = await SqliteThread.open(Path(rest), schema, shared=shared)
        try:
            yield identity_sqlite.SqliteIdentity(thread)
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
    from strata.identity import postgres as identity_postgres

    connections = Connections(url, CONNECTIONS, CALL_S, what="training server", by_index=True)
    try:
        async with connections.transaction() as connection:
            await upgrade_postgres(connection, (events.POSTGRES, identity_postgres.COMPONENT))
        yield identity_postgres.PostgresIdentity(connections)
    finally:
        await connections.close()


def load_operator_token(data: Path) -> Secret:
    """The operator token of this data folder, made at the first start."""
    path = data / TOKEN_FILE
    if not path.exists():
        write_file(path, f"{secrets.token_hex(24)}\n".encode())
    return read_secret(path)


async def create_first_key(store: IdentityStore, clock: Clock, data: Path) -> None:
    """Make a researcher's key in a file of the data folder, together with the tables: for the first client."""
    path = data / KEY_FILE
    if not path.exists() and not await store.keys():
        _, text = await make_key(store, clock, OPERATOR, name="local", role=Role.RESEARCHER)
        write_file(path, f"{text}\n".encode())


async def add(call: ApiCall, body: bodies.ApiKeyBody) -> replies.ApiKeyReply:
    """An API key; its text is in this reply and nowhere else."""
    context = call.context
    key, text = await make_key(
        context.identity, context.clock, call.caller, name=body.name, role=Role.named(body.role), valid_s=body.valid_s
    )
    return replies.ApiKeyReply(key=_key_view(key), secret=text)


async def listed(call: ApiCall) -> replies.ApiKeysReply:
    """All keys; never their secrets."""
    return replies.ApiKeysReply(keys=[_key_view(key) for key in await call.context.identity.keys()])


async def revoke(call: ApiCall) -> None:
    """End a key."""
    await call.context.identity.revoke_key(call.path["id"], call.caller.actor, call.context.clock.wall_s())
    call.context.authenticator.invalidate()


def _key_view(key: ApiKey) -> replies.ApiKeyView:
    return replies.ApiKeyView(
        id=key.id,
        name=key.name,
        role=key.role.name.lower(),
        made_at_s=key.made_at_s,
        expires_at_s=key.expires_at_s,
        revoked_at_s=key.revoked_at_s,
    )


ROUTES = (
    Route("POST", "/v1/keys", ADMIN, add, 4 * KIB, operation="keys.add"),
    Route("GET", "/v1/keys", ADMIN, listed, KIB, operation="keys.listed"),
    Route("POST", "/v1/key/{id}/revoke", ADMIN, revoke, KIB, operation="keys.revoke"),
)
