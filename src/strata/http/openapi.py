"""The parts of an OpenAPI document, made from the same declarations and the same messages that are served."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from strata.http.declare import Answer, Content, Endpoint, options
from strata.http.problem import ErrorReply

BINARY: Final[Mapping[str, Any]] = {"schema": {"type": "string", "format": "binary"}}
_REF: Final = "#/components/schemas/{name}"
_PARAMETER: Final = re.compile(r"\{(\w+)(?::\w+)?\}")


class Schemas:
    """The JSON Schema of every message, each once."""

    def __init__(self, messages: Iterable[Any]) -> None:
        self._messages = list(dict.fromkeys([ErrorReply, *messages]))
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
    return [each for each in options(part) if isinstance(each, type) and issubclass(each, msgspec.Struct)]


def described(
    endpoint: Endpoint, schemas: Schemas, *, reply: Any, content: Mapping[str, Any], answer: str = "*/*"
) -> dict[str, Any]:
    """What an operation says of itself, apart from its credentials.

    `reply` is what a client gets in the end, `content` describes a body that is no message, and `answer` is the media
    type of a reply that is none.
    """
    shape = endpoint.signature()
    operation: dict[str, Any] = {
        "description": f"For: {endpoint.need}.",
        "tags": [endpoint.name.partition(".")[0]],
        "parameters": _parameters(endpoint.path, shape.query, schemas),
        "responses": _responses(reply, answer, schemas),
    }
    if shape.body is not None:
        raw = issubclass(shape.body, Content)
        read = content if raw else {"application/json": {"schema": schemas.of(shape.body)}}
        operation["requestBody"] = {"required": True, "content": read}
    return operation


def _parameters(path: str, query: Any, schemas: Schemas) -> list[dict[str, Any]]:
    named = _PARAMETER.findall(path)
    parameters = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in named]
    if query is not None:
        properties, required = schemas.fields(query)
        parameters += [
            {"name": name, "in": "query", "required": name in required, "schema": schema}
            for name, schema in properties.items()
        ]
    return parameters


def _responses(reply: Any, answer: str, schemas: Schemas) -> dict[str, Any]:
    error = {"description": "It was refused.", "content": {"application/json": {"schema": schemas.of(ErrorReply)}}}
    if reply is None:
        return {"204": {"description": "Done."}, "default": error}
    content: dict[str, Any] = {}
    for each in structs(reply):
        content["application/json"] = {"schema": schemas.of(each)}
    if Answer in options(reply):
        content[answer] = {}
    return {"200": {"description": "Done.", "content": content}, "default": error}


def _ecma(schema: Any) -> Any:
    """Patterns are written for Python here and for ECMAScript there: the anchors differ."""
    if isinstance(schema, dict):
        return {
            name: value.replace(r"\A", "^").replace(r"\Z", "$") if name == "pattern" else _ecma(value)
            for name, value in schema.items()
        }
    return [_ecma(each) for each in schema] if isinstance(schema, list | tuple) else schema
