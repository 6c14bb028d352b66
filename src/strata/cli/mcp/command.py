"""`strata mcp`: the options of the command, and the private file with the bearer token of HTTP clients."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from strata.base.errors import Code, StrataError
from strata.cli.fleet.client import hub_client, hub_option
from strata.cli.options import FILE
from strata.cli.output import print_error

if TYPE_CHECKING:
    from strata.base.secret import Secret

_SHORTEST: Final = 32


@click.command()
@click.option("--write", is_flag=True, help="Offer run, cancel and sample too.")
@click.option(
    "--http", "address", metavar="HOST:PORT", help="Serve HTTP on this loopback address, not stdin and stdout."
)
@click.option(
    "--bearer-file",
    type=FILE,
    metavar="FILE",
    help="With --http: the token that clients must send; made if FILE is not there.",
)
@hub_option
def mcp(*, write: bool, address: str | None, bearer_file: Path | None, context: str | None) -> None:
    """Let AI agents use the hub by Model Context Protocol.

    Without --write they read only: list, why, logs, metrics, checkpoints, plan. What they may do and see is what the
    key of the context may. Text of jobs comes marked as untrusted.
    """
    if (address is None) != (bearer_file is None):
        raise click.UsageError("--http and --bearer-file belong together")
    from strata.base.support import report_experimental
    from strata.cli.extras import require
    from strata.cli.options import configure_log

    require("mcp", extra="mcp")
    configure_log(None, "warning")
    report_experimental(("strata mcp",))
    with hub_client(context) as client:
        import asyncio

        from strata.cli.mcp.server import build_server, serve_on, serve_stdio

        server = build_server(client, write=write)
        if address is None or bearer_file is None:
            asyncio.run(serve_stdio(server))
            return
        from strata.base.loopback import is_loopback_address
        from strata.http.server import listen, url_of

        if not is_loopback_address(address) or address.startswith("unix:"):
            raise StrataError(
                Code.INVALID,
                f"{address} is not loopback, and this is not encrypted",
                hint="--http 127.0.0.1:PORT; clients elsewhere come through ssh -L PORT:127.0.0.1:PORT",
            )
        bearer = _read_bearer(bearer_file)
        with listen(address, free_port="--http 127.0.0.1:0") as listener:
            print_error(f"strata mcp: listening on {url_of(listener)}/mcp; the bearer token is in {bearer_file}")
            asyncio.run(serve_on(server, listener, bearer))


def _read_bearer(path: Path) -> Secret:
    from strata.base.secret import read_secret

    if not path.exists():
        import secrets

        from strata.base.atomic import write_file

        write_file(path, f"{secrets.token_urlsafe(_SHORTEST)}\n".encode())
    bearer = read_secret(path)
    if len(bearer.reveal()) < _SHORTEST:
        raise StrataError(Code.INVALID, f"the token in {path} has less than {_SHORTEST} characters")
    return bearer
