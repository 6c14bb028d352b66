"""`strata gang --watch`: a live screen on a terminal, elsewhere a line for each change or JSON."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

from strata.cli.gang.format import GangChanges, alerts, clock, summary
from strata.cli.gang.screen import screen
from strata.cli.layout import console, render
from strata.cli.output import Format, print_data, print_error, printable, write
from strata.cli.watch import is_live, live_screen

if TYPE_CHECKING:
    from strata.coord.operator import ConnectionLost
    from strata.coord.view import JobView


async def follow(states: AsyncIterator[JobView | ConnectionLost], output: Format) -> None:
    """Print states until interrupted, or until the watch fails for good."""
    if output is Format.JSONL:
        from msgspec import to_builtins

        await _each(states, lambda job: print_data(to_builtins(job), output))
        return
    if is_live(output):
        await _live(states, wide=output is Format.WIDE)
    else:
        await _each(states, Lines().print)


async def _each(states: AsyncIterator[JobView | ConnectionLost], show: Callable[[JobView], None]) -> None:
    """States go to stdout. That the connection broke and came back is no state of the job: stderr."""
    from strata.coord.view import JobView

    broken = False
    async for each in states:
        if isinstance(each, JobView):
            if broken:
                print_error("strata gang: connected again")
            broken = False
            show(each)
        elif not broken:
            print_error(f"strata gang: lost the coordinator: {each.reason}; trying again")
            broken = True


class Lines:
    """Prints how the job stands at first, then a line for each change, with its time."""

    def __init__(self) -> None:
        self._changes = GangChanges()
        self._begun = False

    def print(self, job: JobView) -> None:
        now_ms = job.observed_at_unix_ms
        changes = [*self._changes.lines(job)]
        for each in changes if self._begun else [summary(job), *alerts(job)]:
            write(f"{clock(now_ms, now_ms)} {printable(each)}")
        self._begun = True


async def _live(states: AsyncIterator[JobView | ConnectionLost], *, wide: bool) -> None:
    from strata.coord.view import JobView

    to = console()
    with live_screen() as live:
        async for each in states:
            if isinstance(each, JobView):
                now_ms = each.observed_at_unix_ms
                shown = screen(each, wide=wide, rows=to.height - 1)
                live.show(render(shown, to.width), clock(now_ms, now_ms))
            else:
                live.lost(f"attempt {each.attempt}: {each.reason}")
            if live.ended_within(0.0):
                return
