"""Reads bodies and queries within limits: slowest pace (4 KiB/s after 20 s), nesting depth 64, query of 16 KiB, media
types, and the wording of refusals.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable
from typing import Final, Protocol, TypeVar
from urllib.parse import parse_qsl

import msgspec
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import Receive

from strata.base.errors import Code, StrataError
from strata.http.errors import HttpRefusal
from strata.http.route import Upload

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

MAX_DEPTH: Final = 64
MAX_QUERY: Final = 16_384
JSON: Final = "application/json"
# A string that does not end is consumed once, to the end: possessive, so that no byte is looked at twice.
_MARKS: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)|[][{}]', re.DOTALL)
_NO_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))
_MAX_SPLIT: Final = 1 << 20


class BodyPace(msgspec.Struct, frozen=True, kw_only=True):
    """How slowly a body may arrive: at this rate, and never further behind it than the grace period."""

    grace_s: float = 20.0
    bytes_per_s: float = 4096.0


class IncomingBody(Upload):
    def __init__(self, receive: Receive, headers: Headers, limit: int, pace: BodyPace) -> None:
        self._receive = receive
        self._limit = limit
        self._pace = pace
        self._left_s = pace.grace_s
        self._received = 0
        self._more = True
        declared = headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > limit:
            raise _too_large(limit)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while self._more:
            part = await self._next_part()
            if part:
                yield part

    async def _next_part(self) -> bytes:
        # Only the client's time counts, not the time that the handler needs for the parts.
        asked_s = time.monotonic()
        try:
            async with asyncio.timeout(self._left_s):
                message = await self._receive()
        except TimeoutError:
            raise HttpRefusal(408, Code.DEADLINE, "the body of the request comes too slowly") from None
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        self._more = message.get("more_body", False)
        part: bytes = message.get("body", b"")
        left_s = self._left_s - (time.monotonic() - asked_s) + len(part) / self._pace.bytes_per_s
        self._left_s = min(self._pace.grace_s, left_s)
        self._received += len(part)
        if self._received > self._limit:
            raise _too_large(self._limit)
        return part

    async def whole(self) -> bytes:
        part = await self._next_part()
        return b"".join([part, *[each async for each in self]]) if self._more else part


class BodyDecoder(Protocol[T_co]):
    """What `msgspec.json.Decoder` is, and what a server may have in its place. Raises the errors of msgspec, or a
    refusal of its own."""

    def decode(self, raw: bytes, /) -> T_co: ...


def decode_json(decoder: BodyDecoder[T], raw: bytes, reword: Callable[[str], str] = str) -> T:
    """`reword` turns a validation error of msgspec into the wording of the server."""
    check_depth(raw)
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise StrataError(Code.INVALID, reword(str(error))) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise StrataError(Code.INVALID, f"the body is not JSON: {error}") from None


def path_first(error: str) -> str:
    """`adam_params.beta1: Expected …` rather than `Expected … - at $.adam_params.beta1`."""
    reason, _, path = error.partition(" - at `$")
    path = path.rstrip("`").lstrip(".")
    return f"{path}: {reason}" if path else reason


def check_media_type(headers: Headers) -> None:
    """Refuse a body that is not declared as JSON: a page in a browser cannot send that to another origin unasked."""
    declared = media_type_of(headers)
    if declared == JSON:
        return
    if headers.get("content-length", "0") != "0" or "transfer-encoding" in headers:
        raise HttpRefusal(415, Code.UNSUPPORTED, f"the body of this request is {JSON}, not {declared[:80]!r}")


def media_type_of(headers: Headers) -> str:
    return headers.get("content-type", "").partition(";")[0].strip().lower()


def check_depth(raw: bytes) -> None:
    """Refuse a body that is nested deeper than any message of ours: some later step might recurse over it."""
    if raw.count(b"[") + raw.count(b"{") <= MAX_DEPTH or _shallow(raw):
        return
    depth = 0
    for mark in _MARKS.finditer(raw):
        depth += _STEP[raw[mark.start()]]
        if depth > MAX_DEPTH:
            raise StrataError(Code.INVALID, f"the body is nested more than {MAX_DEPTH} deep")


_STEP: Final = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1, ord('"'): 0}


def _shallow(raw: bytes) -> bool:
    """Says whether the body is surely not nested deep: a fast path for the long flat lists that clients send."""
    if b"\\" in raw or raw.count(b'"') > _MAX_SPLIT:
        return False
    # Without a backslash every second piece between quotes is outside of a string.
    brackets = b"".join(raw.split(b'"')[::2]).translate(None, _NO_BRACKETS)
    for _ in range(3):
        brackets = brackets.replace(b"{}", b"").replace(b"[]", b"")
    return not brackets


def read_pairs(raw: bytes) -> list[tuple[str, str]]:
    """The names and texts in the query of a URL."""
    try:
        return parse_qsl(raw.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=64)
    except ValueError:
        raise StrataError(Code.INVALID, "the query of the URL cannot be read") from None


def _too_large(limit: int) -> HttpRefusal:
    return HttpRefusal(413, Code.INVALID, f"the body of this request has at most {limit} bytes", limit=limit)
