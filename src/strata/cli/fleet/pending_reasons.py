"""Prints why a job that the user waits for is pending: after a moment, and again when the reason changes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from strata.cli.output import print_error, printable

if TYPE_CHECKING:
    from collections.abc import Callable

    from strata.fleet.client import HubClient
    from strata.fleet.core.why import Why

PRINT_AFTER_S: Final = 3.0
"""How long a job must be pending before its reason is printed."""
POLL_EVERY_S: Final = 3.0


class PendingReasons:
    """The reasons that one command has printed so far. `before` is called before each line."""

    def __init__(self, client: HubClient, before: Callable[[], None] = lambda: None) -> None:
        self._client = client
        self._before = before
        self._waiting = ""
        self._since_s = 0.0
        self._queried_at_s = 0.0
        self._printed: tuple[str, ...] = ()

    def on_pending(self, job_id: str, label: str) -> None:
        """Call repeatedly while this job is pending."""
        now_s = time.monotonic()
        if self._waiting != job_id:
            self._waiting, self._since_s, self._printed = job_id, now_s, ()
        if now_s - self._since_s < PRINT_AFTER_S or now_s - self._queried_at_s < POLL_EVERY_S:
            return
        from strata.fleet.core.why import Why

        self._queried_at_s = now_s
        answer = self._client.call("GET", f"/v1/job/{job_id}/why", Why)
        # Without the details: the remaining time of a backoff differs every time.
        reasons = (str(answer.schedulable), *(each.what for each in answer.obstacles))
        if reasons != self._printed:
            self._printed = reasons
            self._before()
            print_error(
                f"strata: {printable(label)} is pending: {printable(summarize(answer))}", hint=f"strata why {label}"
            )

    def on_running(self) -> None:
        self._waiting = ""


def summarize(answer: Why) -> str:
    details = [each.detail for each in answer.obstacles[:2] if each.detail != answer.headline]
    return "; ".join([answer.headline, *details])
