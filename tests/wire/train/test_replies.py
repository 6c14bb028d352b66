"""What replies say about a checkpoint."""

from __future__ import annotations

from strata.train.status import views
from strata.train.wire import replies

VIEW = views.ModelCheckpointView("s:train:0", "weights", "mine", "tiny", None, 0.0, 1)


def test_the_provenance_of_a_checkpoint_of_the_base_is_all_zeros() -> None:
    begun = replies.checkpoint(VIEW).provenance
    assert (begun.parent, begun.total.steps) == (None, 0)
