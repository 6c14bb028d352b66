"""The training server: no seed violates what clients are promised, and every safeguard is needed for it."""

from __future__ import annotations

import pytest

from tests.sim.train import ablation
from tests.sim.train.scenario import run_seed

SEEDS = 24
GROUPS = 4
CAUGHT_WITHIN = 200


@pytest.mark.proves(
    "A training server does every accepted operation once, in the order of its model, tells its result "
    "and no other, and keeps tenants apart, through deaths and zombies of orchestrator, ranks and API "
    "servers, lost connections, lost replies of the journal, hangs and clock jumps"
)
@pytest.mark.parametrize("group", range(GROUPS))
def test_no_seed_is_a_violation(group: int) -> None:
    for seed in range(group, SEEDS, GROUPS):
        outcome = run_seed(seed)
        assert outcome.problem is None, f"seed {seed}: {outcome.problem}"
        assert outcome.dispatches > 0, f"seed {seed}: nothing happened"


@pytest.mark.proves("The simulation of the training server notices each safeguard that is removed, within 200 seeds")
@pytest.mark.parametrize("safeguard", ablation.EVERY)
def test_the_simulation_notices(safeguard: str) -> None:
    """From the seed that showed it the last time; if it does not any more, another of the others has to."""
    first = ablation.SHOWN_BY.get(safeguard, 0)
    for seed in [*range(first, CAUGHT_WITHIN), *range(first)]:
        if run_seed(seed, without=safeguard).problem is not None:
            return
    pytest.fail(f"with '{safeguard}', {CAUGHT_WITHIN} seeds found nothing")


def test_the_same_seed_is_the_same_run() -> None:
    assert run_seed(3).trace == run_seed(3).trace
