"""Tokens of samples that run: what a client that has some of them gets."""

from __future__ import annotations

import array

from hypothesis import given
from hypothesis import strategies as st

from strata.train.core.sampling import SampledPart, TopLogprobs
from strata.train.status.token_streams import MAX_TOKENS, TokenStreams


def part(start: int, *tokens: int, index: int = 0, k: int = 0) -> SampledPart:
    top = None
    if k:
        numbers = [token * 10 + place for token in tokens for place in range(k)]
        top = TopLogprobs(array.array("i", numbers).tobytes(), array.array("f", numbers).tobytes(), k, len(tokens))
    packed, logprobs = array.array("i", tokens).tobytes(), array.array("f", map(float, tokens)).tobytes()
    return SampledPart(index, start, packed, logprobs, top)


def tokens_of(parts: list[SampledPart]) -> list[int]:
    return [token for each in parts for token in array.array("i", each.tokens)]


def test_a_client_gets_what_it_does_not_have_of_each_sample() -> None:
    streams = TokenStreams()
    for each in (part(0, 5, 6), part(2, 7), part(0, 8, index=1), part(3, 9)):
        streams.record("f", each)
    assert tokens_of(streams.after("f", [0, 0])) == [5, 6, 7, 9, 8]
    assert tokens_of(streams.after("f", [1, 1])) == [6, 7, 9]
    assert streams.after("f", [4, 1]) == []
    assert streams.after("another", [0]) == []
    streams.drop("f")
    assert streams.after("f", [0, 0]) == []


def test_a_client_that_lacks_many_tokens_gets_them_in_several_replies() -> None:
    streams, length = TokenStreams(), MAX_TOKENS // 2 + 100
    for index in range(3):
        for place in range(length):
            streams.record("f", part(place, place, index=index))
    counts, replies = [0, 0, 0], 0
    while parts := streams.after("f", counts):
        assert len(parts) <= MAX_TOKENS
        for each in parts:
            assert each.start == counts[each.index]
            counts[each.index] = each.end
        replies += 1
    assert (counts, replies) == ([length] * 3, 2)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=8), st.integers(0, 40), st.integers(0, 3))
def test_parts_are_cut_at_any_token_with_their_numbers(sizes: list[int], count: int, k: int) -> None:
    streams, numbers = TokenStreams(), list(range(sum(sizes)))
    start = 0
    for size in sizes:
        streams.record("f", part(start, *numbers[start : start + size], k=k))
        start += size
    parts = streams.after("f", [count])
    assert tokens_of(parts) == numbers[count:]
    for each in parts:
        expected = part(each.start, *numbers[each.start : each.end], k=k)
        assert each == expected


def test_a_sample_that_is_drawn_again_replaces_its_parts() -> None:
    streams = TokenStreams()
    for each in (part(0, 1), part(1, 2), part(2, 3), part(0, 1), part(1, 4)):
        streams.record("f", each)
    assert tokens_of(streams.after("f", [0])) == [1, 4]
    assert streams.after("f", [2]) == [], "it has been drawn further before"


def test_a_client_that_lacks_tokens_before_a_gap_gets_none_and_another_goes_on() -> None:
    streams = TokenStreams()
    streams.record("f", part(0, 1))
    streams.record("f", part(5, 6))
    streams.record("f", part(6, 7))
    assert streams.after("f", [1]) == []
    assert tokens_of(streams.after("f", [5])) == [6, 7]
