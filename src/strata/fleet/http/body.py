"""What the hub reads beyond what every server does: no NUL in any text, and queries as closed as bodies."""

from __future__ import annotations

import asyncio
import math
from typing import Any, Final, TypeVar

import msgspec
from msgspec import inspect

from strata.base.errors import Code, StrataError
from strata.http import body

T = TypeVar("T")

_BIG: Final = 256 * 1024
"""From here on decoding is worth a thread: it would hold up everybody else."""


async def decode(decoder: msgspec.json.Decoder[T], raw: bytes) -> T:
    return await asyncio.to_thread(decode_now, decoder, raw) if len(raw) > _BIG else decode_now(decoder, raw)


def decode_now(decoder: msgspec.json.Decoder[T], raw: bytes) -> T:
    value = body.decode(decoder, raw)
    if b"\\u0000" in raw:
        _refuse_nul(msgspec.json.decode(raw))
    return value


def _refuse_nul(value: Any) -> None:
    """PostgreSQL cannot store it, and no name or text of ours has one."""
    waiting = [value]
    while waiting:
        here = waiting.pop()
        if isinstance(here, str):
            if "\0" in here:
                raise StrataError(Code.INVALID, "a text of the body has a NUL character")
        elif isinstance(here, dict):
            waiting += [*here.keys(), *here.values()]
        elif isinstance(here, list):
            waiting += here


class QueryReader:
    """Reads the query of a URL as a Struct: unknown and repeated names are refused, lists are repeated names."""

    def __init__(self, kind: type[msgspec.Struct]) -> None:
        self._kind = kind
        fields = inspect.type_info(kind).fields  # type: ignore[attr-defined]
        self._lists = {field.encode_name for field in fields if isinstance(field.type, inspect.VarTupleType)}

    def read(self, raw: bytes) -> Any:
        given: dict[str, Any] = {}
        for name, text in body.read_pairs(raw):
            if "\0" in text:
                raise StrataError(Code.INVALID, f"the parameter {name!r} has a NUL character")
            if name in self._lists:
                given.setdefault(name, []).append(text)
            elif name in given:
                raise StrataError(Code.INVALID, f"the parameter {name!r} is given twice")
            else:
                given[name] = text
        try:
            value = msgspec.convert(given, self._kind, strict=False)
        except msgspec.ValidationError as error:
            raise StrataError(Code.INVALID, f"in the query of the URL: {error}") from None
        for field in msgspec.structs.fields(self._kind):
            number = getattr(value, field.name)
            if isinstance(number, float) and not math.isfinite(number):
                raise StrataError(Code.INVALID, f"the parameter {field.encode_name!r} is not a number")
        return value
