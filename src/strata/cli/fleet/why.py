"""`strata why`: prints why a job does not run or how it ended; for a command that waits, after 3 s and every 3 s.
Reasons are made in `fleet.core.why`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import click

from strata.cli.completion import complete_jobs
from strata.cli.exit_codes import ExitCode
from strata.cli.fleet.client import error_line, find_job, hub_client, hub_view_options, wrap_text
from strata.cli.output import Format, print_data, print_error, printable, write

if TYPE_CHECKING:
    from collections.abc import Callable

    from strata.fleet.client.hub_client import HubClient
    from strata.fleet.core.why import Why
    from strata.fleet.wire.jobs import Job, JobReply

PRINT_AFTER_S: Final = 3.0
"""How long a job must be pending before its reason is printed."""
POLL_EVERY_S: Final = 3.0
_ENDED: Final = {"completed": "is completed", "failed": "has failed", "cancelled": "was cancelled"}


@click.command()
@click.argument("job", shell_complete=complete_jobs)
@hub_view_options
def why(job: str, context: str | None, output: Format) -> None:
    """Explain why JOB is not running, and what would help.

    Exit status 6 if no host can ever run it as things are.
    """
    with hub_client(context) as client:
        import msgspec

        from strata.fleet.core.why import Why

        reply = find_job(client, job)
        target = reply.job
        answer = client.call("GET", f"/v1/job/{target.id}/why", Why)
    if output.for_programs:
        print_data(
            {"id": target.id, "job": target.spec.label, "status": target.status} | msgspec.to_builtins(answer), output
        )
    else:
        _show_why(reply, answer)
    if target.status == "pending" and not answer.schedulable:
        click.get_current_context().exit(ExitCode.UNSCHEDULABLE)


def _show_why(reply: JobReply, answer: Why) -> None:
    from strata.fleet.core.job import TERMINAL

    error = error_line(reply.attempts[-1].error) if reply.attempts else ""
    if reply.job.status in TERMINAL:
        _show_end(reply.job, error)
    else:
        _show_obstacles(reply.job, error, answer)


def _show_end(job: Job, error: str) -> None:
    label = printable(job.spec.label)
    write(f"{label} {_ENDED[job.status]}{f': {printable(job.reason)}' if job.reason else ''}")
    if error and job.status == "failed":
        write(wrap_text(error, "  ", "    "))
        write(f"  full log: strata logs {label}")


def _show_obstacles(job: Job, error: str, answer: Why) -> None:
    write(f"{printable(job.spec.label)} is {job.status}: {printable(answer.headline)}")
    for obstacle in answer.obstacles:
        write(wrap_text(f"{obstacle.what}: {obstacle.detail}", "  ", "    "))
        if obstacle.fix:
            write(wrap_text(f"fix: {obstacle.fix}", "    ", "      "))
    if error and job.status == "pending":
        write(wrap_text(f"last error: {error}", "  ", "    "))
    if answer.eligible_hosts:
        write(wrap_text(f"eligible: {', '.join(answer.eligible_hosts)}", "  ", "    "))
    if len(answer.nearest_fix) > 1:
        write(wrap_text(f"what {answer.nearest_host} lacks: {'; '.join(answer.nearest_fix)}", "  ", "    "))


class PendingReasons:
    """Prints why a job that a command waits for is pending: after a moment, and again when the reason changes.

    `before` is called before each line.
    """

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
