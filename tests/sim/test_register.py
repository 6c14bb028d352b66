"""The register over the journal: no seed violates, every missing safeguard is caught, a seed is always the same run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sim.register import ablation
from tests.sim.register.scenario import run_seed

ROOT = Path(__file__).parents[2]
SEEDS = 300
GROUPS = 10
CAUGHT_WITHIN = 200


@pytest.mark.proves(
    "A replicated register over the journal is linearizable under crash, pause, partition, loss, "
    "duplication, delay, clock jumps and power cuts"
)
@pytest.mark.parametrize("group", range(GROUPS))
def test_no_seed_is_a_violation(group: int) -> None:
    for seed in range(group, SEEDS, GROUPS):
        outcome = run_seed(seed)
        assert outcome.problem is None, f"seed {seed}: {outcome.problem}"
        assert outcome.answered > outcome.operations // 2, f"seed {seed}: too little happened to prove anything"


@pytest.mark.proves(
    "The simulation of the register notices each of twelve safeguards that is removed, within 200 seeds"
)
@pytest.mark.parametrize("safeguard", ablation.EVERY)
def test_the_simulation_notices(safeguard: str) -> None:
    for seed in range(CAUGHT_WITHIN):
        if run_seed(seed, without=safeguard).problem is not None:
            return
    pytest.fail(f"with '{safeguard}', {CAUGHT_WITHIN} seeds found nothing")


TRACES = """
from tests.sim.register.scenario import run_seed
print(*(run_seed(seed).trace for seed in range(5)))
"""


def test_the_same_seed_is_the_same_run_in_another_process() -> None:
    runs = [
        subprocess.run(
            [sys.executable, "-c", TRACES],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": hash_seed},  # noqa: TID251 - passed on
        ).stdout.split()
        for hash_seed in ("1", "2")
    ]
    assert runs[0] == runs[1]
    assert len(set(runs[0])) == 5
