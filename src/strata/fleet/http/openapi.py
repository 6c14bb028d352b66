"""The hub's OpenAPI document, made from the same table and the same messages that are served."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from strata import __version__
from strata.http.declare import Endpoint, Need
from strata.http.openapi import BINARY, Schemas, described, structs

_STREAMED: Final = {"events.events": "text/event-stream"}


def document(table: Sequence[Endpoint]) -> dict[str, Any]:
    shapes = [endpoint.signature() for endpoint in table]
    parts = [part for shape in shapes for part in (shape.body, shape.query, shape.reply)]
    schemas = Schemas(each for part in parts for each in structs(part))
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


def _operation(endpoint: Endpoint, schemas: Schemas) -> dict[str, Any]:
    parts = described(
        endpoint,
        schemas,
        reply=endpoint.signature().reply,
        content={"application/octet-stream": BINARY},
        answer=_STREAMED.get(endpoint.name, "*/*"),
    )
    return {
        "operationId": endpoint.name,
        "summary": endpoint.summary,
        "security": _security(endpoint.need),
        **parts,
    }


def _security(need: Need) -> list[dict[str, list[str]]]:
    if need.public:
        return []
    ways: list[dict[str, list[str]]] = [{"bearer": []}]
    if need.role is not None:
        ways.append({"operator": []})
    if need.host:
        ways.append({"certificate": []})
    return ways
