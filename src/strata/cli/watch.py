"""`--watch`: repeats a view every 2 s, as a live screen or as changed lines; which errors it survives.

A command that prints a list or a view needs nothing for it: it is run again and again, and what it prints is compared.
"""

from __future__ import annotations

import functools
import re
import select
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from strata.base.errors import Code, StrataError
from strata.cli.layout import Cell, Screen, console, render
from strata.cli.output import Format, collect_lines, is_collecting, output_option, print_error, write

if TYPE_CHECKING:
    from rich.console import RenderableType

_Function = TypeVar("_Function", bound=Callable[..., object])
EVERY_S: Final = 2.0
TRANSIENT: Final = frozenset({Code.UNAVAILABLE, Code.DEADLINE, Code.EXHAUSTED})
"""A watch continues across restarts of the server."""
_PASSING: Final = re.compile(r'\b[0-9.]+(?:[smhd]|ms|%)(?![\w])|"\w+(?:_ago_s|_use|now_s)": [^,}]*')
"""Ages, uses and durations: that they move is no change worth a line."""


def watch_flag(function: _Function) -> _Function:
    """`-w`, passed to the command as `watch`."""
    return click.option(
        "-w", "--watch", is_flag=True, help="Keep watching: a live screen, or a line for each change if piped."
    )(function)


def view_options(function: _Function) -> _Function:
    """`-o` and `-w` for a command that prints once: with `-w` it is repeated until Ctrl-C or q."""

    @functools.wraps(function)
    def command(*args: Any, watch: bool, **options: Any) -> object:
        if not watch:
            return function(*args, **options)
        repeat(lambda: function(*args, **options), options["output"])
        return None

    return output_option(watch_flag(command))  # type: ignore[return-value]  # click passes one option more


def check_watched(output: Format) -> None:
    """A document for each change would be several documents."""
    if output is Format.JSON:
        raise click.UsageError(f"-o {output} cannot be combined with --watch: use -o jsonl")


def repeat(show: Callable[[], object], output: Format) -> None:
    """Call `show` until the person ends it. The first call must succeed; later a server that is away may come back."""
    check_watched(output)
    lines = _printed(show)
    if is_live(output):
        with live_screen() as screen:
            while True:
                screen.show(_as_text(lines))
                if screen.ended_within(EVERY_S):
                    return
                lines = _next(show, lines, screen.lost)
    news = ChangedLines()
    while True:
        news.print(lines)
        time.sleep(EVERY_S)
        lines = _next(show, lines, news.lost)


def is_live(output: Format) -> bool:
    """Says whether stdout is a terminal that shows a screen."""
    to = console()
    return not output.for_programs and to.is_terminal and not to.is_dumb_terminal


def live_rows(output: Format) -> int | None:
    """Returns how high a view may be on a live screen; None where it is printed once, or in a pipe."""
    return console().height - 1 if is_collecting() and is_live(output) else None


def _printed(show: Callable[[], object]) -> list[str]:
    lines: list[str] = []
    # The exit status of what is shown now is not that of the watch.
    with collect_lines(lines), suppress(click.exceptions.Exit):
        show()
    return lines


def _next(show: Callable[[], object], before: list[str], lost: Callable[[str], None]) -> list[str]:
    try:
        return _printed(show)
    except StrataError as error:
        if error.code not in TRANSIENT:
            raise
        lost(error.message)
        return before


def _as_text(lines: list[str]) -> RenderableType:
    from rich.text import Text

    return Text.from_ansi("\n".join(lines))


class ChangedLines:
    """Prints the lines that were not there before; that ages grow is no change."""

    def __init__(self) -> None:
        self._before: set[str] = set()
        self._away = False

    def print(self, lines: list[str]) -> None:
        shown = {" ".join(_PASSING.sub("~", line).split()): line for line in lines}
        for key, line in shown.items():
            if key not in self._before:
                write(line)
        sys.stdout.flush()
        self._before = set(shown)
        self._away = False

    def lost(self, reason: str) -> None:
        if not self._away:
            print_error(f"strata: {reason}; trying again")
        self._away = True


@contextmanager
def live_screen() -> Iterator[LiveScreen]:
    """One screen for every watch: a line with the time or the lost connection, and the content below it."""
    from rich.live import Live

    to = console()
    with Live(console=to, auto_refresh=False, vertical_overflow="ellipsis") as live, _single_keys() as keys:
        yield LiveScreen(live, keys=keys, width=lambda: to.width)


class LiveScreen:
    def __init__(self, live: Any, *, keys: bool, width: Callable[[], int]) -> None:
        self._live = live
        self._keys = keys
        self._width = width
        self._content: RenderableType = ""
        self._ends = "q ends" if keys else "Ctrl-C ends"

    def show(self, content: RenderableType, head: str = "") -> None:
        self._content = content
        self._update(Cell(f"{head or time.strftime('%H:%M:%S')}  {self._ends}", "dim"))

    def lost(self, reason: str) -> None:
        self._update(Cell(f"NOT CONNECTED: {reason}", "bold white on red"))

    def _update(self, head: Cell) -> None:
        from rich.console import Group

        line = render(Screen([head], []), self._width())
        self._live.update(Group(line, self._content), refresh=True)

    def ended_within(self, seconds: float) -> bool:
        if not self._keys:
            time.sleep(seconds)
            return False
        until_s = time.monotonic() + seconds
        while select.select([sys.stdin], [], [], max(0.0, until_s - time.monotonic()))[0]:
            if sys.stdin.read(1) in ("q", "Q", ""):
                return True
        return False


@contextmanager
def _single_keys() -> Iterator[bool]:
    """Keys are read one by one, without Enter and without an echo. False where there is no keyboard."""
    if sys.platform == "win32" or not sys.stdin.isatty():
        yield False
        return
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    try:
        yield True
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
