"""A history of the coordinator with a fact of every kind: what the machine decides when time and workers are given.

The same calls give the same facts, so the journal of a release can be written again byte for byte.
"""

from __future__ import annotations

from typing import Final

import msgspec

from strata.coord.core.facts import (
    CommandKind,
    Dataset,
    DatasetMode,
    GenerationFormed,
    RanksListed,
    RegisteredWorker,
)
from strata.coord.core.inputs import (
    Ack,
    Caller,
    CreateJob,
    DeleteJob,
    Heartbeat,
    Input,
    IssueCommand,
    Leave,
    NextShards,
    Outcome,
    Register,
    RegisterDataset,
    ResetJob,
    Tick,
    UpdateJob,
)
from strata.coord.core.job_config import EscalationLevel, JobConfig
from strata.coord.core.machine import decode_fact
from strata.coord.core.state import StepProgress
from tests.core.coord.jobs import CORPUS, JOB, Job

STREAM: Final = "coord/0"
WALL_S: Final = 1_790_000_000.0
"""The time of day when the machine's clock is at 0."""
SETTINGS: Final = JobConfig(
    heartbeat_interval_s=1.0, settle_s=0.2, barrier_timeout_s=30.0, max_shard_failures=2, parameters={"rate": "0.1"}
)
BESIDE: Final = "beside"
LARGE: Final = "large"
MEMBERS: Final = 3


class History(Job):
    """A job that knows the time of day. Each request is one batch of its journal."""

    def __init__(self) -> None:
        self.batches: list[list[bytes]] = []
        super().__init__(SETTINGS)

    def submit(self, given: Input) -> Outcome:
        if isinstance(given, Tick):
            given = Tick(WALL_S + self.now_s)
        before = len(self.journal)
        outcome = super().submit(given)
        if len(self.journal) > before:
            self.batches.append(self.journal[before:])
        return outcome

    def recover_all(self) -> None:
        for worker_id in self.job.members:
            if self.job.members[worker_id].recover_first:
                self.recover(worker_id)


def coordinator_history() -> list[list[bytes]]:
    """Returns the batches of a stream, oldest first."""
    history = History()
    history.tick()
    history.join("w0", "w1", gpus=2, labels={"rack": "a"}, hostname="host", address="host:1")
    _train(history)
    _command(history)
    _lose_workers(history)
    _agree_on_checkpoints(history)
    _escalate(history)
    _finish_others(history)
    # What is left open is what a later version goes on with: a barrier, leases, a part of a checkpoint.
    history.take("w0")
    history.arrive("w0", "last")
    history.report("w0", 90)
    return [_listing_ranks(batch) for batch in history.batches]


def _train(history: History) -> None:
    history.register_dataset(files=())
    history.submit(
        RegisterDataset(
            history.caller("w0"), Dataset(dataset_id="fixed", samples=64, shard_size=8, mode=DatasetMode.DETERMINISTIC)
        )
    )
    (consumed,) = history.next("w0").leases
    history.ack("w0", Ack(consumed.lease_id))
    (unreadable,) = history.next("w1").leases
    history.ack("w1", Ack(unreadable.lease_id, unreadable.shard_range.start, failed=True, reason="cannot be read"))
    lease_id = next(iter(history.job.datasets[CORPUS].epoch(0).held["w1"]))
    history.ack("w1", Ack(lease_id, history.job.datasets[CORPUS].epoch(0).leases[lease_id].start, returned=True))
    for worker_id in ("w0", "w1"):
        history.arrive(worker_id, "epoch")
    history.checkpoint(10)
    history.arrive("w0", "never")
    history.run(SETTINGS.barrier_timeout_s + 1, beating=("w0", "w1"))
    history.checkpoint(20)


def _command(history: History) -> None:
    history.submit(UpdateJob(JOB, msgspec.structs.replace(SETTINGS, keep_checkpoints=2)))
    history.submit(
        IssueCommand(JOB, CommandKind.RELOAD, ("w0",), "new weights", {"path": "weights"}, request_id="request-1")
    )
    for command in history.beat("w0").commands:
        history.beat("w0", acked_commands=(command.command_id,))
    history.submit(IssueCommand(JOB, CommandKind.REBALANCE, reason="by hand"))


def _lose_workers(history: History) -> None:
    history.restart()
    history.tick()
    history.register("w1", "incarnation-2")
    history.settle()
    history.recover_all()
    history.take("w1")
    history.join("w2", elastic=True, weight=0.5, expected_rank=2)
    history.run(20, beating=("w0", "w1"))
    history.settle()
    history.recover("w0", bad="c20")
    history.recover_all()


