"""Enrolment of hosts: how long an invite is valid (1,800 s), allowed names of hosts, joining, renewal of a host's
certificate; certificates of coordinators; and the making of API keys. Their formats are in `tokens`, their rows in
`store`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from strata.base.clock import Clock
from strata.base.errors import Code, StrataError
from strata.base.ids import Ids
from strata.base.secret import Secret
from strata.identity.ca import Authority, CoordinatorCertificate, IssuedCertificate, canonical_name, key_digest
from strata.identity.records import ApiKey, HostIdentity, Invite
from strata.identity.roles import Principal, Role
from strata.identity.store import IdentityStore
from strata.identity.tokens import (
    JoinToken,
    hash_secret,
    new_id,
    new_key_id,
    new_secret,
    spell_host_secret,
    spell_key,
)

INVITE_S: Final = 1800.0
_NAME: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,62}[A-Za-z0-9])?")


@dataclass(frozen=True)
class Enrolled:
    host: HostIdentity
    certificate: IssuedCertificate


class Enrollment:
    def __init__(
        self, store: IdentityStore, authority: Authority, clock: Clock, *, hub_names: Iterable[str] = ()
    ) -> None:
        """`hub_names`: the names in the hub's own certificate."""
        self._hub_names = frozenset(map(canonical_name, hub_names))
        self._store = store
        self._authority = authority
        self._clock = clock
        self._ids = Ids(clock)

    async def invite(
        self,
        by: Principal,
        *,
        name: str = "",
        pool: str = "",
        labels: tuple[str, ...] = (),
        valid_s: float = INVITE_S,
        ephemeral: bool = False,
    ) -> JoinToken:
        by.require_role(Role.OPERATOR)
        if name:
            _check_name(name)
        secret, id_, now_s = new_secret(), new_id(), self._clock.wall_s()
        invite = Invite(id_, hash_secret(secret), now_s, now_s + valid_s, pool, labels, name=name, ephemeral=ephemeral)
        await self._store.add_invite(invite, by.actor)
        return JoinToken(self._authority.pin, id_, secret)

    async def join(self, invite_id: str, secret: Secret, name: str, request_pem: bytes) -> Enrolled:
        """The host of this request, enrolled by an invitation. A retry with the same key gets the same host."""
        host = self._host(name, key_digest(request_pem))
        host = await self._store.enroll(invite_id, hash_secret(secret), host, self._clock.wall_s())
        return Enrolled(host, await self._certify(host.id, request_pem, f"invite:{invite_id}"))

    async def renew(self, by: Principal, request_pem: bytes) -> IssuedCertificate:
        """A new certificate for the calling host, for the key it enrolled with."""
        host_id = by.require_host()
        host = await self._store.host(host_id)
        if host is None or host.public_key != key_digest(request_pem):
            raise StrataError(Code.FORBIDDEN, "a certificate is renewed for the key the host enrolled with")
        return await self._certify(host_id, request_pem, by.actor)

    async def certify_coordinator(
        self, by: Principal, names: Sequence[str], request_pem: bytes
    ) -> CoordinatorCertificate:
        """A certificate with which a coordinator serves under these names, for the key of the request."""
        by.require_role(Role.OPERATOR)
        issued = self._authority.issue_coordinator(names, request_pem, self._clock.wall_s())
        own = sorted(self._hub_names.intersection(issued.names))
        if own and by.role is not Role.ADMIN:
            # Its holder could pose as the hub, and be sent the keys of admins.
            raise StrataError(
                Code.FORBIDDEN,
                f"{own[0]} is a name of the hub itself: a certificate for it needs the role admin",
                hint="give the coordinator a name of its own",
            )
        await self._store.record_coordinator_certificate(issued.names, issued.until_s, by.actor, self._clock.wall_s())
        return issued

    async def add_local(self, name: str) -> tuple[HostIdentity, str]:
        """The agent beside its hub on loopback: a host with a bearer secret, which is told only here."""
        secret = new_secret()
        host = self._host(name, f"secret:{hash_secret(secret)}", secret)
        return await self._store.add_host(host, "hub"), spell_host_secret(host.id, secret)

    def _host(self, name: str, public_key: str, secret: Secret | None = None) -> HostIdentity:
        _check_name(name)
        secret_hash = "" if secret is None else hash_secret(secret)
        return HostIdentity(self._ids.new("host"), name, public_key, self._clock.wall_s(), secret_hash=secret_hash)

    async def _certify(self, host_id: str, request_pem: bytes, actor: str) -> IssuedCertificate:
        issued = self._authority.issue_host(host_id, request_pem, self._clock.wall_s())
        # Recorded before it is handed out: a revoked host gets none.
        await self._store.record_certificate(host_id, issued.until_s, actor, self._clock.wall_s())
        return issued


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise StrataError(
            Code.INVALID, f"{name[:80]!r} cannot be the name of a host", hint="letters, digits, dot, dash; at most 64"
        )


async def make_key(
    store: IdentityStore, clock: Clock, by: Principal, *, name: str, role: Role, valid_s: float | None = None
) -> tuple[ApiKey, str]:
    """A new API key and its text, which is told only here."""
    by.require_role(Role.ADMIN)
    secret, now_s = new_secret(), clock.wall_s()
    expires_at_s = None if valid_s is None else now_s + valid_s
    key = ApiKey(new_key_id(privileged=role > Role.RESEARCHER), name, role, hash_secret(secret), now_s, expires_at_s)
    await store.add_key(key, by.actor)
    return key, spell_key(key.id, secret)
