"""From declarations to routes: decode, check who calls, answer. Nothing is served that was not declared."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec
from fastapi import Request
from starlette.responses import Response

from strata.base.errors import Code, StrataError
from strata.base.failpoint import failpoint
from strata.http.body import check_media_type
from strata.http.declare import Endpoint
from strata.http.reply import response
from strata.http.root import CALLER
from strata.train.api.body import decode, in_thread, read_body, read_query
from strata.train.api.declare import BATCH, Raw, media_type, operates
from strata.train.api.site import Call, Site
from strata.train.core import ops
from strata.train.wire.replies import Future
from strata.train.wire.request import Place


class _Head(msgspec.Struct):
    model_id: str
    seq_id: int


_heads: Final = msgspec.json.Decoder(_Head)


def served(site: Site, endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
    """The endpoint as FastAPI calls it."""
    shape = endpoint.signature()
    decoder = None if shape.body in (None, Raw) else msgspec.json.Decoder(shape.body)
    durable = operates(shape)
    limit = endpoint.limit if endpoint.limit != BATCH else site.settings.server.max_body_bytes

    async def answer(request: Request) -> Response:
        caller = request.scope[CALLER]
        endpoint.need.check(caller)
        call = Call(site, caller, request.path_params, request.headers)
        given: dict[str, Any] = {}
        if shape.query is not None:
            given["query"] = read_query(shape.query, request.scope["query_string"])
        if decoder is not None:
            check_media_type(request.headers)
        tenant = "" if endpoint.need.public else await site.tenant(caller)
        with site.bodies.hold(tenant) as hold:
            raw = await read_body(request.receive, request.headers, limit, site.pace, hold)
            if durable:
                return await _operate(endpoint, call, raw, lambda: _body(shape.body, decoder, raw, request))
            if shape.body is not None:
                given["body"] = await in_thread(raw, lambda: _body(shape.body, decoder, raw, request))
            return response(await endpoint.handler(call, **given))

    return answer


def _body(kind: Any, decoder: msgspec.json.Decoder[Any] | None, raw: bytes, request: Request) -> Any:
    if kind is Raw:
        return Raw(raw, media_type(request.headers))
    return None if decoder is None else decode(decoder, raw)


async def _operate(endpoint: Endpoint, call: Call, raw: bytes, body: Callable[[], Any]) -> Response:
    operation: ops.Operation | None = None
    try:
        read = await in_thread(raw, body)
        operation = await endpoint.handler(call, **({} if read is None else {"body": read}))
        accepted = await call.submit(operation, _session_of(operation))
    except StrataError as error:
        place = _place(operation, raw) if error.code in (Code.INVALID, Code.UNSUPPORTED) else None
        if place is None:
            raise
        accepted = await call.submit(place.unreadable(error))
    failpoint("train.api.before_reply")
    return response(Future(request_id=accepted.future_id, model_id=accepted.model_id))


def _place(operation: ops.Operation | None, raw: bytes) -> Place | None:
    """Where an operation that cannot be done stands in the order of its model; None if it has no place there."""
    if isinstance(operation, ops.Sequenced):
        return Place(operation.model_id, operation.seq_id)
    try:
        head = decode(_heads, raw)
        return Place.of(head.model_id, head.seq_id)
    except StrataError:
        return None


def _session_of(operation: ops.Operation) -> str:
    return operation.model_id.rpartition(":train:")[0] if isinstance(operation, ops.CreateModel) else ""
