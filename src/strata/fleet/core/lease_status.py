"""Decides whether an attempt still holds its lease when its host sends a request, and words the STALE and CONFLICT
errors of leases, jobs and outdated plans.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from strata.base.errors import Code, StrataError
from strata.fleet.core.job import HELD, TERMINAL, JobStatus


class LeaseStatus(StrEnum):
    HELD = "held"
    EXPIRED = "expired"
    """The lease expired and no other host has claimed the job: a request of its host revives it."""
    ENDED = "ended"
    """The job is terminal, by this attempt, by cancel or otherwise."""
    OVER = "over"
    """This attempt has ended and the job waits for its next one."""
    STALE = "stale"
    """Another attempt has begun, or it was never this host's."""


ALIVE: Final = frozenset({LeaseStatus.HELD, LeaseStatus.EXPIRED})
"""The attempt may still end by its own report."""


def lease_status(status: JobStatus, *, current: tuple[int, str], claimed: tuple[int, str], leased: bool) -> LeaseStatus:
    """`current` and `claimed` are (epoch, host): of the job, and of the request. `leased`: the lease row exists."""
    if current != claimed:
        return LeaseStatus.STALE
    if status in TERMINAL:
        return LeaseStatus.ENDED
    if status in HELD:
        return LeaseStatus.HELD
    return LeaseStatus.EXPIRED if leased else LeaseStatus.OVER


def stale_attempt(job_id: str, epoch: int, current: int) -> StrataError:
    now = "and the job has ended or waits" if epoch == current else f"the job is at epoch {current}"
    return StrataError(
        Code.STALE,
        f"epoch {epoch} of {job_id} is over, {now}",
        hint="stop the child and drop its result",
        epoch=current,
    )


def unknown_job(job_id: str) -> StrataError:
    return StrataError(Code.NOT_FOUND, f"there is no job {job_id!r}")


def already_ended(job_id: str, status: JobStatus) -> StrataError:
    return StrataError(
        Code.CONFLICT, f"{job_id} is {status} already; this result is kept as an orphan", status=status.value
    )


def not_ended(job_id: str, status: JobStatus) -> StrataError:
    return StrataError(
        Code.PRECONDITION,
        f"{job_id} is {status}: only an ended job can be archived",
        hint="strata cancel ends it",
        status=status.value,
    )


def not_refused(job_id: str) -> StrataError:
    return StrataError(
        Code.PRECONDITION,
        f"{job_id} is pending, and no host is excluded for it",
        hint="strata why says what it waits for",
        status=JobStatus.PENDING.value,
    )


def outdated_plan(what: str) -> StrataError:
    return StrataError(Code.CONFLICT, f"{what} was added or changed by another caller meanwhile", hint="apply again")
