"""Calls to a training server: retries for 300 s with backoff (0.1 to 5 s), retried statuses, long polls, reply timeout
60 s.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import httpx
import msgspec

from strata.base import trace
from strata.base.clock import SystemClock
from strata.base.errors import Code, StrataError
from strata.base.retry import Backoff, date_s, retry_after_s

RETRY_FOR_S: Final = 300.0
"""How long requests to a server that is unreachable or too busy are retried."""
BACKOFF: Final = Backoff(first_s=0.1, most_s=5.0)
RETRY_STATUSES: Final = frozenset({429, 502, 503, 504})
REPLY_S: Final = 60.0
PROGRESS_S: Final = 2.0
"""How often progress is reported."""

Progress = Callable[[str], None]
"""Called with the position of a pending operation, as in `2nd in queue, ~12 s, running bob/forward_backward`."""


@dataclass(frozen=True)
class SendRequest:
    method: str
    path: str
    content: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = REPLY_S


class ServerCalls:
    def __init__(
        self,
        http: httpx.Client,
        *,
        sleep: Callable[[float], None] = time.sleep,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._http = http
        self._sleep = sleep
        self._chance = chance

    def send(self, request: SendRequest) -> httpx.Response:
        """The server's reply. If it is unreachable or too busy the request is retried: all requests are idempotent."""
        failures, waited_s = 0, 0.0
        while True:
            if self._http.is_closed:
                # By another thread, while this one waited.
                raise StrataError(Code.PRECONDITION, "this client of the training server is closed")
            received = self._exchange(request)
            if isinstance(received, httpx.Response) and received.status_code not in RETRY_STATUSES:
                return received
            if waited_s >= RETRY_FOR_S:
                raise _final_error(received)
            failures += 1
            jitter = self._chance()
            # Jitter: clients with the same Retry-After come back up to a quarter later.
            server_s = min(_retry_after_s(received), BACKOFF.most_s) * (1 + jitter / 4)
            pause_s = max(BACKOFF.delay_s(failures, jitter), server_s)
            self._sleep(pause_s)
            waited_s += pause_s

    def json(self, request: SendRequest) -> Any:
        """The JSON of a reply; an error reply is raised with the server's message."""
        reply = self.send(request)
        if reply.status_code >= 300:
            raise error_of(reply)
        return msgspec.json.decode(reply.content) if reply.content else None

    def wait_result(
        self, request_id: str, accept: str, timeout_s: float | None, progress: Progress | None
    ) -> httpx.Response:
        """The result of an operation, by long polling; DEADLINE if it is not there in time."""
        started_s = time.monotonic()
        while True:
            body: dict[str, Any] = {"request_id": request_id}
            left_s = None if timeout_s is None else timeout_s - (time.monotonic() - started_s)
            waits_s = [each for each in (PROGRESS_S if progress else None, left_s) if each is not None]
            if waits_s:
                body["wait_s"] = max(0.0, min(waits_s))
            reply = self.send(post("/api/v1/retrieve_future", body, accept=accept))
            if reply.status_code != 408:
                if reply.status_code >= 300:
                    raise error_of(reply)
                return reply
            reason = str(msgspec.json.decode(reply.content).get("queue_state_reason", ""))
            if left_s is not None and left_s <= 0:
                raise StrataError(Code.DEADLINE, f"no result within {timeout_s:g} seconds: {reason}")
            if progress is not None:
                progress(reason)

    def _exchange(self, request: SendRequest) -> httpx.Response | httpx.TransportError:
        try:
            with trace.span(f"{request.method} {request.path}", kind="client"):
                headers = dict(request.headers)
                if traceparent := trace.traceparent():
                    headers[trace.HEADER] = traceparent
                return self._http.request(
                    request.method, request.path, content=request.content, headers=headers, timeout=request.timeout_s
                )
        except httpx.TransportError as error:
            return error


def _retry_after_s(received: httpx.Response | httpx.TransportError) -> float:
    """The Retry-After of a reply. A date is compared with the server's own clock, since clocks differ."""
    if not isinstance(received, httpx.Response):
        return 0.0
    now_s = date_s(received.headers.get("date"), default_s=SystemClock().wall_s())
    return retry_after_s(received.headers.get("retry-after"), now_s=now_s)


def get(path: str) -> SendRequest:
    return SendRequest("GET", path, b"", {"Accept": "application/json"})


def post(path: str, body: Any, *, accept: str = "application/json") -> SendRequest:
    headers = {"Content-Type": "application/json", "Accept": accept}
    return SendRequest("POST", path, msgspec.json.encode(body), headers)


def error_of(reply: httpx.Response) -> StrataError:
    try:
        problem = msgspec.json.decode(reply.content)["error"]
        return StrataError(Code(problem["code"]), problem["message"], hint=problem["hint"], status=reply.status_code)
    except (msgspec.DecodeError, KeyError, TypeError, ValueError):
        return StrataError(Code.UNAVAILABLE, f"the server replied with status {reply.status_code}")


def _final_error(received: httpx.Response | httpx.TransportError) -> StrataError:
    if isinstance(received, httpx.Response):
        return error_of(received)
    hint = "does it run? strata serve CONFIG starts one, and says when it is ready"
    return StrataError(Code.UNAVAILABLE, f"the server cannot be reached: {received!r}", hint=hint)
