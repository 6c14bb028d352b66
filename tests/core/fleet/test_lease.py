from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.base.retry import Backoff
from strata.fleet.core.job import CHARGED, Cause, JobEvent
from strata.fleet.core.lease import (
    AttemptCounts,
    Budget,
    RetryDecision,
    after_expiry,
    after_failure,
    may_expire_leases,
    quarantine,
)
from strata.fleet.core.lease_status import stale_attempt

NOW_S = 1000.0
chances = st.floats(0, 1, exclude_max=True)


def ruled(cause: Cause, before: list[Cause], *, chance: float = 0.5, budget: Budget | None = None) -> RetryDecision:
    return after_failure(cause, AttemptCounts.of(before), budget or Budget(), now_s=NOW_S, chance=chance)


@pytest.mark.parametrize("cause", sorted(CHARGED))
def test_the_third_failure_of_the_jobs_own_making_is_the_last(cause: Cause) -> None:
    assert [ruled(cause, [cause] * before).event for before in range(3)] == [
        JobEvent.RETRY,
        JobEvent.RETRY,
        JobEvent.FAIL,
    ]


@given(st.lists(st.sampled_from([Cause.INFRA, Cause.PREEMPTED, Cause.HOST_LOST]), max_size=200), chances)
def test_a_host_that_is_wanted_back_never_ends_a_job(before: list[Cause], chance: float) -> None:
    ruling = ruled(Cause.PREEMPTED, before, chance=chance)
    assert ruling.event is JobEvent.RETRY
    assert NOW_S < ruling.not_before_s <= NOW_S + Backoff().most_s


@given(st.lists(st.sampled_from([Cause.INFRA, Cause.PREEMPTED, Cause.HOST_LOST]), max_size=50))
def test_only_the_jobs_own_failures_are_charged(before: list[Cause]) -> None:
    assert ruled(Cause.OOM, [*before, Cause.USER_ERROR]).event is JobEvent.RETRY
    assert ruled(Cause.OOM, [*before, Cause.USER_ERROR, Cause.TIMEOUT]).event is JobEvent.FAIL


def test_a_job_that_loses_its_hosts_ends_at_max_lost() -> None:
    events = [after_expiry(AttemptCounts(lost=lost), Budget(), now_s=NOW_S).event for lost in range(5)]
    assert events == [JobEvent.EXPIRE] * 4 + [JobEvent.FAIL]


def test_a_job_whose_hosts_fail_ends_at_max_infra() -> None:
    events = [ruled(Cause.INFRA, [Cause.INFRA] * before).event for before in range(10)]
    assert events == [JobEvent.RETRY] * 9 + [JobEvent.FAIL]
    mixed = [Cause.INFRA, Cause.SETUP_ERROR]
    assert "max_infra is 3" in ruled(Cause.INFRA, mixed, budget=Budget(max_infra=3)).reason


def set_up(hosts_left: int, before: int = 0) -> RetryDecision:
    tally = AttemptCounts(infra=before)
    return after_failure(Cause.SETUP_ERROR, tally, Budget(), now_s=NOW_S, chance=0.5, hosts_left=hosts_left)


def test_a_job_that_one_host_cannot_set_up_goes_to_another_at_once() -> None:
    assert (set_up(2).event, set_up(2).not_before_s) == (JobEvent.RETRY, NOW_S)
    assert "2 other eligible hosts may take it" in set_up(2).reason


def test_a_job_that_no_eligible_host_can_set_up_has_failed() -> None:
    assert set_up(0) == RetryDecision(
        event=JobEvent.FAIL,
        cause=Cause.SETUP_ERROR,
        not_before_s=NOW_S,
        reason="setup_error: no eligible host could set it up",
    )


def test_setup_errors_end_a_job_at_max_infra_however_many_hosts_are_left() -> None:
    assert [set_up(50, before).event for before in range(10)] == [JobEvent.RETRY] * 9 + [JobEvent.FAIL]


def test_an_expired_job_waits_for_nothing() -> None:
    assert after_expiry(AttemptCounts(), Budget(), now_s=NOW_S).not_before_s == NOW_S


def test_a_reported_loss_is_ruled_like_an_expiry() -> None:
    assert ruled(Cause.HOST_LOST, [Cause.HOST_LOST] * 4) == after_expiry(AttemptCounts(lost=4), Budget(), now_s=NOW_S)


@given(st.integers(1, 100_000), chances)
def test_the_wait_grows_to_its_cap_and_never_beyond(failures: int, chance: float) -> None:
    backoff = Backoff(first_s=2, most_s=60)
    wait_s = backoff.delay_s(failures, chance)
    assert 1 <= wait_s <= 60
    assert backoff.delay_s(failures + 1, chance) >= wait_s


def test_every_reason_names_the_cause() -> None:
    for cause in Cause:
        assert cause.split("_")[0] in ruled(cause, []).reason


def test_nothing_expires_before_the_hub_could_hear_renewals_for_a_full_lease() -> None:
    assert not may_expire_leases(now_s=NOW_S, observing_since_s=NOW_S - 44, lease_s=45)
    assert may_expire_leases(now_s=NOW_S, observing_since_s=NOW_S - 45, lease_s=45)


def test_three_different_jobs_quarantine_a_host_and_one_job_three_times_does_not() -> None:
    assert quarantine(["a", "b", "c"], serves=[1], others_serve=[[1]]).quarantined
    assert not quarantine(["a", "a", "b"], serves=[1], others_serve=[[1]]).quarantined


@given(st.frozensets(st.integers(0, 5)), st.lists(st.frozensets(st.integers(0, 5)), max_size=4))
def test_the_last_host_of_a_class_is_never_quarantined(serves: frozenset[int], others: list[frozenset[int]]) -> None:
    ruling = quarantine(["a", "b", "c"], serves=serves, others_serve=others)
    assert ruling.quarantined == all(any(each in other for other in others) for each in serves)


def test_a_stale_attempt_is_told_from_an_older_one() -> None:
    assert stale_attempt("job1_a", 1, 1).message == "epoch 1 of job1_a is over, and the job has ended or waits"
    assert stale_attempt("job1_a", 1, 3).message == "epoch 1 of job1_a is over, the job is at epoch 3"
