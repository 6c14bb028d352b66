"""Following a job: a screen that stays up to date on a terminal; elsewhere a line for each change, or JSON."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Final

from strata.cli.gang_layout import Cell, Screen, render
from strata.cli.gang_screen import screen
from strata.cli.gang_words import attention, changes, clock, summary
from strata.cli.output import Format, complain, printable, write

if TYPE_CHECKING:
    from rich.console import Console

    from strata.coord.rpc.operator import Broken
    from strata.coord.view import JobView

UNLIMITED: Final = 1 << 16
"""Columns where nobody looks at a terminal: a row is one line, for grep."""


def console(width: int | None = None) -> Console:
    """Colours and width of the terminal; none, and no limit, if there is none."""
    from rich.console import Console

    if width is None and not sys.stdout.isatty():
        width = UNLIMITED
    return Console(file=sys.stdout, highlight=False, emoji=False, width=width)


def print_once(job: JobView, output: Format) -> None:
    if output in (Format.JSON, Format.JSONL):
        write(as_json(job, indent=output is Format.JSON))
        return
    wide = output is Format.WIDE
    # A wide row is one line, and a terminal that is too narrow folds it.
    found = console(width=UNLIMITED if wide else None)
    with found.capture() as captured:
        found.print(render(screen(job, wide=wide), found.width))
    write("\n".join(line.rstrip() for line in captured.get().splitlines()))


def as_json(found: object, *, indent: bool) -> str:
    import msgspec

    encoded = msgspec.json.encode(found)
    return (msgspec.json.format(encoded, indent=2) if indent else encoded).decode()


async def follow(states: AsyncIterator[JobView | Broken], output: Format) -> None:
    """Until interrupted, or until the watch fails for good."""
    if output is Format.JSONL:
        await _each(states, lambda job: write(as_json(job, indent=False)))
        return
    found = console()
    if found.is_terminal and not found.is_dumb_terminal:
        await _live(states, found, wide=output is Format.WIDE)
    else:
        await _each(states, Lines().print)


async def _each(states: AsyncIterator[JobView | Broken], show: Callable[[JobView], None]) -> None:
    """States go to stdout. That the connection broke and came back is no state of the job: stderr."""
    from strata.coord.view import JobView

    broken = False
    async for each in states:
        if isinstance(each, JobView):
            if broken:
                complain("strata gang: connected again")
            broken = False
            show(each)
        elif not broken:
            complain(f"strata gang: lost the coordinator: {each.reason}; trying again")
            broken = True


class Lines:
    """A line for each change, with its time; at first how the job stands."""

    def __init__(self) -> None:
        self._before: JobView | None = None

    def print(self, job: JobView) -> None:
        before, self._before = self._before, job
        now_ms = job.observed_at_unix_ms
        for each in [summary(job), *attention(job)] if before is None else changes(before, job):
            write(f"{clock(now_ms, now_ms)} {printable(each)}")


async def _live(states: AsyncIterator[JobView | Broken], found: Console, *, wide: bool) -> None:
    from rich.live import Live

    from strata.coord.view import JobView

    job: JobView | None = None
    with Live(console=found, auto_refresh=False, vertical_overflow="ellipsis") as live:
        async for each in states:
            if isinstance(each, JobView):
                job = each
                now_ms = job.observed_at_unix_ms
                head = Cell(f"{clock(now_ms, now_ms)}  Ctrl-C ends", "dim")
            else:
                head = Cell(f"NOT CONNECTED, attempt {each.attempt}: {each.reason}", "bold white on red")
            shown = Screen([], []) if job is None else screen(job, wide=wide, rows=found.height - 1)
            live.update(render(shown, found.width, before=[head]), refresh=True)
