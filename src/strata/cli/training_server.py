"""Options that select a training server (URL, settings file, login), and the connection to it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeGuard

import click

from strata.base.errors import Code, StrataError
from strata.cli.fleet.client import complete_contexts
from strata.cli.options import combine

if TYPE_CHECKING:
    from strata.fleet.client.hub_client import HubClient
    from strata.sdk.fleet import ClientSettings

server_option = click.option(
    "--server",
    metavar="URL|CONFIG",
    help="URL of the training server, or the settings file of one on this machine (default: the current context).",
)
key_file_option = click.option(
    "--key-file",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    metavar="FILE",
    help="Read the API key from FILE, for example api.key in the server's data folder.",
)
context_option = click.option(
    "--context",
    metavar="NAME",
    shell_complete=complete_contexts,
    help="Use the server that you logged in to as NAME (default: the current context).",
)


server_options: Final = combine(server_option, key_file_option, context_option)
"""All three, which `connect_server` takes by their names."""


def connect_server(
    server: str | None, key_file: Path | None, context: str | None, *, own: str = "api.key", timeout_s: float
) -> HubClient:
    """`server` is a URL or a settings file. For the latter `own` is the name of the credential in its data folder."""
    from strata.sdk.fleet import connect

    settings = choose_server(server, key_file, context, own=own)
    return connect(settings, timeout_s=timeout_s, server="training server")


def choose_server(
    server: str | None, key_file: Path | None, context: str | None = None, *, own: str = "api.key"
) -> ClientSettings:
    from strata.sdk.fleet import client_settings

    if is_settings_file(server, context):
        server, credential = _local(Path(server), own)
        key_file = key_file or credential
    return client_settings(context=context, url=server, token_path=key_file)


def is_settings_file(server: str | None, context: str | None) -> TypeGuard[str]:
    """Returns whether `server` names the settings of a server on this machine, which a context cannot be."""
    if server is None or not Path(server).is_file():
        return False
    if context is not None:
        raise click.UsageError(f"--context {context} names a server, and so does the settings file {server}")
    return True


def _local(config: Path, own: str) -> tuple[str, Path]:
    """The Unix socket of the server with these settings, and a credential from its data folder."""
    from strata.base.unix_socket import format_unix_address
    from strata.train.settings import load_settings

    settings = load_settings(config)
    if not settings.api_socket.exists():
        raise StrataError(
            Code.UNAVAILABLE,
            f"no training server is running with the data folder {settings.data}",
            hint=f"strata serve {config}",
        )
    return format_unix_address(settings.api_socket), settings.data / own
