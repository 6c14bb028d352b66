"""The history of a job: kinds and wording of its events, how many are kept, which are merged (within 10 s), and from
how long on a barrier is slow (`SLOW_BARRIER_S`). It is projected from facts, so it survives restarts.

`annotate` gives a fact its time when it is decided; `record` makes events of facts when they are applied. Workers that
do the same together make one event, so that ten thousand joins do not displace everything else.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Final

import msgspec

from strata.coord.core import goodput
from strata.coord.core.facts import (
    WORKERS_NAMED,
    BarrierDecided,
    BarrierVerdict,
    CheckpointCommitted,
    CheckpointRefused,
    CommandIssued,
    Fact,
    GangStatus,
    GenerationFormed,
    JobCreated,
    JobFinished,
    JobReset,
    LeaderChanged,
    Recovered,
    ShardReturned,
    StragglerFinding,
    TimedFact,
    WorkerJoined,
    WorkerJudged,
    WorkerLost,
    barrier_timeout_message,
    is_timed,
)
from strata.coord.core.goodput import GoodputCost, GoodputLedger, GoodputPhase
from strata.coord.core.job_config import EscalationLevel

if TYPE_CHECKING:
    from strata.coord.core.state import CoordState, JobState

SLOW_BARRIER_S: Final = 10.0
"""A barrier that was open for longer is part of the history."""
EVENTS_KEPT: Final = 2_000
"""The most events that are kept of one job."""
PARTITION_EVENTS: Final = 50_000
"""The most events of all jobs together, roughly: they share one snapshot."""
LEAST_KEPT: Final = 100
MERGED_S: Final = 10.0
"""Workers that do the same within this time share an event."""
LEFT: Final = "left"
"""The cause of a worker's loss begins like this if it left on purpose."""
REPLACED: Final = "replaced"
CONSEQUENCE: Final = {
    EscalationLevel.NONE: "it has its full share of the data",
    EscalationLevel.REWEIGHT: "it gets less data",
    EscalationLevel.REBALANCE: "it was told to rebalance",
    EscalationLevel.STOP: "it was told to stop",
}


class HistoryKind(StrEnum):
    JOB_CREATED = "job_created"
    WORKER_JOINED = "worker_joined"
    WORKER_LEFT = "worker_left"
    WORKER_LOST = "worker_lost"
    WORKER_REPLACED = "worker_replaced"
    GENERATION_FORMED = "generation_formed"
    STRAGGLER = "straggler"
    HANG = "hang"
    SHARD_QUARANTINED = "shard_quarantined"
    BARRIER_SLOW = "barrier_slow"
    BARRIER_TIMED_OUT = "barrier_timed_out"
    CHECKPOINT_COMMITTED = "checkpoint_committed"
    CHECKPOINT_BAD = "checkpoint_bad"
    RECOVERY = "recovery"
    COMMAND_ISSUED = "command_issued"
    COMMAND_REFUSED = "command_refused"
    FAILOVER = "failover"
    JOB_FINISHED = "job_finished"
    JOB_RESET = "job_reset"


INCIDENTS: Final = frozenset(
    {
        HistoryKind.WORKER_LOST,
        HistoryKind.WORKER_REPLACED,
        HistoryKind.STRAGGLER,
        HistoryKind.HANG,
        HistoryKind.SHARD_QUARANTINED,
        HistoryKind.BARRIER_TIMED_OUT,
        HistoryKind.CHECKPOINT_BAD,
        HistoryKind.RECOVERY,
        HistoryKind.FAILOVER,
    }
)
"""What an operator may have to look into."""
MERGED: Final = frozenset({HistoryKind.WORKER_JOINED, HistoryKind.WORKER_LEFT, HistoryKind.WORKER_LOST})
"""What workers often do together."""
_DISRUPTIVE: Final = frozenset({HistoryKind.WORKER_LOST, HistoryKind.WORKER_REPLACED, HistoryKind.HANG})
"""What is charged with the time that the job loses next."""
_MAYBE_DISRUPTIVE: Final = frozenset({HistoryKind.WORKER_JOINED, HistoryKind.WORKER_LEFT, HistoryKind.RECOVERY})
"""The same, unless the time is lost because of an earlier event."""


