"""The metrics of a model over its steps: combined as their names say, bounded, and always up to the newest."""

from __future__ import annotations

import pytest

from strata.base.errors import StrataError
from strata.train.status.learning_curves import MAX_MODELS, MAX_POINTS, MAX_REPORTED, LearningCurves
from strata.train.status.overview import model_curves
from strata.train.status.timeline import HISTORY_POINTS, HISTORY_STEP_S, ThroughputHistory

M = "session_1:train:0"


def passed(loss: float, tokens: float, **more: float) -> dict[str, float]:
    return {"loss:sum": loss, "tokens:sum": tokens, **{name.replace("__", ":"): value for name, value in more.items()}}


def test_a_step_has_the_metrics_of_all_passes_since_the_one_before() -> None:
    curves = LearningCurves()
    curves.add_pass(M, passed(30.0, 10.0, ratio__mean=1.0, ratio__max=3.0, sampler_gap__sum=4.0, sampled_tokens__sum=2))
    curves.add_pass(M, passed(10.0, 30.0, ratio__mean=2.0, ratio__max=2.0, sampler_gap__sum=4.0, sampled_tokens__sum=6))
    curves.add_step(M, 3, 100.0, {"grad_norm": 0.5})
    curves.add_step(M, 4, 101.0, {"grad_norm": 0.25})
    curve = curves.get(M)
    assert curve is not None
    first, second = curve.points()
    assert first.values == {
        "loss": 1.0, "tokens": 40.0, "ratio": 1.75, "ratio_max": 3.0, "sampler_gap": 1.0, "sampled_tokens": 8.0,
        "grad_norm": 0.5,
    }  # fmt: skip
    assert (second.seq_id, second.at_s, second.values) == (4, 101.0, {"grad_norm": 0.25}), (
        "nothing of the passes before"
    )


@pytest.mark.parametrize("steps", [1, MAX_POINTS, MAX_POINTS + 1, 10 * MAX_POINTS + 7])
def test_a_curve_covers_the_whole_run_with_bounded_memory(steps: int) -> None:
    curves = LearningCurves()
    for step in range(1, steps + 1):
        curves.add_pass(M, passed(float(step), 1.0))
        curves.add_step(M, step, float(step), {})
    curve = curves.get(M)
    assert curve is not None
    points = curve.points()
    assert len(points) <= MAX_POINTS + 1
    assert [each.seq_id for each in points] == sorted({each.seq_id for each in points})
    assert points[0].seq_id <= curve.stride
    assert points[-1].seq_id == steps
    assert sum(each.values["loss"] for each in points) / len(points) == pytest.approx((steps + 1) / 2, rel=0.05)


def test_what_a_client_reports_belongs_to_the_next_step_and_hides_nothing() -> None:
    curves = LearningCurves()
    curves.report(M, 0, {"reward": 1.0, "loss": -1.0})
    curves.report(M, 1, {"reward": 2.0})
    curves.report(M, 3, {"reward": 5.0})
    curves.add_pass(M, passed(30.0, 10.0))
    curves.add_step(M, 2, 1.0, {})
    curves.add_step(M, 3, 2.0, {})
    curve = curves.get(M)
    assert curve is not None
    assert [each.values for each in curve.points()] == [{"loss": 3.0, "tokens": 10.0, "reward": 2.0}, {"reward": 5.0}]
    with pytest.raises(StrataError, match="at most 16 metrics"):
        curves.report(M, 4, {f"m{number}": 0.0 for number in range(MAX_REPORTED - 1)})


def test_only_the_models_that_stepped_last_are_kept() -> None:
    curves = LearningCurves()
    for model in range(MAX_MODELS + 5):
        curves.add_step(f"m{model}", 1, 1.0, {"lr": 1.0})
        curves.add_step("m0", model + 2, 1.0, {"lr": 1.0})
    kept = [model for model in range(MAX_MODELS + 5) if curves.get(f"m{model}") is not None]
    assert len(kept) == MAX_MODELS
    assert kept[0] == 0
    assert kept[-1] == MAX_MODELS + 4


def test_series_have_so_many_points_and_end_with_the_newest() -> None:
    curves = LearningCurves()
    for step in range(1, 101):
        curves.add_step(M, step, float(step), {"lr": 1.0, **({"reward": 2.0} if step % 2 else {})})
    (lr,) = model_curves(curves, M, 10, ["lr"]).series
    assert (len(lr.at_s), lr.at_s[-1], len(lr.values)) == (10, 100.0, 10)
    everything = model_curves(curves, M, 500, [])
    assert {each.name: len(each.values) for each in everything.series} == {"lr": 100, "reward": 50}
    assert model_curves(curves, "unknown", 10, []).series == []


def test_the_throughput_of_the_last_hour_has_zeros_where_nothing_happened() -> None:
    history = ThroughputHistory()
    assert history.points(1000.0) == []
    history.note(1000.0, trained=50)
    history.note(1001.0, trained=50, sampled=20)
    history.note(1031.0, trained=10)
    points = history.points(1045.0)
    assert [(each.at_s, each.values["trained"], each.values["sampled"]) for each in points] == [
        (1000.0, 10.0, 2.0), (1010.0, 0.0, 0.0), (1020.0, 0.0, 0.0), (1030.0, 1.0, 0.0)
    ]  # fmt: skip
    for second in range(2 * HISTORY_POINTS * HISTORY_STEP_S):
        history.note(2000.0 + second, trained=1)
    assert len(history.points(2000.0 + 2 * HISTORY_POINTS * HISTORY_STEP_S)) == HISTORY_POINTS


def test_curves_go_on_from_what_another_process_has_encoded() -> None:
    first, second = LearningCurves(), LearningCurves()
    for step in range(1, MAX_POINTS + 8):
        first.report(M, step, {"reward": float(step)})
        first.add_pass(M, passed(float(step), 1.0))
        first.add_step(M, step, float(step), {"grad_norm": 0.5})
    first.add_pass(M, passed(8.0, 2.0))
    first.report(M, 1000, {"reward": 3.0})
    second.restore(first.encode())
    for curves in (first, second):
        curves.add_step(M, 1000, 9.0, {})
    assert model_curves(second, M, 1000, []) == model_curves(first, M, 1000, [])


def test_a_step_that_is_computed_again_after_a_crash_counts_once() -> None:
    curves = LearningCurves()
    for _ in range(2):
        curves.add_step(M, 7, 1.0, {"lr": 1.0})
    assert model_curves(curves, M, 10, ["lr"]).series[0].steps == [7]


def test_the_newest_evaluation_is_known_although_no_step_comes_after_it() -> None:
    curves = LearningCurves()
    curves.report(M, 0, {"reward": 1.0, "eval_reward": 2.0, "eval_loss": 3.0})
    curves.add_step(M, 1, 1.0, {})
    curves.report(M, 2, {"eval_reward": 4.0})
    curve = curves.get(M)
    assert curve is not None
    assert curve.evaluation == {"eval_reward": 4.0, "eval_loss": 3.0}
    copied = LearningCurves()
    copied.restore(curves.encode())
    again = copied.get(M)
    assert again is not None
    assert again.evaluation == curve.evaluation
