"""A job driven by hand: time stands still until a test moves it, and every fact goes through the machine's encoding."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, TypeVar

import pytest

from strata.base.errors import StrataError
from strata.coord.core.facts import CheckpointPart, Consumed, Dataset, Fact, RegisteredWorker
from strata.coord.core.inputs import (
    Ack,
    ArriveAtBarrier,
    BarrierState,
    Caller,
    CheckpointState,
    CreateJob,
    DatasetRegistration,
    Heartbeat,
    HeartbeatReply,
    Input,
    NextShards,
    Outcome,
    Recovery,
    Register,
    RegisterDataset,
    Reply,
    ReportCheckpoint,
    RequestRecovery,
    ShardAssignment,
    Tick,
)
from strata.coord.core.job_config import JobConfig
from strata.coord.core.machine import CoordMachine, decode_fact
from strata.coord.core.state import CoordState, JobIndexes, JobState, SoftState

JOB: Final = "job"
CORPUS: Final = "corpus"
INCARNATION: Final = "incarnation-1"
SETTLE_S: Final = 0.2

R = TypeVar("R", bound=Reply)


class Job:
    """One job on the real core. Its journal is a list, and a restart reads a snapshot of it."""

    def __init__(self, config: JobConfig | None = None, *, workers: int = 0) -> None:
        self.machine = CoordMachine()
        self.state: CoordState = self.machine.initial()
        self.state.leader_epoch = 1
        self.journal: list[bytes] = []
        self.now_s = 1_000.0
        self.submit(CreateJob(JOB, config or JobConfig()))
        if workers:
            self.join(*(f"w{number}" for number in range(workers)))

    # Any input

    def submit(self, given: Input) -> Outcome:
        self.machine.observe(self.state, given, self.now_s)
        facts, outcome = self.machine.decide(self.state, given, self.now_s)
        self.machine.observe_outcome(self.state, given, outcome, self.now_s)
        for fact in facts:
            self.state = self.machine.apply(self.state, fact)
        self.journal += facts
        return outcome

    def refusal(self, given: Input) -> StrataError:
        """What the coordinator says when it refuses; nothing is journaled then."""
        before = self.saved
        with pytest.raises(StrataError) as refused:
            self.submit(given)
        assert self.saved == before
        return refused.value

    def tick(self, *, after_s: float = 0.0) -> tuple[Fact, ...]:
        self.now_s += after_s
        return self.submit(Tick()).facts

    def run(self, seconds: float, *, beating: Iterable[str] = ()) -> list[Fact]:
        """Time goes by in small ticks while some workers send heartbeats."""
        facts: list[Fact] = []
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s = min(end_s, self.now_s + 0.5)
            for worker_id in beating:
                self.beat(worker_id)
            facts += self.tick()
        return facts

    # Views

    @property
    def job(self) -> JobState:
        return self.state.jobs[JOB]

    @property
    def soft(self) -> SoftState:
        return self.state.soft_of(JOB)

    @property
    def indexes(self) -> JobIndexes:
        return self.state.indexes_of(JOB)

    @property
    def facts(self) -> list[Fact]:
        return [decode_fact(fact) for fact in self.journal]

    @property
    def saved(self) -> bytes:
        return self.machine.save(self.state)

    def restart(self) -> None:
        """Another process leads: it knows the snapshot and nothing that was only seen."""
        epoch = self.state.leader_epoch + 1
        self.state = self.machine.load(self.saved)
        self.state.leader_epoch = epoch

    def caller(self, worker_id: str, generation: int | None = None) -> Caller:
        member = self.job.members.get(worker_id)
        incarnation = member.worker.incarnation if member else ""
        return Caller(JOB, worker_id, incarnation, self.job.generation if generation is None else generation)

    # Members

    def register(self, worker_id: str, incarnation: str = INCARNATION, **fields: Any) -> Outcome:
        return self.submit(Register(JOB, RegisteredWorker(worker_id=worker_id, incarnation=incarnation, **fields)))

    def join(self, *worker_ids: str, **fields: Any) -> None:
        for worker_id in worker_ids:
            self.register(worker_id, **fields)
        self.settle()

    def settle(self) -> None:
        """Past the moment of coming and going, into the new generation."""
        self.tick()
        self.tick(after_s=self.job.config.settle_s)
        assert self.job.settled

    def beat(self, worker_id: str, **fields: Any) -> HeartbeatReply:
        return self.told(HeartbeatReply, Heartbeat(self.caller(worker_id), **fields))

    # Data

    def register_dataset(self, worker_id: str = "w0", **fields: Any) -> DatasetRegistration:
        return self.told(DatasetRegistration, RegisterDataset(self.caller(worker_id), corpus(**fields)))

    def next(self, worker_id: str, epoch: int = 0, **fields: Any) -> ShardAssignment:
        return self.told(ShardAssignment, NextShards(self.caller(worker_id), CORPUS, epoch, **fields))

    def take(self, worker_id: str, epoch: int = 0, count: int = 1) -> tuple[int, ...]:
        """Leases for one who keeps what it holds."""
        held = tuple(self.job.datasets[CORPUS].epoch(epoch).held.get(worker_id, ()))
        return tuple(lease.lease_id for lease in self.next(worker_id, epoch, count=count, held=held).leases)

    def read(self, worker_id: str, epoch: int = 0) -> list[int]:
        """The samples one minimal worker gets by itself until it is told that the epoch is over."""
        samples: list[int] = []
        while not (found := self.next(worker_id, epoch, held=None)).end_of_epoch:
            assert found.leases, "nobody else reads, so there is no reason to wait"
            for lease in found.leases:
                samples += range(lease.shard_range.start, lease.shard_range.end)
        return samples

    def ack(self, worker_id: str, *acks: Ack, epoch: int = 0) -> ShardAssignment:
        """Acks what is given and keeps the rest of what is held; may get one shard more."""
        held = tuple(self.job.datasets[CORPUS].epoch(epoch).held.get(worker_id, ()))
        return self.next(worker_id, epoch, acks=acks, held=held)

    # Meeting points

    def arrive(self, worker_id: str, barrier_id: str = "b", **fields: Any) -> BarrierState:
        caller = self.caller(worker_id, fields.pop("generation", None))
        return self.told(BarrierState, ArriveAtBarrier(caller, barrier_id, **fields))

    def report(
        self, worker_id: str, step: int, checkpoint_id: str | None = None, consumed: tuple[Consumed, ...] = ()
    ) -> CheckpointState:
        return self.told(CheckpointState, self.report_of(worker_id, step, checkpoint_id, consumed))

    def report_of(
        self, worker_id: str, step: int, checkpoint_id: str | None = None, consumed: tuple[Consumed, ...] = ()
    ) -> ReportCheckpoint:
        name = checkpoint_id or f"c{step}"
        rank = self.job.ranks[worker_id]
        return ReportCheckpoint(
            self.caller(worker_id), name, step, CheckpointPart(rank, f"/{name}/{rank}", 1, "sha256:0"), consumed
        )

    def checkpoint(self, step: int) -> None:
        """All ranks report, each with all it has acked and nothing more."""
        for worker_id in self.job.ranks:
            self.report(worker_id, step)
        assert self.job.checkpoints[-1].step == step

    def recover(self, worker_id: str, observed: int | None = None, bad: str | None = None) -> Recovery:
        generation = self.job.generation if observed is None else observed
        return self.told(Recovery, RequestRecovery(self.caller(worker_id), generation, bad))

    def told(self, kind: type[R], given: Input) -> R:
        reply = self.submit(given).reply
        assert isinstance(reply, kind)
        return reply


def corpus(**fields: Any) -> Dataset:
    return Dataset(**{"dataset_id": CORPUS, "samples": 40, "shard_size": 4, "buckets": 8, **fields})


def samples_of(found: ShardAssignment) -> list[int]:
    return [sample for lease in found.leases for sample in range(lease.shard_range.start, lease.shard_range.end)]
