"""The root that all HTTP servers share: what an application below it does wrong, and clients that take nothing."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from strata.http.authentication import ANONYMOUS, FirstHeaders
from strata.http.errors import PLAIN
from strata.http.root import RootApp, RootLimits
from strata.identity.roles import Principal


async def anybody(scope: Scope, headers: FirstHeaders) -> Principal:
    del scope, headers
    return ANONYMOUS


async def test_a_defect_is_answered_in_the_form_of_every_error_and_tells_nothing_of_itself() -> None:
    async def broken(scope: Scope, receive: Receive, send: Send) -> None:
        raise ZeroDivisionError("a secret of the inside")

    transport = httpx.ASGITransport(RootApp(broken, anybody, PLAIN, server="mill"))
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        reply = await client.get("/", headers={"X-Request-Id": "r-1"})
        assert reply.status_code == 500
        assert reply.headers["x-request-id"] == "r-1"
        assert reply.json()["error"]["code"] == "internal"
        assert "a defect of the mill" in reply.text
        assert "secret" not in reply.text
        made = [(await client.get("/", headers={"X-Request-Id": "no id"})).headers["x-request-id"] for _ in range(2)]
    assert len({*made, "no id"}) == 3


@pytest.mark.parametrize(
    ("more_body", "every", "ends"), [(True, False, True), (False, True, True), (False, False, False)]
)
async def test_a_client_that_takes_nothing_is_given_up_where_the_sending_is_timed(
    more_body: bool, every: bool, ends: bool
) -> None:
    async def replies(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": b"x", "more_body": more_body})

    async def receive() -> Message:
        return {"type": "http.request"}

    async def only_the_start(message: Message) -> None:
        if message["type"] != "http.response.start":
            await asyncio.Event().wait()

    scope = {"type": "http", "method": "GET", "path": "/", "raw_path": b"/", "query_string": b"", "headers": []}
    app = RootApp(replies, anybody, PLAIN, server="mill", limits=RootLimits(time_every_send=every, send_s=0.01))
    serving = asyncio.create_task(app(scope, receive, only_the_start))
    done, waiting = await asyncio.wait([serving], timeout=30 if ends else 0.3)
    for task in waiting:
        task.cancel()
    assert bool(done) is ends
