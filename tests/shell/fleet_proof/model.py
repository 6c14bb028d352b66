"""One job of the fleet as a sequential object: what each caller may be told, and what becomes of the job.

Written apart from the stores, with the rulings of `core.lease` alone in common. `strict` is a store with one writer;
one that passes over rows somebody else has locked may find less than is there, and nothing more.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, assert_never

import msgspec

from strata.fleet.core.job import CHARGED, HELD, TERMINAL, Cause, JobEvent, JobStatus
from strata.fleet.core.lease import AttemptCounts, Budget, RetryDecision, after_expiry, after_failure
from tests.support.history import Outcome, Returned

LEASE_S = 10.0
BUDGET = Budget(max_attempts=2, max_lost=2, max_infra=3)
CHANCE = 0.5


@dataclass(frozen=True, slots=True)
class Take:
    """A claim that was given this job, or may have been: answered with the epoch."""

    job: str
    host: str
    claim: str
    now_s: float


@dataclass(frozen=True, slots=True)
class Renew:
    """Answered with verdict and status."""

    job: str
    host: str
    epoch: int
    running: bool
    now_s: float


@dataclass(frozen=True, slots=True)
class Complete:
    """Answered with `ok`, `stale` or `conflict`, like `Fail`."""

    job: str
    host: str
    epoch: int
    artifact: str


@dataclass(frozen=True, slots=True)
class Fail:
    job: str
    host: str
    epoch: int
    cause: Cause
    error: str
    now_s: float


@dataclass(frozen=True, slots=True)
class Cancel:
    """Answered with `ok` or `precondition`, like `Requeue`."""

    job: str
    now_s: float


@dataclass(frozen=True, slots=True)
class Requeue:
    job: str
    now_s: float


@dataclass(frozen=True, slots=True)
class Expire:
    """A sweep: answered with whether it expired this job."""

    job: str
    now_s: float


@dataclass(frozen=True, slots=True)
class Ripen:
    """Answered with None: only a number of jobs is told."""

    job: str
    now_s: float


@dataclass(frozen=True, slots=True)
class Read:
    """Answered with (status, epoch, host, artifact)."""

    job: str


Call: TypeAlias = Take | Renew | Complete | Fail | Cancel | Requeue | Expire | Ripen | Read
Answer: TypeAlias = object
Told = tuple[int, str, str, str]


class Job(NamedTuple):
    status: JobStatus = JobStatus.PENDING
    epoch: int = 0
    host: str = ""
    artifact: str = ""
    until_s: float | None = None
    """The end of the lease; None when there is none."""
    expired: bool = False
    queued: bool = True
    not_before_s: float = 0.0
    tally: AttemptCounts = AttemptCounts()
    claims: frozenset[tuple[str, str, int]] = frozenset()
    told: frozenset[Told] = frozenset()
    """The ends that were reported and taken: epoch, host, and the words."""

    @property
    def ripening(self) -> bool:
        return self.status is JobStatus.PENDING and not self.queued


Next: TypeAlias = Iterator[tuple[Job, Answer]]


@dataclass(frozen=True, slots=True)
class FleetModel:
    strict: bool

    def initial(self) -> Job:
        return Job()

    def partition(self, input: Call) -> Hashable:
        return input.job

    def is_read(self, input: Call, outcome: Outcome[Answer]) -> bool:
        if isinstance(input, Read):
            return True
        if not isinstance(outcome, Returned):
            return False
        match input:
            case Complete() | Fail():
                return outcome.output != "ok"
            case Cancel() | Requeue():
                return outcome.output == "precondition"
            case Renew():
                return isinstance(outcome.output, tuple) and outcome.output[0] != "held"
            case _:
                return isinstance(input, Expire) and outcome.output is False

    def step(self, state: Job, input: Call, outcome: Outcome[Answer]) -> tuple[Job, ...]:
        return tuple({after: None for after, answer in self._next(state, input) if outcome.allows(answer)})

    def _next(self, job: Job, given: Call) -> Next:
        match given:
            case Take():
                yield from _take(job, given)
            case Renew():
                yield _renew(job, given)
            case Complete():
                yield _complete(job, given)
            case Fail():
                yield _fail(job, given)
            case Cancel():
                yield _cancel(job, given)
            case Requeue():
                yield _requeue(job)
            case Expire():
                yield from self._expire(job, given)
            case Ripen():
                yield from self._ripen(job, given)
            case Read():
                yield job, (job.status, job.epoch, job.host, job.artifact)
            case _:
                assert_never(given)

    def _expire(self, job: Job, given: Expire) -> Next:
        due = job.until_s is not None and not job.expired and job.until_s <= given.now_s
        if due:
            yield _ruled(job, after_expiry(job.tally, BUDGET, now_s=given.now_s), given.now_s), True
        if not due or not self.strict:
            yield job, False

    def _ripen(self, job: Job, given: Ripen) -> Next:
        due = job.ripening and job.not_before_s <= given.now_s
        if due:
            yield job._replace(queued=True), None
        if not due or not self.strict:
            yield job, None


def _take(job: Job, given: Take) -> Next:
    before = [epoch for host, claim, epoch in job.claims if (host, claim) == (given.host, given.claim)]
    for epoch in before:
        if job.epoch == epoch and job.until_s is not None:
            yield job, epoch
    if job.queued and not before:
        epoch = job.epoch + 1
        yield (
            job._replace(
                status=JobStatus.CLAIMED,
                epoch=epoch,
                host=given.host,
                until_s=given.now_s + LEASE_S,
                expired=False,
                queued=False,
                tally=job.tally if job.until_s is None else _counted(job.tally, Cause.HOST_LOST),
                claims=job.claims | {(given.host, given.claim, epoch)},
            ),
            epoch,
        )


def _alive(job: Job, host: str, epoch: int) -> bool:
    held = job.status in HELD or (job.status is JobStatus.PENDING and job.until_s is not None)
    return (job.epoch, job.host) == (epoch, host) and held


def _refused(job: Job, host: str, epoch: int) -> str:
    return "conflict" if (job.epoch, job.host) == (epoch, host) and job.status in TERMINAL else "stale"


def _renew(job: Job, given: Renew) -> tuple[Job, Answer]:
    if not _alive(job, given.host, given.epoch):
        ended = _refused(job, given.host, given.epoch) == "conflict"
        return job, ("ended" if ended else "stale", job.status)
    status = JobStatus.RUNNING if job.status is JobStatus.PENDING or given.running else job.status
    after = job._replace(status=status, until_s=given.now_s + LEASE_S, expired=False, queued=False)
    return after, ("held", status)


def _complete(job: Job, given: Complete) -> tuple[Job, Answer]:
    words = (given.epoch, given.host, "completed", given.artifact)
    if not _alive(job, given.host, given.epoch):
        return job, "ok" if words in job.told else _refused(job, given.host, given.epoch)
    after = job._replace(
        status=JobStatus.COMPLETED,
        artifact=given.artifact,
        until_s=None,
        expired=False,
        queued=False,
        told=job.told | {words},
    )
    return after, "ok"


def _fail(job: Job, given: Fail) -> tuple[Job, Answer]:
    words = (given.epoch, given.host, given.cause, given.error)
    if not _alive(job, given.host, given.epoch):
        return job, "ok" if words in job.told else _refused(job, given.host, given.epoch)
    ruling = after_failure(given.cause, job.tally, BUDGET, now_s=given.now_s, chance=CHANCE)
    return _ruled(job, ruling, given.now_s)._replace(told=job.told | {words}), "ok"


def _cancel(job: Job, given: Cancel) -> tuple[Job, Answer]:
    if job.status is JobStatus.CANCELLED:
        return job, "ok"
    if job.status in TERMINAL:
        return job, "precondition"
    ruling = RetryDecision(event=JobEvent.CANCEL, cause=Cause.CANCELLED, not_before_s=given.now_s, reason="")
    return _ruled(job, ruling, given.now_s), "ok"


def _requeue(job: Job) -> tuple[Job, Answer]:
    if job.status not in TERMINAL:
        return job, "precondition"
    return job._replace(
        status=JobStatus.PENDING, artifact="", queued=True, not_before_s=0.0, tally=AttemptCounts(), until_s=None
    ), "ok"


def _ruled(job: Job, ruling: RetryDecision, now_s: float) -> Job:
    match ruling.event:
        case JobEvent.EXPIRE:
            return job._replace(status=JobStatus.PENDING, expired=True, queued=job.not_before_s <= now_s)
        case JobEvent.RETRY:
            after = job._replace(status=JobStatus.PENDING, queued=ruling.not_before_s <= now_s)
        case JobEvent.FAIL:
            after = job._replace(status=JobStatus.FAILED, queued=False)
        case JobEvent.CANCEL:
            after = job._replace(status=JobStatus.CANCELLED, queued=False)
        case _:
            raise AssertionError(ruling)
    tally = job.tally if job.until_s is None else _counted(job.tally, ruling.cause)
    return after._replace(until_s=None, expired=False, not_before_s=ruling.not_before_s, tally=tally)


def _counted(tally: AttemptCounts, cause: Cause) -> AttemptCounts:
    column = "charged" if cause in CHARGED else {Cause.HOST_LOST: "lost", Cause.INFRA: "infra"}.get(cause, "excused")
    return msgspec.structs.replace(tally, **{column: getattr(tally, column) + 1})
