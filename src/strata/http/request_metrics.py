"""Metrics of HTTP requests by route: counts and times."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final

from prometheus_client import CollectorRegistry
from starlette.types import Scope

from strata.http.metrics import MetricFactory, RecordCall
from strata.http.root import ROUTE, STARTED

NO_ROUTE: Final = "none"


class RequestMetrics:
    """`constant` are labels that all series of this process have."""

    def __init__(self, prefix: str, registry: CollectorRegistry, constant: Mapping[str, str] | None = None) -> None:
        constant = constant or {}
        self._constant = tuple(constant.values())
        self._calls = MetricFactory(prefix, registry).calls(
            ("http_requests_total", "Requests of callers that this server knows, by the status of the reply"),
            (
                "http_request_seconds",
                "From the head of such a request to the head of its reply, with what a long poll waits",
            ),
            *constant,
            "method",
            "route",
        )
        self._recorders: dict[tuple[str, str], RecordCall] = {}

    def count(self, scope: Scope, status: int) -> None:
        """Count a reply under its route. All paths that are none are one label, so clients cannot make new labels."""
        route = scope.get(ROUTE)
        key = NO_ROUTE if route is None else scope["method"], route or NO_ROUTE
        record = self._recorders.get(key)
        if record is None:
            record = self._recorders[key] = self._calls.recorder(*self._constant, *key)
        record(str(status), time.monotonic() - scope[STARTED])
