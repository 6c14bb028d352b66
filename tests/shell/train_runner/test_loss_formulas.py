"""The formulas of docs/training-losses.md are those of the code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

from strata.train.core.model_options import LossName
from strata.train.runner.passes.losses import RULES

PAGE: Final = Path(__file__).parents[3] / "docs" / "training-losses.md"


@pytest.mark.parametrize("name", RULES, ids=lambda name: str(name.value))
def test_the_formula_of_a_loss_is_that_of_its_code(name: LossName) -> None:
    row = re.search(rf"(?m)^\| `{name.value}` \| (.*) \|$", PAGE.read_text(encoding="utf-8"))
    assert row
    formula = (RULES[name].loss.__doc__ or "").partition(".")[0].partition(", with")[0].partition(" with one")[0]
    assert row[1].startswith(formula), (formula, row[1])
