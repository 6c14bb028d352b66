"""What the bench of packing counts, and the lengths it draws."""

from __future__ import annotations

import random
from statistics import fmean

import pytest

from bench.train.packing import LONGEST, lengths, spent
from strata.train.core.commands import Row, Segment


def rows(*of_ranks: tuple[tuple[int, ...], ...]) -> list[list[Row]]:
    return [[tuple(Segment(0, datum) for datum in row) for row in of_rank] for of_rank in of_ranks]


def test_rows_side_by_side_take_as_long_as_the_longest_of_them() -> None:
    assert spent(rows(((0,),), ((1,),)), [10, 4]) == 20
    assert spent(rows(((0,), (2, 3)), ((1,), ())), [10, 4, 3, 2]) == 20 + 10


def test_rows_that_come_out_even_take_as_many_slots_as_there_are_tokens() -> None:
    assert spent(rows(((0,),), ((1, 2),)), [10, 6, 4]) == 20


@pytest.mark.parametrize("lost_or_doubled", [((0,),), ((0, 1, 1),)])
def test_a_packing_that_loses_or_doubles_a_datum_is_no_result(lost_or_doubled: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(AssertionError):
        spent(rows(lost_or_doubled), [10, 4])


def test_lengths_are_distributed_as_published() -> None:
    drawn = lengths(random.Random(1), 50_000)
    assert min(drawn) >= 1
    assert max(drawn) == LONGEST
    assert fmean(drawn) == pytest.approx(255.8, rel=0.01)
    assert drawn.count(LONGEST) / len(drawn) == pytest.approx(0.234, abs=0.01)


def test_the_same_seed_draws_the_same_lengths() -> None:
    assert lengths(random.Random(0), 100) == lengths(random.Random(0), 100)
