"""The replies of this API server, counted for Prometheus."""

from __future__ import annotations

from typing import Final

from prometheus_client import Counter, generate_latest
from starlette.types import Scope

from strata.http.root import ROUTE
from strata.train.metrics_registry import PREFIX, new_registry

NO_ROUTE: Final = "none"


class RequestMetrics:
    """`number` is this server's among the API servers of a machine: any of them may be scraped."""

    def __init__(self, number: int = 0) -> None:
        self._server = str(number)
        self._registry = new_registry()
        self._replies = Counter(
            f"{PREFIX}http_requests_total",
            "Requests that this API server answered, of callers it knows",
            ("server", "method", "route", "status"),
            registry=self._registry,
        )

    def expose(self) -> bytes:
        return generate_latest(self._registry)

    def count(self, scope: Scope, status: int) -> None:
        """Count a reply under its route. All paths that are none are one label, so clients cannot make new labels."""
        route = scope.get(ROUTE)
        method = NO_ROUTE if route is None else scope["method"]
        self._replies.labels(self._server, method, route or NO_ROUTE, status).inc()
