"""How evenly buckets are spread over unequal workers, and how many move when one is lost or joins.

Nothing is timed: the figures are the same on every machine. `ours` is the placement that jobs get unless they ask for
another, `bare` one of the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from bench.coordinator.hashes import jump_owners, maglev_owners, slots_of, without
from bench.interleave import Comparison
from bench.report import Report
from strata.coord.core.facts import DEFAULT_BUCKETS
from strata.coord.core.placement import RING_POINTS, BucketAssignment, Scheme, place

GPUS: Final = (1, 2, 4, 8)
WORKERS: Final = 100
BUCKETS: Final = DEFAULT_BUCKETS
NEWCOMER: Final = ("newcomer", 8)

Owners = Sequence[str]
Weights = Mapping[str, int]


def run(report: Report) -> None:
    report.progress("placement")
    weights = {f"worker-{number}": GPUS[number % len(GPUS)] for number in range(WORKERS)}
    ours = _figures(weights, *_sticky(weights))
    others = {
        "ring": _figures(weights, *_anew(weights, _ring)),
        "jump": _figures(weights, *_jump(weights)),
        "maglev": _figures(weights, *_anew(weights, lambda some: maglev_owners(BUCKETS, some))),
    }
    fair = _fair(weights)
    for name, theirs in others.items():
        against = f"{name} with {RING_POINTS} points for each GPU" if name == "ring" else name
        notes = (f"largest load by fair share; {against}", *(f"a fair share is {each:.2f} %; {name}" for each in fair))
        for what, unit, mine, other, note in zip(
            ("balance", "loss", "join"), ("x", "%", "%"), ours, theirs, notes, strict=True
        ):
            report.add(f"placement.{what}.{name}", unit, Comparison([mine], [other], "lower"), note=note)


Outcomes = tuple[Owners, Callable[[str], Owners], Owners]
"""The owners of all buckets; after the loss of a worker; and after a newcomer joined."""


def _figures(weights: Weights, owners: Owners, after_loss: Callable[[str], Owners], joined: Owners) -> list[float]:
    """The largest load, and the percentage that moves: on average when one is lost, and when the newcomer joins."""
    loss = sum(moved(owners, after_loss(worker)) for worker in weights) / len(weights)
    return [balance(owners, weights), loss * 100, moved(owners, joined) * 100]


def balance(owners: Owners, weights: Weights) -> float:
    """The largest load, in fair shares of the worker that has it."""
    loads, whole = Counter(owners), sum(weights.values())
    return max(loads[worker] * whole / (len(owners) * weight) for worker, weight in weights.items())


def moved(before: Owners, after: Owners) -> float:
    return sum(old != new for old, new in zip(before, after, strict=True)) / len(before)


def _fair(weights: Weights) -> tuple[float, float]:
    whole, (_, gpus) = sum(weights.values()), NEWCOMER
    return 100 / len(weights), 100 * gpus / (whole + gpus)


def _without(weights: Weights, lost: str) -> dict[str, int]:
    return {worker: weight for worker, weight in weights.items() if worker != lost}


def _anew(weights: Weights, owners_of: Callable[[Weights], Owners]) -> Outcomes:
    """For hashes that know nothing of the assignment before."""
    return owners_of(weights), lambda lost: owners_of(_without(weights, lost)), owners_of({**weights, **_newcomer()})


def _sticky(weights: Weights) -> Outcomes:
    first, _ = place(BUCKETS, weights)

    def then(changed: Weights) -> Owners:
        return _listed(place(BUCKETS, changed, first)[0])

    return _listed(first), lambda lost: then(_without(weights, lost)), then({**weights, **_newcomer()})


def _ring(weights: Weights) -> Owners:
    return _listed(place(BUCKETS, weights, scheme=Scheme.RING)[0])


def _jump(weights: Weights) -> Outcomes:
    slots = slots_of(weights)

    def owners_of(some: Sequence[str]) -> Owners:
        return jump_owners(BUCKETS, some)

    return owners_of(slots), lambda lost: owners_of(without(slots, lost)), owners_of([*slots, *slots_of(_newcomer())])


def _newcomer() -> dict[str, int]:
    name, gpus = NEWCOMER
    return {name: gpus}


def _listed(assignment: BucketAssignment) -> list[str]:
    return [assignment.workers[number] for number in assignment.numbers().tolist()]
