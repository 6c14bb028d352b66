"""A receiver of traces, as a collector of OpenTelemetry has one: OTLP over HTTP on a port of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class ReceivedSpan(NamedTuple):
    service: str
    name: str
    trace: str
    span: str
    parent: str
    attributes: dict[str, str]


class Receiver:
    def __init__(self) -> None:
        self.spans: list[ReceivedSpan] = []
        self.url = ""

    def take(self, body: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            named = {each.key: each.value.string_value for each in resource.resource.attributes}
            for scope in resource.scope_spans:
                for span in scope.spans:
                    values = {each.key: each.value.string_value for each in span.attributes}
                    ids = span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex()
                    self.spans.append(ReceivedSpan(named["service.name"], span.name, *ids, values))

    def named(self, service: str, name: str) -> list[ReceivedSpan]:
        return [each for each in self.spans if (each.service, each.name) == (service, name)]

    def of_trace(self, trace: str) -> dict[str, ReceivedSpan]:
        """By service and name."""
        return {f"{each.service}: {each.name}": each for each in self.spans if each.trace == trace}


@contextmanager
def receiving() -> Iterator[Receiver]:
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            receiver.take(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        receiver.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield receiver
        server.shutdown()
        thread.join()
