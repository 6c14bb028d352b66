"""What a bench prints: one JSON line per case for machines, and at the end a table for people."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from statistics import median
from typing import Final, TextIO

import msgspec
from rich.console import Console
from rich.table import Table

from bench.interleave import Better, Comparison

_WIDTH: Final = 150
"""A row that is broken by a wider table is still easier to read than one squeezed into 80 columns."""
_VERDICT: Final = {None: "", True: "[green]met[/]", False: "[red]MISSED[/]"}


class Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """The fields and their order are those of the JSON line; `limit` is only in those that have one."""

    bench: str
    case: str
    unit: str
    ours: float
    bare: float
    ratio: float
    """Higher is better, also where the unit is a latency."""
    goal: float | None
    """What the ratio has to reach."""
    limit: float | None = None
    """What our own figure must not fall short of, or must not exceed if a lower one is better."""


def _met(line: Line, better: Better) -> bool | None:
    """Whether everything that was asked for is reached; None if nothing was."""
    reached: list[bool] = []
    if line.goal is not None:
        reached.append(line.ratio >= line.goal)
    if line.limit is not None:
        reached.append(line.ours >= line.limit if better == "higher" else line.ours <= line.limit)
    return all(reached) if reached else None


@dataclass(frozen=True)
class _Row:
    line: Line
    spread: tuple[float, float]
    asked: str
    met: bool | None
    note: str


class Report:
    """Prints each line as soon as it is known, so that a run that is cut short has said what it found."""

    def __init__(
        self, bench: str, *, quiet: bool = False, out: TextIO | None = None, err: TextIO | None = None
    ) -> None:
        self._bench = bench
        self._out = out or sys.stdout
        self._console = Console(file=err or sys.stderr, quiet=quiet, highlight=False)
        self._console.width = max(self._console.width, _WIDTH)
        self._rows: list[_Row] = []

    def add(
        self,
        case: str,
        unit: str,
        found: Comparison,
        *,
        goal: float | None = None,
        limit: float | None = None,
        note: str = "",
    ) -> Line:
        line = Line(
            bench=self._bench,
            case=case,
            unit=unit,
            ours=_figures(median(found.ours)),
            bare=_figures(median(found.bare)),
            ratio=round(found.ratio, 3),
            goal=goal,
            limit=limit,
        )
        self._rows.append(_Row(line, found.spread, _asked(line, found.better), _met(line, found.better), note))
        print(msgspec.json.encode(line).decode(), file=self._out, flush=True)
        return line

    def progress(self, doing: str) -> None:
        self._console.print(f"[dim]{doing}[/]")

    def table(self) -> None:
        table = Table(title=f"bench {self._bench}", title_justify="left")
        for heading in ("case", "unit", "ours", "bare", "ratio", "middle half", "goal", "", "note"):
            table.add_column(heading, justify="right" if heading in ("ours", "bare", "ratio", "goal") else "left")
        for row in self._rows:
            line, (low, high) = row.line, row.spread
            table.add_row(
                line.case,
                line.unit,
                _shown(line.ours),
                _shown(line.bare),
                f"{line.ratio:.2f}",
                f"{low:.2f} … {high:.2f}",
                row.asked,
                _VERDICT[row.met],
                row.note,
            )
        self._console.print(table)
        missed = [row.line.case for row in self._rows if row.met is False]
        self._console.print(f"[red]goals missed: {', '.join(missed)}[/]" if missed else "all goals met")


def _asked(line: Line, better: Better) -> str:
    goal = [] if line.goal is None else [f"≥ {line.goal:g}"]
    limit = [] if line.limit is None else [f"{'≥' if better == 'higher' else '≤'} {line.limit:,g} {line.unit}"]
    return ", ".join(goal + limit)


def _figures(value: float) -> float:
    """Four significant figures: more would pretend to a precision that a benchmark does not have."""
    return float(f"{value:.4g}")


def _shown(value: float) -> str:
    return f"{value:g}" if value < 100 else f"{value:,.0f}"
