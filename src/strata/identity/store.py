"""SQL of identity: keys, invites, hosts, sessions, revocation; and the errors when a join token, name or login link is
used, revoked or expired.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any, Final, Generic, TypeVar

from strata.base.errors import Code, StrataError
from strata.database import event_kinds
from strata.database.events import Actor, EventRecord, record
from strata.database.migrations import Component
from strata.database.transaction import Database, Transaction
from strata.identity.records import ApiKey, BrowserSession, HostIdentity, Invite
from strata.identity.roles import Role
from strata.identity.tokens import same_hash

T = TypeVar("T")

POSTGRES: Final = Component(
    "identity",
    5,
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
        CREATE TABLE identity_revision (id bigint PRIMARY KEY, revision bigint NOT NULL);
        """,
        """
        ALTER TABLE identity_invite ADD COLUMN ephemeral boolean NOT NULL DEFAULT false;
        ALTER TABLE identity_host ADD COLUMN ephemeral boolean NOT NULL DEFAULT false;
        """,
    ),
)
SQLITE: Final = POSTGRES.in_sqlite()
BY_INVITE: Final = "invite:"
"""How the actor begins whose invite gets a certificate."""


@dataclass(frozen=True)
class _Table(Generic[T]):
    """A table whose columns are the fields of a record."""

    what: str
    columns: str
    decode: Callable[[Sequence[Any]], T]

    @property
    def select(self) -> str:
        return f"SELECT {self.columns} FROM identity_{self.what}"


def _decode_key(row: Sequence[Any]) -> ApiKey:
    id_, name, role, *rest = row
    return ApiKey(id_, name, Role(role), *rest)


def _decode_invite(row: Sequence[Any]) -> Invite:
    id_, secret_hash, made_at_s, expires_at_s, pool, labels, used_by, revoked_at_s, name, ephemeral = row
    return Invite(
        id_,
        secret_hash,
        made_at_s,
        expires_at_s,
        pool,
        tuple(json.loads(labels)),
        used_by,
        revoked_at_s,
        name,
        bool(ephemeral),
    )


def _decode_host(row: Sequence[Any]) -> HostIdentity:
    id_, name, public_key, enrolled_at_s, pool, labels, secret_hash, until_s, revoked_at_s, because, ephemeral = row
    return HostIdentity(
        id_,
        name,
        public_key,
        enrolled_at_s,
        pool,
        tuple(json.loads(labels)),
        secret_hash,
        until_s,
        revoked_at_s,
        because,
        bool(ephemeral),
    )


def _decode_session(row: Sequence[Any]) -> BrowserSession:
    token_hash, credential, made_at_s, expires_at_s, code = row
    return BrowserSession(token_hash, credential, made_at_s, expires_at_s, bool(code))


_KEYS: Final = _Table("key", "id, name, role, secret_hash, made_at, expires_at, revoked_at, used_at", _decode_key)
_INVITES: Final = _Table(
    "invite", "id, secret_hash, made_at, expires_at, pool, labels, used_by, revoked_at, name, ephemeral", _decode_invite
)
_HOSTS: Final = _Table(
    "host",
    "id, name, public_key, enrolled_at, pool, labels, secret_hash, certificate_until, revoked_at, revoked_because,"
    " ephemeral",
    _decode_host,
)
_SESSIONS: Final = _Table("session", "id, credential, made_at, expires_at, code", _decode_session)


_NEXT_REVISION: Final = (
    "INSERT INTO identity_revision (id, revision) VALUES (1, 1)"
    " ON CONFLICT (id) DO UPDATE SET revision = identity_revision.revision + 1"
)


