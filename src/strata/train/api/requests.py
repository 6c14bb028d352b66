"""The requests that this API server answered, counted for Prometheus."""

from __future__ import annotations

from typing import Final

from prometheus_client import Counter, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from strata.train.metrics import PREFIX, new_registry

UNKNOWN: Final = "none"


class Requests:
    def __init__(self) -> None:
        self._registry = new_registry()
        self._answered = Counter(
            f"{PREFIX}http_requests_total",
            "Requests that this API server answered, of callers it knows",
            ("server", "method", "route", "status"),
            registry=self._registry,
        )

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def counted(self, app: ASGIApp, number: int) -> ASGIApp:
        """The application, with every answer noted under the route it came by. Paths that are none are not told apart:
        whoever asks for many would make many labels. `number` is this server's: any of those on a port may be asked."""
        server = str(number)

        async def count(scope: Scope, receive: Receive, send: Send) -> None:
            async def noted(message: Message) -> None:
                if message["type"] == "http.response.start":
                    route = scope.get("route")
                    path = UNKNOWN if route is None else route.path
                    method = UNKNOWN if route is None else scope["method"]
                    self._answered.labels(server, method, path, message["status"]).inc()
                await send(message)

            await app(scope, receive, noted)

        return count
