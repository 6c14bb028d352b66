"""`strata dashboard`: prints a link that logs a browser in once, within two minutes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import click

from strata.cli.fleet.client import hub_client, hub_option

if TYPE_CHECKING:
    from strata.fleet.client.hub_client import HubClient


class Login(NamedTuple):
    url: str
    """Where browsers reach the hub."""
    link: str
    """It works once, within two minutes."""


@click.command()
@hub_option
def dashboard(context: str | None) -> None:
    """Print a link that logs your browser in to the dashboard.

    The link works once, within two minutes. The session that it opens has your rights; over http, where any user of the
    machine may listen, it has those of a researcher at most.
    """
    from strata.cli.output import write

    with hub_client(context) as client:
        write(request_login(client).link)


def request_login(client: HubClient) -> Login:
    """A link for a browser, with the rights of the client. UNAVAILABLE if no browser can reach the hub."""
    from urllib.parse import urlencode

    from strata.base.errors import Code, StrataError
    from strata.base.unix_socket import SCHEME
    from strata.fleet.wire.identities import LoginCodeReply

    reply = client.call("POST", "/v1/login/code", LoginCodeReply)
    url = reply.url if client.url.startswith(SCHEME) else client.url
    if not url:
        raise StrataError(Code.UNAVAILABLE, "this hub does not listen for browsers")
    return Login(url, f"{url}/login?{urlencode({'code': reply.code})}")
