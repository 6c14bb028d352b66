"""What can be soaked: a campaign is a function from a seed to what the seed showed."""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from tests.sim.coord import lineage
from tests.sim.register import scenario as register


class Finding(msgspec.Struct, frozen=True):
    """What one seed showed: no problem, or a text for a person."""

    seed: int
    problem: str | None


def run_register(seed: int) -> Finding:
    """A replicated register over the journal, under every fault of the simulation."""
    return Finding(seed, register.run_seed(seed).problem)


def run_lineage(seed: int) -> Finding:
    """A random history of one training job on the coordinator's core: every sample once per epoch."""
    return Finding(seed, lineage.run_history(seed))


CAMPAIGNS: dict[str, Callable[[int], Finding]] = {"lineage": run_lineage, "register": run_register}


def quiet() -> None:
    # Thousands of simulated failures would each be worth a line in the log of a real process.
    logging.disable(logging.CRITICAL)
