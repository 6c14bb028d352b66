"""When traces are exported, and when a process refuses to start because it could not."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping

import pytest

from strata.base import trace
from strata.base.errors import Code, StrataError
from strata.http import otel
from tests.support.otlp import receiving

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({}, False),
        (ENDPOINT, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:4318/v1/traces"}, True),
        ({**ENDPOINT, "OTEL_SDK_DISABLED": "true"}, False),
        ({**ENDPOINT, "OTEL_TRACES_EXPORTER": "none"}, False),
    ],
)
def test_the_standard_variables_decide(environ: Mapping[str, str], wanted: bool) -> None:
    assert otel.is_wanted(environ) is wanted


def test_another_protocol_than_that_of_the_exporter_is_refused() -> None:
    with pytest.raises(StrataError) as refused:
        otel.check({**ENDPOINT, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"})
    assert refused.value.code is Code.INVALID


def test_without_the_extra_only_a_process_that_is_to_export_traces_refuses_to_start() -> None:
    """In a process whose installation has no exporter."""
    program = (
        "import sys; sys.modules['opentelemetry.exporter'] = None\n"
        "from strata.http import otel; from strata.base import trace\n"
        "otel.configure('x', {})()\n"
        "with trace.span('nothing') as span: assert span is None and trace.traceparent() == ''\n"
        f"otel.configure('x', {ENDPOINT!r})\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert "StrataError" in ended.stderr
    assert "what exports them is not installed" in ended.stderr


def test_spans_are_exported_with_their_parents_and_links_and_without_messages_of_errors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with receiving() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        stop = otel.configure("probe", {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url})
        try:
            remote = f"00-{'a' * 32}-{'b' * 16}-01"
            with trace.span("outer", kind="server", parent=remote, links=[remote], job="j1"):
                assert trace.trace_id(trace.traceparent()) == "a" * 32
                with pytest.raises(StrataError), trace.span("inner"):
                    raise StrataError(Code.INVALID, "what a client sent")
            assert trace.continued("none", "").__class__.__name__ == "nullcontext"
        finally:
            stop()
        assert trace.traceparent() == ""
        inner, outer = receiver.spans
        assert (outer.trace, outer.parent, inner.parent) == ("a" * 32, "b" * 16, outer.span)
        assert outer.attributes == {"strata.job": "j1"}
        assert not inner.attributes


@pytest.mark.parametrize(
    "text", ["", "00-0-0-00", f"00-{'0' * 32}-{'b' * 16}-01", f"00-{'A' * 32}-{'b' * 16}-01", "x" * 55]
)
def test_a_text_that_is_no_traceparent_has_no_trace(text: str) -> None:
    assert trace.trace_id(text) == ""
