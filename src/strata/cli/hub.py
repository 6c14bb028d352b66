"""`strata hub`: run the process that hands out jobs and keeps what comes of them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from strata.cli.output import print_error, redact


@click.command()
@click.option(
    "--config", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Settings, [hub] in TOML."
)
@click.option("--listen", metavar="HOST:PORT", help="Where hosts and people reach it; 127.0.0.1:8443 unless set.")
@click.option("--data", metavar="FOLDER", help="Authority, operator token, logs, artifacts; ./strata-hub unless set.")
@click.option("--database", metavar="URL", help="sqlite:PATH or postgresql://…; hub.db in the data folder unless set.")
@click.option("--tls/--no-tls", "tls_enabled", default=None, help="Needed unless it listens on loopback.")
@click.option("--name", "tls_names", multiple=True, metavar="NAME", help="DNS name or address in the certificate.")
@click.option("--manifest", metavar="FILE", help="The manifest that `strata reload` applies.")
@click.option("--public-read/--no-public-read", default=None, help="Show jobs and hosts to anybody who asks.")
@click.option("--log-format", type=click.Choice(["json", "console"]), help="Console on a terminal unless set.")
def hub(config: Path | None, **flags: Any) -> None:
    """Run the hub that hands out jobs and keeps what comes of them.

    Every option can stand in FILE or in the environment too (STRATA_HUB_LISTEN, …). A SQLite file serves one hub.
    SIGTERM ends it gracefully: whoever waits for a job is told to ask again.
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
