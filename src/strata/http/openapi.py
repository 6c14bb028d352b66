"""Builds the OpenAPI document of a server from its routes and messages."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from strata import __version__
from strata.http.problem import ErrorReply
from strata.http.route import KIB, Access, Content, HttpCall, RawReply, Route, is_message, union_members

BINARY: Final[Mapping[str, Any]] = {"schema": {"type": "string", "format": "binary"}}
_REF: Final = "#/components/schemas/{name}"
_PARAMETER: Final = re.compile(r"\{(\w+)(?::\w+)?\}")


@dataclass(frozen=True, kw_only=True)
class DocumentSpec:
    """What the routes of a server do not say themselves."""

    title: str
    security_schemes: Mapping[str, Any]
    security: Callable[[Access], Sequence[str]]
    """The schemes by which a caller of a route may authenticate; none for a public route."""
    raw_body: Mapping[str, Any]
    """Media types of a body that is no message."""
    raw_reply: Mapping[str, str] = field(default_factory=dict)
    """Media types of replies that are no messages, by the name of the route; any type for the others."""
    operation_id: Callable[[Route], str] = lambda route: route.name


def with_document(
    routes: Sequence[Route], path: str, access: Access, spec: DocumentSpec, *, limit: int = KIB, operation: str = ""
) -> tuple[Route, ...]:
    """The routes, and one more that replies with the document of all of them."""

    @functools.cache
    def encoded() -> bytes:
        return msgspec.json.encode(build_document(complete, spec))

    async def document(call: HttpCall[Any]) -> RawReply:
        """This interface, as OpenAPI 3.1."""
        del call
        return RawReply(encoded())

    complete = (*routes, Route("GET", path, access, document, limit, operation=operation))
    return complete


def build_document(routes: Sequence[Route], spec: DocumentSpec) -> dict[str, Any]:
    schemas = MessageSchemas.of_routes(routes)
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        path = _PARAMETER.sub(r"{\1}", route.path)
        paths.setdefault(path, {})[route.method.lower()] = _operation(route, schemas, spec)
    return {
        "openapi": "3.1.0",
        "info": {"title": spec.title, "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas.components, "securitySchemes": spec.security_schemes},
    }


class MessageSchemas:
    """The JSON Schema of every message, each once."""

    def __init__(self, messages: Iterable[Any]) -> None:
        self._messages = list(dict.fromkeys([ErrorReply, *messages]))
        schemas, components = msgspec.json.schema_components(self._messages, ref_template=_REF)
        self._schemas = _ecma(list(schemas))
        self.components: dict[str, Any] = _ecma(components)

    @classmethod
    def of_routes(cls, routes: Iterable[Route]) -> MessageSchemas:
        signatures = [route.signature() for route in routes]
        parts = [part for signature in signatures for part in (signature.body, signature.query, signature.reply)]
        return cls(message for part in parts for message in messages_of(part))

    def of(self, message: Any) -> Any:
        return self._schemas[self._messages.index(message)]

    def fields(self, message: Any) -> tuple[dict[str, Any], Sequence[str]]:
        name = self.of(message)["$ref"].rpartition("/")[2]
        return self.components[name]["properties"], self.components[name].get("required", [])


def messages_of(part: Any) -> list[Any]:
    """The messages of a declared part: a reply may be one of several things."""
    return [member for member in union_members(part) if is_message(member)]


def _operation(route: Route, schemas: MessageSchemas, spec: DocumentSpec) -> dict[str, Any]:
    signature = route.signature()
    operation: dict[str, Any] = {
        "operationId": spec.operation_id(route),
        "summary": route.summary,
        "description": f"For: {route.access}.",
        "tags": [route.name.partition(".")[0]],
        "security": [{scheme: []} for scheme in spec.security(route.access)],
        "parameters": _parameters(route.path, signature.query, schemas),
        "responses": _responses(signature.reply, spec.raw_reply.get(route.name, "*/*"), schemas),
    }
    if signature.body is not None:
        raw = issubclass(signature.body, Content)
        content = spec.raw_body if raw else {"application/json": {"schema": schemas.of(signature.body)}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _parameters(path: str, query: Any, schemas: MessageSchemas) -> list[dict[str, Any]]:
    names = _PARAMETER.findall(path)
    parameters = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]
    if query is not None:
        properties, required = schemas.fields(query)
        parameters += [
            {"name": name, "in": "query", "required": name in required, "schema": schema}
            for name, schema in properties.items()
        ]
    return parameters


def _responses(reply: Any, raw_reply: str, schemas: MessageSchemas) -> dict[str, Any]:
    error = {"description": "It was refused.", "content": {"application/json": {"schema": schemas.of(ErrorReply)}}}
    if reply is None:
        return {"204": {"description": "Done."}, "default": error}
    content: dict[str, Any] = {}
    for message in messages_of(reply):
        content["application/json"] = {"schema": schemas.of(message)}
    if RawReply in union_members(reply):
        content[raw_reply] = {}
    return {"200": {"description": "Done.", "content": content}, "default": error}


def _ecma(schema: Any) -> Any:
    """Patterns are written for Python here and for ECMAScript there: the anchors differ."""
    if isinstance(schema, dict):
        return {
            name: value.replace(r"\A", "^").replace(r"\Z", "$") if name == "pattern" else _ecma(value)
            for name, value in schema.items()
        }
    return [_ecma(each) for each in schema] if isinstance(schema, list | tuple) else schema
