from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.fleet.core.sweep_points import (
    RandomSweep,
    Range,
    axis_problem,
    grid_points,
    grid_size,
    random_points,
    range_problem,
    with_point,
)

finite = st.floats(allow_nan=False, allow_infinity=False)
positive = st.floats(1e-12, 1e12)


def pairs(numbers: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.tuples(numbers, numbers).map(lambda pair: tuple(sorted(pair)))


ranges = (
    pairs(finite).map(lambda ends: Range(uniform=ends))
    | pairs(positive).map(lambda ends: Range(log_uniform=ends))
    | pairs(st.integers(-(2**52), 2**52)).map(lambda ends: Range(integer=ends))
    | st.lists(st.text(max_size=2), min_size=1, max_size=4).map(lambda values: Range(choice=values))
)
spaces = st.dictionaries(st.text("abc", min_size=1, max_size=2), ranges, min_size=1, max_size=3)


@given(spaces, st.integers(1, 20), st.integers(0, 2**53 - 1))
def test_the_same_random_sweep_is_the_same_points_all_within_their_ranges(
    space: dict[str, Range], samples: int, seed: int
) -> None:
    sweep = RandomSweep(samples=samples, seed=seed, space=space)
    points = list(random_points(sweep))
    turned = RandomSweep(samples=samples, seed=seed, space=dict(reversed(space.items())))
    assert points == list(random_points(turned))
    assert 1 <= len(points) <= samples
    for point in points:
        for axis, value in point.items():
            limits = space[axis]
            ends = limits.uniform or limits.log_uniform or limits.integer
            assert value in (limits.choice or ()) if ends is None else ends[0] <= value <= ends[1]


GOLDEN: list[dict[str, Any]] = [
    {"dropout": 0.40834, "layers": 3, "learning_rate": 0.000125748, "optimizer": "adamw"},
    {"dropout": 0.0126465, "layers": 3, "learning_rate": 0.00248169, "optimizer": "adamw"},
    {"dropout": 0.187165, "layers": 4, "learning_rate": 7.04447e-05, "optimizer": "lion"},
]


# Points of sweeps are ids of jobs in databases: these draws may not change.
def test_the_draws_of_a_seed_never_change() -> None:
    space = {
        "learning_rate": Range(log_uniform=(1e-5, 1e-2)),
        "dropout": Range(uniform=(0.0, 0.5)),
        "layers": Range(integer=(2, 8)),
        "optimizer": Range(choice=["adamw", "lion"]),
    }
    assert list(random_points(RandomSweep(samples=3, seed=7, space=space))) == GOLDEN


def test_another_seed_is_other_points() -> None:
    space = {"x": Range(uniform=(0.0, 1.0))}
    draws = [list(random_points(RandomSweep(samples=50, seed=seed, space=space))) for seed in (1, 2)]
    assert draws[0] != draws[1]
    values = sorted(point["x"] for point in draws[0])
    assert values[0] < 0.2
    assert values[-1] > 0.8


@given(st.dictionaries(st.sampled_from("abc"), st.lists(st.integers(), max_size=3, unique=True), max_size=3))
def test_a_grid_is_every_combination_once(axes: dict[str, list[int]]) -> None:
    points = list(grid_points(axes))
    assert len(points) == grid_size(axes)
    assert all(point[axis] in axes[axis] for point in points for axis in axes)
    assert len({tuple(sorted(point.items())) for point in points}) == len(points)
    assert points == list(grid_points(dict(reversed(axes.items()))))


def test_a_dotted_axis_goes_into_a_table_without_touching_the_base() -> None:
    base = {"optimizer": {"name": "adamw"}, "epochs": 3}
    assert with_point(base, {"optimizer.lr": 0.1, "new.table": 1, "seed": 4}) == {
        "optimizer": {"name": "adamw", "lr": 0.1},
        "epochs": 3,
        "new": {"table": 1},
    }
    assert base == {"optimizer": {"name": "adamw"}, "epochs": 3}


def test_an_axis_inside_a_value_is_refused() -> None:
    assert axis_problem({"a": 1}, "a.b", ["a.b"])
    assert axis_problem({}, "a.b", ["a", "a.b"])
    assert axis_problem({}, "a..b", ["a..b"])
    assert axis_problem({"a": {}}, "a.b", ["a.b"]) is None


@pytest.mark.parametrize(
    "space",
    [
        Range(),
        Range(uniform=(0, 1), choice=[1]),
        Range(choice=[]),
        Range(uniform=(1, 0)),
        Range(uniform=(0, float("inf"))),
        Range(uniform=(float("-inf"), 0)),
        Range(uniform=(float("nan"), 1)),
        Range(log_uniform=(0, 1)),
        Range(integer=(3, 2)),
    ],
)
def test_a_range_nothing_can_be_drawn_from_is_refused(space: Range) -> None:
    assert range_problem(space) is not None
