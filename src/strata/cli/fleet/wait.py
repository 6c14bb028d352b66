"""`strata wait` and `strata apply --wait`: waits until jobs have ended, prints each end and the summary; refresh every
15 s.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

import click

from strata.base.errors import Code, StrataError
from strata.cli.completion import complete_jobs
from strata.cli.exit_codes import ExitCode
from strata.cli.fleet.client import all_hosts, error_line, find_members, hub_client, hub_option
from strata.cli.fleet.why import POLL_EVERY_S, PendingReasons
from strata.cli.output import print_error, printable
from strata.cli.progress import ProgressLine

if TYPE_CHECKING:
    from strata.fleet.client.hub_client import HubClient
    from strata.fleet.records import JobAttempt
    from strata.fleet.wire.jobs import JobReply

IDLE_S: Final = 5.0
"""When nothing changed for so long, check whether a host can run the jobs at all."""
REFRESH_EVERY_S: Final = 15.0
MOST_RUNNING: Final = 20
"""The progress of so many jobs is read for the bar."""
_ENDED: Final = ("completed", "failed", "cancelled")


@click.command()
@click.argument("jobs", nargs=-1, required=True, metavar="JOB...", shell_complete=complete_jobs)
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="Give up after SECONDS (exit status 101).",
)
@hub_option
def wait(jobs: tuple[str, ...], timeout_s: float | None, context: str | None) -> None:
    """Wait until every JOB has ended.

    Exit status: 0 if all are completed, 100 if one failed, 103 if one was cancelled, 101 after --timeout, and 6 if no
    host can run the remaining jobs.
    """
    with hub_client(context) as client:
        ids = [reply.job.id for text in jobs for reply in find_members(client, text)]
        ended = wait_for(client, ids, timeout_s)
    click.get_current_context().exit(ended)


def print_not_cancelled(what: str, job: str) -> None:
    """Print after Ctrl-C that queued jobs are not cancelled."""
    print_error(f"strata: {what} was not cancelled", hint=f"strata logs -f {job}, strata cancel {job}")


def wait_for(
    client: HubClient, ids: Iterable[str], timeout_s: float | None = None, *, only_news: bool = False
) -> ExitCode:
    """The exit status of the jobs. While the hub is away, it is retried.

    With `only_news`, jobs that were completed before are not printed.
    """
    watch = _Watch(client, ids, only_news=only_news)
    until_s = None if timeout_s is None else time.monotonic() + timeout_s
    try:
        while True:
            try:
                verdict = watch.run_once(until_s)
            except StrataError as error:
                if error.code is not Code.UNAVAILABLE:
                    raise
                watch.away(error.message)
                time.sleep(1.0)
                verdict = ExitCode.UNFINISHED if until_s is not None and time.monotonic() >= until_s else None
            if verdict is not None:
                return verdict
    finally:
        watch.clear()


class _Watch:
    """The jobs to wait for, and what was printed about them so far."""

    def __init__(self, client: HubClient, ids: Iterable[str], *, only_news: bool) -> None:
        self._client = client
        self._only_news = only_news
        self._states: dict[str, str] = dict.fromkeys(ids, "")
        self._labels: dict[str, str] = {}
        self._cursor = ""
        self._looked_at_s = 0.0
        self._changed_at_s = time.monotonic()
        self._hosts: dict[str, str] = {}
        self._away = False
        self._line = ProgressLine("waiting")
        self._running: dict[str, float] = {}
        """How far each of the jobs is that run, as its trainer says."""
        self._reasons = PendingReasons(client, self._line.clear)

    def run_once(self, until_s: float | None) -> ExitCode | None:
        from strata.fleet.wire.base import MAX_PAGE
        from strata.fleet.wire.events import EventsQuery, EventsReply

        if not self._cursor:
            newest = self._client.call("GET", "/v1/events", EventsReply, query=EventsQuery(after="newest"))
            self._cursor = newest.cursor
        if time.monotonic() - self._looked_at_s >= REFRESH_EVERY_S:
            self._refresh(self._open)
            self._looked_at_s = time.monotonic()
        self._away = False
        verdict = self._verdict()
        if verdict is not None:
            return verdict
        self._print_why()
        left_s = POLL_EVERY_S if until_s is None else min(POLL_EVERY_S, until_s - time.monotonic())
        if left_s <= 0:
            self.clear()
            print_error(f"strata: timeout; {self._counted()}")
            return ExitCode.UNFINISHED
        query = EventsQuery(after=self._cursor, wait_s=left_s, limit=MAX_PAGE)
        reply = self._client.call("GET", "/v1/events", EventsReply, query=query, timeout_s=left_s + 15.0)
        self._cursor = reply.cursor
        changed = {event.subject for event in reply.events}
        if sys.stderr.isatty():
            changed.update(itertools.islice(self._running, MOST_RUNNING))
        self._refresh([job_id for job_id in self._open if job_id in changed])
        return self._verdict()

    def _print_why(self) -> None:
        """Explain the first job if none is running: otherwise the others only wait for their turn."""
        rest = self._open
        if any(self._states[job_id] != "pending" for job_id in rest):
            self._reasons.on_running()
        elif rest:
            self._reasons.on_pending(rest[0], self._labels[rest[0]])

    def away(self, reason: str) -> None:
        if not self._away:
            self.clear()
            print_error(f"strata: {reason}; trying again")
        self._away = True
        self._looked_at_s = 0.0

    @property
    def _open(self) -> list[str]:
        return [job_id for job_id, state in self._states.items() if state not in _ENDED]

    def _refresh(self, ids: list[str]) -> None:
        from strata.fleet.wire.jobs import JobReply

        for job_id in ids:
            reply = self._client.call("GET", f"/v1/job/{job_id}", JobReply)
            before, self._states[job_id] = self._states[job_id], reply.job.status
            self._labels[job_id] = reply.job.spec.label
            self._running.pop(job_id, None)
            if reply.job.status == "running":
                self._running[job_id] = reply.job.progress.fraction if reply.job.progress else 0.0
            if before != reply.job.status:
                self._changed_at_s = time.monotonic()
                known = self._only_news and not before and reply.job.status == "completed"
                if reply.job.status in _ENDED and not known:
                    self._print_end(reply)
        self._draw()

    def _print_end(self, reply: JobReply) -> None:
        end = ""
        if reply.attempts:
            last = reply.attempts[-1]
            end = f" on {self._host_name(last.host_id)}{_describe_duration(last)}"
            if reply.job.status == "failed":
                end += f": {error_line(last.error) or reply.job.reason}"
        self.clear()
        print_error(f"{reply.job.status:9}  {reply.job.spec.label}{end}")

    def _host_name(self, host_id: str) -> str:
        if host_id not in self._hosts:
            self._hosts = {host.id: host.name for host in all_hosts(self._client)}
        return self._hosts.get(host_id, host_id)

    def _counted(self) -> str:
        counts = Counter(self._states.values())
        order = (*_ENDED, "running", "claimed", "pending")
        return ", ".join(f"{counts[name]} {name}" for name in order if counts[name])

    def _draw(self) -> None:
        done = sum(state in _ENDED for state in self._states.values()) + sum(self._running.values())
        self._line(done, len(self._states), self._counted())

    def clear(self) -> None:
        self._line.clear()

    def _verdict(self) -> ExitCode | None:
        rest = self._open
        if rest:
            if time.monotonic() - self._changed_at_s < IDLE_S or not self._is_unschedulable(rest):
                return None
            self.clear()
            label = printable(self._labels[rest[0]])
            print_error(f"strata: {self._counted()}; no host can run the remaining jobs", hint=f"strata why {label}")
        states = set(self._states.values())
        if "failed" in states:
            return ExitCode.FAILED
        if "cancelled" in states:
            return ExitCode.CANCELLED
        return ExitCode.UNSCHEDULABLE if rest else ExitCode.OK

    def _is_unschedulable(self, rest: list[str]) -> bool:
        from strata.fleet.core.why import Why

        if any(self._states[job_id] != "pending" for job_id in rest):
            return False
        self._changed_at_s = time.monotonic()
        return not any(self._client.call("GET", f"/v1/job/{job_id}/why", Why).schedulable for job_id in rest)


def _describe_duration(attempt: JobAttempt) -> str:
    if attempt.ended_at_s is None:
        return ""
    return f" in {attempt.ended_at_s - (attempt.started_at_s or attempt.claimed_at_s):.1f}s"
