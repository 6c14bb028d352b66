"""`strata why`: what keeps a job from running, host by host, or what ended it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click

from strata.cli.exits import Exit
from strata.cli.fleet.asking import asking, error_line, hub_option, job_named, show_one, wrapped
from strata.cli.output import Format, output_option, printable, write

if TYPE_CHECKING:
    from strata.fleet import wire
    from strata.fleet.core.why import Why

_ENDED: Final = {"completed": "is completed", "failed": "has failed", "cancelled": "was cancelled"}


@click.command()
@click.argument("job")
@hub_option
@output_option
def why(job: str, context: str | None, output: Format) -> None:
    """Explain why JOB is not running, and what would help.

    Exits with 6 if no host will ever take it as things are.
    """
    with asking(context) as client:
        import msgspec

        from strata.fleet.core.why import Why

        asked = job_named(client, job)
        found = asked.job
        answer = client.call("GET", f"/v1/job/{found.id}/why", Why)
    if output in (Format.JSON, Format.JSONL):
        show_one(
            {"id": found.id, "job": found.spec.label, "status": found.status} | msgspec.to_builtins(answer), output
        )
    else:
        _show_why(asked, answer)
    if found.status == "pending" and not answer.schedulable:
        click.get_current_context().exit(Exit.UNSCHEDULABLE)


def _show_why(asked: wire.JobReply, answer: Why) -> None:
    from strata.fleet.core.job import TERMINAL

    job = asked.job
    label = printable(job.spec.label)
    if job.status in TERMINAL:
        write(f"{label} {_ENDED[job.status]}{f': {printable(job.reason)}' if job.reason else ''}")
        error = error_line(asked.attempts[-1].error) if asked.attempts else ""
        if error and job.status == "failed":
            write(wrapped(error, "  ", "    "))
            write(f"  all of it: strata logs {label}")
        return
    write(f"{label} is {job.status}: {printable(answer.headline)}")
    for obstacle in answer.obstacles:
        write(wrapped(f"{obstacle.what}: {obstacle.detail}", "  ", "    "))
        if obstacle.fix:
            write(wrapped(f"fix: {obstacle.fix}", "    ", "      "))
    error = error_line(asked.attempts[-1].error) if asked.attempts and job.status == "pending" else ""
    if error:
        write(wrapped(f"last error: {error}", "  ", "    "))
    if answer.eligible_hosts:
        write(wrapped(f"eligible: {', '.join(answer.eligible_hosts)}", "  ", "    "))
    if len(answer.nearest_fix) > 1:
        write(wrapped(f"all that {answer.nearest_host} lacks: {'; '.join(answer.nearest_fix)}", "  ", "    "))
