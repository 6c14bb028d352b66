"""Routes of schedules: list, pause, resume, remove. A manifest declares them."""

from __future__ import annotations

from strata.fleet.http.context import HubCall, submitter_of
from strata.fleet.records import ScheduleRow
from strata.fleet.wire.manifests import ScheduleReply, SchedulesReply


async def listed(call: HubCall) -> SchedulesReply:
    """The schedules of all projects, and when each is due next."""
    return SchedulesReply(schedules=tuple(map(_reply, await call.context.schedules.listed())))


async def pause(call: HubCall) -> ScheduleReply:
    """Queue no more runs of a schedule until it is resumed. A researcher: only of her own."""
    schedules = call.context.schedules
    return _reply(await schedules.pause(call.path["project"], call.path["name"], call.actor, submitter_of(call)))


async def resume(call: HubCall) -> ScheduleReply:
    """Queue runs of a schedule again, from the next time on that it is due. A researcher: only of her own."""
    schedules = call.context.schedules
    return _reply(await schedules.resume(call.path["project"], call.path["name"], call.actor, submitter_of(call)))


async def remove(call: HubCall) -> None:
    """End a schedule; runs that are queued stay. A researcher: only her own."""
    await call.context.schedules.remove(call.path["project"], call.path["name"], call.actor, submitter_of(call))


def _reply(row: ScheduleRow) -> ScheduleReply:
    schedule = row.stored.schedule
    return ScheduleReply(
        project=row.project,
        name=row.name,
        owner=row.stored.submitter.owner,
        cron=schedule.cron,
        timezone=schedule.timezone,
        overlap=schedule.overlap,
        next_due_s=row.next_due_s,
        paused=row.paused,
        last_job=row.last_job,
        note=row.note,
    )
