"""`strata agent`: run this host's agent, or only look at what it would tell the hub and whether the host is fit."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from strata.base.errors import Code, StrataError
from strata.cli.output import print_error, write

if TYPE_CHECKING:
    from strata.fleet.agent.settings import AgentSettings

_config: Final = click.option(
    "--config", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Settings, [agent] in TOML."
)
_state: Final = click.option("--state", metavar="FOLDER", help="Credentials and attempts of this host.")
_work: Final = click.option("--work", metavar="FOLDER", help="Where jobs work; beside the state unless set.")


@click.group(invoke_without_command=True)
@_config
@_state
@_work
@click.option("--slots", metavar="N", help="Jobs of one slot that run at once; 1 unless set.")
@click.option("--interpreter", metavar="PYTHON", help="Asked for torch and CUDA; runs trainers that name none.")
@click.option("--run-as", metavar="USER", help="The user jobs run as, if the agent is root.")
@click.option("--on-stop", type=click.Choice(["preempt", "finish", "leave"]), help="What becomes of jobs at SIGTERM.")
@click.option("--log-format", type=click.Choice(["json", "console"]), help="Console on a terminal unless set.")
@click.pass_context
def agent(ctx: click.Context, /, config: Path | None, **flags: str | None) -> None:
    """Run the agent of this host: claim jobs, run them, report.

    Every option can stand in FILE or in the environment too (STRATA_AGENT_SLOTS, …). The host has to have joined a hub.
    SIGTERM stops it in good order, a second one at once; SIGUSR1 leaves the jobs to the next agent.
    """
    if ctx.invoked_subcommand is not None:
        return
    from strata.base import log
    from strata.base.settings import no_color, process_environment
    from strata.fleet.agent.start import run

    settings = _settings(config, flags)
    style = settings.log_format or ("console" if sys.stderr.isatty() else "json")
    log.configure(style, settings.log_level, colour=log.colour_wanted(sys.stderr, no_color=no_color()))
    run(settings, process_environment(), lambda line: print_error(f"strata agent: {line}"))


@agent.command()
@_config
@click.option("--interpreter", metavar="PYTHON", help="Asked for torch and CUDA.")
def probe(config: Path | None, interpreter: str | None) -> None:
    """Print what this host is, as the hub would be told: JSON."""
    import msgspec

    from strata.base.settings import process_environment
    from strata.fleet.agent.environment import inherited_by_jobs
    from strata.fleet.agent.start import probe_capability

    settings = _settings(config, {"interpreter": interpreter})
    probed = probe_capability(settings, inherited_by_jobs(process_environment(), settings.pass_env))
    for problem in probed.problems:
        print_error(f"strata agent: {problem}")
    write(msgspec.json.format(msgspec.json.encode(probed.capability)).decode())


@agent.command()
@_config
@_state
@_work
def check(config: Path | None, state: str | None, work: str | None) -> None:
    """Test whether this host is fit for jobs: folders, disk, child processes, the hub and its clock."""
    from strata.fleet.agent.identity import connect_to_hub
    from strata.fleet.agent.start import check_host

    settings = _settings(config, {"state": state, "work": work})
    joined = (settings.state_folder / "identity" / "hub.json").exists()
    results = check_host(settings, connect_to_hub(settings.state_folder) if joined else None)
    if not joined:
        print_error("strata agent: this host has not joined a hub; its part is tested alone")
    for result in results:
        write(f"{'ok ' if result.ok else 'BAD'}  {result.check}: {result.reason}")
    if not all(result.ok for result in results):
        raise StrataError(Code.PRECONDITION, "this host is not fit for jobs")


def _settings(config: Path | None, flags: dict[str, Any]) -> AgentSettings:
    from strata.base.settings import load
    from strata.fleet.agent.settings import SECTION, AgentSettings

    return load(AgentSettings, section=SECTION, file=config, flags=flags)
