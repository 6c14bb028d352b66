"""Who takes part: coming, going, being lost, and the generations that follow."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import pytest

from strata.base.errors import Code
from strata.coord.core.facts import (
    Dataset,
    Fact,
    GenerationFormed,
    JobCreated,
    RegisteredWorker,
    WorkerJoined,
    WorkerLost,
)
from strata.coord.core.inputs import (
    Attached,
    Caller,
    CreateJob,
    Detached,
    Heartbeat,
    HeartbeatReply,
    Leave,
    NextShards,
    Register,
    RegisterDataset,
)
from strata.coord.core.job_config import JobConfig
from strata.coord.core.machine import CoordMachine
from strata.coord.core.members import rank_of
from strata.coord.core.state import EVICTED_KEPT
from strata.journal.port import MAX_FACT_BYTES
from tests.core.coord.jobs import CORPUS, INCARNATION, JOB, Job

LIMIT_S = 30.0
"""Silence that the default configuration allows."""


def lost(facts: Any) -> dict[str, str]:
    return {fact.worker_id: fact.cause for fact in facts if isinstance(fact, WorkerLost)}


# Registration


def test_the_first_registration_creates_its_job_with_the_default_configuration() -> None:
    machine = CoordMachine()
    state = machine.initial()
    worker = RegisteredWorker(worker_id="w0", incarnation=INCARNATION)
    _, outcome = machine.decide(state, Register("default", worker), 0.0)
    assert outcome.facts == (JobCreated("default", JobConfig()), WorkerJoined("default", worker))


def test_a_job_made_twice_with_one_configuration_is_one_job() -> None:
    job = Job(JobConfig(min_workers=2))
    assert job.submit(CreateJob(JOB, JobConfig(min_workers=2))).facts == ()
    assert job.refusal(CreateJob(JOB, JobConfig(min_workers=3))).code is Code.CONFLICT


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("heartbeat_interval_s", 0.0),
        ("heartbeat_interval_s", float("nan")),
        ("missed_beats", 0),
        ("settle_s", -0.1),
        ("min_workers", 0),
        ("barrier_timeout_s", 0.0),
        ("keep_checkpoints", 0),
        ("max_shard_failures", 0),
        ("placement", "alphabetical"),
    ],
)
def test_a_configuration_nobody_could_work_with_is_refused_when_the_job_is_made(field: str, value: object) -> None:
    config = JobConfig(**{field: value})  # type: ignore[arg-type]
    refused = Job().refusal(CreateJob("other", config))
    assert refused.code is Code.INVALID
    assert field in refused.message


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf"), 1e7])
def test_a_worker_with_an_impossible_weight_is_refused_and_not_everybody_else_later(weight: float) -> None:
    job = Job(workers=1)
    job.register_dataset()
    refused = job.refusal(Register(JOB, RegisteredWorker(worker_id="w1", incarnation=INCARNATION, weight=weight)))
    assert (refused.code, "weight" in refused.message) == (Code.INVALID, True)
    assert job.next("w0").leases


def test_a_worker_without_a_name_is_refused() -> None:
    assert Job().refusal(Register(JOB, RegisteredWorker(worker_id="", incarnation=INCARNATION))).code is Code.INVALID


def test_workers_without_weight_own_nothing_and_read_all_the_same() -> None:
    job = Job()
    job.join("w0", "w1", weight=0.0)
    job.register_dataset()
    assert sorted(job.read("w0")) == list(range(40))


def test_the_same_incarnation_again_is_no_fact() -> None:
    job = Job(workers=1)
    assert job.register("w0").facts == ()


def test_a_second_incarnation_fences_the_first() -> None:
    job = Job(workers=2)
    first = job.caller("w0")
    facts = job.register("w0", "incarnation-2").facts
    assert [type(fact) for fact in facts] == [WorkerLost, WorkerJoined]
    job.settle()
    assert list(job.job.ranks) == ["w0", "w1"], "the id keeps its rank"
    for given in (Heartbeat(first), NextShards(first, CORPUS, 0), Attached(first), Leave(first)):
        refused = job.refusal(given)
        assert (refused.code, refused.detail["reason"]) == (Code.STALE, "stale-incarnation")
    job.beat("w0")


def test_a_worker_that_states_no_incarnation_is_the_current_one() -> None:
    job = Job(workers=1)
    assert job.told(HeartbeatReply, Heartbeat(Caller(JOB, "w0"))).generation == 1


def test_a_place_is_told_only_in_a_settled_generation() -> None:
    job = Job(workers=2)
    place = rank_of(job.job, "w1")
    assert (place.generation, place.rank, place.world_size, place.incarnation) == (1, 1, 2, INCARNATION)
    job.register("w2")
    assert rank_of(job.job, "w1").generation == 0


# Refusals


def test_a_beat_of_somebody_unknown_is_not_found() -> None:
    assert Job(workers=1).refusal(Heartbeat(Caller(JOB, "stranger"))).code is Code.NOT_FOUND
    assert Job().refusal(Heartbeat(Caller("no such job", "w0"))).code is Code.NOT_FOUND


@pytest.mark.parametrize("job_id", [JOB, "no such job"])
def test_any_other_call_of_one_never_seen_asks_it_to_register_first(job_id: str) -> None:
    job = Job(workers=1)
    caller = Caller(job_id, "stranger")
    dataset = Dataset(dataset_id=CORPUS, samples=1, shard_size=1)
    for given in (NextShards(caller, CORPUS, 0), Attached(caller), RegisterDataset(caller, dataset), Leave(caller)):
        refused = job.refusal(given)
        assert (refused.code, refused.detail["reason"]) == (Code.PRECONDITION, "not-registered")


def test_any_call_of_an_evicted_worker_is_not_found() -> None:
    job = Job(workers=2)
    gone = job.caller("w1")
    job.submit(Leave(gone))
    for given in (Heartbeat(gone), NextShards(gone, CORPUS, 0), Attached(gone)):
        assert job.refusal(given).code is Code.NOT_FOUND


def test_a_stale_generation_is_refused_with_the_current_one() -> None:
    job = Job(workers=1)
    job.join("w1")
    refused = job.refusal(NextShards(job.caller("w0", generation=1), CORPUS, 0))
    assert refused.code is Code.PRECONDITION
    assert refused.detail == {"reason": "stale-generation", "generation": 2}


def test_while_a_generation_forms_callers_are_told_when_to_come_back() -> None:
    job = Job(workers=1)
    job.register("w1")
    refused = job.refusal(NextShards(job.caller("w0"), CORPUS, 0))
    assert (refused.code, refused.detail["retry_after_s"]) == (Code.UNAVAILABLE, 0.2)


# Loss


def test_a_worker_is_lost_when_its_silence_reaches_the_limit_and_not_before() -> None:
    job = Job(workers=2)
    job.beat("w0")
    job.beat("w1")
    assert lost(job.run(LIMIT_S - 0.25, beating=["w1"])) == {}
    assert lost(job.tick(after_s=0.25)) == {"w0": "silent for 30 s"}
    assert list(job.job.members) == ["w1"]


def test_a_broken_presence_is_a_loss_after_half_a_second() -> None:
    job = Job(workers=2)
    job.submit(Detached(job.caller("w0")))
    assert lost(job.tick(after_s=0.4)) == {}
    assert lost(job.tick(after_s=0.1)) == {"w0": "connection lost"}


@pytest.mark.parametrize("sign", [Attached, Heartbeat])
def test_a_heartbeat_or_stream_in_time_ends_the_suspicion(sign: type[Attached] | type[Heartbeat]) -> None:
    job = Job(workers=2)
    job.submit(Detached(job.caller("w0")))
    job.tick(after_s=0.4)
    job.submit(sign(job.caller("w0")))
    assert lost(job.tick(after_s=1.0)) == {}


def test_the_broken_stream_of_an_earlier_incarnation_says_nothing_about_this_one() -> None:
    job = Job(workers=1)
    first = job.caller("w0")
    job.register("w0", "incarnation-2")
    job.submit(Detached(first))
    job.submit(Detached(Caller(JOB, "stranger")))
    assert lost(job.tick(after_s=1.0)) == {}


def test_a_worker_in_error_is_lost_at_once() -> None:
    job = Job(workers=2)
    assert lost(job.submit(Heartbeat(job.caller("w0"), failed=True)).facts) == {"w0": "error"}
    assert "w0" not in job.job.members


def test_leaving_twice_is_leaving_once() -> None:
    job = Job(workers=2)
    caller = job.caller("w0")
    assert lost(job.submit(Leave(caller, "scaled down")).facts) == {"w0": "scaled down"}
    assert job.submit(Leave(caller)).facts == ()


def test_the_memory_of_the_evicted_is_bounded() -> None:
    job = Job()
    for number in range(EVICTED_KEPT + 5):
        job.register(f"w{number}")
        job.submit(Leave(Caller(JOB, f"w{number}")))
    assert len(job.job.evicted) == EVICTED_KEPT
    assert job.refusal(Attached(Caller(JOB, "w4"))).code is Code.PRECONDITION
    assert job.refusal(Attached(Caller(JOB, "w5"))).code is Code.NOT_FOUND


# Generations


def test_fifty_joins_within_the_settling_time_make_one_generation() -> None:
    job = Job()
    facts: list[Fact] = []
    for number in range(50):
        job.register(f"w{number}")
        facts += job.tick(after_s=0.1)
    facts += job.tick(after_s=0.1)
    assert facts == [GenerationFormed(JOB, 1, tuple(f"w{number}" for number in range(50)))]


def test_ranks_count_from_zero_and_survivors_keep_their_order() -> None:
    job = Job(workers=5)
    assert job.job.ranks == {f"w{number}": number for number in range(5)}
    job.submit(Leave(job.caller("w1")))
    job.register("a-newcomer")
    job.submit(Leave(job.caller("w3")))
    job.settle()
    assert job.job.ranks == {"w0": 0, "w2": 1, "w4": 2, "a-newcomer": 3}


def test_no_generation_forms_below_the_minimum_of_workers() -> None:
    job = Job(JobConfig(min_workers=2))
    job.register("w0")
    assert job.run(5.0, beating=["w0"]) == []
    job.join("w1")
    assert job.job.generation == 1
    job.submit(Leave(job.caller("w1")))
    assert job.run(5.0, beating=["w0"]) == []
    assert job.refusal(NextShards(job.caller("w0"), CORPUS, 0)).code is Code.UNAVAILABLE


def test_a_loss_and_the_next_generation_are_two_moments() -> None:
    job = Job(workers=2)
    job.submit(Detached(job.caller("w0")))
    assert [type(fact) for fact in job.tick(after_s=0.5)] == [WorkerLost]
    assert job.tick(after_s=0.1) == ()
    assert job.tick(after_s=0.1) == (GenerationFormed(JOB, 2, ("w1",)),)


def test_who_keeps_coming_does_not_keep_the_others_from_starting() -> None:
    job = Job(JobConfig(settle_s=0.2))
    formed: list[GenerationFormed] = []
    for number in range(100):
        job.submit(Register(JOB, RegisteredWorker(worker_id=f"w{number}", incarnation=INCARNATION)))
        formed += [fact for fact in job.tick(after_s=0.1) if isinstance(fact, GenerationFormed)]
    assert [fact.generation for fact in formed] == [1, 2]


def test_ten_thousand_joining_ten_thousand_form_a_generation_quickly() -> None:
    job = Job()
    job.join(*(f"a{number}" for number in range(10_000)))
    for number in range(10_000):
        job.register(f"b{number}")
    began_s = time.process_time()
    job.settle()
    assert time.process_time() - began_s < 3.0
    assert job.job.generation == 2


def test_a_hundred_thousand_members_form_a_generation_whose_facts_all_fit() -> None:
    job = Job()
    names = [f"rack-{number // 32:04}-worker-{number:06}" for number in range(100_000)]
    for name in names:
        job.register(name)
    job.tick()
    began_s = time.process_time()
    facts = job.tick(after_s=0.2)
    print(f"\n100,000 members: {len(facts)} facts, {time.process_time() - began_s:.2f} s")
    assert isinstance(facts[-1], GenerationFormed)
    assert max(map(len, job.journal)) <= MAX_FACT_BYTES
    assert list(job.job.ranks) == names
    assert list(job.job.ranks.values()) == list(range(100_000))
    assert job.job.listed == []
    job.recover(names[7])
    assert list(job.job.ranks) == names
    assert max(map(len, job.journal)) <= MAX_FACT_BYTES


# A coordinator that was away


def test_after_a_restart_nobody_is_lost_before_two_intervals_and_the_limit() -> None:
    job = Job(workers=3)
    job.restart()
    assert lost(job.tick()) == {}
    assert lost(job.run(10.0 + LIMIT_S - 0.25)) == {}
    assert list(lost(job.tick(after_s=0.25))) == ["w0", "w1", "w2"]


def test_the_amnesty_of_the_unheard_does_not_hide_the_silence_of_others() -> None:
    job = Job(workers=3)
    job.restart()
    job.tick()
    job.run(1.0, beating=["w1"])
    assert lost(job.run(LIMIT_S, beating=["w2"])) == {"w1": "silent for 30 s"}


def test_a_restart_does_not_change_the_generation_by_itself() -> None:
    job = Job(workers=3)
    job.restart()
    assert job.run(10.0, beating=["w0", "w1", "w2"]) == []
    assert (job.job.generation, job.job.settled) == (1, True)


def test_a_restart_amid_coming_and_going_finishes_it() -> None:
    job = Job(workers=1)
    job.register("w1")
    job.restart()
    assert job.tick() == (GenerationFormed(JOB, 2, ("w0", "w1")),)


def test_a_coordinator_that_was_not_looking_evicts_nobody() -> None:
    job = Job(workers=2)
    job.submit(Detached(job.caller("w1")))
    assert job.tick(after_s=3_600.0) == ()
    job.beat("w0")
    job.beat("w1")
    assert job.tick(after_s=1.0) == ()


def test_being_blind_forgives_the_time_before_and_grants_none_after() -> None:
    job = Job(workers=2)
    job.now_s += 3_600.0
    job.beat("w0")
    job.tick()
    assert lost(job.run(LIMIT_S, beating=["w1"])) == {"w0": "silent for 30 s"}


def test_amnesty_lasts_longer_if_the_coordinator_was_blind_meanwhile() -> None:
    job = Job(workers=1)
    job.restart()
    job.tick()
    assert lost(job.tick(after_s=100.0)) == {}
    assert lost(job.run(10.0 + LIMIT_S - 0.25)) == {}
    assert lost(job.tick(after_s=0.25)) == {"w0": "silent for 30 s"}


# Determinism

_SCRIPT = """
from strata.journal.port import MAX_FACT_BYTES
from tests.core.coord.jobs import Job
from strata.coord.core.inputs import Detached, Leave
import hashlib
job = Job()
job.join(*(f"w{n}" for n in range(40)))
job.register_dataset(buckets=64, samples=500)
job.arrive("w3", "x"); job.arrive("w4", "y")
for n in range(0, 40, 3):
    job.next(f"w{n}", count=2)
