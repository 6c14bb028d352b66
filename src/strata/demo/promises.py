"""What a demo promises to show, each read from the hub's API: a failure with its reason, a finished gang, a loss that
falls, a search with a pruned trial, and with the extra `train` a model that learns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from strata.base.errors import Code, StrataError
from strata.coord.view import GangsView
from strata.fleet.client.hub_client import HubClient
from strata.fleet.core.job import JobStatus
from strata.fleet.wire.jobs import Job, JobReply, JobsQuery, JobsReply
from strata.fleet.wire.streams import MetricSeries, MetricsQuery, MetricsReply
from strata.fleet.wire.sweeps import SweepReply

PROJECT: Final = "demo"
GANG_SIZE: Final = 2
FALLEN: Final = 0.8
"""A loss has fallen when its last value is at most this share of its first one."""
LEARNED: Final = 0.5
LEAST_POINTS: Final = 8
Look = Callable[[HubClient], str]
"""What is there, in words; empty: not yet. An error: it will not come."""


@dataclass(frozen=True)
class Promise:
    name: str
    look: Look


def failed_with_reason(name: str) -> Look:
    def look(client: HubClient) -> str:
        job = _find(client, name)
        if job.status is not JobStatus.FAILED:
            _refuse(job, JobStatus.COMPLETED, JobStatus.CANCELLED)
            return ""
        attempts = client.call("GET", f"/v1/job/{job.id}", JobReply).attempts
        cause, error = (attempts[-1].cause, attempts[-1].error.strip()) if attempts else ("", "")
        return f"{name} failed: {error.splitlines()[-1]}" if cause == "user_error" and error else ""

    return look


def gang_finished(name: str) -> Look:
    """Its members have completed, and the coordinator says that its workers have consumed all data."""

    def look(client: HubClient) -> str:
        members = [job for job in _jobs(client) if job.spec.name.partition("/")[0] == name]
        for job in members:
            _refuse(job, JobStatus.FAILED, JobStatus.CANCELLED)
        if not members or any(job.status is not JobStatus.COMPLETED for job in members):
            return ""
        gangs = client.call("GET", "/v1/gangs", GangsView).gangs
        # The coordinator calls a run by the job's model and id; here the model has the name of the job.
        if not any(each.job_id.startswith(f"{name}-") and each.status == "FINISHED" for each in gangs):
            return ""
        return f"the gang {name} of {GANG_SIZE} workers has finished"

    return look


def loss_falls(name: str, *, to_share: float = FALLEN, completed: bool = False) -> Look:
    def look(client: HubClient) -> str:
        job = _find(client, name)
        _refuse(job, JobStatus.FAILED, JobStatus.CANCELLED)
        series = _series(client, job.id, "loss")
        if series is None or series.count < LEAST_POINTS or series.last is None:
            return ""
        if completed and job.status is not JobStatus.COMPLETED:
            return ""
        first = series.values[0]
        return f"the loss of {name} fell from {first:.3f} to {series.last:.3f}" if has_fallen(series, to_share) else ""

    return look


def has_fallen(series: MetricSeries, to_share: float) -> bool:
    return bool(series.values) and series.last is not None and series.last <= to_share * series.values[0]


def search_pruned(name: str) -> Look:
    """The search has ended, and at least one of its trials was ended early."""

    def look(client: HubClient) -> str:
        sweep = client.call("GET", f"/v1/sweep/{PROJECT}/{name}", SweepReply).sweep
        if sweep.state != "ended":
            return ""
        if not sweep.pruned:
            raise StrataError(Code.INTERNAL, f"the search {name} ended without a pruned trial")
        return f"the search {name} made {sweep.trials} trials and pruned {sweep.pruned} of them"

    return look


def missing(client: HubClient, promises: Sequence[Promise]) -> list[str]:
    """Returns what is not there, or not any more, in words."""
    return [f"{each.name}: {_state(client)}" for each in promises if not each.look(client)]


def describe_jobs(client: HubClient) -> Mapping[str, str]:
    return {job.spec.name: f"{job.status}{f' ({job.reason})' if job.reason else ''}" for job in _jobs(client)}


def _state(client: HubClient) -> str:
    return ", ".join(f"{name} is {state}" for name, state in describe_jobs(client).items())


def _jobs(client: HubClient) -> tuple[Job, ...]:
    return client.call("GET", "/v1/jobs", JobsReply, query=JobsQuery(project=PROJECT)).jobs


def _find(client: HubClient, name: str) -> Job:
    for job in _jobs(client):
        if job.spec.name == name:
            return job
    raise StrataError(Code.INTERNAL, f"the hub has no job {name}")


def _refuse(job: Job, *unexpected: JobStatus) -> None:
    """INTERNAL if the job is in a status after which it will not do what was promised."""
    if job.status in unexpected:
        raise StrataError(Code.INTERNAL, f"{job.spec.name} is {job.status}: {job.reason or 'no reason'}")


def _series(client: HubClient, job_id: str, name: str) -> MetricSeries | None:
    query = MetricsQuery(points=200, names=(name,))
    series = client.call("GET", f"/v1/job/{job_id}/metrics", MetricsReply, query=query).series
    return next((each for each in series if each.name == name), None)


WORK: Final = (
    Promise("a failure with a reason", failed_with_reason("bad-table")),
    Promise("a loss that falls", loss_falls("long-run")),
    Promise("a finished gang", gang_finished("primes")),
    Promise("a search with a pruned trial", search_pruned("rates")),
)
