"""What eight devices exchange: no number of calls and no bytes of `collectives.json` grow."""

from __future__ import annotations

import pytest

from tests.cuda_lane.collectives import CASES, grown, read_table, trace


@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", CASES)
def test_no_collective_grows(case: str) -> None:
    assert grown(read_table()[case], trace(CASES[case])) == []


def test_every_recorded_collective_is_traced() -> None:
    assert read_table().keys() == CASES.keys()