for n in (3, 9, 15):
    job.submit(Detached(job.caller(f"w{n}")))
job.submit(Leave(job.caller("w6")))
job.run(3.0, beating=["w1"])
job.run(20.0, beating=["w1", "w2"])
job.checkpoint(1)
job.recover("w1")
job.recover("w2")
job.read("w2")
print(hashlib.sha256(b"".join(job.journal)).hexdigest(), len(job.journal))
"""


def test_the_same_inputs_make_the_same_facts_in_every_process() -> None:
    """Strings hash differently in each of them, so no order may come from a set."""
    found = {
        subprocess.run(
            [sys.executable, "-c", _SCRIPT],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": "src:."},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(found) == 1


# Ranks that a launcher gave


def test_members_whose_launcher_ranked_them_have_its_ranks_whoever_joined_first() -> None:
    job = Job()
    for worker_id, rank in (("c", 2), ("any", None), ("a", 0), ("b", 1)):
        worker = RegisteredWorker(worker_id=worker_id, incarnation=INCARNATION, expected_rank=rank)
        job.submit(Register(JOB, worker))
    job.settle()
    assert list(job.job.ranks.items()) == [("a", 0), ("b", 1), ("c", 2), ("any", 3)]
    # A later incarnation of one, in a job that went on without it.
    job.submit(Leave(Caller(JOB, "a", INCARNATION), "restarted"))
    job.settle()
    assert list(job.job.ranks) == ["b", "c", "any"]
    job.submit(Register(JOB, RegisteredWorker(worker_id="a", incarnation="incarnation-2", expected_rank=0)))
    job.settle()
    assert list(job.job.ranks) == ["a", "b", "c", "any"]
