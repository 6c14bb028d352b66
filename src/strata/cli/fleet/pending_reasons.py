"""Why a job that somebody waits for does not run: said after a moment, and again when the reason is another."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from strata.cli.output import print_error, printable

if TYPE_CHECKING:
    from collections.abc import Callable

    from strata.fleet.client import HubClient
    from strata.fleet.core.why import Why

SAY_AFTER_S: Final = 3.0
"""A job that has waited for so long is explained."""
POLL_EVERY_S: Final = 3.0


class PendingReasons:
    """What was said of the jobs of one command. `before` is called before a line is printed."""

    def __init__(self, client: HubClient, before: Callable[[], None] = lambda: None) -> None:
        self._client = client
        self._before = before
        self._waiting = ""
        self._since_s = 0.0
        self._asked_at_s = 0.0
        self._said: tuple[str, ...] = ()

    def waits(self, job_id: str, label: str) -> None:
        """Call it again and again while this job is pending."""
        now_s = time.monotonic()
        if self._waiting != job_id:
            self._waiting, self._since_s, self._said = job_id, now_s, ()
        if now_s - self._since_s < SAY_AFTER_S or now_s - self._asked_at_s < POLL_EVERY_S:
            return
        from strata.fleet.core.why import Why

        self._asked_at_s = now_s
        answer = self._client.call("GET", f"/v1/job/{job_id}/why", Why)
        # Not the words: how long a back-off still is differs every time.
        found = (str(answer.schedulable), *(each.what for each in answer.obstacles))
        if found != self._said:
            self._said = found
            self._before()
            print_error(
                f"strata: {printable(label)} is pending: {printable(in_a_line(answer))}", hint=f"strata why {label}"
            )

    def runs(self) -> None:
        self._waiting = ""


def in_a_line(answer: Why) -> str:
    details = [each.detail for each in answer.obstacles[:2] if each.detail != answer.headline]
    return "; ".join([answer.headline, *details])
