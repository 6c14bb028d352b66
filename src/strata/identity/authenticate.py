"""Authenticates credentials to a principal: keys, operator token, host certificates, sessions; cached for 1 s; with the
wording of refusals.
"""

from __future__ import annotations

import asyncio
import hmac
from dataclasses import dataclass
from typing import Final

from strata.base.clock import Clock
from strata.base.errors import Code, StrataError
from strata.base.secret import Secret
from strata.identity.ca import Authority
from strata.identity.records import ApiKey, BrowserSession, HostIdentity
from strata.identity.roles import OPERATOR, CallerKind, Principal
from strata.identity.sessions import extended_until_s, has_ended, new_code, new_session
from strata.identity.store import IdentityStore
from strata.identity.tokens import KEY_PREFIX, Bearer, check_strength, hash_secret, read_bearer, same_hash

CACHE_TTL_S: Final = 1.0
"""A key that another process revoked may be accepted for so long: then the revision of identities is read again."""
_CACHE_ROWS: Final = 10_000


@dataclass(frozen=True, slots=True)
class Credentials:
    """The credentials of one request; all may be absent, and the strongest one counts."""

    bearer: str = ""
    operator_token: str = ""
    certificate_der: bytes = b""
    """The client certificate that TLS has verified, as the connection reports it; never taken from a header."""
    session: str = ""
    """The token of a browser session. It counts only where there is no other credential."""


