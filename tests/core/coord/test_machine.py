"""State is what the facts say: replaying them, or loading what was saved, gives the same bytes."""

from __future__ import annotations

import msgspec
import pytest

from strata.base.errors import Code, StrataError
from strata.coord.core import facts as kinds
from strata.coord.core.facts import (
    BarrierVerdict,
    CheckpointPart,
    CommandKind,
    Dataset,
    DatasetMode,
    Fact,
    Grant,
    RegisteredWorker,
)
from strata.coord.core.inputs import Ack, CreateJob, IssueCommand, Tick
from strata.coord.core.job_config import EscalationLevel, JobConfig
from strata.coord.core.machine import CoordMachine, decode_fact
from tests.core.coord.jobs import CORPUS, JOB, Job
from tests.sim.coord.lineage import History, LineageError

EVERY_FACT: list[Fact] = [
    kinds.JobCreated(JOB, JobConfig(parameters={"lr": "0.1"})),
    kinds.JobConfigured(JOB, JobConfig(min_workers=2)),
    kinds.JobFinished(JOB),
    kinds.JobReset(JOB, 2),
    kinds.JobDeleted(JOB),
    kinds.LeaderChanged(JOB, 2, 1),
    kinds.WorkerJoined(JOB, RegisteredWorker(worker_id="w0", incarnation="a", labels={"zone": "b"})),
    kinds.WorkerLost(JOB, "w0", "a", "left"),
    kinds.WorkerJudged(JOB, "w0", kinds.StragglerFinding.SLOW, EscalationLevel.REWEIGHT, 0.25, "slow"),
    kinds.RanksListed(JOB, ("w1", "w2")),
    kinds.GenerationFormed(JOB, 1, ("w0",)),
    kinds.DatasetRegistered(JOB, Dataset(dataset_id=CORPUS, samples=9, shard_size=4, mode=DatasetMode.DETERMINISTIC)),
    kinds.ShardsGranted(JOB, CORPUS, 0, "w0", (Grant(1 << 32 | 1, 0, 0, 4, True),)),
    kinds.ShardAcked(JOB, CORPUS, 0, 1, 4),
    kinds.ShardReturned(JOB, CORPUS, 0, 1, "torn", False),
    kinds.BarrierDecided(JOB, 1, "b", BarrierVerdict.TIMED_OUT, ("w1",)),
    kinds.CheckpointReported(
        JOB, 1, 7, "c7", "w0", CheckpointPart(0, "/c7", 1, ""), (kinds.Consumed(CORPUS, 0, 1, 2),)
    ),
    kinds.CheckpointCommitted(JOB, 1, 7, "c7", command_id=3),
    kinds.CheckpointRequested(JOB, 3, "nightly", ("w1",)),
    kinds.CheckpointStepNamed(JOB, 3, 1, 7),
    kinds.CheckpointAgreed(JOB, 1, 7),
    kinds.CheckpointRefused(JOB, (3, 4), "the ranks share no step", 1),
    kinds.DrainBegun(JOB, ("w1",)),
    kinds.Recovered(JOB, None, "c7"),
    kinds.WorkerRecovered(JOB, "w0"),
    kinds.CommandIssued(JOB, 1, CommandKind.STOP, ("w0",), "because", {"grace": "5"}, "request-1"),
    kinds.CommandAcked(JOB, 1, "w0"),
]


def test_every_fact_comes_back_as_it_was() -> None:
    assert {type(fact) for fact in EVERY_FACT} == set(Fact.__args__)
    for fact in EVERY_FACT:
        assert decode_fact(msgspec.msgpack.encode(fact)) == fact


