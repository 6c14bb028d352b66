"""What the documents promise in code blocks and links, and how to check it against the command tree and the files."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import click

from strata.cli.groups import DefaultGroup


class Line(NamedTuple):
    file: str
    number: int
    text: str


def code_lines(file: str, text: str) -> Iterator[Line]:
    """The lines inside fenced code blocks, a prompt removed, continuation lines joined; of a session, what is typed."""
    fence = None
    session = False
    pending = ""
    for number, line in enumerate(text.splitlines(), start=1):
        mark = re.match(r"\s*(```+|~~~+)", line)
        if mark and (fence is None or mark[1].startswith(fence)):
            fence = mark[1] if fence is None else None
            session = fence is not None and line.strip().removeprefix(mark[1]).split()[:1] == ["console"]
            pending = ""
        elif fence is not None and not (session and not pending and not line.startswith("$ ")):
            joined = pending + line.strip().removeprefix("$ ")
            if joined.endswith("\\"):
                pending = joined[:-1].rstrip() + " "
                continue
            pending = ""
            yield Line(file, number, joined)


def unknown_command(root: click.Command, text: str) -> str | None:
    """Why a `strata …` line would be refused: an unknown command, option or choice, or None."""
    words = _simple_command(text)[1:]
    if not words:
        return None
    ctx = click.Context(root, info_name="strata")
    command = root
    while True:
        try:
            ctx, rest = _parse(command, ctx, words)
        except click.exceptions.Exit:
            return None  # --help and --version
        except click.UsageError as error:
            return error.format_message()
        if not isinstance(command, click.Group) or not rest:
            return None
        try:
            _, found, words = command.resolve_command(ctx, rest)
        except click.UsageError as error:
            return error.format_message()
        assert found is not None
        command = found


def unknown_targets(text: str, targets: set[str]) -> list[str]:
    """The targets of a `make …` line that the Makefile does not have."""
    words = [word for word in _simple_command(text)[1:] if "=" not in word and not word.startswith("-")]
    return [word for word in words if word not in targets]


def make_targets(makefile: str) -> set[str]:
    return {
        name
        for line in makefile.splitlines()
        if (rule := re.match(r"([A-Za-z0-9_.%/ -]+?)\s*:(?!=)", line)) and not line.startswith(".")
        for name in rule[1].split()
    }


def dead_links(file: Path, text: str) -> list[str]:
    """Relative links and images that point at no file. Links inside code are text."""
    prose = re.sub(r"(?ms)^\s*(```+|~~~+).*?^\s*\1|`[^`\n]*`", "", text)
    targets = [found[1] for found in re.finditer(r"\]\(<?([^)\s>]+)>?(?:\s+[\"'][^)]*)?\)", prose)]
    targets += [found[1] for found in re.finditer(r"(?m)^\s*\[[^\]]+\]:\s*(\S+)", prose)]
    relative = [target for target in targets if not re.match(r"[a-z][a-z0-9+.-]*:|#|//", target)]
    return [target for target in relative if not (file.parent / target.split("#")[0]).exists()]


def _parse(command: click.Command, parent: click.Context, words: list[str]) -> tuple[click.Context, list[str]]:
    # Placeholders such as `HOST` or `FILE` stand for values; names, counts and choices are checked, not types.
    ctx = click.Context(command, info_name=command.name, parent=parent if parent.command is not command else None)
    if isinstance(command, DefaultGroup) and words and words[0].startswith("-"):
        words = [words[0]] if words[0] in ctx.help_option_names else [command.default, *words]
    parser = command.make_parser(ctx)
    parser.ignore_unknown_options = False
    values, rest, _ = parser.parse_args(list(words))
    help_option = command.get_help_option(ctx)
    if {"version", help_option.name if help_option else None} & values.keys():
        raise click.exceptions.Exit
    for param in command.params:
        given = _given(values.get(param.name or ""))
        if isinstance(param.type, click.Choice):
            for value in given:
                param.type.convert(value, param, ctx)
        if isinstance(param, click.Argument) and param.required and not given:
            raise click.UsageError(f"missing {param.make_metavar(ctx)}", ctx)
    if rest and not isinstance(command, click.Group):
        raise click.UsageError(f"unexpected {' '.join(rest)}", ctx)
    return ctx, rest


def _given(value: object) -> list[str]:
    values = value if isinstance(value, list | tuple) else [value]
    return [one for one in values if isinstance(one, str)]


def _simple_command(text: str) -> list[str]:
    """The words of the first command of a line: up to a pipe, a separator, a redirection or a comment."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    words: list[str] = []
    for word in lexer:
        if word[0] in "|&;<>":
            break
        words.append(word)
    return words
