"""`strata login` and `strata contexts`: which hub the other commands speak to, and with whose token."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from strata.base.errors import Code, StrataError
from strata.base.secret import Secret, read_secret
from strata.cli.output import Column, Format, Rows, output_option, print_error

if TYPE_CHECKING:
    from strata.fleet.client import HubClient
    from strata.sdk.fleet import ClientSettings


@click.command()
@click.argument("url")
@click.option("--name", metavar="NAME", help="What to call it; the host in URL unless set.")
@click.option(
    "--token-file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Where the token or key lies; without it you are asked, or stdin is read.",
)
@click.option("--ca-pin", metavar="SHA256", help="Pin of the hub's authority, as its operator tells it.")
@click.option(
    "--ca",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    metavar="FILE",
    help="PEM file with the authority, if you have it.",
)
def login(url: str, name: str | None, token_file: Path | None, ca_pin: str | None, ca: Path | None) -> None:
    """Choose the hub at URL for all other commands.

    URL is https://…, unix:PATH for the socket in the data folder of a hub on this machine, or http://… on loopback,
    where only a key of a viewer or a researcher is sent: any user of the machine may listen there.

    The token is never an argument: it comes from a file, from stdin, or from a prompt, and is kept in a file that only
    you can read. With https the hub's own authority is trusted after you have compared its pin.
    """
    from urllib.parse import urlsplit

    from strata.base.unix_socket import SCHEME, format_unix_address, parse_unix_address
    from strata.fleet.client import HubClient, TlsFiles
    from strata.sdk.fleet import ClientContext, client_settings, keep_authority, keep_secret, save_context

    # Whatever folder the other commands are run in.
    url = format_unix_address(parse_unix_address(url)) if url.startswith(SCHEME) else url.rstrip("/")
    settings = client_settings()
    name = name or urlsplit(url).hostname or "hub"
    pem = _authority(url, ca_pin, ca)
    authority = keep_authority(settings, name, pem) if pem else None
    secret = read_secret(token_file) if token_file else _ask_token()
    tls = TlsFiles(ca=authority) if authority else None
    with HubClient(url, bearer=secret, tls=tls) as client:
        found = _greeted(client)
    kept = keep_secret(settings, name, secret)
    save_context(settings, name, ClientContext(url=url, token_file=str(kept), ca=str(authority or "")))
    print_error(f"strata: {name} is chosen: {url}, {found}")


@click.command()
@click.argument("name", required=False)
@output_option
def contexts(name: str | None, output: Format) -> None:
    """List the hubs you logged in to, or choose the one called NAME."""
    from strata.sdk.fleet import choose_context, client_settings, shown_contexts

    settings: ClientSettings = client_settings()
    if name is not None:
        choose_context(settings, name)
    with Rows(output, (Column("name"), Column("current"), Column("url"), Column("token_file", wide=True))) as rows:
        for row in shown_contexts(settings):
            rows.add(row)


def _greeted(client: HubClient) -> str:
    """What answers there: a hub, or a training server, which takes keys in the same way."""
    from strata.fleet.wire import StatusReply
    from strata.train.core.status import ServerStatus

    try:
        hub = client.call("GET", "/v1/status", StatusReply)
    except StrataError as error:
        if error.code is not Code.NOT_FOUND:
            raise
        server = client.call("GET", "/api/v1/status", ServerStatus)
        return f"a server that trains {server.base_model}, {_count(server.models, 'model')}"
    return f"{_count(hub.hosts, 'host')}, {_count(sum(hub.by_status.values()), 'job')}"


def _authority(url: str, pin: str | None, file: Path | None) -> bytes | None:
    if not url.startswith("https:"):
        return None
    from strata.sdk.fleet import check_pin, fetch_authority, pin_of

    pem = file.read_bytes() if file is not None else fetch_authority(url)
    found = pin_of(pem)
    if pin is not None:
        check_pin(pem, pin, url)
    elif file is None:
        if not sys.stdin.isatty():
            raise StrataError(
                Code.INVALID,
                f"the authority of {url} has the pin {found}, and nobody has compared it",
                hint="give --ca-pin, or --ca FILE",
            )
        print_error(f"strata: the authority of {url} has the pin\n  {found}")
        print_error("strata: the hub prints its pin when it starts, and 'strata invite' shows it")
        click.confirm("Is it what the hub's operator told you?", abort=True, err=True)
    return pem


def _ask_token() -> Secret:
    text = click.prompt("Token", hide_input=True, err=True) if sys.stdin.isatty() else sys.stdin.readline(65_536)
    if not text.strip():
        raise StrataError(Code.INVALID, "no token was given", hint="--token-file FILE, or on stdin")
    return Secret(text.strip())


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
