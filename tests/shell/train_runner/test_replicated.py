"""A small frozen base is on every rank in full: it computes what a sharded one does, bit for bit.

So a journal whose dispatches were computed in one way can be replayed in the other.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec
import pytest

from tests.shell.train_runner.replicated import DTYPES, Compared
from tests.support.torchrun import run_on_ranks

LONGEST_S: Final = 200


@pytest.mark.gpu
@pytest.mark.timeout(LONGEST_S + 20)
def test_a_base_on_every_rank_gives_the_log_probabilities_and_gradients_of_a_sharded_one(tmp_path: Path) -> None:
    run_on_ranks("tests.shell.train_runner.replicated", 2, str(tmp_path), within_s=LONGEST_S)
    for dtype in DTYPES:
        for rank in (0, 1):
            compared = msgspec.json.decode((tmp_path / f"{dtype}-{rank}").read_bytes(), type=Compared)
            assert compared.equal, (dtype, rank, compared.difference)
