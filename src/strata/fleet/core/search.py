"""Sweeps that search: method, objective, at most 1,000 trials, seeds and ids of trials, and when successive halving
(ASHA) prunes one. Points are proposed in `hub.search_study`.

A trial is a job of the sweep. What the sampler knows is computed from the jobs and their metrics alone, so a hub that
was restarted, or another hub on the same database, proposes the same points. Successive halving (ASHA) ends a trial
early when it is not among the best at a rung, which is a step of its reported metric.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Final, Literal

import msgspec

from strata.base.digest import canonical_json, sha256_hex
from strata.fleet.core.jobspec import JobSpec, Seed
from strata.fleet.core.sweep_points import SEED_AXIS, Point, Range, axis_problem, range_problem, with_point

MAX_TRIALS: Final = 1000
"""A proposal reads all trials before it."""
PRUNED: Final = "pruned"
"""Begins the reason of a trial that successive halving ended."""
STOPPED: Final = "the sweep was stopped"
"""The reason of a trial that waited for a host when its sweep was stopped."""
Direction = Literal["minimize", "maximize"]


class Halving(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rungs at `first_step`, `first_step * reduction`, `first_step * reduction ** 2` …"""

    first_step: Annotated[int, msgspec.Meta(ge=1, le=2**40)] = 1
    reduction: Annotated[int, msgspec.Meta(ge=2, le=16)] = 3
    """One in so many trials at a rung goes on."""


class SearchPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    method: Literal["tpe", "cmaes", "nsga2"] = "tpe"
    objective: Annotated[dict[str, Direction], msgspec.Meta(min_length=1, max_length=8)]
    """Metrics of the trainer, and which way each is better."""
    trials: Annotated[int, msgspec.Meta(ge=1, le=MAX_TRIALS)]
    parallel: Annotated[int, msgspec.Meta(ge=1, le=MAX_TRIALS)] = 1
    """How many trials may be queued or running at once."""
    seed: Seed = 0
    space: Annotated[dict[str, Range], msgspec.Meta(min_length=1, max_length=100)]
    halving: Halving | None = None


class SearchSweep(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    base: JobSpec
    """What all trials have in common."""
    search: SearchPlan


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """What a sampler knows of one trial. Without `state` it has not ended."""

    number: int
    point: Point
    state: Literal["", "completed", "failed", "pruned"] = ""
    values: tuple[float, ...] = ()
    """Values of the objective, in its order; of a completed trial."""
    reports: tuple[tuple[int, float], ...] = ()
    """Step and value at the rungs that a pruned trial reached."""


def search_problems(search: SearchPlan, hyper: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yields where and why nothing can be searched this way."""
    for axis, space in search.space.items():
        problem = range_problem(space) or axis_problem(hyper, axis, search.space)
        if axis == SEED_AXIS:
            problem = "a search does not vary the seed"
        elif space.choice is not None and not all(isinstance(each, str | int | float | None) for each in space.choice):
            problem = "expected strings, numbers and truth values"
        elif space.choice is not None and search.method == "cmaes":
            problem = "cmaes takes numbers only"
        if problem:
            yield ("space", axis), problem
    if search.method == "cmaes" and len(search.space) < 2:
        yield ("space",), "cmaes needs at least two axes"
    if len(search.objective) > 1 and search.method == "cmaes":
        yield ("objective",), "cmaes takes one metric"
    if len(search.objective) > 1 and search.halving is not None:
        yield ("halving",), "it takes one metric"


def corner_points(search: SearchPlan) -> Sequence[Point]:
    """The lowest and the highest value of each axis: what the trainer must be able to take."""
    ends = {axis: _ends(space) for axis, space in search.space.items()}
    return [{axis: each[side] for axis, each in ends.items()} for side in (0, 1)]


def _ends(space: Range) -> tuple[Any, Any]:
    if space.choice is not None:
        return space.choice[0], space.choice[-1]
    return space.integer or space.uniform or space.log_uniform or (0, 0)


def trial_spec(sweep: SearchSweep, number: int, point: Point) -> JobSpec:
    base = sweep.base
    return msgspec.structs.replace(base, name=f"{base.sweep}/{number}", hyper=with_point(base.hyper, point))


def trial_number(sweep: SearchSweep, spec: JobSpec) -> int | None:
    """The number in the job's name; None for a job that is no trial."""
    name, _, number = spec.name.rpartition("/")
    return int(number) if name == sweep.base.sweep and number.isdecimal() else None


def trial_point(sweep: SearchSweep, number: int, spec: JobSpec) -> Point | None:
    """The point of a trial; None if the sweep was another one when it was made."""
    point: Point = {}
    for axis in sweep.search.space:
        here: Any = spec.hyper
        for name in axis.split("."):
            if not isinstance(here, dict) or name not in here:
                return None
            here = here[name]
        if not _is_inside(sweep.search.space[axis], here):
            return None
        point[axis] = here
    return point if trial_spec(sweep, number, point).id == spec.id else None


def _is_inside(space: Range, value: Any) -> bool:
    if space.choice is not None:
        return any(canonical_json(value) == canonical_json(each) for each in space.choice)
    low, high = _ends(space)
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


def sampler_seed(seed: int, number: int, tries: int) -> int:
    """Each proposal has a seed of its own: no state of a generator survives in a hub."""
    return int(sha256_hex(canonical_json([seed, number, tries]))[:8], 16)


def rung_values(reports: Sequence[tuple[int, float]], halving: Halving) -> tuple[tuple[int, float], ...]:
    """The first value at or after each rung that was reached, with the step of the rung."""
    reached: list[tuple[int, float]] = []
    rung = halving.first_step
    for step, value in reports:
        while step >= rung:
            reached.append((rung, value))
            rung *= halving.reduction
    return tuple(reached)


def pruning_reason(
    own: Sequence[tuple[int, float]],
    others: Sequence[Sequence[tuple[int, float]]],
    halving: Halving,
    direction: Direction,
) -> str:
    """Says why a trial that has reached its last rung is ended now; empty: it goes on.

    At a rung, the best `1 / reduction` of the trials that have reached it so far go on, and at least the best one.
    """
    sign = 1.0 if direction == "minimize" else -1.0
    for rung, value in own:
        at_rung = sorted([sign * value, *(sign * there for each in others for step, there in each if step == rung)])
        promoted = max(1, len(at_rung) // halving.reduction)
        if not sign * value <= at_rung[promoted - 1]:
            return f"{PRUNED}: {value:.6g} at step {rung} is not among the best {promoted} of {len(at_rung)} trials"
    return ""
