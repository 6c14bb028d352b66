"""A large job under many faults: every sample once per epoch in the surviving model."""

from __future__ import annotations

import pytest

from tests.sim.coord.epochs import LARGE, history_of
from tests.sim.coord.lineage import problem_of

pytestmark = pytest.mark.proves(
    "Every sample is in the model once per epoch with 64 workers, and with workers that cannot read a shard to its end"
)


@pytest.mark.parametrize("seed", [0, 1], ids=["elastic", "synchronous"])
def test_a_large_job_with_a_hundred_faults_is_exact(seed: int) -> None:
    history = history_of(seed, epochs=5, samples=(1_000, 1_100), faults=100)
    assert problem_of(history) is None
    assert history.faults.total() - history.faults["reply lost"] >= 100
    assert set(history.faults) >= {"crashed", "frozen", "failed ack", "coordinator killed", "reply lost"}
    assert history.elastic or history.rollbacks > 0


def test_the_large_scale_is_what_the_record_says() -> None:
    assert (LARGE.workers, LARGE.epochs, LARGE.faults) == ((64, 64), 20, 1_000)
