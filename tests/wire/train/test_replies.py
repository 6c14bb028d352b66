"""Replies of older servers, and about what older servers made."""

from __future__ import annotations

import msgspec

from strata.train.core.lineage import WeightsLineage
from strata.train.status import views
from strata.train.wire import replies

VIEW = views.ModelCheckpointView("s:train:0", "weights", "mine", "tiny", None, 0.0, 1)


def test_a_checkpoint_of_unknown_lineage_has_no_provenance_and_one_of_the_base_has_zeros() -> None:
    unknown = msgspec.json.decode(msgspec.json.encode(replies.checkpoint(VIEW)))
    assert unknown["provenance"] is None
    begun = replies.checkpoint(msgspec.structs.replace(VIEW, lineage=WeightsLineage())).provenance
    assert begun is not None
    assert (begun.parent, begun.total.steps) == (None, 0)


def test_a_reply_of_a_server_that_does_not_count_can_be_read() -> None:
    sent = msgspec.json.decode(msgspec.json.encode(replies.checkpoint(VIEW)))
    del sent["provenance"]
    assert msgspec.convert(sent, replies.CheckpointReply).provenance is None
