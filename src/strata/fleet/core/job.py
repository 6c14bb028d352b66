"""The statuses of a job and the table of their transitions (`NEXT`), the causes of failures, and which of them count
against `max_attempts` (`CHARGED`).

The guards of the stores (`WHERE status IN …`) come from `sources`, the picture in the documents from `diagram`.

Four things the table does not show, because they are about attempts and not about the job:

- Every write of a host carries the epoch of its attempt. The epoch is compared before the table is asked, so a host
  that was replaced is refused with STALE whatever the status is.
- An expired lease leaves its row behind, and only that row allows REVIVE. So a late report of an unclaimed job is
  REVIVE and then the event itself, in one transaction; a job that is pending for another reason (never claimed,
  retried, requeued) cannot be revived.
- A pending job can be requeued only where hosts are excluded for it (SETUP_ERROR): they may try it again.
- The first terminal write wins. A result that comes after it is kept as an orphan and moves nothing.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from strata.base.errors import Code, StrataError


class JobStatus(StrEnum):
    PENDING = "pending"
    """Waits for a host, for the jobs it comes after, or for the end of a back-off."""
    CLAIMED = "claimed"
    """A host holds the lease and prepares: source, environment, data."""
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


class JobEvent(StrEnum):
    CLAIM = "claim"
    """A host takes the job: the epoch grows by one."""
    START = "start"
    """The host's child process runs."""
    COMPLETE = "complete"
    FAIL = "fail"
    """The end: a failure that may not be tried again."""
    RETRY = "retry"
    """A failure that may be tried again, perhaps after a back-off."""
    EXPIRE = "expire"
    """The lease ran out. The epoch stays, and so does the lease's row."""
    REVIVE = "revive"
    """A sign of life under the epoch of an expired lease, before anybody else claimed the job."""
    CANCEL = "cancel"
    REQUEUE = "requeue"
    """An operator wants it done again: a new budget of attempts."""


class Cause(StrEnum):
    """Why an attempt ended without a result."""

    USER_ERROR = "user_error"
    """The trainer exited with an error of its own."""
    OOM = "oom"
    """The host or the GPU was out of memory."""
    TIMEOUT = "timeout"
    """Ran longer than the job's `timeout_s`."""
    HOST_LOST = "host_lost"
    """The lease ran out."""
    PREEMPTED = "preempted"
    """The host was drained or wanted back by its owner."""
    CANCELLED = "cancelled"
    """A person took the job back."""
    INFRA = "infra"
    """The host could not do its part: no disk space, a broken driver, a supervisor that was killed."""
    SETUP_ERROR = "setup_error"
    """What the job asks for is not on this host: program, folder, commit, interpreter, module, source. The host is well
    and stays in service; it is excluded for this job."""


CHARGED: Final = frozenset({Cause.USER_ERROR, Cause.OOM, Cause.TIMEOUT})
"""The causes that are the job's own and consume `max_attempts`."""

TERMINAL: Final = frozenset({JobStatus.COMPLETED, JobStatus.FAILED, JobStatus.CANCELLED})
UNFINISHED: Final = tuple(status for status in JobStatus if status not in TERMINAL)
HELD: Final = frozenset({JobStatus.CLAIMED, JobStatus.RUNNING})
"""A host holds a lease that has not run out."""

NEXT: Final[dict[tuple[JobStatus, JobEvent], JobStatus]] = {
    (JobStatus.PENDING, JobEvent.CLAIM): JobStatus.CLAIMED,
    (JobStatus.PENDING, JobEvent.REVIVE): JobStatus.RUNNING,
    # No host is left that could set it up.
    (JobStatus.PENDING, JobEvent.FAIL): JobStatus.FAILED,
    (JobStatus.PENDING, JobEvent.CANCEL): JobStatus.CANCELLED,
    (JobStatus.CLAIMED, JobEvent.START): JobStatus.RUNNING,
    # The report of the start may be lost; a finished model is not thrown away for that.
    (JobStatus.CLAIMED, JobEvent.COMPLETE): JobStatus.COMPLETED,
    (JobStatus.CLAIMED, JobEvent.FAIL): JobStatus.FAILED,
    (JobStatus.CLAIMED, JobEvent.RETRY): JobStatus.PENDING,
    (JobStatus.CLAIMED, JobEvent.EXPIRE): JobStatus.PENDING,
    (JobStatus.CLAIMED, JobEvent.CANCEL): JobStatus.CANCELLED,
    (JobStatus.RUNNING, JobEvent.COMPLETE): JobStatus.COMPLETED,
    (JobStatus.RUNNING, JobEvent.FAIL): JobStatus.FAILED,
    (JobStatus.RUNNING, JobEvent.RETRY): JobStatus.PENDING,
    (JobStatus.RUNNING, JobEvent.EXPIRE): JobStatus.PENDING,
    (JobStatus.RUNNING, JobEvent.CANCEL): JobStatus.CANCELLED,
    (JobStatus.PENDING, JobEvent.REQUEUE): JobStatus.PENDING,
    (JobStatus.COMPLETED, JobEvent.REQUEUE): JobStatus.PENDING,
    (JobStatus.FAILED, JobEvent.REQUEUE): JobStatus.PENDING,
    (JobStatus.CANCELLED, JobEvent.REQUEUE): JobStatus.PENDING,
}


def may(status: JobStatus, event: JobEvent) -> bool:
    return (status, event) in NEXT


def advance(status: JobStatus, event: JobEvent) -> JobStatus:
    """Returns where the job is after `event`; PRECONDITION if the table does not have it."""
    after = NEXT.get((status, event))
    if after is None:
        wanted = ", ".join(each for each in JobStatus if may(each, event))
        raise StrataError(
            Code.PRECONDITION,
            f"a job that is {status} cannot {event}",
            hint=f"it has to be {wanted}",
            status=status.value,
            event=event.value,
        )
    return after


def sources(event: JobEvent) -> tuple[JobStatus, ...]:
    """The statuses in which `event` is legal, in the order of `JobStatus`: what a guard of a store compares with."""
    return tuple(status for status in JobStatus if may(status, event))


def outcomes(event: JobEvent) -> tuple[JobStatus, ...]:
    """The statuses `event` can lead to. It is one for every event, so a guarded UPDATE can set it as a constant."""
    return tuple(status for status in JobStatus if status in {NEXT[source, event] for source in sources(event)})


def target(event: JobEvent) -> JobStatus:
    """The one status `event` leads to."""
    (status,) = outcomes(event)
    return status


def diagram() -> str:
    """The table as a Mermaid state diagram, for the documents."""
    edges: dict[tuple[JobStatus, JobStatus], list[str]] = {}
    for (status, event), after in NEXT.items():
        edges.setdefault((status, after), []).append(event)
    lines = ["stateDiagram-v2", f"    [*] --> {JobStatus.PENDING}"]
    lines += [f"    {start} --> {end}: {', '.join(events)}" for (start, end), events in edges.items()]
    lines += [f"    {status} --> [*]" for status in JobStatus if status in TERMINAL]
    return "\n".join(lines) + "\n"
