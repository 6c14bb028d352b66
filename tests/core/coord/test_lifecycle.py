"""The life cycle of a job: a finished one takes no worker, an operator begins the next run or forgets the job."""

from __future__ import annotations

import pytest

from strata.base.errors import Code
from strata.coord.core.facts import DatasetMode, GangStatus, JobConfigured, JobFinished, RegisteredWorker
from strata.coord.core.inputs import (
    Caller,
    CreateJob,
    DeleteJob,
    Detached,
    Leave,
    NextShards,
    Register,
    ResetJob,
    UpdateJob,
)
from strata.coord.core.job_config import JobConfig
from strata.coord.core.lifecycle import NEXT
from strata.coord.core.state import GangEvent
from tests.core.coord.jobs import CORPUS, JOB, Job


def done(workers: int = 1) -> Job:
    """All data of epoch 0 is consumed, and nobody has left."""
    job = Job(workers=workers)
    job.register_dataset()
    job.read("w0")
    return job


def leave(job: Job, worker_id: str, *, finished: bool = True) -> None:
    job.submit(Leave(job.caller(worker_id), finished=finished))


def status(job: Job) -> GangStatus:
    return job.job.status


def finished() -> Job:
    job = done()
    leave(job, "w0")
    return job


def test_a_job_runs_while_it_has_workers() -> None:
    job = Job()
    assert status(job) is GangStatus.CREATED
    job.join("w0")
    assert status(job) is GangStatus.RUNNING
    leave(job, "w0")
    assert status(job) is GangStatus.STOPPED, "nothing was consumed"
    job.join("w0")
    assert status(job) is GangStatus.RUNNING


def test_a_job_is_finished_when_its_last_worker_is_done_and_no_data_is_left() -> None:
    job = done(2)
    leave(job, "w1")
    assert status(job) is GangStatus.RUNNING
    leave(job, "w0")
    assert status(job) is GangStatus.FINISHED


@pytest.mark.parametrize("why", ["data is left", "the worker was told to stop", "the worker was lost"])
def test_a_job_is_not_finished_when(why: str) -> None:
    job = done()
    if why == "data is left":
        job.next("w0", epoch=1, held=None)
        leave(job, "w0")
    elif why == "the worker was told to stop":
        leave(job, "w0", finished=False)
    else:
        job.run(60.0)
    assert status(job) is GangStatus.STOPPED
    assert not any(isinstance(fact, JobFinished) for fact in job.facts)


def test_a_deterministic_job_is_finished_when_its_workers_say_so() -> None:
    job = Job(workers=1)
    job.register_dataset(mode=DatasetMode.DETERMINISTIC)
    leave(job, "w0")
    assert status(job) is GangStatus.FINISHED


def test_a_finished_job_takes_no_worker_and_says_what_to_do() -> None:
    job = finished()
    for worker_id in ("w0", "w1"):
        refused = job.refusal(Register(JOB, RegisteredWorker(worker_id=worker_id, incarnation="incarnation-2")))
        assert (refused.code, refused.detail["reason"]) == (Code.PRECONDITION, "job-finished")
        assert "strata gang reset job" in str(refused)


def test_a_reset_begins_the_next_run_from_the_beginning() -> None:
    job = done()
    job.checkpoint(1)
    leave(job, "w0")
    generation = job.job.generation
    job.submit(ResetJob(JOB))
    assert (job.job.status, job.job.run, job.job.checkpoints) == (GangStatus.CREATED, 2, [])
    job.register("w0", "incarnation-2")
    job.settle()
    assert job.job.generation > generation, "fencing outlives runs"
    job.register_dataset()
    assert sorted(job.read("w0")) == list(range(40))


def test_a_process_of_the_old_run_does_not_come_back_in_the_new_one() -> None:
    job = finished()
    job.submit(ResetJob(JOB))
    refused = job.refusal(Register(JOB, RegisteredWorker(worker_id="w0", incarnation="incarnation-1")))
    assert (refused.code, refused.detail["reason"]) == (Code.STALE, "stale-incarnation")


def test_a_reset_that_is_sent_again_ends_no_other_run() -> None:
    job = finished()
    for _ in range(2):
        job.submit(ResetJob(JOB, run=1))
    job.register("w0", "incarnation-2")
    assert job.submit(ResetJob(JOB, run=1)).facts == ()
    assert job.job.run == 2


@pytest.mark.parametrize("given", [ResetJob(JOB), DeleteJob(JOB)])
def test_a_job_with_workers_is_neither_reset_nor_deleted(given: ResetJob | DeleteJob) -> None:
    refused = done().refusal(given)
    assert (refused.code, refused.detail["reason"]) == (Code.PRECONDITION, "job-running")


def test_a_deleted_job_is_forgotten_and_its_name_is_free() -> None:
    job = finished()
    job.submit(DeleteJob(JOB))
    assert job.state.jobs == {}
    assert job.refusal(DeleteJob(JOB)).code is Code.NOT_FOUND
    refused = job.refusal(NextShards(Caller(JOB, "w0"), CORPUS, 0))
    assert refused.detail["reason"] == "not-registered"
    job.submit(CreateJob(JOB, JobConfig(min_workers=2)))
    assert (job.job.run, job.job.status) == (1, GangStatus.CREATED)


def test_no_more_workers_join_than_the_job_may_have() -> None:
    job = Job(JobConfig(max_workers=2), workers=2)
    refused = job.refusal(Register(JOB, RegisteredWorker(worker_id="w2", incarnation="incarnation-1")))
    assert refused.code is Code.EXHAUSTED
    job.register("w1", "incarnation-2")
    leave(job, "w0")
    job.register("w2")
    assert set(job.job.members) == {"w1", "w2"}


def test_the_status_survives_a_restart_of_the_coordinator() -> None:
    job = finished()
    job.restart()
    assert status(job) is GangStatus.FINISHED
    job.submit(ResetJob(JOB))
    job.restart()
    assert (job.job.status, job.job.run) == (GangStatus.CREATED, 2)


def test_every_status_but_deleted_can_be_left() -> None:
    assert {status for status, _ in NEXT} == set(GangStatus) - {GangStatus.DELETED}
    assert {event for _, event in NEXT} == set(GangEvent)


def test_settings_change_while_the_job_runs_and_survive_a_restart() -> None:
    job = Job(JobConfig(min_workers=3))
    for name in ("w0", "w1"):
        job.register(name)
    job.tick(after_s=1.0)
    assert job.job.generation == 0
    config = JobConfig(min_workers=2, reconnect_grace_s=5.0)
    assert job.submit(UpdateJob(JOB, config)).facts == (JobConfigured(JOB, config),)
    assert job.submit(UpdateJob(JOB, config)).facts == ()
    job.restart()
    job.tick(after_s=1.0)
    assert (job.job.generation, job.job.config) == (1, config)
    job.submit(Detached(job.caller("w0")))
    job.run(4.5)
    assert "w0" in job.job.members
    job.run(1.0)
    assert "w0" not in job.job.members


def test_settings_that_make_no_sense_are_refused() -> None:
    job = Job(workers=1)
    assert job.refusal(UpdateJob(JOB, JobConfig(min_workers=3, max_workers=2))).code is Code.INVALID
    assert job.refusal(UpdateJob(JOB, JobConfig(reconnect_grace_s=-1.0))).code is Code.INVALID
    assert job.refusal(UpdateJob("nothing", JobConfig())).code is Code.NOT_FOUND
