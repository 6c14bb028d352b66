"""Reads the query and body of a route as its signature says: strict or lenient, compressed or plain, in a thread above
128 KiB; with the wording of refusals.

The hub reads strictly: what a route does not declare is refused. The training server reads leniently, because its
clients are of other versions, and it takes bodies that are compressed, within a budget of memory.
"""

from __future__ import annotations

import asyncio
import math
import typing
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import msgspec
from msgspec import inspect
from starlette.datastructures import Headers
from starlette.types import Receive

from strata.base.errors import Code, StrataError
from strata.http.body import (
    BodyDecoder,
    BodyPace,
    IncomingBody,
    check_media_type,
    decode_json,
    media_type_of,
    read_pairs,
)
from strata.http.budget import JSON_COST, BodyBudget, BodyReservation
from strata.http.errors import HttpRefusal
from strata.http.route import RawBody, Route, Upload, is_message
from strata.http.zstd import decompress_frames, decompressed_size
from strata.identity.roles import Principal

T = TypeVar("T")

OFFLOAD_BYTES: Final = 128 * 1024
"""Bytes from which on decoding is done in a thread: it would hold up all other requests."""


@dataclass(frozen=True, kw_only=True)
class BudgetRules:
    """What bodies may take in memory while they are under way."""

    budget: BodyBudget
    owner: Callable[[Principal], Awaitable[str]]
    """Returns whose share of the budget a caller's bodies come from."""
    max_json: int
    """Bytes of a body in JSON, decompressed: it becomes many times as much in memory."""
    binary: frozenset[str]
    """Media types that take about as much in memory as on the wire."""


@dataclass(frozen=True, kw_only=True)
class ReadingRules:
    pace: BodyPace = field(default_factory=BodyPace)
    strict: bool = True
    """Refuse a body or a query that is not declared, unknown and repeated names in a query, and NUL in texts."""
    max_body: int = 0
    """Bytes of the body, for routes whose limit is 0."""
    budget: BudgetRules | None = None
    """The budget of bodies, which then may also come compressed by zstd; without, bodies are bounded by their routes
    alone."""
    reword: Callable[[str], str] = str
    """Turns a validation error of msgspec into the wording of the server."""
    decoder: Callable[[Any], BodyDecoder[Any]] = msgspec.json.Decoder
    """Makes the decoder of a kind of body."""


class RequestReader:
    """Reads the requests of one route into the arguments of its handler."""

    def __init__(self, route: Route, rules: ReadingRules) -> None:
        self._rules = rules
        self._limit = route.limit or rules.max_body
        self._any_query = route.any_query
        declared = route.signature()
        self._body: Any = typing.get_type_hints(route.handler).get("body")
        self._json = is_message(declared.body)
        self._decoder = rules.decoder(self._body) if is_message(self._body) else None
        self._query = None if declared.query is None else QueryReader(declared.query, rules)

    def read_query(self, query_string: bytes) -> dict[str, Any]:
        if self._query is not None:
            return {"query": self._query.read(query_string)}
        if query_string and self._rules.strict and not self._any_query:
            raise StrataError(Code.INVALID, "this takes no parameters in the URL")
        return {}

    async def read_body(
        self, receive: Receive, headers: Headers, reservation: BodyReservation | None
    ) -> dict[str, Any]:
        if self._json:
            check_media_type(headers)
        if self._body is Upload:
            return {"body": IncomingBody(receive, headers, self._limit, self._rules.pace)}
        raw = await self._read_whole(receive, headers, reservation)
        if self._decoder is not None:
            decoder = self._decoder
            if len(raw) <= OFFLOAD_BYTES:
                return {"body": decode_body(decoder, raw, self._rules)}
            return {"body": await offload(raw, lambda: decode_body(decoder, raw, self._rules))}
        if self._body is RawBody:
            return {"body": RawBody(raw, media_type_of(headers))}
        if raw and self._rules.strict:
            raise StrataError(Code.INVALID, "this takes no body")
        return {}

    async def _read_whole(self, receive: Receive, headers: Headers, reservation: BodyReservation | None) -> bytes:
        rules = self._rules.budget
        if rules is None or reservation is None:
            return await IncomingBody(receive, headers, self._limit, self._rules.pace).whole()
        encoding = headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("identity", "zstd"):
            raise HttpRefusal(415, Code.UNSUPPORTED, f"bodies are read plain or as zstd, not as {encoding[:80]!r}")
        binary = media_type_of(headers) in rules.binary
        limit, cost = (self._limit, 1) if binary else (min(self._limit, rules.max_json), JSON_COST)
        parts: list[bytes] = []
        received = 0
        async for part in IncomingBody(receive, headers, limit, self._rules.pace):
            received += len(part)
            await reservation.resize(received if encoding == "zstd" else received * cost)
            parts.append(part)
        raw = b"".join(parts)
        if encoding == "identity":
            return raw
        size = await offload(raw, lambda: decompressed_size(raw, limit))
        await reservation.resize(max(size, received) * cost)
        content = await offload(raw, lambda: decompress_frames(raw, limit), large=size > OFFLOAD_BYTES)
        await reservation.resize(len(content) * cost)
        return content


