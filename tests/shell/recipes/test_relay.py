"""What a program that a run starts can reach of the server, and what it cannot."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass, field

import httpx
import pytest

from strata.sdk.recipes.relay import MAX_BODY, Relay, loopback_relay
from strata.sdk.server_calls import ServerCalls

KEY = "tml-key-of-the-run"


@dataclass
class Upstream:
    """A server that notes what it is asked."""

    asked: list[httpx.Request] = field(default_factory=list)
    lost: int = 0
    """Replies that do not arrive."""

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request)
        if len(self.asked) <= self.lost:
            raise httpx.ReadError("the connection broke", request=request)
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
    with loopback_relay(upstream.calls) as url:
        headers = {"Authorization": "Bearer none", "X-API-Key": "other"}
        reply = httpx.post(f"{url}/chat/completions", json={"model": "tiny"}, headers=headers)
        assert reply.json()["path"] == "/v1/chat/completions"
        assert httpx.get(f"{url}/models").json()["path"] == "/v1/models"
    sent = upstream.asked[0]
    assert sent.headers["x-api-key"] == KEY
    assert "authorization" not in sent.headers
    assert KEY not in str(reply.headers)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/models")


def test_only_replies_that_have_come_are_delivered(relay: tuple[Relay, str], upstream: Upstream) -> None:
    """A session has the lost one too."""
    upstream.lost = 1
    found, url = relay
    path = found.new_path()
    found.lead(path, "/v1/rollout_sessions/rollout_1")
    httpx.post(f"{url}{path}/chat/completions", json={})
    assert len(upstream.asked) == 2
    assert found.delivered("/v1/rollout_sessions/rollout_1") == {"chatcmpl-2"}


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
    found.lead(path, "/v1/rollout_sessions/rollout_1")
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        # By hand: a client would tidy the path up.
        connection.sendall(f"{method} {path}{route} HTTP/1.1\r\nContent-Length: 2\r\n\r\n{{}}".encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 404 ")
    assert not upstream.asked


def test_a_path_leads_where_the_run_says_and_nowhere_afterwards(relay: tuple[Relay, str], upstream: Upstream) -> None:
    found, url = relay
    path = found.new_path()
    assert httpx.post(f"{url}{path}/completions", json={}).status_code == 404
    found.lead(path, "/v1/rollout_sessions/rollout_1")
    assert httpx.post(f"{url}{path}/completions", json={}).json()["path"].endswith("/rollout_1/completions")
    found.lead(path, "")
    assert httpx.post(f"{url}{path}/completions", json={}).status_code == 404
    assert httpx.post(f"{url}/guess/completions", json={}).status_code == 404
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
