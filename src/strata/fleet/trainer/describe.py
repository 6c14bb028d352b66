"""Describes a trainer's parameters as JSON Schema from argparse, a dataclass or pydantic (`--describe`), and words what
has no schema.

With the schema a misspelt hyper-parameter is found when the manifest is applied, not after an hour in the queue. Only
the standard library: this module runs in the trainer's own environment.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import json
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any, Protocol

from strata.base.describe import FLAG

DIALECT = "https://json-schema.org/draft/2020-12/schema"

_PLAIN: dict[Any, dict[str, Any]] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
    Any: {},
    dict: {"type": "object", "additionalProperties": True},
    list: {"type": "array"},
    tuple: {"type": "array"},
}


class PydanticModel(Protocol):
    """The method of a pydantic model class that is used here."""

    def model_json_schema(self) -> dict[str, Any]: ...


def handle_describe(schema: Mapping[str, Any], arguments: Sequence[str] | None = None) -> None:
    """If `--describe` is among the arguments, print the schema and exit. Call it before the arguments are parsed."""
    if FLAG in (sys.argv[1:] if arguments is None else arguments):
        sys.stdout.write(json.dumps(schema, indent=2, sort_keys=True) + "\n")
        raise SystemExit(0)


def describe_pydantic(model: PydanticModel) -> dict[str, Any]:
    """The schema that pydantic itself generates; pydantic is not imported here."""
    return {"$schema": DIALECT, **model.model_json_schema()}


def describe_argparse(parser: argparse.ArgumentParser, *, skip: Sequence[str] = ()) -> dict[str, Any]:
    """One property for each argument, by its `dest`; `skip` names those that are not hyper-parameters."""
    properties: dict[str, Any] = {}
    required: list[str] = []
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction | argparse._VersionAction) or action.dest in skip:
            continue
        if FLAG in action.option_strings:
            continue
        if isinstance(action, argparse._SubParsersAction):
            raise TypeError(
                "a parser with subcommands has several sets of parameters: pass the parser of one subcommand"
            )
        properties[action.dest] = _action(action)
        if action.required:
            required.append(action.dest)
    return _object(properties, required) | {"$schema": DIALECT}


def _action(action: argparse.Action) -> dict[str, Any]:
    if isinstance(action, argparse._StoreTrueAction | argparse._StoreFalseAction | argparse.BooleanOptionalAction):
        schema: dict[str, Any] = {"type": "boolean"}
    elif isinstance(action, argparse._CountAction):
        schema = {"type": "integer", "minimum": 0}
    elif isinstance(action, argparse._StoreConstAction):
        schema = {"enum": [_to_json(action.const), _to_json(action.default)]}
    else:
        schema = _argument(action)
    if action.help and action.help is not argparse.SUPPRESS:
        schema["description"] = action.help
    if action.default is not None and action.default is not argparse.SUPPRESS:
        schema["default"] = _to_json(action.default)
    return schema


def _argument(action: argparse.Action) -> dict[str, Any]:
    many = action.nargs in ("*", "+") or isinstance(action.nargs, int)
    if not many and not isinstance(action, argparse._AppendAction):
        return _value(action)
    schema: dict[str, Any] = {"type": "array", "items": _value(action)}
    if isinstance(action.nargs, int):
        schema |= {"minItems": action.nargs, "maxItems": action.nargs}
    elif action.nargs == "+":
        schema["minItems"] = 1
    return schema


def _value(action: argparse.Action) -> dict[str, Any]:
    """One value of an argument."""
    if action.choices is not None:
        return {"enum": [_to_json(choice) for choice in action.choices]}
    if action.type is None or (isinstance(action.type, type) and issubclass(action.type, PurePath)):
        return {"type": "string"}
    if action.type in (int, float, str):
        return dict(_PLAIN[action.type])
    # A converter of the trainer's own: its values are unknown, so only the name is checked.
    return {}


def describe_dataclass(cls: type) -> dict[str, Any]:
    """One property for each field that `__init__` takes; dataclasses inside it are tables.

    `field(metadata={"schema": {"minimum": 0}})` adds to what the type says.
    """
    return _dataclass(cls, ()) | {"$schema": DIALECT}


def _dataclass(cls: type, parents: tuple[type, ...]) -> dict[str, Any]:
    if not dataclasses.is_dataclass(cls):
        raise TypeError(f"{cls.__name__} is not a dataclass")
    if cls in parents:
        raise TypeError(f"{cls.__name__} contains itself, which parameters cannot do")
    hints = typing.get_type_hints(cls, include_extras=True)
    properties: dict[str, Any] = {}
    required: list[str] = []
    for field in dataclasses.fields(cls):
        if not field.init:
            continue
        schema = _type(hints[field.name], (*parents, cls)) | field.metadata.get("schema", {})
        if field.default is not dataclasses.MISSING:
            schema["default"] = _to_json(field.default)
        elif field.default_factory is dataclasses.MISSING:
            required.append(field.name)
        properties[field.name] = schema
    return _object(properties, required)


def _type(hint: Any, parents: tuple[type, ...]) -> dict[str, Any]:
    if isinstance(hint, typing.Hashable) and hint in _PLAIN:
        return dict(_PLAIN[hint])
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _type(arguments[0], parents)
    if origin is typing.Literal:
        return {"enum": [_to_json(each) for each in arguments]}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_type(each, parents) for each in arguments]}
    return _class(hint, parents) if origin is None else _collection(hint, origin, arguments, parents)


def _collection(hint: Any, origin: Any, arguments: tuple[Any, ...], parents: tuple[type, ...]) -> dict[str, Any]:
    if origin is dict and arguments[0] is str:
        return {"type": "object", "additionalProperties": _type(arguments[1], parents)}
    if origin in (list, Sequence) or (origin is tuple and arguments[-1] is Ellipsis):
        return {"type": "array", "items": _type(arguments[0], parents)}
    if origin is tuple:
        size = len(arguments)
        inner = [_type(each, parents) for each in arguments]
        return {"type": "array", "prefixItems": inner, "minItems": size, "maxItems": size}
    raise TypeError(f"{hint!r} has no JSON Schema here")


def _class(hint: Any, parents: tuple[type, ...]) -> dict[str, Any]:
    if isinstance(hint, type):
        if dataclasses.is_dataclass(hint):
            return _dataclass(hint, parents)
        if issubclass(hint, enum.Enum):
            return {"enum": [_to_json(member) for member in hint]}
        if issubclass(hint, PurePath):
            return {"type": "string"}
    raise TypeError(f"{hint!r} has no JSON Schema here")


def _object(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": False}
    return schema | {"required": required} if required else schema


def _to_json(value: Any) -> Any:
    """A default or a choice as JSON, or as text if JSON has no such value."""
    if isinstance(value, enum.Enum):
        return _to_json(value.value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {key: _to_json(each) for key, each in dataclasses.asdict(value).items()}
    if isinstance(value, Mapping):
        return {str(key): _to_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(each) for each in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)
