"""A plot is as wide as it may be, and its dots are where the values are."""

from __future__ import annotations

import pytest

from strata.cli.plot import plot_lines


def dots(lines: list[str]) -> set[tuple[int, int]]:
    """Column and row of every dot, read back from the characters; row 0 is the highest."""
    bits = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
    found = set()
    for number, line in enumerate(lines[:-1]):
        for column, char in enumerate(line.partition("┤")[2]):
            for row in range(4):
                for side in range(2):
                    if ord(char) >= 0x2800 and (ord(char) - 0x2800) & bits[row][side]:
                        found.add((column * 2 + side, number * 4 + row))
    return found


@pytest.mark.parametrize("width", [20, 80, 300])
def test_a_plot_fits_the_width(width: int) -> None:
    lines = plot_lines(range(1000), [value % 37 for value in range(1000)], width)
    assert max(map(len, lines)) == width
    assert len(lines) == 9


def test_a_line_that_rises_goes_from_the_lower_left_to_the_upper_right() -> None:
    drawn = dots(plot_lines([0, 10], [1.0, 5.0], 31, height=4))
    right = max(column for column, _ in drawn)
    assert (0, 15) in drawn
    assert (right, 0) in drawn
    assert {column for column, _ in drawn} == set(range(right + 1)), "no holes"
    assert all(abs(row - (15 - column * 15 / right)) <= 1 for column, row in drawn)


def test_the_scale_and_the_axis_name_their_ends() -> None:
    lines = plot_lines([100, 2500], [0.25, 0.75], 40)
    assert lines[0].startswith("0.75 ┤")
    assert lines[-2].startswith("0.25 ┤")
    assert lines[-1].split() == ["100", "2,500"]


def test_plots_with_the_same_bounds_can_be_compared() -> None:
    drawn = dots(plot_lines([0, 1], [1.0, 1.0], 30, height=4, bounds=(0.0, 2.0)))
    assert {row for _, row in drawn} == {7}


@pytest.mark.parametrize(
    ("values", "first"), [([], "no values"), ([float("nan")], "no values"), ([3.0], "3 ┤"), ([2.0, 2.0], "2 ┤")]
)
def test_few_or_equal_values_are_no_error(values: list[float], first: str) -> None:
    assert plot_lines(range(len(values)), values, 40)[0].startswith(first)
