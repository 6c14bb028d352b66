"""Ranks are killed, and the next ones replay with noise in their kernels: reported, or stopped and resolved."""

from __future__ import annotations

from pathlib import Path

import pytest

from soak.train.noise import KINDS, noisy_replays
from soak.train.server import make_model
from soak.trials import CampaignResult
from strata.train.core.replay_differences import TOLERANCES

pytestmark = pytest.mark.timeout(600)


@pytest.mark.proves("A replay that should have been exact and is not stops its model, until its owner decides")
async def test_replays_say_by_how_much_they_differ_and_stop_a_model_that_should_have_been_the_same(
    tmp_path: Path,
) -> None:
    """Each kind of noise once: none, below the tolerance, above it and accepted, above it and rolled back."""
    make_model(tmp_path / "tiny")
    told: list[CampaignResult] = []
    result = await noisy_replays(tmp_path / "noise", tmp_path / "tiny", range(len(KINDS)), told.append)
    assert result.problems == []
    assert (result.times, len(told)) == (len(KINDS), len(KINDS))
    assert f"tolerance of {TOLERANCES['float32']:g}" in result.figures
