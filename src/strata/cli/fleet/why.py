"""`strata why`: why a job is not running, host by host, or how it ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click

from strata.cli.exit_codes import ExitCode
from strata.cli.fleet.client import error_line, find_job, hub_client, hub_option, print_value, wrap_text
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

    Exit status 6 if no host can ever run it as things are.
    """
    with hub_client(context) as client:
        import msgspec

        from strata.fleet.core.why import Why

        reply = find_job(client, job)
        target = reply.job
        answer = client.call("GET", f"/v1/job/{target.id}/why", Why)
    if output in (Format.JSON, Format.JSONL):
        print_value(
            {"id": target.id, "job": target.spec.label, "status": target.status} | msgspec.to_builtins(answer), output
        )
    else:
        _show_why(reply, answer)
    if target.status == "pending" and not answer.schedulable:
        click.get_current_context().exit(ExitCode.UNSCHEDULABLE)


def _show_why(reply: wire.JobReply, answer: Why) -> None:
    from strata.fleet.core.job import TERMINAL

    job = reply.job
    label = printable(job.spec.label)
    if job.status in TERMINAL:
        write(f"{label} {_ENDED[job.status]}{f': {printable(job.reason)}' if job.reason else ''}")
        error = error_line(reply.attempts[-1].error) if reply.attempts else ""
        if error and job.status == "failed":
            write(wrap_text(error, "  ", "    "))
            write(f"  full log: strata logs {label}")
        return
    write(f"{label} is {job.status}: {printable(answer.headline)}")
    for obstacle in answer.obstacles:
        write(wrap_text(f"{obstacle.what}: {obstacle.detail}", "  ", "    "))
        if obstacle.fix:
            write(wrap_text(f"fix: {obstacle.fix}", "    ", "      "))
    error = error_line(reply.attempts[-1].error) if reply.attempts and job.status == "pending" else ""
    if error:
        write(wrap_text(f"last error: {error}", "  ", "    "))
    if answer.eligible_hosts:
        write(wrap_text(f"eligible: {', '.join(answer.eligible_hosts)}", "  ", "    "))
    if len(answer.nearest_fix) > 1:
        write(wrap_text(f"what {answer.nearest_host} lacks: {'; '.join(answer.nearest_fix)}", "  ", "    "))
