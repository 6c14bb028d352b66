"""Bodies of clients that speak JSON, and results for them. Their shapes are those of the SDK's own JSON models."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from tinker.types import RequestErrorCategory
from tinker.types._pydantic_types.tensor_data import TensorData
from tinker.types.create_model_response import CreateModelResponse
from tinker.types.load_weights_response import LoadWeightsResponse
from tinker.types.optim_step_response import OptimStepResponse
from tinker.types.request_failed_response import RequestFailedResponse
from tinker.types.save_weights_response import SaveWeightsResponse

from strata.base.errors import Code, StrataError
from strata.train.core import ops
from strata.train.core.ops import Dense, DType
from strata.train.wire import tinker, tinker_json
from strata.train.wire.pass_request import PassRequest
from strata.train.wire.pb import tinker_pb2 as pb


def tensor(values: list[Any], dtype: str = "float32", **more: Any) -> dict[str, Any]:
    return {"data": values, "dtype": dtype, **more}


def datum(tokens: list[Any], **inputs: Any) -> dict[str, Any]:
    chunks = [{"type": "encoded_text", "tokens": tokens}]
    return {"model_input": {"chunks": chunks}, "loss_fn_inputs": inputs}


def body(*datums: Any, key: str = "forward_backward_input", **more: Any) -> bytes:
    given = {"data": list(datums), "loss_fn": "cross_entropy", "loss_fn_config": None}
    return json.dumps({key: given, "model_id": "s:train:0", "seq_id": 7, "type": "forward_backward"} | more).encode()


def complaint(content: bytes, *, forward_only: bool = False) -> str:
    found = tinker_json.read_pass(content, forward_only=forward_only)
    assert isinstance(found, ops.MalformedOperation)
    assert (found.model_id, found.seq_id) == ("s:train:0", 7)
    return found.message


GOOD = datum([1, 2, 3], target_tokens=tensor([2, 3, 4], "int64", shape=[3]), weights=tensor([0.5, -1, 0]))


def test_a_body_is_read_like_the_same_batch_in_protobuf() -> None:
    found = tinker_json.read_pass(body(GOOD), forward_only=False)
    assert isinstance(found, PassRequest)
    message = pb.ForwardBackwardRequest(model_id="s:train:0", seq_id=7, loss_fn="cross_entropy")
    sent = message.data.add()
    sent.model_input.add().encoded_text.tokens = np.array([1, 2, 3], "<i4").tobytes()
    targets, weights = np.array([2, 3, 4], "<i8"), np.array([0.5, -1, 0], "<f4")
    sent.loss_fn_inputs["target_tokens"].CopyFrom(pb.Tensor(dense=targets.tobytes(), dtype=pb.DTYPE_INT64, shape=[3]))
    sent.loss_fn_inputs["weights"].CopyFrom(pb.Tensor(dense=weights.tobytes(), dtype=pb.DTYPE_FLOAT32))
    assert found == tinker.read_pass(message.SerializeToString())


def test_forward_has_its_own_word_and_is_forward_only() -> None:
    found = tinker_json.read_pass(body(GOOD, key="forward_input"), forward_only=True)
    assert isinstance(found, PassRequest)
    assert found.forward_only
    assert complaint(body(GOOD), forward_only=True) == "forward_input: is missing"
    assert complaint(body(GOOD, key="forward_input")) == "forward_backward_input: is missing"


def test_a_sparse_matrix_is_read() -> None:
    matrix = tensor([1.5, 2.5], shape=[3, 4], sparse_crow_indices=[0, 1, 1, 2], sparse_col_indices=[3, 0])
    found = tinker_json.read_pass(body(datum([1, 2, 3], weights=matrix)), forward_only=False)
    assert isinstance(found, PassRequest)
    read = found.datums[0].inputs["weights"]
    assert isinstance(read, ops.Sparse)
    assert np.frombuffer(read.col, "<i8").tolist() == [3, 0]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (body(GOOD, datum([1], weights=tensor([1, 2]))), "data[1].loss_fn_inputs.weights: has the shape [2] beside 1"),
        (body(datum([1], weights=tensor([None]))), "data[0].loss_fn_inputs.weights.data[0]: Expected `int | float`"),
        (body(datum([1], weights=tensor([1], "float16"))), "data[0].loss_fn_inputs.weights.dtype: Invalid enum"),
        (body(datum([1], weights=tensor([1], extra=1))), "data[0].loss_fn_inputs.weights: Object contains unknown"),
        (body(datum([1], weights=tensor([1e39]))), "data[0].loss_fn_inputs.weights: number 0 is inf"),
        (
            body(datum([1], target_tokens=tensor([1.5], "int64"))),
            "data[0].loss_fn_inputs.target_tokens: takes integers",
        ),
        (body(datum([1], target_tokens=tensor([2**63], "int64"))), "data[0].loss_fn_inputs.target_tokens: takes int"),
        (body(datum([2**31])), "data[0].model_input: takes integers of 32 bits"),
        (body(datum(["a"])), "data[0].model_input.chunks[0].tokens[0]: Expected `int`"),
        (body({"model_input": {"chunks": [{"type": "image"}]}}), "data[0].model_input.chunks[0]: this server trains"),
        (body(datum([1], weights=tensor([1], sparse_crow_indices=[0]))), "data[0].loss_fn_inputs.weights: sparse_crow"),
        (body(3), "data[0]: Expected `object`"),
        (body(key="else"), "forward_backward_input: is missing"),
    ],
)
def test_a_refusal_says_where(content: bytes, words: str) -> None:
    assert complaint(content).startswith(words), complaint(content)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"model_id": 3}', b'{"model_id": "m"}', b'{"a":' * 3000])
def test_a_body_without_a_place_is_refused_at_once(content: bytes) -> None:
    with pytest.raises(StrataError) as refused:
        tinker_json.read_pass(content, forward_only=False)
    assert refused.value.code is Code.INVALID


def test_an_output_is_json_that_keeps_what_is_not_a_number() -> None:
    values = np.array([-0.5, np.nan, -np.inf], np.float32)
    outputs = [ops.DatumOutput({"logprobs": Dense(DType.F32, (3,), values.tobytes())})]
    found = json.loads(tinker_json.write_output(ops.PassResult(outputs, {"loss:sum": math.inf})))
    read = TensorData.model_validate(found["loss_fn_outputs"][0]["logprobs"])
    assert read.shape == [3]
    assert read.data[0] == -0.5
    assert math.isnan(read.data[1])
    assert read.data[2] == -math.inf
    assert found["metrics"] == {"loss:sum": math.inf}


def test_numbers_of_half_width_are_widened() -> None:
    fields = {
        "half": Dense(DType.BF16, (1,), np.array([0x3FC0], "<u2").tobytes()),
        "small": Dense(DType.I32, (1,), np.array([-7], "<i4").tobytes()),
    }
    found = json.loads(tinker_json.write_output(ops.PassResult([ops.DatumOutput(fields)], {})))["loss_fn_outputs"][0]
    assert found["half"] == {"data": [1.5], "dtype": "float32", "shape": [1]}
    assert found["small"] == {"data": [-7], "dtype": "int64", "shape": [1]}


def test_every_result_is_one_of_the_sdk() -> None:
    path = "tinker://s:train:0/weights/a"
    for result, model in (
        (ops.ModelCreated("s:train:0"), CreateModelResponse),
        (ops.StepDone({"lr:mean": 0.5}), OptimStepResponse),
        (ops.WeightsSaved(path), SaveWeightsResponse),
        (ops.WeightsLoaded(path), LoadWeightsResponse),
    ):
        found = model.model_validate(json.loads(tinker_json.write_result(result)))
        expected = {name: getattr(result, name) for name in result.__struct_fields__}
        assert {name: getattr(found, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("category", "theirs"),
    [
        ("user", RequestErrorCategory.User),
        ("server", RequestErrorCategory.Server),
        ("cancelled", RequestErrorCategory.User),
    ],
)
def test_a_failed_operation_says_whose_fault_it_is(category: Any, theirs: RequestErrorCategory) -> None:
    content = tinker_json.write_result(ops.Failed(category, "the loss of datum 3 is nan"))
    found = RequestFailedResponse.model_validate_json(content)
    assert (found.error, found.category) == ("the loss of datum 3 is nan", theirs)
