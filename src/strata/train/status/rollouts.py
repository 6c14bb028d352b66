"""Rollouts that a tenant keeps: limits for each tenant (200, 16 MiB), in all (128 MiB) and in time (a day), which
samples of a pass are kept, and the store.

In memory, bounded in count and bytes for each tenant and in bytes for all, and for a limited time. A model's rollouts
are kept if its client asked for it in the metadata of `create_model`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Literal

import msgspec

from strata.base.errors import Code, StrataError
from strata.train.core.model_options import is_set

KEEP: Final = "keep_rollouts"
"""A key in the metadata of a model: `true` keeps its rollouts."""
MAX_PER_PASS: Final = 32
"""Rollouts of one pass: of a larger batch, so many that are evenly spread."""
_OVERHEAD: Final = 1024
"""Bytes of a rollout beside its arrays."""

SampleSource = Literal["same_weights", "stale", "unknown"]
"""Drawn here by the weights that learned from it, by earlier weights of the model, or from elsewhere: at another
temperature, or before the server started."""


class RolloutLimits(msgspec.Struct, frozen=True, kw_only=True):
    per_tenant: int = 200
    """0: none is kept, whatever clients ask for."""
    tenant_bytes: int = 16 << 20
    total_bytes: int = 128 << 20
    ttl_s: float = 86_400.0


class RolloutSummary(msgspec.Struct, frozen=True, kw_only=True):
    rollout_id: str
    model_id: str
    seq_id: int
    """The pass that learned from it."""
    at_s: float
    loss: str
    source: SampleSource
    prompt_tokens: int
    """Tokens before the first that was learned from."""
    answer_tokens: int
    advantage: float
    """The mean over the tokens of the answer."""
    gap_mean: float
    """Distance of the sampler's log probabilities from the trainer's, in nats; with what was learned if it is stale."""
    gap_max: float
    reward: float | None = None
    """The reward as the client sent it; None if it did not."""
    oldest_version: int | None = None
    """The saves of the model whose weights drew the answer, by their sequence numbers: the oldest and the newest, which
    differ for an in-flight sampler. None where that is not known."""
    newest_version: int | None = None


class KeptRollout(msgspec.Struct, frozen=True, kw_only=True):
    """Position i of the float32 arrays is about token i + 1."""

    summary: RolloutSummary
    tokens: bytes
    """int32, little-endian."""
    sampler: bytes
    trainer: bytes
    advantages: bytes
    weights: bytes
    versions: bytes = b""
    """int32, about the tokens as the other arrays: the save whose weights drew each token; -1 where that is not
    known."""

    @property
    def size(self) -> int:
        arrays = (self.tokens, self.sampler, self.trainer, self.advantages, self.weights, self.versions)
        return sum(map(len, arrays)) + _OVERHEAD


class RolloutView(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="rollout"):
    rollout: KeptRollout


class RolloutsView(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="rollouts"):
    """Newest first, and how many there are in all."""

    rollouts: Sequence[RolloutSummary]
    total: int


def wants_rollouts(metadata: Mapping[str, str]) -> bool:
    return is_set(metadata, KEEP)


def spread(count: int) -> range:
    """The datums of a batch whose rollouts are kept."""
    return range(0, count, max(-(-count // MAX_PER_PASS), 1))


class RolloutStore:
    def __init__(self, limits: RolloutLimits) -> None:
        self._limits = limits
        self._by_tenant: dict[str, dict[str, KeptRollout]] = {}
        """Each oldest first."""
        self._sizes: dict[str, int] = {}

    @property
    def enabled(self) -> bool:
        return self._limits.per_tenant > 0

    def add(self, tenant: str, rollout: KeptRollout) -> None:
        """The same one twice is one. The oldest go first, and of all tenants those of the one that has the most."""
        limits = self._limits
        if not self.enabled or rollout.size > min(limits.tenant_bytes, limits.total_bytes):
            return
        own = self._by_tenant.setdefault(tenant, {})
        before = own.pop(rollout.summary.rollout_id, None)
        own[rollout.summary.rollout_id] = rollout
        self._sizes[tenant] = self._sizes.get(tenant, 0) + rollout.size - (0 if before is None else before.size)
        while len(own) > limits.per_tenant or self._sizes[tenant] > limits.tenant_bytes:
            self._drop_oldest(tenant)
        while sum(self._sizes.values()) > limits.total_bytes:
            self._drop_oldest(max(self._sizes, key=lambda name: self._sizes[name]))

    def expire(self, now_s: float) -> None:
        expired_s = now_s - self._limits.ttl_s
        for tenant in list(self._by_tenant):
            while (own := self._by_tenant.get(tenant)) and next(iter(own.values())).summary.at_s <= expired_s:
                self._drop_oldest(tenant)

    def _drop_oldest(self, tenant: str) -> None:
        own = self._by_tenant[tenant]
        self._sizes[tenant] -= own.pop(next(iter(own))).size
        if not own:
            del self._by_tenant[tenant], self._sizes[tenant]

    def newest(self, tenant: str, model_id: str, limit: int, now_s: float) -> RolloutsView:
        """Returns the newest of one model, or of all if the id is empty; of this tenant alone."""
        self.expire(now_s)
        summaries = [each.summary for each in self._by_tenant.get(tenant, {}).values()]
        own = [each for each in summaries if model_id in ("", each.model_id)]
        return RolloutsView(own[::-1][:limit], len(own))

    def get(self, tenant: str, rollout_id: str, now_s: float) -> KeptRollout:
        """NOT_FOUND also for one of another tenant."""
        self.expire(now_s)
        rollout = self._by_tenant.get(tenant, {}).get(rollout_id)
        if rollout is None:
            raise StrataError(Code.NOT_FOUND, "there is no such rollout, or it is not kept any longer")
        return rollout
