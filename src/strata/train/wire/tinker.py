"""Passes and results as protobuf for `tinker` clients since 0.25: which fields are read, and at most 1,048,576
elements.

The elements of a message are limited before it is parsed: two bytes may become a hundred in memory. A field that this
server does not know is refused, as `sdk_fields` refuses one of JSON: the parser keeps it, but nothing reads it. The set
of unknown fields is looked at where a message is read anyway, and paths are composed for an error alone.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Final

import numpy as np
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from strata.base.errors import Code, StrataError
from strata.train.core import ops
from strata.train.core.ops import MAX_DATUMS, MAX_DIMENSIONS, MAX_NAME, DType
from strata.train.images import ImageForm
from strata.train.wire.fields import invalid_field
from strata.train.wire.images import NO_IMAGES, ImageChunk, ImageChunks
from strata.train.wire.pass_request import OperationKey, PassRequest, validate_pass
from strata.train.wire.pb import tinker_pb2 as pb
from strata.train.wire.sdk_fields import unknown_field

MEDIA_TYPE: Final = "application/x-protobuf"
OUTPUT_TYPE: Final = "ArrayRecord"
_DTYPE_OF: Final[Mapping[int, DType]] = {
    pb.DTYPE_FLOAT32: DType.F32,
    pb.DTYPE_INT64: DType.I64,
    pb.DTYPE_INT32: DType.I32,
    pb.DTYPE_BFLOAT16: DType.BF16,
}
_PROTO_OF: Final = {dtype: proto for proto, dtype in _DTYPE_OF.items()}
MAX_ELEMENTS: Final = 1 << 20
"""Fields of all messages inside, and entries of packed lists. A datum with four arrays has about thirty."""
FREE_BYTES: Final = 1 << 20
"""A body up to this size is not counted: all it may become is small."""

_BYTES, _VARINT, _FIXED64, _FIXED32 = 2, 0, 1, 5
_OPAQUE, _PACKED = 0, 1
Inside = Mapping[int, Descriptor | int]
_TEXTS: Final = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)


def read_pass(body: bytes, images: ImageForm | str = NO_IMAGES) -> PassRequest | ops.MalformedOperation:
    """INVALID is raised only where not even the key of the operation can be read. `images` is how the model takes them,
    or why it takes none."""
    check_elements(body, pb.ForwardBackwardRequest.DESCRIPTOR)
    message = pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise StrataError(Code.INVALID, f"the body is not a ForwardBackwardRequest: {error}") from None
    key = OperationKey.of(message.model_id, message.seq_id)
    try:
        if unknown := UnknownFieldSet(message):
            raise _unknown("", message, unknown)
        if len(message.data) > MAX_DATUMS:
            raise invalid_field("data", f"has {len(message.data)} datums; one operation takes at most {MAX_DATUMS}")
        datums: list[ops.Datum] = []
        chunks = ImageChunks(images)
        sampled = 0
        for index, sent in enumerate(message.data):
            path = f"data[{index}]"
            datum = _datum(index, sent, chunks)
            datums.append(datum)
            sampled += _sampled_tokens(path, sent, datum)
        request = validate_pass(key, message.loss_fn, _config(message), datums, forward_only=message.forward_only)
        return dataclasses.replace(request, sampled_tokens=sampled, images=chunks.pending)
    except StrataError as error:
        return key.malformed(error)


def _config(message: pb.ForwardBackwardRequest) -> Mapping[str, float | str]:
    if not message.loss_fn_config_v2:
        return dict(message.loss_fn_config)
    config: dict[str, float | str] = {}
    for name, value in message.loss_fn_config_v2.items():
        if unknown := UnknownFieldSet(value):
            raise _unknown(f"loss_fn_config_v2.{name[:MAX_NAME]}.", value, unknown)
        config[name] = value.text if value.WhichOneof("value") == "text" else value.number
    return config


def _datum(number: int, datum: pb.Datum, chunks: ImageChunks) -> ops.Datum:
    path = f"data[{number}]"
    if unknown := UnknownFieldSet(datum):
        raise _unknown(f"{path}.", datum, unknown)
    pieces: list[bytes] = []
    size = 0
    for index, chunk in enumerate(datum.model_input):
        where = f"{path}.model_input[{index}]"
        if unknown := UnknownFieldSet(chunk):
            raise _unknown(f"{where}.", chunk, unknown)
        match chunk.WhichOneof("chunk"):
            case "encoded_text":
                text = chunk.encoded_text
                if unknown := UnknownFieldSet(text):
                    raise _unknown(f"{where}.encoded_text.", text, unknown)
                pieces.append(text.tokens)
            case "image":
                image = _image(where, chunk.image)
                pieces.append(chunks.place(where, number, size // DType.I32.itemsize, image))
            case kind:
                raise invalid_field(where, f"this server trains on tokens, not on {kind or 'nothing'}")
        size += len(pieces[-1])
    sent = datum.loss_fn_inputs
    # Not by items(), which the parser's maps have in Python alone.
    inputs = {name: _tensor(f"{path}.loss_fn_inputs.{name}", sent[name]) for name in sent}
    return ops.Datum(tokens=pieces[0] if len(pieces) == 1 else b"".join(pieces), inputs=inputs)


def _image(path: str, image: pb.ImageChunk) -> ImageChunk:
    if unknown := UnknownFieldSet(image):
        raise _unknown(f"{path}.image.", image, unknown)
    return ImageChunk(image.data, image.format, image.expected_tokens if image.HasField("expected_tokens") else None)


def _sampled_tokens(path: str, sent: pb.Datum, datum: ops.Datum) -> int:
    """Returns how many tokens of the datum were sampled, by the spans that its client attached; 0 if it attached
    none."""
    if spans := sent.loss_fn_input_spans:
        for index, span in enumerate(spans):
            _span_tokens(path, "loss_fn_input_spans", index, span)
    spans = sent.model_input_spans
    if not spans:
        return 0
    covered = sampled = 0
    for index, span in enumerate(spans):
        kind, tokens = _span_tokens(path, "model_input_spans", index, span)
        if kind is None or tokens.length < 0:
            raise invalid_field(f"{path}.model_input_spans[{index}]", "names no tokens")
        covered += tokens.length
        sampled += tokens.length if kind == "sampled_tokens" else 0
    if covered != datum.length:
        raise invalid_field(f"{path}.model_input_spans", f"cover {covered} tokens of a datum of {datum.length}")
    return sampled


def _span_tokens(path: str, field: str, index: int, span: pb.ProvenanceSpan) -> tuple[str | None, pb.TokenSpan]:
    """Returns the kind of the span, and its tokens."""
    kind = span.WhichOneof("span")
    tokens = span.sampled_tokens if kind == "sampled_tokens" else span.prompt_tokens
    if unknown := UnknownFieldSet(span):
        raise _unknown(f"{path}.{field}[{index}].", span, unknown)
    if unknown := UnknownFieldSet(tokens):
        raise _unknown(f"{path}.{field}[{index}].{kind}.", tokens, unknown)
    return kind, tokens


def _unknown(prefix: str, message: Message, unknown: UnknownFieldSet) -> StrataError:
    """The error for the first of the fields that this kind of message does not have here."""
    number = unknown[0].field_number
    return unknown_field(f"{prefix}{number}", f"field {number} of the message {message.DESCRIPTOR.name}")


def _tensor(path: str, tensor: pb.Tensor) -> ops.Tensor:
    if unknown := UnknownFieldSet(tensor):
        raise _unknown(f"{path}.", tensor, unknown)
    dtype = _DTYPE_OF.get(tensor.dtype)
    if dtype is None:
        raise invalid_field(path, f"{tensor.dtype} is not a type of numbers")
    shape = tuple(tensor.shape)
    if len(shape) > MAX_DIMENSIONS:
        raise invalid_field(path, f"has {len(shape)} dimensions; at most {MAX_DIMENSIONS} are read")
    encoding = tensor.WhichOneof("encoding")
    if encoding == "dense":
        data = tensor.dense
        return ops.Dense(dtype, shape or (len(data) // dtype.itemsize,), data)
    if encoding is None:
        raise invalid_field(path, "has no numbers")
    if len(shape) != 2:
        raise invalid_field(path, f"a sparse array is a matrix; its shape is {list(shape)}")
    csr = tensor.sparse_csr
    if unknown := UnknownFieldSet(csr):
        raise _unknown(f"{path}.sparse_csr.", csr, unknown)
    return ops.Sparse(dtype, (shape[0], shape[1]), csr.values, csr.crow_indices, csr.col_indices)


def write_output(result: ops.PassResult) -> bytes:
    """A ForwardBackwardOutput. Datums of one form in a row are one record: few copies, whatever their number."""
    message = pb.ForwardBackwardOutput(loss_fn_output_type=OUTPUT_TYPE)
    for outputs in _alike(result.outputs):
        record = message.loss_fn_outputs.add(type_tag=OUTPUT_TYPE, num_datums=len(outputs))
        for name, first in outputs[0].fields.items():
            parts = [output.fields[name].data for output in outputs]
            offsets = np.cumsum([0, *map(len, parts)], dtype="<i8")
            batched = record.fields[name]
            batched.data = b"".join(parts)
            batched.offsets = offsets.tobytes()
            batched.dtype = _PROTO_OF[first.dtype]  # type: ignore[assignment]
            batched.trailing_shape.extend(first.shape[1:])
    for name, value in result.metrics.items():
        message.metrics[name] = value
    return message.SerializeToString()


def _alike(outputs: Sequence[ops.DatumOutput]) -> Iterator[Sequence[ops.DatumOutput]]:
    for _, found in groupby(outputs, key=_form):
        yield list(found)


def _form(output: ops.DatumOutput) -> Sequence[tuple[str, DType, tuple[int, ...]]]:
    return [(name, array.dtype, array.shape[1:]) for name, array in sorted(output.fields.items())]


def check_elements(body: bytes, kind: Descriptor) -> None:
    """INVALID if there are too many elements. A malformed message is left to the parser, which reports it."""
    if len(body) <= FREE_BYTES:
        return
    count = at = 0
    end = len(body)
    inside = _inside(kind)
    # Depth first, so that what waits is as long as messages are deep.
    outer: list[tuple[int, Inside]] = []
    while at < end or outer:
        if count >= MAX_ELEMENTS:
            raise invalid_field("data", f"the batch has more than {MAX_ELEMENTS} elements")
        if at >= end:
            end, inside = outer.pop()
            continue
        count += 1
        # Nearly every tag and most sizes are one byte.
        tag = body[at]
        if tag < 0x80:
            at += 1
        else:
            tag, at = _varint(body, at, end)
        wire = tag & 7
        if wire == _BYTES:
            size, at = _varint(body, at, end)
            nested = inside.get(tag >> 3, _OPAQUE)
            if isinstance(nested, int):
                count += nested * size
                at += size
            else:
                outer.append((end, inside))
                end, inside = min(end, at + size), _inside(nested)
        elif wire == _VARINT:
            at = _varint(body, at, end)[1]
        else:
            at += {_FIXED64: 8, _FIXED32: 4}.get(wire, 0)


@functools.cache
def _inside(kind: Descriptor) -> Inside:
    """Returns by the number of a field the message it holds; for what holds none, how many elements each of its bytes
    is."""
    return {field.number: field.message_type or (_OPAQUE if field.type in _TEXTS else _PACKED) for field in kind.fields}


def _varint(body: bytes, at: int, end: int) -> tuple[int, int]:
    value = body[at] if at < end else 0x80
    if value < 0x80:
        return value, at + 1
    value, shift = 0, 0
    while at < end and shift < 70:
        byte = body[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    return 0, end
