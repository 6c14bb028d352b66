"""`strata hub`: run the process that schedules jobs on hosts and stores their logs and results."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from strata.cli.output import print_error, redact


@click.command()
@click.option(
    "--config",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Read settings from [hub] in this TOML file.",
)
@click.option("--listen", metavar="HOST:PORT", help="Listen here for hosts and clients (default 127.0.0.1:8443).")
@click.option(
    "--data",
    metavar="FOLDER",
    help="Store certificate authority, operator token, logs and artifacts in FOLDER (default ./strata-hub).",
)
@click.option("--database", metavar="URL", help="sqlite:PATH or postgresql://… (default: hub.db in the data folder).")
@click.option(
    "--tls/--no-tls", "tls_enabled", default=None, help="Serve HTTPS; required unless the hub listens on loopback."
)
@click.option(
    "--name", "tls_names", multiple=True, metavar="NAME", help="DNS name or address for the certificate; repeatable."
)
@click.option("--manifest", metavar="FILE", help="The manifest that 'strata reload' applies.")
@click.option(
    "--public-read/--no-public-read", default=None, help="Show jobs and hosts to clients without a key (default: no)."
)
@click.option(
    "--log-format",
    type=click.Choice(["json", "console"]),
    help="Format of log lines on stderr (default: console on a terminal, else json).",
)
def hub(config: Path | None, **flags: Any) -> None:
    """Run the hub: schedule jobs on hosts, and store their logs and results.

    Every option can also be set in FILE or in the environment (STRATA_HUB_LISTEN, …). A SQLite database serves one hub.
    SIGTERM shuts the hub down gracefully: agents that wait for a job connect again.
    """
    from strata.base import log
    from strata.base.settings import load, no_color
    from strata.cli.extras import require

    require("uvicorn", extra="hub")
    require("uvloop", extra="hub")
    from strata.hub.server import run
    from strata.hub.settings import SECTION, HubSettings

    flags["tls_names"] = list(flags["tls_names"]) or None
    names = {name: name.replace("tls_", "tls.") for name in flags}
    settings = load(HubSettings, section=SECTION, file=config, flags={names[name]: flags[name] for name in flags})
    style = settings.log_format or ("console" if sys.stderr.isatty() else "json")
    log.configure(style, settings.log_level, colour=log.colour_wanted(sys.stderr, no_color=no_color()))
    database = redact(settings.database) or "hub.db in the data folder"
    run(settings, lambda line: print_error(f"strata hub: {line}, database {database}"))
