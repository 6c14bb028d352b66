"""Spans of distributed traces: opening, `traceparent` in headers and variables, and installing a tracer.

A trace crosses processes as a W3C `traceparent`: in a header of HTTP, a field of a ZMQ message, a variable of a child.
`strata.http.otel` has the tracer that exports spans.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Final, Literal, Protocol

HEADER: Final = "traceparent"
VARIABLE: Final = "TRACEPARENT"
"""The variable of a child process that carries the trace."""
SpanKind = Literal["internal", "server", "client", "producer", "consumer"]
_TRACEPARENT: Final = re.compile(r"00-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


class TraceSpan(Protocol):
    """A span that is open."""

    def set_attribute(self, key: str, value: str | int | float, /) -> None: ...

    def update_name(self, name: str, /) -> None: ...


class Tracer(Protocol):
    def span(
        self, name: str, kind: SpanKind, parent: str, links: Sequence[str], attributes: dict[str, str | int]
    ) -> AbstractContextManager[TraceSpan]: ...

    def traceparent(self) -> str:
        """Returns the header of the span that is open here; empty if none is."""


_NOTHING: Final = nullcontext[TraceSpan | None](None)
_installed: list[Tracer] = []
"""The tracer of the whole process, at most one, like the handlers of `logging`."""


def install(tracer: Tracer | None) -> None:
    _installed[:] = [] if tracer is None else [tracer]


def span(
    name: str,
    *,
    kind: SpanKind = "internal",
    parent: str = "",
    links: Sequence[str] = (),
    **attributes: str | int,
) -> AbstractContextManager[TraceSpan | None]:
    """Open a span below `parent`, or below the one that is open here. None if this process records no spans."""
    return _installed[0].span(name, kind, parent, links, attributes) if _installed else _NOTHING


def continued(name: str, parent: str, *, kind: SpanKind = "internal") -> AbstractContextManager[TraceSpan | None]:
    """A span of a trace that another process began; none if that process has sent no trace."""
    return span(name, kind=kind, parent=parent) if parent else _NOTHING


def traceparent() -> str:
    """Returns the header of the span that is open here, to be sent along; empty if there is none."""
    return _installed[0].traceparent() if _installed else ""


def trace_id(text: str) -> str:
    """The id of the trace in a `traceparent`; empty if the text is none."""
    match = _TRACEPARENT.fullmatch(text)
    return match[1] if match else ""
