"""Passes in Strata's own format, msgpack: the media type and the body that `strata.sdk` sends.

`strata.sdk` sends it, and gets the results as the bytes that the ranks made. The SDK imports this module, so nothing is
imported here that a client does not have installed; only `read_pass`, which the server calls, needs numpy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Final

import msgspec

from strata.base.errors import Code, StrataError
from strata.train.core import ops

if TYPE_CHECKING:
    from strata.train.wire.pass_request import PassRequest

MEDIA_TYPE: Final = "application/x-strata-msgpack"
Name = Annotated[str, msgspec.Meta(max_length=ops.MAX_NAME)]


class PassBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model_id: Name
    seq_id: int
    loss: Name
    config: Annotated[Mapping[Name, float | Name], msgspec.Meta(max_length=ops.MAX_CONFIG)] = {}
    forward_only: bool = False
    datums: Annotated[Sequence[ops.Datum], msgspec.Meta(max_length=ops.MAX_DATUMS)]


class _Head(msgspec.Struct):
    model_id: Name
    seq_id: int


_bodies: Final = msgspec.msgpack.Decoder(PassBody)
_heads: Final = msgspec.msgpack.Decoder(_Head)
_BROKEN: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
encode: Final = msgspec.msgpack.Encoder().encode


def read_pass(content: bytes) -> PassRequest | ops.MalformedOperation:
    """INVALID is raised only if not even the key of the operation can be read."""
    from strata.train.wire.pass_request import OperationKey, validate_pass

    try:
        head = _heads.decode(content)
    except _BROKEN as error:
        raise StrataError(Code.INVALID, f"the body is not a pass: {error}") from None
    key = OperationKey.of(head.model_id, head.seq_id)
    try:
        body = _bodies.decode(content)
        if any(datum.images for datum in body.datums):
            return key.malformed(StrataError(Code.INVALID, "images are taken as chunks of the tinker protocol alone"))
        return validate_pass(key, body.loss, body.config, body.datums, forward_only=body.forward_only)
    except _BROKEN as error:
        return key.malformed(StrataError(Code.INVALID, f"the body is not a pass: {error}"))
    except StrataError as error:
        return key.malformed(error)
