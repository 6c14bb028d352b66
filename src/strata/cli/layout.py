"""Lays out lines and tables for a terminal: widths, gaps, what is cut or folded first, bars."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from strata.cli.output import Format, print_data, printable, write

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

GAP: Final = 2
FOLDED: Final = 30
"""How narrow a column of sentences may become before names are cut."""
SHORTEST: Final = 14
"""How short a name may be cut."""


class Cell(NamedTuple):
    text: str
    style: str = ""


class ScreenColumn(NamedTuple):
    """A column keeps its width, unless the terminal is too narrow for all of them and it may shrink."""

    title: str
    number: bool = False
    folds: bool = False
    """May shrink: sentences continue on the next line."""
    cuts: bool = False
    """May shrink: a long name loses its middle, since names differ at the ends; a sentence loses its end."""
    least: int | None = None
    """How short a name may be cut; SHORTEST unless it says another number."""


@dataclass(frozen=True)
class Table:
    columns: tuple[ScreenColumn, ...]
    rows: list[list[Cell]]
    more: str = ""
    """What the table leaves out."""

    @property
    def height(self) -> int:
        return 1 + len(self.rows) + bool(self.more)


@dataclass(frozen=True)
class Screen:
    """Lines, then tables with an empty line before each."""

    lines: list[Cell]
    tables: list[Table]


def fitted(table: Table, width: int) -> Table:
    """The same with long names cut as far as it takes, the widest column first; sentences fold by themselves."""
    widths = [
        max([len(column.title), *(len(row[at].text) for row in table.rows)]) for at, column in enumerate(table.columns)
    ]
    over = sum(widths) + GAP * (len(widths) - 1) - width
    over -= sum(max(0, widths[at] - FOLDED) for at, column in enumerate(table.columns) if column.folds)
    limits = _cut_widths(table.columns, widths, over)
    rows = [
        [Cell(_cut(cell.text, limits[at]), cell.style) if at in limits else cell for at, cell in enumerate(row)]
        for row in table.rows
    ]
    return Table(table.columns, rows, table.more)


def _cut_widths(columns: Sequence[ScreenColumn], widths: Sequence[int], over: int) -> dict[int, int]:
    """The new widths of the columns to cut, so that the table loses `over` characters."""
    limits: dict[int, int] = {}
    for at in sorted(range(len(widths)), key=lambda at: -widths[at]):
        least = columns[at].least or SHORTEST
        if over > 0 and columns[at].cuts and widths[at] > least:
            limits[at] = max(least, widths[at] - over)
            over -= widths[at] - limits[at]
    return limits


def _cut(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    tail = 0 if " " in text else limit // 2
    return f"{text[: limit - tail - 1]}…{text[len(text) - tail :]}"


def render(shown: Screen, width: int, *, before: Sequence[Cell] = (), gap: bool = True) -> RenderableType:
    """Renders a screen for rich. Names come from other machines: what a terminal would obey is escaped, markup is not
    read."""
    from rich.console import Group
    from rich.table import Table as Grid
    from rich.text import Text

    def text(cell: Cell) -> Text:
        return Text(printable(cell.text).replace("\n", "\\n").replace("\t", "\\t"), style=cell.style)

    parts: list[RenderableType] = [text(line) for line in [*before, *shown.lines]]
    for table in (fitted(each, width) for each in shown.tables):
        grid = Grid(box=None, pad_edge=False, header_style="bold", padding=(0, GAP, 0, 0))
        for column in table.columns:
            grid.add_column(
                column.title,
                justify="right" if column.number else "left",
                no_wrap=not column.folds,
                overflow="fold" if column.folds else "ellipsis",
            )
        for row in table.rows:
            grid.add_row(*map(text, row))
        parts += [Text(""), grid] if gap else [grid]
        if table.more:
            parts.append(Text(table.more, style="dim"))
    return Group(*parts)


def bar(done: int, total: int, width: int) -> str:
    """Rounded down: what is not finished must not look so."""
    full = min(width, done * width // total) if total > 0 else 0
    percent = min(100, done * 100 // total) if total > 0 else 0
    return f"{'#' * full}{'.' * (width - full)} {percent:>3}%"


UNLIMITED: Final = 1 << 16
"""Columns when stdout is no terminal: a row is one line, for grep."""


def console_width() -> int:
    """Columns of the terminal; 80 where there is none, for what has to have some width."""
    import shutil

    return shutil.get_terminal_size().columns


def console(width: int | None = None) -> Console:
    """Makes a console with the colours and the width of the terminal; without colours and without a limit if there is
    none."""
    from rich.console import Console

    if width is None and not sys.stdout.isatty():
        width = UNLIMITED
    return Console(file=sys.stdout, highlight=False, emoji=False, width=width)


def print_once(state: object, screen: Screen, output: Format) -> None:
    """Print the state for programs, or the screen that shows the same state."""
    if output.for_programs:
        import msgspec

        print_data(msgspec.to_builtins(state), output)
        return
    # A wide row is one line, and a terminal that is too narrow folds it.
    target = console(width=UNLIMITED if output is Format.WIDE else None)
    print_lines(target, render(screen, target.width))


def print_table(table: Table) -> None:
    """Print a table as wide as the terminal where its columns can be cut so far; a cell that may not be cut never
    is."""
    width = console().width
    print_lines(console(width=UNLIMITED), render(Screen([], [fitted(table, width)]), UNLIMITED, gap=False))


def print_lines(target: Console, content: RenderableType) -> None:
    """Print without blanks at the ends of lines, and with colours only on a terminal."""
    with target.capture() as captured:
        target.print(content)
    write("\n".join(line.rstrip() for line in captured.get().splitlines()))
