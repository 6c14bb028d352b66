"""Which hosts the check before a generation excludes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.coord.core.host_check import HostMeasurement, HostTrial

FACTOR = 2.0
Measure = Callable[[int, tuple[int, ...], int], HostMeasurement]
"""What a host measures in its group, in a round."""


def convicted(count: int, measure: Measure) -> dict[int, str]:
    trial = HostTrial(count, FACTOR)
    while not trial.is_over:
        group_of = {rank: group for group in trial.groups() for rank in group}
        trial.record([measure(rank, group_of.get(rank, ()), trial.rounds) for rank in range(count)])
    return trial.convicted


def well(**given: object) -> HostMeasurement:
    figures = {"matmul_s": 0.010, "memory_s": 0.020, "all_reduce_s": 0.005, **given}
    return HostMeasurement(**figures)  # type: ignore[arg-type]


@given(st.integers(1, 40))
def test_every_host_meets_one_or_two_others_in_the_first_round(count: int) -> None:
    groups = HostTrial(count, FACTOR).groups()
    assert [rank for group in groups for rank in group] == ([*range(count)] if count > 1 else [])
    assert all(len(group) in (2, 3) for group in groups)


@pytest.mark.parametrize("count", [2, 3, 4, 9])
@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ({"matmul_s": 0.025}, "its matrix product takes 2.5 times as long as on the others (25.00 ms)"),
        ({"memory_s": 0.060}, "its copy of memory takes 3.0 times as long as on the others (60.00 ms)"),
        ({"problem": "its matrix product is wrong on cpu"}, "its matrix product is wrong on cpu"),
    ],
    ids=["product", "memory", "wrong"],
)
def test_a_host_that_is_bad_twice_is_named(count: int, bad: dict[str, object], reason: str) -> None:
    found = convicted(count, lambda rank, _, __: well(**bad) if rank == 1 else well())
    assert found == {1: reason}


@given(st.integers(2, 12), st.data())
def test_a_host_that_is_slow_once_is_not_named(count: int, data: st.DataObject) -> None:
    """Another program took the machine's time, on any hosts, but not twice on the same one."""
    slow = [set(data.draw(st.lists(st.integers(0, count - 1), max_size=2))) for _ in range(2)]
    slow[1] -= slow[0]
    slow += [set(), set()]
    assert convicted(count, lambda rank, _, number: well(matmul_s=0.1) if rank in slow[number] else well()) == {}


@given(st.integers(4, 12), st.data())
def test_only_the_host_with_the_slow_or_broken_link_is_named(count: int, data: st.DataObject) -> None:
    """Its partners are as slow as it is, but only with it."""
    bad = data.draw(st.integers(0, count - 1))
    broken = data.draw(st.booleans())

    def measure(_: int, group: tuple[int, ...], __: int) -> HostMeasurement:
        if bad not in group:
            return well() if group else well(all_reduce_s=None)
        return well(all_reduce_s=None, link_problem="Connection reset") if broken else well(all_reduce_s=0.02)

    assert convicted(count, measure).keys() == {bad}


def test_two_hosts_that_do_not_reach_each_other_are_both_named() -> None:
    found = convicted(2, lambda *_: well(all_reduce_s=None, link_problem="timed out"))
    assert set(found.values()) == {"the all-reduce with it fails: timed out"}


def test_a_host_whose_check_crashes_is_named_and_not_the_one_that_waited_for_it() -> None:
    crashed = HostMeasurement(problem="its check ended with status -9")
    waited = well(all_reduce_s=None, link_problem="timed out")
    assert convicted(2, lambda rank, _, __: crashed if rank == 0 else waited).keys() == {0}


def test_hosts_within_the_factor_and_a_single_one_are_not_named() -> None:
    assert convicted(4, lambda rank, _, __: well(matmul_s=0.01 * (1 + rank % 2 * 0.9))) == {}
    assert convicted(1, lambda *_: well(all_reduce_s=None)) == {}
    assert convicted(1, lambda *_: HostMeasurement(problem="wrong")) == {0: "wrong"}
