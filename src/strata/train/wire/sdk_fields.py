"""Decides about unknown fields of newer SDKs: ignored when they have the SDK's default (`sdk_fields.json`), refused by
name otherwise.

Such a field is left out if it asks for nothing: it is null or empty, or has the default of the newest `tinker` SDK that
the server was tested with. With any other value it is refused by its name: a parameter that would be ignored must not
pass for applied.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Final, Generic, TypeVar

import msgspec
from msgspec import inspect

from strata.base import log
from strata.base.errors import StrataError
from strata.train.wire.fields import invalid_field

T = TypeVar("T")
NO_MODEL: Final = ""
"""The model of what the SDK composes without one: nothing is known of its defaults."""
MAX_UNKNOWN: Final = 16
"""Unknown fields of a request, and of the names that a decoder remembers as logged."""
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_EMPTY: Final[tuple[Any, ...]] = (None, "", [], {})
_log: Final = log.get(__name__)


class SdkField(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    default: Any = msgspec.UNSET
    """Unset: the SDK always sends a value of the caller."""


class SdkTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the newest tested SDK sends: of each request model, and of each message of protobuf, the fields."""

    sdk: str
    models: Mapping[str, Mapping[str, SdkField]]
    messages: Mapping[str, Mapping[str, int]]


@functools.cache
def sdk_table() -> SdkTable:
    return msgspec.json.decode(files(__package__).joinpath("sdk_fields.json").read_bytes(), type=SdkTable)


@dataclass(frozen=True, slots=True)
class _Shape:
    """The fields of a message that are known, each with the shape of the message inside, if there is one."""

    model: str | None
    """The model of the SDK; None for a message of Strata's own, which has no other clients."""
    known: Mapping[str, _Shape | None]


def _shape(kind: inspect.Type) -> _Shape | None:
    match kind:
        case inspect.StructType():
            known = {each.encode_name: _shape(each.type) for each in kind.fields}
            model = getattr(kind.cls, "sdk_model", None) if kind.forbid_unknown_fields else None
            return _Shape(model, known)
        case inspect.UnionType():
            return next(filter(None, map(_shape, kind.types)), None)
        case inspect.CollectionType():
            return _shape(kind.item_type)
        case _:
            return None


class SdkDecoder(Generic[T]):
    """Decodes one kind of body as msgspec does; a body with unknown fields is decoded once more, without them."""

    def __init__(self, body: type[T]) -> None:
        self._strict: Final = msgspec.json.Decoder(body)
        self._shape: Final = _shape(inspect.type_info(body))
        self._logged: Final[set[str]] = set()

    def decode(self, raw: bytes | msgspec.Raw) -> T:
        try:
            return self._strict.decode(raw)
        except msgspec.ValidationError:
            left_out: list[str] = []
            known = _without_unknown(msgspec.json.decode(raw), self._shape, "", left_out)
            if not left_out:
                raise
        self._log(left_out)
        try:
            return self._strict.decode(msgspec.json.encode(known))
        except OverflowError as error:
            raise msgspec.ValidationError(str(error)) from None

    def _log(self, fields: Iterable[str]) -> None:
        for field in fields:
            if field not in self._logged and len(self._logged) < MAX_UNKNOWN:
                self._logged.add(field)
                _log.warning("unknown_field_left_out", field=field, tested_sdk=sdk_table().sdk)


def _without_unknown(value: Any, shape: _Shape | None, path: str, left_out: list[str]) -> Any:
    """The value without unknown fields that ask for nothing; what is wrong otherwise, the strict decoder says."""
    if shape is None:
        return value
    if isinstance(value, list):
        return [_without_unknown(each, shape, path, left_out) for each in value]
    if not isinstance(value, dict):
        return value
    kept = {}
    for name, each in value.items():
        where = f"{path}.{name}" if path else name
        if name in shape.known:
            kept[name] = _without_unknown(each, shape.known[name], where, left_out)
        elif shape.model is None or not _NAME.fullmatch(name):
            kept[name] = each
        else:
            _check_unknown(shape.model, name, each, where)
            if where not in left_out:
                left_out.append(where)
            if len(left_out) > MAX_UNKNOWN:
                raise invalid_field(where, f"more than {MAX_UNKNOWN} fields of this request are unknown")
    return kept


def _check_unknown(model: str, name: str, value: Any, where: str) -> None:
    field = sdk_table().models.get(model, {}).get(name, SdkField())
    # True is 1 for Python, and not for a client.
    same = value == field.default and isinstance(value, bool) == isinstance(field.default, bool)
    if not same and value not in _EMPTY:
        raise unknown_field(where, "the field")


def unknown_field(path: str, what: str) -> StrataError:
    """INVALID, with the version of the SDK that a client has to be no newer than."""
    sdk = sdk_table().sdk
    return invalid_field(
        path, f"this server does not know {what}; the newest tinker SDK that it was tested with is {sdk}"
    )
