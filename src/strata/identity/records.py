"""The rows of identity as values: API keys, invites, hosts, browser sessions; and when a key is valid."""

from __future__ import annotations

from dataclasses import dataclass, field

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
    ephemeral: bool = False
    """It enrolls any number of hosts until it expires, and all of them are ephemeral."""


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
    """Hash of the bearer secret on loopback; empty where certificates are used."""
    certificate_until_s: float = 0.0
    revoked_at_s: float | None = None
    revoked_because: str = field(default="")
    ephemeral: bool = False
    """It exists for a time only: when it is silent it is missed by nobody, and forgotten later."""


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
        """Returns how events name it."""
        return self.token_hash[:12]

    @property
    def actor(self) -> str:
        return "operator" if self.credential.startswith("operator:") else self.credential
