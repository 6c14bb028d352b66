"""The OpenAPI document: FastAPI's, with bodies and replies from the same messages that are served."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec
from fastapi import FastAPI

from strata.http.declare import KIB, VIEWER, Answer, Endpoint
from strata.http.openapi import BINARY, Schemas, described, structs
from strata.train.api.declare import operates
from strata.train.api.site import Call
from strata.train.wire import native, replies, tinker

_BATCH: Final = {tinker.MEDIA_TYPE: BINARY, native.MEDIA_TYPE: BINARY, "application/json": {}}


def schemas_of(table: Sequence[Endpoint]) -> Schemas:
    messages: list[Any] = [replies.Future]
    for endpoint in table:
        shape = endpoint.signature()
        messages += [each for part in (shape.body, shape.query, _reply(endpoint)) for each in structs(part)]
    return Schemas(messages)


def operation(endpoint: Endpoint, schemas: Schemas) -> dict[str, Any]:
    security: list[dict[str, list[str]]] = [] if endpoint.need.public else [{"key": []}, {"bearer": []}]
    return {"security": security, **described(endpoint, schemas, reply=_reply(endpoint), content=_BATCH)}


def _reply(endpoint: Endpoint) -> Any:
    """What a client gets: for an operation its future."""
    shape = endpoint.signature()
    return replies.Future if operates(shape) else shape.reply


def complete(app: FastAPI, schemas: Schemas) -> None:
    """Give the application's document the messages that its routes refer to."""
    document = app.openapi()
    components = document.setdefault("components", {})
    components.setdefault("schemas", {}).update(schemas.components)
    components["securitySchemes"] = {
        "key": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
        "bearer": {"type": "http", "scheme": "bearer"},
    }
    app.openapi_schema = document


def endpoint(app: FastAPI) -> Endpoint:
    async def document(call: Call) -> Answer:
        """This document."""
        del call
        return Answer(msgspec.json.encode(app.openapi()))

    return Endpoint("GET", "/openapi.json", VIEWER, document, KIB)
