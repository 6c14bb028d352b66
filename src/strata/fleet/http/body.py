"""Bodies and queries of requests: bounded in size, depth and time, and refused with the reason before all else."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import AsyncIterator
from typing import Any, Final, TypeVar
from urllib.parse import parse_qsl

import msgspec
from msgspec import inspect
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import Receive

from strata.base.errors import Code, StrataError
from strata.fleet.http.declare import Upload
from strata.fleet.http.errors import HttpRefusal

T = TypeVar("T")

MAX_DEPTH: Final = 64
MAX_QUERY: Final = 16_384
_STRINGS: Final = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_BRACKETS: Final = re.compile(rb"[][{}]")
_NO_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))
_BIG: Final = 256 * 1024
"""From here on decoding is worth a thread: it would hold up everybody else."""


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """How slow a body may come: after the grace at this rate, on the whole."""

    grace_s: float = 20.0
    bytes_per_s: float = 4096.0


class Incoming(Upload):
    def __init__(self, receive: Receive, headers: Headers, limit: int, pace: Pace) -> None:
        self._receive = receive
        self._limit = limit
        self._pace = pace
        self._received = 0
        self._more = True
        declared = headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > limit:
            raise _too_large(limit)

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._parts()

    async def _parts(self) -> AsyncIterator[bytes]:
        started_s = time.monotonic()
        while self._more:
            due_s = self._pace.grace_s + self._received / self._pace.bytes_per_s
            try:
                async with asyncio.timeout(due_s - (time.monotonic() - started_s)):
                    message = await self._receive()
            except TimeoutError:
                raise HttpRefusal(408, Code.DEADLINE, "the body of the request comes too slowly") from None
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            self._more = message.get("more_body", False)
            part = message.get("body", b"")
            self._received += len(part)
            if self._received > self._limit:
                raise _too_large(self._limit)
            if part:
                yield part

    async def whole(self) -> bytes:
        return b"".join([part async for part in self])


async def decode(decoder: msgspec.json.Decoder[T], raw: bytes) -> T:
    return await asyncio.to_thread(_decode, decoder, raw) if len(raw) > _BIG else _decode(decoder, raw)


def _decode(decoder: msgspec.json.Decoder[T], raw: bytes) -> T:
    check_depth(raw)
    try:
        value = decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise StrataError(Code.INVALID, str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise StrataError(Code.INVALID, f"the body is not JSON: {error}") from None
    if b"\\u0000" in raw:
        _refuse_nul(msgspec.json.decode(raw))
    return value


def check_depth(raw: bytes) -> None:
    """Refuse what is nested deeper than anything we exchange: some later step might recurse over it."""
    if raw.count(b"[") + raw.count(b"{") <= MAX_DEPTH or _shallow(raw):
        return
    depth = 0
    for bracket in _BRACKETS.finditer(_STRINGS.sub(b"", raw)):
        depth += 1 if bracket[0] in b"[{" else -1
        if depth > MAX_DEPTH:
            raise StrataError(Code.INVALID, f"the body is nested more than {MAX_DEPTH} deep")


def _shallow(raw: bytes) -> bool:
    """Whether this is surely not nested deep. Long lists of small things are what hosts send all the time."""
    if b"\\" in raw:
        return False
    # Without a backslash every second piece between quotes is outside of a string.
    brackets = b"".join(raw.split(b'"')[::2]).translate(None, _NO_BRACKETS)
    for _ in range(3):
        brackets = brackets.replace(b"{}", b"").replace(b"[]", b"")
    return not brackets


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
        try:
            pairs = parse_qsl(raw.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=64)
        except ValueError:
            raise StrataError(Code.INVALID, "the query of the URL cannot be read") from None
        given: dict[str, Any] = {}
        for name, text in pairs:
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


def _too_large(limit: int) -> HttpRefusal:
    return HttpRefusal(413, Code.INVALID, f"the body of this request has at most {limit} bytes", limit=limit)
