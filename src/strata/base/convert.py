"""Converts a written value (TOML, environment, flag) to the type of a setting: accepted words for yes and no, and the
wording of "expected …, found …".

A value that does not fit becomes `Mismatch`, which says what was expected, what was found and where inside the value.
"""

from __future__ import annotations

import json
import re
from enum import Enum
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import inspect

from strata.base import toml
from strata.base.errors import StrataError
from strata.base.schema import Leaf, walk_types
from strata.base.secret import MASK, Secret, read_secret

_YES: Final = frozenset({"true", "yes", "on", "1"})
_NO: Final = frozenset({"false", "no", "off", "0"})
_ARRAYS: Final = (
    inspect.ListType,
    inspect.SetType,
    inspect.FrozenSetType,
    inspect.VarTupleType,
    inspect.TupleType,
)
_TABLES: Final = (inspect.DictType, inspect.StructType)
_WORDS: Final = {
    "str": "string",
    "int": "integer",
    "bool": "boolean",
    "object": "table",
    "null": "nothing",
}
_MAX_SHOWN: Final = 80
_AT: Final = re.compile(r" - at (?:`key` in )?`\$(.*)`$")
_GOT: Final = re.compile(r", got `[^`]*`$")
_STEP: Final = re.compile(r"\[(\d+)\]|\.([^.\[]+)")


class Mismatch(Exception):  # noqa: N818 - it never leaves the settings, which turn it into a line of their error
    def __init__(self, reason: str, inside: tuple[toml.Key, ...] = ()) -> None:
        super().__init__(reason)
        self.reason = reason
        self.inside = inside


def convert(leaf: Leaf, value: Any, *, from_text: bool) -> Any:
    """`value` as the leaf's type. Text is read leniently, a TOML value must already have the right type."""
    if isinstance(value, Enum):
        value = value.value
    if from_text:
        if value == "" and leaf.optional:
            return None
        value = _parse_text(leaf, value)
    try:
        return msgspec.convert(value, leaf.type, strict=not from_text, dec_hook=_decode)
    except msgspec.ValidationError as error:
        raise _mismatch(leaf, value, str(error)) from None
    except StrataError as error:
        raise Mismatch(str(error)) from None


def show(value: Any) -> str:
    """A value in a message: on one line, in the spelling of TOML, cut if long."""
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, str | bool) else json.dumps(repr(value))[1:-1]
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"


def _parse_text(leaf: Leaf, text: str) -> Any:
    if isinstance(leaf.bare, inspect.BoolType):
        # Text that is no boolean is left to msgspec, whose error message is the same for every type.
        word = text.strip().lower()
        return word in _YES if word in _YES | _NO else text
    if isinstance(leaf.bare, _ARRAYS):
        if not text.strip().startswith("["):
            return [part.strip() for part in text.split(",")] if text.strip() else []
        return _toml_value(leaf, text)
    if isinstance(leaf.bare, _TABLES):
        return _toml_value(leaf, text)
    return text


def _toml_value(leaf: Leaf, text: str) -> Any:
    try:
        parsed = toml.parse(f"value = {text.strip()}", "value").data
    except StrataError:
        parsed = {}
    if list(parsed) != ["value"]:
        found = MASK if leaf.secret else show(text)
        raise Mismatch(f"expected an array or an inline table as TOML writes it, found {found}")
    return parsed["value"]


def _decode(kind: type, value: Any) -> Any:
    if isinstance(value, kind):
        return value
    if kind is Secret:
        return _secret(value)
    if not isinstance(value, str) or not value:
        raise ValueError("Expected `path`")
    return Path(value)


def _secret(value: Any) -> Secret:
    if isinstance(value, str):
        return Secret(value)
    if isinstance(value, dict) and set(value) == {"file"} and isinstance(value["file"], str):
        return read_secret(Path(value["file"]))
    raise ValueError('Expected `string` or { file = "path" }')


def _mismatch(leaf: Leaf, value: Any, message: str) -> Mismatch:
    at = _AT.search(message)
    inside = _steps(at[1]) if at else ()
    message = _AT.sub("", message)
    if message.startswith("Invalid enum value"):
        message = f"expected one of {_choices(leaf)}"
    elif not message.startswith("Expected"):
        return Mismatch(_lower(message.replace("`", '"')), inside)
    expected = re.sub(r"`([^`]*)`", lambda name: _type_names(name[1]), _GOT.sub("", message))
    found = MASK if leaf.secret else show(_inner(value, inside))
    return Mismatch(f"{_lower(expected)}, found {found}", inside)


def _type_names(types: str) -> str:
    return " or ".join(_WORDS.get(name, name) for name in types.split(" | "))


def _choices(leaf: Leaf) -> str:
    choices: list[Any] = []
    for inner in walk_types(leaf.bare):
        if isinstance(inner, inspect.EnumType):
            choices += [member.value for member in inner.cls]
        elif isinstance(inner, inspect.LiteralType):
            choices += inner.values
    return ", ".join(show(choice) for choice in choices)


def _steps(path: str) -> tuple[toml.Key, ...]:
    # msgspec writes the keys of a dict as "[...]"; what follows cannot be found without them.
    known = path.partition("[...]")[0]
    return tuple(int(step[1]) if step[1] else step[2] for step in _STEP.finditer(known))


def _inner(value: Any, path: tuple[toml.Key, ...]) -> Any:
    for key in path:
        if isinstance(value, dict | list):
            value = value[key]  # type: ignore[index]
    return value


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]
