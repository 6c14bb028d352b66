"""`strata recipes`: lists the kinds of recipes, and prints the example file of one."""

from __future__ import annotations

import click

from strata.cli.groups import DefaultGroup
from strata.cli.output import Format, output_option, write
from strata.cli.rows import Column, Rows


@click.group(cls=DefaultGroup, default="list")
def recipes() -> None:
    """List the kinds of recipes for 'strata train', or print one."""


@recipes.command("list")
@output_option
def list_recipes(output: Format) -> None:
    """List the kinds of recipes."""
    from strata.sdk.recipes.recipe import KINDS

    with Rows(output, [Column("kind", identifies=True), Column("learns", cut=40)]) as rows:
        for kind, learns in KINDS.items():
            rows.add({"kind": kind, "learns": learns})


@recipes.command()
@click.argument("kind", type=click.Choice(["sft", "dpo", "grpo", "distill"]), metavar="KIND")
def show(kind: str) -> None:
    """Print a recipe of KIND (sft, dpo, grpo, distill), to save and to change.

    Redirect it into a file, set model.path and data.path, and run 'strata train FILE'.
    """
    from strata.sdk.recipes.recipe import recipe_text

    write(recipe_text(kind).rstrip("\n"))
