"""Barriers: everybody comes, or everybody hears why not; and a repeated call gets the same answer."""

from __future__ import annotations

import time

import pytest

from strata.base.errors import Code
from strata.coord.core.barriers import MAX_OPEN, missing_at
from strata.coord.core.facts import BarrierDecided, BarrierVerdict
from strata.coord.core.inputs import MISSING_NAMED, ArriveAtBarrier, BarrierState, Caller, Detached, Heartbeat, Leave
from strata.coord.core.job_config import JobConfig
from strata.coord.core.state import VERDICTS_KEPT
from tests.core.coord.jobs import JOB, Job


def test_when_all_have_come_all_are_released() -> None:
    job = Job(workers=3)
    first, second = job.arrive("w1"), job.arrive("w0")
    assert (first.verdict, first.arrived, first.expected, first.missing) == (None, 1, 3, ("w0", "w2"))
    assert (second.verdict, second.missing) == (None, ("w2",))
    last = job.arrive("w2")
    assert (last.verdict, last.arrived, last.missing) == (BarrierVerdict.RELEASED, 3, ())
    assert [fact for fact in job.facts if isinstance(fact, BarrierDecided)] == [
        BarrierDecided(JOB, 1, "b", BarrierVerdict.RELEASED)
    ]


def test_arriving_twice_is_arriving_once() -> None:
    job = Job(workers=2)
    job.arrive("w0")
    assert job.arrive("w0").arrived == 1


def test_a_call_after_the_release_gets_the_same_answer_and_no_new_barrier() -> None:
    job = Job(workers=2)
    job.arrive("w0")
    job.arrive("w1")
    facts = len(job.journal)
    for worker in ("w0", "w1"):
        assert job.arrive(worker).verdict is BarrierVerdict.RELEASED
    job.restart()
    assert job.arrive("w0").verdict is BarrierVerdict.RELEASED
    assert len(job.journal) == facts


def test_the_expected_number_opens_a_barrier_and_who_comes_later_goes_through() -> None:
    job = Job(workers=4)
    assert job.arrive("w0", expected=2).verdict is None
    assert job.arrive("w3", expected=2).verdict is BarrierVerdict.RELEASED
    assert job.arrive("w1", expected=2).verdict is BarrierVerdict.RELEASED


def test_callers_that_expect_different_numbers_are_told_so() -> None:
    job = Job(workers=3)
    job.arrive("w0", expected=2)
    refused = job.refusal(ArriveAtBarrier(job.caller("w1"), "b", expected=3))
    assert (refused.code, refused.message) == (Code.INVALID, "barrier 'b' waits for 2 workers, not for 3")
    refused = job.refusal(ArriveAtBarrier(job.caller("w1"), "b"))
    assert refused.message == "barrier 'b' waits for 2 workers, not for all"


def test_nobody_waits_for_more_workers_than_there_are() -> None:
    job = Job(workers=2)
    assert job.refusal(ArriveAtBarrier(job.caller("w1"), "b", expected=3)).code is Code.INVALID
    assert job.soft.barriers == {}


def test_a_lost_member_ends_the_waiting_at_once_and_a_retry_hears_the_same() -> None:
    job = Job(workers=3)
    waiting = job.caller("w0")
    job.arrive("w0")
    job.submit(Detached(job.caller("w2")))
    facts = job.tick(after_s=0.5)
    assert facts[0] == BarrierDecided(JOB, 1, "b", BarrierVerdict.MEMBERSHIP_CHANGED)
    job.settle()
    assert job.told(BarrierState, ArriveAtBarrier(waiting, "b")).verdict is BarrierVerdict.MEMBERSHIP_CHANGED


@pytest.mark.parametrize("how", ["leaves", "fails", "is replaced"])
def test_whoever_goes_those_who_wait_hear_it_with_the_next_tick(how: str) -> None:
    """Also when there are too few workers left for a new generation."""
    job = Job(JobConfig(min_workers=2), workers=2)
    job.arrive("w0")
    if how == "leaves":
        job.submit(Leave(job.caller("w1")))
    elif how == "fails":
        job.submit(Heartbeat(job.caller("w1"), failed=True))
    else:
        job.register("w1", "incarnation-2")
    assert BarrierDecided(JOB, 1, "b", BarrierVerdict.MEMBERSHIP_CHANGED) in job.tick(after_s=0.1)


