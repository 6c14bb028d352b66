"""The telemetry of a job: last heartbeats, presence streams, and which generation and command are committed.

All of it is lost with the process. No decision depends on it; heartbeat replies and operators' views are made of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from strata.coord.core.facts import (
    CheckpointAgreed,
    CheckpointCommitted,
    CommandIssued,
    Fact,
    GenerationFormed,
    JobConfigured,
    WorkerJoined,
    WorkerLost,
)
from strata.coord.core.state import JobState
from strata.coord.pb import coordinator_pb2 as pb
from strata.coord.server.lanes import StatusLanes

HISTORY_KEPT: Final = 1_024
"""Entries kept of each kind of finished thing that an operator may still want to see."""


@dataclass(frozen=True)
class SharedReply:
    """The reply to a heartbeat without commands: the same for all workers of a job.

    Until the generation or the agreed step changes.
    """

    message: pb.HeartbeatResponse
    """Shared: do not modify it."""
    encoded: bytes
    outcomes: dict[str, bytes] = field(default_factory=dict)
    """The encoded outcome of each worker in the reply to a batch."""


@dataclass
class JobTelemetry:
    """The telemetry of one job in this process."""

    generation: int = 0
    """The last committed one. The core's state may be ahead by facts that are not durable yet."""
    last_command: int = 0
    """The last committed one. No worker may get an uncommitted command: after a failover its id would be used again."""
    checkpoint_step: int | None = None
    """The step of this generation that its ranks have agreed on and not committed."""
    heartbeats: dict[str, pb.HeartbeatRequest] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)
    """The highest step that each worker has reported."""
    delivered: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Commands in the last reply to a worker that acknowledges them by its next heartbeat."""
    streams: dict[str, object] = field(default_factory=dict)
    """The newest presence stream of each worker."""
    awaiting_rank: set[str] = field(default_factory=set)
    """Workers that registered and got no rank, because their generation had not formed yet."""
    sdk_versions: dict[str, str] = field(default_factory=dict)
    departed: dict[str, str] = field(default_factory=dict)
    """Why each worker that is no member any more has gone."""
    lanes: StatusLanes = field(default_factory=StatusLanes)
    hang_probe: int = 0
    """The number of the probe that replies have; 0: none."""
    shared_reply: SharedReply | None = None
    """None: to be encoded again."""

    @classmethod
    def from_journal(cls, job: JobState) -> JobTelemetry:
        """Starts with a job that was replayed from the journal: everything in it is committed."""
        request = job.checkpoint_request
        is_agreed = request is not None and request.agreed and request.generation == job.generation
        step = request.step if request is not None and is_agreed else None
        return cls(generation=job.generation, last_command=job.last_command, checkpoint_step=step)

    def record_step(self, worker_id: str, step: int) -> None:
        if step > self.steps.get(worker_id, -1):
            self.steps[worker_id] = step

    def sample_lanes(self, at_ms: int, members: Iterable[str]) -> None:
        found = self.heartbeats.get
        self.lanes.sample(at_ms, ((name, beat.status if (beat := found(name)) else 0) for name in members))

    def record_fact(self, fact: Fact) -> None:
        """A fact is committed."""
        match fact:
            case GenerationFormed():
                self.generation = max(self.generation, fact.generation)
                self.checkpoint_step = None
                self.shared_reply = None
            case JobConfigured():
                # The interval of heartbeats is in it.
                self.shared_reply = None
            case CheckpointAgreed():
                self.checkpoint_step = fact.step
                self.shared_reply = None
            case CheckpointCommitted() if fact.command_id:
                self.checkpoint_step = None
                self.shared_reply = None
            case CommandIssued():
                self.last_command = max(self.last_command, fact.command_id)
            case WorkerJoined():
                self._forget(fact.worker.worker_id)
            case WorkerLost():
                self._forget(fact.worker_id)
                self.departed[fact.worker_id] = fact.cause
                _keep_latest(self.departed)
            case _:
                pass

    def _forget(self, worker_id: str) -> None:
        """Telemetry of an earlier incarnation does not describe the next."""
        for said in (self.heartbeats, self.steps, self.delivered, self.sdk_versions, self.departed):
            said.pop(worker_id, None)
        self.awaiting_rank.discard(worker_id)


def _keep_latest(known: dict[Any, Any]) -> None:
    while len(known) > HISTORY_KEPT:
        del known[next(iter(known))]
