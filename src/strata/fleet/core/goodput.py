"""Goodput of a job of the fleet: how attempts and events divide its time into waiting, useful, detection, restart and
rolled back, and what each interruption cost.

The time of a job begins when it is queued and ends when it has ended; between its end and a requeue it has none. Each
moment belongs to one part:

    waiting       until the job runs for the first time since it was queued: in the queue, and while its host prepares
    useful        the trainer ran, and the work was kept: up to the last checkpoint of an attempt that was cut off, to
                  the end of another one
    checkpoint    the trainer wrote checkpoints, as far as it reports that, and the host uploaded the result
    detect        the host was silent, until its lease ran out
    restart       from then on, or from the end of an attempt that has to be repeated, until the job runs again
    rolled_back   the trainer ran, and the work was lost: what came after the last checkpoint
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple, get_args

import msgspec

from strata.database import event_kinds

GoodputPart = Literal["waiting", "useful", "checkpoint", "detect", "restart", "rolled_back"]
PARTS: Final[tuple[GoodputPart, ...]] = get_args(GoodputPart)
JobPhase = Literal["queued", "prepare", "run", "upload", "silent"]
LEDGER_EVENTS: Final = (
    event_kinds.JOB_CHECKPOINTED,
    event_kinds.JOB_EXPIRED,
    event_kinds.JOB_REVIVED,
    event_kinds.JOB_REQUEUED,
    event_kinds.JOB_CANCELLED,
)
"""The kinds of events that the parts follow from; without them the attempts alone tell, and less exactly."""

_REPEATED: Final = frozenset({"retried", "lost"})
"""Outcomes of attempts after which the job goes back to the queue by itself."""


@dataclass(frozen=True, slots=True)
class AttemptTimes:
    """One attempt, as its row and its metrics tell."""

    number: int
    epoch: int
    host_id: str
    claimed_at_s: float
    started_at_s: float | None = None
    ended_at_s: float | None = None
    outcome: str = ""
    cause: str = ""
    ran_s: float | None = None
    """How long the trainer ran, as its host reports at the end."""
    checkpoint_s: float = 0.0
    """How long it wrote checkpoints, as it reports."""


class LedgerEvent(NamedTuple):
    at_s: float
    kind: str
    epoch: int
    """0: of no attempt."""
    seen_at_s: float | None = None
    """The last heartbeat of the host, for `job.expired`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTimes:
    created_at_s: float
    until_s: float
    """The end of a job that has ended; now of another."""
    ended: bool
    attempts: Sequence[AttemptTimes]
    events: Sequence[LedgerEvent] = ()
    server: bool = False
    """A server has served whatever comes after: none of its work is lost."""


class TimelineSegment(msgspec.Struct, frozen=True):
    """Segments of a job follow each other without a gap, but for the time between an end and a requeue."""

    from_s: float
    to_s: float
    part: GoodputPart
    """What that time counts as."""
    phase: JobPhase
    """What the job did: `silent` is a host that does not answer."""
    attempt: int
    """Its number; 0: no host had the job."""


class JobInterruption(NamedTuple):
    """An attempt that ended before the job did, and what that cost."""

    at_s: float
    attempt: int
    host_id: str
    cause: str
    resumed_at_s: float | None
    """When the job ran again; None: it does not yet, or never did."""
    detect_s: float
    restart_s: float
    rolled_back_s: float

    @property
    def cost_s(self) -> float:
        return self.detect_s + self.restart_s + self.rolled_back_s


@dataclass(frozen=True, slots=True, kw_only=True)
class JobGoodput:
    segments: Sequence[TimelineSegment]
    interruptions: Sequence[JobInterruption] = ()

    def seconds(self, from_s: float = float("-inf"), to_s: float = float("inf")) -> Mapping[GoodputPart, float]:
        """The seconds of each part, of the whole job or within these times."""
        sums: dict[GoodputPart, float] = dict.fromkeys(PARTS, 0.0)
        for each in self.segments:
            sums[each.part] += max(0.0, min(each.to_s, to_s) - max(each.from_s, from_s))
        return sums


