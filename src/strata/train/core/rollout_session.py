"""Turns of a rollout session as values: which turn a prompt continues, and branches with their tokens.

A turn is one sampled reply. It has its own tokens alone: those of the turns before it are found by its parent, so a
prompt is never stored twice, and what is trained later are the tokens that were sampled.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal

import msgspec

from strata.base.digest import sha256_hex

PromptMode = Literal["tokens", "template"]
TurnOrigin = Literal["start", "continued", "messages_changed", "not_appended", "tokens_changed"]
"""Why a turn has the parent that it has, or none."""
TOKEN_BYTES: Final = 4


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    parent: int | None
    """The number of the turn whose tokens come before these."""
    origin: TurnOrigin
    added: bytes
    """The tokens of the prompt after those of the parent, int32, little-endian; all of the prompt without one."""
    sampled: bytes
    """int32, little-endian."""
    logprobs: bytes
    """float32: of the distribution that the tokens were drawn from."""
    conversation: bytes
    """The key of the messages with this reply; empty if there were none."""
    reply: str
    """The id of the reply that the client saw."""
    choice: int
    model: str
    version: str
    """The weights; empty for the base."""
    sampler_id: str
    created_s: float
    finish_reason: str
    temperature: float


class Branch(msgspec.Struct, frozen=True, kw_only=True):
    """A path from a start to a turn that no other continues. Numbers are for each of its tokens."""

    turns: Sequence[int]
    tokens: bytes
    """int32, little-endian."""
    is_sampled: bytes
    """A byte for each token: 1 if it was sampled here, and in no branch before this one."""
    logprobs: bytes
    """float32; 0 where `is_sampled` is."""


def conversation_keys(before: bytes, messages: Iterable[bytes]) -> Sequence[bytes]:
    """The key of the conversation after each message, from the key before the first."""
    keys = []
    for message in messages:
        before = bytes.fromhex(sha256_hex(before + message))
        keys.append(before)
    return keys


def find_conversation(turns: Sequence[Turn], keys: Sequence[bytes]) -> tuple[int, int] | None:
    """The turn whose conversation is the longest beginning, and how many messages that has. Of equal ones the last."""
    known = {turn.conversation: number for number, turn in enumerate(turns) if turn.conversation}
    for length in range(len(keys), 0, -1):
        number = known.get(keys[length - 1])
        if number is not None:
            return number, length
    return None


def find_prefix(turns: Sequence[Turn], prompt: bytes) -> tuple[int, int] | None:
    """The turn with the longest tokens that the prompt begins with, and their length in bytes."""
    ends: dict[int, int] = {}
    longest: tuple[int, int] | None = None
    for number, turn in enumerate(turns):
        start = 0 if turn.parent is None else ends.get(turn.parent)
        own = turn.added + turn.sampled
        if start is None or not prompt.startswith(own, start):
            continue
        end = ends[number] = start + len(own)
        if end < len(prompt) and (longest is None or end >= longest[1]):
            longest = number, end
    return longest


def path_to(turns: Sequence[Turn], number: int) -> Sequence[int]:
    """The turns from the start to this one."""
    path = [number]
    while (parent := turns[path[-1]].parent) is not None:
        path.append(parent)
    return path[::-1]


def tokens_to(turns: Sequence[Turn], number: int) -> bytes:
    """The tokens of the prompt and the reply of a turn."""
    return b"".join(turns[each].added + turns[each].sampled for each in path_to(turns, number))


def branch_ends(turns: Sequence[Turn]) -> Sequence[int]:
    """The last turns of all branches, in order."""
    continued = {turn.parent for turn in turns}
    return [number for number in range(len(turns)) if number not in continued]


def build_branch(turns: Sequence[Turn], end: int, counted: Mapping[int, int]) -> Branch:
    """`counted` has the end of the branch that each turn counts in: the first one that it is part of."""
    tokens, is_sampled, logprobs = bytearray(), bytearray(), bytearray()
    path = path_to(turns, end)
    for number in path:
        turn = turns[number]
        added, sampled = len(turn.added) // TOKEN_BYTES, len(turn.sampled) // TOKEN_BYTES
        own = counted[number] == end
        tokens += turn.added + turn.sampled
        is_sampled += bytes(added) + (b"\1" if own else b"\0") * sampled
        logprobs += bytes(len(turn.added)) + (turn.logprobs if own else bytes(len(turn.sampled)))
    return Branch(turns=path, tokens=bytes(tokens), is_sampled=bytes(is_sampled), logprobs=bytes(logprobs))


def count_turns(turns: Sequence[Turn], ends: Sequence[int]) -> Mapping[int, int]:
    """The branch, by its end, that each turn counts in."""
    counted: dict[int, int] = {}
    for end in ends:
        number: int | None = end
        while number is not None and number not in counted:
            counted[number] = end
            number = turns[number].parent
    return counted
