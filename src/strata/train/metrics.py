"""What the metrics of all processes of the server have in common."""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry, disable_created_metrics

PREFIX: Final = "strata_train_"
MEDIA_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


def new_registry() -> CollectorRegistry:
    """Without a series beside each counter that says when it was made: it is when the process was."""
    disable_created_metrics()  # type: ignore[no-untyped-call]
    return CollectorRegistry()
