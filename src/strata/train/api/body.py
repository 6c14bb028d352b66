"""What this server reads beyond what every server does: packed bodies, and complaints that begin with their place."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, TypeVar

import msgspec
from starlette.datastructures import Headers
from starlette.types import Receive

from strata.base.errors import Code, StrataError
from strata.http import body
from strata.http.body import Incoming, Pace
from strata.http.budget import JSON_COST, Hold
from strata.http.declare import MIB
from strata.http.errors import HttpRefusal
from strata.train.api.declare import BINARY, media_type
from strata.train.wire.packed import decompress, unpacked_size

T = TypeVar("T")

MAX_JSON: Final = 16 * MIB
"""Of a body in JSON, unpacked."""
_BIG: Final = 128 * 1024
"""From here on decoding is worth a thread: it would hold up everybody else."""


async def read_body(receive: Receive, headers: Headers, limit: int, pace: Pace, hold: Hold) -> bytes:
    """All of it, unpacked, within its room; 413 beyond the limit, 408 if it comes too slowly, 429 if there is no room.

    What is JSON becomes many times as much in memory, so it has a lower limit, and room is counted for what it becomes.
    """
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", "zstd"):
        raise HttpRefusal(415, Code.UNSUPPORTED, f"bodies are read plain or as zstd, not as {encoding[:80]!r}")
    binary = media_type(headers) in BINARY
    limit, cost = (limit, 1) if binary else (min(limit, MAX_JSON), JSON_COST)
    parts: list[bytes] = []
    received = 0
    async for part in Incoming(receive, headers, limit, pace):
        received += len(part)
        await hold.resize(received if encoding == "zstd" else received * cost)
        parts.append(part)
    raw = b"".join(parts)
    if encoding == "identity":
        return raw
    size = await in_thread(raw, lambda: unpacked_size(raw, limit))
    await hold.resize(max(size, received) * cost)
    content = await in_thread(raw, lambda: decompress(raw, limit), large=size > _BIG)
    await hold.resize(len(content) * cost)
    return content


async def in_thread(raw: bytes, work: Callable[[], T], *, large: bool = False) -> T:
    """The work on this body: here if it is small, beside the others' requests if it is not."""
    return await asyncio.to_thread(work) if large or len(raw) > _BIG else work()


def decode(decoder: msgspec.json.Decoder[T], raw: bytes) -> T:
    return body.decode(decoder, raw or b"{}", _placed)


def read_query(kind: type[T], raw: bytes) -> T:
    """Of a repeated name the last counts, and what is not known is left alone: clients of other versions call too."""
    try:
        return msgspec.convert(dict(body.read_pairs(raw)), kind, strict=False)
    except msgspec.ValidationError as error:
        raise StrataError(Code.INVALID, f"in the query of the URL: {_placed(str(error))}") from None


def _placed(complaint: str) -> str:
    """`adam_params.beta1: Expected …` rather than `Expected … - at $.adam_params.beta1`."""
    reason, _, path = complaint.partition(" - at `$")
    path = path.rstrip("`").lstrip(".")
    return f"{path}: {reason}" if path else reason
