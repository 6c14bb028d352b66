"""Prints rows as a table, as data for programs (JSON, JSON lines) or as names alone; declares columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple

from strata.cli.layout import ScreenColumn, Table, print_table
from strata.cli.output import Format, print_data, printable, write
from strata.cli.states import state_cell


class Column(NamedTuple):
    key: str
    wide: bool = False
    """Shown by `-o wide` only."""
    number: bool = False
    cut: int | None = None
    """The number of characters to which `-o table` may shorten cells on a terminal that is too narrow."""
    identifies: bool = False
    """What `-o name` prints; if no column does, it is the first one."""


class Rows:
    """Prints rows as they come (`jsonl`, `name`), or all at the end (`table`, `wide`, `json`) without an error."""

    def __init__(self, output: Format, columns: Sequence[Column]) -> None:
        self._output = output
        self._columns = [column for column in columns if output is not Format.TABLE or not column.wide]
        self._name = next((column.key for column in columns if column.identifies), columns[0].key)
        self._kept: list[Mapping[str, Any]] = []

    def __enter__(self) -> Rows:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            return
        match self._output:
            case Format.JSON:
                print_data(self._kept, self._output)
            case Format.TABLE | Format.WIDE:
                _print_table(self._columns, self._kept, cut=self._output is Format.TABLE)
            case Format.JSONL | Format.NAME:
                pass

    def add(self, row: Mapping[str, Any]) -> None:
        match self._output:
            case Format.JSONL:
                print_data(row, self._output)
            case Format.NAME:
                write(_cell(row.get(self._name)))
            case _:
                self._kept.append(row)


def _print_table(columns: Sequence[Column], rows: Sequence[Mapping[str, Any]], *, cut: bool) -> None:
    titles = tuple(
        ScreenColumn(column.key.upper(), number=column.number, cuts=cut and column.cut is not None, least=column.cut)
        for column in columns
    )
    cells = [[state_cell(column.key, _cell(row.get(column.key))) for column in columns] for row in rows]
    print_table(Table(titles, cells))


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, str):
        return printable(value).replace("\n", "\\n").replace("\t", "\\t")
    import json

    return json.dumps(value)
