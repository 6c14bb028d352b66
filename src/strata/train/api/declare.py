"""What endpoints of this server declare beyond what those of every server do.

A function that returns an operation of the core is handed on: the operation is made durable and the client gets its
future. If the content of such a request cannot be read, it becomes an operation that fails in its place, because the
clients count on after a refusal and everything after it would wait for ever.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from starlette.datastructures import Headers

from strata.http.declare import Content, Signature, options
from strata.train import archive
from strata.train.core import ops
from strata.train.wire import native, tinker

BATCH: Final = 0
"""A limit that is the server's setting."""
BINARY: Final = frozenset({tinker.MEDIA_TYPE, native.MEDIA_TYPE, archive.MEDIA_TYPE})
"""What becomes about as much in memory as it is on the way."""
_OPERATIONS: Final = set(options(ops.Operation))


@dataclass(frozen=True, slots=True)
class Raw(Content):
    """A body that is more than a little JSON, and how it says that it is written."""

    content: bytes
    media_type: str


def operates(shape: Signature) -> bool:
    return shape.reply is not None and set(options(shape.reply)) <= _OPERATIONS


def media_type(headers: Headers) -> str:
    return headers.get("content-type", "").partition(";")[0].strip().lower()
