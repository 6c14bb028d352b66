"""Kept rollouts: bounded for each tenant and for all, expired in time, and of no other tenant."""

from __future__ import annotations

import pytest

from strata.base.errors import Code, StrataError
from strata.train.status.rollouts import (
    MAX_PER_PASS,
    KeptRollout,
    RolloutLimits,
    RolloutStore,
    RolloutSummary,
    spread,
    wants_rollouts,
)

SIZE = 1024 + 4 * 20
"""Of a rollout of five arrays of 16 bytes."""


def rollout(number: int, at_s: float = 0.0) -> KeptRollout:
    summary = RolloutSummary(
        rollout_id=f"m:{number}:0", model_id=f"m{number % 2}", seq_id=number, at_s=at_s, loss="ppo", source="stale",
        prompt_tokens=1, answer_tokens=3, advantage=1.0, gap_mean=0.0, gap_max=0.0,
    )  # fmt: skip
    data = bytes(16)
    return KeptRollout(summary=summary, tokens=data, sampler=data, trainer=data, advantages=data, weights=data)


def ids(store: RolloutStore, tenant: str, model_id: str = "", now_s: float = 0.0) -> list[int]:
    return [each.seq_id for each in store.newest(tenant, model_id, 100, now_s).rollouts]


def test_the_newest_of_each_tenant_are_kept_and_no_other_tenant_sees_them() -> None:
    store = RolloutStore(RolloutLimits(per_tenant=3))
    for number in range(5):
        store.add("alice", rollout(number))
    store.add("bob", rollout(9))
    store.add("bob", rollout(9))
    assert (ids(store, "alice"), ids(store, "bob"), ids(store, "carl")) == ([4, 3, 2], [9], [])
    assert ids(store, "alice", "m0") == [4, 2]
    assert store.newest("alice", "", 1, 0.0).total == 3
    assert store.get("alice", "m:4:0", 0.0).summary.seq_id == 4
    for tenant, rollout_id in (("bob", "m:4:0"), ("alice", "m:0:0")):
        with pytest.raises(StrataError) as refused:
            store.get(tenant, rollout_id, 0.0)
        assert refused.value.code is Code.NOT_FOUND


def test_bytes_are_bounded_and_the_tenant_that_has_the_most_loses_first() -> None:
    assert rollout(0).size == SIZE
    store = RolloutStore(RolloutLimits(per_tenant=100, tenant_bytes=3 * SIZE, total_bytes=5 * SIZE))
    for number in range(6):
        store.add("alice", rollout(number))
    assert ids(store, "alice") == [5, 4, 3]
    for number in range(3):
        store.add("bob", rollout(number))
    assert sorted(len(ids(store, each)) for each in ("alice", "bob")) == [2, 3]
    store = RolloutStore(RolloutLimits(tenant_bytes=SIZE - 1))
    store.add("alice", rollout(1))
    assert ids(store, "alice") == [], "larger than all that a tenant may have"


def test_rollouts_expire_and_an_operator_can_forbid_them() -> None:
    store = RolloutStore(RolloutLimits(ttl_s=10.0))
    store.add("alice", rollout(1, 0.0))
    store.add("alice", rollout(2, 5.0))
    assert (ids(store, "alice", now_s=9.0), ids(store, "alice", now_s=10.0)) == ([2, 1], [2])
    assert ids(store, "alice", now_s=20.0) == []
    forbidden = RolloutStore(RolloutLimits(per_tenant=0))
    forbidden.add("alice", rollout(1))
    assert (forbidden.enabled, ids(forbidden, "alice")) == (False, [])


def test_a_client_chooses_and_of_a_large_batch_some_are_kept() -> None:
    assert wants_rollouts({"keep_rollouts": "true"})
    assert not wants_rollouts({"keep_rollouts": "false"})
    assert not wants_rollouts({})
    assert list(spread(3)) == [0, 1, 2]
    assert len(spread(1000)) <= MAX_PER_PASS
