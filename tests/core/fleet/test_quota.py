"""What a quota allows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.base.errors import Code, StrataError
from strata.fleet.core.jobspec import JobSpec
from strata.fleet.core.quota import (
    DEFAULT,
    EVERYBODY,
    OwnerUsage,
    Quota,
    check_bytes,
    check_specs,
    check_usage,
    quota_of,
)


@given(st.integers(0, 20), st.integers(0, 20), st.integers(0, 20))
def test_as_many_jobs_are_queued_as_the_quota_has_places(most: int, used: int, added: int) -> None:
    refused = False
    try:
        check_usage("anna", Quota(jobs=most), OwnerUsage(jobs=used), added)
    except StrataError:
        refused = True
    assert refused == (added > 0 and used + added > most)


def test_gpu_hours_that_are_used_up_stop_new_jobs_and_nothing_else() -> None:
    quota = Quota(gpu_hours=10.0)
    check_usage("anna", quota, OwnerUsage(gpu_hours=9.9), 1)
    check_usage("anna", quota, OwnerUsage(gpu_hours=10.0), 0)
    with pytest.raises(StrataError, match=r"10.0 of 10 GPU hours in 30 days") as refused:
        check_usage("anna", quota, OwnerUsage(gpu_hours=10.0), 1)
    assert (refused.value.code, refused.value.detail["quota"]) == (Code.EXHAUSTED, "gpu_hours")


@pytest.mark.parametrize(("priority", "allowed"), [(-100, True), (0, True), (-101, False), (1, False)])
def test_a_priority_outside_the_range_is_forbidden(priority: int, *, allowed: bool) -> None:
    spec = JobSpec(model="m", priority=priority)
    if allowed:
        check_specs("anna", DEFAULT, [spec])
        return
    with pytest.raises(StrataError, match="not in the range -100:0 of anna") as refused:
        check_specs("anna", DEFAULT, [spec])
    assert refused.value.code is Code.FORBIDDEN


def test_a_job_of_an_owner_with_a_quota_is_short() -> None:
    with pytest.raises(StrataError, match="more than 65536 bytes"):
        check_specs("anna", DEFAULT, [JobSpec(model="m", hyper={"x": "y" * 70_000})])


def test_an_owner_has_a_quota_of_her_own_or_that_of_everybody() -> None:
    own, shared = Quota(jobs=1), Quota(jobs=2)
    assert quota_of("anna", {"anna": own, EVERYBODY: shared}) is own
    assert quota_of("bert", {"anna": own, EVERYBODY: shared}) is shared
    assert quota_of("bert", {"anna": own}) is DEFAULT
    assert Quota(min_priority=1, max_priority=0).problem


def test_bytes_fit_up_to_the_limit_and_attempts_may_use_twice_of_it() -> None:
    check_bytes("anna", None, 10**15, 10**15)
    check_bytes("anna", 100, 60, 40)
    with pytest.raises(StrataError, match="60 bytes are stored, 41 more are too many for 100") as refused:
        check_bytes("anna", 100, 60, 41)
    assert (refused.value.code, refused.value.detail["quota"]) == (Code.EXHAUSTED, "bytes")
    assert (Quota(bytes=100).attempt_bytes, Quota().attempt_bytes) == (200, None)
