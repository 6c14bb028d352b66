"""Counts and times of the HTTP requests of a server, by route."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram
from starlette.types import Scope

from strata.http.metrics import TIMES_S
from strata.http.root import ROUTE, STARTED

NO_ROUTE: Final = "none"


class RequestMetrics:
    """`constant` are labels that all series of this process have."""

    def __init__(self, prefix: str, registry: CollectorRegistry, constant: Mapping[str, str] | None = None) -> None:
        self._constant = dict(constant or {})
        labels = (*self._constant, "method", "route")
        self._replies = Counter(
            f"{prefix}http_requests_total",
            "Requests of callers that this server knows, by the status of the reply",
            (*labels, "status"),
            registry=registry,
        )
        self._times = Histogram(
            f"{prefix}http_request_seconds",
            "From the head of such a request to the head of its reply, with what a long poll waits",
            labels,
            registry=registry,
            buckets=TIMES_S,
        )
        self._children: dict[tuple[str, str, int], tuple[Counter, Histogram]] = {}

    def count(self, scope: Scope, status: int) -> None:
        """Count a reply under its route. All paths that are none are one label, so clients cannot make new labels."""
        route = scope.get(ROUTE)
        key = NO_ROUTE if route is None else scope["method"], route or NO_ROUTE, status
        children = self._children.get(key)
        if children is None:
            children = self._children[key] = self._series(*key)
        replies, times = children
        replies.inc()
        times.observe(time.monotonic() - scope[STARTED])

    def _series(self, method: str, route: str, status: int) -> tuple[Counter, Histogram]:
        named = {**self._constant, "method": method, "route": route}
        return self._replies.labels(**named, status=status), self._times.labels(**named)
