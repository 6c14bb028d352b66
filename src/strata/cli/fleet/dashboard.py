"""`strata dashboard`: a link that logs a browser in to the hub's dashboard, once."""

from __future__ import annotations

import click

from strata.cli.fleet.client import hub_client, hub_option


@click.command()
@hub_option
def dashboard(context: str | None) -> None:
    """Print a link that logs your browser in to the dashboard.

    The link works once, within two minutes. The session that it opens has your rights; over http, where any user of the
    machine may listen, it has those of a researcher at most.
    """
    from urllib.parse import urlencode

    from strata.base.errors import Code, StrataError
    from strata.base.unix_socket import SCHEME
    from strata.cli.output import write
    from strata.fleet.wire.identities import LoginCodeReply

    with hub_client(context) as client:
        reply = client.call("POST", "/v1/login/code", LoginCodeReply)
        url = reply.url if client.url.startswith(SCHEME) else client.url
    if not url:
        raise StrataError(Code.UNAVAILABLE, "this hub does not listen for browsers")
    write(f"{url}/login?{urlencode({'code': reply.code})}")
