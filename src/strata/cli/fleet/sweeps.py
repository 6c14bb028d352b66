"""`strata sweeps`: list, stop, resume; columns and progress."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import click

from strata.cli.fleet.client import declared_name, find_declared, hub_client, hub_option, hub_view_options, print_rows
from strata.cli.groups import DefaultGroup
from strata.cli.output import Format, print_error
from strata.cli.rows import Column

if TYPE_CHECKING:
    from strata.fleet.client.hub_client import HubClient
    from strata.fleet.wire.sweeps import SweepSummary

_PAGE: Final = 100
_COLUMNS: Final = (
    Column("sweep", cut=28),
    Column("owner", cut=16),
    Column("state"),
    Column("trials"),
    Column("metric", cut=20),
    Column("best"),
    Column("best_job", cut=28),
    Column("method", wide=True),
    Column("file", wide=True),
)


@click.group(cls=DefaultGroup, default="list")
def sweeps() -> None:
    """List the sweeps of manifests, or stop and resume them.

    SWEEP is its name, or PROJECT/NAME where several projects have one of that name.
    """


@sweeps.command("list")
@hub_view_options
def list_sweeps(context: str | None, output: Format) -> None:
    """List sweeps with how far they are and their best trial."""
    with hub_client(context) as client:
        listed = _listed(client)
    print_rows(output, _COLUMNS, ((_row(each), _shown(each)) for each in listed))


@sweeps.command()
@click.argument("sweep")
@hub_option
def stop(sweep: str, context: str | None) -> None:
    """Make no more trials of SWEEP, and cancel those that wait for a host. Those that run go on.

    Only this ends a sweep. It stays stopped, also when its manifest is applied again, until you resume it.
    """
    changed = _change(sweep, "stop", context)
    print_error(f"strata: {sweep} is {_progress(changed)}")


@sweeps.command()
@click.argument("sweep")
@hub_option
def resume(sweep: str, context: str | None) -> None:
    """Go on with SWEEP after a stop, also with the trials that the stop cancelled."""
    changed = _change(sweep, "resume", context)
    print_error(f"strata: {sweep} goes on at {_progress(changed)}")


def _change(text: str, verb: str, context: str | None) -> SweepSummary:
    with hub_client(context) as client:
        from strata.fleet.wire.sweeps import SweepReply

        sweep = find_declared("sweep", _listed(client), text)
        return client.call("POST", f"/v1/sweep/{sweep.project}/{sweep.name}/{verb}", SweepReply).sweep


def _listed(client: HubClient) -> list[SweepSummary]:
    from strata.fleet.wire.sweeps import SweepsQuery, SweepsReply

    listed: list[SweepSummary] = []
    while True:
        query = SweepsQuery(offset=len(listed), limit=_PAGE)
        reply = client.call("GET", "/v1/sweeps", SweepsReply, query=query)
        listed += reply.sweeps
        if not reply.sweeps or len(listed) >= reply.total:
            return listed


def _progress(each: SweepSummary) -> str:
    """Words the progress of a sweep, as in `stopped at 6 of 20`."""
    count = f"{each.trials - each.skipped} of {each.planned or each.trials}"
    return f"stopped at {count}" if each.state == "stopped" else count


def _row(each: SweepSummary) -> dict[str, Any]:
    return {
        "sweep": each.name,
        "project": each.project,
        "owner": each.owner or None,
        "state": each.state,
        "trials": each.trials - each.skipped,
        "planned": each.planned or each.trials,
        "metric": None if each.objective is None else each.objective.metric,
        "best": None if each.best is None else each.best.value,
        "best_job": None if each.best is None else each.best.label,
        "method": each.method or None,
        "file": each.source or None,
    }


def _shown(each: SweepSummary) -> dict[str, Any]:
    return {
        "sweep": declared_name(each),
        "trials": f"{each.trials - each.skipped} of {each.planned or each.trials}",
        "best": None if each.best is None else f"{each.best.value:.4g}",
    }
