"""Kept rollouts: bounded for each tenant and for all, expired in time, of no other tenant, filtered, sorted, grouped by
prompt, and split into turns.
"""

from __future__ import annotations

import math
import statistics
import struct
from collections.abc import Sequence

import msgspec
import pytest

from strata.base.errors import Code, StrataError
from strata.train.status.rollouts import (
    EXCERPT_TOKENS,
    MAX_PER_PASS,
    KeptRollout,
    RolloutFilter,
    RolloutLimits,
    RolloutSort,
    RolloutStore,
    RolloutSummary,
    choose_kept,
    wants_rollouts,
)
from strata.train.wire.rollouts import RolloutsQuery, rollout_reply, to_parameters

SIZE = 1024 + 5 * 16 + 3
"""Of a rollout of five arrays of 16 bytes, and which of its three targets were sampled."""
ALL = RolloutFilter()


def summary(number: int, at_s: float = 0.0, **changes: object) -> RolloutSummary:
    made = RolloutSummary(
        rollout_id=f"m:{number}:0", model_id=f"m{number % 2}", seq_id=number, at_s=at_s, loss="ppo", source="stale",
        prompt_tokens=1, answer_tokens=3, advantage=1.0, gap_mean=0.0, gap_max=0.0,
    )  # fmt: skip
    return msgspec.structs.replace(made, **changes)


def rollout(number: int, at_s: float = 0.0, **changes: object) -> KeptRollout:
    return kept(summary(number, at_s, **changes), (1, 1, 1))


def kept(described: RolloutSummary, sampled: Sequence[int], tokens: Sequence[int] = ()) -> KeptRollout:
    data = bytes(16)
    ids = struct.pack(f"<{len(tokens)}i", *tokens) if tokens else data
    return KeptRollout(
        summary=described, tokens=ids, sampler=data, trainer=data, advantages=data, weights=data, sampled=bytes(sampled)
    )


def ids(store: RolloutStore, tenant: str, model: str = "", now_s: float = 0.0) -> list[int]:
    view = store.find(tenant, RolloutFilter(model=model), 100, now_s)
    return [each.summary.seq_id for each in view.rollouts]


def test_the_newest_of_each_tenant_are_kept_and_no_other_tenant_sees_them() -> None:
    store = RolloutStore(RolloutLimits(per_tenant=3))
    for number in range(5):
        store.add("alice", rollout(number))
    store.add("bob", rollout(9))
    store.add("bob", rollout(9))
    assert (ids(store, "alice"), ids(store, "bob"), ids(store, "carl")) == ([4, 3, 2], [9], [])
    assert ids(store, "alice", "m0") == [4, 2]
    first = store.find("alice", ALL, 1, 0.0)
    assert (len(first.rollouts), first.total, first.kept) == (1, 3, 3)
    assert store.read("alice", "m:4:0", ALL, 0.0).rollout.summary.seq_id == 4
    for tenant, rollout_id in (("bob", "m:4:0"), ("alice", "m:0:0")):
        with pytest.raises(StrataError) as refused:
            store.read(tenant, rollout_id, ALL, 0.0)
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


