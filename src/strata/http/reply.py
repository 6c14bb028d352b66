"""From what an endpoint returns to a response."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from starlette.responses import Response, StreamingResponse

from strata.http.declare import Answer

_encode: Final = msgspec.json.Encoder().encode


def response(reply: Any) -> Response:
    if reply is None:
        return Response(status_code=204)
    if not isinstance(reply, Answer):
        return Response(_encode(reply), media_type="application/json")
    headers = dict(reply.headers)
    if isinstance(reply.content, bytes):
        return Response(reply.content, reply.status, headers, media_type=reply.media_type)
    return StreamingResponse(reply.content, reply.status, headers, media_type=reply.media_type)
