"""`strata top`: the live screen of a fleet: attention, running and waiting jobs, hosts; rows and bars."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import click

from strata.cli.fleet.client import all_hosts, all_jobs, format_count, format_duration, hub_client, hub_option, short_id
from strata.cli.layout import Cell, Screen, ScreenColumn, Table, bar, print_once
from strata.cli.output import Format, output_option
from strata.cli.states import state_cell
from strata.cli.watch import is_live, live_rows, repeat

if TYPE_CHECKING:
    from collections.abc import Sequence

    from strata.fleet.client.hub_client import HubClient
    from strata.fleet.wire.hosts import Host
    from strata.fleet.wire.jobs import Job
    from strata.fleet.wire.overview import OverviewReply, StatusReply

EXPLAINED: Final = 3
"""The number of waiting jobs whose reason is shown."""
LEAST_ROWS: Final = 3
CARDS: Final = 8
BAR: Final = 10
_RUNNING: Final = (
    ScreenColumn("RUNNING", cuts=True),
    ScreenColumn("ID"),
    ScreenColumn("HOST", cuts=True),
    ScreenColumn("FOR", number=True),
    ScreenColumn("PROGRESS"),
    ScreenColumn("ETA", number=True),
    ScreenColumn("NOTE", cuts=True),
)
_WAITING: Final = (
    ScreenColumn("WAITING", cuts=True),
    ScreenColumn("ID"),
    ScreenColumn("OWNER", cuts=True),
    ScreenColumn("FOR", number=True),
    ScreenColumn("PRIORITY", number=True),
    ScreenColumn("WHY", cuts=True, least=24),
)
_HOSTS: Final = (
    ScreenColumn("HOST", cuts=True),
    ScreenColumn("STATE"),
    ScreenColumn("SEEN", number=True),
    ScreenColumn("JOBS", number=True),
    ScreenColumn("CPU", number=True),
    ScreenColumn("MEMORY", number=True),
    ScreenColumn("CARDS"),
)


@dataclass(frozen=True)
class FleetView:
    status: StatusReply
    overview: OverviewReply
    """A few seconds old."""
    running: Sequence[Job]
    waiting: Sequence[Job]
    """The first to run."""
    reasons: dict[str, str]
    hosts: Sequence[Host]


@click.command()
@hub_option
@output_option
def top(context: str | None, output: Format) -> None:
    """Show live what needs attention, what runs, what waits, and the hosts.

    On a terminal the view stays up to date until q or Ctrl-C. In a pipe, and with -o json, it is printed once.
    """
    with hub_client(context) as client:

        def show_fleet() -> None:
            view = read_fleet(client)
            print_once(_value(view), fleet_screen(view, live_rows(output)), output)

        if is_live(output):
            repeat(show_fleet, output)
        else:
            show_fleet()


def read_fleet(client: HubClient) -> FleetView:
    from strata.fleet.core.job import HELD, JobStatus
    from strata.fleet.core.why import Why
    from strata.fleet.wire.jobs import JobsQuery
    from strata.fleet.wire.overview import OverviewReply, StatusReply

    overview = client.call("GET", "/v1/overview", OverviewReply)
    running = all_jobs(client, JobsQuery(status=tuple(HELD), hidden=False, progress=True), pages=1)
    pending = all_jobs(client, JobsQuery(status=(JobStatus.PENDING,), hidden=False), pages=1)
    waiting = sorted(pending, key=lambda job: (-job.spec.priority, job.created_at_s))
    reasons = {job.id: client.call("GET", f"/v1/job/{job.id}/why", Why).headline for job in waiting[:EXPLAINED]}
    return FleetView(
        status=client.call("GET", "/v1/status", StatusReply),
        overview=overview,
        running=sorted(running, key=lambda job: job.changed_at_s),
        waiting=waiting,
        reasons=reasons,
        hosts=[host for host in all_hosts(client) if host.state != "left"],
    )


def fleet_screen(view: FleetView, rows: int | None = None) -> Screen:
    """`rows`: how high it may be; then long tables are cut."""
    lines = [Cell(_summary(view), "bold"), *_attention(view)]
    names = {host.id: host.name for host in view.hosts}
    held: dict[str, int] = {}
    for job in view.running:
        held[job.host_id] = held.get(job.host_id, 0) + 1
    tables = [
        Table(_RUNNING, [_running_row(job, names, view.status.now_s) for job in view.running]),
        Table(_WAITING, [_waiting_row(job, view) for job in view.waiting]),
        Table(_HOSTS, [_host_row(host, held.get(host.id, 0)) for host in view.hosts]),
    ]
    shown = [table for table in tables if table.rows]
    room = None if rows is None else max(LEAST_ROWS, (rows - len(lines)) // max(1, len(shown)) - 3)
    return Screen(lines, [_shortened(table, room) for table in shown])


def _shortened(table: Table, room: int | None) -> Table:
    if room is None or len(table.rows) <= room:
        return table
    return Table(table.columns, table.rows[:room], f"… and {len(table.rows) - room} more")


def _summary(view: FleetView) -> str:
    overview, counts = view.overview, view.status.by_status
    longest = ""
    if view.waiting:
        longest_s = view.status.now_s - min(job.created_at_s for job in view.waiting)
        longest = f" (longest {format_duration(longest_s)})"
    online = sum(host.presence == "online" for host in view.hosts)
    parts = [
        f"{counts.get('running', 0) + counts.get('claimed', 0)} running",
        f"{counts.get('pending', 0)} waiting{longest}",
        f"{online} of {format_count(len(view.hosts), 'host')} online",
    ]
    if overview.cards and overview.busy_cards.value is not None:
        parts.append(f"{overview.busy_cards.value:.3g} of {format_count(overview.cards, 'card')} busy")
    if overview.goodput.value is not None:
        parts.append(f"goodput {overview.goodput.value:.0%}")
    return ", ".join(parts)


def _attention(view: FleetView) -> list[Cell]:
    if not view.overview.attention:
        return [Cell("● nothing needs attention", "green")]
    return [
        Cell(
            f"▲ {each.what} since {format_duration(view.status.now_s - each.since_s)}: {each.why}; {each.fix}",
            "bold red",
        )
        for each in view.overview.attention
    ]


def _running_row(job: Job, hosts: dict[str, str], now_s: float) -> list[Cell]:
    progress = job.progress
    done = "-" if progress is None else bar(int(progress.fraction * 1000), 1000, BAR)
    eta = "-" if progress is None or progress.eta_s is None else format_duration(progress.eta_s)
    note = "preparing" if job.status == "claimed" else progress.note if progress else ""
    return [
        Cell(job.spec.label),
        Cell(short_id(job.id)),
        Cell(hosts.get(job.host_id, job.host_id)),
        Cell(format_duration(now_s - job.changed_at_s)),
        Cell(done),
        Cell(eta),
        Cell(note or "-"),
    ]


def _waiting_row(job: Job, view: FleetView) -> list[Cell]:
    return [
        Cell(job.spec.label),
        Cell(short_id(job.id)),
        Cell(job.owner or "-"),
        Cell(format_duration(view.status.now_s - job.created_at_s)),
        Cell(str(job.spec.priority)),
        Cell(view.reasons.get(job.id, "") or job.reason or "-"),
    ]


def _host_row(host: Host, jobs: int) -> list[Cell]:
    sample = host.sample
    uses = [f"{use:.0%}" for name, use in sample.items() if name.endswith("/use")]
    cards = " ".join(uses[:CARDS]) + (f" and {len(uses) - CARDS} more" if len(uses) > CARDS else "")
    ram_gib = host.capability.ram_bytes / (1 << 30)
    return [
        Cell(host.name),
        state_cell("state", host.presence if host.state == "active" else host.state),
        Cell(format_duration(host.seen_ago_s)),
        Cell(str(jobs)),
        Cell(f"{sample['cpu_use']:.0%}" if "cpu_use" in sample else "-"),
        Cell(f"{sample['ram_used_gib']:.1f} of {ram_gib:.0f} GiB" if "ram_used_gib" in sample else "-"),
        Cell(cards or format_count(len(host.capability.gpus), "card") if host.capability.gpus else "-"),
    ]


def _value(view: FleetView) -> dict[str, Any]:
    import msgspec

    from strata.cli.fleet.hosts import host_row
    from strata.cli.fleet.jobs import job_row

    names = {host.id: host.name for host in view.hosts}
    held = [job.host_id for job in view.running]
    return {
        "now_s": view.status.now_s,
        "overview": msgspec.to_builtins(view.overview),
        "running": [job_row(job, names) | {"progress": msgspec.to_builtins(job.progress)} for job in view.running],
        "waiting": [job_row(job, names) | {"why": view.reasons.get(job.id)} for job in view.waiting],
        "hosts": [host_row(host, held.count(host.id)) for host in view.hosts],
    }
