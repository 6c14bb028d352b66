"""The bare side of `bench fleet` over HTTP: an empty Starlette route under the hub's own uvicorn settings.

It reads the body and answers with as many bytes as the hub would: `python -m bench.fleet.bare HOST:PORT PATH=BYTES …`.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any, NamedTuple

import uvloop
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router

from strata.base.unix_socket import listen_unix
from strata.http.server import HttpServer, listen
from strata.hub.server import _config
from strata.hub.settings import HubSettings


class Served(NamedTuple):
    """What the settings of the server are made from."""

    app: Router
    tls: None = None


def _route(path: str, size: int) -> Route:
    reply = b'"' + b"x" * (size - 2) + b'"'

    async def answer(request: Request) -> Response:
        await request.body()
        return Response(reply, media_type="application/json")

    return Route(path, answer, methods=["POST"])


async def main(address: str, path: str, *sizes: str) -> None:
    routes = [_route(path, int(size)) for path, _, size in (each.partition("=") for each in sizes)]
    hub: Any = Served(Router(routes))
    with listen(address) as listener, listen_unix(Path(path)) as unix:
        await HttpServer(_config(hub, HubSettings()), [unix]).serve(sockets=[listener])


if __name__ == "__main__":
    gc.collect()
    gc.freeze()
    uvloop.run(main(*sys.argv[1:]))
