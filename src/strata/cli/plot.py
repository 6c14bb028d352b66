"""Draws a series as braille lines on a terminal, 8 lines high, and formats its numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

HEIGHT: Final = 8
"""Lines of a plot, of four dots each."""
_BRAILLE: Final = 0x2800
_DOTS: Final = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""The bit of each dot of a character: four rows, two columns."""


def plot_lines(
    xs: Sequence[float],
    ys: Sequence[float],
    width: int,
    *,
    height: int = HEIGHT,
    bounds: tuple[float, float] | None = None,
) -> list[str]:
    """The values over `xs`, with the scale at the left and the first and the last x below.

    `bounds` are the lowest and the highest value of the scale, for plots that are to be compared.
    """
    points = [(x, y) for x, y in zip(xs, ys, strict=True) if math.isfinite(x) and math.isfinite(y)]
    if not points:
        return ["no values"]
    low, high = bounds or (min(y for _, y in points), max(y for _, y in points))
    labels = [format_number(high), format_number(low)]
    margin = max(map(len, labels))
    columns = max(8, width - margin - 2)
    rows = _draw(points, columns, height, low, high)
    head = [labels[0], *[""] * (height - 2), labels[1]]
    lines = [f"{label:>{margin}} ┤{row}".rstrip() for label, row in zip(head, rows, strict=True)]
    first, last = format_number(points[0][0]), format_number(points[-1][0])
    axis = first if len(points) == 1 else f"{first}{last:>{columns - len(first)}}"
    return [*lines, f"{'':{margin}}  {axis}"]


def _draw(points: Sequence[tuple[float, float]], columns: int, height: int, low: float, high: float) -> list[str]:
    """Neighbours are connected, so that a steep curve has no holes."""
    across, up = columns * 2 - 1, height * 4 - 1
    x_low, x_high = points[0][0], max(x for x, _ in points)
    cells = [[0] * columns for _ in range(height)]

    def place(x: float, y: float) -> tuple[int, int]:
        right = round((x - x_low) / (x_high - x_low) * across) if x_high > x_low else 0
        # A series that never changes lies in the middle.
        above = round((y - low) / (high - low) * up) if high > low else up // 2
        return min(max(right, 0), across), min(max(above, 0), up)

    before: tuple[int, int] | None = None
    for x, y in points:
        at = place(x, y)
        for right, above in _between(before or at, at):
            row, column = (up - above) // 4, right // 2
            cells[row][column] |= _DOTS[(up - above) % 4][right % 2]
        before = at
    return ["".join(chr(_BRAILLE + cell) if cell else " " for cell in row) for row in cells]


def _between(start: tuple[int, int], end: tuple[int, int]) -> list[tuple[int, int]]:
    """The dots of a straight line, both ends among them."""
    steps = max(abs(end[0] - start[0]), abs(end[1] - start[1]), 1)
    return [
        (round(start[0] + (end[0] - start[0]) * step / steps), round(start[1] + (end[1] - start[1]) * step / steps))
        for step in range(steps + 1)
    ]


def format_number(value: float) -> str:
    return f"{value:.4g}" if value != int(value) or abs(value) >= 1e15 else f"{int(value):,}"
