"""The OpenAPI document, made from the same table and the same messages that are served."""

from __future__ import annotations

import re
import typing
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from strata import __version__
from strata.fleet.http.declare import Download, Endpoint, Need, Upload
from strata.fleet.wire import ErrorReply

_REF: Final = "#/components/schemas/{name}"
_PARAMETER: Final = re.compile(r"\{(\w+)\}")
_STREAMED: Final = {"events.events": "text/event-stream"}


def document(table: Sequence[Endpoint]) -> dict[str, Any]:
    schemas = _Schemas(table)
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in table:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Strata hub", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": schemas.components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "operator": {"type": "apiKey", "in": "header", "name": "X-Operator-Token"},
                "certificate": {"type": "mutualTLS"},
            },
        },
    }


class _Schemas:
    """The JSON Schema of every message, each once."""

    def __init__(self, table: Sequence[Endpoint]) -> None:
        messages: list[Any] = [ErrorReply]
        for endpoint in table:
            shape = endpoint.signature()
            messages += [each for part in (shape.body, shape.query, shape.reply) for each in structs(part)]
        self._messages = list(dict.fromkeys(messages))
        found, components = msgspec.json.schema_components(self._messages, ref_template=_REF)
        self._schemas = _ecma(list(found))
        self.components: dict[str, Any] = _ecma(components)

    def of(self, message: Any) -> Any:
        return self._schemas[self._messages.index(message)]

    def fields(self, message: Any) -> tuple[dict[str, Any], Sequence[str]]:
        name = self.of(message)["$ref"].rpartition("/")[2]
        return self.components[name]["properties"], self.components[name].get("required", [])


def structs(part: Any) -> list[Any]:
    """The messages of a declared part: a reply may be one of several things."""
    options = typing.get_args(part) or (part,)
    return [each for each in options if isinstance(each, type) and issubclass(each, msgspec.Struct)]


def _operation(endpoint: Endpoint, schemas: _Schemas) -> dict[str, Any]:
    shape = endpoint.signature()
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in _PARAMETER.findall(endpoint.path)
    ]
    if shape.query is not None:
        properties, required = schemas.fields(shape.query)
        parameters += [
            {"name": name, "in": "query", "required": name in required, "schema": schema}
            for name, schema in properties.items()
        ]
    operation: dict[str, Any] = {
        "operationId": endpoint.name,
        "summary": endpoint.summary,
        "description": f"For: {endpoint.need}.",
        "tags": [endpoint.name.partition(".")[0]],
        "parameters": parameters,
        "responses": _responses(endpoint, shape.reply, schemas),
        "security": _security(endpoint.need),
    }
    if shape.body is Upload:
        content: dict[str, Any] = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
        operation["requestBody"] = {"required": True, "content": content}
    elif shape.body is not None:
        content = {"application/json": {"schema": schemas.of(shape.body)}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _responses(endpoint: Endpoint, reply: Any, schemas: _Schemas) -> dict[str, Any]:
    error = {"description": "It was refused.", "content": {"application/json": {"schema": schemas.of(ErrorReply)}}}
    if reply is None:
        return {"204": {"description": "Done."}, "default": error}
    content: dict[str, Any] = {}
    for each in structs(reply):
        content["application/json"] = {"schema": schemas.of(each)}
    if Download in (typing.get_args(reply) or (reply,)):
        content[_STREAMED.get(endpoint.name, "*/*")] = {}
    return {"200": {"description": "Done.", "content": content}, "default": error}


def _security(need: Need) -> list[dict[str, list[str]]]:
    if need.public:
        return []
    ways: list[dict[str, list[str]]] = [{"bearer": []}]
    if need.role is not None:
        ways.append({"operator": []})
    if need.host:
        ways.append({"certificate": []})
    return ways


def _ecma(schema: Any) -> Any:
    """Patterns are written for Python here and for ECMAScript there: the anchors differ."""
    if isinstance(schema, dict):
        return {
            name: value.replace(r"\A", "^").replace(r"\Z", "$") if name == "pattern" else _ecma(value)
            for name, value in schema.items()
        }
    return [_ecma(each) for each in schema] if isinstance(schema, list) else schema
