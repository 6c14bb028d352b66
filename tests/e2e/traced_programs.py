"""Programs of people who use OpenTelemetry: a training loop, and a trainer that continues the trace of its job."""

from __future__ import annotations

import os
import sys

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator


def provider(service: str, url: str) -> TracerProvider:
    made = TracerProvider(resource=Resource.create({"service.name": service}))
    made.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(f"{url}/v1/traces")))
    trace.set_tracer_provider(made)
    return made


def loop(url: str, server: str, key: str) -> None:
    from strata.sdk.train import Datum, TrainingServer

    made = provider("my-loop", url)
    with TrainingServer(server, key) as session:
        model = session.create_model("tiny", rank=4)
        with made.get_tracer("mine").start_as_current_span("my step"):
            model.forward_backward([Datum([1, 2, 3], [2, 3, 4])]).result()
    made.shutdown()


def trainer(url: str) -> None:
    made = provider("my-trainer", url)
    parent = TraceContextTextMapPropagator().extract({"traceparent": os.environ["TRACEPARENT"]})  # noqa: TID251
    with made.get_tracer("mine").start_as_current_span("my epoch", context=parent):
        print("trained", flush=True)
    made.shutdown()


if __name__ == "__main__":
    if sys.argv[1] == "loop":
        loop(*sys.argv[2:5])
    else:
        trainer(sys.argv[2])
