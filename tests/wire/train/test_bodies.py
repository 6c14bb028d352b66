"""Bodies that order something: what is wrong with one is said so that the operation still takes its number."""

from __future__ import annotations

import pytest

from strata.base.errors import Code, StrataError
from strata.train.wire import bodies


@pytest.mark.parametrize(
    "path",
    [
        "tinker://s:train:0/other/mine",
        "tinker://s:train:0/weights/..",
        "tinker://s:train:0/weights/a/b",
        "tinker:///weights/mine",
        "weights/mine",
    ],
)
def test_a_path_that_names_no_checkpoint_is_the_fault_of_the_request(path: str) -> None:
    """Anything else than INVALID would be refused at the door, and the number would stay a gap for ever."""
    with pytest.raises(StrataError) as refused:
        bodies.LoadWeightsBody(path=path, model_id="s:train:0", seq_id=3).operation()
    assert refused.value.code is Code.INVALID