class HistoryEvent(msgspec.Struct, frozen=True, array_like=True):
    number: int
    kind: HistoryKind
    at_ms: int
    """Wall time; of the first one if workers did the same together."""
    run: int
    generation: int
    message: str
    workers: tuple[str, ...] = ()
    """The workers of the event; of many only the first ones."""
    worker_count: int = 0
    cost: GoodputCost = GoodputCost()
    """What it has cost the job so far."""


class JobHistory(msgspec.Struct):
    """The last events, oldest first, and how the time was spent."""

    events: list[HistoryEvent] = []
    next_number: int = 1
    charged: int = 0
    """The event that is charged with lost time; 0: none."""
    ledger: GoodputLedger = msgspec.field(default_factory=GoodputLedger)

    def position(self, number: int) -> int | None:
        """Returns where the event with a number is: the numbers have no gap."""
        at = len(self.events) - (self.next_number - number)
        return at if 0 <= at < len(self.events) else None


def events_kept(jobs: int) -> int:
    """Returns how many events of each job are kept, so that the snapshot of all of them keeps its size."""
    return max(LEAST_KEPT, min(EVENTS_KEPT, PARTITION_EVENTS // max(1, jobs)))


def next_run(history: JobHistory) -> JobHistory:
    """The events stay; time is counted anew."""
    return JobHistory(history.events, history.next_number)


# Decide


def annotate(state: CoordState, fact: Fact, now_s: float) -> Fact:
    """The fact with its time, if this process knows the time of day."""
    if state.wall_offset_s is None or not is_timed(fact):
        return fact
    at_ms = round((now_s + state.wall_offset_s) * 1000)
    soft = state.soft_of(fact.job)
    match fact:
        case BarrierDecided():
            return _annotate_barrier(state, fact, now_s, at_ms)
        case ShardReturned() if not fact.quarantined:
            return fact
        case WorkerLost() if not fact.cause.startswith(LEFT):
            silent_s = max(0.0, now_s - soft.seen_s.get(fact.worker_id, now_s))
            return msgspec.structs.replace(fact, at_ms=at_ms, silent_ms=round(silent_s * 1000))
        case JobCreated():
            return msgspec.structs.replace(fact, at_ms=at_ms, leader_epoch=state.leader_epoch)
        case _:
            return msgspec.structs.replace(fact, at_ms=at_ms)


def _annotate_barrier(state: CoordState, fact: BarrierDecided, now_s: float, at_ms: int) -> BarrierDecided:
    """A barrier that was released soon is no news, and there may be one for every step."""
    barrier = state.soft_of(fact.job).barriers.get(fact.barrier_id)
    open_s = now_s - barrier.opened_s if barrier is not None else 0.0
    if fact.verdict is not BarrierVerdict.TIMED_OUT and open_s < SLOW_BARRIER_S:
        return fact
    last = next(reversed(barrier.arrived), "") if barrier is not None else ""
    return msgspec.structs.replace(fact, at_ms=at_ms, open_ms=round(open_s * 1000), last_arrival=last)


def leader_changes(state: CoordState, job: JobState) -> list[Fact]:
    """A coordinator that took over says so once, in every job that has members."""
    # The first leader of all took over from nobody.
    known = max(1, job.leader_epoch)
    if not job.members or known >= state.leader_epoch or state.wall_offset_s is None:
        return []
    return [LeaderChanged(job.job, state.leader_epoch)]


# Apply


def record(job: JobState, fact: TimedFact, kept: int) -> None:
    """A fact was applied. Without a time it makes no event, and no time passes."""
    history = job.history
    if fact.at_ms:
        _charge(history, goodput.advance(history.ledger, fact.at_ms))
        for kind, message, workers in _events(job, fact):
            _add(job, fact, kind, message, workers)
        del history.events[: max(0, len(history.events) - kept)]
        _charge(history, goodput.charge(history.ledger, fact, LEFT))
    to_recover: dict[str, None] = {}
    if isinstance(fact, Recovered):
        to_recover = {worker_id: None for worker_id, member in job.members.items() if member.recover_first}
    goodput.note_worker(history.ledger, fact, to_recover)
    _follow_job(job, fact)


def _follow_job(job: JobState, fact: TimedFact) -> None:
    history, ledger = job.history, job.history.ledger
    if isinstance(fact, GenerationFormed):
        ledger.has_trained = True
    if isinstance(fact, CheckpointCommitted):
        # Work that was lost before it is made up for.
        history.charged = 0
        known = {each.checkpoint_id for each in job.checkpoints}
        ledger.useful_at_ms = {name: ms for name, ms in ledger.useful_at_ms.items() if name in known}
    goodput.enter(ledger, phase_of(job))


def phase_of(job: JobState) -> GoodputPhase:
    ledger = job.history.ledger
    if job.status is GangStatus.FINISHED:
        return GoodputPhase.ENDED
    if not job.members or not ledger.has_trained:
        return GoodputPhase.WAITING
    if not job.settled or ledger.recovering:
        return GoodputPhase.RESTART
    if ledger.hung:
        return GoodputPhase.DETECT
    return GoodputPhase.CHECKPOINT if job.collecting else GoodputPhase.USEFUL


def _charge(history: JobHistory, cost: GoodputCost) -> None:
    at = history.position(history.charged) if cost.total_ms and history.charged else None
    if at is not None:
        event = history.events[at]
        history.events[at] = msgspec.structs.replace(event, cost=event.cost.plus(cost))


def _add(job: JobState, fact: TimedFact, kind: HistoryKind, message: str, workers: tuple[str, ...]) -> None:
    history = job.history
    last = history.events[-1] if history.events else None
    if (
        last is not None
        and kind in MERGED
        and (last.kind, last.message, last.generation, last.run) == (kind, message, job.generation, job.run)
        and fact.at_ms - last.at_ms <= MERGED_S * 1000
    ):
        names = tuple(dict.fromkeys((*last.workers, *workers)))[:WORKERS_NAMED]
        merged = msgspec.structs.replace(last, workers=names, worker_count=last.worker_count + len(workers))
        history.events[-1] = merged
        return
    number = history.next_number
    history.next_number += 1
    event = HistoryEvent(
        number, kind, fact.at_ms, job.run, job.generation, message, workers[:WORKERS_NAMED], len(workers)
    )
    history.events.append(event)
    if kind in _DISRUPTIVE or (kind in _MAYBE_DISRUPTIVE and not history.charged):
        history.charged = number


_Described = tuple[HistoryKind, str, tuple[str, ...]]


def _events(job: JobState, fact: TimedFact) -> list[_Described]:  # noqa: C901, PLR0911, PLR0912 - one arm per fact
    match fact:
        case JobCreated():
            return [(HistoryKind.JOB_CREATED, "the job was created", ())]
        case JobFinished():
            return [(HistoryKind.JOB_FINISHED, f"run {job.run} has consumed all its data", ())]
        case JobReset():
            return [(HistoryKind.JOB_RESET, f"run {fact.run} begins with no data consumed", ())]
        case LeaderChanged():
            return [(HistoryKind.FAILOVER, f"a coordinator took over as leader {fact.leader_epoch}", ())]
        case WorkerJoined():
            return [(HistoryKind.WORKER_JOINED, "joined", (fact.worker.worker_id,))]
        case WorkerLost():
            return [_loss(fact)]
        case WorkerJudged():
            kind = HistoryKind.HANG if fact.finding is StragglerFinding.HUNG else HistoryKind.STRAGGLER
            return [(kind, f"{fact.reason}; {CONSEQUENCE[fact.level]}", (fact.worker_id,))]
        case GenerationFormed():
            message = f"generation {fact.generation} formed with {len(job.ranks)} members"
            return [(HistoryKind.GENERATION_FORMED, message, ())]
        case ShardReturned():
            message = f"a shard of {fact.dataset_id}, epoch {fact.epoch}, was put aside: {fact.reason}"
            return [(HistoryKind.SHARD_QUARANTINED, message, ())]
        case BarrierDecided():
            return _barrier(fact)
        case CheckpointCommitted():
            message = f"checkpoint {fact.checkpoint_id} of step {fact.step} was committed"
            return [(HistoryKind.CHECKPOINT_COMMITTED, message, ())]
        case Recovered():
            return _recovery(fact)
        case CommandIssued():
            reason = f": {fact.reason}" if fact.reason else ""
            return [(HistoryKind.COMMAND_ISSUED, f"command {fact.command_id} {fact.kind.name}{reason}", fact.workers)]
        case CheckpointRefused():
            commands = ", ".join(map(str, fact.command_ids))
            return [(HistoryKind.COMMAND_REFUSED, f"command {commands} was refused: {fact.reason}", ())]
        case _:
            return []


def _loss(fact: WorkerLost) -> _Described:
    if fact.cause == REPLACED:
        message = f"another process replaced incarnation {fact.incarnation}"
        return HistoryKind.WORKER_REPLACED, message, (fact.worker_id,)
    kind = HistoryKind.WORKER_LEFT if fact.cause.startswith(LEFT) else HistoryKind.WORKER_LOST
    return kind, fact.cause, (fact.worker_id,)


def _barrier(fact: BarrierDecided) -> list[_Described]:
    if fact.verdict is BarrierVerdict.TIMED_OUT:
        message = barrier_timeout_message(fact.barrier_id, fact.missing)
        return [(HistoryKind.BARRIER_TIMED_OUT, message, fact.missing)]
    if fact.verdict is BarrierVerdict.RELEASED:
        waited = f"barrier {fact.barrier_id} was open for {fact.open_ms / 1000:.1f} s; the last to arrive"
        return [(HistoryKind.BARRIER_SLOW, f"{waited}: {fact.last_arrival}", (fact.last_arrival,))]
    return []


def _recovery(fact: Recovered) -> list[_Described]:
    where = f"checkpoint {fact.checkpoint_id}" if fact.checkpoint_id else "the beginning"
    back: _Described = (HistoryKind.RECOVERY, f"the job went back to {where}", ())
    if fact.bad_checkpoint_id is None:
        return [back]
    return [(HistoryKind.CHECKPOINT_BAD, f"checkpoint {fact.bad_checkpoint_id} cannot be read", ()), back]


# Read


def find_events(
    history: JobHistory, kinds: frozenset[HistoryKind], search: str, before: int, limit: int
) -> tuple[list[HistoryEvent], int]:
    """The latest first; and the number before which the next page begins, 0 if there is none."""
    text = search.casefold()
    found: list[HistoryEvent] = []
    for event in reversed(history.events):
        if before and event.number >= before:
            continue
        if kinds and event.kind not in kinds:
            continue
        if text and not _contains(event, text):
            continue
        if len(found) == limit:
            return found, found[-1].number
        found.append(event)
    return found, 0


def open_cost(history: JobHistory, now_ms: int) -> GoodputCost:
    """Returns what the event that is charged now costs since the last fact: nobody has gone on yet."""
    ledger = history.ledger
    passed_ms = max(0, now_ms - ledger.now_ms) if history.charged and ledger.began_ms else 0
    if ledger.phase is GoodputPhase.DETECT:
        return GoodputCost(detect_ms=passed_ms)
    return GoodputCost(restart_ms=passed_ms if ledger.phase is GoodputPhase.RESTART else 0)


def _contains(event: HistoryEvent, text: str) -> bool:
    return text in event.message.casefold() or any(text in worker.casefold() for worker in event.workers)
