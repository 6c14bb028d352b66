"""`strata login` and `strata contexts`: choosing a server, its token, and the pin of its certificate authority."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from strata.base.errors import Code, StrataError
from strata.base.secret import Secret, read_secret
from strata.cli.fleet.client import complete_contexts, format_count
from strata.cli.output import Format, output_option, print_error
from strata.cli.rows import Column, Rows

if TYPE_CHECKING:
    from strata.fleet.client.hub_client import HubClient
    from strata.sdk.fleet import ClientSettings


@click.command()
@click.argument("url")
@click.option("--name", metavar="NAME", help="Name of the context (default: the host in URL).")
@click.option(
    "--token-file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Read the token or key from FILE (default: a prompt, or stdin).",
)
@click.option(
    "--ca-pin", metavar="SHA256", help="Expected pin of the hub's certificate authority; its operator has it."
)
@click.option(
    "--ca",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    metavar="FILE",
    help="Trust the certificate authority in this PEM file.",
)
def login(url: str, name: str | None, token_file: Path | None, ca_pin: str | None, ca: Path | None) -> None:
    """Log in to the server at URL and use it for all other commands.

    URL is https://…, unix:PATH for the socket in the data folder of a hub on this machine, or http://… on loopback.
    Over http only keys of viewers and researchers are sent, because any user of the machine may listen there.

    The token is read from a file, from stdin or from a prompt, never from an argument, and stored in a file that only
    you can read. With https the server's certificate authority is trusted after you have compared its pin.
    """
    from urllib.parse import urlsplit

    from strata.base.unix_socket import SCHEME, format_unix_address, parse_unix_address
    from strata.fleet.client.hub_client import RETRY_FOR_S, HubClient, TlsFiles
    from strata.sdk.fleet import ClientContext, client_settings, keep_authority, keep_secret, save_context

    # Absolute, because other commands may run in another folder.
    url = format_unix_address(parse_unix_address(url)) if url.startswith(SCHEME) else url.rstrip("/")
    settings = client_settings()
    name = name or urlsplit(url).hostname or "hub"
    pem = _authority(url, ca_pin, ca)
    authority = keep_authority(settings, name, pem) if pem else None
    secret = read_secret(token_file) if token_file else _ask_token()
    tls = TlsFiles(ca=authority) if authority else None
    _check_listener(url)
    with HubClient(url, bearer=secret, tls=tls, retry_for_s=RETRY_FOR_S) as client:
        try:
            description = _describe_server(client)
        except StrataError as error:
            if error.code is not Code.UNAUTHENTICATED:
                raise
            hint = "copy the whole key; an admin lists the valid ones with 'strata keys list'"
            raise StrataError(error.code, f"the server at {url} does not know this key", hint=hint) from error
    kept = keep_secret(settings, name, secret)
    save_context(settings, name, ClientContext(url=url, token_file=str(kept), ca=str(authority or "")))
    print_error(f"strata: {name} is the current context: {url}, {description}")


@click.command()
@click.argument("name", required=False, shell_complete=complete_contexts)
@output_option
def contexts(name: str | None, output: Format) -> None:
    """List the servers you logged in to, or switch to the one called NAME."""
    from strata.sdk.fleet import choose_context, client_settings, shown_contexts

    settings: ClientSettings = client_settings()
    if name is not None:
        choose_context(settings, name)
    with Rows(output, (Column("name"), Column("current"), Column("url"), Column("token_file", wide=True))) as rows:
        for row in shown_contexts(settings):
            rows.add(row)


def _check_listener(url: str) -> None:
    """UNAVAILABLE if nothing listens on this port of this machine: that is said before anything about the key."""
    from urllib.parse import urlsplit

    from strata.base.loopback import is_loopback_host
    from strata.fleet.client.hub_client import HubClient

    # Nothing is sent in the clear to other machines, not even a question.
    if not url.startswith("http:") or not is_loopback_host(urlsplit(url).hostname or ""):
        return
    with HubClient(url, server="server") as client:
        try:
            client.fetch("/v1/health")
        except StrataError as error:
            # What a server replies to a caller without a key does not matter here.
            if error.code is Code.UNAVAILABLE:
                raise


def _describe_server(client: HubClient) -> str:
    """The server at the URL: a hub, or a training server, which authenticates in the same way."""
    from strata.fleet.wire.overview import StatusReply
    from strata.train.status.reports import ServerStatus

    try:
        hub = client.call("GET", "/v1/status", StatusReply)
    except StrataError as error:
        if error.code is not Code.NOT_FOUND:
            raise
        server = client.call("GET", "/api/v1/status", ServerStatus)
        return f"a server that trains {server.base_model}, {format_count(server.models, 'model')}"
    return f"{format_count(hub.hosts, 'host')}, {format_count(sum(hub.by_status.values()), 'job')}"


def _authority(url: str, pin: str | None, file: Path | None) -> bytes | None:
    if not url.startswith("https:"):
        return None
    from strata.sdk.fleet import check_pin, fetch_authority, pin_of

    pem = file.read_bytes() if file is not None else fetch_authority(url)
    actual_pin = pin_of(pem)
    if pin is not None:
        check_pin(pem, pin, url)
    elif file is None:
        if not sys.stdin.isatty():
            raise StrataError(
                Code.INVALID,
                f"the certificate authority of {url} is not trusted yet; its pin is {actual_pin}",
                hint="compare it with the pin that the hub prints, then pass --ca-pin PIN or --ca FILE",
            )
        print_error(f"strata: the certificate authority of {url} has the pin\n  {actual_pin}")
        print_error("strata: the hub prints its pin when it starts, and 'strata invite' shows it")
        click.confirm("Is this the pin that the hub's operator gave you?", abort=True, err=True)
    return pem


def _ask_token() -> Secret:
    text = click.prompt("Token", hide_input=True, err=True) if sys.stdin.isatty() else sys.stdin.readline(65_536)
    if not text.strip():
        raise StrataError(Code.INVALID, "there is no token", hint="pass --token-file FILE, or write it to stdin")
    return Secret(text.strip())
