"""`strata agent`: run the agent of this host, probe the host, or run its self-test."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from strata.base.errors import Code, StrataError
from strata.cli.options import config_option, configure_log, log_format_option
from strata.cli.output import print_error, write

if TYPE_CHECKING:
    from strata.fleet.agent.settings import AgentSettings

_config: Final = config_option("agent")
_state: Final = click.option(
    "--state",
    metavar="FOLDER",
    help="Store credentials and attempts in FOLDER (default ~/.local/state/strata/agent).",
)
_work: Final = click.option(
    "--work", metavar="FOLDER", help="Run jobs in FOLDER (default: work, beside the state folder)."
)


@click.group(invoke_without_command=True)
@_config
@_state
@_work
@click.option("--slots", metavar="N", help="Run at most N one-slot jobs at once (default: as many as fit).")
@click.option(
    "--interpreter",
    metavar="PYTHON",
    help="Run trainers that name no interpreter with PYTHON, and query it for torch (default: the agent's own).",
)
@click.option(
    "--run-as", metavar="USER", help="Run jobs as USER; the agent must be root (default: as the agent's user)."
)
@click.option(
    "--on-stop",
    type=click.Choice(["preempt", "finish", "leave"]),
    help="On SIGTERM: preempt jobs, finish them, or leave them to the next agent (default preempt).",
)
@click.option(
    "--until",
    metavar="TIME",
    help="Stop at TIME as at SIGTERM: 30m or 2h from now, or @ and seconds since 1970 (default: never).",
)
@log_format_option
@click.pass_context
def agent(ctx: click.Context, /, config: Path | None, **flags: str | None) -> None:
    """Run the agent of this host: claim jobs, run them, report.

    This machine must have joined a hub ('strata join'). Every option can also be set in FILE or in the environment
    (STRATA_AGENT_SLOTS, …). SIGTERM stops the agent as --on-stop says, a second SIGTERM stops it at once. SIGUSR1 makes
    it exit and leave running jobs to the next agent. The agent of an ephemeral host ('strata invite --ephemeral')
    removes it from the fleet when it stops.
    """
    if ctx.invoked_subcommand is not None:
        return
    from strata.base.settings import process_environment
    from strata.fleet.agent.start import run

    settings = _settings(config, flags)
    configure_log(settings.log_format, settings.log_level)
    run(settings, process_environment(), lambda line: print_error(f"strata agent: {line}"))


@agent.command()
@_config
@click.option("--interpreter", metavar="PYTHON", help="Query PYTHON for torch and CUDA (default: the agent's own).")
@click.pass_context
def probe(ctx: click.Context, /, **_: Any) -> None:
    """Print the capabilities of this host and the agent's version as JSON, as the agent reports them to the hub."""
    import msgspec

    from strata import __version__
    from strata.base.settings import process_environment
    from strata.fleet.agent.start import find_sandbox, probe_capability
    from strata.fleet.core.job_command import inherited_by_jobs

    settings = _settings_of_subcommand(ctx)
    environ = process_environment()
    sandbox = find_sandbox(settings, environ)
    probed = probe_capability(settings, inherited_by_jobs(environ, settings.pass_env), sandbox)
    for problem in probed.problems:
        print_error(f"strata agent: {problem}")
    report = {"agent_version": __version__} | msgspec.to_builtins(probed.capability)
    write(msgspec.json.format(msgspec.json.encode(report)).decode())


@agent.command()
@_config
@_state
@_work
@click.pass_context
def check(ctx: click.Context, /, **_: Any) -> None:
    """Run the self-test of this host: folders, disk, child processes, sandbox, hub and clock, torch on GPUs."""
    from strata.base.settings import process_environment
    from strata.fleet.agent.identity import connect_to_hub
    from strata.fleet.agent.selftest import check_gpus
    from strata.fleet.agent.start import check_host, find_sandbox, probe_capability
    from strata.fleet.core.job_command import inherited_by_jobs

    settings = _settings_of_subcommand(ctx)
    joined = (settings.state_folder / "identity" / "hub.json").exists()
    environ = process_environment()
    sandbox, allowed = find_sandbox(settings, environ), inherited_by_jobs(environ, settings.pass_env)
    results = check_host(settings, connect_to_hub(settings.state_folder) if joined else None, sandbox, allowed)
    if not joined:
        print_error("strata agent: this host has not joined a hub; the hub and its clock are not tested")
    results += check_gpus(probe_capability(settings, allowed))
    for result in results:
        write(f"{'ok ' if result.ok else 'BAD'}  {result.check}: {result.reason}")
    if not all(result.ok for result in results):
        raise StrataError(
            Code.PRECONDITION,
            "the self-test of this host failed",
            hint="fix each line that begins with BAD, then run it again",
        )


def _settings_of_subcommand(ctx: click.Context) -> AgentSettings:
    """Merges the options of a subcommand with those before its name, as in `strata agent --config FILE check`."""
    before = {} if ctx.parent is None else ctx.parent.params
    flags = before | {name: value for name, value in ctx.params.items() if value is not None}
    return _settings(flags.pop("config", None), flags)


def _settings(config: Path | None, flags: dict[str, Any]) -> AgentSettings:
    from strata.base.settings import load
    from strata.fleet.agent.settings import SECTION, AgentSettings

    return load(AgentSettings, section=SECTION, file=config, flags=flags)
