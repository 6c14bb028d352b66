"""What identity keeps, and the one port behind which SQLite and PostgreSQL keep it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from strata.identity.roles import Role


@dataclass(frozen=True, slots=True)
class ApiKey:
    id: str
    name: str
    role: Role
    secret_hash: str
    made_at_s: float
    expires_at_s: float | None = None
    revoked_at_s: float | None = None
    used_at_s: float | None = None
    """When a request last came with it, as far as it was written; None: never."""

    def valid(self, now_s: float) -> bool:
        return self.revoked_at_s is None and (self.expires_at_s is None or now_s < self.expires_at_s)


@dataclass(frozen=True, slots=True)
class Invite:
    id: str
    secret_hash: str
    made_at_s: float
    expires_at_s: float
    pool: str = ""
    labels: tuple[str, ...] = ()
    used_by: str = ""
    """Digest of the public key that used it: the same host may ask again when a reply was lost, another may not."""
    revoked_at_s: float | None = None
    name: str = ""
    """The only host it is for; empty: any name that is free."""


@dataclass(frozen=True, slots=True)
class HostIdentity:
    id: str
    name: str
    public_key: str
    """Digest of the key that may renew the certificate."""
    enrolled_at_s: float
    pool: str = ""
    labels: tuple[str, ...] = ()
    secret_hash: str = ""
    """Of the bearer secret on loopback; empty where certificates are used."""
    certificate_until_s: float = 0.0
    revoked_at_s: float | None = None
    revoked_because: str = field(default="")


@dataclass(frozen=True, slots=True)
class BrowserSession:
    """A person who logged in to the dashboard, or with `code` a login link that was not used yet."""

    token_hash: str
    credential: str
    """`key:ID`, or `operator:` and the hash of the operator token: a session ends with what it was opened with."""
    made_at_s: float
    expires_at_s: float
    code: bool = False

    @property
    def id(self) -> str:
        """How events name it."""
        return self.token_hash[:12]

    @property
    def actor(self) -> str:
        return "operator" if self.credential.startswith("operator:") else self.credential


class IdentityStore(Protocol):
    """Each method is one transaction, with its event. Unknown ids raise NOT_FOUND."""

    async def add_key(self, key: ApiKey, actor: str) -> None: ...

    async def key(self, id_: str) -> ApiKey | None: ...

    async def keys(self) -> Sequence[ApiKey]: ...

    async def record_key_uses(self, used: Mapping[str, float]) -> None:
        """Write when each key was used last, in one statement and without an event; unknown keys are ignored."""

    async def revoke_key(self, id_: str, actor: str, now_s: float) -> None:
        """Again: no change, no event."""

    async def add_invite(self, invite: Invite, actor: str) -> None: ...

    async def invites(self) -> Sequence[Invite]: ...

    async def revoke_invite(self, id_: str, actor: str, now_s: float) -> None: ...

    async def enroll(self, invite_id: str, secret_hash: str, host: HostIdentity, now_s: float) -> HostIdentity:
        """Use the invite for this host, once. The same public key again gets the same host; all else is FORBIDDEN.

        A name that another live host has is CONFLICT: two machines must not answer to one name.
        """

    async def add_host(self, host: HostIdentity, actor: str) -> HostIdentity:
        """Enroll without an invite: the local agent of `strata up`. Idempotent for the same name and public key."""

    async def host(self, id_: str) -> HostIdentity | None: ...

    async def hosts(self) -> Sequence[HostIdentity]: ...

    async def record_certificate(self, host_id: str, until_s: float, actor: str, now_s: float) -> None:
        """A certificate was issued. Refused with FORBIDDEN for a revoked host, in the same transaction."""

    async def revoke_host(self, host_id: str, reason: str, actor: str, now_s: float) -> None: ...

    async def add_session(self, session: BrowserSession, actor: str) -> None:
        """Sessions and codes that have expired by then are removed."""

    async def redeem_code(self, code_hash: str, session: BrowserSession, address: str) -> BrowserSession:
        """Use the code, once, for this session, which gets the credential of the code; FORBIDDEN for any other."""

    async def session(self, token_hash: str) -> BrowserSession | None: ...

    async def extend_session(self, token_hash: str, expires_at_s: float) -> None: ...

    async def remove_session(self, token_hash: str, actor: str, now_s: float) -> None:
        """Again: no change, no event."""
