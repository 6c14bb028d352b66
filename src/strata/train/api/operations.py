"""Routes whose handler returns an operation of the core: it is made durable, and the client gets its future.

If the content of such a request cannot be read, it becomes an operation that fails in its turn: clients count on after
a refusal, and every operation after it would wait for ever.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from strata.base.errors import Code, StrataError
from strata.base.failpoint import failpoint
from strata.http.body import decode_json, path_first
from strata.http.reading import offload
from strata.http.route import KIB, Access, Handler, RawBody, Route, Signature, signature_of
from strata.train.api.context import ApiCall
from strata.train.core import ops
from strata.train.wire.pass_request import OperationKey
from strata.train.wire.replies import FutureReply


class _Head(msgspec.Struct):
    model_id: str
    seq_id: int


_heads: Final = msgspec.json.Decoder(_Head)


def operation_route(path: str, access: Access, handler: Handler, limit: int = 64 * KIB) -> Route:
    declared = signature_of(handler)
    decoder = None if declared.body is RawBody else msgspec.json.Decoder(declared.body)

    def decode(body: RawBody) -> Any:
        return body if decoder is None else decode_json(decoder, body.content or b"{}", path_first)

    async def submit(call: ApiCall, body: RawBody) -> FutureReply:
        operation: ops.Operation | None = None
        try:
            content = await offload(body.content, lambda: decode(body))
            operation = await handler(call, body=content)
            assert operation is not None
            accepted = await call.submit(operation, _session_of(operation))
        except StrataError as error:
            key = _key_of(operation, body.content) if error.code in (Code.INVALID, Code.UNSUPPORTED) else None
            if key is None:
                raise
            accepted = await call.submit(key.malformed(error))
        failpoint("train.api.before_reply")
        return FutureReply(request_id=accepted.future_id, model_id=accepted.model_id)

    submit.__doc__, submit.__module__, submit.__name__ = handler.__doc__, handler.__module__, handler.__name__
    documented = Signature(declared.body, declared.query, FutureReply)
    return Route("POST", path, access, submit, limit, documented=documented)


def _key_of(operation: ops.Operation | None, raw: bytes) -> OperationKey | None:
    """Where an operation that cannot be done stands in the order of its model; None if it has no place there."""
    if isinstance(operation, ops.Sequenced):
        return OperationKey(operation.model_id, operation.seq_id)
    try:
        head = decode_json(_heads, raw or b"{}")
        return OperationKey.of(head.model_id, head.seq_id)
    except StrataError:
        return None


def _session_of(operation: ops.Operation) -> str:
    return operation.model_id.rpartition(":train:")[0] if isinstance(operation, ops.CreateModel) else ""
