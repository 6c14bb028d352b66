"""Click groups: lazy import of commands, groups with a default command, suggestions for unknown commands, marks of
experimental ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from strata.base.suggest import closest_name
from strata.base.support import say_experimental

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


class CommandEntry(NamedTuple):
    target: str
    """`module:attribute` of the command, below the package of the group."""
    help: str
    """The command's own short help, repeated here so that listing the commands imports none of them."""
    section: str = "Commands"
    """The section of the list of commands."""


class LazyGroup(click.Group):
    """Knows its commands by name and imports the module of a command only when that command runs."""

    def __init__(
        self,
        *,
        table: Mapping[str, CommandEntry],
        aliases: Mapping[str, str],
        synonyms: Mapping[str, str] | None = None,
        package: str = "strata.cli",
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.package = package
        self.table = table
        self.aliases = aliases
        self.synonyms = synonyms or {}
        """Words of other programs, and what has that meaning here."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(self.table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        del ctx
        name = self.aliases.get(cmd_name, cmd_name)
        entry = self.table.get(name)
        return None if entry is None else _load(f"{self.package}.{entry.target}", name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if not name.startswith("-") and name not in self.table and name not in self.aliases:
            raise click.UsageError(f"there is no command '{name}'{self._nearest(name)}", ctx)
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Completes names from the table: this imports no command module."""
        from click.shell_completion import CompletionItem

        names = {**{name: entry.help for name, entry in self.table.items()}, **dict.fromkeys(self.aliases, "")}
        items = [CompletionItem(name, help=text or None) for name, text in names.items() if name.startswith(incomplete)]
        return [*items, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        del ctx
        widest = max(map(len, self.table), default=0)
        for section in dict.fromkeys(entry.section for entry in self.table.values()):
            with formatter.section(section):
                entries = [
                    (name, say_experimental(entry.help, f"strata {name}"))
                    for name, entry in self.table.items()
                    if entry.section == section
                ]
                formatter.write_dl([(name.ljust(widest), text) for name, text in entries])

    def _nearest(self, name: str) -> str:
        close = closest_name(name, [*self.table, *self.aliases], self.synonyms)
        return f", did you mean '{close}'?" if close else ""


VERBS: Final[Mapping[str, tuple[str, ...]]] = {
    "ls": ("list", "ls"),
    "list": ("ls", "list"),
    "rm": ("remove", "rm", "delete", "revoke"),
    "remove": ("rm", "remove", "delete", "revoke"),
    "delete": ("remove", "rm", "delete", "revoke"),
    "add": ("add", "create", "set", "push"),
    "create": ("create", "add", "set"),
    "upload": ("push",),
    "download": ("get", "pull"),
}
"""A subcommand by a word that other programs use for it: the first of these that the group has."""


class VerbGroup(click.Group):
    """A group that also knows its subcommands by the words of VERBS, and suggests one for what it does not know."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in self.commands and not name.startswith("-"):
            meant = next((verb for verb in VERBS.get(name, ()) if verb in self.commands), None)
            if meant is None:
                close = closest_name(name, self.commands)
                known = f"did you mean '{close}'?" if close else f"it has {', '.join(self.commands)}"
                raise click.UsageError(f"'{ctx.command_path}' has no command '{name}': {known}", ctx)
            args = [meant, *args[1:]]
        return super().resolve_command(ctx, args)


class DefaultGroup(click.Group):
    """A group whose subcommand `default` need not be named: `strata gang JOB` is `strata gang show JOB`."""

    def __init__(self, *args: Any, default: str, **options: Any) -> None:
        super().__init__(*args, **options)
        self.default = default

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or (args[0].startswith("-") and args[0] not in ctx.help_option_names):
            args = [self.default, *args]
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in self.commands:
            meant = next((verb for verb in VERBS.get(args[0], ()) if verb in self.commands), None)
            args = [self.default, *args] if meant is None else [meant, *args[1:]]
        return super().resolve_command(ctx, args)


def _load(target: str, name: str) -> click.Command:
    from importlib import import_module

    from strata.cli.examples import add_examples

    module, _, attribute = target.partition(":")
    command = getattr(import_module(module), attribute)
    assert isinstance(command, click.Command), f"{target} is not a command"
    add_examples(command, name)
    mark_experimental(command, f"strata {name}")
    return command


def mark_experimental(command: click.Command, path: str) -> None:
    """Add a word to the help of what is experimental: the command, its options, and all commands below it."""
    first, *rest = (command.help or "").split("\n\n")
    command.help = "\n\n".join([say_experimental(first, path), *rest])
    for option in command.params:
        if isinstance(option, click.Option):
            option.help = say_experimental(option.help or "", *(f"{path} {name}" for name in option.opts))
    if isinstance(command, click.Group):
        for name, inner in command.commands.items():
            mark_experimental(inner, f"{path} {name}")
