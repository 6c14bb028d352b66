"""A hook of mkdocs (`hooks` in mkdocs.yml): makes the references of Python and of both HTTP interfaces while it builds.

They are what docstrings and the OpenAPI documents say, so no copy of them is kept. The pages stand in the navigation
under the names of `PAGES`.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from enum import Enum
from typing import Any, Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from strata.coord.worker import AsyncWorker, Worker
from strata.http.openapi import build_document
from strata.hub.routes import DOCUMENT as HUB
from strata.hub.routes import ROUTES as HUB_ROUTES
from strata.train.api.routes import DOCUMENT as TRAINING
from strata.train.api.routes import ROUTES as TRAINING_ROUTES

MODULES: Final = ("strata.fleet.trainer", "strata.coord.worker", "strata.sdk.train")
"""The interfaces of programs that use Strata; what their `__all__` names is public."""
_REF: Final = "#/components/schemas/"


def on_files(files: Files, config: MkDocsConfig, **_: object) -> Files:
    for name, make in PAGES.items():
        files.append(File.generated(config, name, content=make()))
    return files


# Python


def python_page() -> str:
    parts = ["# Python", "The modules that programs import, from their docstrings. Everything else may change."]
    for name in MODULES:
        module = importlib.import_module(name)
        parts += [f"## {name}", *_paragraphs(inspect.getdoc(module) or "")]
        parts += [part for public in module.__all__ for part in _public(public, getattr(module, public))]
    return "\n\n".join(parts) + "\n"


def _public(name: str, found: Any) -> Iterator[str]:
    if found is AsyncWorker:
        # `Worker` has the same methods, without `await`.
        yield f"### {name}"
        yield "The worker for `async with`: what [`Worker`](#worker) has, with `await`."
        return
    yield f"### {name}"
    if not inspect.isclass(found) or is_dataclass(found):
        yield f"```python\n{name}{_signature(found)}\n```"
    text = inspect.getdoc(found) or ""
    # That is what a dataclass without a docstring has.
    yield from _paragraphs("" if text.startswith(f"{name}(") else text)
    if inspect.isclass(found) and issubclass(found, Enum):
        yield ", ".join(f"`{member}`" for member in found.__members__)
    elif inspect.isclass(found):
        # Methods of `Worker` stand in `AsyncWorker`, with their docstrings.
        yield from _members(AsyncWorker if found is Worker else found)


def _members(found: type) -> Iterator[str]:
    for name, member in vars(found).items():
        text = inspect.getdoc(member)
        if name.startswith("_") or not text:
            continue
        if isinstance(member, property):
            yield f"**`{name}`**: {_joined(text)}"
        elif callable(member):
            yield f"**`{name}{_signature(member)}`**: {_joined(text)}"


class _Source(str):
    """An annotation as the source has it: signatures show what it represents."""

    __slots__ = ()
    __repr__ = str.__str__


def _signature(function: Callable[..., Any]) -> str:
    found = inspect.signature(function)
    kept = [
        each.replace(annotation=_Source(each.annotation)) if isinstance(each.annotation, str) else each
        for name, each in found.parameters.items()
        if name != "self"
    ]
    result = found.return_annotation
    return str(found.replace(parameters=kept, return_annotation=_Source(result) if isinstance(result, str) else result))


def _paragraphs(text: str) -> Iterator[str]:
    """Indented parts are code, also over an empty line."""
    for indented, parts in itertools.groupby(text.split("\n\n"), lambda part: part.startswith("    ")):
        if indented:
            yield f"```python\n{inspect.cleandoc(chr(10) + (chr(10) * 2).join(parts))}\n```"
        else:
            yield from map(_joined, parts)


def _joined(text: str) -> str:
    return " ".join(text.split())


# HTTP


def hub_page() -> str:
    intro = "Every route of a hub with its query, body and reply, from `GET /v1/openapi.json`."
    return _http_page("HTTP of the hub", intro, build_document(HUB_ROUTES, HUB))


def training_page() -> str:
    intro = "Every route of a training server with its query, body and reply, from `GET /openapi.json`."
    return _http_page("HTTP of the training server", intro, build_document(TRAINING_ROUTES, TRAINING))


def _http_page(title: str, intro: str, document: Mapping[str, Any]) -> str:
    parts = [f"# {title}", f"{intro} [Who may call what](routes.md) is a list of its own."]
    found = [
        (operation["tags"][0], path, method, operation)
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    ]
    for tag, routes in itertools.groupby(sorted(found, key=lambda each: each[:3]), lambda each: each[0]):
        parts.append(f"## {tag.capitalize().replace('_', ' ')}")
        for _, path, method, operation in routes:
            parts += [f"### `{method.upper()} {path}`", operation["summary"], operation["description"]]
            query = [each for each in operation["parameters"] if each["in"] == "query"]
            rows = [(each["name"], each["schema"], each["required"]) for each in query]
            parts += [_fields("query", rows)] if rows else []
            parts += [f"Body: {_content(operation['requestBody'])}"] if "requestBody" in operation else []
            parts.append(f"Reply: {_content(operation['responses'].get('200', {}))}")
    parts.append("## Messages")
    for name, schema in sorted(document["components"]["schemas"].items()):
        parts += [f"### {name}", _joined(schema.get("description", ""))]
        properties, required = schema.get("properties", {}), schema.get("required", ())
        rows = [(field, kind, field in required) for field, kind in properties.items()]
        parts.append(_fields("field", rows) if rows else _kind(schema))
    return "\n\n".join(filter(None, parts)) + "\n"


def _fields(head: str, rows: Iterable[tuple[str, Mapping[str, Any], bool]]) -> str:
    lines = [f"| {head} | type | |", "| --- | --- | --- |"]
    for name, schema, required in rows:
        kind = _kind(schema).replace("|", "\\|")
        default = "required" if required else f"`{schema.get('default', '')!r}`" if schema.get("default") else ""
        lines.append(f"| `{name}` | {kind} | {default} |")
    return "\n".join(lines)


def _content(found: Mapping[str, Any]) -> str:
    content: Mapping[str, Any] = found.get("content", {})
    kinds = (
        _kind(each.get("schema", {})) if media == "application/json" else f"`{media}`"
        for media, each in content.items()
    )
    return ", or ".join(dict.fromkeys(kinds)) or "nothing"


def _kind(schema: Mapping[str, Any]) -> str:  # noqa: PLR0911 - one for each kind
    """A schema in words, with links to messages."""
    match schema:
        case {"prefixItems": parts}:
            return f"list of {', '.join(map(_kind, parts))}"
        case {"$ref": reference}:
            name = reference.removeprefix(_REF)
            return f"[{name}](#{name.lower()})"
        case {"anyOf": kinds} | {"oneOf": kinds}:
            return " or ".join(map(_kind, kinds))
        case {"enum": values}:
            return ", ".join(f"`{value}`" if value else "empty" for value in values)
        case {"type": "array", "items": items}:
            return f"list of {_kind(items)}"
        case {"type": "object", "additionalProperties": {} as values}:
            return f"map to {_kind(values)}"
    limits = [f"{words} {schema[key]}" for key, words in _LIMITS.items() if key in schema]
    return f"{schema.get('type', 'anything')}" + (f" ({', '.join(limits)})" if limits else "")


_LIMITS: Final = {
    "minimum": "from",
    "maximum": "to",
    "exclusiveMinimum": "above",
    "maxLength": "at most",
    "maxItems": "at most",
    "pattern": "like",
}
PAGES: Final[Mapping[str, Callable[[], str]]] = {
    "reference/python.md": python_page,
    "reference/http-hub.md": hub_page,
    "reference/http-training.md": training_page,
}
