"""The expected state of an ended gang, sweep and training server: pure functions.

What script jobs have to leave behind, and what holds for the attempts of every job, is in `soak.fleet_agent`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from soak.fleet_agent.expected_state import JobEvidence
from soak.mixed.programs.trial import loss
from strata.fleet.core.search import sampler_seed
from strata.hub.search_study import require_optuna

LOW, HIGH = -5.0, 5.0


class GangPlan(msgspec.Struct, frozen=True, kw_only=True):
    epochs: int = 2
    samples: int = 160
    pace_s: float = 0.1


def find_gang_problems(
    number: int, models: Sequence[Mapping[str, Sequence[int]]], plan: GangPlan, ledger: Sequence[str]
) -> list[str]:
    """Every sample is in the gang's model once per data epoch, and was read by a worker."""
    every = range(plan.samples)
    read = {epoch: set[int]() for epoch in range(plan.epochs)}
    for line in ledger:
        _, _, epoch, start, end = map(int, line.split())
        read[epoch].update(range(start, end))
    found = []
    for epoch, samples in read.items():
        counts = Counter(sample for model in models for sample in model.get(str(epoch), []))
        if counts != Counter(every):
            missing, doubled = sorted(set(every) - set(counts)), [each for each, count in counts.items() if count > 1]
            found.append(f"data epoch {epoch} lacks the samples {missing[:5]} and has {doubled[:5]} more than once")
        if samples != set(every):
            found.append(f"no worker read {sorted(set(every) - samples)[:5]} in data epoch {epoch}")
    return [f"gang {number}: {problem}" for problem in found]


def plain_study(seed: int, count: int) -> list[dict[str, float]]:
    """The points of a study of Optuna alone; its sampler gets the seed that the hub has for each trial."""
    optuna = require_optuna()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    axes = {name: optuna.distributions.FloatDistribution(LOW, HIGH) for name in ("x", "y")}
    study, points = optuna.create_study(), []
    for number in range(count):
        study.sampler = optuna.samplers.TPESampler(seed=sampler_seed(seed, number, 0))
        trial = study.ask(axes)
        study.tell(trial, loss(trial.params))
        points.append(dict(trial.params))
    return points


def find_sweep_problems(sweep: str, seed: int, count: int, trials: Sequence[JobEvidence]) -> list[str]:
    """Every number is there once, with the point and the result that a study in peace has."""
    by_name = {each.job.spec.name: each for each in trials}
    names = [f"{sweep}/{number}" for number in range(count)]
    if len(trials) != len(by_name) or sorted(by_name) != sorted(names):
        return [f"{sweep}: its trials are {sorted(each.job.spec.name for each in trials)}"]
    found = []
    for name, point in zip(names, plain_study(seed, count), strict=True):
        evidence = by_name[name]
        asked = {axis: evidence.job.spec.hyper[axis] for axis in point}
        if asked != point:
            found.append(f"{name} tried {asked}, and a plain study tries {point}")
        results = [each.facts["metrics"]["loss"] for each in evidence.attempts if each.outcome == "completed"]
        if results != [loss(point)] or evidence.files != {"result.json": json.dumps(loss(point)).encode()}:
            found.append(f"{name} has the results {results} and the files {evidence.files}, and not {loss(point)}")
    return found