def _agree_on_checkpoints(history: History) -> None:
    """Programs that agree on steps: one checkpoint is agreed on and committed, one is refused."""
    steps = {"w0": 30, "w1": 31}
    promised = dict.fromkeys(steps, 0)

    def beat(worker_id: str, *acked: int, stride: int = 1) -> None:
        progress = StepProgress(
            steps[worker_id], 0.1, False, history.job.generation, (), promised[worker_id], steps[worker_id], stride
        )
        for command in history.beat(worker_id, progress=progress, acked_commands=acked).commands:
            named = int(command.arguments.get("step", "0"))
            if named > steps[worker_id]:
                promised[worker_id] = named
            if command.command_id not in acked:
                beat(worker_id, *acked, command.command_id, stride=stride)

    for worker_id in steps:
        beat(worker_id)
    history.submit(IssueCommand(JOB, CommandKind.DRAIN, ("w1",), "its host is wanted", request_id="request-2"))
    for worker_id in steps:
        beat(worker_id)
    history.tick(after_s=0.5)
    assert history.job.checkpoint_request is not None
    named = history.job.checkpoint_request.step
    steps.update(dict.fromkeys(steps, named))
    for worker_id in steps:
        history.report(worker_id, named)
    history.submit(Leave(history.caller("w1"), "drained"))
    history.settle()
    history.join("w1", incarnation="incarnation-3")
    history.recover_all()
    _refuse_checkpoint(history)


def _refuse_checkpoint(history: History) -> None:
    """The ranks ask after every second step, one after the odd and one after the even ones."""

    def beat(worker_id: str, step: int) -> None:
        progress = StepProgress(step, 0.1, False, history.job.generation, (), 0, step, 2)
        acked = tuple(each.command_id for each in history.beat(worker_id, progress=progress).commands)
        history.beat(worker_id, progress=progress, acked_commands=acked)

    for worker_id, step in (("w0", 60), ("w1", 61)):
        beat(worker_id, step)
    history.submit(IssueCommand(JOB, CommandKind.CHECKPOINT_NOW, reason="by hand", request_id="request-3"))
    for _ in range(50):
        for worker_id, step in (("w0", 60), ("w1", 61)):
            beat(worker_id, step)
        history.tick(after_s=0.5)


def _escalate(history: History) -> None:
    """One of several workers is slower than the others."""
    config = msgspec.structs.replace(history.job.config, slow_until=EscalationLevel.REWEIGHT)
    history.submit(UpdateJob(JOB, config))
    history.join("w3", "w4", "w5")
    steps = dict.fromkeys(history.job.members, 0)
    history.recover_all()
    for _ in range(80):
        for worker_id in steps:
            steps[worker_id] += 1
            seconds = 4.0 if worker_id == "w5" else 1.0
            progress = StepProgress(steps[worker_id], seconds, False, history.job.generation)
            history.submit(Heartbeat(history.caller(worker_id), progress=progress))
        history.tick(after_s=1.0)
        if history.job.members["w5"].level is not EscalationLevel.NONE:
            break


def _finish_others(history: History) -> None:
    """Jobs that end: one is finished and reset, one is deleted, one is large."""
    alone = RegisteredWorker(worker_id="w0", incarnation="incarnation-1")
    caller = Caller(BESIDE, "w0", "incarnation-1")
    history.submit(CreateJob(BESIDE, JobConfig()))
    history.submit(Register(BESIDE, alone))
    history.tick(after_s=0.5)
    corpus = Dataset(dataset_id="corpus", samples=4, shard_size=4, buckets=1)
    history.submit(RegisterDataset(caller, corpus))
    # The second request acks what the first one got.
    for _ in range(2):
        history.submit(NextShards(caller, "corpus", 0, held=None))
    history.submit(Leave(caller, finished=True))
    history.submit(ResetJob(BESIDE))
    history.submit(CreateJob("deleted", JobConfig()))
    history.submit(DeleteJob("deleted"))
    for number in range(MEMBERS):
        history.submit(Register(LARGE, msgspec.structs.replace(alone, worker_id=f"w{number}")))
    history.tick(after_s=0.5)


def _listing_ranks(batch: list[bytes]) -> list[bytes]:
    """The large job has its ranks in several facts, as ten thousand workers would."""
    facts: list[bytes] = []
    for encoded in batch:
        fact = decode_fact(encoded)
        if isinstance(fact, GenerationFormed) and fact.job == LARGE:
            first, *rest = fact.members
            facts.append(msgspec.msgpack.encode(RanksListed(fact.job, (first,))))
            facts.append(msgspec.msgpack.encode(msgspec.structs.replace(fact, members=tuple(rest))))
        else:
            facts.append(encoded)
    return facts