def share(seconds: Mapping[GoodputPart, float]) -> float | None:
    """The useful share of the time in which the job had a host or should have had one again; None if it had none."""
    held_s = sum(seconds[part] for part in PARTS if part != "waiting")
    return seconds["useful"] / held_s if held_s > 0 else None


@dataclass(slots=True)
class _Writer:
    """Adds segments one after the other: none begins before the end of the last one."""

    now_s: float
    until_s: float
    segments: list[TimelineSegment] = field(default_factory=list)

    def add(self, to_s: float, part: GoodputPart, phase: JobPhase, attempt: int = 0) -> float:
        """Adds time up to `to_s`, and returns how long that is."""
        from_s, self.now_s = self.now_s, min(max(self.now_s, to_s), self.until_s)
        if self.now_s > from_s:
            self.segments.append(TimelineSegment(from_s, self.now_s, part, phase, attempt))
        return self.now_s - from_s

    def skip(self, to_s: float) -> None:
        self.now_s = min(max(self.now_s, to_s), self.until_s)


def goodput(job: JobTimes) -> JobGoodput:
    events = sorted(job.events, key=lambda each: each.at_s)
    write = _Writer(job.created_at_s, max(job.until_s, job.created_at_s))
    interruptions: list[JobInterruption] = []
    # A job waits until it runs for the first time since it was queued; what follows an attempt is a restart.
    waiting: GoodputPart = "waiting"
    for place, attempt in enumerate(job.attempts):
        following = job.attempts[place + 1] if place + 1 < len(job.attempts) else None
        if _idle_before(write, events, attempt.claimed_at_s):
            waiting = "waiting"
        _resume(interruptions, write.add(attempt.claimed_at_s, waiting, "queued"), waiting)
        times = _AttemptEnds.of(job, attempt, events, following, write.until_s)
        _resume(interruptions, write.add(times.started_s, waiting, "prepare", attempt.number), waiting)
        if attempt.started_at_s is not None:
            _resumed(interruptions, write.now_s)
            waiting = "restart"
        lost = _write_run(write, attempt, times)
        if times.repeated:
            interruptions.append(
                JobInterruption(
                    times.stopped_s, attempt.number, attempt.host_id, attempt.cause or "host_lost", None, *lost
                )
            )
            waiting = "restart"
        elif attempt.ended_at_s is not None:
            # It has ended, and runs again only because somebody wants so.
            write.skip(_requeued_at(events, attempt.ended_at_s, following, write.until_s))
            waiting = "waiting"
    if not (job.ended and job.attempts and job.attempts[-1].ended_at_s == job.until_s):
        _idle_before(write, events, write.until_s)
        _resume(interruptions, write.add(write.until_s, waiting, "queued"), waiting)
    return JobGoodput(segments=write.segments, interruptions=interruptions)


@dataclass(frozen=True, slots=True)
class _AttemptEnds:
    started_s: float
    """When the trainer began, or the attempt ended without it."""
    kept_s: float
    """The time until which the work of the trainer was kept."""
    stopped_s: float
    """When the trainer ended, or its host was seen last."""
    detected_s: float
    """When the lease had run out; of others the same as `stopped_s`."""
    ended_s: float
    repeated: bool
    """The job goes on with another attempt."""

    @classmethod
    def of(
        cls,
        job: JobTimes,
        attempt: AttemptTimes,
        events: Sequence[LedgerEvent],
        following: AttemptTimes | None,
        until_s: float,
    ) -> _AttemptEnds:
        own = [each for each in events if each.epoch == attempt.epoch]
        ended_s = until_s if attempt.ended_at_s is None else attempt.ended_at_s
        if following is not None:
            ended_s = min(ended_s, following.claimed_at_s)
        started_s = ended_s if attempt.started_at_s is None else attempt.started_at_s
        expired = _last_expiry(own, attempt)
        stopped_s, detected_s = ended_s, ended_s
        if expired is not None:
            stopped_s = expired.at_s if expired.seen_at_s is None else min(expired.seen_at_s, expired.at_s)
            detected_s = expired.at_s
        elif attempt.ran_s is not None and attempt.started_at_s is not None:
            stopped_s = min(attempt.started_at_s + attempt.ran_s, ended_s)
            detected_s = stopped_s
        repeated = expired is not None or attempt.outcome in _REPEATED
        cut_off = repeated or attempt.outcome in ("failed", "cancelled", "orphan")
        kept_s = stopped_s
        if cut_off and not job.server:
            saved = [each.at_s for each in own if each.kind == event_kinds.JOB_CHECKPOINTED]
            kept_s = min(max(saved, default=started_s), stopped_s)
        return cls(started_s, kept_s, stopped_s, detected_s, ended_s, repeated)


