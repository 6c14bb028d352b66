"""`strata hub`: options and start of the hub process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from strata.cli.options import config_option, configure_log, log_format_option
from strata.cli.output import print_error, redact


@click.command()
@config_option("hub")
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
@log_format_option
def hub(config: Path | None, **flags: Any) -> None:
    """Run the hub: schedule jobs on hosts, and store their logs and results.

    Every option can also be set in FILE or in the environment (STRATA_HUB_LISTEN, …). A SQLite database serves one hub.
    SIGTERM shuts the hub down gracefully: agents that wait for a job connect again.
    """
    from strata.base.settings import load
    from strata.cli.extras import require

    require("uvicorn", extra="hub")
    require("uvloop", extra="hub")
    from strata.hub.server import run
    from strata.hub.settings import SECTION, HubSettings

    flags["tls_names"] = list(flags["tls_names"]) or None
    dotted = {name.replace("tls_", "tls."): value for name, value in flags.items()}
    settings = load(HubSettings, section=SECTION, file=config, flags=dotted)
    configure_log(settings.log_format, settings.log_level)
    database = redact(settings.database) or "hub.db in the data folder"
    run(settings, lambda line: print_error(f"strata hub: {line}, database {database}"))
