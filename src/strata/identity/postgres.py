"""Identity in PostgreSQL: short transactions, rows locked before they are judged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from strata.database.events import Actor, record_postgres
from strata.database.migrations import Component
from strata.database.postgres import Connections
from strata.identity import rows
from strata.identity.ports import ApiKey, BrowserSession, HostIdentity, Invite

COMPONENT: Final = Component(
    "identity",
    4,
    (
        """
        CREATE TABLE identity_key (
          id text PRIMARY KEY, name text NOT NULL, role integer NOT NULL, secret_hash text NOT NULL,
          made_at double precision NOT NULL, expires_at double precision, revoked_at double precision,
          used_at double precision
        );
        CREATE TABLE identity_invite (
          id text PRIMARY KEY, secret_hash text NOT NULL, made_at double precision NOT NULL,
          expires_at double precision NOT NULL, pool text NOT NULL, labels text NOT NULL, used_by text NOT NULL,
          revoked_at double precision, name text NOT NULL DEFAULT ''
        );
        CREATE TABLE identity_host (
          id text PRIMARY KEY, name text NOT NULL, public_key text NOT NULL, enrolled_at double precision NOT NULL,
          pool text NOT NULL, labels text NOT NULL, secret_hash text NOT NULL,
          certificate_until double precision NOT NULL, revoked_at double precision, revoked_because text NOT NULL
        );
        CREATE UNIQUE INDEX identity_host_name ON identity_host (name) WHERE revoked_at IS NULL;
        CREATE TABLE identity_session (
          id text PRIMARY KEY, credential text NOT NULL, made_at double precision NOT NULL,
          expires_at double precision NOT NULL, code boolean NOT NULL
        );
        """,
    ),
)
_ENROLL_LOCK: Final = 0x5354_5241_5441_0003
"""Names are given out one at a time: a row that is not there yet cannot be locked."""


class PostgresIdentity:
    def __init__(self, connections: Connections) -> None:
        self._connections = connections

    async def add_key(self, key: ApiKey, actor: str) -> None:
        async with self._connections.transaction() as connection:
            insert = f"INSERT INTO identity_key ({rows.KEY}) VALUES (%s, %s, %s, %s, %s, %s, %s, %s)"
            await connection.execute(insert, rows.key_row(key))
            record = rows.event(key.made_at_s, actor, "key.made", key.id, name=key.name, role=key.role.name.lower())
            await record_postgres(connection, [record])

    async def key(self, id_: str) -> ApiKey | None:
        found = await self._connections.run(f"SELECT {rows.KEY} FROM identity_key WHERE id = %(id)s", {"id": id_})
        return rows.decode_key(found[0]) if found else None

    async def keys(self) -> Sequence[ApiKey]:
        return [rows.decode_key(row) for row in await self._all("identity_key", rows.KEY, "made_at")]

    async def record_key_uses(self, used: Mapping[str, float]) -> None:
        ordered = sorted(used.items())
        await self._connections.write(
            "UPDATE identity_key k SET used_at = greatest(k.used_at, w.at)"
            " FROM unnest(%(ids)s::text[], %(at)s::float8[]) AS w (id, at) WHERE k.id = w.id",
            {"ids": [id_ for id_, _ in ordered], "at": [at_s for _, at_s in ordered]},
        )

    async def revoke_key(self, id_: str, actor: str, now_s: float) -> None:
        await self._revoke("key", id_, actor, now_s)

    async def add_invite(self, invite: Invite, actor: str) -> None:
        async with self._connections.transaction() as connection:
            insert = f"INSERT INTO identity_invite ({rows.INVITE}) VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s)"
            await connection.execute(insert, rows.invite_row(invite))
            record = rows.event(invite.made_at_s, actor, "invite.made", invite.id, pool=invite.pool)
            await record_postgres(connection, [record])

    async def invites(self) -> Sequence[Invite]:
        return [rows.decode_invite(row) for row in await self._all("identity_invite", rows.INVITE, "made_at")]

    async def revoke_invite(self, id_: str, actor: str, now_s: float) -> None:
        await self._revoke("invite", id_, actor, now_s)

    async def enroll(self, invite_id: str, secret_hash: str, host: HostIdentity, now_s: float) -> HostIdentity:
        async with self._connections.transaction() as connection:
            row = await _one(connection, "identity_invite", rows.INVITE, invite_id)
            found = None if row is None else rows.decode_invite(row)
            invite = rows.check_invite(found, secret_hash, host, now_s)
            wanted = replace(host, pool=invite.pool, labels=invite.labels)
            settled = await _add_host(connection, wanted, f"invite:{invite_id}", invite)
            await connection.execute(
                "UPDATE identity_invite SET used_by = %s WHERE id = %s", (host.public_key, invite_id)
            )
            return settled

    async def add_host(self, host: HostIdentity, actor: str) -> HostIdentity:
        async with self._connections.transaction() as connection:
            return await _add_host(connection, host, actor)

    async def host(self, id_: str) -> HostIdentity | None:
        found = await self._connections.run(f"SELECT {rows.HOST} FROM identity_host WHERE id = %(id)s", {"id": id_})
        return rows.decode_host(found[0]) if found else None

    async def hosts(self) -> Sequence[HostIdentity]:
        return [rows.decode_host(row) for row in await self._all("identity_host", rows.HOST, "enrolled_at")]

    async def record_certificate(self, host_id: str, until_s: float, actor: str, now_s: float) -> None:
        async with self._connections.transaction() as connection:
            row = await _one(connection, "identity_host", rows.HOST, host_id)
            host = rows.check_certifiable(None if row is None else rows.decode_host(row), host_id)
            update = "UPDATE identity_host SET certificate_until = %s WHERE id = %s"
            await connection.execute(update, (until_s, host_id))
            if not actor.startswith(rows.BY_INVITE):
                # The host has what the invite was for: from now on only its certificate gets it another one.
                spent = "UPDATE identity_invite SET revoked_at = %s WHERE used_by = %s AND revoked_at IS NULL"
                await connection.execute(spent, (now_s, host.public_key))
            await record_postgres(connection, [rows.event(now_s, actor, "host.certified", host_id, until_s=until_s)])

    async def revoke_host(self, host_id: str, reason: str, actor: str, now_s: float) -> None:
        await self._revoke("host", host_id, actor, now_s, reason)

    async def add_session(self, session: BrowserSession, actor: str) -> None:
        async with self._connections.transaction() as connection:
            await _add_session(connection, session, actor)

    async def redeem_code(self, code_hash: str, session: BrowserSession, address: str) -> BrowserSession:
        async with self._connections.transaction() as connection:
            row = await _one(connection, "identity_session", rows.SESSION, code_hash)
            code = rows.check_code(None if row is None else rows.decode_session(row), session.made_at_s)
            await connection.execute("DELETE FROM identity_session WHERE id = %s", (code_hash,))
            opened = replace(session, credential=code.credential)
            await _add_session(connection, opened, Actor(opened.actor, address))
            return opened

    async def session(self, token_hash: str) -> BrowserSession | None:
        select = f"SELECT {rows.SESSION} FROM identity_session WHERE id = %(id)s"
        found = await self._connections.run(select, {"id": token_hash})
        return rows.decode_session(found[0]) if found else None

    async def extend_session(self, token_hash: str, expires_at_s: float) -> None:
        update = "UPDATE identity_session SET expires_at = %(until)s WHERE id = %(id)s"
        await self._connections.write(update, {"until": expires_at_s, "id": token_hash})

    async def remove_session(self, token_hash: str, actor: str, now_s: float) -> None:
        async with self._connections.transaction() as connection:
            removed = await connection.execute("DELETE FROM identity_session WHERE id = %s", (token_hash,))
            if removed.rowcount:
                await record_postgres(connection, [rows.event(now_s, actor, "session.closed", token_hash[:12])])

    async def _revoke(self, what: str, id_: str, actor: str, now_s: float, reason: str = "") -> None:
        async with self._connections.transaction() as connection:
            table = f"identity_{what}"
            row = await _one(connection, table, "revoked_at", id_)
            if row is None:
                raise rows.not_found(what, id_)
            if row[0] is not None:
                return
            because = ", revoked_because = %(reason)s" if what == "host" else ""
            await connection.execute(
                f"UPDATE {table} SET revoked_at = %(now)s{because} WHERE id = %(id)s",
                {"now": now_s, "id": id_, "reason": reason},
            )
            body = {"reason": reason} if reason else {}
            await record_postgres(connection, [rows.event(now_s, actor, f"{what}.revoked", id_, **body)])

    async def _all(self, table: str, columns: str, order: str) -> list[tuple[Any, ...]]:
        return await self._connections.run(f"SELECT {columns} FROM {table} ORDER BY {order}, id", {})


async def _one(connection: Any, table: str, columns: str, id_: str) -> Any:
    cursor = await connection.execute(f"SELECT {columns} FROM {table} WHERE id = %s FOR UPDATE", (id_,))
    return await cursor.fetchone()


async def _add_host(connection: Any, host: HostIdentity, actor: str, invite: Invite | None = None) -> HostIdentity:
    await connection.execute("SELECT pg_advisory_xact_lock(%s)", (_ENROLL_LOCK,))
    cursor = await connection.execute(
        f"SELECT {rows.HOST} FROM identity_host WHERE name = %s AND revoked_at IS NULL", (host.name,)
    )
    row = await cursor.fetchone()
    settled = rows.resolve_enrolled_host(host, None if row is None else rows.decode_host(row), invite)
    if settled is not None:
        return settled
    insert = f"INSERT INTO identity_host ({rows.HOST}) VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s)"
    await connection.execute(insert, rows.host_row(host))
    record = rows.event(host.enrolled_at_s, actor, "host.enrolled", host.id, name=host.name)
    await record_postgres(connection, [record])
    return host


async def _add_session(connection: Any, session: BrowserSession, actor: str) -> None:
    await connection.execute("DELETE FROM identity_session WHERE expires_at <= %s", (session.made_at_s,))
    insert = f"INSERT INTO identity_session ({rows.SESSION}) VALUES (%s, %s, %s, %s, %s)"
    await connection.execute(insert, rows.session_row(session))
    if not session.code:
        await record_postgres(connection, [rows.event(session.made_at_s, actor, "session.opened", session.id)])
