"""Checkpoints that count when all ranks have written, and recovery that goes back once for all."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from strata.base.errors import Code
from strata.coord.core.facts import CheckpointCommitted, CheckpointReported, Consumed, Recovered
from strata.coord.core.inputs import Ack, CheckpointState, Leave, NextShards, RegisterDataset, RequestRecovery
from strata.coord.core.job_config import JobConfig
from strata.coord.core.ledger import ShardRange
from strata.coord.core.state import TOMBSTONES_KEPT
from tests.core.coord.jobs import CORPUS, Job, corpus, samples_of


def training(workers: int = 2, config: JobConfig | None = None, **dataset: Any) -> Job:
    job = Job(config, workers=workers)
    job.register_dataset(**dataset)
    return job


def consumed(lease_id: int, until: int, epoch: int = 0) -> Consumed:
    return Consumed(CORPUS, epoch, lease_id, until)


def rests(job: Job, epoch: int = 0) -> list[ShardRange]:
    return job.job.datasets[CORPUS].epochs[epoch].returned


# Commit


def test_a_checkpoint_is_committed_when_all_ranks_reported_its_step() -> None:
    job = training(3)
    first = job.report("w1", 7)
    assert (first.committed, first.missing_ranks) == (False, (0, 2))
    assert job.report("w0", 7).missing_ranks == (2,)
    assert job.report("w2", 7).committed
    (checkpoint,) = job.job.checkpoints
    assert (checkpoint.checkpoint_id, checkpoint.step, checkpoint.generation) == ("c7", 7, 1)
    assert [part.uri for part in checkpoint.parts] == ["/c7/0", "/c7/1", "/c7/2"]
    assert job.job.collecting == {}


def test_a_rank_hears_of_the_commit_although_the_other_has_left_and_too_few_are_there() -> None:
    job = training(config=JobConfig(min_workers=2))
    report = job.report_of("w0", 7)
    job.submit(report)
    job.report("w1", 7)
    job.submit(Leave(job.caller("w1")))
    job.tick(after_s=10.0)
    assert not job.job.settled
    assert job.told(CheckpointState, report).committed
    assert job.refusal(job.report_of("w0", 8)).code is Code.UNAVAILABLE


def test_a_rank_hears_of_the_commit_although_the_next_generation_has_formed_without_the_other() -> None:
    job = training()
    report = job.report_of("w0", 7)
    job.submit(report)
    job.report("w1", 7)
    job.submit(Leave(job.caller("w1")))
    job.tick(after_s=10.0)
    assert job.job.settled
    assert job.job.generation == 2
    state = job.told(CheckpointState, report)
    assert (state.committed, state.generation_ends, state.tombstones) == (True, True, ())
    other_part = replace(report, part=msgspec.structs.replace(report.part, uri="/elsewhere"))
    assert job.refusal(other_part).detail["reason"] == "stale-generation"
    assert job.refusal(replace(report, step=8, checkpoint_id="c8")).detail["reason"] == "stale-generation"


def test_ranks_that_reported_different_steps_have_no_checkpoint() -> None:
    job = training()
    job.report("w0", 7)
    assert job.report("w1", 8).missing_ranks == (0,)
    assert job.job.checkpoints == []
    assert job.report("w1", 7).committed


def test_one_id_for_two_steps_is_refused() -> None:
    job = training()
    job.report("w0", 7, "c")
    assert job.refusal(job.report_of("w1", 8, "c")).code is Code.CONFLICT
    job.report("w1", 7, "c")
    assert job.refusal(job.report_of("w0", 8, "c")).code is Code.CONFLICT


def test_a_rank_that_is_not_the_workers_is_refused() -> None:
    job = training()
    given = job.report_of("w0", 7)
    refused = job.refusal(replace(given, part=msgspec.structs.replace(given.part, rank=1)))
    assert (refused.code, refused.message) == (Code.INVALID, "worker 'w0' has rank 0, not 1")


def test_a_report_said_again_is_the_same_report_and_another_part_is_refused() -> None:
    job = training()
    given = job.report_of("w0", 7)
    assert [type(fact) for fact in job.submit(given).facts] == [CheckpointReported]
    assert job.submit(given).facts == ()
    other = replace(given, part=msgspec.structs.replace(given.part, digest="sha256:1"))
    assert job.refusal(other).code is Code.CONFLICT
    last = job.submit(job.report_of("w1", 7))
    assert [type(fact) for fact in last.facts] == [CheckpointReported, CheckpointCommitted]
    again = job.submit(given)
    assert (again.facts, again.reply.committed) == ((), True)  # type: ignore[union-attr]


def test_a_step_older_than_the_last_committed_one_is_refused() -> None:
    job = training()
    job.checkpoint(7)
    assert job.refusal(job.report_of("w0", 6)).code is Code.PRECONDITION


def test_a_commit_overtakes_what_is_unfinished_of_earlier_steps() -> None:
    job = training()
    job.report("w0", 5)
    job.report("w0", 9)
    job.checkpoint(7)
    assert [each.step for each in job.job.collecting.values()] == [9]


def test_a_checkpoint_is_not_completed_by_another_generation() -> None:
    job = training()
    job.report("w0", 7)
    job.join("w2")
    assert job.report("w1", 7).missing_ranks == (0, 2)


@pytest.mark.parametrize("until", [-1, 1, 5])
def test_what_a_worker_says_it_consumed_lies_within_its_lease(until: int) -> None:
    job = training(1, samples=4)
    (lease,) = job.take("w0")
    job.ack("w0", Ack(lease, 2))
    refused = job.refusal(job.report_of("w0", 1, consumed=(consumed(lease, until),)))
    assert (refused.code, str(lease) in refused.message) == (Code.INVALID, True)
    job.report("w0", 1, consumed=(consumed(lease, 3),))


def test_nobody_says_what_somebody_else_consumed() -> None:
    job = training()
    (foreign,) = job.take("w0")
    end = job.job.datasets[CORPUS].epochs[0].leases[foreign].end
    assert job.refusal(job.report_of("w1", 1, consumed=(consumed(foreign, end),))).code is Code.INVALID


def test_leases_that_are_over_and_datasets_nobody_knows_may_be_named() -> None:
    job = training(1, samples=4)
    (lease,) = job.take("w0")
    job.ack("w0", Ack(lease))
    told = (consumed(lease, 4), Consumed("nothing", 0, 1, 1))
    assert job.report("w0", 1, consumed=told).committed


def test_a_checkpoint_has_nothing_of_a_lease_that_is_the_workers_no_more() -> None:
    job = training(1)
    job.join("elastic", elastic=True)
    (lease,) = job.take("elastic")
    end = job.job.datasets[CORPUS].epochs[0].leases[lease].end
    # The others rewind, and it goes on with what it has.
    job.submit(RequestRecovery(job.caller("w0"), observed_generation=job.job.generation))
    late = job.report_of("elastic", 1, consumed=(consumed(lease, end),))
    assert job.refusal(late).detail["reason"] == "lease-lost"
    assert job.job.collecting == {}


# Retention


def test_only_so_many_are_kept_and_each_rank_is_told_which_of_its_parts_to_delete() -> None:
    job = training(config=JobConfig(keep_checkpoints=2))
    for step in (1, 2, 3, 4):
        job.checkpoint(step)
    assert [each.step for each in job.job.checkpoints] == [3, 4]
    assert job.report("w0", 5).tombstones == ("/c1/0", "/c2/0")
    assert job.report("w1", 5).tombstones == ("/c1/1", "/c2/1")


def test_the_parts_of_ranks_that_are_no_more_are_deleted_by_those_who_are() -> None:
    job = training(3, config=JobConfig(keep_checkpoints=1))
    job.checkpoint(1)
    job.submit(Leave(job.caller("w2")))
    job.settle()
    job.checkpoint(2)
    assert job.report("w0", 3).tombstones == ("/c1/0", "/c1/2")
    assert job.report("w1", 3).tombstones == ("/c1/1",)


def test_a_path_that_is_written_again_is_not_to_be_deleted() -> None:
    job = training(1, config=JobConfig(keep_checkpoints=1))
    for step in (1, 2):
        job.checkpoint(step)
    assert list(job.job.tombstones) == ["/c1/0"]
    job.recover("w0", bad="c2")
    job.report("w0", 1)
    assert list(job.job.tombstones) == []


def test_the_memory_of_what_to_delete_is_bounded() -> None:
    job = training(1, config=JobConfig(keep_checkpoints=1))
    job.job.tombstones = {f"/old/{number}": 0 for number in range(TOMBSTONES_KEPT)}
    for step in range(5):
        job.checkpoint(step)
    assert len(job.job.tombstones) == TOMBSTONES_KEPT
    assert list(job.job.tombstones)[-4:] == [f"/c{step}/0" for step in range(4)]


@pytest.mark.parametrize("goes_back", [False, True])
def test_a_path_that_a_kept_checkpoint_uses_is_never_to_be_deleted(goes_back: bool) -> None:
    """Some write every checkpoint to the same place."""
    job = training(1, config=JobConfig(keep_checkpoints=2))
    for step in (1, 2, 3):
        given = job.report_of("w0", step)
        job.submit(replace(given, part=msgspec.structs.replace(given.part, uri="/latest")))
    if goes_back:
        job.recover("w0", bad="c3")
    assert job.report("w0", 4).tombstones == ()


@pytest.mark.parametrize("ended_by", ["a new generation", "a recovery", "a later checkpoint"])
def test_the_parts_of_a_checkpoint_that_was_never_committed_are_deleted_once_it_is_overtaken(ended_by: str) -> None:
    job = training()
    job.checkpoint(1)
    job.report("w0", 2)
    if ended_by == "a new generation":
        job.join("w2", elastic=True)
    elif ended_by == "a recovery":
        job.recover("w1")
        job.recover("w0")
    else:
        job.checkpoint(3)
    if ended_by != "a later checkpoint":
        assert job.report("w0", 3).tombstones == (), "step 2 may come again, and be written to the same place"
        for worker_id in list(job.job.ranks)[1:]:
            job.report(worker_id, 3)
    assert job.report("w0", 4).tombstones == ("/c2/0",)
    assert job.report("w1", 4).tombstones == ()


def test_a_part_that_is_written_again_in_the_next_generation_is_kept() -> None:
    job = training()
    job.report("w0", 2)
    job.join("w2")
    assert job.report("w0", 2).tombstones == ()
    job.report("w1", 2)
    assert job.report("w2", 2).committed
    assert job.job.tombstones == {}
    for worker_id in job.job.ranks:
        assert job.report(worker_id, 3).tombstones == ()


def test_a_checkpoint_of_the_same_name_needs_all_ranks_of_the_new_generation() -> None:
    job = training(3)
    job.report("w0", 2)
    job.report("w1", 2)
    job.join("w3")
    assert job.report("w2", 2).missing_ranks == (0, 1, 3)
    assert job.report("w3", 2).missing_ranks == (0, 1)


def test_after_a_restart_the_missing_ranks_are_the_same() -> None:
    job = training(4)
    job.report("w2", 2)
    job.restart()
    assert job.report("w0", 2).missing_ranks == (1, 3)
    assert job.report("w0", 2).missing_ranks == (1, 3), "asked again"


def test_ten_thousand_reports_cost_as_much_each_as_a_hundred() -> None:
    def cost_s(workers: int) -> float:
        job = Job(workers=workers)
        took_s = 0.0
        for step in range(1, 6):
            reports = [job.report_of(worker_id, step) for worker_id in job.job.ranks]
            began_s = time.process_time()
            for each in reports:
                job.submit(each)
            took_s += time.process_time() - began_s
            assert job.job.checkpoints[-1].step == step
        return took_s / 5 / workers

    few_s, many_s = cost_s(100), cost_s(10_000)
    print(f"\na report: {few_s * 1e6:.0f} us of 100 ranks, {many_s * 1e6:.0f} us of 10,000")
    assert many_s < few_s * 4


def test_the_answer_to_a_report_names_the_first_of_many_missing_ranks() -> None:
    job = training(200)
    assert job.report("w0", 1).missing_ranks == tuple(range(1, 65))


# Recovery


def test_all_who_observed_a_generation_go_back_once() -> None:
    job = training(3)
    job.checkpoint(1)
    first = job.recover("w0", observed=1)
    assert (first.rewound, first.place.generation, first.checkpoint) == (True, 2, job.job.checkpoints[0])
    for worker, rank in (("w1", 1), ("w2", 2), ("w0", 0)):
        found = job.recover(worker, observed=1)
        assert (found.rewound, found.place.generation, found.place.rank) == (False, 2, rank)
        assert found.checkpoint == first.checkpoint
    assert sum(isinstance(fact, Recovered) for fact in job.facts) == 1
    assert job.recover("w1", observed=2).place.generation == 3, "a new failure goes back again"


def test_without_a_checkpoint_the_job_goes_back_to_the_start() -> None:
    job = training(1)
    half = [job.next("w0", held=None) for _ in range(5)]
    found = job.recover("w0")
    assert (found.checkpoint, found.rewound) == (None, True)
    assert sorted(job.read("w0")) == list(range(40))
    assert half


def test_a_bad_checkpoint_is_passed_over_until_none_is_left() -> None:
    job = training()
    for step in (1, 2):
        job.checkpoint(step)
    generation = job.job.generation
    found = job.recover("w0", generation, bad="c2")
    assert (found.checkpoint and found.checkpoint.checkpoint_id, found.place.generation) == ("c1", 2)
    found = job.recover("w1", generation, bad="c2")
    assert (found.rewound, found.checkpoint and found.checkpoint.checkpoint_id) == (False, "c1")
    found = job.recover("w1", generation, bad="c1")
    assert (found.rewound, found.checkpoint, found.place.generation) == (True, None, 3)
    found = job.recover("w0", generation, bad="c1")
    assert (found.rewound, found.checkpoint, found.place.generation) == (False, None, 3)
    assert job.job.checkpoints == []


def test_one_that_finds_only_later_that_the_checkpoint_is_bad_takes_all_further_back() -> None:
    job = training()
    for step in (1, 2):
        job.checkpoint(step)
    assert job.recover("w0", 1).checkpoint == job.job.checkpoints[1]
    found = job.recover("w0", 1, bad="c2")
    assert (found.rewound, found.checkpoint and found.checkpoint.checkpoint_id) == (True, "c1")


def test_one_that_slept_until_its_recovery_was_forgotten_is_not_sent_to_the_start() -> None:
    job = Job(JobConfig(keep_checkpoints=1))
    job.join("w0", "w1", elastic=True)
    job.checkpoint(1)
    job.recover("w0", 1)
    job.checkpoint(2)
    refused = job.refusal(RequestRecovery(job.caller("w1"), 1))
    assert (refused.code, refused.detail) == (Code.PRECONDITION, {"reason": "stale-generation", "generation": 2})


def test_while_a_generation_forms_recovery_has_to_wait() -> None:
    job = training()
    job.register("w2")
    assert job.refusal(RequestRecovery(job.caller("w0"), 1)).code is Code.UNAVAILABLE


def test_leases_from_before_a_recovery_are_void() -> None:
    job = training(1, samples=4)
    (lease,) = job.take("w0")
    old = job.caller("w0")
    job.recover("w0")
    assert job.refusal(NextShards(old, CORPUS, 0, acks=(Ack(lease),))).detail["reason"] == "stale-generation"
    found = job.next("w0", acks=(Ack(lease),))
    assert (found.stale, samples_of(found)) == ((lease,), [0, 1, 2, 3])


def test_the_rewound_position_is_that_of_each_workers_own_part() -> None:
    """Read and not acked is in; acked after the part is not; a lease from after the part is out altogether."""
    job = training(2, samples=40)
    (first,) = job.take("w0")
    (second,) = job.take("w1")
    leases = {lease: job.job.datasets[CORPUS].epochs[0].leases[lease] for lease in (first, second)}
    a, b = leases[first].start, leases[second].start
    job.report("w0", 1, consumed=(consumed(first, a + 1),))
    fresh = job.ack("w0", Ack(first)).leases[0]
    job.ack("w0", Ack(fresh.lease_id, fresh.shard_range.start + 2))
    job.ack("w1", Ack(second, b + 2))
    job.report("w1", 1, consumed=(consumed(second, b + 3),))
    assert job.job.checkpoints
    job.recover("w0")
    expected = [
        ShardRange(a // 4, a + 1, a + 4),
        ShardRange(b // 4, b + 3, b + 4),
        ShardRange(fresh.shard_range.shard, fresh.shard_range.start, fresh.shard_range.end),
    ]
    got = {sample for rest in rests(job) for sample in range(rest.start, rest.end)}
    wanted = {sample for rest in expected for sample in range(rest.start, rest.end)}
    assert wanted <= got
    in_checkpoint = {a, b, b + 1, b + 2}
    read = samples_of_all(job)
    assert sorted(read) == sorted(set(range(40)) - in_checkpoint)


def samples_of_all(job: Job) -> list[int]:
    job.submit(Leave(job.caller("w1")))
    job.settle()
    return job.read("w0")


def test_a_dataset_registered_after_the_checkpoint_starts_from_scratch_after_it() -> None:
    job = Job(workers=1)
    job.checkpoint(1)
    job.register_dataset()
    job.next("w0", held=None)
    job.next("w0", held=None)
    job.recover("w0")
    assert sorted(job.read("w0")) == list(range(40))


def test_a_checkpoint_remembers_which_epochs_were_over() -> None:
    job = training(1)
    job.read("w0", 0)
    job.next("w0", 1, held=None)
    job.next("w0", 1, held=None)
    job.checkpoint(1)
    acked = 40 - 4
    for epoch in (1, 2):
        job.read("w0", epoch)
    assert job.job.datasets[CORPUS].finished == [0, 1, 2]
    job.recover("w0")
    assert job.job.datasets[CORPUS].finished == [0]
    assert job.next("w0", 0).end_of_epoch
    assert len(job.read("w0", 1)) == acked
    assert sorted(job.read("w0", 2)) == list(range(40))


def test_an_epoch_that_ended_between_part_and_commit_is_open_again_after_going_back() -> None:
    job = training(2, samples=8)
    (first,) = job.take("w0")
    (second,) = job.take("w1")
    start = job.job.datasets[CORPUS].epochs[0].leases[first].start
    job.report("w0", 1, consumed=(consumed(first, start + 1),))
    job.ack("w1", Ack(second))
    job.ack("w0", Ack(first))
    assert job.job.datasets[CORPUS].finished == [0]
    assert job.report("w1", 1).committed
    job.recover("w0")
    assert sorted(samples_of_all(job)) == [start + 1, start + 2, start + 3]


def test_what_was_put_aside_stays_so_after_going_back() -> None:
    job = training(1, config=JobConfig(max_shard_failures=1), samples=12)
    (bad,) = job.take("w0")
    job.ack("w0", Ack(bad, failed=True, reason="broken"))
    job.read("w0")
    assert job.job.datasets[CORPUS].finished == [0]
    job.checkpoint(1)
    aside = job.job.datasets[CORPUS].quarantined[0]
    job.recover("w0")
    assert job.job.datasets[CORPUS].quarantined[0] == aside
    assert job.next("w0").end_of_epoch


def test_a_recovery_survives_a_restart() -> None:
    job = training()
    job.checkpoint(1)
    job.recover("w0", 1)
    job.restart()
    found = job.recover("w1", 1)
    assert (found.rewound, found.checkpoint and found.checkpoint.checkpoint_id) == (False, "c1")


def test_a_dataset_may_be_registered_again_after_going_back() -> None:
    job = training(1)
    job.recover("w0")
    assert job.submit(RegisterDataset(job.caller("w0"), corpus())).facts == ()


def test_an_epoch_that_a_checkpoint_holds_whole_is_finished_after_the_recovery_to_it() -> None:
    job = Job(workers=2)
    job.register_dataset()
    leases = job.take("w0", count=10)
    held = job.job.datasets[CORPUS].epochs[0].leases
    read = tuple(Consumed(CORPUS, 0, lease_id, held[lease_id].end) for lease_id in leases)
    job.report("w0", 7, consumed=read)
    job.report("w1", 7)
    assert job.job.datasets[CORPUS].finished == [], "nothing was acked"
    job.recover("w0")
    assert (job.job.datasets[CORPUS].finished, job.job.datasets[CORPUS].epochs) == ([0], {})
    assert job.next("w0").end_of_epoch
