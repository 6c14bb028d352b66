"""What the Prometheus metrics of all servers share: registry, time buckets, counters of calls, and the listener of `GET
/metrics` with its limits.

The listener is for processes without an HTTP server. It needs no web framework, so the agent can use it too.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from bisect import bisect_left
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    Summary,
    disable_created_metrics,
)
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from strata import __version__
from strata.base import log
from strata.base.errors import Code, StrataError

MEDIA_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
TIMES_S: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
FRESH_S: Final = 5.0
"""Values that are read for a scrape serve all scrapes for so long."""
PATH: Final = "/metrics"
MAX_HEAD: Final = 8 * 1024
REQUEST_S: Final = 10.0
"""A request is read and answered within this, or its connection is closed."""
MAX_CONNECTIONS: Final = 16
_STATUS: Final = {Code.UNAUTHENTICATED: 401, Code.FORBIDDEN: 403, Code.NOT_FOUND: 404, Code.UNSUPPORTED: 405}
_log = log.get(__name__)

CheckToken = Callable[[str], None]
"""Raises UNAUTHENTICATED or FORBIDDEN unless this `Authorization` header may read the metrics."""


def new_registry() -> CollectorRegistry:
    """Makes a registry without the `_created` series of each counter: it would repeat the start of the process."""
    disable_created_metrics()  # type: ignore[no-untyped-call]
    return CollectorRegistry()


def process_registry(prefix: str) -> CollectorRegistry:
    """The registry of a server that is one process: with its version, its memory, processor time and open files."""
    registry = new_registry()
    ProcessCollector(registry=registry)
    Gauge(f"{prefix}info", "1, with the version that runs", ("version",), registry=registry).labels(__version__).set(1)
    return registry


@dataclass(frozen=True)
class MetricFactory:
    """Makes the metrics of one server: with its prefix, in its registry, and all times in the same buckets."""

    prefix: str
    registry: CollectorRegistry

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"{self.prefix}{name}", text, labels, registry=self.registry)

    def gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"{self.prefix}{name}", text, labels, registry=self.registry)

    def histogram(self, name: str, text: str, *labels: str) -> Histogram:
        return Histogram(f"{self.prefix}{name}", text, labels, registry=self.registry, buckets=TIMES_S)

    def plain_histogram(self, name: str, text: str) -> PlainHistogram:
        """Makes a histogram that only one thread records, and often."""
        found = PlainHistogram(f"{self.prefix}{name}", text)
        self.registry.register(found)
        return found

    def summary(self, name: str, text: str) -> Summary:
        return Summary(f"{self.prefix}{name}", text, registry=self.registry)

    def calls(self, count: MetricText, seconds: MetricText, *labels: str) -> CallMetrics:
        """A counter with the label "status" besides, and a histogram."""
        found = CallMetrics(self.prefix, count, seconds, labels)
        self.registry.register(found)
        return found


MetricText = tuple[str, str]
"""The name of a metric after its prefix, and its help text."""
RecordCall = Callable[[str, float], None]
"""Called with the status of a reply, and the seconds it took."""


class CallMetrics(Collector):
    """Calls that a server answered, by status, and their times. One thread records, so the numbers need no locks.

    A counter and a histogram of the library cost a call seven times as much, and a heartbeat costs little else.
    """

    def __init__(self, prefix: str, count: MetricText, seconds: MetricText, labels: Sequence[str]) -> None:
        self._prefix = prefix
        self._count = count
        self._seconds = seconds
        self._labels = labels
        self._series: dict[tuple[str, ...], _CallSeries] = {}

    def recorder(self, *labels: str, timed: bool = True) -> RecordCall:
        """Returns what records the calls with these labels; without their times unless they are `timed`."""
        series = self._series.setdefault(labels, _CallSeries(_Times() if timed else None))
        statuses, times = series.statuses, series.times

        def record(status: str, took_s: float) -> None:
            statuses[status] = statuses.get(status, 0) + 1
            if times is not None:
                times.record(took_s)

        return record

    def collect(self) -> Iterator[Metric]:
        count = CounterMetricFamily(f"{self._prefix}{self._count[0]}", self._count[1], labels=(*self._labels, "status"))
        seconds = HistogramMetricFamily(f"{self._prefix}{self._seconds[0]}", self._seconds[1], labels=self._labels)
        for labels, series in list(self._series.items()):
            for status, number in list(series.statuses.items()):
                count.add_metric((*labels, status), number)
            if series.times is not None:
                seconds.add_metric(labels, series.times.cumulative(), series.times.sum_s)
        yield count
        yield seconds


class PlainHistogram(Collector):
    """A histogram of times without labels. One thread records, so the numbers need no locks."""

    def __init__(self, name: str, text: str) -> None:
        self._name = name
        self._text = text
        self._times = _Times()
        self.observe: Final = self._times.record

    def collect(self) -> Iterator[Metric]:
        found = HistogramMetricFamily(self._name, self._text)
        found.add_metric((), self._times.cumulative(), self._times.sum_s)
        yield found


@dataclass
class _Times:
    buckets: list[int] = field(default_factory=lambda: [0] * (len(TIMES_S) + 1))
    """Counts of calls that took at most so long as each of `TIMES_S`, and longer than the one before it."""
    sum_s: float = 0.0

    def record(self, took_s: float) -> None:
        self.buckets[bisect_left(TIMES_S, took_s)] += 1
        self.sum_s += took_s

    def cumulative(self) -> list[tuple[str, float]]:
        bounds = [*map(floatToGoString, TIMES_S), "+Inf"]
        return list(zip(bounds, accumulate(self.buckets), strict=True))


@dataclass
class _CallSeries:
    times: _Times | None
    statuses: dict[str, int] = field(default_factory=dict)


@contextlib.asynccontextmanager
async def serve_metrics(
    address: str, render: Callable[[], bytes], check: CheckToken, tls: ssl.SSLContext | None = None
) -> AsyncIterator[str]:
    """Answer `GET /metrics` on HOST:PORT, and give its URL. A caller is authenticated before its path is read."""
    connections: set[asyncio.StreamWriter] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(connections) >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        connections.add(writer)
        try:
            async with asyncio.timeout(REQUEST_S):
                writer.write(_answer(await reader.readuntil(b"\r\n\r\n"), render, check))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError):
            writer.transport.abort()
        finally:
            connections.discard(writer)

    handshake_s = None if tls is None else REQUEST_S
    listener = _listen(address)
    server = await asyncio.start_server(
        serve, sock=listener, limit=MAX_HEAD, ssl=tls, ssl_handshake_timeout=handshake_s
    )
    host, port = listener.getsockname()[:2]
    try:
        yield f"{'http' if tls is None else 'https'}://{f'[{host}]' if ':' in host else host}:{port}{PATH}"
    finally:
        server.close()
        for writer in list(connections):
            writer.transport.abort()
        await server.wait_closed()


def _listen(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    try:
        return socket.create_server((host, int(port)), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, ValueError, OverflowError) as error:
        raise StrataError(Code.UNAVAILABLE, f"cannot serve metrics on {address}: {error}") from error


def _check_request(head: str, check: CheckToken) -> None:
    request, *lines = head.split("\r\n")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    check(headers.get("authorization", ""))
    method, _, rest = request.partition(" ")
    if rest.partition(" ")[0].partition("?")[0] != PATH:
        raise StrataError(Code.NOT_FOUND, f"there is nothing here but {PATH}")
    if method != "GET":
        raise StrataError(Code.UNSUPPORTED, "only GET is possible here")


def _answer(head: bytes, render: Callable[[], bytes], check: CheckToken) -> bytes:
    status, media_type = 200, MEDIA_TYPE
    try:
        _check_request(head.decode("latin-1"), check)
        body = render()
    except StrataError as error:
        status, media_type = _STATUS.get(error.code, 503), "text/plain; charset=utf-8"
        body = f"{error.message}\n".encode()
        _log.info("metrics_refused", status=status)
    return (
        f"HTTP/1.1 {status} {'OK' if status == 200 else 'Refused'}\r\ncontent-type: {media_type}\r\n"
        f"content-length: {len(body)}\r\ncache-control: no-store\r\nconnection: close\r\n\r\n"
    ).encode() + body
