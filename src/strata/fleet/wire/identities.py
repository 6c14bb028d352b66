"""Messages about identities: invites (valid for 1,800 s), joining, certificates of hosts and coordinators, API keys,
the caller, login codes.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from strata.fleet.artifacts.manifest import Word
from strata.fleet.core.requirement import Pool
from strata.fleet.wire.base import HubReply, Message

Pem = Annotated[str, msgspec.Meta(max_length=16_384)]
RoleName = Literal["viewer", "researcher", "operator", "admin"]


class InviteRequest(Message, frozen=True, kw_only=True):
    name: Annotated[str, msgspec.Meta(max_length=64)] = ""
    """The only name it may be used for; empty: the host chooses one that is free."""
    pool: Pool = ""
    labels: Annotated[tuple[Word, ...], msgspec.Meta(max_length=64)] = ()
    valid_s: Annotated[float, msgspec.Meta(gt=0, le=30 * 86_400)] = 1800.0
    ephemeral: bool = False
    """It enrolls any number of hosts until it expires. They exist for a time only, and leave no trace in lists."""


class InviteReply(HubReply, frozen=True, kw_only=True):
    token: str
    """Told only here."""
    id: str
    expires_in_s: float
    tls: bool = False
    """Whether other machines can reach this hub."""


class Invited(HubReply, frozen=True, kw_only=True):
    id: str
    made_at_s: float
    expires_at_s: float
    name: str = ""
    pool: str = ""
    labels: tuple[str, ...] = ()
    used: bool = False
    revoked_at_s: float | None = None
    ephemeral: bool = False


class InvitesReply(HubReply, frozen=True, kw_only=True):
    invites: tuple[Invited, ...]


class JoinRequest(Message, frozen=True, kw_only=True):
    invite_id: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{12}\Z")]
    secret: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{40}\Z")]
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    request_pem: Pem
    """A signing request for the key that was made on the host."""


class CertificateReply(HubReply, frozen=True, kw_only=True):
    host_id: str
    name: str
    certificate_pem: str
    serving_pem: str = ""
    """A certificate for the same key: what the host shows its hub when the hub connects to a server there."""
    ca_pem: str
    valid_for_s: float
    ephemeral: bool = False
    """Its agent removes it from the fleet when it stops."""


class RenewRequest(Message, frozen=True, kw_only=True):
    request_pem: Pem


class CoordinatorCertificateRequest(Message, frozen=True, kw_only=True):
    names: Annotated[tuple[Word, ...], msgspec.Meta(min_length=1, max_length=16)]
    """DNS names and addresses at which workers reach the coordinator."""
    request_pem: Pem
    """A signing request for the key that was made beside the coordinator."""


class CoordinatorCertificateReply(HubReply, frozen=True, kw_only=True):
    certificate_pem: str
    """It is for servers only."""
    ca_pem: str
    names: tuple[str, ...]
    expires_at_s: float


class LocalHostRequest(Message, frozen=True, kw_only=True):
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]


class LocalHostReply(HubReply, frozen=True, kw_only=True):
    host_id: str
    secret: str
    """Told only here; good on a hub that listens on loopback without TLS."""


class HubKeyRequest(Message, frozen=True, kw_only=True, omit_defaults=True):
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=128, pattern=r"\A[^\x00-\x1f\x7f]*\Z")]
    role: RoleName
    valid_s: Annotated[float, msgspec.Meta(gt=0, le=3650 * 86_400)] | None = None
    owner: bool = False
    """Whether it is for the owner of a hub whose jobs run as its own user, where a lesser role would be no less."""


class HubKey(HubReply, frozen=True, kw_only=True):
    id: str
    name: str
    role: RoleName
    made_at_s: float
    expires_at_s: float | None = None
    revoked_at_s: float | None = None
    used_at_s: float | None = None
    """When a request last came with it; null: never."""


class CallerReply(HubReply, frozen=True, kw_only=True):
    """Who the hub takes the caller for."""

    kind: Literal["key", "host", "operator"]
    id: str = ""
    name: str = ""
    role: RoleName | None = None
    """None: a host."""
    owner: str = ""
    """The owner of the jobs that the caller queues."""
    expires_at_s: float | None = None
    """When the key, or the host's certificate, expires; None: it does not."""


class LoginCodeReply(HubReply, frozen=True, kw_only=True):
    code: str
    """The code for `/login?code=`, once; told only here."""
    expires_in_s: float
    url: str = ""
    """Where browsers on the hub's machine reach it."""


class HubKeyReply(HubReply, frozen=True, kw_only=True):
    key: HubKey
    secret: str
    """The text of the key; told only here."""


class KeysReply(HubReply, frozen=True, kw_only=True):
    keys: tuple[HubKey, ...]
