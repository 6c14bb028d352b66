"""The router that hub and training server share: which route takes a request, what is refused, when a body is gone."""

from __future__ import annotations

import weakref
from collections.abc import AsyncIterator

import httpx
import msgspec
import pytest
from starlette.types import Message, Scope

from strata.base.errors import Code, StrataError
from strata.http.app import Router, Serving, build_app
from strata.http.authentication import ANONYMOUS, FirstHeaders
from strata.http.budget import BodyBudget
from strata.http.openapi import BINARY, DocumentSpec, build_document, with_document
from strata.http.reading import BudgetRules, ReadingRules
from strata.http.root import ROUTE
from strata.http.route import PUBLIC, HttpCall, RawBody, RawReply, Route
from strata.identity.roles import Principal

SPEC = DocumentSpec(title="a server", security_schemes={}, security=lambda _: (), raw_body={"*/*": BINARY})


class Handled(msgspec.Struct, frozen=True):
    handler: str
    parameters: dict[str, str]
    content: str = ""


async def newest(call: HttpCall[str]) -> Handled:
    """The newest thing."""
    return Handled("newest", dict(call.path))


async def show(call: HttpCall[str]) -> Handled:
    """One thing."""
    return Handled("show", dict(call.path))


async def remove(call: HttpCall[str], body: RawBody) -> Handled:
    """Remove one thing, wherever it lies."""
    return Handled("remove", dict(call.path), body.content.decode())


ROUTES = with_document(
    (
        Route("GET", "/things/newest", PUBLIC, newest),
        Route("GET", "/things/{id}", PUBLIC, show),
        Route("DELETE", "/things/{id:path}", PUBLIC, remove),
    ),
    "/openapi.json",
    PUBLIC,
    SPEC,
)


async def anybody(scope: Scope, headers: FirstHeaders) -> Principal:
    del scope, headers
    return ANONYMOUS


@pytest.fixture
def replies() -> list[tuple[str | None, int]]:
    """The route and the status of every reply."""
    return []


@pytest.fixture
async def client(replies: list[tuple[str | None, int]]) -> AsyncIterator[httpx.AsyncClient]:
    serving = Serving(
        context="",
        server="server",
        document_path="/openapi.json",
        rules=ReadingRules(),
        on_reply=lambda scope, status: replies.append((scope.get(ROUTE), status)),
    )
    app = build_app(ROUTES, serving, anybody)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
        yield client


async def test_the_first_route_of_a_path_takes_a_request_and_a_later_one_if_only_it_has_the_method(
    client: httpx.AsyncClient, replies: list[tuple[str | None, int]]
) -> None:
    assert (await client.get("/things/newest")).json()["handler"] == "newest"
    assert (await client.get("/things/7")).json()["parameters"] == {"id": "7"}
    removed = await client.request("DELETE", "/things/newest", content=b"now")
    assert removed.json() == {"handler": "remove", "parameters": {"id": "newest"}, "content": "now"}
    assert (await client.delete("/things/a/b")).json()["parameters"] == {"id": "a/b"}
    assert [route for route, _ in replies] == ["/things/newest", "/things/{id}", *["/things/{id:path}"] * 2]


async def test_a_method_that_no_route_has_is_refused_with_those_that_are_possible(client: httpx.AsyncClient) -> None:
    reply = await client.post("/things/7")
    assert (reply.status_code, reply.json()["error"]["code"]) == (405, "unsupported")
    assert "DELETE, GET" in reply.json()["error"]["message"]
    assert (await client.head("/things/7")).status_code == 405


async def test_a_path_that_no_route_has_is_refused_with_a_hint_at_the_document(
    client: httpx.AsyncClient, replies: list[tuple[str | None, int]]
) -> None:
    for path in ("/", "/things", "/newest/", "/Things/7"):
        reply = await client.get(path)
        assert (reply.status_code, reply.json()["error"]["hint"]) == (404, "GET /openapi.json"), path
    assert {route for route, _ in replies} == {None}


