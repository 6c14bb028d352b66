"""Percentiles by nearest rank."""

from __future__ import annotations

import pytest

from bench.percentiles import percentile


@pytest.mark.parametrize(("percent", "found"), [(0, 1.0), (1, 1.0), (50, 50.0), (99, 99.0), (99.5, 100.0)])
def test_a_percentile_is_the_smallest_value_that_so_many_do_not_exceed(percent: float, found: float) -> None:
    assert percentile([float(value) for value in range(100, 0, -1)], percent) == found


def test_of_few_values_the_tail_is_the_largest_one() -> None:
    assert percentile([3.0, 1.0, 2.0], 99) == 3.0
    assert percentile([7.0], 1) == 7.0


def test_there_is_no_percentile_of_nothing() -> None:
    with pytest.raises(ValueError, match="nothing"):
        percentile([], 50)
