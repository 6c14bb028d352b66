"""The life cycle of a job as a table of statuses (created, running, stopped, finished), and when it may be reset or
deleted.

The status of a job changes only through `NEXT`; a transition that is not in the table is rejected, or never happens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from strata.base.errors import Code, StrataError
from strata.coord.core.facts import DatasetMode, Fact, GangStatus, JobDeleted, JobFinished, JobReset
from strata.coord.core.inputs import DeleteJob, ResetJob
from strata.coord.core.state import CoordState, GangEvent, JobState

NEXT: Final[Mapping[tuple[GangStatus, GangEvent], GangStatus]] = {
    (GangStatus.CREATED, GangEvent.JOIN): GangStatus.RUNNING,
    (GangStatus.RUNNING, GangEvent.JOIN): GangStatus.RUNNING,
    (GangStatus.STOPPED, GangEvent.JOIN): GangStatus.RUNNING,
    (GangStatus.RUNNING, GangEvent.EMPTY): GangStatus.STOPPED,
    (GangStatus.STOPPED, GangEvent.FINISH): GangStatus.FINISHED,
    (GangStatus.CREATED, GangEvent.RESET): GangStatus.CREATED,
    (GangStatus.STOPPED, GangEvent.RESET): GangStatus.CREATED,
    (GangStatus.FINISHED, GangEvent.RESET): GangStatus.CREATED,
    (GangStatus.CREATED, GangEvent.DELETE): GangStatus.DELETED,
    (GangStatus.STOPPED, GangEvent.DELETE): GangStatus.DELETED,
    (GangStatus.FINISHED, GangEvent.DELETE): GangStatus.DELETED,
}


def move(job: JobState, event: GangEvent) -> None:
    """Changes the status for a fact, which was checked before: the table has the transition."""
    job.status = NEXT[job.status, event]


def check_open(job: JobState) -> None:
    """A job that is finished takes no worker: it would report success with nothing done."""
    if (job.status, GangEvent.JOIN) not in NEXT:
        raise StrataError(
            Code.PRECONDITION,
            f"job {job.job!r} is {job.status.value}: run {job.run} has consumed all its data",
            hint=f"'strata gang reset {job.job}' to run it again from the beginning",
            reason="job-finished",
        )


def finish(job: JobState) -> list[Fact]:
    """The last worker leaves and reports its program as done: if all data is consumed, the job is finished."""
    return [JobFinished(job.job)] if _is_consumed(job) else []


def _is_consumed(job: JobState) -> bool:
    """Every epoch that was begun is consumed. A deterministic dataset has no ledger: its workers know."""
    datasets = job.datasets.values()
    if any(dataset.epochs for dataset in datasets):
        return False
    return any(dataset.finished or dataset.dataset.mode is DatasetMode.DETERMINISTIC for dataset in datasets)


def reset(state: CoordState, request: ResetJob) -> list[Fact]:
    """The next run, from the beginning. Naming the run that ends makes a repeated request harmless."""
    job = job_named(state, request.job)
    if request.run and request.run < job.run:
        return []
    _check(job, GangEvent.RESET, "reset")
    return [JobReset(job.job, job.run + 1)]


def delete(state: CoordState, request: DeleteJob) -> list[Fact]:
    job = job_named(state, request.job)
    _check(job, GangEvent.DELETE, "deleted")
    return [JobDeleted(job.job)]


def job_named(state: CoordState, name: str) -> JobState:
    job = state.jobs.get(name)
    if job is None:
        raise StrataError(Code.NOT_FOUND, f"there is no job {name!r}", reason="unknown-job")
    return job


def _check(job: JobState, event: GangEvent, done: str) -> None:
    if (job.status, event) not in NEXT:
        raise StrataError(
            Code.PRECONDITION,
            f"job {job.job!r} is {job.status.value} with {len(job.members)} workers: it cannot be {done}",
            hint=f"'strata gang stop {job.job} --all' first",
            reason="job-running",
        )