def _write_run(write: _Writer, attempt: AttemptTimes, times: _AttemptEnds) -> tuple[float, float, float]:
    """The segments of an attempt from the start of its trainer on; what was detected, waited and rolled back."""
    began_s = write.now_s
    kept_s = max(times.kept_s, began_s)
    if attempt.started_at_s is not None:
        saving_s = min(max(attempt.checkpoint_s, 0.0), max(0.0, min(kept_s, write.until_s) - began_s))
        write.add(kept_s - saving_s, "useful", "run", attempt.number)
        write.add(kept_s, "checkpoint", "run", attempt.number)
    rolled_s = write.add(times.stopped_s, "rolled_back", "run", attempt.number)
    detect_s = restart_s = 0.0
    if times.detected_s > times.stopped_s:
        detect_s = write.add(times.detected_s, "detect", "silent", attempt.number)
    if times.repeated and times.detected_s > times.stopped_s:
        restart_s = write.add(times.ended_s, "restart", "queued")
    else:
        write.add(times.ended_s, "checkpoint", "upload", attempt.number)
    return detect_s, restart_s, rolled_s


def _last_expiry(own: Iterable[LedgerEvent], attempt: AttemptTimes) -> LedgerEvent | None:
    """Returns the event of an attempt whose lease ran out and was not renewed any more."""
    last = None
    for each in own:
        if each.kind == event_kinds.JOB_EXPIRED:
            last = each
        elif each.kind == event_kinds.JOB_REVIVED:
            last = None
    if attempt.outcome not in ("", "lost", "orphan", "cancelled"):
        # It was heard of again: its own report ended it.
        return None
    return last


def _requeued_at(
    events: Iterable[LedgerEvent], ended_s: float, following: AttemptTimes | None, until_s: float
) -> float:
    """Returns when a job that had ended was queued again; without the event, when the next host claimed it."""
    limit_s = until_s if following is None else following.claimed_at_s
    found = (each.at_s for each in events if each.kind == event_kinds.JOB_REQUEUED and ended_s <= each.at_s <= limit_s)
    return next(found, limit_s)


def _idle_before(write: _Writer, events: Iterable[LedgerEvent], until_s: float) -> bool:
    """Skip the time between a cancellation in the queue and the requeue; whether there was one."""
    cancelled = False
    for each in events:
        if not write.now_s <= each.at_s <= until_s:
            continue
        if each.kind == event_kinds.JOB_CANCELLED:
            write.add(each.at_s, "waiting", "queued")
            cancelled = True
        elif each.kind == event_kinds.JOB_REQUEUED and cancelled:
            write.skip(each.at_s)
    return cancelled


def _resume(interruptions: list[JobInterruption], took_s: float, part: GoodputPart) -> None:
    """Ends the cost of an interruption, which grows until the job runs again."""
    if part == "restart" and took_s and interruptions and interruptions[-1].resumed_at_s is None:
        last = interruptions[-1]
        interruptions[-1] = last._replace(restart_s=last.restart_s + took_s)


def _resumed(interruptions: list[JobInterruption], at_s: float) -> None:
    if interruptions and interruptions[-1].resumed_at_s is None:
        interruptions[-1] = interruptions[-1]._replace(resumed_at_s=at_s)
