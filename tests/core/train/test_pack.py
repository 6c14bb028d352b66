"""Rows hold every datum once, no more than fits, the same number on each rank; outputs come back in order."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.base.errors import Code, StrataError
from strata.train.core.commands import Segment
from strata.train.core.pack import Packed, pack, redistribute, unpack

CONTEXT = 500
items = st.lists(st.lists(st.integers(1, CONTEXT), min_size=1, max_size=12), min_size=1, max_size=6)
ranks = st.integers(1, 5)
capacities = st.integers(1, 2 * CONTEXT)


def packed(lengths: list[list[int]], count: int, capacity: int) -> Packed:
    return pack(lengths, ranks=count, max_tokens_per_row=capacity, max_context=CONTEXT)


def weights(lengths: list[list[int]], made: Packed) -> list[list[int]]:
    return [[sum(lengths[segment.item][segment.datum] for segment in row) for row in rank] for rank in made.rows]


@given(items, ranks, capacities)
def test_every_datum_is_in_one_row_and_every_rank_has_as_many_rows(
    lengths: list[list[int]], count: int, capacity: int
) -> None:
    made = packed(lengths, count, capacity)
    placed = [segment for rank in made.rows for row in rank for segment in row]
    wanted = [Segment(item, datum) for item, each in enumerate(lengths) for datum in range(len(each))]
    assert sorted(placed, key=lambda each: (each.item, each.datum)) == wanted
    assert len({len(rank) for rank in made.rows}) == 1
    assert len(made.rows) == count


@given(items, ranks, capacities)
def test_no_row_is_longer_than_allowed_unless_one_datum_is(lengths: list[list[int]], count: int, capacity: int) -> None:
    made = packed(lengths, count, capacity)
    for rank, of_rank in zip(made.rows, weights(lengths, made), strict=True):
        assert all(weight <= capacity or len(row) == 1 for row, weight in zip(rank, of_rank, strict=True))


@given(items, ranks, st.integers(1, 4))
def test_one_document_per_row_is_one_even_of_a_group(lengths: list[list[int]], count: int, group: int) -> None:
    made = pack(
        lengths,
        ranks=count,
        max_tokens_per_row=2 * CONTEXT,
        max_context=CONTEXT,
        group_sizes=[group] * len(lengths),
        one_document_per_row=True,
    )
    assert max(len(row) for rank in made.rows for row in rank) == 1
    assert sum(len(row) for rank in made.rows for row in rank) == sum(map(len, lengths))
    assert len({len(rank) for rank in made.rows}) == 1


@given(items, ranks, capacities)
def test_there_are_not_half_again_as_many_rows_as_the_best_packing_has(
    lengths: list[list[int]], count: int, capacity: int
) -> None:
    made = packed(lengths, count, capacity)
    least = math.ceil(sum(min(length, capacity) for each in lengths for length in each) / capacity)
    rounds = len(made.rows[0])
    # Best-fit decreasing is within 11/9 of the best plus one; the best is at least `least`, and here at most twice it.
    assert (rounds - 1) * count < 11 / 9 * 2 * least + 1


@given(items, ranks, capacities)
def test_efficiency_is_the_part_of_the_time_in_which_ranks_do_not_wait(
    lengths: list[list[int]], count: int, capacity: int
) -> None:
    made = packed(lengths, count, capacity)
    of_ranks = weights(lengths, made)
    time = sum(max(row) for row in zip(*of_ranks, strict=True))
    assert made.efficiency == pytest.approx(sum(map(sum, lengths)) / (time * count))
    assert 0 < made.efficiency <= 1


@given(items, ranks, capacities)
def test_outputs_come_back_in_the_order_of_the_datums_asked_for(
    lengths: list[list[int]], count: int, capacity: int
) -> None:
    made = packed(lengths, count, capacity)
    outputs = [[[(segment.item, segment.datum) for segment in row] for row in rank] for rank in made.rows]
    wanted = [[(item, datum) for datum in range(len(each))] for item, each in enumerate(lengths)]
    assert unpack(made.rows, outputs) == wanted


@given(items, ranks, ranks, capacities)
def test_rows_spread_over_another_number_of_ranks_are_the_same_rows(
    lengths: list[list[int]], before: int, after: int, capacity: int
) -> None:
    made = packed(lengths, before, capacity)
    again = redistribute(made.rows, lengths, after)
    assert len(again) == after
    assert len({len(rank) for rank in again}) == 1
    rows = sorted(tuple((s.item, s.datum) for s in row) for rank in made.rows for row in rank if row)
    assert sorted(tuple((s.item, s.datum) for s in row) for rank in again for row in rank if row) == rows


def test_a_small_batch_is_spread_over_all_ranks_instead_of_filling_one_row() -> None:
    made = packed([[10, 10, 10, 10]], 2, 400)
    assert weights([[10, 10, 10, 10]], made) == [[20], [20]]
    assert made.efficiency == 1.0


@pytest.mark.parametrize(
    ("lengths", "words"),
    [([CONTEXT + 1], "501 tokens"), ([3, 0], "datum 1 has no tokens"), ([], "empty")],
)
def test_what_no_rank_could_take_is_refused_with_the_datum_named(lengths: list[int], words: str) -> None:
    with pytest.raises(StrataError, match=words) as refused:
        packed([lengths], 1, 100)
    assert refused.value.code is Code.INVALID


@given(st.lists(st.integers(1, CONTEXT), min_size=1, max_size=8), st.integers(1, 4), ranks, capacities)
def test_a_group_stays_in_one_row_if_a_row_holds_it(groups: list[int], size: int, count: int, capacity: int) -> None:
    lengths = [[length for length in groups for _ in range(size)]]
    made = pack(lengths, ranks=count, max_tokens_per_row=capacity, max_context=CONTEXT, group_sizes=[size])
    assert sum(len(row) for rank in made.rows for row in rank) == len(lengths[0])
    for group, length in enumerate(groups):
        own = {
            (number, place)
            for number, rank in enumerate(made.rows)
            for place, row in enumerate(rank)
            if any(segment.datum // size == group for segment in row)
        }
        assert len(own) == 1 or length * size > capacity
    assert all(weight <= capacity for rank in weights(lengths, made) for weight in rank if weight > max(groups))
