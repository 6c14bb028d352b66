"""Reads what `native` describes, with the checks that every batch gets."""

from __future__ import annotations

from typing import Final

import msgspec

from strata.base.errors import Code, StrataError
from strata.train.core import ops
from strata.train.wire.native import Name, PassBody
from strata.train.wire.request import PassRequest, Place, checked


class _Head(msgspec.Struct):
    model_id: Name
    seq_id: int


_bodies: Final = msgspec.msgpack.Decoder(PassBody)
_heads: Final = msgspec.msgpack.Decoder(_Head)
_BROKEN: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def read_pass(content: bytes) -> PassRequest | ops.MalformedOperation:
    """INVALID is raised only where not even the place of the operation can be read."""
    try:
        head = _heads.decode(content)
    except _BROKEN as error:
        raise StrataError(Code.INVALID, f"the body is not a pass: {error}") from None
    place = Place.of(head.model_id, head.seq_id)
    try:
        body = _bodies.decode(content)
        return checked(place, body.loss, body.config, body.datums, forward_only=body.forward_only)
    except _BROKEN as error:
        return place.unreadable(StrataError(Code.INVALID, f"the body is not a pass: {error}"))
    except StrataError as error:
        return place.unreadable(error)
