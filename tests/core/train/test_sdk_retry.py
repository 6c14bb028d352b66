"""A client that is refused for a while waits as long as the server asks, in whatever form, and not in step."""

from __future__ import annotations

import httpx
import pytest

from strata.sdk.flow import BACKOFF, Pause, SendRequest, send_with_retry

SEND = SendRequest("GET", "/api/v1/healthz")
DATE = "Sun, 06 Nov 1994 08:49:37 GMT"


def pauses(*replies: httpx.Response | httpx.TransportError, chance: float = 0.0) -> list[float]:
    """How long the flow waits after each of these."""
    flow = send_with_retry(SEND, chance=lambda: chance)
    assert next(flow) is SEND
    found = []
    for reply in replies:
        step = flow.send(reply)
        assert isinstance(step, Pause)
        found.append(step.seconds)
        assert next(flow) is SEND
    return found


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
