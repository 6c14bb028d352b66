"""Click groups: one that imports a command only when it runs, and one with a default command."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


class CommandEntry(NamedTuple):
    target: str
    """`module:attribute` of the command."""
    help: str
    """The command's own short help, repeated here so that listing the commands imports none of them."""


class LazyGroup(click.Group):
    """Knows its commands by name and imports the module of a command only when that command runs."""

    def __init__(self, *, table: Mapping[str, CommandEntry], aliases: Mapping[str, str], **options: Any) -> None:
        super().__init__(**options)
        self.table = table
        self.aliases = aliases

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(self.table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        del ctx
        entry = self.table.get(self.aliases.get(cmd_name, cmd_name))
        return None if entry is None else _load(entry.target)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if not name.startswith("-") and name not in self.table and name not in self.aliases:
            raise click.UsageError(f"there is no command '{name}'{self._nearest(name)}", ctx)
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """From the table: completing a name imports no command module."""
        from click.shell_completion import CompletionItem

        names = {**{name: entry.help for name, entry in self.table.items()}, **dict.fromkeys(self.aliases, "")}
        items = [CompletionItem(name, help=text or None) for name, text in names.items() if name.startswith(incomplete)]
        return [*items, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.help) for name, entry in self.table.items()])

    def _nearest(self, name: str) -> str:
        from difflib import get_close_matches

        close = get_close_matches(name, [*self.table, *self.aliases], n=1, cutoff=0.5)
        return f", did you mean '{close[0]}'?" if close else ""


class DefaultGroup(click.Group):
    """A group whose subcommand `default` need not be named: `strata gang JOB` is `strata gang show JOB`."""

    default: ClassVar[str]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or (args[0].startswith("-") and args[0] not in ctx.help_option_names):
            args = [self.default, *args]
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in self.commands:
            args = [self.default, *args]
        return super().resolve_command(ctx, args)


def _load(target: str) -> click.Command:
    from importlib import import_module

    module, _, attribute = target.partition(":")
    command = getattr(import_module(module), attribute)
    assert isinstance(command, click.Command), f"{target} is not a command"
    return command
