"""Numbers may come in any order and twice; they go on in order and once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.base.errors import Code, StrataError
from strata.train.core.sequence import SequenceCheck, SequenceWindow


@given(st.permutations(range(1, 30)))
def test_in_whatever_order_numbers_come_they_are_released_one_by_one_from_the_first(arrivals: list[int]) -> None:
    line = SequenceWindow()
    released: list[int] = []
    for count, seq in enumerate(arrivals):
        assert line.check(seq, "digest", None) is SequenceCheck.NEW
        released += line.release(seq)
        assert len(released) + len(line.held) == count + 1
    assert released == list(range(1, 30))
    assert not line.held


@given(st.sets(st.integers(1, 40)), st.integers(1, 40))
def test_nothing_beyond_the_first_gap_is_released(arrived: set[int], missing: int) -> None:
    line = SequenceWindow()
    released = [seq for each in sorted(arrived - {missing}, reverse=True) for seq in line.release(each)]
    assert all(seq < missing for seq in released)


def test_the_same_number_with_the_same_content_is_the_same_operation() -> None:
    line = SequenceWindow()
    line.release(1)
    assert line.check(1, "a", "a") is SequenceCheck.DUPLICATE


@pytest.mark.parametrize("held", [False, True])
def test_a_duplicate_with_other_content_is_refused_and_does_not_displace_the_first(held: bool) -> None:
    line = SequenceWindow()
    seq = 3 if held else 1
    line.release(seq)
    with pytest.raises(StrataError) as refused:
        line.check(seq, "b", "a")
    assert refused.value.code is Code.CONFLICT


def test_a_number_from_long_ago_is_gone_and_not_new() -> None:
    line = SequenceWindow(released=7)
    with pytest.raises(StrataError) as refused:
        line.check(7, "a", None)
    assert refused.value.code is Code.GONE


@pytest.mark.parametrize("seq", [0, -1])
def test_numbers_begin_at_one(seq: int) -> None:
    with pytest.raises(StrataError) as refused:
        SequenceWindow().check(seq, "a", None)
    assert refused.value.code is Code.INVALID
