"""Messages about quotas, secrets and subscriptions, and the patterns of their names."""

from __future__ import annotations

from typing import Annotated

import msgspec

from strata.fleet.artifacts.manifest import Word
from strata.fleet.core.quota import OwnerUsage, Quota
from strata.fleet.core.subscription import DEFAULT_EVENTS, SubscribedEvent
from strata.fleet.wire.base import HubReply, Message


class OwnerQuota(HubReply, frozen=True, kw_only=True):
    owner: str
    own: bool
    """False: it is the quota of everybody who has none."""
    quota: Quota
    usage: OwnerUsage


class QuotasReply(HubReply, frozen=True, kw_only=True):
    quotas: tuple[OwnerQuota, ...]


class QuotaRequest(Message, frozen=True, kw_only=True):
    owner: Annotated[Word, msgspec.Meta(min_length=1)]
    """`*`: everybody who has none."""
    quota: Quota | None
    """Null: the quota of everybody again."""


SecretName = Annotated[str, msgspec.Meta(max_length=256, pattern=r"\A(?!STRATA_)[A-Za-z_][A-Za-z0-9_]*\Z")]


class SecretQuery(Message, frozen=True, kw_only=True):
    project: Annotated[str, msgspec.Meta(pattern=r"\A([A-Za-z0-9][A-Za-z0-9._-]{0,63})?\Z")] = ""
    """The project whose jobs it is for. Empty: for the jobs of the caller."""


class SecretRequest(Message, frozen=True, kw_only=True):
    value: Annotated[str, msgspec.Meta(min_length=8, max_length=65_536, pattern=r"\A[^\0]*\Z")]
    """Shorter values could not be removed from logs without damage."""


class StoredSecretReply(HubReply, frozen=True, kw_only=True):
    name: str
    project: str = ""
    """Empty: of the caller."""
    changed_at_s: float
    changed_by: str


class SecretsReply(HubReply, frozen=True, kw_only=True):
    """Names only: no request reads a value."""

    secrets: tuple[StoredSecretReply, ...]


SubscriptionName = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")]


class SubscriptionRequest(Message, frozen=True, kw_only=True):
    url: Annotated[str, msgspec.Meta(min_length=4, max_length=2048, pattern=r"\A[!-~]+\Z")]
    """A URL of Apprise, as in `ntfy://TOPIC`. No reply has it."""
    events: Annotated[tuple[SubscribedEvent, ...], msgspec.Meta(min_length=1, max_length=16)] = DEFAULT_EVENTS
    project: Annotated[str, msgspec.Meta(pattern=r"\A([A-Za-z0-9][A-Za-z0-9._-]{0,63})?\Z")] = ""
    """The jobs of this project; empty: the caller's own."""
    all_jobs: bool = False


class SubscriptionReply(HubReply, frozen=True, kw_only=True):
    name: str
    service: str
    events: tuple[str, ...]
    project: str = ""
    all_jobs: bool = False


class SubscriptionsReply(HubReply, frozen=True, kw_only=True):
    subscriptions: tuple[SubscriptionReply, ...]


class SubscriptionTestReply(HubReply, frozen=True, kw_only=True):
    service: str
    """It accepted a message."""
