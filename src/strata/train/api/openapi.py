"""The OpenAPI document: FastAPI's, with bodies and replies from the same messages that are served."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from fastapi import FastAPI

from strata.identity.roles import Role
from strata.train.api.declare import KIB, Answer, Endpoint, Raw, options
from strata.train.api.site import Call
from strata.train.wire import native, replies, tinker
from strata.train.wire.replies import ErrorReply

_REF: Final = "#/components/schemas/{name}"
_PARAMETER: Final = re.compile(r"\{(\w+)(?::\w+)?\}")


class Described:
    """The JSON Schema of every message, each once, and the operations that use them."""

    def __init__(self, table: Sequence[Endpoint]) -> None:
        messages: list[Any] = [ErrorReply, replies.Future]
        for endpoint in table:
            shape = endpoint.signature()
            reply = None if shape.operates else shape.reply
            messages += [each for part in (shape.body, shape.query, reply) for each in structs(part)]
        self._messages = list(dict.fromkeys(messages))
        found, components = msgspec.json.schema_components(self._messages, ref_template=_REF)
        self._schemas = [_ecma(each) for each in found]
        self.components: dict[str, Any] = _ecma(components)

    def operation(self, endpoint: Endpoint) -> dict[str, Any]:
        shape = endpoint.signature()
        role = "anybody" if endpoint.role is None else endpoint.role.name.lower()
        described: dict[str, Any] = {
            "description": f"For: {role}.",
            "tags": [endpoint.name.partition(".")[0]],
            "security": [] if endpoint.role is None else [{"key": []}, {"bearer": []}],
            "responses": self._responses(shape.reply, operates=shape.operates),
        }
        named = _PARAMETER.findall(endpoint.path)
        parameters = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in named]
        if shape.query is not None:
            parameters += self._parameters(shape.query)
        described["parameters"] = parameters
        if shape.body is Raw:
            binary = {"schema": {"type": "string", "format": "binary"}}
            content: dict[str, Any] = {tinker.MEDIA_TYPE: binary, native.MEDIA_TYPE: binary, "application/json": {}}
            described["requestBody"] = {"required": True, "content": content}
        elif shape.body is not None:
            content = {"application/json": {"schema": self._of(shape.body)}}
            described["requestBody"] = {"required": True, "content": content}
        return described

    def _responses(self, reply: Any, *, operates: bool) -> dict[str, Any]:
        error = {"description": "Refused.", "content": {"application/json": {"schema": self._of(ErrorReply)}}}
        if reply is None:
            return {"204": {"description": "Done."}, "default": error}
        content: dict[str, Any] = {"*/*": {}}
        found = [replies.Future] if operates else structs(reply)
        if found:
            content = {"application/json": {"schema": self._of(found[0])}}
        return {"200": {"description": "Done.", "content": content}, "default": error}

    def _parameters(self, query: Any) -> list[dict[str, Any]]:
        component = self.components[self._of(query)["$ref"].rpartition("/")[2]]
        required = component.get("required", [])
        return [
            {"name": name, "in": "query", "required": name in required, "schema": schema}
            for name, schema in component["properties"].items()
        ]

    def _of(self, message: Any) -> Any:
        return self._schemas[self._messages.index(message)]


def structs(part: Any) -> list[type]:
    if part is None:
        return []
    return [each for each in options(part) if issubclass(each, msgspec.Struct)]


def complete(app: FastAPI, described: Described) -> None:
    """Give the application's document the messages that its routes refer to."""
    document = app.openapi()
    components = document.setdefault("components", {})
    components.setdefault("schemas", {}).update(described.components)
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

    return Endpoint("GET", "/openapi.json", Role.VIEWER, document, KIB)


def _ecma(schema: Any) -> Any:
    """Patterns are written for Python here and for ECMAScript there: the anchors differ."""
    if isinstance(schema, dict):
        return {
            name: value.replace(r"\A", "^").replace(r"\Z", "$") if name == "pattern" else _ecma(value)
            for name, value in schema.items()
        }
    return [_ecma(each) for each in schema] if isinstance(schema, list | tuple) else schema
