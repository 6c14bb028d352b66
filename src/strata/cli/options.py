"""Options that several commands share (`--config`, log options), and the parsing of durations and NAME=VALUE."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

if TYPE_CHECKING:
    from strata.base import log

Function = TypeVar("Function", bound=Callable[..., object])
FILE: Final = click.Path(path_type=Path, dir_okay=False)


def combine(*options: Callable[[Any], Any]) -> Callable[[Function], Function]:
    """Adds these options to a command, in this order."""

    def add(function: Function) -> Function:
        for option in reversed(options):
            function = option(function)
        return function

    return add


def config_option(section: str, **more: Any) -> Callable[[Function], Function]:
    help_text = f"Read settings from [{section}] in this TOML file."
    return click.option("--config", type=FILE, metavar="FILE", help=help_text, **more)


log_format_option: Final = click.option(
    "--log-format",
    type=click.Choice(["json", "console"]),
    help="Format of log lines on stderr (default: console on a terminal, else json).",
)


def configure_log(form: log.Format | None, level: str) -> None:
    """Sends logs to stderr, for a person on a terminal and for programs elsewhere, unless `form` says which."""
    from strata.base import log
    from strata.base.settings import no_color

    style = form or ("console" if sys.stderr.isatty() else "json")
    log.configure(style, level, colour=log.colour_wanted(sys.stderr, no_color=no_color()))


def read_duration(text: str) -> float:
    """Reads `90s`, `30m`, `2h` or `7d`, as seconds."""
    from strata.fleet.core.schedule import parse_duration

    duration = parse_duration(text)
    if duration is None:
        raise click.BadParameter(f"{text!r} is not a time: write 90s, 30m, 2h or 7d")
    return duration.total_seconds()


def read_pair(text: str) -> tuple[str, str]:
    """Reads `NAME=VALUE`."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise click.BadParameter(f"{text!r} is not NAME=VALUE")
    return name, value
