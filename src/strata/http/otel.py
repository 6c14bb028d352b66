"""Exports spans to an OpenTelemetry collector: which variables turn it on, protocol, and the errors of a wrong
configuration.

The standard variables configure it (`OTEL_EXPORTER_OTLP_ENDPOINT` and the others of the OpenTelemetry SDK). This is the
only module that imports OpenTelemetry.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from strata import __version__
from strata.base import log, trace
from strata.base.errors import Code, StrataError

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Tracer as ApiTracer

ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_log = log.get(__name__)


def is_wanted(environ: Mapping[str, str]) -> bool:
    """Says whether the variables ask for traces."""
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or environ.get("OTEL_TRACES_EXPORTER", "otlp") != "otlp":
        return False
    return any(environ.get(name) for name in ENDPOINTS)


def check(environ: Mapping[str, str]) -> None:
    """UNSUPPORTED or INVALID if traces are wanted and this installation cannot export them as configured."""
    if not is_wanted(environ):
        return
    try:
        import opentelemetry.exporter.otlp.proto.http
        import opentelemetry.sdk  # noqa: F401 - whether they are there
    except ModuleNotFoundError as error:
        name = next(name for name in ENDPOINTS if environ.get(name))
        raise StrataError(
            Code.UNSUPPORTED,
            f"{name} asks for traces, and what exports them is not installed",
            hint="pip install 'strata-train[otel]', or unset the variable",
        ) from error
    protocol = next((environ[each] for each in _PROTOCOLS if environ.get(each)), "http/protobuf")
    if protocol != "http/protobuf":
        raise StrataError(Code.INVALID, f"traces are exported as http/protobuf, not as {protocol}", hint=_PROTOCOLS[1])


def configure(service: str, environ: Mapping[str, str]) -> Callable[[], None]:
    """Export the spans of this process if its variables ask for it. Call what is returned when the process ends."""
    check(environ)
    if not is_wanted(environ):
        return lambda: None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    named = {} if environ.get("OTEL_SERVICE_NAME") else {"service.name": service}
    provider = TracerProvider(
        resource=Resource.create({**named, "service.version": __version__}), shutdown_on_exit=False
    )
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.install(OtelTracer(provider.get_tracer("strata", __version__)))
    _log.info("traces_exported", service=service)

    def stop() -> None:
        trace.install(None)
        provider.shutdown()

    return stop


def follow_program() -> None:
    """Opens spans with the tracer of the program around this library, if that uses OpenTelemetry."""
    if "opentelemetry.trace" in sys.modules:
        from opentelemetry.trace import get_tracer

        trace.install(OtelTracer(get_tracer("strata", __version__)))


class OtelTracer:
    """Opens spans of OpenTelemetry. Messages of exceptions stay out of them: they may quote what a client sent."""

    def __init__(self, tracer: ApiTracer) -> None:
        self._tracer = tracer

    @contextmanager
    def span(
        self,
        name: str,
        kind: trace.SpanKind,
        parent: str,
        links: Sequence[str],
        attributes: dict[str, str | int],
    ) -> Iterator[trace.TraceSpan]:
        from opentelemetry.trace import Link, SpanKind, StatusCode, get_current_span

        with self._tracer.start_as_current_span(
            name,
            context=_context_of(parent) if parent else None,
            kind=SpanKind[kind.upper()],
            attributes={f"strata.{key}": value for key, value in attributes.items()},
            links=[Link(get_current_span(_context_of(each)).get_span_context()) for each in links],
            record_exception=False,
            set_status_on_exception=False,
        ) as opened:
            try:
                yield opened
            except BaseException:
                opened.set_status(StatusCode.ERROR)
                raise

    def traceparent(self) -> str:
        from opentelemetry.trace import get_current_span

        context = get_current_span().get_span_context()
        if not context.is_valid:
            return ""
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def _context_of(traceparent: str) -> Context:
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({trace.HEADER: traceparent})
