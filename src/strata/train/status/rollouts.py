"""Rollouts that a tenant keeps: limits for each tenant (200, 16 MiB), in all (128 MiB) and in time (a day), which
samples of a pass are kept, the store, and how it is filtered, sorted and grouped by prompt.

In memory, bounded in count and bytes for each tenant and in bytes for all, and for a limited time. A model's rollouts
are kept if its client asked for it in the metadata of `create_model`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Final, Literal, assert_never

import msgspec

from strata.base.errors import Code, StrataError
from strata.train.core.model_options import is_set
from strata.train.core.ops import MAX_NAME

KEEP: Final = "keep_rollouts"
"""A key in the metadata of a model: `true` keeps its rollouts."""
MAX_PER_PASS: Final = 32
"""Rollouts of one pass: of a larger batch, whole groups that are evenly spread."""
EXCERPT_TOKENS: Final = 96
"""Tokens of prompt and answer that a list has the text of."""
_TOKEN_BYTES: Final = 4
_OVERHEAD: Final = 1024
"""Bytes of a rollout beside its arrays."""

SampleSource = Literal["same_weights", "stale", "unknown"]
"""Drawn here by the weights that learned from it, by earlier weights of the model, or from elsewhere: at another
temperature, or before the server started."""


RolloutSort = Literal["newest", "highest", "lowest", "spread", "gap"]
"""Orders by time, by reward, by the spread of the group's rewards, by the largest gap."""
GroupKey = tuple[str, str]
Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]


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
    """Tokens before the first that was sampled."""
    answer_tokens: int
    """Sampled tokens. Between them may be others, such as results of tools."""
    advantage: float | None
    """The mean over the sampled tokens. It and the gaps are None if one of their numbers is not finite."""
    gap_mean: float | None
    """Distance of the sampler's log probabilities from the trainer's, in nats; with what was learned if it is stale."""
    gap_max: float | None
    reward: float | None = None
    """The reward as the client sent it; None if it did not."""
    oldest_version: int | None = None
    """The saves of the model whose weights drew the answer, by their sequence numbers: the oldest and the newest, which
    differ for an in-flight sampler. None where that is not known."""
    newest_version: int | None = None
    prompt_id: str = ""
    """A digest of the tokens of the prompt."""

    @property
    def group(self) -> GroupKey:
        return self.model_id, self.prompt_id


class PromptGroup(msgspec.Struct, frozen=True, kw_only=True):
    """The kept rollouts of a model that have the same prompt."""

    model_id: str
    prompt_id: str
    rollouts: int
    reward_mean: float | None
    """None if no client sent a reward."""
    reward_spread: float | None
    """The standard deviation."""
    signal: bool
    """Whether their rewards differ; of a single reward, whether the rollout has an advantage."""


