"""`strata goodput`: the printed parts of a job's time with bars, and its interruptions."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Any, Final

import click

from strata.cli.completion import complete_jobs
from strata.cli.fleet.client import find_job, hub_client, hub_view_options, short_id, wrap_text
from strata.cli.output import Format, print_data, printable, write

if TYPE_CHECKING:
    from strata.fleet.core.goodput import GoodputPart
    from strata.fleet.wire.history import GoodputReply

_WIDTH: Final = 32
_WORDS: Final[dict[GoodputPart, str]] = {
    "useful": "trained, and kept",
    "checkpoint": "saved checkpoints and results",
    "detect": "host silent, not yet given up",
    "restart": "waited to run again",
    "rolled_back": "trained, and lost",
    "waiting": "waited to run at first",
}


@click.command()
@click.argument("job", required=False, shell_complete=complete_jobs)
@click.option("--project", default="", metavar="NAME", help="Without JOB: only jobs of this project.")
@click.option(
    "--hours", default=24.0, show_default=True, type=click.FloatRange(0.1, 168), help="Without JOB: how far back."
)
@hub_view_options
def goodput(job: str | None, project: str, hours: float, context: str | None, output: Format) -> None:
    """Show where the time of JOB went, and what its interruptions cost.

    Without JOB: of all jobs that a host had in the last hours.
    """
    from strata.fleet.wire.history import GoodputQuery, GoodputReply

    with hub_client(context) as client:
        label = f"the last {hours:g} h"
        if job:
            target = find_job(client, job).job
            label = target.spec.label
            found = client.call("GET", f"/v1/job/{target.id}/goodput", GoodputReply)
        else:
            query = GoodputQuery(project=project, span_s=hours * 3600)
            found = client.call("GET", "/v1/goodput", GoodputReply, query=query)
    if output.for_programs:
        import msgspec

        value: dict[str, Any] = msgspec.to_builtins(found)
        print_data(value, output)
    else:
        _show(label, found)


def _show(label: str, found: GoodputReply) -> None:
    share = "nothing has run" if found.share is None else f"{found.share:.1%} of the time with a host was useful"
    write(f"{printable(label)}: {share}")
    for part, words in _WORDS.items():
        part_s = found.seconds.get(part, 0.0)
        bar = "█" * round(_WIDTH * part_s / found.wall_s) if found.wall_s else ""
        write(f"  {part:<12} {_span(part_s):>9}  {bar:<{_WIDTH}}  {words}".rstrip())
    write(f"  {'sum':<12} {_span(found.wall_s):>9}")
    if not found.whole:
        write("  Only the last attempts were added up: there were more.")
    for each in found.interruptions:
        at = datetime.datetime.fromtimestamp(each.at_s, datetime.UTC).strftime("%m-%d %H:%M:%S")
        where = f" of {short_id(each.job_id)}" if each.job_id else ""
        text = (
            f"{at} attempt {each.attempt}{where} on {each.host or each.host_id} ended ({each.cause}): cost"
            f" {_span(each.cost_s)} = {_span(each.detect_s)} to detect, {_span(each.restart_s)} to restart,"
            f" {_span(each.rolled_back_s)} rolled back"
        )
        write(wrap_text(text, "  ", "    "))


def _span(seconds: float) -> str:
    """1.5 s, 12 m 05 s, 3 h 20 m."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} m {rest:02} s"
    return f"{minutes // 60} h {minutes % 60:02} m"
