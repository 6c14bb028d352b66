"""Which metric tells the better run, and which way."""

from __future__ import annotations

import pytest

from strata.fleet.core.objective import (
    MetricObjective,
    best_index,
    choose_objective,
    direction_of,
    flatten,
    varied_names,
)


@pytest.mark.parametrize(
    ("metric", "direction"),
    [
        ("loss", "minimize"),
        ("val/loss", "minimize"),
        ("eval_ppl", "minimize"),
        ("accuracy", "maximize"),
        ("test.accuracy", "maximize"),
        ("mystery", "maximize"),
        ("glossary", "maximize"),
    ],
)
def test_the_words_of_a_name_tell_which_way_is_better(metric: str, direction: str) -> None:
    assert direction_of(metric) == direction


def test_a_held_out_figure_goes_before_a_training_figure() -> None:
    assert choose_objective([{"loss": 1.0, "val_loss": 2.0, "lr": 0.1}]) == MetricObjective("val_loss", "minimize")


def test_a_known_figure_goes_before_a_name_that_says_nothing() -> None:
    assert choose_objective([{"epoch": 3.0, "reward": 1.0}]) == MetricObjective("reward", "maximize")


def test_a_metric_that_few_runs_report_decides_nothing() -> None:
    reported = [{"loss": 1.0}, {"loss": 2.0}, {"loss": 3.0, "val_loss": 0.1}]
    assert choose_objective(reported) == MetricObjective("loss", "minimize")
    assert choose_objective([]) is None
    assert choose_objective([{}, {}]) is None


def test_the_best_run_is_the_first_of_equal_ones() -> None:
    lower = MetricObjective("loss", "minimize")
    assert best_index(lower, [{"loss": 2.0}, {}, {"loss": 1.0}, {"loss": 1.0}]) == 2
    assert best_index(MetricObjective("loss", "maximize"), [{"loss": 2.0}, {"loss": 1.0}]) == 0
    assert best_index(lower, [{}]) is None


def test_parameters_inside_tables_are_named_as_axes_are() -> None:
    assert flatten({"a": 1, "opt": {"lr": 0.1, "sched": {"warm": 5}}}) == {"a": 1, "opt.lr": 0.1, "opt.sched.warm": 5}


def test_parameters_vary_if_one_run_has_another_value_or_none() -> None:
    points = [{"a": 1, "b": 2, "c": True}, {"a": 1, "b": 3, "c": 1}, {"a": 1, "b": 2, "c": True, "d": 0}]
    assert varied_names(points) == ("b", "c", "d")
    assert varied_names([{"a": 1}]) == ()
    assert varied_names([]) == ()
