"""The goodput of a job of workers: how each fact moves its time between useful, checkpoint, restart, rolled back,
detection and waiting.

Every millisecond since the run began is in exactly one part. What a recovery threw away moves from useful to rolled
back, and the silence before a loss moves from useful to detect, so the parts always add up to the time that has passed.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from strata.coord.core.facts import (
    CheckpointCommitted,
    JobCreated,
    JobReset,
    Recovered,
    StragglerFinding,
    TimedFact,
    WorkerJoined,
    WorkerJudged,
    WorkerLost,
    WorkerRecovered,
)


class GoodputPhase(StrEnum):
    """Where the time of a run goes."""

    WAITING = "waiting"
    """Lasts until the first generation, and while no worker is there."""
    USEFUL = "useful"
    CHECKPOINT = "checkpoint"
    """Lasts from the first part of a checkpoint to its commit."""
    DETECT = "detect"
    """Lasts from the last sign of a lost worker, or from a hang that was found, to its eviction."""
    RESTART = "restart"
    """Lasts from a change of members to the moment at which all of them went on."""
    ROLLED_BACK = "rolled_back"
    """Was useful, until a recovery went back behind it. No phase of its own."""
    ENDED = "ended"
    """The run is finished: no time is counted."""


COUNTED = tuple(phase for phase in GoodputPhase if phase is not GoodputPhase.ENDED)


class GoodputCost(msgspec.Struct, frozen=True, array_like=True):
    """Milliseconds that an event cost the job."""

    detect_ms: int = 0
    restart_ms: int = 0
    rolled_back_ms: int = 0

    @property
    def total_ms(self) -> int:
        return self.detect_ms + self.restart_ms + self.rolled_back_ms

    def plus(self, other: GoodputCost) -> GoodputCost:
        return GoodputCost(
            self.detect_ms + other.detect_ms,
            self.restart_ms + other.restart_ms,
            self.rolled_back_ms + other.rolled_back_ms,
        )


class GoodputLedger(msgspec.Struct):
    began_ms: int = 0
    """0: no fact of this run had a time yet."""
    now_ms: int = 0
    """The time up to which everything is counted."""
    entered_ms: int = 0
    """When the phase began."""
    phase: GoodputPhase = GoodputPhase.WAITING
    spent_ms: dict[GoodputPhase, int] = {}
    has_trained: bool = False
    """Whether a generation has formed in this run: from then on a change of members is a restart."""
    recovering: dict[str, None] = {}
    """Members that have not gone back to the checkpoint yet."""
    hung: dict[str, None] = {}
    useful_at_ms: dict[str, int] = {}
    """The useful time that each committed checkpoint holds."""

    def spent(self, phase: GoodputPhase) -> int:
        return self.spent_ms.get(phase, 0)

    def add(self, phase: GoodputPhase, ms: int) -> None:
        if ms:
            self.spent_ms[phase] = self.spent(phase) + ms


def parts_at(ledger: GoodputLedger, now_ms: int) -> dict[GoodputPhase, int]:
    """Milliseconds of each part, with the time since the last fact; they add up to the time since the run began."""
    parts: dict[GoodputPhase, int] = {phase: ledger.spent(phase) for phase in COUNTED}
    if ledger.began_ms and ledger.phase is not GoodputPhase.ENDED:
        parts[ledger.phase] += max(0, now_ms - ledger.now_ms)
    return parts


def advance(ledger: GoodputLedger, at_ms: int) -> GoodputCost:
    """Count the time up to a fact. Time does not go back, whatever the clock of a new leader says.

    Returns what of it was lost.
    """
    if not at_ms:
        return GoodputCost()
    if not ledger.began_ms:
        ledger.began_ms = ledger.now_ms = ledger.entered_ms = at_ms
    passed_ms = max(0, at_ms - ledger.now_ms)
    ledger.now_ms += passed_ms
    if ledger.phase is GoodputPhase.ENDED:
        # A finished run that was joined all the same, or was reset: what lies between belongs to neither.
        ledger.began_ms += passed_ms
        return GoodputCost()
    ledger.add(ledger.phase, passed_ms)
    if ledger.phase is GoodputPhase.DETECT:
        return GoodputCost(detect_ms=passed_ms)
    return GoodputCost(restart_ms=passed_ms if ledger.phase is GoodputPhase.RESTART else 0)


def charge(ledger: GoodputLedger, fact: TimedFact, left: str) -> GoodputCost:
    """Returns what a fact means for time that was counted before it. `left`: how the cause of a worker that left
    begins."""
    match fact:
        case WorkerLost() if not fact.cause.startswith(left):
            return GoodputCost(detect_ms=_charge_detection(ledger, fact.silent_ms))
        case Recovered():
            return GoodputCost(rolled_back_ms=_roll_back(ledger, fact.checkpoint_id))
        case CheckpointCommitted():
            ledger.useful_at_ms[fact.checkpoint_id] = ledger.spent(GoodputPhase.USEFUL)
        case _:
            pass
    return GoodputCost()


def _charge_detection(ledger: GoodputLedger, silent_ms: int) -> int:
    """The last of the useful time was spent waiting for a worker that was dead already."""
    if ledger.phase is not GoodputPhase.USEFUL:
        return 0
    moved_ms = max(0, min(silent_ms, ledger.now_ms - ledger.entered_ms, ledger.spent(GoodputPhase.USEFUL)))
    ledger.add(GoodputPhase.USEFUL, -moved_ms)
    ledger.add(GoodputPhase.DETECT, moved_ms)
    return moved_ms


def _roll_back(ledger: GoodputLedger, checkpoint_id: str | None) -> int:
    useful_ms = ledger.spent(GoodputPhase.USEFUL)
    # A checkpoint whose fact has no time: nobody knows what was lost.
    kept_ms = 0 if checkpoint_id is None else ledger.useful_at_ms.get(checkpoint_id, useful_ms)
    moved_ms = max(0, useful_ms - kept_ms)
    ledger.add(GoodputPhase.USEFUL, -moved_ms)
    ledger.add(GoodputPhase.ROLLED_BACK, moved_ms)
    return moved_ms


def note_worker(ledger: GoodputLedger, fact: TimedFact, to_recover: dict[str, None]) -> None:
    """Notes who has yet to recover, and who hangs. `to_recover`: the members that a recovery concerns."""
    match fact:
        case WorkerJoined():
            _set(ledger.recovering, fact.worker.worker_id, present=fact.recover_first)
        case WorkerLost():
            ledger.recovering.pop(fact.worker_id, None)
            ledger.hung.pop(fact.worker_id, None)
        case WorkerRecovered():
            ledger.recovering.pop(fact.worker_id, None)
        case Recovered():
            ledger.recovering = to_recover
            ledger.hung = {}
        case WorkerJudged():
            _set(ledger.hung, fact.worker_id, present=fact.finding is StragglerFinding.HUNG)
        case JobCreated() | JobReset():
            ledger.recovering, ledger.hung = {}, {}
        case _:
            pass


def _set(names: dict[str, None], name: str, *, present: bool) -> None:
    if present:
        names[name] = None
    else:
        names.pop(name, None)


def enter(ledger: GoodputLedger, phase: GoodputPhase) -> None:
    if phase is not ledger.phase:
        ledger.phase, ledger.entered_ms = phase, ledger.now_ms
