"""The record of campaigns: tables in docs/campaign-record.md that are read to know where to go on, and grow row by row.

A row is one run. Its seeds or trials follow those of all rows before it, so running a campaign again adds to it, on any
machine that has the committed file.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Generic, TypeVar

import msgspec


class Run(msgspec.Struct, frozen=True):
    """Seeds of a simulation."""

    campaign: str
    date: str
    command: str
    first: int
    seeds: int
    violations: int
    seeds_per_s: float

    @property
    def count(self) -> int:
        return self.seeds

    def cells(self) -> list[str]:
        counts = map(str, (self.first, self.seeds, self.violations))
        return [self.campaign, self.date, f"`{self.command}`", *counts, rate(self.seeds_per_s)]


def rate(per_s: float) -> str:
    """A history may take milliseconds or a minute."""
    return f"{per_s:.1f}" if per_s >= 1 else f"{per_s:.3f}"


class Trials(msgspec.Struct, frozen=True):
    """Number of faults that were injected into real processes."""

    campaign: str
    date: str
    command: str
    first: int
    times: int
    violations: int
    figures: str
    """What was measured, for people."""

    @property
    def count(self) -> int:
        return self.times

    def cells(self) -> list[str]:
        counts = map(str, (self.first, self.times, self.violations))
        return [self.campaign, self.date, f"`{self.command}`", *counts, self.figures.replace("|", "/")]


Row = TypeVar("Row", bound=Run | Trials)


class Table(Generic[Row]):
    """One table between two comments, with nothing else between them."""

    def __init__(self, kind: type[Row], name: str, titles: tuple[str, ...]) -> None:
        self._kind = kind
        self.begin = f"<!-- {name}: written by python -m soak -->"
        self.end = f"<!-- end of {name} -->"
        lines = ["---:" if title in _NUMBERS else "---" for title in titles]
        self.head = f"| {' | '.join(titles)} |\n|{'|'.join(lines)}|\n"

    def read(self, path: Path) -> list[Row]:
        return [self._row(line) for line in self._body(path.read_text(encoding="utf-8")).splitlines()[2:]]

    def write(self, path: Path, rows: list[Row]) -> None:
        """Replace the table and nothing else, atomically: a run that is cut off leaves the last whole record."""
        text = path.read_text(encoding="utf-8")
        body = "".join(f"| {' | '.join(row.cells())} |\n" for row in rows)
        after = text.replace(f"{self.begin}\n\n{self._body(text)}", f"{self.begin}\n\n{self.head}{body}")
        beside = path.with_suffix(".new")
        beside.write_text(after, encoding="utf-8")
        beside.replace(path)

    def put(self, path: Path, row: Row) -> None:
        """Add a row, or replace the one of the same run. Other campaigns may be writing theirs at the same time."""
        with _only_writer(path):
            rows = self.read(path)
            places = [at for at, each in enumerate(rows) if (each.campaign, each.first) == (row.campaign, row.first)]
            for at in places or [len(rows)]:
                rows[at : at + 1] = [row]
            self.write(path, rows)

    def _body(self, text: str) -> str:
        _, begun, rest = text.partition(f"{self.begin}\n\n")
        body, ended, _ = rest.partition(f"\n{self.end}")
        if not begun or not ended or not body.startswith(self.head):
            raise ValueError(f"no table between {self.begin!r} and {self.end!r}")
        return body

    def _row(self, line: str) -> Row:
        cells = [cell.strip().strip("`") for cell in line.strip().strip("|").split("|")]
        return msgspec.convert(dict(zip(self._kind.__struct_fields__, cells, strict=True)), self._kind, strict=False)


@contextmanager
def _only_writer(path: Path) -> Iterator[None]:
    """The folder is locked and not the file, which is replaced."""
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


_NUMBERS: Final = {"first seed", "seeds", "violations", "seeds/s", "first", "times"}
_COMMON: Final = ("campaign", "date", "command")

RUNS: Final = Table(Run, "runs", (*_COMMON, "first seed", "seeds", "violations", "seeds/s"))
TRIALS: Final = Table(Trials, "trials", (*_COMMON, "first", "times", "violations", "figures"))


def next_number(rows: list[Row], campaign: str) -> int:
    """Where a campaign goes on."""
    return max((row.first + row.count for row in rows if row.campaign == campaign), default=0)
