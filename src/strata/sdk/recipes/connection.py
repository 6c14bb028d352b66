"""The two clients of a run: for operations (reply timeout 600 s), and for checkpoints and files."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import httpx

from strata.base.errors import Code, StrataError
from strata.fleet.client.hub_client import HubClient
from strata.sdk.checkpoints import served_models
from strata.sdk.fleet import ClientSettings, authority_of, connect, current_context, token_of
from strata.sdk.train import TrainingServer

REPLY_S: Final = 600.0
"""The server verifies an adapter before it replies."""


@dataclass(frozen=True)
class ServerConnection:
    server: TrainingServer
    files: HubClient
    base_models: list[str]
    """The models that the server trains."""


@contextmanager
def open_connection(settings: ClientSettings) -> Iterator[ServerConnection]:
    """A session with the server that the settings choose, until the block ends."""
    context = current_context(settings)
    key = token_of(settings, context)
    if key is None:
        raise StrataError(
            Code.UNAUTHENTICATED, f"there is no key for {context.url}", hint="--key-file FILE, or strata login URL"
        )
    transport = None
    if context.url.startswith("https:"):
        trusted = ssl.create_default_context(cafile=authority_of(settings, context))
        transport = httpx.HTTPTransport(verify=trusted)
    with connect(settings, timeout_s=REPLY_S, server="training server") as files:
        # This client gives up at once where no server is, or one whose certificate or key is wrong; the other retries.
        base_models = served_models(files)
        with TrainingServer(context.url, key.reveal(), transport=transport) as server:
            yield ServerConnection(server, files, base_models)
