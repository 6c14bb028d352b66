"""Authenticates a request: from its credentials to its principal. Every server uses this one function."""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from typing import Final

from strata.base.clock import Clock
from strata.base.errors import Code, StrataError
from strata.base.secret import Secret
from strata.identity.ca import Authority
from strata.identity.ports import ApiKey, HostIdentity, IdentityStore
from strata.identity.roles import OPERATOR, CallerKind, Principal
from strata.identity.tokens import Bearer, check_strength, read_bearer, same_hash

CACHE_TTL_S: Final = 1.0
"""Rows are cached for this time: a key that another process revoked may be accepted for so long."""
_CACHE_ROWS: Final = 10_000


@dataclass(frozen=True, slots=True)
class Credentials:
    """The credentials of one request; all may be absent, and the strongest one counts."""

    bearer: str = ""
    operator_token: str = ""
    certificate_der: bytes = b""
    """The client certificate that TLS has verified, as the connection reports it; never taken from a header."""


class Authenticator:
    def __init__(
        self, store: IdentityStore, clock: Clock, *, authority: Authority | None, operator_token: Secret | None
    ) -> None:
        self._store = store
        self._clock = clock
        self._authority = authority
        self._operator_token = None if operator_token is None else check_strength(operator_token).reveal().encode()
        self._rows: dict[tuple[str, str], tuple[float, ApiKey | HostIdentity]] = {}

    async def identify(self, credentials: Credentials) -> Principal:
        """The principal; UNAUTHENTICATED if no credential is known."""
        if credentials.certificate_der and self._authority is not None:
            host_id = self._authority.host_of(credentials.certificate_der, self._clock.wall_s())
            return await self._live_host(host_id)
        for token in (credentials.operator_token, credentials.bearer):
            if token and self._operator_token is not None:
                given = token.encode("utf-8", "surrogatepass")
                if hmac.compare_digest(given, self._operator_token):
                    return OPERATOR
        bearer = read_bearer(credentials.bearer)
        if bearer is None:
            raise _unauthenticated(present=bool(credentials.bearer or credentials.operator_token))
        return await (self._key(bearer) if bearer.kind == "tml" else self._host_secret(bearer))

    def invalidate(self) -> None:
        """Drop the cached rows, so that a revocation by this process takes effect at once."""
        self._rows.clear()

    async def _key(self, bearer: Bearer) -> Principal:
        row = await self._cached_row("key", bearer.id)
        if not isinstance(row, ApiKey) or not same_hash(row.secret_hash, bearer.secret_hash):
            raise _unauthenticated(present=True)
        if not row.valid(self._clock.wall_s()):
            raise StrataError(Code.UNAUTHENTICATED, f"the key {row.id} was revoked or has expired")
        return Principal(CallerKind.KEY, row.id, row.role, row.name)

    async def _host_secret(self, bearer: Bearer) -> Principal:
        row = await self._cached_row("host", bearer.id)
        if (
            not isinstance(row, HostIdentity)
            or not row.secret_hash
            or not same_hash(row.secret_hash, bearer.secret_hash)
        ):
            raise _unauthenticated(present=True)
        return await self._live_host(bearer.id)

    async def _live_host(self, host_id: str) -> Principal:
        row = await self._cached_row("host", host_id)
        if not isinstance(row, HostIdentity):
            raise _unauthenticated(present=True)
        if row.revoked_at_s is not None:
            raise StrataError(
                Code.FORBIDDEN, f"the host {row.name} was revoked: {row.revoked_because}", hint="strata join"
            )
        return Principal(CallerKind.HOST, row.id, None)

    async def _cached_row(self, what: str, id_: str) -> ApiKey | HostIdentity | None:
        now_s = self._clock.monotonic_s()
        found = self._rows.get((what, id_))
        if found is not None and now_s - found[0] < CACHE_TTL_S:
            return found[1]
        row = await (self._store.key(id_) if what == "key" else self._store.host(id_))
        if row is None:
            # Unknown ids are not cached: an attacker can send any number of them.
            return None
        if len(self._rows) >= _CACHE_ROWS:
            self._rows.clear()
        self._rows[what, id_] = (now_s, row)
        return row


def _unauthenticated(*, present: bool) -> StrataError:
    if present:
        return StrataError(Code.UNAUTHENTICATED, "these credentials are not known here", hint="strata login")
    return StrataError(
        Code.UNAUTHENTICATED,
        "this needs credentials",
        hint="send `Authorization: Bearer KEY`; `strata keys create` makes one",
    )


async def is_valid_actor(store: IdentityStore, actor: str, now_s: float) -> bool:
    """Whether the caller whom events name so may still act: False once a key is revoked or has expired."""
    kind, _, key_id = actor.partition(":")
    if kind != CallerKind.KEY:
        return True
    key = await store.key(key_id)
    return key is not None and key.valid(now_s)
