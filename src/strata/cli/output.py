"""Prints rows to stdout in the requested format, and messages to stderr.

Names in a row come from other machines: control characters are escaped. Passwords in URLs are replaced.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from types import TracebackType
from typing import Any, Final, NamedTuple, TypeVar

import click

from strata.cli.exit_codes import ExitCode

_Function = TypeVar("_Function", bound=Callable[..., object])


class Format(StrEnum):
    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    JSONL = "jsonl"


class Column(NamedTuple):
    key: str
    wide: bool = False
    """Shown by `-o wide` only."""
    number: bool = False
    cut: int | None = None
    """How many characters of a long cell `-o table` shows."""


def output_option(function: _Function) -> _Function:
    """`-o`, passed to the command as `output: Format`."""
    return click.option(
        "-o",
        "--output",
        type=click.Choice([choice.value for choice in Format]),
        default=Format.TABLE.value,
        show_default=True,
        callback=lambda _ctx, _param, value: Format(value),
        help="Output format.",
    )(function)


class Rows:
    """Prints rows as they come (`jsonl`), or all at the end (`table`, `wide`, `json`) unless an error occurred."""

    def __init__(self, output: Format, columns: Sequence[Column]) -> None:
        self._output = output
        self._columns = [column for column in columns if output is not Format.TABLE or not column.wide]
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
                _print_json(self._kept, indent=2)
            case Format.TABLE | Format.WIDE:
                _print_table(self._columns, self._kept, cut=self._output is Format.TABLE)
            case Format.JSONL:
                pass

    def add(self, row: Mapping[str, Any]) -> None:
        if self._output is Format.JSONL:
            _print_json(row, indent=None)
        else:
            self._kept.append(row)


def write(text: str) -> None:
    """Print a line of data. When the reader has closed the pipe (`| head`), the command ends quietly."""
    try:
        click.echo(text)
    except BrokenPipeError as error:
        raise click.exceptions.Exit(ExitCode.BROKEN_PIPE) from error


def print_error(message: str, *, hint: str | None = None) -> None:
    """Print a message, and what to do about it, to stderr."""
    click.echo(printable(redact(message)), err=True)
    if hint:
        click.echo(f"hint: {printable(redact(hint))}", err=True)


_URL_PASSWORD: Final = re.compile(r"(?P<before>\b[a-z][a-z0-9+.-]*://[^\s:/@]*:)\S*(?=@)", re.IGNORECASE)
_NAMED_PASSWORD: Final = re.compile(r"(?P<before>\b(?:ssl)?password\s*=\s*)(?:'[^']*'|[^\s&'\"]+)", re.IGNORECASE)


def redact(text: str) -> str:
    """Replace the passwords in database URLs."""
    return _NAMED_PASSWORD.sub(r"\g<before>***", _URL_PASSWORD.sub(r"\g<before>***", text))


def printable(text: str) -> str:
    """Escape control characters, except line ends and tabs."""
    return "".join(char if char.isprintable() or char in "\n\t" else repr(char)[1:-1] for char in text)


def _print_json(value: object, *, indent: int | None) -> None:
    import json

    write(json.dumps(value, indent=indent))


def _print_table(columns: Sequence[Column], rows: Sequence[Mapping[str, Any]], *, cut: bool) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        # A cell is never folded: it is copied into the next command.
        table.add_column(
            column.key.upper(), justify="right" if column.number else "left", no_wrap=True, overflow="crop"
        )
    for row in rows:
        cells = ((column, _cell(row.get(column.key))) for column in columns)
        table.add_row(*(Text(_truncate(cell, column.cut if cut else None)) for column, cell in cells))
    console = Console(file=sys.stdout, highlight=False, width=_UNLIMITED)
    with console.capture() as captured:
        console.print(table)
    write("\n".join(line.rstrip() for line in captured.get().splitlines()))


_UNLIMITED: Final = 1 << 22
"""Wider than any row: a row is one line, and the terminal folds it."""


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, str):
        return printable(value).replace("\n", "\\n").replace("\t", "\\t")
    import json

    return json.dumps(value)


def _truncate(cell: str, limit: int | None) -> str:
    return cell if limit is None or len(cell) <= limit else cell[: limit - 1] + "…"
