"""The tools that only read: jobs, why one waits or failed, its log, metrics and checkpoints. Each has its arguments as
a message, with how much it replies at most.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Final, TypeVar

import msgspec

from strata.base.errors import Code, StrataError
from strata.cli.fleet.client import error_line, find_job
from strata.cli.mcp.untrusted import Document
from strata.fleet.artifacts.manifest import ArtifactKind, Word
from strata.fleet.client.hub_client import HubClient
from strata.fleet.core.job import JobStatus
from strata.fleet.core.why import Why
from strata.fleet.wire.artifacts import ArtifactRecord, ArtifactsQuery, ArtifactsReply
from strata.fleet.wire.base import Message, Text
from strata.fleet.wire.jobs import Job, JobReply, JobsQuery, JobsReply
from strata.fleet.wire.streams import MetricsQuery, MetricsReply, StreamQuery

Arguments = TypeVar("Arguments", bound=Message)
JobText = Annotated[str, msgspec.Meta(min_length=1, max_length=200, description="Id, prefix of an id, or name.")]
Rows = Annotated[int, msgspec.Meta(ge=1, le=100, description="At most this many.")]
MAX_SERIES: Final = 16
"""Metrics of a reply that names none."""
MAX_NAMES: Final = 100


@dataclass(frozen=True, kw_only=True)
class Tool:
    name: str
    description: str
    arguments: type[Message]
    run: Callable[[HubClient, Any], dict[str, Any]]
    writes: bool = False


class ListArguments(Message, frozen=True, kw_only=True):
    status: Annotated[tuple[JobStatus, ...], msgspec.Meta(max_length=8, description="Only these.")] = ()
    project: Word = ""
    owner: Word = ""
    search: Annotated[Text, msgspec.Meta(description="Part of a name, owner, project, model or sweep.")] = ""
    limit: Rows = 20


class JobArguments(Message, frozen=True, kw_only=True):
    job: JobText


class LogArguments(JobArguments, frozen=True, kw_only=True):
    attempt: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1, description="0: the last one.")] = 0
    max_bytes: Annotated[int, msgspec.Meta(ge=1, le=65_536, description="The end of the log, so long.")] = 16_384


class MetricsArguments(JobArguments, frozen=True, kw_only=True):
    names: Annotated[tuple[Word, ...], msgspec.Meta(max_length=8, description="Only these metrics.")] = ()
    points: Annotated[int, msgspec.Meta(ge=1, le=200, description="Points of each curve.")] = 20


class CheckpointsArguments(JobArguments, frozen=True, kw_only=True):
    limit: Rows = 20


def list_jobs(client: HubClient, arguments: ListArguments) -> dict[str, Any]:
    query = JobsQuery(
        status=arguments.status,
        project=arguments.project,
        owner=arguments.owner,
        search=arguments.search,
        hidden=False,
        order="newest",
        limit=arguments.limit,
    )
    reply = client.call("GET", "/v1/jobs", JobsReply, query=query)
    jobs = [job_row(job) | {"host": reply.hosts.get(job.host_id, "")} for job in reply.jobs]
    return {"jobs": jobs, "more": bool(reply.next)}


def explain(client: HubClient, arguments: JobArguments) -> dict[str, Any]:
    reply = named_job(client, arguments.job)
    why = client.call("GET", f"/v1/job/{reply.job.id}/why", Why)
    last = reply.attempts[-1] if reply.attempts else None
    return job_row(reply.job) | {
        "schedulable": why.schedulable,
        "headline": why.headline,
        "obstacles": [msgspec.to_builtins(each) for each in why.obstacles[:MAX_NAMES]],
        "eligible_hosts": why.eligible_hosts[:MAX_NAMES],
        "nearest_host": why.nearest_host,
        "nearest_fix": why.nearest_fix[:MAX_NAMES],
        "cause": last.cause if last else None,
        "error": error_line(last.error) if last else "",
        "traceback": last.error if last else "",
    }


def read_log(client: HubClient, arguments: LogArguments) -> dict[str, Any]:
    job = named_job(client, arguments.job).job
    if not job.attempt:
        raise StrataError(Code.NOT_FOUND, f"{job.spec.label} has not started, so it has no log", hint="the tool why")
    query = StreamQuery(attempt=arguments.attempt, tail=arguments.max_bytes, limit=arguments.max_bytes)
    reply = client.fetch(f"/v1/job/{job.id}/log", query=query)
    begins_at = int(reply.headers["x-strata-offset"])
    return job_row(job) | {
        "log_attempt": int(reply.headers["x-strata-attempt"]),
        "begins_at_byte": begins_at,
        "log": Document(reply.content.decode(errors="replace")),
    }


def read_metrics(client: HubClient, arguments: MetricsArguments) -> dict[str, Any]:
    job = named_job(client, arguments.job).job
    query = MetricsQuery(points=arguments.points, names=arguments.names)
    reply = client.call("GET", f"/v1/job/{job.id}/metrics", MetricsReply, query=query)
    fields = ("name", "steps", "values", "last", "count", "not_finite")
    series = reply.series if arguments.names else reply.series[:MAX_SERIES]
    return job_row(job) | {
        "metrics": [{field: getattr(each, field) for field in fields} for each in series],
        "names": reply.names[:MAX_NAMES],
    }


def list_checkpoints(client: HubClient, arguments: CheckpointsArguments) -> dict[str, Any]:
    job = named_job(client, arguments.job).job
    found: list[ArtifactRecord] = []
    for kind in (ArtifactKind.CHECKPOINT, ArtifactKind.RESULT):
        query = ArtifactsQuery(job_id=job.id, kind=kind, limit=arguments.limit)
        found += client.call("GET", "/v1/artifacts", ArtifactsReply, query=query).artifacts
    return job_row(job) | {
        "checkpoints": [
            {
                "id": each.artifact_id,
                "kind": each.lineage.kind,
                "size_bytes": each.size,
                "committed_at_s": each.committed_at_s,
                "metrics": [{"name": name, "value": value} for name, value in each.lineage.metrics.items()][:MAX_NAMES],
            }
            for each in found
        ]
    }


def named_job(client: HubClient, text: str) -> JobReply:
    """The one job that is called so: an agent cannot see a note about others, so several are an error."""
    return find_job(client, text, newest=False)


def job_row(job: Job) -> dict[str, Any]:
    return {
        "id": job.id,
        "name": job.spec.label,
        "project": job.spec.project,
        "owner": job.owner,
        "status": job.status,
        "attempt": job.attempt,
        "reason": job.reason,
    }


READING: Final = (
    Tool(name="list", description="List jobs, the newest first.", arguments=ListArguments, run=list_jobs),
    Tool(
        name="why",
        description="Explain why a job waits, and what would help, or why it failed.",
        arguments=JobArguments,
        run=explain,
    ),
    Tool(name="logs", description="Read the end of the log of a job.", arguments=LogArguments, run=read_log),
    Tool(
        name="metrics",
        description="Read the metrics of a job over its steps, such as its loss.",
        arguments=MetricsArguments,
        run=read_metrics,
    ),
    Tool(
        name="checkpoints",
        description="List the checkpoints and results that a job has stored.",
        arguments=CheckpointsArguments,
        run=list_checkpoints,
    ),
)
