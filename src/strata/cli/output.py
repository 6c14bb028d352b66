"""Prints values (`-o json`, `jsonl` …) and errors: escaping of control characters, redaction of passwords in URLs.

Names in them come from other machines: control characters are escaped. Passwords in URLs are replaced.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from enum import StrEnum
from typing import Final, TypeVar

import click

from strata.cli.exit_codes import ExitCode

_Function = TypeVar("_Function", bound=Callable[..., object])


class Format(StrEnum):
    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    JSONL = "jsonl"
    NAME = "name"

    @property
    def for_programs(self) -> bool:
        """Values as they are, and not as a person reads them."""
        return self not in (Format.TABLE, Format.WIDE)


def output_option(function: _Function) -> _Function:
    """`-o`, passed to the command as `output: Format`."""
    return click.option(
        "-o",
        "--output",
        type=click.Choice([choice.value for choice in Format]),
        default=Format.TABLE.value,
        show_default=True,
        callback=lambda _ctx, _param, value: Format(value),
        help="Output format; name: only what other commands take.",
    )(function)


def print_data(value: object, output: Format) -> None:
    """A value of JSON's kinds, for programs. `-o name` prints its id, or its name."""
    import json

    name = output is Format.NAME
    write(_name_of(value) if name else json.dumps(value, indent=2 if output is Format.JSON else None))


def _name_of(value: object) -> str:
    if isinstance(value, Mapping):
        for key in ("id", "name", "job_id"):
            if isinstance(value.get(key), str):
                return str(value[key])
    raise click.UsageError("what this shows has no name: use -o json")


_sink: ContextVar[list[str] | None] = ContextVar("sink", default=None)


@contextmanager
def collect_lines(lines: list[str]) -> Iterator[None]:
    """Adds to `lines` what would be printed meanwhile, to stdout or as a message."""
    token = _sink.set(lines)
    try:
        yield
    finally:
        _sink.reset(token)


def is_collecting() -> bool:
    return _sink.get() is not None


def write(text: str) -> None:
    """Print a line of data. When the reader has closed the pipe (`| head`), the command ends quietly."""
    sink = _sink.get()
    if sink is not None:
        sink.extend(text.split("\n"))
        return
    try:
        click.echo(text)
    except BrokenPipeError as error:
        raise click.exceptions.Exit(ExitCode.BROKEN_PIPE) from error


def print_error(message: str, *, hint: str | None = None) -> None:
    """Print a message, and what to do about it, to stderr."""
    lines = [printable(redact(message)), *([f"hint: {printable(redact(hint))}"] if hint else [])]
    sink = _sink.get()
    if sink is not None:
        sink.extend(lines)
        return
    for line in lines:
        click.echo(line, err=True)


_URL_PASSWORD: Final = re.compile(r"(?P<before>\b[a-z][a-z0-9+.-]*://[^\s:/@]*:)\S*(?=@)", re.IGNORECASE)
_NAMED_PASSWORD: Final = re.compile(r"(?P<before>\b(?:ssl)?password\s*=\s*)(?:'[^']*'|[^\s&'\"]+)", re.IGNORECASE)


def redact(text: str) -> str:
    """Replace the passwords in database URLs."""
    return _NAMED_PASSWORD.sub(r"\g<before>***", _URL_PASSWORD.sub(r"\g<before>***", text))


def printable(text: str) -> str:
    """Escape control characters, except line ends and tabs."""
    return "".join(char if char.isprintable() or char in "\n\t" else repr(char)[1:-1] for char in text)
