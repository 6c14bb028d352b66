"""Draws a progress line on stderr with the remaining time, 10 times a second at most.

Nothing is printed without a terminal: logs of scripts stay free of it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Final

import click

from strata.cli.layout import bar, console_width

WIDTH: Final = 20
EVERY_S: Final = 0.1
"""The line is drawn no more often."""


class ProgressLine:
    """`with ProgressLine("uploading", format_bytes) as report: work(report)`; the line is removed at the end."""

    def __init__(self, what: str, unit: Callable[[float], str] = lambda amount: f"{amount:.0f}") -> None:
        self._what = what
        self._unit = unit
        self._shown = sys.stderr.isatty()
        self._eta = RemainingTime()
        self._drawn_at_s = 0.0

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def __call__(self, done: float, total: float, note: str = "") -> None:
        now_s = time.monotonic()
        eta_s = self._eta.estimate(done, total, now_s)
        if not self._shown or (now_s - self._drawn_at_s < EVERY_S and done < total):
            return
        self._drawn_at_s = now_s
        amounts = note or f"{self._unit(done)} of {self._unit(total)}"
        left = f"  {format_eta(eta_s)}" if eta_s is not None else ""
        # Counted in thousandths, so that a fraction of a piece moves the bar.
        self._draw(f"{self._what}  {bar(int(done * 1000), int(total * 1000), WIDTH)}  {amounts}{left}")

    def waiting(self, note: str) -> None:
        """Show that something goes on whose end is not known."""
        if self._shown:
            self._draw(f"{self._what}  {note}")

    def _draw(self, text: str) -> None:
        click.echo(f"\r\x1b[K{text[: console_width() - 1]}", err=True, nl=False)

    def clear(self) -> None:
        """Clears the bar before another line is printed."""
        if self._shown:
            click.echo("\r\x1b[K", err=True, nl=False)


class RemainingTime:
    """How long the rest will take, if it goes on as it did since the first report."""

    def __init__(self) -> None:
        self._first: tuple[float, float] | None = None

    def estimate(self, done: float, total: float, now_s: float) -> float | None:
        if self._first is None:
            self._first = (done, now_s)
        done_before, since_s = self._first
        if done <= done_before or now_s <= since_s:
            return None
        return (total - done) * (now_s - since_s) / (done - done_before)


def format_eta(seconds: float) -> str:
    """`ETA 40s`, `ETA 12m`, `ETA 3h`, `ETA 2d`."""
    from strata.cli.fleet.client import format_duration

    return f"ETA {format_duration(seconds)}"