async def offload(raw: bytes, work: Callable[[], T], *, large: bool = False) -> T:
    """Work on a body: on the event loop if the body is small, in a thread if it is large."""
    return await asyncio.to_thread(work) if large or len(raw) > OFFLOAD_BYTES else work()


def decode_body(decoder: BodyDecoder[T], raw: bytes, rules: ReadingRules) -> T:
    value = decode_json(decoder, raw or b"{}", rules.reword)
    if rules.strict and b"\\u0000" in raw:
        _refuse_nul(msgspec.json.decode(raw))
    return value


def _refuse_nul(value: Any) -> None:
    """PostgreSQL cannot store it, and no name or text of ours has one."""
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if isinstance(part, str):
            if "\0" in part:
                raise StrataError(Code.INVALID, "a text of the body has a NUL character")
        elif isinstance(part, dict):
            waiting += [*part.keys(), *part.values()]
        elif isinstance(part, list):
            waiting += part


class QueryReader:
    """Reads the query of a URL as a message; a list is a repeated name.

    Leniently, the last of a repeated name counts and unknown names are ignored.
    """

    def __init__(self, message: Any, rules: ReadingRules) -> None:
        self._message = message
        self._rules = rules
        fields = inspect.type_info(message).fields  # type: ignore[attr-defined]
        self._lists = {each.encode_name for each in fields if isinstance(each.type, inspect.VarTupleType)}

    def read(self, query_string: bytes) -> Any:
        pairs = read_pairs(query_string)
        values = self._strict_values(pairs) if self._rules.strict else dict(pairs)
        try:
            query = msgspec.convert(values, self._message, strict=False)
        except msgspec.ValidationError as error:
            raise StrataError(Code.INVALID, f"in the query of the URL: {self._rules.reword(str(error))}") from None
        if self._rules.strict:
            self._refuse_infinity(query)
        return query

    def _strict_values(self, pairs: list[tuple[str, str]]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for name, text in pairs:
            if "\0" in text:
                raise StrataError(Code.INVALID, f"the parameter {name!r} has a NUL character")
            if name in self._lists:
                values.setdefault(name, []).append(text)
            elif name in values:
                raise StrataError(Code.INVALID, f"the parameter {name!r} is given twice")
            else:
                values[name] = text
        return values

    def _refuse_infinity(self, query: Any) -> None:
        for each in msgspec.structs.fields(self._message):
            number = getattr(query, each.name)
            if isinstance(number, float) and not math.isfinite(number):
                raise StrataError(Code.INVALID, f"the parameter {each.encode_name!r} is not a number")