def test_a_client_chooses_and_of_a_large_batch_whole_groups_are_kept() -> None:
    assert wants_rollouts({"keep_rollouts": "true"})
    assert not wants_rollouts({"keep_rollouts": "false"})
    assert not wants_rollouts({})
    assert choose_kept([]) == []
    assert choose_kept(["a", "b", "a"]) == [0, 1, 2]
    prompts = [str(number // 8) for number in range(128)]
    chosen = choose_kept(prompts)
    assert len(chosen) == MAX_PER_PASS
    assert {prompts.count(prompts[number]) for number in chosen} == {8}
    assert chosen == [number for number in range(128) if number // 8 % 4 == 0], "evenly spread"
    assert len(choose_kept([str(number) for number in range(1000)])) <= MAX_PER_PASS
    alone = choose_kept(["a"] * 1000)
    assert MAX_PER_PASS >= len(alone) > MAX_PER_PASS // 2


@pytest.fixture
def store() -> RolloutStore:
    """Two prompts of model m0: p has the rewards 0, 1, 0.5, and q 2 and 2; r of m1 has none."""
    store = RolloutStore(RolloutLimits())
    rows = [("p", 0.0, 3.0), ("q", 2.0, 1.0), ("p", 1.0, None), ("q", 2.0, 0.0), ("p", 0.5, 2.0), ("r", None, 5.0)]
    for number, (prompt, reward, gap) in enumerate(rows):
        model = "m1" if prompt == "r" else "m0"
        store.add("alice", rollout(number, prompt_id=prompt, reward=reward, gap_max=gap, model_id=model))
    return store


@pytest.mark.parametrize(
    ("sort", "alone", "by_prompt"),
    [
        ("newest", [5, 4, 3, 2, 1, 0], [5, 4, 2, 0, 3, 1]),
        ("highest", [3, 1, 2, 4, 0, 5], [3, 1, 2, 4, 0, 5]),
        ("lowest", [0, 4, 2, 3, 1, 5], [0, 4, 2, 3, 1, 5]),
        ("spread", [4, 2, 0, 3, 1, 5], [4, 2, 0, 3, 1, 5]),
        ("gap", [2, 5, 0, 4, 1, 3], [2, 0, 4, 5, 1, 3]),
    ],
)
def test_rollouts_are_sorted_alone_or_by_prompt(
    store: RolloutStore, sort: RolloutSort, alone: list[int], by_prompt: list[int]
) -> None:
    for grouped, expected in ((False, alone), (True, by_prompt)):
        view = store.find("alice", RolloutFilter(sort=sort, by_prompt=grouped), 100, 0.0)
        assert [each.summary.seq_id for each in view.rollouts] == expected


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        (RolloutFilter(reward_min=0.5), [4, 3, 2, 1]),
        (RolloutFilter(reward_max=0.5), [4, 0]),
        (RolloutFilter(reward_min=0.0, reward_max=1.0), [4, 2, 0]),
        (RolloutFilter(prompt="q"), [3, 1]),
        (RolloutFilter(signal=True), [5, 4, 2, 0]),
        (RolloutFilter(signal=True, model="m0"), [4, 2, 0]),
        (RolloutFilter(prompt="none"), []),
    ],
)
def test_rollouts_are_filtered_by_reward_prompt_and_signal(
    store: RolloutStore, chosen: RolloutFilter, expected: list[int]
) -> None:
    view = store.find("alice", chosen, 100, 0.0)
    assert [each.summary.seq_id for each in view.rollouts] == expected
    assert (view.total, view.kept) == (len(expected), 6)


def test_a_group_has_mean_and_spread_of_all_its_rewards_whatever_the_filter(store: RolloutStore) -> None:
    (group,) = store.find("alice", RolloutFilter(reward_min=0.9, reward_max=1.1), 100, 0.0).groups
    rewards = [0.0, 1.0, 0.5]
    assert (group.prompt_id, group.rollouts, group.reward_mean) == ("p", 3, statistics.fmean(rewards))
    assert group.reward_spread == pytest.approx(statistics.pstdev(rewards))
    (without,) = store.find("alice", RolloutFilter(prompt="r"), 100, 0.0).groups
    assert (without.reward_mean, without.reward_spread, without.signal) == (None, None, True)


def test_neighbours_are_those_of_the_filtered_list_in_its_order(store: RolloutStore) -> None:
    chosen = RolloutFilter(prompt="p", sort="highest")
    path, rollout_id = [], "m:2:0"
    while rollout_id:
        view = store.read("alice", rollout_id, chosen, 0.0)
        path.append((view.previous, view.position, view.total))
        rollout_id = view.next
    assert path == [("", 1, 3), ("m:2:0", 2, 3), ("m:4:0", 3, 3)]
    outside = store.read("alice", "m:1:0", chosen, 0.0)
    assert (outside.previous, outside.next, outside.position, outside.group.rollouts) == ("", "", 0, 2)


def test_a_list_has_the_end_of_the_prompt_and_the_beginning_of_the_answer() -> None:
    store, tokens = RolloutStore(RolloutLimits()), list(range(300))
    store.add("alice", kept(summary(0, prompt_tokens=200), bytes(299), tokens))
    (row,) = store.find("alice", ALL, 1, 0.0).rollouts
    prompt, answer = (struct.unpack(f"<{len(each) // 4}i", each) for each in (row.prompt, row.answer))
    assert (prompt, answer) == (tuple(range(200 - EXCERPT_TOKENS, 200)), tuple(range(200, 200 + EXCERPT_TOKENS)))


def test_a_rollout_has_a_turn_for_each_run_of_sampled_tokens() -> None:
    """Prompt, answer, what a tool said, answer."""
    data = struct.pack("<5f", -1.0, -2.0, -3.0, math.nan, -5.0)
    made = KeptRollout(
        summary=summary(0), tokens=struct.pack("<6i", *range(6)), sampler=data, trainer=bytes(20), advantages=data,
        weights=data, versions=struct.pack("<5i", -1, 3, -1, 3, 7), sampled=bytes((0, 1, 0, 1, 1)),
    )  # fmt: skip
    store = RolloutStore(RolloutLimits())
    store.add("alice", made)
    reply = rollout_reply(store.read("alice", "m:0:0", ALL, 0.0), None, "<call>")
    turns = [(each.kind, each.begin, each.end) for each in reply.turns]
    assert turns == [("prompt", 0, 2), ("answer", 2, 3), ("given", 3, 4), ("answer", 4, 6)]
    assert [each.gap for each in reply.tokens] == [None, None, 2.0, None, None, 5.0]
    assert [each.version for each in reply.tokens] == [None, None, 3, None, 3, 7]
    assert [each.trainer for each in reply.tokens] == [None, *[0.0] * 5]


def test_the_parameters_of_a_query_leave_defaults_out_and_are_read_back() -> None:
    assert to_parameters(RolloutsQuery()) == {}, "an earlier server does not know them"
    query = RolloutsQuery(reward_min=0.0, signal=True, sort="gap", limit=7)
    sent = to_parameters(query)
    assert sent == {"reward_min": "0.0", "signal": "true", "sort": "gap", "limit": "7"}
    assert msgspec.convert(sent, RolloutsQuery, strict=False) == query
