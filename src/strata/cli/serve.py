"""`strata serve CONFIG`: run a training server."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from strata.cli.output import complain


@click.command()
@click.argument("config", type=click.Path(path_type=Path, dir_okay=False, exists=True), metavar="CONFIG")
def serve(config: Path) -> None:
    """Run a server that trains a model by API.

    CONFIG is a TOML file with the sections server, model, ranks and limits; every setting can stand in the environment
    too (STRATA_MODEL_PATH, …). It starts the ranks, the orchestrator and the API server and starts each again when it
    dies. SIGTERM ends them in order. With ranks.mode = "connect" it attaches to ranks that were started elsewhere.
    """
    from strata.base import log
    from strata.base.settings import no_color
    from strata.cli.extras import require

    for module in ("zmq", "fastapi", "torch"):
        require(module, extra="train")
    from strata.train.launch.run import run
    from strata.train.settings import load_settings

    settings = load_settings(config)
    style = settings.server.log_format or ("console" if sys.stderr.isatty() else "json")
    log.configure(style, settings.server.log_level, colour=log.colour_wanted(sys.stderr, no_color=no_color()))
    model, ranks = settings.model.base_model, settings.ranks.nproc
    run(settings, config, lambda where: complain(f"strata serve: {where}, model {model}, {ranks} ranks"))
