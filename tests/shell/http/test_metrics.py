"""The small listener for metrics: who gets them, and clients that mean no good."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import httpx
import pytest

from strata.base.errors import Code, StrataError
from strata.http import metrics
from strata.http.metrics import MAX_CONNECTIONS, MAX_HEAD, serve_metrics


def check(authorization: str) -> None:
    if authorization != "Bearer good":
        raise StrataError(Code.UNAUTHENTICATED, "no")


@asynccontextmanager
async def listening() -> AsyncIterator[str]:
    async with serve_metrics("127.0.0.1:0", lambda: b"strata_one 1\n", check) as url:
        yield url


async def raw(url: str, *pieces: bytes) -> bytes:
    """What a client gets that sends these bytes and waits."""
    at = urlsplit(url)
    reader, writer = await asyncio.open_connection(at.hostname, at.port)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        return await asyncio.wait_for(reader.read(), 30)
    except ConnectionError:
        return b""
    finally:
        writer.transport.abort()


async def test_the_metrics_are_for_callers_with_the_token_alone() -> None:
    async with listening() as url, httpx.AsyncClient() as client:
        good = {"Authorization": "Bearer good"}
        reply = await client.get(url, headers=good)
        assert (reply.status_code, reply.text) == (200, "strata_one 1\n")
        assert reply.headers["content-type"] == metrics.MEDIA_TYPE
        assert (await client.get(url)).status_code == 401
        assert (await client.get(url.replace("/metrics", "/other"))).status_code == 401
        assert (await client.get(url.replace("/metrics", "/other"), headers=good)).status_code == 404
        assert (await client.post(url, headers=good)).status_code == 405


async def test_heads_that_are_too_long_or_never_end_are_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "REQUEST_S", 0.2)
    async with listening() as url:
        assert await raw(url, b"GET /metrics HTTP/1.1\r\nx: " + b"y" * 4 * MAX_HEAD) == b""
        assert await raw(url, b"GET /metrics HTTP/1.1\r\n") == b""
        assert (await raw(url, b"\x00\xff\r\n\r\n")).startswith(b"HTTP/1.1 401 ")


async def test_connections_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "REQUEST_S", 60.0)
    async with listening() as url:
        at = urlsplit(url)
        held = [await asyncio.open_connection(at.hostname, at.port) for _ in range(MAX_CONNECTIONS)]
        assert await raw(url) == b""
        for _, writer in held:
            writer.close()


async def test_an_address_that_is_taken_is_an_error_that_names_it() -> None:
    async with listening() as url:
        with pytest.raises(StrataError, match="cannot serve metrics on"):
            async with serve_metrics(urlsplit(url).netloc, lambda: b"", check):
                pass
