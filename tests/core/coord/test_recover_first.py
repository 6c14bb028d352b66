"""A start is a recovery: an incarnation that joins a job whose data has moved gets no shard before it has recovered."""

from __future__ import annotations

import pytest

from strata.base.errors import Code
from strata.coord.core.facts import (
    DatasetMode,
    Recovered,
)
from strata.coord.core.inputs import Ack, Caller, Leave, NextShards
from tests.core.coord.jobs import CORPUS, JOB, Job, samples_of


def training(workers: int = 2) -> Job:
    job = Job(workers=workers)
    job.register_dataset()
    return job


def restarted(job: Job, worker_id: str = "w0") -> None:
    """Its process was killed, and another one has taken its name."""
    job.register(worker_id, "incarnation-2")
    job.settle()


def refused(job: Job, worker_id: str) -> str:
    error = job.refusal(NextShards(job.caller(worker_id), CORPUS, 0))
    assert error.code is Code.PRECONDITION
    return str(error.detail["reason"])


def test_a_restarted_worker_gets_no_shard_before_it_has_recovered() -> None:
    job = training(1)
    job.take("w0")
    restarted(job)
    assert refused(job, "w0") == "recover-first"
    assert job.recover("w0").checkpoint is None
    assert sorted(job.read("w0")) == list(range(40))


def test_a_worker_under_a_new_name_gets_no_shard_either() -> None:
    job = training(1)
    job.next("w0", held=None)
    job.join("w1")
    assert refused(job, "w1") == "recover-first"


def test_a_minimal_worker_gets_the_same_protection() -> None:
    job = training(1)
    job.next("w0", held=None)
    restarted(job)
    minimal = NextShards(Caller(JOB, "w0"), CORPUS, 0, held=None)
    assert job.refusal(minimal).detail["reason"] == "recover-first"
    job.recover("w0")
    assert job.submit(minimal).facts


def test_workers_that_join_before_the_first_shard_start_at_once() -> None:
    job = training(1)
    job.join("w1")
    assert job.take("w0")
    assert job.take("w1")


def test_a_committed_checkpoint_alone_is_reason_enough_to_recover() -> None:
    job = Job(workers=1)
    job.register_dataset(mode=DatasetMode.DETERMINISTIC)
    job.checkpoint(1)
    restarted(job)
    assert refused(job, "w0") == "recover-first"
    found = job.recover("w0").checkpoint
    assert found is not None
    assert found.step == 1
    assert job.next("w0").leases


def test_a_worker_that_has_not_recovered_reports_no_checkpoint() -> None:
    job = training(1)
    job.take("w0")
    restarted(job)
    assert job.refusal(job.report_of("w0", 1)).detail["reason"] == "recover-first"


def test_a_whole_job_that_is_restarted_rewinds_once_and_everybody_starts_from_the_checkpoint() -> None:
    job = training(2)
    kept = samples_of(job.next("w0", held=None)) + samples_of(job.next("w1", held=None))
    for worker_id in ("w0", "w1"):
        job.next(worker_id, count=0, held=None)
    job.checkpoint(1)
    job.next("w0", held=None)
    for worker_id in ("w0", "w1"):
        job.register(worker_id, "incarnation-2")
    job.settle()
    generation = job.job.generation
    starts = [job.recover(worker_id, generation).checkpoint for worker_id in ("w0", "w1")]
    assert [start and start.checkpoint_id for start in starts] == ["c1", "c1"]
    assert sum(isinstance(fact, Recovered) for fact in job.facts) == 1
    first = samples_of(job.next("w1", held=None))
    job.next("w1", count=0, held=None)
    assert sorted(kept + first + job.read("w0")) == list(range(40))


def test_a_member_that_missed_a_recovery_has_to_recover_even_if_it_names_no_generation() -> None:
    job = training(2)
    job.take("w0")
    job.take("w1")
    job.recover("w0")
    minimal = NextShards(Caller(JOB, "w1"), CORPUS, 0, held=None)
    assert job.refusal(minimal).detail["reason"] == "recover-first"
    shared = job.recover("w1")
    assert (shared.rewound, shared.place.generation) == (False, job.job.generation)
    assert job.submit(minimal).facts


@pytest.mark.proves(
    "Never again: a slow worker shared a recovery whose other workers were lost: their samples were missing"
)
def test_a_slow_worker_does_not_share_a_recovery_whose_other_workers_are_lost() -> None:
    """They took samples of that lineage with them."""
    job = training(2)
    before = job.job.generation
    job.recover("w0")
    (lease,) = job.take("w0")
    job.ack("w0", Ack(lease))
    job.submit(Leave(job.caller("w0"), "silent"))
    job.settle()
    assert job.recover("w1", before).rewound
    assert sorted(job.read("w1")) == list(range(40))


def test_an_elastic_worker_goes_on_where_the_ledger_stands() -> None:
    job = training(1)
    first = samples_of(job.next("w0", held=None))
    job.next("w0", count=0, held=None)
    job.register("w0", "incarnation-2", elastic=True)
    job.settle()
    assert sorted(first + job.read("w0")) == list(range(40))


@pytest.mark.parametrize("recovered", [False, True])
def test_who_has_recovered_is_known_after_a_restart_of_the_coordinator(recovered: bool) -> None:
    job = training(1)
    job.take("w0")
    restarted(job)
    if recovered:
        job.recover("w0")
    job.restart()
    if recovered:
        assert job.take("w0")
    else:
        assert refused(job, "w0") == "recover-first"


def test_a_worker_that_cannot_read_its_first_checkpoint_takes_everybody_further_back() -> None:
    job = training(2)
    job.checkpoint(1)
    for worker_id in ("w0", "w1"):
        job.register(worker_id, "incarnation-2")
    job.settle()
    job.recover("w0")
    found = job.recover("w1", bad="c1")
    assert (found.rewound, found.checkpoint) == (True, None)
    assert refused(job, "w0") == "recover-first"