async def test_the_document_that_is_served_has_every_route_and_itself(client: httpx.AsyncClient) -> None:
    document = (await client.get("/openapi.json")).json()
    assert document == msgspec.json.decode(msgspec.json.encode(build_document(ROUTES, SPEC)))
    assert document["paths"].keys() == {"/things/newest", "/things/{id}", "/openapi.json"}
    assert document["paths"]["/things/{id}"].keys() == {"get", "delete"}


def test_a_route_that_is_declared_twice_is_a_defect() -> None:
    serving = Serving(context="", server="server", document_path="/", rules=ReadingRules())
    with pytest.raises(StrataError) as refused:
        Router([*ROUTES, ROUTES[0]], serving)
    assert refused.value.code is Code.INTERNAL


async def test_a_reply_is_closed_also_if_its_client_has_left_before_it_began() -> None:
    seen: list[str] = []

    async def pieces() -> AsyncIterator[bytes]:
        seen.append("started")
        yield b"a"

    async def close() -> None:
        seen.append("closed")

    async def stream(call: HttpCall[str]) -> RawReply:
        """A stream."""
        del call
        return RawReply(pieces(), close=close)

    async def break_off(message: Message) -> None:
        del message
        raise ConnectionResetError

    serving = Serving(context="", server="server", document_path="", rules=ReadingRules())
    app = build_app((Route("GET", "/stream", PUBLIC, stream),), serving, anybody)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
        assert (await client.get("/stream")).content == b"a"
    assert seen == ["started", "closed"]
    seen.clear()

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "method": "GET",
        "path": "/stream",
        "raw_path": b"/stream",
        "query_string": b"",
        "headers": [],
        "client": ("127.0.0.1", 1),
    }
    await app(scope, receive, break_off)
    assert seen == ["closed"]


async def test_a_handler_that_has_dropped_its_body_reserves_less_while_it_waits() -> None:
    budget = BodyBudget()
    held: list[int] = []

    async def take(call: HttpCall[str], body: Batch) -> Handled:
        """Take a batch."""
        dropped = weakref.ref(body)
        held.append(budget.held)
        del body
        assert dropped() is None, "only the handler has it"
        for size in (5, 50):
            call.shrink_reservation(size)
            held.append(budget.held)
        return Handled("take", {})

    app = build_app((Route("POST", "/batches", PUBLIC, take),), budgeted(budget), anybody)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
        assert (await client.post("/batches", json={"numbers": [1, 2, 3]})).status_code == 200
    assert held[0] > 50
    assert held[1:] == [5, 5]
    assert budget.held == 0


def budgeted(budget: BodyBudget) -> Serving:
    async def owner(caller: Principal) -> str:
        del caller
        return ""

    limits = BudgetRules(budget=budget, owner=owner, max_json=1 << 20, binary=frozenset())
    return Serving(context="", server="server", document_path="", rules=ReadingRules(budget=limits))


class Batch(msgspec.Struct, frozen=True, weakref=True):
    numbers: list[int]


async def test_a_body_is_gone_when_its_reply_is_sent_because_nothing_counts_it_any_more() -> None:
    """A client that reads its reply slowly would keep the body in memory, beside the budget of all bodies."""
    budget = BodyBudget()
    bodies: list[weakref.ref[Batch]] = []
    while_sending: list[tuple[bool, int]] = []

    async def send_slowly() -> AsyncIterator[bytes]:
        while_sending.append((bodies[0]() is None, budget.held))
        yield b"done"

    async def take(call: HttpCall[str], body: Batch) -> RawReply:
        """Take a batch."""
        del call
        bodies.append(weakref.ref(body))
        while_handling.append(budget.held)
        return RawReply(send_slowly())

    while_handling: list[int] = []
    app = build_app((Route("POST", "/batches", PUBLIC, take),), budgeted(budget), anybody)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
        reply = await client.post("/batches", json={"numbers": [1, 2, 3]})
    assert reply.content == b"done"
    assert while_handling[0] > 0
    assert while_sending == [(True, 0)]
