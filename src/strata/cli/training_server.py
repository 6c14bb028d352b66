"""Which training server a command means: by its address, by its settings, or by a login."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from strata.base.errors import Code, StrataError

if TYPE_CHECKING:
    from strata.fleet.client import HubClient

server_option = click.option(
    "--server",
    metavar="URL|CONFIG",
    help="The training server, or the settings of one that runs here; what 'strata login' chose unless set.",
)
key_file_option = click.option(
    "--key-file",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    metavar="FILE",
    help="A file with a key for it, such as api.key in its data folder.",
)
context_option = click.option(
    "--context", metavar="NAME", help="A server that you logged in to; the one chosen last unless set."
)


def connect_server(
    server: str | None, key_file: Path | None, context: str | None, *, own: str, timeout_s: float
) -> HubClient:
    """`server` is a URL or a file of settings. With the latter `own` is the credential in the server's data folder."""
    from strata.sdk.fleet import client_settings, connect

    if server is not None and Path(server).is_file():
        server, found = _local(Path(server), own)
        key_file = key_file or found
    settings = client_settings(context=context, url=server, token_path=key_file)
    return connect(settings, timeout_s=timeout_s, server="training server")


def _local(config: Path, own: str) -> tuple[str, Path]:
    """The Unix socket of the server of these settings, and a credential of whoever may read its folder."""
    from strata.base.unix_socket import format_unix_address
    from strata.train.settings import load_settings

    settings = load_settings(config)
    if not settings.api_socket.exists():
        raise StrataError(Code.UNAVAILABLE, f"no server runs in {settings.data}", hint=f"strata serve {config}")
    return format_unix_address(settings.api_socket), settings.data / own