def test_a_newcomer_ends_the_generation_and_its_barriers() -> None:
    job = Job(workers=2)
    job.arrive("w0")
    job.join("w2")
    assert job.arrive("w0", generation=1).verdict is BarrierVerdict.MEMBERSHIP_CHANGED
    assert job.arrive("w0").verdict is None, "the same name in the new generation is another barrier"


def test_a_newcomer_hears_nothing_of_barriers_from_before_its_time() -> None:
    job = Job(workers=1)
    assert job.arrive("w0", "epoch_0").verdict is BarrierVerdict.RELEASED
    job.register("w1")
    for generation in (0, 1):
        refused = job.refusal(ArriveAtBarrier(Caller(JOB, "w1", generation=generation), "epoch_0"))
        assert refused.code is Code.UNAVAILABLE


def test_a_barrier_of_an_old_generation_that_nobody_decided_says_that_the_members_changed() -> None:
    job = Job(workers=1)
    job.join("w1")
    found = job.arrive("w0", "never opened", generation=1)
    assert (found.verdict, found.generation) == (BarrierVerdict.MEMBERSHIP_CHANGED, 2)
    assert job.soft.barriers == {}


def test_a_timeout_names_those_who_did_not_come_and_is_final() -> None:
    job = Job(workers=3)
    job.arrive("w1", timeout_s=10.0)
    assert job.run(9.75, beating=job.job.members) == []
    (fact,) = job.tick(after_s=0.25)
    assert fact == BarrierDecided(JOB, 1, "b", BarrierVerdict.TIMED_OUT, ("w0", "w2"))
    late = job.arrive("w0")
    assert (late.verdict, late.missing) == (BarrierVerdict.TIMED_OUT, ("w0", "w2"))


def test_the_time_of_the_job_holds_for_those_who_name_none() -> None:
    job = Job(JobConfig(barrier_timeout_s=3.0), workers=2)
    job.arrive("w0")
    assert job.run(2.75, beating=["w0", "w1"]) == []
    assert len(job.tick(after_s=0.25)) == 1


def test_time_in_which_the_coordinator_was_blind_does_not_count() -> None:
    job = Job(workers=2)
    job.arrive("w0", timeout_s=10.0)
    assert job.tick(after_s=60.0) == ()


def test_open_barriers_are_limited() -> None:
    job = Job(workers=2)
    for number in range(MAX_OPEN):
        job.arrive("w0", f"b{number}")
    assert job.refusal(ArriveAtBarrier(job.caller("w0"), "one more")).code is Code.EXHAUSTED
    job.arrive("w1", "b7")
    job.arrive("w0", "one more")


def test_a_barrier_is_open_again_after_a_restart_when_the_workers_call_again() -> None:
    job = Job(workers=3)
    job.arrive("w0")
    job.arrive("w1")
    job.restart()
    assert job.arrive("w2").arrived == 1
    job.arrive("w1")
    assert job.arrive("w0").verdict is BarrierVerdict.RELEASED


def test_any_number_of_barriers_leaves_no_more_than_the_verdicts_kept() -> None:
    job = Job(workers=1)
    for number in range(50_000):
        job.arrive("w0", f"step_{number}")
    assert len(job.job.verdicts) == VERDICTS_KEPT
    assert job.soft.barriers == {}
    assert len(job.saved) < 300_000
    assert job.arrive("w0", "step_49999").verdict is BarrierVerdict.RELEASED


def test_many_missing_are_counted_and_the_first_of_them_named() -> None:
    job = Job()
    names = [f"w{number}" for number in range(100)]
    job.join(*names)
    first = job.arrive("w0")
    assert (first.arrived, first.expected, first.missing) == (1, 100, tuple(names[1 : 1 + MISSING_NAMED]))
    assert missing_at(job.job, job.soft.barriers["b"]) == tuple(names[1:])
    for number in range(1, 95):
        job.arrive(f"w{number}")
    assert job.arrive("w95").missing == ("w96", "w97", "w98", "w99")


def test_ten_thousand_meet_in_a_second() -> None:
    job = Job(workers=1)
    for number in range(VERDICTS_KEPT):
        job.arrive("w0", f"x{number}")
    job.join(*(f"w{number}" for number in range(1, 10_000)))
    callers = [job.caller(worker) for worker in job.job.ranks]
    began_s = time.process_time()
    for caller in callers:
        job.submit(ArriveAtBarrier(caller, "all"))
    took_s = time.process_time() - began_s
    print(f"{took_s:.3f} s")
    assert job.arrive("w0", "all").verdict is BarrierVerdict.RELEASED
    assert took_s < 4.0
