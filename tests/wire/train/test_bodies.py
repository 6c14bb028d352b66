"""Bodies that order something: what is wrong with one is said so that the operation still takes its number."""

from __future__ import annotations

import msgspec
import pytest

from strata.base.errors import Code, StrataError
from strata.train.core import ops
from strata.train.wire import bodies
from strata.train.wire.pass_request import OperationKey, validate_pass
from strata.train.wire.sampling import SampleRequest, SaveWeightsForSampler


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


def save_for_sampler(kind: str) -> ops.SaveWeights | ops.SaveSampler:
    body = {"type": "save_weights_for_sampler", "model_id": "s:train:0", "seq_id": 3, "path": "mine", "kind": kind}
    return msgspec.json.decode(msgspec.json.encode(body), type=SaveWeightsForSampler).operation()


def test_a_snapshot_for_a_sampler_is_what_a_save_is_anyway() -> None:
    assert save_for_sampler("snapshot") == ops.SaveWeights("s:train:0", 3, "sampler_weights", "mine")


def test_an_inflight_sampler_has_a_number_and_no_path() -> None:
    with pytest.raises(StrataError, match=r"kind: .*no path") as refused:
        save_for_sampler("inflight")
    assert refused.value.code is Code.INVALID
    body = b'{"model_id":"s:train:0","seq_id":3,"sampling_session_seq_id":7,"kind":"inflight"}'
    operation = msgspec.json.decode(body, type=SaveWeightsForSampler).operation()
    assert operation == ops.SaveSampler("s:train:0", 3, "s:sample:7", inflight=True)


def test_what_is_for_a_loss_that_is_not_here_is_refused_with_the_option_to_set() -> None:
    """The default of the cookbook's recipes."""
    body = b'{"sampling_session_id":"s","seq_id":0,"prompt":{"chunks":[]},"record_stability_info":true}'
    with pytest.raises(StrataError, match=r"record_stability_info: .*loss_fn=importance_sampling"):
        msgspec.json.decode(body, type=SampleRequest).operation()
    with pytest.raises(StrataError, match=r"loss_fn: .*loss_fn=importance_sampling"):
        validate_pass(OperationKey("m", 1), "stable_reinforce", {}, [], forward_only=False)
