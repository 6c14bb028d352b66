"""`strata metrics`: tables and plots of metrics over time or of many jobs; at most 6 metrics side by side."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

import click

from strata.base.errors import Code, StrataError
from strata.cli.completion import complete_jobs
from strata.cli.fleet.client import all_jobs, find_job, hub_client, hub_view_options, print_rows, short_id
from strata.cli.layout import console_width
from strata.cli.output import Format, printable, write
from strata.cli.rows import Column, Rows

if TYPE_CHECKING:
    from strata.fleet.client.hub_client import HubClient
    from strata.fleet.wire.jobs import Job
    from strata.fleet.wire.streams import MetricSeries

MAX_METRICS: Final = 6
"""How many metrics a table shows."""
_MAX_PARAMETER_WIDTH: Final = 16
"""A parameter with longer values is not shown as a column."""


@click.command()
@click.argument("jobs", nargs=-1, metavar="[JOB]...", shell_complete=complete_jobs)
@click.option("--sweep", default="", metavar="NAME", help="Show all completed jobs of this sweep.")
@click.option("--model", default="", metavar="NAME", help="Show all completed jobs of this model.")
@click.option(
    "--sort",
    default="",
    metavar="METRIC",
    help="Sort by METRIC, the best first: of a loss or an error the lowest, else the highest.",
)
@click.option("--lowest/--highest", default=None, help="With --sort: lowest or highest value first.")
@click.option("--over-time", is_flag=True, help="Show every report of one JOB, not only the last value of each metric.")
@click.option("--plot", is_flag=True, help="Plot the metrics of each JOB over its steps.")
@click.option("--metric", "names", multiple=True, metavar="METRIC", help="With --plot: only METRIC; repeatable.")
@hub_view_options
def metrics(  # noqa: PLR0913 (the options of the command)
    *,
    jobs: tuple[str, ...],
    sweep: str,
    model: str,
    sort: str,
    lowest: bool | None,
    over_time: bool,
    plot: bool,
    names: tuple[str, ...],
    context: str | None,
    output: Format,
) -> None:
    """Show the metrics of jobs, side by side, over time or as plots.

    Without JOB: of all completed jobs. Parameters in which the jobs of a sweep differ are shown as columns. A table
    shows up to six metrics, first those that most jobs report; -o wide shows all.
    """
    if over_time and len(jobs) != 1:
        raise click.UsageError("--over-time needs exactly one JOB")
    if plot and not jobs:
        raise click.UsageError("--plot needs a JOB")
    with hub_client(context) as client:
        if over_time:
            _over_time(client, find_job(client, jobs[0]).job, output)
            return
        if plot:
            _plot([(job, _series(client, job, names)) for job in _chosen(client, jobs, "", "")], output)
            return
        chosen = _chosen(client, jobs, sweep, model)
        rows = [_compared(client, job) for job in chosen]
    if sort:
        from strata.fleet.core.objective import direction_of

        rows = _sorted(rows, sort, lowest=direction_of(sort) == "minimize" if lowest is None else lowest)
    one_sweep = len({job.spec.sweep for job in chosen}) == 1 and bool(chosen[0].spec.sweep)
    _show(rows, sort, _varied(rows) if one_sweep else {}, output)


def _chosen(client: HubClient, texts: tuple[str, ...], sweep: str, model: str) -> list[Job]:
    from strata.fleet.core.job import JobStatus
    from strata.fleet.wire.jobs import JobsQuery

    if texts:
        return [find_job(client, text).job for text in texts]
    jobs = all_jobs(client, JobsQuery(status=(JobStatus.COMPLETED,), sweep=sweep, model=model))
    return sorted(jobs, key=lambda job: _natural(job.spec.label))


def _sorted(rows: list[dict[str, Any]], metric: str, *, lowest: bool) -> list[dict[str, Any]]:
    """The rows that have the metric, the best first."""
    known = [row for row in rows if metric in row["metrics"]]
    if rows and not known:
        names = ", ".join(sorted(_reported(rows)))
        raise StrataError(Code.NOT_FOUND, f"no job has a metric {metric!r}", hint=f"metrics of these jobs: {names}")
    return sorted(known, key=lambda row: row["metrics"][metric], reverse=not lowest)


def _reported(rows: Iterable[dict[str, Any]]) -> Counter[str]:
    """The metrics of the rows, and how many rows have each."""
    return Counter(name for row in rows for name in row["metrics"])


def _natural(label: str) -> list[tuple[int, str]]:
    """So that search/9 comes before search/10."""
    return [(int(part) if part.isdecimal() else 0, part) for part in re.split(r"(\d+)", label)]


def _varied(rows: list[dict[str, Any]]) -> dict[str, int]:
    """The parameters in which the rows differ, with their widths, if they are short enough to be columns."""
    metrics = _reported(rows)
    names = dict.fromkeys(name for row in rows for name in row["hyper"] if name not in metrics)
    cells = {name: {_parameter(row["hyper"].get(name)) for row in rows} for name in names}
    widths = {name: max(len(name), *map(len, values)) for name, values in cells.items() if len(values) > 1}
    return {name: width for name, width in widths.items() if width <= _MAX_PARAMETER_WIDTH}


def _parameter(value: Any) -> str:
    import json

    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value)


def _compared(client: HubClient, job: Job) -> dict[str, Any]:
    from strata.fleet.wire.streams import MetricsQuery, MetricsReply

    last: dict[str, float] = {}
    if job.attempt:
        query = MetricsQuery(attempt=job.attempt, points=2)
        reply = client.call("GET", f"/v1/job/{job.id}/metrics", MetricsReply, query=query)
        last = {series.name: series.last for series in reply.series if series.last is not None}
    return {
        "id": job.id,
        "job": job.spec.label,
        "status": job.status,
        "hyper": job.spec.hyper,
        "seed": job.spec.seed,
        "metrics": last,
    }


def _reports(client: HubClient, job: Job) -> list[dict[str, Any]]:
    """All metrics of the last attempt."""
    from strata.fleet.core.report import MetricsReport, parse_lines
    from strata.fleet.wire.streams import StreamQuery

    if not job.attempt:
        return []
    content, offset = b"", 0
    while True:
        query = StreamQuery(attempt=job.attempt, offset=offset)
        piece = client.fetch(f"/v1/job/{job.id}/metrics", query=query).content
        if not piece:
            break
        content += piece
        offset += len(piece)
    reports, _ = parse_lines(content.splitlines())
    return [
        {"step": each.step, "at_s": each.at_s, "values": dict(each.values)}
        for each in reports
        if isinstance(each, MetricsReport)
    ]


def _over_time(client: HubClient, job: Job, output: Format) -> None:
    rows = _reports(client, job)
    names = list(dict.fromkeys(name for row in rows for name in row["values"]))
    columns = [Column("step", number=True), *(Column(name, number=True) for name in names)]
    print_rows(output, columns, ((row, _figures(row["values"])) for row in rows))


def _series(client: HubClient, job: Job, names: tuple[str, ...]) -> tuple[MetricSeries, ...]:
    """Fetches the series of all attempts, with as many points as two terminals have columns: the lowest and highest
    remain."""
    from strata.fleet.wire.streams import MetricsQuery, MetricsReply

    query = MetricsQuery(points=min(2000, 2 * console_width()), names=names)
    return client.call("GET", f"/v1/job/{job.id}/metrics", MetricsReply, query=query).series


def _plot(chosen: Sequence[tuple[Job, tuple[MetricSeries, ...]]], output: Format) -> None:
    """One plot for each metric of each job; those of one metric have one scale."""
    from strata.cli.plot import format_number, plot_lines

    if output.for_programs:
        import msgspec

        rows = [{"id": job.id, "job": job.spec.label, "series": msgspec.to_builtins(found)} for job, found in chosen]
        with Rows(output, (Column("id"),)) as printed:
            for row in rows:
                printed.add(row)
        return
    names = list(dict.fromkeys(series.name for _, found in chosen for series in found))
    if not names:
        raise StrataError(Code.NOT_FOUND, "these jobs have reported no metrics", hint="strata.fleet.trainer.report()")
    for name in names:
        drawn = [(job, series) for job, found in chosen for series in found if series.name == name and series.values]
        values = [value for _, series in drawn for value in series.values]
        for job, series in drawn:
            last = "not finite" if series.last is None else format_number(series.last)
            write(f"{printable(name)}  {printable(job.spec.label)}  last {last}, {series.count} values")
            for line in plot_lines(_over(series), series.values, console_width(), bounds=(min(values), max(values))):
                write(line)
            write("")


def _over(series: MetricSeries) -> list[float]:
    """Its steps; seconds since the first report, if not every report has a step."""
    steps = [float(step) for step in series.steps if step is not None]
    return steps if len(steps) == len(series.values) else [at_s - series.at_s[0] for at_s in series.at_s]


def _show(rows: list[dict[str, Any]], sort: str, varied: dict[str, int], output: Format) -> None:
    counts = _reported(rows)
    names = sorted(counts, key=lambda name: (name != sort, -counts[name], name))
    if output is not Format.WIDE:
        job_width = min(26, max((len(row["job"]) for row in rows), default=0))
        names = _fitting(names, console_width() - 12 - job_width - sum(width + 2 for width in varied.values()))
    columns = [Column("id"), Column("job", cut=26), *(Column(name, number=True) for name in (*varied, *names))]
    columns += [Column("hyper", wide=True), Column("status", wide=True)]
    print_rows(output, columns, ((row, _cells(row, varied)) for row in rows))


def _fitting(names: list[str], room: int) -> list[str]:
    """The metrics that fit into so many characters: the first one always, and no more than MAX_METRICS."""
    shown = names[:1]
    room -= sum(max(len(name), 6) + 2 for name in shown)
    for name in names[1:]:
        room -= max(len(name), 6) + 2
        if room >= 0 and len(shown) < MAX_METRICS:
            shown.append(name)
    return shown


def _cells(row: dict[str, Any], varied: Iterable[str]) -> dict[str, str]:
    parameters = {name: _parameter(row["hyper"].get(name)) for name in varied}
    return {"id": short_id(row["id"])} | parameters | _figures(row["metrics"])


def _figures(values: dict[str, Any]) -> dict[str, str]:
    return {name: f"{value:.4g}" if isinstance(value, float) else str(value) for name, value in values.items()}
