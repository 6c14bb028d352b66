"""`strata completion`: what a shell needs to complete commands and options, made from the commands themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click

from strata.cli.output import write

if TYPE_CHECKING:
    from click.shell_completion import ShellComplete

VARIABLE: Final = "_STRATA_COMPLETE"
"""With it the shell asks `strata` what could come next."""


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print what makes SHELL complete the words of 'strata'.

    \b
    bash:  strata completion bash > ~/.local/share/bash-completion/completions/strata
    zsh:   strata completion zsh > "${fpath[1]}/_strata"
    fish:  strata completion fish > ~/.config/fish/completions/strata.fish
    """
    write(source(shell))


def source(shell: str) -> str:
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    assert found is not None, "one of the choices"
    root = click.get_current_context().find_root().command
    made: ShellComplete = found(root, {}, "strata", VARIABLE)
    # Not `source()`, which for bash starts one to look at its version.
    return made.source_template % made.source_vars()
