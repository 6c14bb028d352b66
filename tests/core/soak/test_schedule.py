"""Which kills a campaign makes, and how its times are told."""

from __future__ import annotations

import pytest

from soak.coord.kill import schedule
from soak.coord.processes import failpoints
from soak.trials import Database, percentile, spread_s


@pytest.mark.parametrize("database", ["sqlite", "postgres"])
def test_a_campaign_in_two_runs_makes_the_same_kills_as_in_one(database: Database) -> None:
    assert schedule(database, 0, 40) == schedule(database, 0, 25) + schedule(database, 25, 15)


@pytest.mark.parametrize("database", ["sqlite", "postgres"])
def test_every_failpoint_is_killed_at_and_as_often_nothing_in_particular(database: Database) -> None:
    kills = schedule(database, 0, 4 * len(failpoints(database)))
    assert {kill.arm.failpoint for kill in kills if kill.arm} == set(failpoints(database))
    assert sum(kill.arm is None for kill in kills) == len(kills) / 2


def test_the_failpoints_of_the_other_database_are_left_out() -> None:
    assert not [name for name in failpoints("sqlite") if ".postgres." in name]
    assert [name for name in failpoints("postgres") if ".postgres." in name]
    assert "coord.service.before_reply" in failpoints("sqlite")


def test_a_percentile_is_one_of_the_values() -> None:
    values = [float(number) for number in range(1, 201)]
    assert [percentile(values, share) for share in (0.5, 0.99, 1.0)] == [100.0, 198.0, 200.0]
    assert percentile([3.0], 0.5) == 3.0


def test_times_are_told_with_their_number() -> None:
    assert spread_s([]) == "none"
    assert spread_s([1.0, 2.0, 3.0]) == "2.00 / 3.00 / 3.00 s (n=3)"
