"""The type of the callback that reports the progress of a long operation."""

from __future__ import annotations

from collections.abc import Callable

ReportProgress = Callable[[int, int], None]
"""Called with what is done and with the total, in bytes or in pieces; often, so it has to be cheap."""


def no_progress(done: int, total: int) -> None:
    """Shows nothing, for callers without a terminal."""
