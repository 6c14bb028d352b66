"""Every sample once per epoch in the surviving model, whatever fails; and each safeguard is needed for it."""

from __future__ import annotations

import pytest

from tests.sim.coord.ablation import EVERY, without
from tests.sim.coord.lineage import run_history

HISTORIES = 600
GROUPS = 6
CAUGHT_WITHIN = 200


@pytest.mark.proves(
    "Every sample's gradient is in the surviving model exactly once per epoch, through crashes of workers "
    "and coordinator, zombies, lost replies, checkpoints and recoveries"
)
@pytest.mark.parametrize("group", range(GROUPS))
def test_every_sample_is_in_the_surviving_model_once(group: int) -> None:
    for seed in range(group, HISTORIES, GROUPS):
        problem = run_history(seed)
        assert problem is None, f"seed {seed}: {problem}"


@pytest.mark.proves("The histories of the coordinator notice each of seventeen safeguards that is removed, within 200")
@pytest.mark.parametrize("safeguard", EVERY)
def test_the_histories_notice_when(safeguard: str) -> None:
    with without(safeguard):
        for seed in range(CAUGHT_WITHIN):
            if run_history(seed) is not None:
                return
    pytest.fail(f"with '{safeguard}', {CAUGHT_WITHIN} histories found nothing")
