"""Which partition a job is in, and which process leads which partition."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.coord.server.partitions import LeadershipPlan, partition_of, plan_leadership

PROCESSES = ("a", "b", "c", "d", "e")


@pytest.mark.parametrize(
    ("job", "digest"),
    [
        # By coreutils: printf %s JOB | b2sum -l 64
        ("default", "fe98b07b1ba6b3a2"),
        ("job-1", "01e636a65307b56b"),
        ("my-run", "7bf46b30da59617d"),
    ],
)
def test_a_job_is_in_the_partition_that_its_digest_names(job: str, digest: str) -> None:
    assert [partition_of(job, count) for count in (1, 8, 64)] == [int(digest, 16) % count for count in (1, 8, 64)]


def test_jobs_spread_over_all_partitions() -> None:
    found = [partition_of(f"job-{number}", 8) for number in range(2_000)]
    assert all(200 <= found.count(number) <= 300 for number in range(8))


def run_rounds(leaders: list[str | None], live: frozenset[str]) -> int:
    """All processes act on what they see, round by round, until none has anything to do; how many moved."""
    moves = 0
    for _ in range(200):
        plans = {each: plan_leadership(each, tuple(leaders), live) for each in sorted(live)}
        if all(plan == LeadershipPlan() for plan in plans.values()):
            return moves
        assert sum(plan.give is not None for plan in plans.values()) <= 1, "one partition moves at a time"
        for process, plan in plans.items():
            for number in plan.take:
                assert leaders[number] is None, "no two processes take the same partition"
                leaders[number] = process
            if plan.give is not None:
                assert leaders[plan.give] == process
                leaders[plan.give] = None
                moves += 1
    raise AssertionError(f"{leaders} never came to rest")


@given(
    st.lists(st.sampled_from([None, *PROCESSES]), min_size=1, max_size=64),
    st.sets(st.sampled_from(PROCESSES), min_size=1).map(frozenset),
)
def test_every_partition_gets_a_leader_and_all_processes_about_the_same_number(
    leaders: list[str | None], live: frozenset[str]
) -> None:
    # The leases of processes that are gone have run out.
    leaders = [each if each in live else None for each in leaders]
    run_rounds(leaders, live)
    loads = [leaders.count(each) for each in live]
    assert None not in leaders
    assert max(loads) - min(loads) <= 1


def test_a_process_that_joins_gets_its_share_and_nothing_else_moves() -> None:
    leaders: list[str | None] = ["a", "b"] * 4
    assert run_rounds(leaders, frozenset("abc")) == 2
    assert sorted(leaders.count(each) for each in "abc") == [2, 3, 3]


def test_the_partitions_of_a_lost_process_are_taken_in_one_round_and_nothing_moves() -> None:
    leaders: list[str | None] = [None if number % 3 == 0 else "ab"[number % 2] for number in range(8)]
    assert run_rounds(leaders, frozenset("ab")) == 0


def test_nothing_is_given_away_while_a_partition_is_free() -> None:
    assert plan_leadership("a", ("a", "a", "a", None), {"a", "b"}) == LeadershipPlan()
    assert plan_leadership("b", ("a", "a", "a", None), {"a", "b"}) == LeadershipPlan(take=(3,))


def test_a_partition_that_was_free_for_long_is_taken_by_any_process() -> None:
    assert plan_leadership("a", ("a", None), {"a", "b"}, overdue={1}) == LeadershipPlan(take=(1,))
    assert plan_leadership("c", ("a", None), {"a", "b"}, overdue={1}) == LeadershipPlan(take=(1,))