class Authenticator:
    def __init__(
        self, store: IdentityStore, clock: Clock, *, authority: Authority | None, operator_token: Secret | None
    ) -> None:
        self._store = store
        self._clock = clock
        self._authority = authority
        self._operator_token = None if operator_token is None else check_strength(operator_token).reveal().encode()
        self._rows: dict[tuple[str, str], tuple[float, ApiKey | HostIdentity | BrowserSession]] = {}
        self._forgotten = 0
        """How often the rows were dropped."""
        self._revision = 0
        self._revision_at_s = float("-inf")
        self._reading_revision = asyncio.Lock()
        self._used: dict[str, float] = {}
        """When a request last came with each key, since it was written."""

    def last_use_s(self, key: ApiKey) -> float | None:
        """Returns when the key was used last, by what is written and by what this process has seen since."""
        known = [at_s for at_s in (key.used_at_s, self._used.get(key.id)) if at_s is not None]
        return max(known, default=None)

    async def write_uses(self) -> None:
        """Write when keys were used, once in a while: a use that is lost with the process is no loss."""
        used, self._used = self._used, {}
        if used:
            await self._store.record_key_uses(used)

    async def identify(self, credentials: Credentials) -> Principal:
        """The principal; UNAUTHENTICATED if no credential is known."""
        if credentials.certificate_der and self._authority is not None:
            host_id = self._authority.host_of(credentials.certificate_der, self._clock.wall_s())
            row = await self._cached_row("host", host_id)
            if not isinstance(row, HostIdentity):
                raise _unauthenticated(present=True)
            return _live_host(row)
        for token in (credentials.operator_token, credentials.bearer):
            if token and self._operator_token is not None:
                given = token.encode("utf-8", "surrogatepass")
                if hmac.compare_digest(given, self._operator_token):
                    return OPERATOR
        bearer = read_bearer(credentials.bearer)
        if credentials.session and not (credentials.bearer or credentials.operator_token):
            return await self._session(hash_secret(Secret(credentials.session)))
        if bearer is None:
            raise _unauthenticated(present=bool(credentials.bearer or credentials.operator_token))
        return await (self._key(bearer) if bearer.kind == KEY_PREFIX else self._host_secret(bearer))

    async def open_session(self, caller: Principal) -> str:
        """Log this caller in; the token of the session, which is shown only here."""
        token, session = new_session(self._credential_of(caller), self._clock.wall_s())
        await self._store.add_session(session, caller.actor)
        return token

    async def make_code(self, caller: Principal) -> str:
        """A code with which a browser opens one session as this caller, soon."""
        code, session = new_code(self._credential_of(caller), self._clock.wall_s())
        await self._store.add_session(session, caller.actor)
        return code

    async def redeem_code(self, code: str, address: str) -> str:
        """The token of a session as the caller who made the code; FORBIDDEN if it was used or has expired."""
        token, session = new_session("", self._clock.wall_s())
        await self._store.redeem_code(hash_secret(Secret(code)), session, address)
        return token

    async def close_session(self, token: str, caller: Principal) -> None:
        await self._store.remove_session(hash_secret(Secret(token)), caller.actor, self._clock.wall_s())
        self.invalidate()

    def _credential_of(self, caller: Principal) -> str:
        if caller.kind is CallerKind.KEY and caller.id:
            return f"key:{caller.id}"
        if caller.kind is CallerKind.OPERATOR and self._operator_token is not None:
            return self._operator_credential
        raise StrataError(Code.FORBIDDEN, "only a person with a key can log in to the dashboard", hint="strata keys")

    @property
    def _operator_credential(self) -> str:
        assert self._operator_token is not None
        return f"operator:{hash_secret(Secret(self._operator_token.decode()))}"

    def invalidate(self) -> None:
        """Drop the cached rows, so that a revocation by this process takes effect at once."""
        self._rows.clear()
        self._forgotten += 1

    async def _key(self, bearer: Bearer) -> Principal:
        row = await self._cached_row("key", bearer.id)
        if not isinstance(row, ApiKey) or not same_hash(row.secret_hash, bearer.secret_hash):
            raise _unauthenticated(present=True)
        if not row.valid(self._clock.wall_s()):
            raise StrataError(Code.UNAUTHENTICATED, f"the key {row.id} was revoked or has expired")
        self._used[row.id] = self._clock.wall_s()
        return Principal(CallerKind.KEY, row.id, row.role, row.name)

    async def _session(self, token_hash: str) -> Principal:
        session, now_s = await self._cached_row("session", token_hash), self._clock.wall_s()
        if not isinstance(session, BrowserSession) or has_ended(session, now_s):
            raise _ended_session()
        if (until_s := extended_until_s(session, now_s)) is not None:
            await self._store.extend_session(token_hash, until_s)
            self._rows.pop(("session", token_hash), None)
        if session.credential.startswith("operator:"):
            if self._operator_token is None or not same_hash(session.credential, self._operator_credential):
                raise _ended_session()
            return OPERATOR
        key = await self._cached_row("key", session.credential.removeprefix("key:"))
        if not isinstance(key, ApiKey) or not key.valid(now_s):
            raise _ended_session()
        self._used[key.id] = now_s
        return Principal(CallerKind.KEY, key.id, key.role, key.name)

    async def _host_secret(self, bearer: Bearer) -> Principal:
        row = await self._cached_row("host", bearer.id)
        if (
            not isinstance(row, HostIdentity)
            or not row.secret_hash
            or not same_hash(row.secret_hash, bearer.secret_hash)
        ):
            raise _unauthenticated(present=True)
        return _live_host(row)

    async def _cached_row(self, what: str, id_: str) -> ApiKey | HostIdentity | BrowserSession | None:
        if what != "session":
            await self._check_revision()
        now_s = self._clock.monotonic_s()
        found = self._rows.get((what, id_))
        if found is not None and (what != "session" or now_s - found[0] < CACHE_TTL_S):
            return found[1]
        row: ApiKey | HostIdentity | BrowserSession | None
        forgotten = self._forgotten
        if what == "key":
            row = await self._store.key(id_)
        else:
            row = await (self._store.host(id_) if what == "host" else self._store.session(id_))
        if row is None:
            # Unknown ids are not cached: an attacker can send any number of them.
            return None
        if len(self._rows) >= _CACHE_ROWS:
            self._rows.clear()
        # What was read before the rows were dropped may be from before the revocation.
        if forgotten == self._forgotten:
            self._rows[what, id_] = (now_s, row)
        return row

    async def _check_revision(self) -> None:
        """Drop all rows if a key or a host was revoked since they were read, by whatever process. One caller reads the
        revision for all, so a host that calls once in a while costs no read of its own."""
        if self._clock.monotonic_s() - self._revision_at_s < CACHE_TTL_S:
            return
        async with self._reading_revision:
            started_s = self._clock.monotonic_s()
            if started_s - self._revision_at_s < CACHE_TTL_S:
                return
            revision = await self._store.revision()
            if revision != self._revision:
                self._revision = revision
                self.invalidate()
            self._revision_at_s = started_s


def _live_host(row: HostIdentity) -> Principal:
    if row.revoked_at_s is not None:
        raise StrataError(Code.FORBIDDEN, f"the host {row.name} was revoked: {row.revoked_because}", hint="strata join")
    return Principal(CallerKind.HOST, row.id, None)


def _ended_session() -> StrataError:
    return StrataError(Code.UNAUTHENTICATED, "this session has ended", hint="log in again")


def _unauthenticated(*, present: bool) -> StrataError:
    if present:
        return StrataError(Code.UNAUTHENTICATED, "these credentials are not known here", hint="strata login")
    return StrataError(
        Code.UNAUTHENTICATED,
        "this needs credentials",
        hint="send `Authorization: Bearer KEY`; `strata keys create` makes one",
    )


async def is_valid_actor(store: IdentityStore, actor: str, now_s: float) -> bool:
    """Says whether the caller whom events name so may still act: False once a key is revoked or has expired."""
    kind, _, key_id = actor.partition(":")
    if kind != CallerKind.KEY:
        return True
    key = await store.key(key_id)
    return key is not None and key.valid(now_s)
