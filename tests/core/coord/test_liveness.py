"""Liveness: every call shows it, silence is measured by what workers were told, incarnations that ended stay ended."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from strata.base.errors import Code
from strata.coord.core.facts import Fact, RegisteredWorker, ShardAcked, WorkerLost
from strata.coord.core.inputs import (
    Ack,
    Attached,
    CallClosed,
    CallOpened,
    Detached,
    Heartbeat,
    Leave,
    NextShards,
    Register,
)
from strata.coord.core.job_config import JobConfig
from strata.coord.core.liveness import interval_s
from tests.core.coord.jobs import CORPUS, INCARNATION, JOB, Job

LIMIT_S = 30.0


def lost(facts: list[Fact] | tuple[Fact, ...]) -> dict[str, str]:
    return {fact.worker_id: fact.cause for fact in facts if isinstance(fact, WorkerLost)}


# Every call

CALLS: dict[str, Callable[[Job], object]] = {
    "for shards": lambda job: job.next("w0", held=None),
    "for a dataset": lambda job: job.register_dataset("w0"),
    "to a barrier": lambda job: job.arrive("w0", f"b{job.now_s}"),
    "with a checkpoint": lambda job: job.report("w0", int(job.now_s)),
    "for a recovery": lambda job: job.recover("w0"),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_worker_lives_that_calls(call: str) -> None:
    job = Job(JobConfig(barrier_timeout_s=10_000.0), workers=2)
    job.register_dataset("w1")
    for _ in range(5):
        CALLS[call](job)
        assert lost(job.run(LIMIT_S - 1.0, beating=["w1"])) == {}
    assert list(lost(job.run(2.0, beating=["w1"]))) == ["w0"]


def test_a_refused_call_shows_liveness_too() -> None:
    job = Job(workers=2)
    job.run(LIMIT_S - 1.0, beating=["w1"])
    job.refusal(NextShards(job.caller("w0"), "no such dataset", 0))
    assert lost(job.run(2.0, beating=["w1"])) == {}


def test_a_call_of_an_incarnation_that_is_over_says_nothing_about_the_next() -> None:
    job = Job(workers=2)
    first = job.caller("w0")
    job.register("w0", "incarnation-2")
    job.settle()
    job.run(LIMIT_S - 1.0, beating=["w1"])
    job.refusal(NextShards(first, CORPUS, 0))
    assert list(lost(job.run(2.0, beating=["w1"]))) == ["w0"]


def test_a_call_does_not_mend_a_broken_presence() -> None:
    job = Job(workers=2)
    job.submit(Detached(job.caller("w0")))
    job.arrive("w0")
    assert lost(job.tick(after_s=0.5)) == {"w0": "connection lost"}


# Open calls


def test_who_waits_for_our_answer_is_there_until_the_call_ends() -> None:
    job = Job(workers=2)
    caller = job.caller("w0")
    job.submit(CallOpened(caller))
    job.submit(CallOpened(caller))
    assert lost(job.run(100.0, beating=["w1"])) == {}
    job.submit(CallClosed(caller))
    assert lost(job.run(100.0, beating=["w1"])) == {}, "one call is still open"
    job.submit(CallClosed(caller))
    assert lost(job.run(LIMIT_S - 1.0, beating=["w1"])) == {}
    assert list(lost(job.run(2.0, beating=["w1"]))) == ["w0"]
    assert job.soft.open_calls == {}


def test_the_open_call_of_an_earlier_incarnation_does_not_keep_the_next_one_alive() -> None:
    job = Job(workers=2)
    job.submit(CallOpened(job.caller("w0")))
    job.register("w0", "incarnation-2")
    job.settle()
    assert list(lost(job.run(LIMIT_S + 1.0, beating=["w1"]))) == ["w0"]


def test_an_open_call_does_not_hide_a_broken_presence() -> None:
    job = Job(workers=2)
    job.submit(CallOpened(job.caller("w0")))
    job.submit(Detached(job.caller("w0")))
    assert lost(job.tick(after_s=0.5)) == {"w0": "connection lost"}


# Presence


def attached(workers: int = 2, config: JobConfig | None = None) -> Job:
    job = Job(config, workers=workers)
    job.submit(Attached(job.caller("w0")))
    return job


def test_a_worker_that_sends_nothing_lives_while_its_presence_stream_is_open() -> None:
    job = attached()
    assert lost(job.run(299.0, beating=["w1"])) == {}
    assert lost(job.run(2.0, beating=["w1"])) == {"w0": "silent for 300 s"}


def test_a_silent_worker_whose_presence_stream_breaks_is_evicted_at_once() -> None:
    job = attached()
    job.run(4 * LIMIT_S, beating=["w1"])
    job.submit(Detached(job.caller("w0")))
    assert lost(job.tick(after_s=0.5)) == {"w0": "connection lost"}


def test_the_presence_stream_of_an_earlier_incarnation_does_not_keep_the_next_one_alive() -> None:
    job = attached()
    job.register("w0", "incarnation-2")
    job.settle()
    assert list(lost(job.run(LIMIT_S + 1.0, beating=["w1"]))) == ["w0"]


def test_a_job_with_long_heartbeat_intervals_never_has_a_shorter_limit_with_presence() -> None:
    job = attached(config=JobConfig(heartbeat_interval_s=100.0))
    assert lost(job.run(599.0, beating=["w1"])) == {}
    assert lost(job.run(2.0, beating=["w1"])) == {"w0": "silent for 600 s"}


# The interval


def fleet(workers: int, heartbeats_per_s: float) -> Job:
    job = Job()
    job.state.heartbeats_per_s = heartbeats_per_s
    job.join(*(f"w{number}" for number in range(workers)))
    job.tick()
    return job


def test_the_interval_grows_with_the_fleet_so_that_the_beats_stay_below_the_rate() -> None:
    for workers in (1, 50, 51, 99, 500):
        job = fleet(workers, heartbeats_per_s=10.0)
        told_s = interval_s(job.state, job.job)
        assert told_s >= 5.0
        assert workers / told_s <= 10.0
    assert interval_s(fleet(50, 10.0).state, fleet(50, 10.0).job) == 5.0
    assert interval_s(fleet(51, 10.0).state, fleet(51, 10.0).job) == 6.0


def test_all_jobs_of_a_coordinator_are_one_fleet() -> None:
    job = fleet(30, heartbeats_per_s=10.0)
    for number in range(70):
        job.submit(Register("other", RegisteredWorker(worker_id=f"x{number}", incarnation=INCARNATION)))
    job.tick()
    assert interval_s(job.state, job.job) == 10.0


def test_silence_is_measured_by_the_interval_that_was_told() -> None:
    job = fleet(100, heartbeats_per_s=10.0)
    others = [name for name in job.job.members if name != "w7"]
    assert lost(job.run(59.0, beating=others)) == {}
    assert lost(job.run(2.0, beating=others)) == {"w7": "silent for 60 s"}


def test_after_the_fleet_shrank_those_who_know_the_longer_interval_only_are_not_lost() -> None:
    job = fleet(100, heartbeats_per_s=10.0)
    for number in range(40, 100):
        job.submit(Leave(job.caller(f"w{number}")))
    job.settle()
    assert interval_s(job.state, job.job) == 5.0
    others = [name for name in job.job.members if name != "w7"]
    assert lost(job.run(59.0, beating=others)) == {}
    assert list(lost(job.run(2.0, beating=others))) == ["w7"]
    others.remove("w8")
    assert lost(job.run(LIMIT_S + 1.0, beating=others)) == {"w8": "silent for 30 s"}, "by now all know the shorter one"


# Lives


def test_an_incarnation_that_another_one_followed_never_comes_back() -> None:
    job = Job(workers=2)
    job.register("w0", "incarnation-2")
    refused = job.refusal(Register(JOB, RegisteredWorker(worker_id="w0", incarnation=INCARNATION)))
    assert (refused.code, refused.detail["reason"]) == (Code.STALE, "stale-incarnation")
    job.submit(Leave(job.caller("w0")))
    job.restart()
    assert job.refusal(Register(JOB, RegisteredWorker(worker_id="w0", incarnation=INCARNATION))).code is Code.STALE
    job.register("w0", "incarnation-2")
    assert "w0" in job.job.members


def test_an_evicted_incarnation_whose_place_is_free_may_come_back_and_one_whose_place_was_taken_may_not() -> None:
    job = Job(workers=2)
    job.run(LIMIT_S + 1.0, beating=["w1"])
    assert job.refusal(Heartbeat(job.caller("w0"))).detail["reason"] == "evicted"
    job.register("w0")
    job.settle()
    assert "w0" in job.job.ranks
    job.run(LIMIT_S + 1.0, beating=["w1"])
    job.register("w0", "incarnation-2")
    assert job.refusal(Register(JOB, RegisteredWorker(worker_id="w0", incarnation=INCARNATION))).code is Code.STALE


def test_an_incarnation_that_comes_back_is_known_by_what_it_acked() -> None:
    job = Job(workers=2)
    job.register_dataset()
    (lease,) = job.take("w0")
    job.ack("w0", Ack(lease))
    job.run(LIMIT_S + 1.0, beating=["w1"])
    job.restart()
    job.register("w0", elastic=True)
    job.settle()
    assert lease in job.job.members["w0"].acked
    assert job.ack("w0", Ack(lease)).stale == ()
    job.register("w0", "incarnation-2")
    assert job.job.members["w0"].acked == []


# What it had read


def test_of_what_a_lost_worker_held_only_what_it_had_not_read_is_handed_out_again() -> None:
    job = Job(workers=2)
    job.register_dataset()
    lease_id, untouched = job.take("w0", count=2)
    lease = job.job.datasets[CORPUS].epochs[0].leases[lease_id]
    start, end, shard = lease.start, lease.end, lease.shard
    job.beat("w0", read_until=((lease_id, start + 3), (untouched, 10_000), (77, 5)))
    job.beat("w0")
    facts = job.run(LIMIT_S + 1.0, beating=["w1"])
    assert [fact.until for fact in facts if isinstance(fact, ShardAcked)] == [start + 3], "nonsense is not believed"
    job.settle()
    first, second = job.next("w1", count=2).leases
    assert (first.shard_range.shard, first.shard_range.start, first.shard_range.end) == (shard, start + 3, end)
    assert second.shard_range.end - second.shard_range.start == 4


def test_what_was_read_before_a_recovery_is_not_read_after_it() -> None:
    job = Job(workers=2)
    job.register_dataset()
    (lease_id,) = job.take("w0")
    job.beat("w0", read_until=((lease_id, job.job.datasets[CORPUS].epochs[0].leases[lease_id].end),))
    job.recover("w1")
    job.submit(Detached(job.caller("w0")))
    assert not any(isinstance(fact, ShardAcked) for fact in job.tick(after_s=0.5))
