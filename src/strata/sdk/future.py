"""One conversation with a training server, written once: a flow says what to send and is told what came back.

A flow does no input or output and knows no clock of its own, so the same one is driven by a blocking client and by an
asynchronous one.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, TypeVar

import httpx
import msgspec

from strata.base.clock import SystemClock
from strata.base.errors import Code, StrataError
from strata.base.retry import Backoff, date_s, retry_after_s

T = TypeVar("T")

PATIENCE_S: Final = 300.0
"""How long a server may be away, or too busy, before a request is given up."""
BACKOFF: Final = Backoff(first_s=0.1, most_s=5.0)
AGAIN: Final = frozenset({429, 502, 503, 504})
REPLY_S: Final = 60.0

Progress = Callable[[str], None]
"""Told where an operation stands that is waited for, as in `2nd in queue, ~12 s, running bob/forward_backward`."""


@dataclass(frozen=True)
class Send:
    method: str
    path: str
    content: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = REPLY_S


@dataclass(frozen=True)
class Pause:
    seconds: float


@dataclass(frozen=True)
class Waiting:
    reason: str


Step = Send | Pause | Waiting
Heard = httpx.Response | httpx.TransportError | None
Flow: TypeAlias = Generator[Step, Heard, T]


def exchange(
    send: Send, *, patience_s: float = PATIENCE_S, chance: Callable[[], float] = random.random
) -> Flow[httpx.Response]:
    """The server's answer. One that is away or too busy is asked again: whatever is sent here may be sent twice."""
    failures, waited_s = 0, 0.0
    while True:
        heard = yield send
        assert heard is not None
        if isinstance(heard, httpx.Response) and heard.status_code not in AGAIN:
            return heard
        if waited_s >= patience_s:
            raise _given_up(heard)
        failures += 1
        spread = chance()
        # Those who were asked to come back at the same moment do not: up to a quarter later.
        asked_s = min(_asked_s(heard), BACKOFF.most_s) * (1 + spread / 4)
        pause_s = max(BACKOFF.delay_s(failures, spread), asked_s)
        yield Pause(pause_s)
        waited_s += pause_s


def _asked_s(heard: httpx.Response | httpx.TransportError) -> float:
    """What the server wants in Retry-After. A date is compared with the server's own, since clocks differ."""
    if not isinstance(heard, httpx.Response):
        return 0.0
    now_s = date_s(heard.headers.get("date"), default_s=SystemClock().wall_s())
    return retry_after_s(heard.headers.get("retry-after"), now_s=now_s)


def call(send: Send) -> Flow[Any]:
    """The JSON of a reply; a refusal is raised with the server's own words."""
    reply = yield from exchange(send)
    if reply.status_code >= 300:
        raise refusal(reply)
    return msgspec.json.decode(reply.content) if reply.content else None


def wait(request_id: str, accept: str, *, timeout_s: float | None, poll_s: float | None) -> Flow[httpx.Response]:
    """The result of an operation, asked for until it is there; DEADLINE if it is not in time."""
    started_s = time.monotonic()
    while True:
        body: dict[str, Any] = {"request_id": request_id}
        left_s = None if timeout_s is None else timeout_s - (time.monotonic() - started_s)
        waits_s = [each for each in (poll_s, left_s) if each is not None]
        if waits_s:
            body["wait_s"] = max(0.0, min(waits_s))
        send = post("/api/v1/retrieve_future", body, accept=accept)
        reply = yield from exchange(send)
        if reply.status_code != 408:
            if reply.status_code >= 300:
                raise refusal(reply)
            return reply
        reason = str(msgspec.json.decode(reply.content).get("queue_state_reason", ""))
        if left_s is not None and left_s <= 0:
            raise StrataError(Code.DEADLINE, f"no result within {timeout_s:g} seconds: {reason}")
        yield Waiting(reason)


def post(path: str, body: Any, *, accept: str = "application/json") -> Send:
    headers = {"Content-Type": "application/json", "Accept": accept}
    return Send("POST", path, msgspec.json.encode(body), headers)


def refusal(reply: httpx.Response) -> StrataError:
    try:
        problem = msgspec.json.decode(reply.content)["error"]
        return StrataError(Code(problem["code"]), problem["message"], hint=problem["hint"], status=reply.status_code)
    except (msgspec.DecodeError, KeyError, TypeError, ValueError):
        return StrataError(Code.UNAVAILABLE, f"the server answered with status {reply.status_code}")


def _given_up(heard: httpx.Response | httpx.TransportError) -> StrataError:
    if isinstance(heard, httpx.Response):
        return refusal(heard)
    return StrataError(Code.UNAVAILABLE, f"the server cannot be reached: {heard!r}")


def run(flow: Flow[T], http: httpx.Client, progress: Progress | None = None) -> T:
    heard: Heard = None
    while True:
        try:
            step = flow.send(heard)
        except StopIteration as end:
            result: T = end.value
            return result
        heard = None
        match step:
            case Send():
                try:
                    heard = http.request(**_request(step))
                except httpx.TransportError as error:
                    heard = error
            case Pause(seconds=seconds):
                time.sleep(seconds)
            case Waiting(reason=reason) if progress is not None:
                progress(reason)


async def run_async(flow: Flow[T], http: httpx.AsyncClient, progress: Progress | None = None) -> T:
    heard: Heard = None
    while True:
        try:
            step = flow.send(heard)
        except StopIteration as end:
            result: T = end.value
            return result
        heard = None
        match step:
            case Send():
                try:
                    heard = await http.request(**_request(step))
                except httpx.TransportError as error:
                    heard = error
            case Pause(seconds=seconds):
                await asyncio.sleep(seconds)
            case Waiting(reason=reason) if progress is not None:
                progress(reason)


def _request(send: Send) -> dict[str, Any]:
    return {
        "method": send.method,
        "url": send.path,
        "content": send.content,
        "headers": dict(send.headers),
        "timeout": send.timeout_s,
    }