class IdentityStore:
    """Each method is one transaction, with its event. Unknown ids raise NOT_FOUND."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def add_key(self, key: ApiKey, actor: str) -> None:
        async def add(tx: Transaction) -> None:
            await _insert(tx, _KEYS, key)
            body = {"name": key.name, "role": key.role.name.lower()}
            await record(tx, [EventRecord(key.made_at_s, actor, event_kinds.KEY_MADE, key.id, body)])

        await self._database.run(add)

    async def key(self, id_: str) -> ApiKey | None:
        return await self._find(_KEYS, id_)

    async def keys(self) -> Sequence[ApiKey]:
        return await self._all(_KEYS, "made_at")

    async def record_key_uses(self, used: Mapping[str, float]) -> None:
        """Write when each key was used last, in one statement and without an event; unknown keys are ignored."""
        update = (
            "WITH use (id, at) AS (VALUES (:id::text, :at::float8)) UPDATE identity_key SET used_at = use.at FROM use"
            " WHERE identity_key.id = use.id AND coalesce(identity_key.used_at, 0) < use.at"
        )
        uses = [{"id": id_, "at": at_s} for id_, at_s in sorted(used.items())]
        await self._database.run(lambda tx: tx.many(update, uses))

    async def revoke_key(self, id_: str, actor: str, now_s: float) -> None:
        """Again: no change, no event."""
        await self._revoke(_KEYS, id_, actor, now_s)

    async def add_invite(self, invite: Invite, actor: str) -> None:
        async def add(tx: Transaction) -> None:
            await _insert(tx, _INVITES, invite)
            body = {"pool": invite.pool}
            await record(tx, [EventRecord(invite.made_at_s, actor, event_kinds.INVITE_MADE, invite.id, body)])

        await self._database.run(add)

    async def invites(self) -> Sequence[Invite]:
        return await self._all(_INVITES, "made_at")

    async def revoke_invite(self, id_: str, actor: str, now_s: float) -> None:
        await self._revoke(_INVITES, id_, actor, now_s)

    async def enroll(self, invite_id: str, secret_hash: str, host: HostIdentity, now_s: float) -> HostIdentity:
        """Use the invite for this host, once, unless it is for ephemeral hosts. The same public key again gets the same
        host; all else is FORBIDDEN.

        A name that another live host has is CONFLICT: two machines must not answer to one name.
        """

        async def use(tx: Transaction) -> HostIdentity:
            row = await _lock(tx, _INVITES, invite_id)
            invite = _check_invite(row, secret_hash, host, now_s)
            wanted = replace(host, pool=invite.pool, labels=invite.labels, ephemeral=invite.ephemeral)
            settled = await _add_host(tx, wanted, f"{BY_INVITE}{invite_id}", invite)
            if not invite.ephemeral:
                values = {"key": host.public_key, "id": invite_id}
                await tx.execute("UPDATE identity_invite SET used_by = :key WHERE id = :id", values)
            return settled

        return await self._database.run(use)

    async def add_host(self, host: HostIdentity, actor: str) -> HostIdentity:
        """Enroll without an invite: the local agent of `strata up`. Idempotent for the same name and public key."""
        return await self._database.run(lambda tx: _add_host(tx, host, actor))

    async def host(self, id_: str) -> HostIdentity | None:
        return await self._find(_HOSTS, id_)

    async def hosts(self) -> Sequence[HostIdentity]:
        return await self._all(_HOSTS, "enrolled_at")

    async def record_certificate(self, host_id: str, until_s: float, actor: str, now_s: float) -> None:
        """A certificate was issued. Refused with FORBIDDEN for a revoked host, in the same transaction."""

        async def certify(tx: Transaction) -> None:
            row = await _lock(tx, _HOSTS, host_id)
            host = _check_certifiable(row, host_id)
            values = {"until": until_s, "id": host_id, "key": host.public_key, "now": now_s}
            await tx.execute("UPDATE identity_host SET certificate_until = :until WHERE id = :id", values)
            if not actor.startswith(BY_INVITE):
                # The host has what the invite was for: from now on only its certificate gets it another one.
                spent = "UPDATE identity_invite SET revoked_at = :now WHERE used_by = :key AND revoked_at IS NULL"
                await tx.execute(spent, values)
            await record(tx, [EventRecord(now_s, actor, event_kinds.HOST_CERTIFIED, host_id, {"until_s": until_s})])

        await self._database.run(certify)

    async def record_coordinator_certificate(
        self, names: Sequence[str], until_s: float, actor: str, now_s: float
    ) -> None:
        """A certificate was issued to a coordinator, which has no row: the event alone keeps it."""
        body = {"names": list(names), "until_s": until_s}
        event = EventRecord(now_s, actor, event_kinds.COORDINATOR_CERTIFIED, names[0], body)
        await self._database.run(lambda tx: record(tx, [event]))

    async def revoke_host(self, host_id: str, reason: str, actor: str, now_s: float) -> None:
        await self._revoke(_HOSTS, host_id, actor, now_s, reason)

    async def add_session(self, session: BrowserSession, actor: str) -> None:
        """Sessions and codes that have expired by then are removed."""
        await self._database.run(lambda tx: _add_session(tx, session, actor))

    async def redeem_code(self, code_hash: str, session: BrowserSession, address: str) -> BrowserSession:
        """Use the code, once, for this session, which gets the credential of the code; FORBIDDEN for any other."""

        async def redeem(tx: Transaction) -> BrowserSession:
            row = await _lock(tx, _SESSIONS, code_hash)
            code = _check_code(row, session.made_at_s)
            await tx.execute("DELETE FROM identity_session WHERE id = :id", {"id": code_hash})
            opened = replace(session, credential=code.credential)
            await _add_session(tx, opened, Actor(opened.actor, address))
            return opened

        return await self._database.run(redeem)

    async def session(self, token_hash: str) -> BrowserSession | None:
        return await self._find(_SESSIONS, token_hash)

    async def extend_session(self, token_hash: str, expires_at_s: float) -> None:
        update = "UPDATE identity_session SET expires_at = :until WHERE id = :id"
        await self._database.changed(update, {"until": expires_at_s, "id": token_hash})

    async def remove_session(self, token_hash: str, actor: str, now_s: float) -> None:
        """Again: no change, no event."""

        async def remove(tx: Transaction) -> None:
            if await tx.changed("DELETE FROM identity_session WHERE id = :id", {"id": token_hash}):
                await record(tx, [EventRecord(now_s, actor, event_kinds.SESSION_CLOSED, token_hash[:12], {})])

        await self._database.run(remove)

    async def revision(self) -> int:
        """A number that grows when a key or a host is revoked, so that what was read of them before may be kept."""
        rows = await self._database.rows("SELECT revision FROM identity_revision")
        return int(rows[0][0]) if rows else 0

    async def _revoke(self, table: _Table[Any], id_: str, actor: str, now_s: float, reason: str = "") -> None:
        async def revoke(tx: Transaction) -> None:
            row = await _lock(tx, table, id_)
            if row is None:
                raise _not_found(table.what, id_)
            if row.revoked_at_s is not None:
                return
            because = ", revoked_because = :reason" if table is _HOSTS else ""
            update = f"UPDATE identity_{table.what} SET revoked_at = :now{because} WHERE id = :id"
            await tx.execute(update, {"now": now_s, "id": id_, "reason": reason})
            await tx.execute(_NEXT_REVISION)
            body = {"reason": reason} if reason else {}
            await record(tx, [EventRecord(now_s, actor, event_kinds.REVOKED[table.what], id_, body)])

        await self._database.run(revoke)

    async def _find(self, table: _Table[T], id_: str) -> T | None:
        rows = await self._database.rows(f"{table.select} WHERE id = :id", {"id": id_})
        return table.decode(rows[0]) if rows else None

    async def _all(self, table: _Table[T], order: str) -> Sequence[T]:
        return list(map(table.decode, await self._database.rows(f"{table.select} ORDER BY {order}, id")))


async def _lock(tx: Transaction, table: _Table[T], id_: str) -> T | None:
    rows = await tx.rows(f"{table.select} WHERE id = :id FOR UPDATE", {"id": id_})
    return table.decode(rows[0]) if rows else None


async def _insert(tx: Transaction, table: _Table[T], row: T) -> None:
    names = table.columns.split(", ")
    values = {
        name: json.dumps(value) if isinstance(value, tuple) else int(value) if isinstance(value, Role) else value
        for name, value in zip(names, astuple(row), strict=True)  # type: ignore[call-overload]
    }
    places = ", ".join(f":{name}" for name in names)
    await tx.execute(f"INSERT INTO identity_{table.what} ({table.columns}) VALUES ({places})", values)


async def _add_host(tx: Transaction, host: HostIdentity, actor: str, invite: Invite | None = None) -> HostIdentity:
    # Names are given out one at a time: a row that is not there yet cannot be locked.
    await tx.lock("identity_host.name")
    namesakes = await tx.rows(f"{_HOSTS.select} WHERE name = :name AND revoked_at IS NULL", {"name": host.name})
    namesake = _HOSTS.decode(namesakes[0]) if namesakes else None
    settled = _resolve_enrolled_host(host, namesake, invite)
    if settled is not None:
        return settled
    await _insert(tx, _HOSTS, host)
    await record(tx, [EventRecord(host.enrolled_at_s, actor, event_kinds.HOST_ENROLLED, host.id, {"name": host.name})])
    return host


async def _add_session(tx: Transaction, session: BrowserSession, actor: str) -> None:
    await tx.execute("DELETE FROM identity_session WHERE expires_at <= :now", {"now": session.made_at_s})
    await _insert(tx, _SESSIONS, session)
    if not session.code:
        await record(tx, [EventRecord(session.made_at_s, actor, event_kinds.SESSION_OPENED, session.id, {})])


def _check_code(code: BrowserSession | None, now_s: float) -> BrowserSession:
    if code is None or not code.code or now_s >= code.expires_at_s:
        raise StrataError(
            Code.FORBIDDEN, "this login link was used or has expired", hint="ask for a new one: strata dashboard"
        )
    return code


def _check_invite(invite: Invite | None, secret_hash: str, host: HostIdentity, now_s: float) -> Invite:
    """The invite, if this secret and this host may use it now. A wrong secret learns no more than an unknown id."""
    if invite is None or not same_hash(invite.secret_hash, secret_hash):
        raise StrataError(Code.FORBIDDEN, "the join token is not known here", hint="ask for a new one: strata invite")
    if invite.name and invite.name != host.name:
        raise StrataError(
            Code.FORBIDDEN, f"the join token is for the host {invite.name}", hint=f"join with --name {invite.name}"
        )
    if invite.used_by not in ("", host.public_key):
        raise StrataError(Code.FORBIDDEN, "the join token has been used", hint="each token enrolls one host")
    if invite.revoked_at_s is not None:
        raise StrataError(Code.FORBIDDEN, "the join token was revoked", hint="ask for a new one: strata invite")
    if now_s >= invite.expires_at_s:
        raise StrataError(Code.FORBIDDEN, "the join token has expired", hint="ask for a new one: strata invite")
    return invite


def _resolve_enrolled_host(
    wanted: HostIdentity, namesake: HostIdentity | None, invite: Invite | None = None
) -> HostIdentity | None:
    """The host that is there already, or None when `wanted` is to be added; `namesake` is the live host so named."""
    if namesake is None:
        if invite is not None and invite.used_by:
            # Its host was revoked since: a token that was kept must not bring it back.
            raise StrataError(Code.FORBIDDEN, "the join token has been used", hint="each token enrolls one host")
        return None
    if namesake.public_key == wanted.public_key:
        return namesake
    raise StrataError(
        Code.CONFLICT,
        f"another host is enrolled under the name {wanted.name!r}",
        hint=f"give this one another name, or revoke that one: strata hosts revoke {namesake.id}",
    )


def _check_certifiable(host: HostIdentity | None, host_id: str) -> HostIdentity:
    if host is None:
        raise _not_found("host", host_id)
    if host.revoked_at_s is not None:
        raise StrataError(Code.FORBIDDEN, f"the host {host.name} was revoked: {host.revoked_because}")
    return host


def _not_found(what: str, id_: str) -> StrataError:
    return StrataError(Code.NOT_FOUND, f"there is no {what} {id_!r}")
