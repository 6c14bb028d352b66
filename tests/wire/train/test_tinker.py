"""Bytes of the `tinker` SDK's own encoder are read as they were meant, and our bytes pass its own parser."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import pytest
import torch
from tinker import types
from tinker.proto import tinker_public_pb2 as theirs
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_forward_backward_output

from strata.base.errors import Code, StrataError
from strata.http.zstd import decompress_frames, zstd
from strata.train.core import model_options, ops
from strata.train.core.ops import Dense, DType
from strata.train.wire import tinker
from strata.train.wire.pass_request import PassRequest
from strata.train.wire.pb import tinker_pb2 as ours
from strata.train.wire.sdk_fields import sdk_table


def batch(*datums: types.Datum, loss: str = "cross_entropy", config: dict[str, float | str] | None = None) -> bytes:
    given = types.ForwardBackwardInput(data=list(datums), loss_fn=loss, loss_fn_config=config)  # type: ignore[arg-type]
    request = types.ForwardBackwardRequest(forward_backward_input=given, model_id="s:train:0", seq_id=7)
    return forward_backward_request_to_proto(request).SerializeToString()


def datum(tokens: list[int], **inputs: object) -> types.Datum:
    return types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)  # type: ignore[arg-type]


def read(body: bytes) -> PassRequest:
    found = tinker.read_pass(body)
    assert isinstance(found, PassRequest), found
    return found


def complaint(body: bytes) -> str:
    found = tinker.read_pass(body)
    assert isinstance(found, ops.MalformedOperation)
    assert (found.model_id, found.seq_id) == ("s:train:0", 7)
    return found.message


def array(dense: ops.Tensor) -> Any:
    assert isinstance(dense, Dense)
    kind = {DType.F32: "<f4", DType.I64: "<i8"}[dense.dtype]
    return np.frombuffer(dense.data, kind).reshape(dense.shape).tolist()


def test_a_batch_of_the_sdk_is_read_as_it_was_meant() -> None:
    body = batch(
        datum([1, 2, 3], target_tokens=[2, 3, 4], weights=[0.5, -1.25, 0.0]),
        datum([70000, 5], target_tokens=[5, 6], weights=[1.0, 2.0]),
        loss="ppo",
        config={"clip_low_threshold": 0.9, "clip_high_threshold": 1.1},
    )
    found = read(body)
    assert (found.model_id, found.seq_id, found.forward_only) == ("s:train:0", 7, False)
    assert found.loss is model_options.LossName.PPO
    assert found.config == {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}
    assert [np.frombuffer(each.tokens, "<i4").tolist() for each in found.datums] == [[1, 2, 3], [70000, 5]]
    assert array(found.datums[0].inputs["target_tokens"]) == [2, 3, 4]
    assert array(found.datums[0].inputs["weights"]) == [0.5, -1.25, 0.0]
    assert array(found.datums[1].inputs["weights"]) == [1.0, 2.0]
    assert found.operation(ops.InlinePayload(found.encoded())).lengths == [3, 2]
    assert ops.decode_pass_data(found.encoded()).datums == list(found.datums)


def test_forward_only_is_never_overlooked() -> None:
    message = theirs.ForwardBackwardRequest()
    message.ParseFromString(batch(datum([1], target_tokens=[2], weights=[1.0])))
    message.forward_only = True
    assert read(message.SerializeToString()).forward_only


def test_a_sparse_matrix_of_the_sdk_is_read() -> None:
    dense = torch.zeros(4, 50)
    dense[0, 3], dense[2, 49], dense[2, 7] = 1.5, 2.5, -1.0
    sent = datum([1, 2, 3, 4], target_tokens=torch.zeros(4, 50, dtype=torch.int64), weights=dense)
    assert sent.loss_fn_inputs["weights"].sparse_crow_indices is not None
    found = read(batch(sent)).datums[0].inputs["weights"]
    assert isinstance(found, ops.Sparse)
    crow, col = np.frombuffer(found.crow, "<i8"), np.frombuffer(found.col, "<i8")
    again = np.zeros(found.shape, np.float32)
    again[np.repeat(np.arange(4), np.diff(crow)), col] = np.frombuffer(found.data, "<f4")
    assert again.tolist() == dense.tolist()


def test_a_matrix_of_targets_keeps_its_shape() -> None:
    targets = np.arange(6, dtype=np.int64).reshape(3, 2)
    found = read(batch(datum([1, 2, 3], target_tokens=targets))).datums[0].inputs["target_tokens"]
    assert found.shape == (3, 2)
    assert array(found) == targets.tolist()


def test_text_in_several_chunks_is_one_text() -> None:
    given = types.ModelInput(chunks=[types.EncodedTextChunk(tokens=[1, 2]), types.EncodedTextChunk(tokens=[3])])
    sent = types.Datum(model_input=given)
    assert np.frombuffer(read(batch(sent)).datums[0].tokens, "<i4").tolist() == [1, 2, 3]


def test_tokens_that_were_sampled_are_counted_by_their_provenance() -> None:
    prompt = types.PromptProvenanceSpan(sequence_id="s", length=1)
    sampled = types.SampledProvenanceSpan(sequence_id="s", offset=1, length=2)
    told = datum([1, 2, 3], target_tokens=[2, 3, 4]).with_provenance([prompt, sampled], [prompt, sampled])
    assert read(batch(told, datum([4, 5]), told)).sampled_tokens == 4
    for spans, words in (((prompt,), "cover 1 tokens of a datum of 3"), ((prompt, sampled, sampled), "cover 5 tokens")):
        message = theirs.ForwardBackwardRequest.FromString(batch(told))
        del message.data[0].model_input_spans[:]
        for span in spans:
            part = message.data[0].model_input_spans.add()
            kind = part.sampled_tokens if span is sampled else part.prompt_tokens
            kind.sequence_id, kind.length = span.sequence_id, span.length
        refused = tinker.read_pass(message.SerializeToString())
        assert isinstance(refused, ops.MalformedOperation)
        assert words in refused.message


NEW_FIELD: Final = b"\x78\x01"
"""Field 15 with the number 1, which no message of the protocol has."""


def full_message() -> theirs.ForwardBackwardRequest:
    """With every kind of message inside that the server reads."""
    prompt = types.PromptProvenanceSpan(sequence_id="s", length=1)
    sampled = types.SampledProvenanceSpan(sequence_id="s", offset=1, length=2)
    matrix = torch.zeros(3, 50)
    matrix[0, 3] = 1.5
    sent = datum([1, 2, 3], target_tokens=[2, 3, 4], weights=matrix).with_provenance(
        [prompt, sampled], [prompt, sampled]
    )
    message = theirs.ForwardBackwardRequest.FromString(batch(datum([1], target_tokens=[2]), sent, loss="ppo"))
    message.loss_fn_config_v2["clip_low_threshold"].number = 0.9
    return message


PARTS: Final[Mapping[str, tuple[str, Callable[[Any], Any]]]] = {
    "15": ("ForwardBackwardRequest", lambda message: message),
    "loss_fn_config_v2.clip_low_threshold.15": (
        "LossConfigValue",
        lambda message: message.loss_fn_config_v2["clip_low_threshold"],
    ),
    "data[1].15": ("Datum", lambda message: message.data[1]),
    "data[1].model_input[0].15": ("Chunk", lambda message: message.data[1].model_input[0]),
    "data[1].model_input[0].encoded_text.15": (
        "EncodedTextChunk",
        lambda message: message.data[1].model_input[0].encoded_text,
    ),
    "data[1].loss_fn_inputs.target_tokens.15": (
        "Tensor",
        lambda message: message.data[1].loss_fn_inputs["target_tokens"],
    ),
    "data[1].loss_fn_inputs.weights.sparse_csr.15": (
        "SparseCsr",
        lambda message: message.data[1].loss_fn_inputs["weights"].sparse_csr,
    ),
    "data[1].model_input_spans[0].15": ("ProvenanceSpan", lambda message: message.data[1].model_input_spans[0]),
    "data[1].model_input_spans[1].sampled_tokens.15": (
        "TokenSpan",
        lambda message: message.data[1].model_input_spans[1].sampled_tokens,
    ),
    "data[1].loss_fn_input_spans[0].prompt_tokens.15": (
        "TokenSpan",
        lambda message: message.data[1].loss_fn_input_spans[0].prompt_tokens,
    ),
}
"""Where a newer client may put a field, with the name of the message there."""


@pytest.mark.parametrize("path", PARTS)
def test_a_field_that_is_not_known_is_refused_with_its_message_and_the_newest_tested_sdk(path: str) -> None:
    message = full_message()
    assert read(message.SerializeToString()).sampled_tokens == 2
    name, part = PARTS[path]
    part(message).MergeFromString(NEW_FIELD)
    assert complaint(message.SerializeToString()) == (
        f"{path}: this server does not know field 15 of the message {name}; the newest tinker SDK that it was tested "
        f"with is {sdk_table().sdk}"
    )


def test_a_new_kind_of_chunk_is_refused_by_its_number() -> None:
    message = full_message()
    message.data[0].model_input.add().MergeFromString(b"\x7a\x00")
    assert "model_input[1].15: this server does not know field 15 of the message Chunk" in complaint(
        message.SerializeToString()
    )


def test_a_body_of_unknown_fields_alone_is_refused() -> None:
    """A megabyte of them is kept by the parser: the server must neither fail nor wait for long."""
    body = batch(datum([1], target_tokens=[2])) + NEW_FIELD * (tinker.FREE_BYTES // len(NEW_FIELD) - 100)
    assert complaint(body).startswith("15: this server does not know field 15")


def test_a_compressed_body_is_unpacked_up_to_the_limit() -> None:
    body = batch(datum([1] * 1000, target_tokens=[1] * 1000, weights=[1.0] * 1000))
    packed = zstd.compress(body)
    assert decompress_frames(packed, len(body)) == body
    for broken, limit in ((packed, len(body) - 1), (packed[:-9], 1 << 20), (b"x" * 20, 1 << 20), (packed[:4], 99)):
        with pytest.raises(StrataError) as refused:
            decompress_frames(broken, limit)
        assert refused.value.code is Code.INVALID


def test_our_messages_have_the_numbers_of_the_sdk() -> None:
    renamed = {"TokenSpan": "PromptProvenanceSpan"}
    for name, mine in ours.DESCRIPTOR.message_types_by_name.items():
        other = theirs.DESCRIPTOR.message_types_by_name[renamed.get(name, name)]
        for field in mine.fields:
            twin = other.fields_by_number[field.number]
            assert (field.name, field.type, field.is_repeated) == (twin.name, twin.type, twin.is_repeated), name
    values = {each.name: each.number for each in ours.DESCRIPTOR.enum_types_by_name["Dtype"].values}
    assert values == {each.name: each.number for each in theirs.DESCRIPTOR.enum_types_by_name["DType"].values}


def result(*arrays: np.ndarray, **metrics: float) -> ops.PassResult:
    kinds = {"f": DType.F32, "i": DType.I64}
    outputs = [
        ops.DatumOutput({"logprobs": Dense(kinds[each.dtype.kind], each.shape, each.tobytes())}) for each in arrays
    ]
    return ops.PassResult(outputs, {f"{name}:sum": value for name, value in metrics.items()})


def test_the_sdk_reads_our_results() -> None:
    arrays = [np.array([-0.5, -1.5], np.float32), np.array([-2.0], np.float32), np.zeros(0, np.float32)]
    found = deserialize_forward_backward_output(tinker.write_output(result(*arrays, loss=4.25)))
    assert found.metrics == {"loss:sum": 4.25}
    assert [each["logprobs"].tolist() for each in found.loss_fn_outputs] == [[-0.5, -1.5], [-2.0], []]
    assert [each["logprobs"].shape for each in found.loss_fn_outputs] == [[2], [1], [0]]


def test_outputs_of_different_forms_stay_in_their_order() -> None:
    arrays = [np.ones((2, 3), np.float32), np.ones((1, 3), np.float32), np.full((2, 5), 2, np.float32)]
    found = deserialize_forward_backward_output(tinker.write_output(result(*arrays, arrays[0] * 7)))
    assert [each["logprobs"].shape for each in found.loss_fn_outputs] == [[2, 3], [1, 3], [2, 5], [2, 3]]
    assert found.loss_fn_outputs[3]["logprobs"].tolist() == (arrays[0] * 7).tolist()


def test_a_result_that_is_not_a_number_stays_so() -> None:
    found = deserialize_forward_backward_output(
        tinker.write_output(result(np.array([np.nan, -np.inf], np.float32), loss=float("nan")))
    )
    values = found.loss_fn_outputs[0]["logprobs"].to_numpy()
    assert np.isnan(values[0])
    assert values[1] == -np.inf
    assert np.isnan(found.metrics["loss:sum"])


def test_an_empty_result_is_one() -> None:
    assert deserialize_forward_backward_output(tinker.write_output(ops.PassResult([], {}))).loss_fn_outputs == []


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (batch(), "data: there is nothing"),
        (batch(datum([])), "data[0].model_input: has no tokens"),
        (batch(datum([1, -5])), "data[0].model_input: token 1 is -5"),
        (batch(datum([1]), datum([1], weights=[1.0, 2.0])), "data[1].loss_fn_inputs.weights: has the shape [2]"),
        (batch(datum([1], weights=[float("nan")])), "data[0].loss_fn_inputs.weights: number 0 is nan"),
        (batch(datum([1, 1], logprobs=[0.0, float("-inf")])), "data[0].loss_fn_inputs.logprobs: number 1 is -inf"),
        (
            batch(datum([1]), loss="cross_entropie"),
            "loss_fn: this server has no loss 'cross_entropie' (did you mean \"",
        ),
        (batch(datum([1]), config={"a": "b"}), "loss_fn_config.a: takes a number"),
        (batch(datum([1]), config={"a": float("inf")}), "loss_fn_config.a: inf is not a number"),
    ],
)
def test_a_refusal_says_where(body: bytes, words: str) -> None:
    assert complaint(body).startswith(words), complaint(body)


def test_pictures_are_refused_with_their_place() -> None:
    picture = types.ImageChunk(data=b"x", format="png", expected_tokens=3)
    sent = types.Datum(model_input=types.ModelInput(chunks=[types.EncodedTextChunk(tokens=[1]), picture]))
    assert complaint(batch(datum([1]), sent)).startswith("data[1].model_input[1]: this server trains on tokens")


def tensor(**fields: object) -> bytes:
    message = theirs.ForwardBackwardRequest()
    message.ParseFromString(batch(datum([1, 2])))
    message.data[0].loss_fn_inputs["weights"].CopyFrom(theirs.Tensor(**fields))  # type: ignore[arg-type]
    return message.SerializeToString()


def csr(crow: list[int], col: list[int], shape: list[int], values: int | None = None) -> bytes:
    count = len(col) if values is None else values
    found = theirs.SparseCsr(
        values=np.ones(count, "<f4").tobytes(),
        crow_indices=np.array(crow, "<i8").tobytes(),
        col_indices=np.array(col, "<i8").tobytes(),
    )
    return tensor(sparse_csr=found, dtype=1, shape=shape)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (tensor(dense=b"1234567", dtype=1), "7 bytes are no whole number of f32"),
        (tensor(dense=b"12345678", dtype=9), "9 is not a type of numbers"),
        (tensor(dense=b"12345678", dtype=1, shape=[3]), "has 2 numbers where the shape [3] has 3"),
        (tensor(dense=b"", dtype=1, shape=[-1, 0]), "[-1, 0] is not a shape"),
        (tensor(dense=b"", dtype=1, shape=[1 << 60, 1 << 60, 0]), "has the shape"),
        (tensor(dense=b"1234", dtype=1, shape=[1] * 9), "has 9 dimensions"),
        (tensor(dtype=1, shape=[2]), "has no numbers"),
        (tensor(dense=b"\x80\x7f\x00\x00", dtype=4), "number 0 is inf"),
        (csr([0, 1, 2], [0, 9], [2, 5]), "names a column beyond"),
        (csr([0, 1, 2], [0, -1], [2, 5]), "names a column beyond"),
        (csr([0, 2, 1], [0, 1], [2, 5]), "does not go up"),
        (csr([0, 1, 3], [0, 1], [2, 5]), "does not go up"),
        (csr([0, 1], [0], [2, 5]), "has 2 entries for 2 rows"),
        (csr([0, 1, 2], [0, 1], [2, 5], values=1), "does not go up"),
        (csr([0, 1, 1], [0, 1], [2, 5], values=1), "has 2 entries for 1 values"),
        (csr([0, 2, 2], [3, 3], [2, 5]), "twice or out of order"),
        (csr([0, 1, 2], [0, 1], [2, 1 << 40]), "is more than any loss reads"),
        (csr([0, 1, 2], [0, 1], [2]), "a sparse array is a matrix"),
    ],
)
def test_a_broken_array_is_refused_with_its_path(body: bytes, words: str) -> None:
    found = complaint(body)
    assert found.startswith("data[0].loss_fn_inputs.weights")
    assert words in found


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"\xff\xff\xff", "not a ForwardBackwardRequest"),
        (b"", "model_id"),
        (theirs.ForwardBackwardRequest(model_id="m").SerializeToString(), "seq_id"),
        (theirs.ForwardBackwardRequest(model_id="m", seq_id=-4).SerializeToString(), "seq_id"),
        (theirs.ForwardBackwardRequest(model_id="m" * 300, seq_id=1).SerializeToString(), "model_id"),
    ],
)
def test_a_body_without_a_place_is_refused_at_once(body: bytes, words: str) -> None:
    with pytest.raises(StrataError, match=words) as refused:
        tinker.read_pass(body)
    assert refused.value.code is Code.INVALID


def test_the_order_in_which_a_process_reads_the_inputs_of_a_datum_is_no_difference() -> None:
    """The order of a protobuf map is another one in every process, and a request may be sent again to the next one."""
    (found,) = read(batch(datum([1, 2], target_tokens=[2, 3], weights=[1.0, 1.0]))).datums
    turned = ops.Datum(found.tokens, dict(reversed([*found.inputs.items()])))
    assert [*turned.inputs] != [*found.inputs]
    assert ops.encode_pass_data(ops.PassData([found])) == ops.encode_pass_data(ops.PassData([turned]))
