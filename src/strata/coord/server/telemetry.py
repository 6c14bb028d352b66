"""What this process alone knows of a job: last heartbeats, step times, presence streams, SDK versions, and the
committed generation and command that heartbeat replies carry.

All of it is lost with the process. No decision depends on it; heartbeat replies and operators' views are made of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from strata.base.clock import Clock
from strata.coord.core import straggler_reaction
from strata.coord.core.facts import (
    CheckpointAgreed,
    CheckpointCommitted,
    CommandIssued,
    Fact,
    GenerationFormed,
    JobConfigured,
    JobDeleted,
    JobReset,
    WorkerJoined,
    WorkerLost,
)
from strata.coord.core.state import CoordState, JobState
from strata.coord.pb import coordinator_pb2 as pb
from strata.coord.server.lanes import SAMPLE_S, StatusLanes

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


class CoordinatorTelemetry:
    """The telemetry of all jobs of a coordinator that leads."""

    def __init__(self, clock: Clock) -> None:
        self.jobs: dict[str, JobTelemetry] = {}
        self._clock = clock
        self._fleet = 0
        self._sampled_s = 0.0

    def of(self, job: str) -> JobTelemetry:
        """The telemetry of a job that exists."""
        found = self.jobs.get(job)
        if found is None:
            found = self.jobs[job] = JobTelemetry()
        return found

    def replace(self, state: CoordState) -> None:
        """Starts with jobs that were replayed from the journal."""
        self.jobs = {name: JobTelemetry.from_journal(job) for name, job in state.jobs.items()}

    def record_fact(self, fact: Fact, state: CoordState) -> None:
        if isinstance(fact, JobReset | JobDeleted):
            # The telemetry of workers belongs to a run that is over.
            self.jobs.pop(fact.job, None)
            if fact.job in state.jobs:
                self.jobs[fact.job] = JobTelemetry.from_journal(state.jobs[fact.job])
        else:
            self.of(fact.job).record_fact(fact)

    def refresh_replies(self, state: CoordState) -> None:
        """The reply to heartbeats is encoded once and shared: encode it again when what it says has changed."""
        is_resized = state.fleet != self._fleet
        self._fleet = state.fleet
        for name, telemetry in self.jobs.items():
            probe = straggler_reaction.open_probe(state.soft_of(name))
            if is_resized or probe != telemetry.hang_probe:
                telemetry.hang_probe = probe
                telemetry.shared_reply = None

    def sample_lanes(self, state: CoordState) -> None:
        now_s = self._clock.monotonic_s()
        if now_s < self._sampled_s + SAMPLE_S:
            return
        self._sampled_s = now_s
        at_ms = round(self._clock.wall_s() * 1000)
        for name, job in state.jobs.items():
            telemetry = self.of(name)
            if job.members or telemetry.lanes.times_ms:
                telemetry.sample_lanes(at_ms, job.members)


def _keep_latest(known: dict[Any, Any]) -> None:
    while len(known) > HISTORY_KEPT:
        del known[next(iter(known))]
