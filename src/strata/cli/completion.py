"""`strata completion`: shell completion of commands, options and names of jobs, hosts, contexts; it waits 2 s for the
hub and offers at most 1,000 names.

Names are those of the hub. Without a hub, or with one that does not reply at once, nothing is offered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import click

from strata.cli.output import write

if TYPE_CHECKING:
    from collections.abc import Iterable

    from click.shell_completion import CompletionItem, ShellComplete

    from strata.fleet.client.hub_client import HubClient

VARIABLE: Final = "_STRATA_COMPLETE"
"""The variable with which the shell calls `strata` for completions."""
ANSWER_S: Final = 2.0
"""How long a person waits for the names after the tab key."""
MOST: Final = 1000


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


def complete_jobs(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of jobs, each with its status; ids for what begins with a digit or letter of one and is no name."""
    del param

    def names(client: HubClient) -> Iterable[tuple[str, str]]:
        from strata.cli.fleet.client import short_id
        from strata.fleet.wire.jobs import JobsQuery, JobsReply

        jobs = client.call("GET", "/v1/jobs", JobsReply, query=JobsQuery(hidden=False, limit=MOST)).jobs
        labels = {job.spec.label: job.status for job in jobs}
        ids = {short_id(job.id): f"{job.spec.label}, {job.status}" for job in jobs} if incomplete else {}
        return [*labels.items(), *ids.items()]

    return _matching(ctx, incomplete, names)


def complete_hosts(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    del param

    def names(client: HubClient) -> Iterable[tuple[str, str]]:
        from strata.cli.fleet.client import all_hosts

        return [(host.name, host.presence) for host in all_hosts(client) if host.state != "left"]

    return _matching(ctx, incomplete, names)


def _matching(
    ctx: click.Context, incomplete: str, names: Callable[[HubClient], Iterable[tuple[str, str]]]
) -> list[CompletionItem]:
    from click.shell_completion import CompletionItem

    from strata.base.errors import StrataError
    from strata.sdk.fleet import client_settings, connect

    try:
        settings = client_settings(context=ctx.params.get("context"))
        with connect(settings, timeout_s=ANSWER_S, retry_for_s=0.0) as client:
            known = dict(names(client))
    except StrataError:
        # A message would stand in the line that the person writes.
        return []
    return [CompletionItem(name, help=text) for name, text in known.items() if name.startswith(incomplete)]
