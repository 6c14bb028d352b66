"""Limits the elements of a protobuf message before it is parsed: two bytes may become a hundred in memory."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Final

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from strata.train.wire.arrays import invalid_field

MAX_ELEMENTS: Final = 1 << 20
"""Fields of all messages inside, and entries of packed lists. A datum with four arrays has about thirty."""
FREE_BYTES: Final = 1 << 20
"""A body up to this size is not counted: all it may become is small."""

_BYTES, _VARINT, _FIXED64, _FIXED32 = 2, 0, 1, 5
_OPAQUE, _PACKED = 0, 1
Inside = Mapping[int, Descriptor | int]
_TEXTS: Final = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)


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
    """By the number of a field, the message it holds; for what holds none, how many elements each of its bytes is."""
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
