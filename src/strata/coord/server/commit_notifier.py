"""Wakes the calls that wait in the coordinator (for shards, barriers, generations, checkpoints) when the facts that
they wait for are committed.
"""

from __future__ import annotations

from collections.abc import Iterable

from strata.base.notify import KeyedNotifier
from strata.coord.core.facts import (
    BarrierDecided,
    CheckpointAgreed,
    CommandIssued,
    Fact,
    GenerationFormed,
    Recovered,
    ShardAcked,
    ShardReturned,
    WorkerLost,
)
from strata.coord.core.inputs import ArriveAtBarrier, BarrierState, Input, Outcome
from strata.coord.core.state import CoordState


class CommitNotifier:
    def __init__(self) -> None:
        self.barriers: KeyedNotifier[BarrierState] = KeyedNotifier()
        """Keyed by (job, generation, barrier_id)."""
        self.events: KeyedNotifier[None] = KeyedNotifier()
        """Keyed by ("formed", job), ("data", job), ("changed", job) or ("worker", job, worker_id)."""

    def notify(self, fact: Fact, request: Input, outcome: Outcome, state: CoordState) -> None:
        match fact:
            case BarrierDecided():
                self._release(fact, request, outcome)
            case GenerationFormed():
                self.events.notify(("formed", fact.job), None)
                self._notify_workers(fact.job, state.jobs[fact.job].ranks)
            case CommandIssued():
                self._notify_workers(fact.job, fact.workers)
            case CheckpointAgreed():
                self._notify_workers(fact.job, state.jobs[fact.job].ranks)
            case WorkerLost():
                self._notify_workers(fact.job, (fact.worker_id,))
            case _:
                pass
        if _may_free_shards(fact, state):
            self.events.notify(("data", fact.job), None)

    def cancel_all(self) -> None:
        self.barriers.cancel_all()
        self.events.cancel_all()

    def _notify_workers(self, job: str, workers: Iterable[str]) -> None:
        for worker_id in workers:
            self.events.notify(("worker", job, worker_id), None)

    def _release(self, fact: BarrierDecided, request: Input, outcome: Outcome) -> None:
        reply = outcome.reply
        if not (isinstance(request, ArriveAtBarrier) and isinstance(reply, BarrierState)):
            reply = BarrierState(fact.verdict, fact.generation, 0, 0, fact.missing)
        self.barriers.notify((fact.job, fact.generation, fact.barrier_id), reply)


def _may_free_shards(fact: Fact, state: CoordState) -> bool:
    """Says whether a worker that got no shard may get one now, or reach the end of the epoch."""
    if isinstance(fact, ShardAcked):
        dataset = state.jobs[fact.job].datasets.get(fact.dataset_id)
        ledger = dataset.epochs.get(fact.epoch) if dataset else None
        return ledger is None or not ledger.leases
    return isinstance(fact, WorkerLost | GenerationFormed | ShardReturned | Recovered)
