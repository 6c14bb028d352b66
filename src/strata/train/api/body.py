"""Bodies and queries of requests: bounded in size, depth and time, and refused with the reason before all else."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from typing import Final, TypeVar
from urllib.parse import parse_qsl

import msgspec
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import Receive

from strata.base.errors import Code, StrataError
from strata.train.api.errors import HttpRefusal
from strata.train.wire.request import decompress

T = TypeVar("T")

MAX_DEPTH: Final = 64
MAX_QUERY: Final = 16_384
GRACE_S: Final = 20.0
BYTES_PER_S: Final = 4096.0
"""A body may come as slowly as this, on the whole and after the grace."""
_BIG: Final = 128 * 1024
"""From here on decoding is worth a thread: it would hold up everybody else."""
_STRINGS: Final = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_BRACKETS: Final = re.compile(rb"[][{}]")


async def read_body(receive: Receive, headers: Headers, limit: int) -> bytes:
    """All of it, unpacked; 413 beyond the limit, before and after unpacking, 408 if it comes too slowly."""
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", "zstd"):
        raise HttpRefusal(415, Code.UNSUPPORTED, f"bodies are read plain or as zstd, not as {encoding[:80]!r}")
    raw = await _whole(receive, headers, limit)
    return await in_thread(raw, lambda: decompress(raw, limit)) if encoding == "zstd" else raw


async def _whole(receive: Receive, headers: Headers, limit: int) -> bytes:
    declared = headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise _too_large(limit)
    parts: list[bytes] = []
    received, more, started_s = 0, True, time.monotonic()
    while more:
        due_s = GRACE_S + received / BYTES_PER_S
        try:
            async with asyncio.timeout(due_s - (time.monotonic() - started_s)):
                message = await receive()
        except TimeoutError:
            raise HttpRefusal(408, Code.DEADLINE, "the body of the request comes too slowly") from None
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        more = message.get("more_body", False)
        parts.append(message.get("body", b""))
        received += len(parts[-1])
        if received > limit:
            raise _too_large(limit)
    return b"".join(parts)


async def in_thread(raw: bytes, work: Callable[[], T]) -> T:
    """The work on this body: here if it is small, beside the others' requests if it is not."""
    return await asyncio.to_thread(work) if len(raw) > _BIG else work()


def decode(decoder: msgspec.json.Decoder[T], raw: bytes) -> T:
    check_depth(raw)
    try:
        return decoder.decode(raw or b"{}")
    except msgspec.ValidationError as error:
        raise StrataError(Code.INVALID, _placed(str(error))) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise StrataError(Code.INVALID, f"the body is not JSON: {error}") from None


def check_depth(raw: bytes) -> None:
    """Refuse what is nested deeper than anything we exchange: some later step might recurse over it."""
    if raw.count(b"[") + raw.count(b"{") <= MAX_DEPTH:
        return
    depth = 0
    for bracket in _BRACKETS.finditer(_STRINGS.sub(b"", raw)):
        depth += 1 if bracket[0] in b"[{" else -1
        if depth > MAX_DEPTH:
            raise StrataError(Code.INVALID, f"the body is nested more than {MAX_DEPTH} deep")


def read_query(kind: type[T], raw: bytes) -> T:
    try:
        pairs = parse_qsl(raw.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=64)
        return msgspec.convert(dict(pairs), kind, strict=False)
    except msgspec.ValidationError as error:
        raise StrataError(Code.INVALID, f"in the query of the URL: {_placed(str(error))}") from None
    except ValueError:
        raise StrataError(Code.INVALID, "the query of the URL cannot be read") from None


def _placed(complaint: str) -> str:
    """`adam_params.beta1: Expected …` rather than `Expected … - at $.adam_params.beta1`."""
    reason, _, path = complaint.partition(" - at `$")
    path = path.rstrip("`").lstrip(".")
    return f"{path}: {reason}" if path else reason


def _too_large(limit: int) -> HttpRefusal:
    return HttpRefusal(413, Code.INVALID, f"the body of this request has at most {limit} bytes", limit=limit)
