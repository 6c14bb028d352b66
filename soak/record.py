"""The record of campaigns: a table in docs/proof.md that is read to know where to go on, and grows row by row.

A row is one run. Its seeds follow those of all rows before it, so running a campaign again adds to it, on any machine
that has the committed file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

_BEGIN: Final = "<!-- runs: written by python -m soak -->"
_END: Final = "<!-- end of runs -->"
_HEAD: Final = (
    "| campaign | date | command | first seed | seeds | violations | seeds/s |\n|---|---|---|---:|---:|---:|---:|\n"
)


class Run(msgspec.Struct, frozen=True):
    campaign: str
    date: str
    command: str
    first_seed: int
    seeds: int
    violations: int
    seeds_per_s: float

    def row(self) -> str:
        cells = [self.campaign, self.date, f"`{self.command}`", self.first_seed, self.seeds, self.violations]
        return "| " + " | ".join(map(str, cells)) + f" | {self.seeds_per_s:.1f} |\n"


def read(path: Path) -> list[Run]:
    return [_run(line) for line in _table(path.read_text(encoding="utf-8")).splitlines()[2:]]


def next_seed(runs: list[Run], campaign: str) -> int:
    return max((run.first_seed + run.seeds for run in runs if run.campaign == campaign), default=0)


def write(path: Path, runs: list[Run]) -> None:
    """Replace the table and nothing else, atomically: a run that is cut off leaves the last whole record."""
    text = path.read_text(encoding="utf-8")
    table = _table(text)
    after = text.replace(f"{_BEGIN}\n\n{table}", f"{_BEGIN}\n\n{_HEAD}{''.join(run.row() for run in runs)}")
    beside = path.with_suffix(".new")
    beside.write_text(after, encoding="utf-8")
    beside.replace(path)


def _table(text: str) -> str:
    _, begun, rest = text.partition(f"{_BEGIN}\n\n")
    table, ended, _ = rest.partition(f"\n{_END}")
    if not begun or not ended or not table.startswith(_HEAD):
        raise ValueError(f"no table of runs between {_BEGIN!r} and {_END!r}")
    return table


def _run(line: str) -> Run:
    campaign, date, command, first_seed, seeds, violations, rate = (
        cell.strip().strip("`") for cell in line.strip().strip("|").split("|")
    )
    return Run(campaign, date, command, int(first_seed), int(seeds), int(violations), float(rate))
