"""Turns on shared devices, over seeds: never both sides awake, no side starves, and each safeguard is missed."""

from __future__ import annotations

import pytest

from tests.sim.train.device_turns import SAFEGUARDS, run_seed

SEEDS = 60


@pytest.mark.proves("ranks and engines that take turns on devices are never awake at once")
def test_no_seed_finds_both_sides_awake_or_one_that_starves() -> None:
    assert {seed: found for seed in range(SEEDS) if (found := run_seed(seed))} == {}


@pytest.mark.parametrize("safeguard", SAFEGUARDS)
def test_without_a_safeguard_a_seed_finds_both_awake(safeguard: str) -> None:
    found = (run_seed(seed, safeguard) for seed in range(200))
    assert any(violation and "awake at once" in violation for violation in found)
