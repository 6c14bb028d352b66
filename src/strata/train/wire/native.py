"""Passes in our own form: msgpack of the very values that the core works with. What `strata.sdk` sends.

Results come back as the bytes that the ranks made. Nothing is imported here that a client would not have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Final

import msgspec

from strata.train.core import ops

MEDIA_TYPE: Final = "application/x-strata-msgpack"
Name = Annotated[str, msgspec.Meta(max_length=ops.MAX_NAME)]


class PassBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model_id: Name
    seq_id: int
    loss: Name
    config: Annotated[Mapping[Name, float | Name], msgspec.Meta(max_length=ops.MAX_CONFIG)] = {}
    forward_only: bool = False
    datums: Annotated[Sequence[ops.Datum], msgspec.Meta(max_length=ops.MAX_DATUMS)]


encode: Final = msgspec.msgpack.Encoder().encode
