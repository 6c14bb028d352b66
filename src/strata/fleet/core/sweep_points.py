"""The points of a sweep: every point of a grid, or points drawn at random from ranges by a seed; at most 100,000 jobs
(`MAX_SWEEP_JOBS`). The tables of a manifest are read in `manifest_jobs`.

The same sweep is the same jobs, on every machine and in every version of Python: chance is SHA-256 of the seed, the
number of the draw and the name of the axis, and numbers from a continuous range are rounded to six significant digits,
which no difference between two mathematical libraries survives.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import product
from math import exp, inf, log
from typing import Annotated, Any, Final

import msgspec

from strata.base.digest import canonical_json, sha256_hex
from strata.fleet.core.jobspec import Seed

MAX_SWEEP_JOBS: Final = 100_000
_DRAW_BITS: Final = 53
SEED_AXIS: Final = "seed"
"""The axis of this name varies the job's seed and not a hyper-parameter."""

Bounds = tuple[float, float]


class Range(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Exactly one of these."""

    uniform: Bounds | None = None
    log_uniform: Bounds | None = None
    integer: tuple[int, int] | None = None
    """Both ends included."""
    choice: list[Any] | None = None


class RandomSweep(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    samples: Annotated[int, msgspec.Meta(ge=1, le=MAX_SWEEP_JOBS)]
    seed: Seed = 0
    space: dict[str, Range]


Point = dict[str, Any]
"""The value of each axis; an axis is a key of `hyper`, with dots where it is inside a table."""


def range_problem(space: Range) -> str | None:
    """Says why nothing can be drawn from it; None if something can."""
    given = {name: value for name, value in msgspec.structs.asdict(space).items() if value is not None}
    if len(given) != 1:
        return f"expected exactly one of {', '.join(space.__struct_fields__)}"
    kind, values = given.popitem()
    if kind == "choice":
        return None if values else "choice is empty"
    low, high = values
    if not -inf < low <= high < inf:
        return "expected [low, high] with low at most high, both finite"
    if kind == "log_uniform" and low <= 0:
        return "log_uniform needs a low end above 0"
    return None


def axis_problem(hyper: Mapping[str, Any], axis: str, axes: Collection[str]) -> str | None:
    """Says why `axis` cannot be put into `hyper` beside the other axes."""
    if axis == SEED_AXIS:
        return None
    *outer, last = axis.split(".")
    if not all(outer) or not last:
        return "expected names with dots between them"
    here: Any = hyper
    for depth, name in enumerate(outer, 1):
        around = ".".join(outer[:depth])
        here = here.get(name, {})
        if around in axes or not isinstance(here, dict):
            return f"{around} is a value and not a table"
    return None


def grid_size(axes: Mapping[str, Sequence[Any]]) -> int:
    size = 1
    for values in axes.values():
        size *= len(values)
    return size


def grid_points(axes: Mapping[str, Sequence[Any]]) -> Iterator[Point]:
    """Every combination. The axes are taken by name, so their order in the file makes no difference."""
    names = sorted(axes)
    for values in product(*(axes[name] for name in names)):
        yield dict(zip(names, values, strict=True))


def random_points(sweep: RandomSweep) -> Iterator[Point]:
    """So many draws; a point that was drawn before is not drawn again, so there may be fewer."""
    seen = set()
    for number in range(sweep.samples):
        point = {name: _drawn(space, sweep.seed, number, name) for name, space in sorted(sweep.space.items())}
        key = canonical_json(point)
        if key not in seen:
            seen.add(key)
            yield point


def with_point(hyper: Mapping[str, Any], point: Point) -> dict[str, Any]:
    """`hyper` with the values of the point; a dotted axis goes into tables, which are made where they are missing."""
    result = dict(hyper)
    for axis, value in point.items():
        if axis == SEED_AXIS:
            continue
        *outer, last = axis.split(".")
        table = result
        for name in outer:
            inner = table.get(name)
            table[name] = dict(inner) if isinstance(inner, dict) else {}
            table = table[name]
        table[last] = value
    return result


def _drawn(space: Range, seed: int, number: int, axis: str) -> Any:
    chance = int(sha256_hex(canonical_json([seed, number, axis]))[:16], 16) >> (64 - _DRAW_BITS)
    if space.choice is not None:
        return space.choice[chance * len(space.choice) >> _DRAW_BITS]
    if space.integer is not None:
        first, last = space.integer
        return first + (chance * (last - first + 1) >> _DRAW_BITS)
    share = chance / 2**_DRAW_BITS
    if space.log_uniform is not None:
        low, high = space.log_uniform
        value = exp(log(low) + share * (log(high) - log(low)))
    else:
        low, high = space.uniform or (0.0, 0.0)
        # Not low + share * (high - low): the difference of two finite numbers may be infinite.
        value = low * (1 - share) + high * share
    return min(max(float(f"{value:.6g}"), low), high)
