"""A click group with a command that need not be named: what is said without one is said to it."""

from __future__ import annotations

from typing import ClassVar

import click


class DefaultGroup(click.Group):
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
