"""`strata serve CONFIG`: run a training server. `strata serve status`: show what one does."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from strata.cli.groups import DefaultGroup
from strata.cli.output import print_error
from strata.cli.serve.status import status


class Serve(DefaultGroup):
    """A first word that is no command is a settings file to run."""

    default = "run"


@click.group(cls=Serve, name="serve")
def serve() -> None:
    """Run a training server, which trains a model through an API.

    'strata serve CONFIG' is 'strata serve run CONFIG'; see 'strata serve run --help'.
    """


serve.add_command(status)


@serve.command()
@click.argument("config", type=click.Path(path_type=Path, dir_okay=False, exists=True), metavar="CONFIG")
@click.option("--make-keys", is_flag=True, help="Create the keys for links to ranks on other machines, and exit.")
def run(config: Path, *, make_keys: bool) -> None:
    """Run a training server, which trains a model through an API.

    CONFIG is a TOML file with the sections server, model, ranks, limits, sampling, snapshots, checkpoints and
    inference; every setting can also be set in the environment (STRATA_MODEL_PATH, …). The command starts the ranks,
    the orchestrator and the API servers, and restarts each when it dies. SIGTERM stops them in order. With ranks.mode =
    "connect" it attaches to ranks that were started elsewhere.
    """
    from strata.base import log
    from strata.base.settings import no_color
    from strata.cli.extras import require

    for module in ("zmq", "starlette"):
        require(module, extra="train")
    from strata.train.launch.launcher import run_launcher
    from strata.train.link.keys import make_first_keys
    from strata.train.settings import load_settings

    settings = load_settings(config)
    if make_keys:
        make_first_keys(settings.keys)
        return
    if settings.ranks.mode == "auto":
        require("torch", extra="train")
    style = settings.server.log_format or ("console" if sys.stderr.isatty() else "json")
    log.configure(style, settings.server.log_level, colour=log.colour_wanted(sys.stderr, no_color=no_color()))
    model = settings.model.base_model
    ranks = f"{settings.ranks.nproc} ranks" if settings.ranks.mode == "auto" else "ranks started elsewhere"
    run_launcher(settings, config, lambda where: print_error(f"strata serve: {where}, model {model}, {ranks}"))
