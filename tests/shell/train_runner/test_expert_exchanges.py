"""What experts on other ranks cost a layer, counted on two ranks: exchanges between ranks, and reads by the host."""

from __future__ import annotations

from typing import Final

import msgspec
import pytest

from tests.shell.train_runner.expert_exchanges import LAYERS, Cost, ExchangesFound
from tests.support.torchrun import run_on_ranks

MODULE: Final = "tests.shell.train_runner.expert_exchanges"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> ExchangesFound:
    folder = tmp_path_factory.mktemp("exchanges")
    run_on_ranks(MODULE, 2, str(folder), within_s=120)
    return msgspec.json.decode((folder / "found.json").read_bytes(), type=ExchangesFound)


def test_pairs_travel_to_their_experts_and_back_once_and_the_host_reads_once(found: ExchangesFound) -> None:
    """Forward also their numbers are exchanged, and read."""
    assert found.costs[0] == Cost(exchanges=(3, 3, 2), reads=(1, 1, 0))


def test_a_layer_that_is_recomputed_exchanges_and_reads_no_numbers_again(found: ExchangesFound) -> None:
    assert found.costs[1] == Cost(exchanges=(3, 3, 2 + 2), reads=(1, 1, 0))


def test_what_is_kept_for_a_recomputation_goes_with_the_graph_of_its_row(found: ExchangesFound) -> None:
    layers = max(LAYERS)
    assert found.kept == {
        "without gradients": 0,
        "two rows in flight": 2 * layers,
        "one of them is done": layers,
        "the other was given up": 0,
        "a forward pass failed": 0,
        "context is left": 0,
        "a recomputation failed": 0,
    }


def test_rows_in_flight_together_have_the_gradients_of_rows_one_after_the_other(found: ExchangesFound) -> None:
    assert found.apart <= 1e-6
