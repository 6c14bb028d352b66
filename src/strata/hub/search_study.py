"""Proposes the next point of a search by Optuna: which sampler each method has, and how trials are replayed into a
study.

Each earlier trial is given to the study with the point that its job has, in the order of the numbers; the samplers that
count generations (CMA-ES, NSGA-II) then find what they noted of them before. Blocking: call it in a thread.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Sequence
from typing import Any

from strata.base.errors import Code, StrataError
from strata.fleet.core.search import SearchPlan, Trial, sampler_seed
from strata.fleet.core.sweep_points import Point, Range


def require_optuna() -> Any:
    try:
        return importlib.import_module("optuna")
    except ModuleNotFoundError:
        raise StrataError(
            Code.UNSUPPORTED, "the hub needs optuna for this: pip install 'strata-train[sweep]' where it runs"
        ) from None


def propose(search: SearchPlan, trials: Sequence[Trial], number: int, tries: int = 0) -> Point:
    """The point of trial `number`, given those before it. Another `tries` gives another point."""
    optuna = require_optuna()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return _ask(optuna, search, trials, number, tries)
        except Exception as error:
            reason = f"Optuna proposes no point: {type(error).__name__}: {error}"
            raise StrataError(Code.INTERNAL, reason) from error


def _ask(optuna: Any, search: SearchPlan, trials: Sequence[Trial], number: int, tries: int) -> Point:
    study = optuna.create_study(directions=list(search.objective.values()))
    space = {axis: _distribution(optuna, each) for axis, each in sorted(search.space.items())}
    for trial in trials:
        _replay(optuna, study, search, space, trial)
    study.sampler = _sampler(optuna, search, sampler_seed(search.seed, number, tries))
    return dict(study.ask(space).params)


def _replay(optuna: Any, study: Any, search: SearchPlan, space: dict[str, Any], trial: Trial) -> None:
    study.sampler = _sampler(optuna, search, sampler_seed(search.seed, trial.number, 0))
    study.enqueue_trial(trial.point)
    asked = study.ask(space)
    if search.method != "tpe":
        # A sampler that counts generations notes them here, where a known point would make its answer needless.
        _ = asked.relative_params
    if trial.state == "completed":
        study.tell(asked, list(trial.values))
    elif trial.state == "pruned":
        for step, value in trial.reports:
            asked.report(value, step)
        study.tell(asked, state=optuna.trial.TrialState.PRUNED)
    elif trial.state == "failed":
        study.tell(asked, state=optuna.trial.TrialState.FAIL)


def _sampler(optuna: Any, search: SearchPlan, seed: int) -> Any:
    if search.method == "tpe":
        return optuna.samplers.TPESampler(seed=seed)
    if search.method == "cmaes":
        return optuna.samplers.CmaEsSampler(seed=seed)
    return optuna.samplers.NSGAIISampler(seed=seed)


def _distribution(optuna: Any, space: Range) -> Any:
    kinds = optuna.distributions
    if space.choice is not None:
        return kinds.CategoricalDistribution(space.choice)
    if space.integer is not None:
        return kinds.IntDistribution(*space.integer)
    low, high = space.log_uniform or space.uniform or (0.0, 0.0)
    return kinds.FloatDistribution(low, high, log=space.log_uniform is not None)
