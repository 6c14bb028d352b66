"""What passes make a CUDA device do, counted without one: no figure of `counts.json` grows.

`make cuda-lane ARGS=--record` counts all cases and writes the table again.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cuda_lane import environment
from tests.cuda_lane.cases import CASES, FAMILIES
from tests.cuda_lane.table import read_table, worse

pytestmark = pytest.mark.timeout(3600)


@pytest.fixture(scope="module")
def cuda_torch() -> Path:
    return environment.prepare()


@pytest.mark.parametrize("family", FAMILIES)
def test_no_figure_grows(cuda_torch: Path, family: str) -> None:
    counted = environment.run(cuda_torch, [name for name, case in CASES.items() if case.family == family])
    recorded = read_table()
    assert {name: problems for name, each in counted.items() if (problems := worse(recorded[name], each))} == {}


def test_every_recorded_case_is_counted() -> None:
    assert read_table().keys() == CASES.keys()


def test_a_read_in_each_row_is_noticed(cuda_torch: Path) -> None:
    name = "llama full"
    counted = environment.run(cuda_torch, [name], planted=True)
    problems = worse(read_table()[name], counted[name])
    assert "a further row: reads: 1 where 0.0 is recorded" in problems
