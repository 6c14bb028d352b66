"""Turns of a rollout session: which one a prompt continues, and branches in which each sampled token counts once."""

from __future__ import annotations

import array
from collections.abc import Sequence

from strata.train.core.rollout_session import (
    Turn,
    branch_ends,
    build_branch,
    conversation_keys,
    count_turns,
    find_conversation,
    find_prefix,
    tokens_to,
)


def pack(*tokens: int) -> bytes:
    return array.array("i", tokens).tobytes()


def turn(parent: int | None, added: Sequence[int], sampled: Sequence[int], key: bytes = b"") -> Turn:
    return Turn(
        parent=parent, origin="start" if parent is None else "continued", added=pack(*added), sampled=pack(*sampled),
        logprobs=array.array("f", [-float(token) for token in sampled]).tobytes(), conversation=key, reply="r",
        choice=0, model="m", version="", sampler_id="s", created_s=0.0, finish_reason="stop", temperature=1.0,
    )  # fmt: skip


CONVERSATION = [
    turn(None, [1, 2], [3]),
    turn(0, [4], [5, 6]),
    turn(0, [7], [8]),
    turn(1, [], [9]),
    turn(None, [10], [11]),
]


def branches(turns: Sequence[Turn]) -> list[tuple[list[int], list[int], list[int], list[float]]]:
    ends = branch_ends(turns)
    made = [build_branch(turns, end, count_turns(turns, ends)) for end in ends]
    return [(list(each.turns), ints(each.tokens), list(each.is_sampled), floats(each.logprobs)) for each in made]


def ints(data: bytes) -> list[int]:
    return list(array.array("i", data))


def floats(data: bytes) -> list[float]:
    return list(array.array("f", data))


def test_a_branch_has_the_tokens_of_its_turns_and_each_sampled_token_counts_once() -> None:
    assert branches(CONVERSATION) == [
        ([0, 2], [1, 2, 3, 7, 8], [0, 0, 1, 0, 1], [0.0, 0.0, -3.0, 0.0, -8.0]),
        ([0, 1, 3], [1, 2, 3, 4, 5, 6, 9], [0, 0, 0, 0, 1, 1, 1], [0.0, 0.0, 0.0, 0.0, -5.0, -6.0, -9.0]),
        ([4], [10, 11], [0, 1], [0.0, -11.0]),
    ]
    sampled = sum(len(each.sampled) // 4 for each in CONVERSATION)
    assert sum(sum(is_sampled) for _, _, is_sampled, _ in branches(CONVERSATION)) == sampled


def test_a_prompt_continues_the_turn_with_the_longest_tokens_that_it_begins_with() -> None:
    for prompt, expected in (
        ([1, 2, 3, 4, 5, 6, 7], (1, 24)),
        ([1, 2, 3, 4, 5, 6, 9, 1], (3, 28)),
        ([1, 2, 3, 9], (0, 12)),
        # Nothing is new: the same prompt is sampled again, and continues what came before it.
        ([1, 2, 3], None),
        ([2, 3, 4], None),
        ([10, 11, 12], (4, 8)),
    ):
        assert find_prefix(CONVERSATION, pack(*prompt)) == expected, prompt
    assert tokens_to(CONVERSATION, 3) == pack(1, 2, 3, 4, 5, 6, 9)


def test_a_conversation_continues_the_longest_one_that_it_begins_with() -> None:
    keys = conversation_keys(b"tools", [b"a", b"b", b"c", b"d"])
    turns = [turn(None, [1], [2], keys[1]), turn(0, [3], [4], keys[3]), turn(None, [5], [6], keys[1])]
    assert find_conversation(turns, keys) == (1, 4)
    assert find_conversation(turns, keys[:3]) == (2, 2)
    assert find_conversation(turns, keys[:1]) is None
    assert find_conversation(turns, conversation_keys(b"other tools", [b"a", b"b", b"c"])) is None
    assert conversation_keys(b"tools", [b"ab"]) != conversation_keys(b"tools", [b"a", b"b"])[1:]