class RolloutFilter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Which rollouts of a tenant, and in which order."""

    model: Name = ""
    """The id of a model; empty: all models of the caller."""
    prompt: Name = ""
    """A `prompt_id`; empty: all prompts."""
    reward_min: float | None = None
    """A rollout without a reward is outside of all bounds."""
    reward_max: float | None = None
    signal: bool = False
    """Only groups whose rewards differ."""
    sort: RolloutSort = "newest"
    by_prompt: bool = False
    """Rollouts of a group come one after the other, at the place of the first of them."""


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
    sampled: bytes
    """One byte for each position: 1 if the token was sampled, 0 if it is of the prompt or was given later."""

    @property
    def size(self) -> int:
        arrays = (self.tokens, self.sampler, self.trainer, self.advantages, self.weights, self.versions, self.sampled)
        return sum(map(len, arrays)) + _OVERHEAD


class RolloutExcerpt(msgspec.Struct, frozen=True):
    summary: RolloutSummary
    prompt: bytes
    """The last tokens of the prompt."""
    answer: bytes
    """The first tokens after it."""


class RolloutView(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="rollout"):
    """A rollout, its group, and where it is among those that match a filter."""

    rollout: KeptRollout
    group: PromptGroup
    previous: str = ""
    """The id of the rollout before it; empty: it is the first, or does not match."""
    next: str = ""
    position: int = 0
    """Counts from 1; 0: it does not match."""
    total: int = 0


class RolloutsView(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="rollouts"):
    """The first that match a filter, their groups, how many match, and how many there are in all."""

    rollouts: Sequence[RolloutExcerpt]
    groups: Sequence[PromptGroup]
    total: int
    kept: int


def wants_rollouts(metadata: Mapping[str, str]) -> bool:
    return is_set(metadata, KEEP)


def choose_kept(prompts: Sequence[str]) -> list[int]:
    """Returns the sequences of a batch whose rollouts are kept, by their prompts: whole groups, evenly spread."""
    groups: dict[str, list[int]] = {}
    for number, prompt in enumerate(prompts):
        groups.setdefault(prompt, []).append(number)
    largest = max(map(len, groups.values()), default=1)
    step = math.ceil(len(groups) / max(MAX_PER_PASS // largest, 1))
    within = math.ceil(largest / MAX_PER_PASS)
    return sorted(number for group in list(groups.values())[:: step or 1] for number in group[::within])


def describe_groups(summaries: Iterable[RolloutSummary]) -> dict[GroupKey, PromptGroup]:
    members: dict[GroupKey, list[RolloutSummary]] = {}
    for each in summaries:
        members.setdefault(each.group, []).append(each)
    return {key: _describe_group(own) for key, own in members.items()}


def _describe_group(own: Sequence[RolloutSummary]) -> PromptGroup:
    rewards = [each.reward for each in own if each.reward is not None]
    mean = math.fsum(rewards) / len(rewards) if rewards else None
    return PromptGroup(
        model_id=own[0].model_id,
        prompt_id=own[0].prompt_id,
        rollouts=len(own),
        reward_mean=mean,
        reward_spread=None if mean is None else math.dist(rewards, [mean] * len(rewards)) / math.sqrt(len(rewards)),
        signal=min(rewards) != max(rewards) if len(rewards) > 1 else any(each.advantage for each in own),
    )


def select(
    newest_first: Iterable[RolloutSummary], chosen: RolloutFilter, groups: Mapping[GroupKey, PromptGroup]
) -> list[RolloutSummary]:
    """Returns the rollouts that match a filter, in its order; equal ones stay newest first."""
    found = [each for each in newest_first if _matches(each, chosen, groups[each.group])]
    found.sort(key=lambda each: _sort_key(each, chosen.sort, groups[each.group]))
    if not chosen.by_prompt:
        return found
    members: dict[GroupKey, list[RolloutSummary]] = {}
    for each in found:
        members.setdefault(each.group, []).append(each)
    return [each for own in members.values() for each in own]


def _matches(rollout: RolloutSummary, chosen: RolloutFilter, group: PromptGroup) -> bool:
    least, most, reward = chosen.reward_min, chosen.reward_max, rollout.reward
    if (least, most) != (None, None) and reward is None:
        return False
    return (
        chosen.model in ("", rollout.model_id)
        and chosen.prompt in ("", rollout.prompt_id)
        and (group.signal or not chosen.signal)
        and (least is None or reward is None or reward >= least)
        and (most is None or reward is None or reward <= most)
    )


def _sort_key(rollout: RolloutSummary, sort: RolloutSort, group: PromptGroup) -> tuple[bool, float]:
    match sort:
        case "newest":
            return False, 0.0
        case "highest":
            return rollout.reward is None, -(rollout.reward or 0.0)
        case "lowest":
            return rollout.reward is None, rollout.reward or 0.0
        case "spread":
            return group.reward_spread is None, -(group.reward_spread or 0.0)
        case "gap":
            # What is not finite comes first: no gap is larger.
            return rollout.gap_max is not None, -(rollout.gap_max or 0.0)
        case _:
            assert_never(sort)


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

    def find(self, tenant: str, chosen: RolloutFilter, limit: int, now_s: float) -> RolloutsView:
        """Returns the first that match, of this tenant alone."""
        found, groups = self._select(tenant, chosen, now_s)
        own, shown = self._by_tenant.get(tenant, {}), found[:limit]
        return RolloutsView(
            rollouts=[_excerpt(own[each.rollout_id]) for each in shown],
            groups=[groups[key] for key in dict.fromkeys(each.group for each in shown)],
            total=len(found),
            kept=len(own),
        )

    def read(self, tenant: str, rollout_id: str, chosen: RolloutFilter, now_s: float) -> RolloutView:
        """NOT_FOUND also for one of another tenant."""
        found, groups = self._select(tenant, chosen, now_s)
        rollout = self._by_tenant.get(tenant, {}).get(rollout_id)
        if rollout is None:
            raise StrataError(Code.NOT_FOUND, "there is no such rollout, or it is not kept any longer")
        ids = [each.rollout_id for each in found]
        place = ids.index(rollout_id) if rollout_id in ids else None
        return RolloutView(
            rollout=rollout,
            group=groups[rollout.summary.group],
            previous=ids[place - 1] if place else "",
            next=ids[place + 1] if place is not None and place + 1 < len(ids) else "",
            position=0 if place is None else place + 1,
            total=len(ids),
        )

    def _select(
        self, tenant: str, chosen: RolloutFilter, now_s: float
    ) -> tuple[list[RolloutSummary], dict[GroupKey, PromptGroup]]:
        self.expire(now_s)
        summaries = [each.summary for each in self._by_tenant.get(tenant, {}).values()][::-1]
        groups = describe_groups(summaries)
        return select(summaries, chosen, groups), groups


def _excerpt(rollout: KeptRollout) -> RolloutExcerpt:
    length, end = EXCERPT_TOKENS * _TOKEN_BYTES, rollout.summary.prompt_tokens * _TOKEN_BYTES
    return RolloutExcerpt(
        rollout.summary, rollout.tokens[max(end - length, 0) : end], rollout.tokens[end : end + length]
    )
