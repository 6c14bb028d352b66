"""`strata logs`: prints or follows the log of an attempt (long polls of 20 s), escapes control characters, and says how
the attempt ended.
"""

from __future__ import annotations

import codecs
import re
import sys
import time
from typing import TYPE_CHECKING, Final

import click

from strata.base.errors import Code, StrataError
from strata.cli.completion import complete_jobs
from strata.cli.exit_codes import ExitCode
from strata.cli.fleet.client import (
    error_line,
    find_job,
    format_count,
    format_duration,
    hub_client,
    hub_option,
    names_gang,
)
from strata.cli.fleet.why import PendingReasons
from strata.cli.output import print_error, printable
from strata.cli.progress import ProgressLine

if TYPE_CHECKING:
    from strata.fleet.client.hub_client import HubClient, HubResponse
    from strata.fleet.wire.jobs import JobReply

FOLLOW_S: Final = 20.0
PREPARING_S: Final = 1.0
_ENDED: Final = ("completed", "failed", "cancelled")
_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*m")


@click.command()
@click.argument("job", shell_complete=complete_jobs)
@click.option(
    "-f", "--follow", is_flag=True, help="Follow the log until the job has ended, across attempts and restarts."
)
@click.option("--attempt", type=click.IntRange(min=1), metavar="N", help="Attempt to show (default: the last one).")
@click.option(
    "--tail", type=click.IntRange(min=0), metavar="LINES", help="Skip all but the last LINES lines written so far."
)
@hub_option
def logs(
    *,
    job: str,
    follow: bool,
    attempt: int | None,
    tail: int | None,
    context: str | None,
) -> None:
    """Print the log of JOB. Of a gang it is that of the first member.

    On a terminal colours are kept and other control characters are escaped. A file or a pipe gets the bytes unchanged.
    """
    with hub_client(context) as client:
        target = find_job(client, job).job
        if target.spec.gang is not None and names_gang(target, job):
            gang, label = target.spec.gang, printable(target.spec.label)
            others = f"; the others are {gang.name}/1 to {gang.name}/{gang.size - 1}" if gang.size > 1 else ""
            print_error(f"strata: the log of {label}, the first of {format_count(gang.size, 'member')}{others}")
        if not target.attempt and not follow:
            raise StrataError(
                Code.NOT_FOUND, f"{target.spec.label} has not started, so it has no log", hint=f"strata why {job}"
            )
        LogFollower(client, target.id, attempt or target.attempt).run(
            follow=follow, tail=tail, pinned=attempt is not None
        )


class LogFollower:
    """Prints a log stream from its own offset, so that after a restart of the hub it continues with the next byte."""

    def __init__(self, client: HubClient, job_id: str, attempt: int) -> None:
        self._client = client
        self._job_id = job_id
        self._attempt = attempt
        self._offset = 0
        self._away = False
        self._out = LogPrinter()
        self._line = ProgressLine("preparing")
        self._since_s = time.monotonic()
        self._reasons = PendingReasons(client, self._line.clear)

    def run(self, *, follow: bool, tail: int | None = None, pinned: bool = False) -> None:
        if tail is not None and self._attempt:
            self._print_tail(tail)
        more = True
        while more:
            try:
                more = self._advance(follow=follow, pinned=pinned)
            except StrataError as error:
                if not follow or error.code is not Code.UNAVAILABLE:
                    raise
                self._wait(error.message)
        self._line.clear()
        self._out.close()

    def _advance(self, *, follow: bool, pinned: bool) -> bool:
        """Print the next piece, or go to the next attempt. Whether there may be more."""
        if self._attempt and not self._print_piece(self._wait_s() if follow else 0.0, follow=follow):
            return True
        return follow and not pinned and self._next_attempt()

    def _print_piece(self, wait_s: float, *, follow: bool) -> bool:
        """Says whether the log has ended."""
        reply = self._read(self._offset, wait_s)
        if self._away:
            print_error("strata: the hub is back")
            self._away = False
        if reply.content:
            self._line.clear()
        elif follow and not self._offset:
            self._line.waiting(f"source, environment and data, {format_duration(time.monotonic() - self._since_s)}")
        self._out.write(reply.content)
        self._offset += len(reply.content)
        if follow:
            return reply.headers.get("x-strata-ended") == "true"
        return not reply.content

    def _wait_s(self) -> float:
        """Shorter while the attempt is prepared: a person looks at how long it takes."""
        return PREPARING_S if not self._offset and sys.stderr.isatty() else FOLLOW_S

    def _read(self, offset: int, wait_s: float) -> HubResponse:
        from strata.fleet.wire.streams import StreamQuery

        query = StreamQuery(attempt=self._attempt, offset=offset, wait_s=wait_s)
        return self._client.fetch(f"/v1/job/{self._job_id}/log", query=query, timeout_s=wait_s + 15.0)

    def _print_tail(self, lines: int) -> None:
        kept = b""
        while piece := self._read(self._offset, 0.0).content:
            self._offset += len(piece)
            kept = b"".join((kept + piece).splitlines(keepends=True)[-lines:]) if lines else b""
        self._out.write(kept)

    def _next_attempt(self) -> bool:
        """Wait for the next attempt; False if the job has ended."""
        from strata.fleet.wire.jobs import JobReply

        while True:
            reply = self._client.call("GET", f"/v1/job/{self._job_id}", JobReply)
            job = reply.job
            if job.attempt > self._attempt:
                if self._attempt:
                    ended = _describe_end(reply, self._attempt)
                    print_error(f"strata: attempt {self._attempt} has ended{ended}; attempt {job.attempt} begins")
                self._line.clear()
                self._attempt, self._offset, self._since_s = job.attempt, 0, time.monotonic()
                self._reasons.on_running()
                return True
            if job.status in _ENDED:
                return False
            if job.status == "pending":
                self._reasons.on_pending(job.id, job.spec.label)
            time.sleep(0.5)

    def _wait(self, reason: str) -> None:
        if not self._away:
            print_error(f"strata: {reason}; trying again")
        self._away = True
        time.sleep(1.0)


def _describe_end(reply: JobReply, number: int) -> str:
    attempt = next((each for each in reply.attempts if each.attempt == number and each.cause), None)
    if attempt is None:
        return ""
    error = error_line(attempt.error)
    return f" ({attempt.cause}: {printable(error)})" if error else f" ({attempt.cause})"


class LogPrinter:
    def __init__(self) -> None:
        self._raw = not sys.stdout.isatty()
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def write(self, content: bytes) -> None:
        try:
            if self._raw:
                sys.stdout.buffer.write(content)
            else:
                sys.stdout.write(escape_control(self._decode(content)))
            sys.stdout.flush()
        except BrokenPipeError as error:
            raise click.exceptions.Exit(ExitCode.BROKEN_PIPE) from error

    def close(self) -> None:
        if not self._raw:
            sys.stdout.write(escape_control(self._decode(b"", final=True)))
            sys.stdout.flush()


def escape_control(text: str) -> str:
    """Keep printable text, line ends, carriage returns and colours; escape all other control characters."""
    parts = []
    at = 0
    for colour in _COLOUR.finditer(text):
        parts += [_escape(text[at : colour.start()]), colour[0]]
        at = colour.end()
    return "".join([*parts, _escape(text[at:])])


def _escape(text: str) -> str:
    return "".join(char if char.isprintable() or char in "\n\t\r" else repr(char)[1:-1] for char in text)
