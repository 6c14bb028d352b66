"""Passes in JSON for `tinker` clients before 0.25, and the results of all other operations in JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final, Literal, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from strata.base.errors import Code, StrataError
from strata.train.core import ops
from strata.train.core.ops import MAX_DATUMS, DType
from strata.train.images import ImageForm
from strata.train.wire.arrays import NUMPY, as_array, to_client_dtype
from strata.train.wire.fields import invalid_field
from strata.train.wire.images import NO_IMAGES, ImageChunk, ImageChunks
from strata.train.wire.pass_request import OperationKey, PassRequest, validate_pass
from strata.train.wire.tinker import OUTPUT_TYPE

T = TypeVar("T")
MAX_NUMBERS: Final = 1 << 22
"""Numbers of a batch in JSON. They are counted by their commas, before one of them is an object."""
_DTYPES: Final = {"float32": DType.F32, "int64": DType.I64}


class _Head(msgspec.Struct):
    model_id: str
    seq_id: int | None = None


class _Input(msgspec.Struct):
    data: list[msgspec.Raw]
    loss_fn: str
    loss_fn_config: Mapping[str, float | str] | None = None


class _Body(msgspec.Struct):
    forward_backward_input: _Input | None = None
    forward_input: _Input | None = None


class _Chunk(msgspec.Struct):
    type: str = "encoded_text"
    tokens: list[int] = []
    data: bytes = b""
    """An image, which msgspec reads from base64."""
    format: str = ""
    expected_tokens: int | None = None


class _ModelInput(msgspec.Struct):
    chunks: list[_Chunk]


class _Datum(msgspec.Struct):
    model_input: _ModelInput
    loss_fn_inputs: dict[str, msgspec.Raw] = {}


class TensorJson(msgspec.Struct, forbid_unknown_fields=True):
    sdk_model: ClassVar[str] = "TensorData"
    data: list[int | float]
    dtype: Literal["float32", "int64"]
    shape: list[int] | None = None
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None


_heads: Final = msgspec.json.Decoder(_Head)
_bodies: Final = msgspec.json.Decoder(_Body)
_datums: Final = msgspec.json.Decoder(_Datum)
_tensors: Final = msgspec.json.Decoder(TensorJson)


def read_pass(
    body: bytes, images: ImageForm | str = NO_IMAGES, *, forward_only: bool
) -> PassRequest | ops.MalformedOperation:
    """INVALID is raised only if not even the key of the operation can be read. `images` is how the model takes them, or
    why it takes none."""
    head = _decode(_heads, body, "")
    key = OperationKey.of(head.model_id, head.seq_id)
    try:
        if (count := body.count(b",")) > MAX_NUMBERS:
            raise invalid_field("data", f"has {count} values; a batch in JSON takes at most {MAX_NUMBERS}")
        decoded = _decode(_bodies, body, "")
        batch = decoded.forward_input if forward_only else decoded.forward_backward_input
        if batch is None:
            raise invalid_field("forward_input" if forward_only else "forward_backward_input", "is missing")
        if len(batch.data) > MAX_DATUMS:
            raise invalid_field("data", f"has {len(batch.data)} datums; one operation takes at most {MAX_DATUMS}")
        chunks = ImageChunks(images)
        datums = [_datum(index, raw, chunks) for index, raw in enumerate(batch.data)]
        request = validate_pass(key, batch.loss_fn, batch.loss_fn_config or {}, datums, forward_only=forward_only)
        return dataclasses.replace(request, images=chunks.pending)
    except StrataError as error:
        return key.malformed(error)


def _datum(number: int, raw: msgspec.Raw, chunks: ImageChunks) -> ops.Datum:
    path = f"data[{number}]"
    datum = _decode(_datums, raw, path)
    pieces: list[bytes] = []
    size = 0
    for index, chunk in enumerate(datum.model_input.chunks):
        where = f"{path}.model_input.chunks[{index}]"
        match chunk.type:
            case "encoded_text":
                pieces.append(_to_bytes(f"{path}.model_input", chunk.tokens, DType.I32))
            case "image":
                image = ImageChunk(chunk.data, chunk.format, chunk.expected_tokens)
                pieces.append(chunks.place(where, number, size // DType.I32.itemsize, image))
            case kind:
                raise invalid_field(where, f"this server trains on tokens, not on {kind[:80]}")
        size += len(pieces[-1])
    inputs = {name: _tensor(f"{path}.loss_fn_inputs.{name}", each) for name, each in datum.loss_fn_inputs.items()}
    return ops.Datum(tokens=b"".join(pieces), inputs=inputs)


def _tensor(path: str, raw: msgspec.Raw) -> ops.Tensor:
    return tensor_of(path, _decode(_tensors, raw, path))


def tensor_of(path: str, tensor: TensorJson) -> ops.Tensor:
    dtype = _DTYPES[tensor.dtype]
    data = _to_bytes(path, tensor.data, dtype)
    if tensor.sparse_crow_indices is None or tensor.sparse_col_indices is None:
        if tensor.sparse_crow_indices is not None or tensor.sparse_col_indices is not None:
            raise invalid_field(path, "sparse_crow_indices and sparse_col_indices go together")
        return ops.Dense(dtype, tuple(tensor.shape) if tensor.shape else (len(tensor.data),), data)
    if tensor.shape is None or len(tensor.shape) != 2:
        raise invalid_field(path, f"a sparse array is a matrix; its shape is {tensor.shape}")
    crow = _to_bytes(f"{path}.sparse_crow_indices", tensor.sparse_crow_indices, DType.I64)
    col = _to_bytes(f"{path}.sparse_col_indices", tensor.sparse_col_indices, DType.I64)
    return ops.Sparse(dtype, (tensor.shape[0], tensor.shape[1]), data, crow, col)


def _to_bytes(path: str, values: Sequence[float], dtype: DType) -> bytes:
    """The numbers as bytes. A fraction, or a number that the type cannot hold, is refused, not rounded."""
    array = np.asarray(values) if values else np.empty(0)
    if dtype is DType.F32:
        with np.errstate(over="ignore"):
            return array.astype(NUMPY[dtype]).tobytes()
    wide = array.astype(np.int64) if array.dtype.kind in "if" and np.abs(array).max(initial=0) < 2**63 else None
    if wide is None or (wide != array).any():
        raise invalid_field(path, f"takes integers of {8 * dtype.itemsize} bits")
    packed = wide.astype(NUMPY[dtype])
    if (packed != wide).any():
        raise invalid_field(path, f"takes integers of {8 * dtype.itemsize} bits")
    return packed.tobytes()


def _decode(decoder: msgspec.json.Decoder[T], raw: bytes | msgspec.Raw, path: str) -> T:
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        reason, _, inside = str(error).partition(" - at `$")
        where = path + inside.rstrip("`")
        raise invalid_field(where.lstrip("."), reason) if where else StrataError(Code.INVALID, reason) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise StrataError(Code.INVALID, f"the body is not JSON: {error}") from None


def write_output(result: ops.PassResult) -> bytes:
    """A ForwardBackwardOutput."""
    outputs, finite = [], all(map(math.isfinite, result.metrics.values()))
    for each in result.outputs:
        arrays = {
            name: to_client_dtype(as_array("", dense.data, dense.dtype), dense.dtype)
            for name, dense in each.fields.items()
        }
        finite = finite and all(bool(np.isfinite(array).all()) for array in arrays.values())
        outputs.append({name: _array(array, each.fields[name].shape) for name, array in arrays.items()})
    value = {"loss_fn_output_type": OUTPUT_TYPE, "loss_fn_outputs": outputs, "metrics": dict(result.metrics)}
    # msgspec encodes numbers that are not finite as null, silently.
    return msgspec.json.encode(value) if finite else write(value)


def _array(values: npt.NDArray[Any], shape: Sequence[int]) -> Mapping[str, Any]:
    dtype = "float32" if values.dtype.kind == "f" else "int64"
    return {"data": values.tolist(), "dtype": dtype, "shape": list(shape)}


def write_result(result: ops.Result) -> bytes:
    """The result of every operation whose result is no pass."""
    if isinstance(result, ops.PassDone | ops.SampleDone):
        raise StrataError(Code.INTERNAL, "the result of a pass is in its payload")
    if isinstance(result, ops.SamplerOpened):
        return write({"type": "save_weights_for_sampler", "sampling_session_id": result.sampler_id})
    if isinstance(result, ops.Failed):
        # The protocol has no category for a cancelled operation; `user` is the nearest.
        return write({"error": result.message, "category": "server" if result.category == "server" else "user"})
    fields = msgspec.to_builtins(result)
    if isinstance(result, ops.WeightsSaved) and "/sampler_weights/" in result.path:
        fields["type"] = "save_weights_for_sampler"
    elif isinstance(result, ops.WeightsSaved) and "/external_weights/" in result.path:
        fields["type"] = "save_weights_external"
    return write(fields)


def write(value: Any) -> bytes:
    """JSON in which NaN and the infinities are spelled out, as the clients' own reader takes them.

    JSON proper cannot encode them. The alternatives are worse: clients refuse `null`, and 0 would be false.
    """
    return json.dumps(value, separators=(",", ":"), allow_nan=True).encode()
