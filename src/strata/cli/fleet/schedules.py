"""`strata schedules`: list, pause, resume, remove; columns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import click

from strata.cli.fleet.client import (
    declared_name,
    find_declared,
    format_duration,
    hub_client,
    hub_option,
    hub_view_options,
    print_rows,
    short_id,
)
from strata.cli.groups import DefaultGroup
from strata.cli.output import Format, print_error
from strata.cli.rows import Column

if TYPE_CHECKING:
    from strata.fleet.client.hub_client import HubClient
    from strata.fleet.wire.manifests import ScheduleReply

_COLUMNS: Final = (
    Column("schedule", cut=28),
    Column("owner", cut=16),
    Column("cron"),
    Column("timezone"),
    Column("next"),
    Column("last_job"),
    Column("note", cut=40),
    Column("overlap", wide=True),
)


@click.group(cls=DefaultGroup, default="list")
def schedules() -> None:
    """List the schedules of manifests, or pause, resume and remove them.

    SCHEDULE is its name, or PROJECT/NAME where several projects have one of that name.
    """


@schedules.command("list")
@hub_view_options
def list_schedules(context: str | None, output: Format) -> None:
    """List schedules, when each is due next, and its last run."""
    with hub_client(context) as client:
        from strata.fleet.wire.overview import StatusReply

        listed = _listed(client)
        now_s = client.call("GET", "/v1/status", StatusReply).now_s
    print_rows(output, _COLUMNS, ((_row(each), _shown(each, now_s)) for each in listed))


@schedules.command()
@click.argument("schedule")
@hub_option
def pause(schedule: str, context: str | None) -> None:
    """Queue no more runs of SCHEDULE until it is resumed."""
    _change(schedule, "pause", context)
    print_error(f"strata: {schedule} is paused")


@schedules.command()
@click.argument("schedule")
@hub_option
def resume(schedule: str, context: str | None) -> None:
    """Queue runs of SCHEDULE again. Runs that were due meanwhile are left out."""
    from strata.fleet.core.schedule import format_moment

    changed = _change(schedule, "resume", context)
    print_error(f"strata: {schedule} is due next at {format_moment(changed.next_due_s)}")


@schedules.command()
@click.argument("schedule")
@hub_option
def remove(schedule: str, context: str | None) -> None:
    """Remove SCHEDULE. Runs that are queued stay, and a manifest that still has it adds it again."""
    with hub_client(context) as client:
        client.call("DELETE", _path(find_declared("schedule", _listed(client), schedule)), type(None))
    print_error(f"strata: {schedule} is removed")


def _change(text: str, verb: str, context: str | None) -> ScheduleReply:
    with hub_client(context) as client:
        from strata.fleet.wire.manifests import ScheduleReply

        return client.call("POST", f"{_path(find_declared('schedule', _listed(client), text))}/{verb}", ScheduleReply)


def _listed(client: HubClient) -> tuple[ScheduleReply, ...]:
    from strata.fleet.wire.manifests import SchedulesReply

    return client.call("GET", "/v1/schedules", SchedulesReply).schedules


def _path(schedule: ScheduleReply) -> str:
    return f"/v1/schedule/{schedule.project}/{schedule.name}"


def _row(each: ScheduleReply) -> dict[str, Any]:
    from msgspec.structs import asdict

    row = asdict(each)
    return {"schedule": row.pop("name"), **row, "last_job": each.last_job or None, "note": each.note or None}


def _shown(each: ScheduleReply, now_s: float) -> dict[str, Any]:
    name = declared_name(each)
    due = "paused" if each.paused else f"in {format_duration(each.next_due_s - now_s)}"
    return {"schedule": name, "next": due, "last_job": short_id(each.last_job) if each.last_job else None}
