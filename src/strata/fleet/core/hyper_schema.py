"""Reads a trainer's JSON Schema: which keywords of Draft 2020-12 are supported, how deep and large it may be, and the
wording of what is wrong with it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import islice
from math import isfinite
from typing import Any, Final

import msgspec

from strata.base.errors import Code, StrataError
from strata.base.suggest import did_you_mean

Path = tuple[str | int, ...]

_MAX_SHOWN: Final = 80
_MAX_DEPTH: Final = 64
_LARGEST_FLOAT: Final = 1.7976931348623157e308
_MAX_PARTS: Final = 20_000
"""Schemas inside a schema."""
_MAX_PROBLEMS: Final = 200
"""The most problems that are looked for."""
_DIALECTS: Final = ("https://json-schema.org/draft/2020-12/schema", "https://json-schema.org/draft/2020-12/schema#")
_TYPES: Final = ("string", "boolean", "number", "integer", "array", "object", "null")

_DEFINITION: Final = "#/$defs/"
_ONE: Final = ("items", "additionalProperties")
_MANY: Final = ("allOf", "anyOf", "oneOf", "prefixItems")
_NAMED: Final = ("properties", "$defs")
_NOTES: Final = (
    "$comment", "$id", "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "format",
    "discriminator",
)  # fmt: skip
"""Keywords that only say something. `format` is one by the standard, and `discriminator` repeats what `oneOf` says."""


def shown(value: Any) -> str:
    """A value in a message: on one line, cut if long."""
    if isinstance(value, float) and not isfinite(value):
        return str(value)
    try:
        text = msgspec.json.encode(value).decode()
    except (TypeError, ValueError, RecursionError):
        text = f"a {type(value).__name__}"
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"


def resolve(root: Any, reference: str) -> Any:
    """The schema a local reference points to. Its problems have been found before; what is absent is a defect."""
    found = _found(root, reference)
    if found is None:
        raise StrataError(Code.INTERNAL, f"the reference {reference!r} was not checked")
    return found


def schema_problems(root: Any) -> list[str]:
    """Every place of the schema that this subset does not understand, with its JSON pointer; none if it is fine."""
    problems: list[str] = []
    waiting: list[tuple[Path, Any]] = [((), root)]
    circular, parts = _circular_definitions(root), 0
    while waiting:
        path, schema = waiting.pop()
        parts += 1
        if parts > _MAX_PARTS:
            return [f"{_pointer(())}: the schema has more than {_MAX_PARTS} parts"]
        if len(problems) >= _MAX_PROBLEMS:
            break
        if isinstance(schema, bool):
            continue
        if not isinstance(schema, dict):
            problems.append(f"{_pointer(path)}: expected a schema (an object, true or false), found {shown(schema)}")
        elif len(path) > _MAX_DEPTH:
            problems.append(f"{_pointer(path)}: the schema is nested too deeply")
        else:
            own = islice(_own_problems(root, schema, circular), _MAX_PROBLEMS)
            problems += [f"{_pointer((*path, word))}: {problem}" for word, problem in own]
            waiting += reversed([((*path, *steps), inner) for steps, inner in _inside(schema)])
    return problems


def _inside(schema: dict[str, Any]) -> Iterator[tuple[Path, Any]]:
    for word, value in schema.items():
        if word in _ONE:
            yield (word,), value
        elif word in _MANY and isinstance(value, list):
            yield from (((word, index), inner) for index, inner in enumerate(value))
        elif word in _NAMED and isinstance(value, dict):
            yield from (((word, name), inner) for name, inner in value.items())


def _own_problems(root: Any, schema: dict[str, Any], circular: Collection[Path]) -> Iterator[tuple[str, str]]:
    for word, value in schema.items():
        if word in _ONE or word in _NOTES:
            continue
        check = _SHAPES.get(word)
        if word == "$ref":
            problem = _reference_problem(root, value, circular)
        elif check is None:
            problem = f"this keyword is not understood, and would not be checked{did_you_mean(word, _KNOWN)}"
        else:
            problem = None if check[0](value) else f"expected {check[1]}, found {shown(value)}"
        if problem:
            yield word, problem


def _reference_problem(root: Any, reference: Any, circular: Collection[Path]) -> str | None:
    # Only what is walked as a schema may be referred to: elsewhere could be keywords that nobody has looked at.
    if not isinstance(reference, str) or not (reference == "#" or _names_definition(reference)):
        return f'only references to definitions of this schema are followed ("#/$defs/…"), found {shown(reference)}'
    if _found(root, reference) is None:
        return f"there is nothing at {shown(reference)}"
    # A reference that leads back to itself without going into the value would be followed for ever.
    if _place(reference) in circular:
        return f"{shown(reference)} refers to itself"
    return None


def _names_definition(reference: str) -> bool:
    return reference.startswith(_DEFINITION) and "/" not in reference.removeprefix(_DEFINITION)


def _circular_definitions(root: Any) -> Collection[Path]:
    """The places whose references lead back to them at the same value, or from one such circle to another."""
    definitions = root.get("$defs") if isinstance(root, dict) else None
    schemas: dict[Path, Any] = {(): root}
    schemas |= {(name,): schema for name, schema in definitions.items()} if isinstance(definitions, dict) else {}
    references = {place: {*map(_place, _references_at(schema))} for place, schema in schemas.items()}
    referring: dict[Path, set[Path]] = {}
    for place, others in references.items():
        for other in others:
            referring.setdefault(other, set()).add(place)
    return _without_order(references, referring) & _without_order(referring, references)


def _without_order(graph: Mapping[Path, Collection[Path]], reverse: Mapping[Path, Collection[Path]]) -> set[Path]:
    """The nodes on a circle of the graph, and those that lead to one (Kahn's algorithm)."""
    left = {place: len(graph.get(place, ())) for place in graph.keys() | reverse.keys()}
    ready = [place for place, count in left.items() if not count]
    while ready:
        place = ready.pop()
        del left[place]
        for other in reverse.get(place, ()):
            left[other] -= 1
            if not left[other]:
                ready.append(other)
    return set(left)


def _references_at(schema: Any) -> Iterator[str]:
    """The references that apply to the same value as `schema`."""
    waiting = [schema]
    while waiting:
        here = waiting.pop()
        if not isinstance(here, dict):
            continue
        if isinstance(here.get("$ref"), str):
            yield here["$ref"]
        for word in ("allOf", "anyOf", "oneOf"):
            if isinstance(here.get(word), list):
                waiting += here[word]


def _found(root: Any, reference: str) -> Any:
    place = _place(reference)
    if not place:
        return root
    definitions = root.get("$defs") if isinstance(root, dict) else None
    return definitions.get(place[0]) if isinstance(definitions, dict) else None


def _place(reference: str) -> Path:
    """The name of the definition that is meant; empty for the whole schema."""
    if reference == "#":
        return ()
    return (reference.removeprefix(_DEFINITION).replace("~1", "/").replace("~0", "~"),)


def _pointer(path: Path) -> str:
    return "#" + "".join("/" + str(step).replace("~", "~0").replace("/", "~1") for step in path)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST_FLOAT


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _is_type(value: Any) -> bool:
    if isinstance(value, str):
        return value in _TYPES
    return isinstance(value, list) and bool(value) and all(isinstance(each, str) and each in _TYPES for each in value)


def _is_some(value: Any) -> bool:
    return isinstance(value, list) and bool(value)


_TYPE_NAMES: Final = f"one of {', '.join(_TYPES)}, or a list of these"
_SHAPES: Final[dict[str, tuple[Callable[[Any], bool], str]]] = {
    "$schema": (lambda value: value in _DIALECTS, "Draft 2020-12"),
    "type": (_is_type, _TYPE_NAMES),
    "enum": (_is_some, "a list of values"),
    "const": (lambda _: True, ""),
    "required": (_is_names, "a list of names"),
    "uniqueItems": (lambda value: isinstance(value, bool), "true or false"),
    "multipleOf": (lambda value: _is_finite(value) and value > 0, "a number above 0"),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), (_is_finite, "a number")),
    **dict.fromkeys(
        ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
        (_is_count, "a whole number of at least 0"),
    ),
    **dict.fromkeys(_MANY, (_is_some, "a list of schemas")),
    **{word: (lambda value: isinstance(value, dict), "an object of schemas") for word in _NAMED},
}
_KNOWN: Final = sorted({*_SHAPES, *_ONE, *_NOTES, "$ref"})
