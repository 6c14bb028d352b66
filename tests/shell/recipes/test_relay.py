"""What a program that a run starts can reach of the server, and what it cannot."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from strata.sdk.recipes.relay import MAX_BODY, Relay, loopback_relay
from strata.sdk.server_calls import ServerCalls

KEY = "tml-key-of-the-run"
SESSION = "/v1/rollout_sessions/rollout_1"
MODEL = "sampler_1"


@dataclass
class Upstream:
    """A server that notes what it is asked."""

    asked: list[httpx.Request] = field(default_factory=list)
    lost: int = 0
    """Replies that do not arrive."""
    content: bytes = b""
    """A reply, in place of one that says where it was asked."""

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request)
        if len(self.asked) <= self.lost:
            raise httpx.ReadError("the connection broke", request=request)
        if self.content:
            return httpx.Response(200, content=self.content)
        return httpx.Response(200, json={"id": f"chatcmpl-{len(self.asked)}", "path": request.url.path})

    @property
    def calls(self) -> ServerCalls:
        transport = httpx.MockTransport(self)
        return ServerCalls(httpx.Client(base_url="http://server", headers={"X-API-Key": KEY}, transport=transport))


@pytest.fixture
def upstream() -> Upstream:
    return Upstream()


@pytest.fixture
def relay(upstream: Upstream) -> Iterator[tuple[Relay, str]]:
    listener = socket.create_server(("127.0.0.1", 0))
    found = Relay(upstream.calls, listener)
    try:
        yield found, f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        found.close()


def test_completions_are_reached_with_a_key_that_the_program_does_not_have(upstream: Upstream) -> None:
    with loopback_relay(upstream.calls) as (url, key):
        headers = {"Authorization": f"Bearer {key}", "X-API-Key": "other"}
        reply = httpx.post(f"{url}/chat/completions", json={"model": "tiny"}, headers=headers)
        assert reply.json()["path"] == "/v1/chat/completions"
        assert httpx.get(f"{url}/models", headers=headers).json()["path"] == "/v1/models"
    sent = upstream.asked[0]
    assert sent.headers["x-api-key"] == KEY
    assert "authorization" not in sent.headers
    assert KEY not in str(reply.headers)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/models")


@pytest.mark.parametrize("key", ["", "Bearer", "Bearer none"])
def test_the_address_of_completions_is_worth_nothing_without_its_key(upstream: Upstream, key: str) -> None:
    """An address is in the arguments of a process, which every user of the machine can list."""
    with loopback_relay(upstream.calls) as (url, secret):
        assert secret not in url
        assert httpx.post(f"{url}/completions", json={}, headers={"Authorization": key}).status_code == 401
    assert not upstream.asked


def test_only_replies_that_have_come_are_delivered(relay: tuple[Relay, str], upstream: Upstream) -> None:
    """A session has the lost one too."""
    upstream.lost = 1
    found, url = relay
    path = found.new_path()
    found.lead(path, SESSION, model=MODEL)
    httpx.post(f"{url}{path}/chat/completions", json={"model": MODEL})
    assert len(upstream.asked) == 2
    assert found.end(path) == {"chatcmpl-2"}


@pytest.mark.parametrize(
    ("content", "ids"),
    [
        (b'data: {"id":"chatcmpl-9"}\n\ndata: [DONE]\n\n', {"chatcmpl-9"}),
        (b'data: {"id":"chatcmpl-9"}\n\ndata: {"error":{"message":"x"}}\n\n', set()),
    ],
)
def test_a_stream_that_ends_in_an_error_is_not_delivered(upstream: Upstream, content: bytes, ids: set[str]) -> None:
    def write(status: int, media_type: str, written: bytes) -> None:
        assert (status, written) == (200, content)

    upstream.content = content
    with socket.create_server(("127.0.0.1", 0)) as listener:
        relay = Relay(upstream.calls, listener)
        relay.lead("/p", SESSION, model=MODEL)
        relay.answer("POST", "/p/chat/completions", b'{"model":"sampler_1"}', {}, "", write)
        relay.close()
    assert relay.end("/p") == ids


def test_a_reply_that_could_not_be_written_is_not_delivered(relay: tuple[Relay, str]) -> None:
    def write(status: int, media_type: str, content: bytes) -> None:
        raise BrokenPipeError

    found = relay[0]
    found.lead("/p", SESSION, model=MODEL)
    with pytest.raises(BrokenPipeError):
        found.answer("POST", "/p/chat/completions", b'{"model":"sampler_1"}', {}, "", write)
    assert found.end("/p") == set()


def turn(*contents: str, call: str = "call_1", seed: int | None = 7) -> dict[str, Any]:
    messages = [{"role": "tool", "content": each, "tool_call_id": call} for each in contents]
    return {"model": MODEL, "messages": messages, "seed": seed}


def test_each_turn_of_an_episode_has_a_seed_of_its_own(relay: tuple[Relay, str], upstream: Upstream) -> None:
    """With the same one, token k of each turn would be drawn with the same random number."""
    found, url = relay
    found.lead("/p", SESSION, model=MODEL)
    turns = [turn("a"), turn("a", "b"), turn("a", seed=8), turn("a"), turn("a", call="call_2"), turn("a", seed=None)]
    for each in turns:
        httpx.post(f"{url}/p/chat/completions", json=each)
    sent = [json.loads(each.content) for each in upstream.asked]
    assert [{**each, "seed": 0} for each in sent] == [{**each, "seed": 0} for each in turns]
    first, longer, other, again, called, unseeded = (each["seed"] for each in sent)
    assert len({7, first, longer, other}) == 4
    assert all(0 <= each < 2**31 for each in (first, longer, other))
    assert first == again == called, "the ids of calls are random"
    assert unseeded is None


@pytest.mark.parametrize("body", [b'{"model":"other"}', b"{}", b"[]", b"{", b"\xff", b"[" * 100_000])
def test_an_episode_can_name_its_own_model_alone(relay: tuple[Relay, str], upstream: Upstream, body: bytes) -> None:
    found, url = relay
    found.lead("/p", SESSION, model=MODEL)
    assert httpx.post(f"{url}/p/chat/completions", content=body).status_code == 404
    assert httpx.get(f"{url}/p/models").status_code == 404
    assert not upstream.asked


@pytest.mark.parametrize(
    ("method", "route"),
    [
        ("POST", "/api/v1/create_session"),
        ("POST", "/../api/v1/create_session"),
        ("POST", "/chat/completions/../../api/v1/create_session"),
        ("POST", "/chat/completions?x=1"),
        ("GET", "/chat/completions"),
        ("GET", ""),
    ],
)
def test_nothing_else_of_the_server_is_reached(
    relay: tuple[Relay, str], upstream: Upstream, method: str, route: str
) -> None:
    found, url = relay
    path = found.new_path()
    found.lead(path, SESSION, model=MODEL)
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        # By hand: a client would tidy the path up.
        connection.sendall(f"{method} {path}{route} HTTP/1.1\r\nContent-Length: 2\r\n\r\n{{}}".encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 404 ")
    assert not upstream.asked


def test_a_path_leads_where_the_run_says_and_nowhere_afterwards(relay: tuple[Relay, str], upstream: Upstream) -> None:
    found, url = relay
    path = found.new_path()
    assert httpx.post(f"{url}{path}/completions", json={"model": MODEL}).status_code == 404
    found.lead(path, SESSION, model=MODEL)
    assert (
        httpx.post(f"{url}{path}/completions", json={"model": MODEL}).json()["path"].endswith("/rollout_1/completions")
    )
    found.end(path)
    assert httpx.post(f"{url}{path}/completions", json={"model": MODEL}).status_code == 404
    assert httpx.post(f"{url}/guess/completions", json={"model": MODEL}).status_code == 404
    assert len(upstream.asked) == 1


@pytest.mark.parametrize("length", ["", "-1", "x", str(MAX_BODY + 1)])
def test_a_body_that_is_too_long_or_has_no_length_is_refused(
    relay: tuple[Relay, str], upstream: Upstream, length: str
) -> None:
    found, url = relay
    path = found.new_path()
    found.lead(path, "/v1")
    host, port = url.removeprefix("http://").split(":")
    header = f"Content-Length: {length}\r\n" if length else ""
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(f"POST {path}/completions HTTP/1.1\r\n{header}\r\n".encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")
    assert not upstream.asked
