"""Authenticates calls to the coordinator by the bearer token in their metadata: which role a call needs, cached tokens,
renewals and revocations. The token overrides what other fields claim.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Final

from strata.base.clock import Clock
from strata.base.errors import Code, StrataError
from strata.coord.server.tokens import ALL_JOBS, Claims, TokenRole, Tokens
from strata.coord.server.wire import Identity

ANY: Final = frozenset(TokenRole)
WORKER: Final = frozenset({TokenRole.WORKER})
OPERATOR: Final = frozenset({TokenRole.OPERATOR})
CACHE_SIZE: Final = 16_384
ANONYMOUS: Final = Identity()
_BEARER: Final = "bearer "

Metadata = tuple[tuple[str, str | bytes], ...]


@dataclass(frozen=True)
class _CachedIdentity:
    """The result of reading one set of metadata."""

    identity: Identity
    claims: Claims | None
    """None: no token is needed."""


class TokenAuthenticator:
    """Authenticates callers and caches the results: a worker sends the same metadata with every call."""

    def __init__(self, tokens: Tokens | None, clock: Clock, revoked: Container[str] = frozenset()) -> None:
        self._tokens = tokens
        self._clock = clock
        self._revoked = revoked
        self._cache: dict[Metadata, _CachedIdentity] = {}

    @property
    def allows_anonymous(self) -> bool:
        """Says whether no call needs a token."""
        return self._tokens is None

    def identify(self, metadata: Metadata, roles: frozenset[TokenRole]) -> Identity:
        """The caller, if its token (where tokens are needed) has one of the roles."""
        cached = self._cache.get(metadata)
        if cached is None or (cached.claims is not None and self._clock.wall_s() >= cached.claims.expires_s):
            cached = self._authenticate(metadata)
        claims = cached.claims
        if claims is None:
            return cached.identity
        if claims.id and claims.id in self._revoked:
            raise StrataError(Code.UNAUTHENTICATED, "the token has been revoked")
        if claims.role not in roles:
            wanted = " or ".join(sorted(role.value for role in roles))
            raise StrataError(Code.FORBIDDEN, f"this call needs the token of a {wanted}, not of a {claims.role.value}")
        return cached.identity

    def renewal(self, metadata: Metadata) -> str | None:
        """The successor of the token that an identified caller sent, once it is due."""
        cached = self._cache.get(metadata)
        if self._tokens is None or cached is None or cached.claims is None or not cached.claims.renew_until_s:
            return None
        claims = cached.claims.renewed(self._clock.wall_s())
        return None if claims is None else self._tokens.issue(claims)

    def _authenticate(self, metadata: Metadata) -> _CachedIdentity:
        self._cache.pop(metadata, None)
        cached = self._read(metadata)
        if len(self._cache) >= CACHE_SIZE:
            # A caller that varies its metadata only causes all tokens to be verified once more.
            self._cache.clear()
        self._cache[metadata] = cached
        return cached

    def _read(self, metadata: Metadata) -> _CachedIdentity:
        said = {key: value for key, value in metadata if isinstance(value, str)}
        job, worker_id = said.get("strata-job", ""), said.get("strata-worker", "")
        if self._tokens is None:
            return _CachedIdentity(Identity(job, worker_id), None)
        bearer = said.get("authorization", "")
        if not bearer.lower().startswith(_BEARER):
            raise StrataError(
                Code.UNAUTHENTICATED, "this coordinator needs a token", hint="metadata authorization: Bearer TOKEN"
            )
        claims = self._tokens.read(bearer[len(_BEARER) :].strip(), self._clock.wall_s())
        token_job = "" if claims.job == ALL_JOBS and claims.role is TokenRole.OPERATOR else claims.job
        identity = Identity(job, worker_id, token_job, claims.worker)
        # Metadata that contradicts the token is rejected, even where a field of the message takes precedence.
        identity.job_of(job)
        if worker_id:
            identity.worker_of(worker_id)
        return _CachedIdentity(identity, claims)
