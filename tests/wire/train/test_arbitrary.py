"""Whatever bytes arrive: an operation, a complaint with a place, or INVALID; never anything else."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.base.errors import Code, StrataError
from strata.http.zstd import decompress_frames
from strata.train.core import ops
from strata.train.wire import native, tinker, tinker_json
from strata.train.wire.pass_request import PassRequest
from strata.train.wire.pb import tinker_pb2 as pb

dtypes = st.integers(-1, 5)
sizes = st.integers(-(2**63), 2**63 - 1) | st.integers(-1, 4)
tensors = st.builds(
    pb.Tensor, dense=st.binary(max_size=40), dtype=dtypes, shape=st.lists(sizes, max_size=3)
) | st.builds(
    pb.Tensor,
    sparse_csr=st.builds(
        pb.SparseCsr,
        values=st.binary(max_size=16),
        crow_indices=st.lists(sizes, max_size=4).map(
            lambda found: b"".join(x.to_bytes(8, "little", signed=True) for x in found)
        ),
        col_indices=st.lists(sizes, max_size=4).map(
            lambda found: b"".join(x.to_bytes(8, "little", signed=True) for x in found)
        ),
    ),
    dtype=dtypes,
    shape=st.lists(sizes, max_size=3),
)
chunks = st.builds(pb.Chunk, encoded_text=st.builds(pb.EncodedTextChunk, tokens=st.binary(max_size=12))) | st.builds(
    pb.Chunk, dmel=st.builds(pb.DmelChunk)
)
names = st.sampled_from(["weights", "target_tokens", "other"])
requests = st.builds(
    pb.ForwardBackwardRequest,
    model_id=st.just("m"),
    seq_id=st.just(1),
    loss_fn=st.sampled_from(["cross_entropy", "?"]),
    loss_fn_config=st.dictionaries(names, st.floats(), max_size=2),
    data=st.lists(
        st.builds(
            pb.Datum,
            model_input=st.lists(chunks, max_size=2),
            loss_fn_inputs=st.dictionaries(names, tensors, max_size=2),
        ),
        max_size=3,
    ),
)


def bodies(integers: st.SearchStrategy[int]) -> st.SearchStrategy[object]:
    """Of nearly the right shape. JSON can carry any integer; MessagePack has 64 bits, and no more can arrive in it."""
    values = st.recursive(
        st.none() | st.booleans() | integers | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
        max_leaves=8,
    )
    numbers = integers | st.floats(allow_nan=False, allow_infinity=False)
    tensors = st.fixed_dictionaries(
        {"data": st.lists(numbers, max_size=4) | values},
        optional={
            "dtype": st.sampled_from(["float32", "int64"]) | values,
            "shape": st.lists(integers, max_size=3) | values,
            "sparse_crow_indices": st.lists(integers, max_size=4) | values,
            "sparse_col_indices": st.lists(integers, max_size=4) | values,
        },
    )
    datums = st.fixed_dictionaries(
        {"model_input": st.fixed_dictionaries({"chunks": st.just([{"tokens": [1, 2]}]) | values}) | values},
        optional={"loss_fn_inputs": st.dictionaries(names, tensors | values, max_size=2) | values},
    )
    passes = st.fixed_dictionaries(
        {"data": st.lists(datums | values, max_size=3) | values, "loss_fn": st.just("cross_entropy")}
    )
    return st.fixed_dictionaries({"model_id": st.just("m"), "seq_id": st.just(1), "forward_backward_input": passes})


def check(found: object) -> None:
    if isinstance(found, PassRequest):
        assert ops.decode_pass_data(found.encoded()).datums == list(found.datums)
        assert all(length > 0 for length in found.operation(ops.InlinePayload(b"")).lengths)
    elif isinstance(found, ops.MalformedOperation):
        assert found.message


def attempt(read: Callable[[bytes], object], body: bytes) -> None:
    found: object = None
    refused = Code.INVALID
    try:
        found = read(body)
    except StrataError as error:
        refused = error.code
    assert refused is Code.INVALID
    check(found)


def read_json(body: bytes) -> object:
    return tinker_json.read_pass(body, forward_only=False)


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_read_or_invalid(body: bytes) -> None:
    for read in (tinker.read_pass, native.read_pass, read_json, lambda content: decompress_frames(content, 100)):
        attempt(read, body)


@given(requests, st.integers(0, 400), st.binary(max_size=3))
@settings(max_examples=300)
def test_messages_with_broken_arrays_are_read_or_complained_about(
    message: pb.ForwardBackwardRequest, at: int, spoiled: bytes
) -> None:
    whole = message.SerializeToString()
    check(tinker.read_pass(whole))
    attempt(tinker.read_pass, whole[:at] + spoiled + whole[at + len(spoiled) :])


@given(bodies(st.integers()))
@settings(max_examples=300)
def test_json_of_nearly_the_right_shape_is_read_or_complained_about(body: object) -> None:
    attempt(read_json, msgspec.json.encode(body))


@given(bodies(st.integers(-(2**63), 2**64 - 1)))
def test_msgpack_of_another_shape_is_read_or_complained_about(body: object) -> None:
    attempt(native.read_pass, msgspec.msgpack.encode(body))
