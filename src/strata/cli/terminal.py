"""A state on stdout: a screen as wide as the terminal, or JSON."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

from strata.cli.layout import Screen, render
from strata.cli.output import Format, write

if TYPE_CHECKING:
    from rich.console import Console

UNLIMITED: Final = 1 << 16
"""Columns where nobody looks at a terminal: a row is one line, for grep."""


def console(width: int | None = None) -> Console:
    """Colours and width of the terminal; none, and no limit, if there is none."""
    from rich.console import Console

    if width is None and not sys.stdout.isatty():
        width = UNLIMITED
    return Console(file=sys.stdout, highlight=False, emoji=False, width=width)


def print_once(state: object, shown: Screen, output: Format) -> None:
    """`shown` is the same state for people."""
    if output in (Format.JSON, Format.JSONL):
        write(as_json(state, indent=output is Format.JSON))
        return
    # A wide row is one line, and a terminal that is too narrow folds it.
    found = console(width=UNLIMITED if output is Format.WIDE else None)
    with found.capture() as captured:
        found.print(render(shown, found.width))
    write("\n".join(line.rstrip() for line in captured.get().splitlines()))


def as_json(state: object, *, indent: bool) -> str:
    import msgspec

    encoded = msgspec.json.encode(state)
    return (msgspec.json.format(encoded, indent=2) if indent else encoded).decode()
