"""Identity in the hub's SQLite file, through its one thread."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from strata.database.events import Actor, record_sqlite
from strata.database.migrations import Component
from strata.database.sqlite import SqliteThread
from strata.identity import rows
from strata.identity.ports import ApiKey, BrowserSession, HostIdentity, Invite

COMPONENT: Final = Component(
    "identity",
    4,
    (
        """
        CREATE TABLE identity_key (
          id TEXT PRIMARY KEY, name TEXT NOT NULL, role INTEGER NOT NULL, secret_hash TEXT NOT NULL,
          made_at REAL NOT NULL, expires_at REAL, revoked_at REAL,
          used_at REAL
        ) WITHOUT ROWID, STRICT;
        CREATE TABLE identity_invite (
          id TEXT PRIMARY KEY, secret_hash TEXT NOT NULL, made_at REAL NOT NULL, expires_at REAL NOT NULL,
          pool TEXT NOT NULL, labels TEXT NOT NULL, used_by TEXT NOT NULL, revoked_at REAL,
          name TEXT NOT NULL DEFAULT ''
        ) WITHOUT ROWID, STRICT;
        CREATE TABLE identity_host (
          id TEXT PRIMARY KEY, name TEXT NOT NULL, public_key TEXT NOT NULL, enrolled_at REAL NOT NULL,
          pool TEXT NOT NULL, labels TEXT NOT NULL, secret_hash TEXT NOT NULL, certificate_until REAL NOT NULL,
          revoked_at REAL, revoked_because TEXT NOT NULL
        ) WITHOUT ROWID, STRICT;
        CREATE UNIQUE INDEX identity_host_name ON identity_host (name) WHERE revoked_at IS NULL;
        CREATE TABLE identity_session (
          id TEXT PRIMARY KEY, credential TEXT NOT NULL, made_at REAL NOT NULL, expires_at REAL NOT NULL,
          code INTEGER NOT NULL
        ) WITHOUT ROWID, STRICT;
        """,
    ),
)


class SqliteIdentity:
    def __init__(self, thread: SqliteThread) -> None:
        self._thread = thread

    async def add_key(self, key: ApiKey, actor: str) -> None:
        def add(db: sqlite3.Connection) -> None:
            db.execute(f"INSERT INTO identity_key ({rows.KEY}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows.key_row(key))
            record = rows.event(key.made_at_s, actor, "key.made", key.id, name=key.name, role=key.role.name.lower())
            record_sqlite(db, [record])

        await self._thread.write(add)

    async def key(self, id_: str) -> ApiKey | None:
        row = await self._thread.read(lambda db: _one(db, "identity_key", rows.KEY, id_))
        return None if row is None else rows.decode_key(row)

    async def keys(self) -> Sequence[ApiKey]:
        return [rows.decode_key(row) for row in await self._all("identity_key", rows.KEY, "made_at")]

    async def record_key_uses(self, used: Mapping[str, float]) -> None:
        update = "UPDATE identity_key SET used_at = max(coalesce(used_at, 0), ?) WHERE id = ?"
        await self._thread.write(lambda db: db.executemany(update, [(at_s, id_) for id_, at_s in used.items()]))

    async def revoke_key(self, id_: str, actor: str, now_s: float) -> None:
        await self._revoke("key", id_, actor, now_s)

    async def add_invite(self, invite: Invite, actor: str) -> None:
        def add(db: sqlite3.Connection) -> None:
            columns = f"INSERT INTO identity_invite ({rows.INVITE}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
            db.execute(columns, rows.invite_row(invite))
            record_sqlite(db, [rows.event(invite.made_at_s, actor, "invite.made", invite.id, pool=invite.pool)])

        await self._thread.write(add)

    async def invites(self) -> Sequence[Invite]:
        return [rows.decode_invite(row) for row in await self._all("identity_invite", rows.INVITE, "made_at")]

    async def revoke_invite(self, id_: str, actor: str, now_s: float) -> None:
        await self._revoke("invite", id_, actor, now_s)

    async def enroll(self, invite_id: str, secret_hash: str, host: HostIdentity, now_s: float) -> HostIdentity:
        def take(db: sqlite3.Connection) -> HostIdentity:
            row = _one(db, "identity_invite", rows.INVITE, invite_id)
            found = None if row is None else rows.decode_invite(row)
            invite = rows.check_invite(found, secret_hash, host, now_s)
            wanted = replace(host, pool=invite.pool, labels=invite.labels)
            settled = _add_host(db, wanted, f"invite:{invite_id}", invite)
            db.execute("UPDATE identity_invite SET used_by = ? WHERE id = ?", (host.public_key, invite_id))
            return settled

        return await self._thread.write(take)

    async def add_host(self, host: HostIdentity, actor: str) -> HostIdentity:
        return await self._thread.write(lambda db: _add_host(db, host, actor))

    async def host(self, id_: str) -> HostIdentity | None:
        return await self._thread.read(lambda db: _host(db, id_))

    async def hosts(self) -> Sequence[HostIdentity]:
        return [rows.decode_host(row) for row in await self._all("identity_host", rows.HOST, "enrolled_at")]

    async def record_certificate(self, host_id: str, until_s: float, actor: str, now_s: float) -> None:
        def note(db: sqlite3.Connection) -> None:
            host = rows.check_certifiable(_host(db, host_id), host_id)
            db.execute("UPDATE identity_host SET certificate_until = ? WHERE id = ?", (until_s, host_id))
            if not actor.startswith(rows.BY_INVITE):
                # The host has what the invite was for: from now on only its certificate gets it another one.
                spent = "UPDATE identity_invite SET revoked_at = ? WHERE used_by = ? AND revoked_at IS NULL"
                db.execute(spent, (now_s, host.public_key))
            record_sqlite(db, [rows.event(now_s, actor, "host.certified", host_id, until_s=until_s)])

        await self._thread.write(note)

    async def revoke_host(self, host_id: str, reason: str, actor: str, now_s: float) -> None:
        await self._revoke("host", host_id, actor, now_s, reason)

    async def add_session(self, session: BrowserSession, actor: str) -> None:
        await self._thread.write(lambda db: _add_session(db, session, actor))

    async def redeem_code(self, code_hash: str, session: BrowserSession, address: str) -> BrowserSession:
        def redeem(db: sqlite3.Connection) -> BrowserSession:
            row = _one(db, "identity_session", rows.SESSION, code_hash)
            code = rows.check_code(None if row is None else rows.decode_session(row), session.made_at_s)
            db.execute("DELETE FROM identity_session WHERE id = ?", (code_hash,))
            opened = replace(session, credential=code.credential)
            _add_session(db, opened, Actor(opened.actor, address))
            return opened

        return await self._thread.write(redeem)

    async def session(self, token_hash: str) -> BrowserSession | None:
        row = await self._thread.read(lambda db: _one(db, "identity_session", rows.SESSION, token_hash))
        return None if row is None else rows.decode_session(row)

    async def extend_session(self, token_hash: str, expires_at_s: float) -> None:
        def extend(db: sqlite3.Connection) -> None:
            db.execute("UPDATE identity_session SET expires_at = ? WHERE id = ?", (expires_at_s, token_hash))

        await self._thread.write(extend)

    async def remove_session(self, token_hash: str, actor: str, now_s: float) -> None:
        def remove(db: sqlite3.Connection) -> None:
            if db.execute("DELETE FROM identity_session WHERE id = ?", (token_hash,)).rowcount:
                record_sqlite(db, [rows.event(now_s, actor, "session.closed", token_hash[:12])])

        await self._thread.write(remove)

    async def _revoke(self, what: str, id_: str, actor: str, now_s: float, reason: str = "") -> None:
        def revoke(db: sqlite3.Connection) -> None:
            table = f"identity_{what}"
            if _one(db, table, "id", id_) is None:
                raise rows.not_found(what, id_)
            because = ", revoked_because = :reason" if what == "host" else ""
            changed = db.execute(
                f"UPDATE {table} SET revoked_at = :now{because} WHERE id = :id AND revoked_at IS NULL",
                {"now": now_s, "id": id_, "reason": reason},
            )
            if changed.rowcount:
                body = {"reason": reason} if reason else {}
                record_sqlite(db, [rows.event(now_s, actor, f"{what}.revoked", id_, **body)])

        await self._thread.write(revoke)

    async def _all(self, table: str, columns: str, order: str) -> list[Any]:
        select = f"SELECT {columns} FROM {table} ORDER BY {order}, id"
        return await self._thread.read(lambda db: db.execute(select).fetchall())


def _one(db: sqlite3.Connection, table: str, columns: str, id_: str) -> Any:
    return db.execute(f"SELECT {columns} FROM {table} WHERE id = ?", (id_,)).fetchone()


def _host(db: sqlite3.Connection, id_: str) -> HostIdentity | None:
    row = _one(db, "identity_host", rows.HOST, id_)
    return None if row is None else rows.decode_host(row)


def _add_host(db: sqlite3.Connection, host: HostIdentity, actor: str, invite: Invite | None = None) -> HostIdentity:
    row = db.execute(
        f"SELECT {rows.HOST} FROM identity_host WHERE name = ? AND revoked_at IS NULL", (host.name,)
    ).fetchone()
    settled = rows.resolve_enrolled_host(host, None if row is None else rows.decode_host(row), invite)
    if settled is not None:
        return settled
    db.execute(f"INSERT INTO identity_host ({rows.HOST}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", rows.host_row(host))
    record_sqlite(db, [rows.event(host.enrolled_at_s, actor, "host.enrolled", host.id, name=host.name)])
    return host


def _add_session(db: sqlite3.Connection, session: BrowserSession, actor: str) -> None:
    db.execute("DELETE FROM identity_session WHERE expires_at <= ?", (session.made_at_s,))
    db.execute(f"INSERT INTO identity_session ({rows.SESSION}) VALUES (?, ?, ?, ?, ?)", rows.session_row(session))
    if not session.code:
        record_sqlite(db, [rows.event(session.made_at_s, actor, "session.opened", session.id)])
