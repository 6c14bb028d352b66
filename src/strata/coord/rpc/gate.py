"""Who calls: from the metadata of a call to an identity, with the token's word against all others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from strata.base.clock import Clock
from strata.base.errors import Code, StrataError
from strata.coord.tokens import Role, Tokens
from strata.coord.wire import Identity

ANY: Final = frozenset(Role)
WORKER: Final = frozenset({Role.WORKER})
OPERATOR: Final = frozenset({Role.OPERATOR})
_BEARER: Final = "bearer "


class Gate:
    def __init__(self, tokens: Tokens | None, clock: Clock) -> None:
        self._tokens = tokens
        self._clock = clock

    def identify(self, metadata: Iterable[tuple[str, str | bytes]], roles: frozenset[Role]) -> Identity:
        """The caller, if its token (where tokens are needed) has one of the roles."""
        said = {key: value for key, value in metadata if isinstance(value, str)}
        job, worker_id = said.get("strata-job", ""), said.get("strata-worker", "")
        if self._tokens is None:
            return Identity(job, worker_id)
        bearer = said.get("authorization", "")
        if not bearer.lower().startswith(_BEARER):
            raise StrataError(
                Code.UNAUTHENTICATED, "this coordinator needs a token", hint="metadata authorization: Bearer TOKEN"
            )
        claims = self._tokens.read(bearer[len(_BEARER) :].strip(), self._clock.wall_s())
        if claims.role not in roles:
            wanted = " or ".join(sorted(role.value for role in roles))
            raise StrataError(Code.FORBIDDEN, f"this call needs the token of a {wanted}, not of a {claims.role.value}")
        identity = Identity(job, worker_id, claims.job, claims.worker)
        # Metadata that contradicts the token is refused even where a field would have the last word.
        identity.job_of(job)
        if worker_id:
            identity.worker_of(worker_id)
        return identity
