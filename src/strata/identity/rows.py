"""How keys, invites, hosts and sessions lie in a table, the same in both databases, and what enrolling decides."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any, Final

from strata.base.errors import Code, StrataError
from strata.database.events import EventRecord
from strata.identity.ports import ApiKey, BrowserSession, HostIdentity, Invite
from strata.identity.roles import Role
from strata.identity.tokens import same_hash

KEY: Final = "id, name, role, secret_hash, made_at, expires_at, revoked_at, used_at"
INVITE: Final = "id, secret_hash, made_at, expires_at, pool, labels, used_by, revoked_at, name"
HOST: Final = (
    "id, name, public_key, enrolled_at, pool, labels, secret_hash, certificate_until, revoked_at, revoked_because"
)

SESSION: Final = "id, credential, made_at, expires_at, code"


def decode_key(row: Sequence[Any]) -> ApiKey:
    id_, name, role, *rest = row
    return ApiKey(id_, name, Role(role), *rest)


def key_row(key: ApiKey) -> tuple[Any, ...]:
    times = (key.made_at_s, key.expires_at_s, key.revoked_at_s, key.used_at_s)
    return (key.id, key.name, int(key.role), key.secret_hash, *times)


def decode_invite(row: Sequence[Any]) -> Invite:
    id_, secret_hash, made_at_s, expires_at_s, pool, labels, *rest = row
    return Invite(id_, secret_hash, made_at_s, expires_at_s, pool, tuple(json.loads(labels)), *rest)


def invite_row(invite: Invite) -> tuple[Any, ...]:
    return (
        invite.id,
        invite.secret_hash,
        invite.made_at_s,
        invite.expires_at_s,
        invite.pool,
        json.dumps(invite.labels),
        invite.used_by,
        invite.revoked_at_s,
        invite.name,
    )


def decode_host(row: Sequence[Any]) -> HostIdentity:
    id_, name, public_key, enrolled_at_s, pool, labels, *rest = row
    return HostIdentity(id_, name, public_key, enrolled_at_s, pool, tuple(json.loads(labels)), *rest)


def host_row(host: HostIdentity) -> tuple[Any, ...]:
    return tuple(json.dumps(value) if isinstance(value, tuple) else value for value in dataclasses.astuple(host))


def decode_session(row: Sequence[Any]) -> BrowserSession:
    token_hash, credential, made_at_s, expires_at_s, code = row
    return BrowserSession(token_hash, credential, made_at_s, expires_at_s, bool(code))


def session_row(session: BrowserSession) -> tuple[Any, ...]:
    return (session.token_hash, session.credential, session.made_at_s, session.expires_at_s, session.code)


def check_code(code: BrowserSession | None, now_s: float) -> BrowserSession:
    if code is None or not code.code or now_s >= code.expires_at_s:
        raise StrataError(
            Code.FORBIDDEN, "this login link was used or has expired", hint="ask for a new one: strata dashboard"
        )
    return code


def event(at_s: float, actor: str, kind: str, subject: str, **body: Any) -> EventRecord:
    return EventRecord(at_s, actor, kind, subject, body)


BY_INVITE: Final = "invite:"
"""How the actor begins whose invite gets a certificate."""


def check_invite(invite: Invite | None, secret_hash: str, host: HostIdentity, now_s: float) -> Invite:
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


def resolve_enrolled_host(
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


def check_certifiable(host: HostIdentity | None, host_id: str) -> HostIdentity:
    if host is None:
        raise not_found("host", host_id)
    if host.revoked_at_s is not None:
        raise StrataError(Code.FORBIDDEN, f"the host {host.name} was revoked: {host.revoked_because}")
    return host


def not_found(what: str, id_: str) -> StrataError:
    return StrataError(Code.NOT_FOUND, f"there is no {what} {id_!r}")
