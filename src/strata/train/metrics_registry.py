"""Prometheus registry and prefix that all processes of the training server share."""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry, disable_created_metrics

PREFIX: Final = "strata_train_"
MEDIA_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


def new_registry() -> CollectorRegistry:
    """Without the `_created` series of each counter: it would repeat the start of the process."""
    disable_created_metrics()  # type: ignore[no-untyped-call]
    return CollectorRegistry()
