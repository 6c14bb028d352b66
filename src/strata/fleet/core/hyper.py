"""Checks the hyper-parameters of a job against its trainer's JSON Schema: the wording of each finding, the limits of
steps, and the suggestion of a known name. Reading the schema is in `hyper_schema`.

A subset of Draft 2020-12, closed on both sides. A keyword that is not known here is an error of the schema, never
ignored: a check that silently does not happen is worse than none. And an object with `properties` takes no other keys
unless `additionalProperties` says so. The standard would let them pass, and a misspelt hyper-parameter with them, which
is the very mistake this module exists for.

The `jsonschema` package is not used: with its dependencies it is five distributions, one of them compiled, in a base
install that is held to twelve in all; a core may not import it; and neither of the two rules above is its own. What is
here is compared with a full implementation in the tests.

`pattern` is refused: Python's regular expressions can take exponential time, and a manifest may come from anybody who
may submit jobs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from strata.base.digest import canonical_json
from strata.base.errors import Code, StrataError
from strata.base.suggest import did_you_mean
from strata.fleet.core.hyper_schema import Path, resolve, schema_problems, shown

_MAX_STEPS: Final = 100_000
_NAME_STEPS: Final = 10
"""What it costs to compare an unknown name with a known one."""
_MAX_LISTED: Final = 20
"""The most values of an `enum` in a message."""
_NO_NAMES: Final[frozenset[str]] = frozenset()


class HyperFinding(msgspec.Struct, frozen=True):
    path: Path
    """The path inside the value that was checked."""
    message: str


class HyperSchema:
    """A schema that was found to contain nothing this module does not understand.

    `checkpoint` is called at every step of a check, and raises if it has taken too long.
    """

    def __init__(self, root: Any, *, source: str = "schema", checkpoint: Callable[[], None] = lambda: None) -> None:
        problems = schema_problems(root)
        if problems:
            lines = tuple(f"{source}: {problem}" for problem in problems)
            raise StrataError(Code.INVALID, "\n".join(lines), problems=lines)
        self.root = root
        self._checkpoint = checkpoint
        self._names: dict[str, frozenset[str]] = {}

    def check(self, value: Any) -> list[HyperFinding]:
        """Everything that is wrong with `value`, in its own order; INVALID if that would take too many steps."""
        try:
            return list(_check(_Walk(self.root, self._checkpoint, self._names), self.root, value, (), _NO_NAMES))
        except RecursionError:
            raise StrataError(Code.INVALID, "the schema has too many references inside references") from None


@dataclass(slots=True)
class _Walk:
    """One check. Alternatives inside alternatives multiply, so what a check may cost is bounded."""

    root: Any
    checkpoint: Callable[[], None]
    names: dict[str, frozenset[str]] = field(default_factory=dict)
    """What `_names` has found, by reference."""
    steps_left: int = _MAX_STEPS

    def step(self, cost: int = 1) -> None:
        self.checkpoint()
        self.steps_left -= cost
        if self.steps_left < 0:
            raise StrataError(Code.INVALID, "the schema has too many alternatives inside alternatives for this value")


def _check(walk: _Walk, schema: Any, value: Any, path: Path, around: frozenset[str] | None) -> Iterator[HyperFinding]:
    """`around`: property names known to schemas this one is combined with for the same object; None: it is open."""
    walk.step()
    if schema is True:
        return
    if schema is False:
        yield HyperFinding(path, "nothing is allowed here")
        return
    if "type" in schema and not _has_type(value, schema["type"]):
        yield HyperFinding(path, f"expected {_spoken(schema['type'])}, found {shown(value)}")
        return
    for keyword, limit in schema.items():
        rule = _RULES.get(keyword)
        if isinstance(limit, list):
            walk.step(len(limit))
        message = rule(limit, value) if rule else None
        if message:
            yield HyperFinding(path, message)
    if isinstance(value, dict):
        yield from _object(walk, schema, value, path, around)
    if isinstance(value, list):
        yield from _array(walk, schema, value, path)
    yield from _combined(walk, schema, value, path, around)


def _object(
    walk: _Walk, schema: Mapping[str, Any], value: dict[str, Any], path: Path, around: frozenset[str] | None
) -> Iterator[HyperFinding]:
    properties: Mapping[str, Any] = schema.get("properties", {})
    for name in schema.get("required", ()):
        if name not in value:
            yield HyperFinding(path, f"{name} is required")
    for name, inner in value.items():
        if name in properties:
            yield from _check(walk, properties[name], inner, (*path, name), _NO_NAMES)
        elif (more := schema.get("additionalProperties")) is None:
            known = _closing_names(schema, around)
            if known and name not in known:
                yield _unknown(walk, path, name, known)
        elif more is False:
            yield _unknown(walk, path, name, properties)
        else:
            yield from _check(walk, more, inner, (*path, name), _NO_NAMES)


def _closing_names(schema: Mapping[str, Any], around: frozenset[str] | None) -> frozenset[str]:
    """The only names that an object may have by this schema; none: it is open, or it is closed elsewhere."""
    # Where alternatives or references follow, each of them is closed with the names of this one; here it is too early.
    if around is None or any(word in schema for word in ("anyOf", "oneOf", "allOf", "$ref")):
        return _NO_NAMES
    return around.union(schema.get("properties", ()))


def _unknown(walk: _Walk, path: Path, name: str, known: Any) -> HyperFinding:
    walk.step(_NAME_STEPS * len(known))
    return HyperFinding((*path, name), f"unknown{did_you_mean(name, sorted(known))}")


def _array(walk: _Walk, schema: Mapping[str, Any], value: list[Any], path: Path) -> Iterator[HyperFinding]:
    first = schema.get("prefixItems", [])
    for index, inner in enumerate(value):
        here = first[index] if index < len(first) else schema.get("items", True)
        yield from _check(walk, here, inner, (*path, index), _NO_NAMES)
    if schema.get("uniqueItems") and len({canonical_json(inner) for inner in value}) < len(value):
        yield HyperFinding(path, "the items must differ from each other")


def _combined(
    walk: _Walk, schema: Mapping[str, Any], value: Any, path: Path, around: frozenset[str] | None
) -> Iterator[HyperFinding]:
    own = None if around is None or "additionalProperties" in schema else around | schema.get("properties", {}).keys()
    parts = [*schema.get("allOf", ())]
    if "$ref" in schema:
        parts.append(resolve(walk.root, schema["$ref"]))
    names = _joint_names(walk, parts, own)
    for each in parts:
        yield from _check(walk, each, value, path, names)
    for word in ("anyOf", "oneOf"):
        if word in schema:
            yield from _alternatives(walk, schema[word], value, path, own, only_one=word == "oneOf")


def _joint_names(walk: _Walk, parts: list[Any], own: frozenset[str] | None) -> frozenset[str] | None:
    """An object is closed against all that its parts know together, unless one of them speaks of additional ones."""
    if own is None or any(isinstance(each, dict) and "additionalProperties" in each for each in parts):
        return None
    return own.union(*(_names(walk, each) for each in parts))


def _alternatives(
    walk: _Walk, schemas: list[Any], value: Any, path: Path, around: frozenset[str] | None, *, only_one: bool
) -> Iterator[HyperFinding]:
    outcomes = [list(_check(walk, each, value, path, around)) for each in schemas]
    fitting = sum(not findings for findings in outcomes)
    if not fitting:
        yield from _closest(outcomes, path)
    elif fitting > 1 and only_one:
        yield HyperFinding(path, f"fits {fitting} of the alternatives, and only one is allowed: {shown(value)}")


def _closest(outcomes: list[list[HyperFinding]], path: Path) -> list[HyperFinding]:
    """The alternative whose complaints are deepest is the one that was meant; of plain types none is: name them all."""
    best = max(outcomes, key=lambda findings: (min(len(each.path) for each in findings), -len(findings)))
    if len(outcomes) == 1 or all(each.path != path for each in best):
        return best
    here = [finding.message for findings in outcomes for finding in findings if finding.path == path]
    return [HyperFinding(path, " or ".join(dict.fromkeys(here)))]


def _names(walk: _Walk, schema: Any) -> frozenset[str]:
    """All property names that a schema speaks about at its own level, alternatives included.

    No reference leads back to itself there: `schema_problems` has looked.
    """
    if not isinstance(schema, dict):
        return _NO_NAMES
    names = frozenset(schema.get("properties", {}))
    for word in ("allOf", "anyOf", "oneOf"):
        names = names.union(*(_names(walk, each) for each in schema.get(word, ())))
    reference = schema.get("$ref")
    if reference is not None:
        if reference not in walk.names:
            walk.names[reference] = _names(walk, resolve(walk.root, reference))
        names |= walk.names[reference]
    walk.step(1 + len(names))
    return names


def _has_type(value: Any, wanted: str | list[str]) -> bool:
    return any(_TYPES[each](value) for each in ([wanted] if isinstance(wanted, str) else wanted))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_TYPES: Final[dict[str, Callable[[Any], bool]]] = {
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "number": _is_number,
    # 1.0 is an integer in JSON Schema: JSON does not tell the two apart.
    "integer": lambda value: _is_number(value) and (isinstance(value, int) or value.is_integer()),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
    "null": lambda value: value is None,
}


def _spoken(wanted: str | list[str]) -> str:
    return wanted if isinstance(wanted, str) else " or ".join(wanted)


def _same(one: Any, other: Any) -> bool:
    """Equal as JSON: 1 is 1.0, and true is not 1."""
    return canonical_json(one) == canonical_json(other)


def _enum(limit: Any, value: Any) -> str | None:
    wanted = canonical_json(value)
    if any(wanted == canonical_json(each) for each in limit):
        return None
    texts = [each for each in limit if isinstance(each, str)]
    near = did_you_mean(value, texts) if isinstance(value, str) and len(texts) == len(limit) else ""
    listed = [*map(shown, limit[:_MAX_LISTED]), *(["…"] if len(limit) > _MAX_LISTED else [])]
    return f"expected one of {', '.join(listed)}, found {shown(value)}{near if 'did you mean' in near else ''}"


def _bound(fits: Callable[[Any, Any], bool], words: str) -> Callable[[Any, Any], str | None]:
    def rule(limit: Any, value: Any) -> str | None:
        if not _is_number(value) or fits(value, limit):
            return None
        return f"expected {words} {shown(limit)}, found {shown(value)}"

    return rule


def _length(kind: type, words: str, fits: Callable[[int, Any], bool]) -> Callable[[Any, Any], str | None]:
    def rule(limit: Any, value: Any) -> str | None:
        if not isinstance(value, kind) or fits(len(value), limit):  # type: ignore[arg-type]
            return None
        return f"expected {words.format(limit)}, found {len(value)}"  # type: ignore[arg-type]

    return rule


def _multiple(limit: Any, value: Any) -> str | None:
    if not _is_number(value):
        return None
    try:
        parts = value / limit
        # 0.3 is meant to be a multiple of 0.1, although the quotient of the doubles is not whole.
        if abs(parts - round(parts)) <= 1e-9 * max(1.0, abs(parts)):
            return None
    except OverflowError:
        return f"expected a multiple of {shown(limit)}, and cannot tell whether {shown(value)} is one"
    return f"expected a multiple of {shown(limit)}, found {shown(value)}"


_RULES: Final[dict[str, Callable[[Any, Any], str | None]]] = {
    "enum": _enum,
    "const": lambda limit, value: None if _same(limit, value) else f"expected {shown(limit)}, found {shown(value)}",
    "minimum": _bound(lambda value, limit: value >= limit, "at least"),
    "maximum": _bound(lambda value, limit: value <= limit, "at most"),
    "exclusiveMinimum": _bound(lambda value, limit: value > limit, "more than"),
    "exclusiveMaximum": _bound(lambda value, limit: value < limit, "less than"),
    "multipleOf": _multiple,
    "minLength": _length(str, "at least {} characters", lambda size, limit: size >= limit),
    "maxLength": _length(str, "at most {} characters", lambda size, limit: size <= limit),
    "minItems": _length(list, "at least {} items", lambda size, limit: size >= limit),
    "maxItems": _length(list, "at most {} items", lambda size, limit: size <= limit),
    "minProperties": _length(dict, "at least {} keys", lambda size, limit: size >= limit),
    "maxProperties": _length(dict, "at most {} keys", lambda size, limit: size <= limit),
}
