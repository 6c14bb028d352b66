"""A client that is refused for a while waits as long as the server asks, in whatever form, and not in step."""

from __future__ import annotations

import httpx
import pytest

from strata.base.errors import Code, StrataError
from strata.sdk.server_calls import BACKOFF, RETRY_FOR_S, SendRequest, ServerCalls, post

SEND = SendRequest("GET", "/api/v1/healthz")
DATE = "Sun, 06 Nov 1994 08:49:37 GMT"


class Replies:
    """A client, and a network that gives these replies one after the other and notes what was sent."""

    def __init__(self, *replies: httpx.Response | httpx.TransportError, chance: float = 0.0) -> None:
        self._left = iter(replies)
        self.sent: list[bytes] = []
        self.pauses_s: list[float] = []
        http = httpx.Client(base_url="http://server", transport=httpx.MockTransport(self._reply))
        self.calls = ServerCalls(http, sleep=self.pauses_s.append, chance=lambda: chance)

    def _reply(self, request: httpx.Request) -> httpx.Response:
        self.sent.append(request.content)
        reply = next(self._left)
        if isinstance(reply, httpx.TransportError):
            raise reply
        return reply


def pauses(*replies: httpx.Response | httpx.TransportError, chance: float = 0.0) -> list[float]:
    """How long the client waits after each of these."""
    network = Replies(*replies, httpx.Response(200), chance=chance)
    network.calls.send(SEND)
    return network.pauses_s


def busy(**headers: str) -> httpx.Response:
    return httpx.Response(503, headers={name.replace("_", "-"): value for name, value in headers.items()})


@pytest.mark.parametrize(
    ("reply", "pause_s"),
    [
        (busy(retry_after="2"), 2.0),
        (busy(retry_after="3600"), BACKOFF.most_s),
        (busy(retry_after="Sun, 06 Nov 1994 08:49:40 GMT", date=DATE), 3.0),
        (busy(retry_after="Sun, 06 Nov 1994 08:49:30 GMT", date=DATE), 0.05),
        (busy(retry_after="Sun, 06 Nov 1994 08:49:30 GMT"), 0.05),
        (busy(retry_after="later"), 0.05),
        (busy(), 0.05),
        (httpx.ConnectError("refused"), 0.05),
    ],
)
def test_retry_after_may_be_seconds_a_date_or_nonsense(
    reply: httpx.Response | httpx.TransportError, pause_s: float
) -> None:
    assert pauses(reply) == [pause_s]


def test_clients_that_were_refused_together_do_not_return_together() -> None:
    assert pauses(busy(), busy(), busy(), chance=0.0) == [0.05, 0.1, 0.2]
    assert pauses(busy(), busy(), busy(), chance=0.5) == pytest.approx([0.075, 0.15, 0.3])
    assert pauses(busy(retry_after="2"), chance=0.8) == pytest.approx([2.4])


def test_a_server_that_is_away_or_busy_is_asked_again_with_growing_pauses() -> None:
    gone = httpx.ConnectError("refused")
    network = Replies(gone, gone, busy(retry_after="3"), busy(), httpx.Response(200, json={"a": 1}), chance=1.0)
    assert network.calls.json(post("/x", {"b": 2})) == {"a": 1}
    # Half of the back-off is by chance, and so is a quarter beyond what the server asked for.
    assert network.pauses_s == pytest.approx([0.1, 0.2, 3.75, 0.8])
    assert network.sent == [b'{"b":2}'] * 5


def test_patience_ends() -> None:
    network = Replies(*[httpx.ReadError("broken")] * 1000)
    with pytest.raises(StrataError) as given_up:
        network.calls.json(SEND)
    assert given_up.value.code is Code.UNAVAILABLE
    assert sum(network.pauses_s) >= RETRY_FOR_S


def test_a_client_that_another_thread_closes_asks_no_more() -> None:
    network = Replies(busy(), httpx.Response(200))
    http = httpx.Client(base_url="http://server", transport=httpx.MockTransport(network._reply))
    calls = ServerCalls(http, sleep=lambda _: http.close(), chance=lambda: 0.0)
    with pytest.raises(StrataError, match="is closed") as raised:
        calls.send(SEND)
    assert raised.value.code is Code.PRECONDITION
    assert len(network.sent) == 1


def test_a_result_is_asked_for_until_it_is_there() -> None:
    waiting = {"type": "try_again", "queue_state_reason": "2nd in queue"}
    network = Replies(
        httpx.Response(408, json=waiting), httpx.Response(408, json=waiting), httpx.Response(200, json={})
    )
    reasons: list[str] = []
    found = network.calls.wait_result("f", "application/json", None, reasons.append)
    assert found.status_code == 200
    assert reasons == ["2nd in queue"] * 2
    assert network.pauses_s == []
