from __future__ import annotations

import pytest

from strata.fleet.core.samples import CardSample, HostSample, finest


def test_values_are_named_by_their_card_and_what_is_not_told_is_left_out() -> None:
    card = CardSample(card="GPU-0", use=0.5, power_w=200.0)
    sample = HostSample(cpu_use=0.25, cards=(card,))
    assert sample.values() == {"cpu_use": 0.25, "GPU-0/use": 0.5, "GPU-0/power_w": 200.0}


@pytest.mark.parametrize(
    ("span_s", "points", "step_s"),
    [(3600, 300, 0), (3600, 60, 60), (86_400, 300, 3600), (86_400, 2000, 60), (30 * 86_400, 5, 3600)],
)
def test_the_finest_resolution_that_fits_is_chosen(span_s: float, points: int, step_s: int) -> None:
    assert finest(span_s, points) == step_s
