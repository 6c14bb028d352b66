"""The telemetry of a job: last heartbeats, presence streams, incidents, and which generation and command are committed.

All of it is lost with the process. No decision depends on it; heartbeat replies and operators' views are made of it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final

from strata.coord.core.facts import (
    BarrierDecided,
    BarrierVerdict,
    CheckpointCommitted,
    CommandIssued,
    EscalationLevel,
    Fact,
    GenerationFormed,
    Recovered,
    ShardReturned,
    StragglerFinding,
    WorkerJoined,
    WorkerJudged,
    WorkerLost,
)
from strata.coord.core.state import JobState
from strata.coord.pb import coordinator_pb2 as pb

INCIDENTS_KEPT: Final = 256
HISTORY_KEPT: Final = 1_024
"""Entries kept of each kind of finished thing that an operator may still want to see."""
LEFT: Final = "left"
"""The cause of a worker's loss begins like this if it left on purpose."""
REPLACED: Final = "replaced"
CONSEQUENCE: Final = {
    EscalationLevel.NONE: "it has its full share of the data",
    EscalationLevel.REWEIGHT: "it gets less data",
    EscalationLevel.REBALANCE: "it was told to rebalance",
    EscalationLevel.STOP: "it was told to stop",
}


@dataclass(frozen=True)
class JobIncident:
    kind: pb.IncidentKind.ValueType
    at_s: float
    generation: int
    message: str
    worker_id: str = ""


@dataclass(frozen=True)
class SharedReply:
    """The reply to a heartbeat without commands: the same for all workers of a job until the generation changes."""

    message: pb.HeartbeatResponse
    """Shared: do not modify it."""
    encoded: bytes
    outcomes: dict[str, bytes] = field(default_factory=dict)
    """By worker, its encoded outcome in the reply to a batch."""


@dataclass
class JobTelemetry:
    """The telemetry of one job in this process."""

    generation: int = 0
    """The last committed one. The core's state may be ahead by facts that are not durable yet."""
    last_command: int = 0
    """The last committed one. No worker may get an uncommitted command: after a failover its id would be used again."""
    heartbeats: dict[str, pb.HeartbeatRequest] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)
    """By worker, the highest step it has reported."""
    delivered: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Commands in the last reply to a worker that acknowledges them by its next heartbeat."""
    streams: dict[str, object] = field(default_factory=dict)
    """By worker, its newest presence stream."""
    awaiting_rank: set[str] = field(default_factory=set)
    """Workers that registered and got no rank, because their generation had not formed yet."""
    sdk_versions: dict[str, str] = field(default_factory=dict)
    departed: dict[str, str] = field(default_factory=dict)
    """By worker that is no member any more, the cause."""
    incidents: deque[JobIncident] = field(default_factory=lambda: deque(maxlen=INCIDENTS_KEPT))
    barrier_opened_s: dict[str, float] = field(default_factory=dict)
    """By open barrier, when the first worker arrived; monotonic."""
    committed_at_s: dict[str, float] = field(default_factory=dict)
    """By checkpoint, wall time."""
    issued_at_s: dict[int, float] = field(default_factory=dict)
    """By command, wall time."""
    shared_reply: SharedReply | None = None
    """None: to be encoded again."""

    @classmethod
    def from_journal(cls, job: JobState) -> JobTelemetry:
        """Of a job that was replayed from the journal: everything in it is committed."""
        return cls(generation=job.generation, last_command=job.last_command)

    def record_step(self, worker_id: str, step: int) -> None:
        if step > self.steps.get(worker_id, -1):
            self.steps[worker_id] = step

    def add_incident(self, kind: pb.IncidentKind.ValueType, at_s: float, message: str, worker_id: str = "") -> None:
        self.incidents.append(JobIncident(kind, at_s, self.generation, message, worker_id))

    def record_fact(self, fact: Fact, at_s: float) -> None:
        """A fact is committed."""
        match fact:
            case GenerationFormed():
                self.generation = max(self.generation, fact.generation)
                self.shared_reply = None
            case CommandIssued():
                self.last_command = max(self.last_command, fact.command_id)
                self.issued_at_s[fact.command_id] = at_s
                _keep_latest(self.issued_at_s)
            case WorkerJoined():
                self._forget(fact.worker.worker_id)
            case WorkerLost():
                self._lose(fact, at_s)
            case WorkerJudged():
                self._judge(fact, at_s)
            case BarrierDecided():
                self._end_barrier(fact, at_s)
            case ShardReturned() if fact.quarantined:
                message = f"a shard of {fact.dataset_id}, epoch {fact.epoch}, was put aside: {fact.reason}"
                self.add_incident(pb.INCIDENT_KIND_SHARD_QUARANTINED, at_s, message)
            case CheckpointCommitted():
                self.committed_at_s[fact.checkpoint_id] = at_s
                _keep_latest(self.committed_at_s)
            case Recovered():
                self._recover(fact, at_s)
            case _:
                pass

    def _judge(self, fact: WorkerJudged, at_s: float) -> None:
        kind = pb.INCIDENT_KIND_HANG if fact.finding is StragglerFinding.HUNG else pb.INCIDENT_KIND_STRAGGLER
        self.add_incident(kind, at_s, f"{fact.reason}; {CONSEQUENCE[fact.level]}", fact.worker_id)

    def _end_barrier(self, fact: BarrierDecided, at_s: float) -> None:
        self.barrier_opened_s.pop(fact.barrier_id, None)
        if fact.verdict is BarrierVerdict.TIMED_OUT:
            missing = ", ".join(fact.missing) or "nobody"
            message = f"barrier {fact.barrier_id} timed out; missing: {missing}"
            self.add_incident(pb.INCIDENT_KIND_BARRIER_TIMED_OUT, at_s, message)

    def _lose(self, fact: WorkerLost, at_s: float) -> None:
        worker_id = fact.worker_id
        self._forget(worker_id)
        self.departed[worker_id] = fact.cause
        _keep_latest(self.departed)
        if fact.cause == REPLACED:
            message = f"another process replaced incarnation {fact.incarnation}"
            self.add_incident(pb.INCIDENT_KIND_WORKER_REPLACED, at_s, message, worker_id)
        elif not fact.cause.startswith(LEFT):
            self.add_incident(pb.INCIDENT_KIND_WORKER_LOST, at_s, fact.cause, worker_id)

    def _recover(self, fact: Recovered, at_s: float) -> None:
        if fact.bad_checkpoint_id is not None:
            message = f"checkpoint {fact.bad_checkpoint_id} cannot be read"
            self.add_incident(pb.INCIDENT_KIND_CHECKPOINT_BAD, at_s, message)
        where = f"checkpoint {fact.checkpoint_id}" if fact.checkpoint_id else "the beginning"
        self.add_incident(pb.INCIDENT_KIND_RECOVERY, at_s, f"the job went back to {where}")

    def _forget(self, worker_id: str) -> None:
        """Telemetry of an earlier incarnation does not describe the next."""
        for said in (self.heartbeats, self.steps, self.delivered, self.sdk_versions, self.departed):
            said.pop(worker_id, None)
        self.awaiting_rank.discard(worker_id)


def _keep_latest(known: dict[Any, Any]) -> None:
    while len(known) > HISTORY_KEPT:
        del known[next(iter(known))]