@pytest.mark.parametrize("group", range(6))
def test_replaying_or_loading_any_history_gives_the_state_it_had(group: int) -> None:
    machine = CoordMachine()
    for seed in range(group, 60, 6):
        history = History(seed, machine)
        try:
            history.run()
        except LineageError as error:
            pytest.fail(f"seed {seed}: {error}")
        soft = machine.save(history.coordinator.state)
        replayed = machine.initial()
        for fact in history.coordinator.facts:
            replayed = machine.apply(replayed, fact)
        assert machine.save(replayed) == soft, f"seed {seed}"
        assert machine.save(machine.load(soft)) == soft, f"seed {seed}"


def busy() -> Job:
    """Something of everything that a snapshot may hold."""
    job = Job(JobConfig(max_shard_failures=1, keep_checkpoints=1), workers=3)
    job.register_dataset(samples=200, buckets=16)
    (bad,) = job.take("w0")
    job.ack("w0", Ack(bad, failed=True))
    for step in (1, 2):
        job.next("w1", count=3, held=None)
        job.checkpoint(step)
    job.report("w2", 3)
    for worker in job.job.members:
        job.arrive(worker)
    job.arrive("w0", "open", timeout_s=1.0)
    job.run(2.0, beating=list(job.job.members))
    job.submit(IssueCommand(JOB, CommandKind.DRAIN))
    job.submit(CreateJob("other", JobConfig()))
    return job


def test_a_loaded_state_decides_and_applies_like_the_one_it_was_saved_from() -> None:
    job, other = busy(), busy()
    other.restart()
    for each in (job, other):
        each.next("w1", held=None)
        each.report("w0", 3)
        each.report("w1", 3)
        each.beat("w0", acked_commands=(1,))
        each.recover("w2")
    plain = [type(decode_fact(fact)) for fact in job.journal]
    assert [type(decode_fact(fact)) for fact in other.journal] == plain
    assert job.job.checkpoints == other.job.checkpoints
    assert job.job.datasets == other.job.datasets


def test_a_fact_applied_to_a_loaded_state_does_what_it_did_to_the_living_one() -> None:
    job = busy()
    saved, at = job.saved, len(job.journal)
    job.next("w2", held=None)
    job.register("w9")
    job.settle()
    job.recover("w0")
    loaded = job.machine.load(saved)
    for fact in job.journal[at:]:
        loaded = job.machine.apply(loaded, fact)
    assert job.machine.save(loaded) == job.saved


def test_deciding_changes_nothing_that_is_journaled() -> None:
    job = busy()
    before = job.saved
    for given in (Tick(), IssueCommand(JOB, CommandKind.STOP)):
        job.machine.decide(job.state, given, job.now_s + 100.0)
    assert job.saved == before


def test_facts_and_snapshots_of_other_versions_are_refused_by_name() -> None:
    machine = CoordMachine()
    judged = {"type": "WorkerJudged", "job": JOB, "worker_id": "w0", "finding": "slow", "rung": "stop", "weight": 0.5}
    for fact, words in (
        ({"type": "WorkerPromoted", "job": JOB}, "holds a fact 'WorkerPromoted' of another version"),
        (judged, "holds a fact 'WorkerJudged' of another version: Object missing required field `level`"),
        ([1], "holds a fact of another version"),
    ):
        with pytest.raises(StrataError, match=words) as refused:
            machine.apply(machine.initial(), msgspec.msgpack.encode(fact))
        assert refused.value.code is Code.UNSUPPORTED
    jobs = [{"job": JOB, "config": {}}]
    for saved in (jobs, {"format": 1, "jobs": jobs}, {"format": 3, "jobs": jobs}):
        with pytest.raises(StrataError, match="holds a snapshot of another version") as refused:
            machine.load(msgspec.msgpack.encode(saved))
        assert refused.value.code is Code.UNSUPPORTED


def test_a_field_that_a_later_version_adds_does_not_stop_this_one() -> None:
    fact = msgspec.msgpack.encode({"type": "CommandAcked", "job": JOB, "command_id": 1, "worker_id": "w0", "new": 1})
    assert decode_fact(fact) == kinds.CommandAcked(JOB, 1, "w0")
