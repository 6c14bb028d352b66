"""Sweeps that search: how a manifest declares one, what a trial is, and who goes on at a rung."""

from __future__ import annotations

import random

import msgspec
import optuna
import pytest

from strata.base.errors import StrataError
from strata.fleet.core.hyper import HyperSchema
from strata.fleet.core.manifest import JobManifest, parse_manifest, validate_manifest
from strata.fleet.core.search import (
    Halving,
    pruning_reason,
    rung_values,
    trial_number,
    trial_point,
    trial_spec,
)

MANIFEST = """
[trainers.default]
command = ["python", "train.py"]
directory = "/code"

[[sweeps]]
name = "tune"
model = "gbt"
hyper = { depth = 3 }

[sweeps.search]
method = "%s"
objective = { val_loss = "minimize" }
trials = 20
parallel = 4
space = { rate = { log_uniform = [0.001, 1.0] }, "opt.momentum" = { uniform = [0.0, 1.0] } }
"""


def manifest(text: str = MANIFEST % "tpe", **schemas: HyperSchema) -> JobManifest:
    return parse_manifest(text, "m.toml").resolve(schemas=schemas)


def problems(text: str, **schemas: HyperSchema) -> str:
    with pytest.raises(StrataError) as raised:
        manifest(text, **schemas)
    return raised.value.message


def test_a_search_is_declared_and_its_jobs_are_made_later() -> None:
    read = manifest()
    assert read.jobs == {}
    sweep = read.searches["tune"]
    assert (sweep.base.sweep, sweep.base.hyper, sweep.search.parallel) == ("tune", {"depth": 3}, 4)
    validate_manifest(msgspec.json.decode(msgspec.json.encode(read), type=JobManifest), {})


def test_the_point_of_a_trial_is_read_from_its_job() -> None:
    sweep = manifest().searches["tune"]
    point = {"rate": 0.03, "opt.momentum": 0.9}
    spec = trial_spec(sweep, 7, point)
    assert (spec.name, spec.hyper) == ("tune/7", {"depth": 3, "rate": 0.03, "opt": {"momentum": 0.9}})
    assert (trial_number(sweep, spec), trial_point(sweep, 7, spec)) == (7, point)
    for other in ({"rate": 2.0, "opt.momentum": 0.9}, {"rate": 0.03}):
        assert trial_point(sweep, 7, trial_spec(sweep, 7, other)) is None
    assert trial_point(sweep, 7, msgspec.structs.replace(spec, seed=1)) is None


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("trials = 20", "trials = 0", "trials"),
        ('"tpe"', '"annealing"', "method"),
        ("[0.001, 1.0]", "[0.0, 1.0]", "log_uniform needs a low end above 0"),
        ("rate = {", "seed = {", "a search does not vary the seed"),
        ("{ log_uniform = [0.001, 1.0] }", "{ choice = [[1], [2]] }", "expected strings, numbers and truth values"),
        ('name = "tune"', 'name = "tune"\nafter = ["gbt"]', "waits for no other job"),
        ('name = "tune"', 'name = "tune"\ngrid = { a = [1] }', "expected exactly one of grid, random, search"),
        (' "minimize" }', ' "minimize", acc = "maximize" }\nhalving = {}', "it takes one metric"),
    ],
)
def test_a_search_that_cannot_be_run_is_refused(old: str, new: str, message: str) -> None:
    text = MANIFEST % "tpe"
    assert old in text
    assert message in problems(text.replace(old, new))


def test_cmaes_takes_one_metric_and_several_numbers() -> None:
    text = MANIFEST % "cmaes"
    manifest(text)
    assert "cmaes takes numbers only" in problems(text.replace("uniform = [0.0, 1.0]", "choice = [1, 2]"))
    assert "cmaes takes one metric" in problems(text.replace(' "minimize" }', ' "minimize", acc = "maximize" }'))
    assert "at least two axes" in problems(text.replace(', "opt.momentum" = { uniform = [0.0, 1.0] }', ""))


def test_an_axis_that_the_trainer_does_not_take_is_refused() -> None:
    properties = {"depth": {"type": "integer"}, "rate": {"type": "number", "maximum": 0.5}}
    schema = HyperSchema({"type": "object", "properties": properties, "additionalProperties": False})
    found = problems(MANIFEST % "tpe", default=schema)
    assert "sweeps[0].search.space.rate: expected at most 0.5" in found
    assert "unknown" in found
    with pytest.raises(StrataError, match=r"searches\.tune"):
        validate_manifest(manifest(), {"default": schema})


def test_a_rung_has_the_first_value_at_or_after_its_step() -> None:
    reports = [(1, 9.0), (2, 8.0), (5, 7.0), (30, 6.0)]
    assert rung_values(reports, Halving(first_step=2)) == ((2, 8.0), (6, 6.0), (18, 6.0))
    assert rung_values([], Halving()) == ()


def test_pruning_agrees_with_the_successive_halving_of_optuna() -> None:
    chance = random.Random(3)
    ended = 0
    for direction in ("minimize", "maximize"):
        for reduction in (2, 3, 4):
            halving = Halving(first_step=1, reduction=reduction)
            pruner = optuna.pruners.SuccessiveHalvingPruner(
                min_resource=1, reduction_factor=reduction, min_early_stopping_rate=0
            )
            study = optuna.create_study(direction=direction, pruner=pruner)
            before: list[tuple[tuple[int, float], ...]] = []
            for _ in range(25):
                trial, reports = study.ask(), []
                for step in range(1, 40):
                    value = chance.random()
                    trial.report(value, step)
                    reports.append((step, value))
                    rungs = rung_values(reports, halving)
                    theirs = trial.should_prune()
                    assert bool(pruning_reason(rungs, before, halving, direction)) == theirs
                    if theirs:
                        ended += 1
                        break
                before.append(rung_values(reports, halving))
                study.tell(trial, state=optuna.trial.TrialState.PRUNED)
    assert 50 < ended < 150
