"""Routes of the overview, of the timeline of a job, and of goodput."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from strata.database import event_kinds
from strata.fleet.core.goodput import JobInterruption, LedgerEvent, share
from strata.fleet.http.context import HubCall, HubContext, resolve_job_id
from strata.fleet.http.jobs import attempt_reply
from strata.fleet.records import AttemptRow
from strata.fleet.wire.history import (
    GoodputQuery,
    GoodputReply,
    Interruption,
    JobTimelineReply,
    TimelineMark,
)
from strata.fleet.wire.overview import OverviewQuery, OverviewReply

_MARKED: Final = frozenset(
    {
        *event_kinds.ENDED,
        event_kinds.JOB_CHECKPOINTED,
        event_kinds.JOB_EXPIRED,
        event_kinds.JOB_LOST,
        event_kinds.JOB_REVIVED,
        event_kinds.JOB_PREEMPTED,
        event_kinds.JOB_RETRIED,
        event_kinds.JOB_REQUEUED,
    }
)


async def overview(call: HubCall, query: OverviewQuery) -> OverviewReply:
    """Returns what needs a person, and four figures with their history of a day; of all projects, or of one."""
    return await call.context.history.overview(query.project)


async def timeline(call: HubCall) -> JobTimelineReply:
    """Returns what a job did when: queued, prepared, run, uploaded, with its checkpoints, kills and resumes."""
    context = call.context
    job_id = await resolve_job_id(call)
    row, attempts = await context.fleet.store.jobs.get(job_id), await context.fleet.store.jobs.attempts(job_id)
    computed, events = await context.history.job(row, attempts)
    numbers = {each.epoch: each.attempt for each in attempts}
    hosts = await _names(context, attempts)
    return JobTimelineReply(
        from_s=row.created_at_s,
        to_s=computed.segments[-1].to_s if computed.segments else row.created_at_s,
        segments=tuple(computed.segments),
        marks=tuple(_mark(each, numbers) for each in events if each.kind in _MARKED),
        attempts=tuple(map(attempt_reply, attempts)),
        hosts=dict(hosts),
        interruptions=tuple(_interruption(each, hosts) for each in computed.interruptions),
    )


async def goodput(call: HubCall) -> GoodputReply:
    """Returns where the time of a job went, and what each interruption cost."""
    context = call.context
    job_id = await resolve_job_id(call)
    row, attempts = await context.fleet.store.jobs.get(job_id), await context.fleet.store.jobs.attempts(job_id)
    computed, _ = await context.history.job(row, attempts)
    seconds, hosts = computed.seconds(), await _names(context, attempts)
    return GoodputReply(
        seconds=dict(seconds),
        wall_s=sum(seconds.values()),
        share=share(seconds),
        interruptions=tuple(_interruption(each, hosts) for each in computed.interruptions),
    )


async def fleet_goodput(call: HubCall, query: GoodputQuery) -> GoodputReply:
    """Returns where the time of all jobs went, or of those of a project, that a host had lately."""
    found = await call.context.history.goodput(query.project, query.span_s)
    names = await call.context.fleet.hosts.names({each.host_id for _, each in found.interruptions})
    return GoodputReply(
        seconds=dict(found.seconds),
        wall_s=sum(found.seconds.values()),
        share=share(found.seconds),
        interruptions=tuple(_interruption(each, names, job_id) for job_id, each in found.interruptions),
        jobs=found.jobs,
        whole=found.whole,
    )


async def _names(context: HubContext, attempts: Iterable[AttemptRow]) -> Mapping[str, str]:
    """Returns the names of the hosts of these attempts."""
    wanted = {each.host_id for each in attempts}
    return {host.id: host.name for host_id in wanted for host in await context.fleet.hosts.find(host_id)}


def _mark(event: LedgerEvent, numbers: Mapping[int, int]) -> TimelineMark:
    return TimelineMark(at_s=event.at_s, kind=event.kind, attempt=numbers.get(event.epoch, 0))


def _interruption(each: JobInterruption, hosts: Mapping[str, str], job_id: str = "") -> Interruption:
    fields: dict[str, Any] = each._asdict()
    return Interruption(**fields, host=hosts.get(each.host_id, ""), cost_s=each.cost_s, job_id=job_id)
