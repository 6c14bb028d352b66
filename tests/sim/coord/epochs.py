"""One large history: 64 workers, twenty epochs, at least a thousand faults, and rollbacks to checkpoints in between."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from strata.coord.core.machine import CoordMachine
from tests.sim.coord.lineage import History, Scale, problem_of

LARGE = Scale(
    workers=(64, 64),
    most_workers=64,
    samples=(4_000, 4_200),
    epochs=20,
    steps=0,
    faults=1_000,
    finish_turns=100_000,
    sweeps=True,
)


def history_of(seed: int, **smaller: Any) -> History:
    return History(seed, CoordMachine(), replace(LARGE, **smaller))


def run_history(seed: int) -> str | None:
    """The problem of a seed, or None."""
    return problem_of(history_of(seed))
