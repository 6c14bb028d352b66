"""`strata completion`: the script with which a shell completes commands and options."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click

from strata.cli.output import write

if TYPE_CHECKING:
    from click.shell_completion import ShellComplete

VARIABLE: Final = "_STRATA_COMPLETE"
"""The variable with which the shell calls `strata` for completions."""


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the script with which SHELL completes 'strata'.

    \b
    bash:  strata completion bash > ~/.local/share/bash-completion/completions/strata
    zsh:   strata completion zsh > "${fpath[1]}/_strata"
    fish:  strata completion fish > ~/.config/fish/completions/strata.fish
    """
    write(source(shell))


def source(shell: str) -> str:
    from click.shell_completion import get_completion_class

    completion_class = get_completion_class(shell)
    assert completion_class is not None, "one of the choices"
    root = click.get_current_context().find_root().command
    completer: ShellComplete = completion_class(root, {}, "strata", VARIABLE)
    # Not `source()`, which for bash starts a shell to check its version.
    return completer.source_template % completer.source_vars()
