"""What is experimental is found by what uses it, and reported in one line."""

from __future__ import annotations

import logging

import pytest

from strata.base import support


def test_each_experimental_capability_in_use_is_one_line_with_its_reason(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(support, "platform_marks", lambda: ("arm64",))
    with caplog.at_level(logging.WARNING):
        support.report_experimental(["model.compile", "parallel.tensor", "cuda"])
    lines = [(record.getMessage(), record.__dict__["fields"]) for record in caplog.records]
    assert {event for event, _ in lines} == {"experimental_feature"}
    assert [fields["name"] for _, fields in lines] == ["compiled layers", "CUDA devices", "arm64"]
    assert lines[0][1]["reason"] == "it ran: CPU ranks, where it is slower"


def test_what_is_core_or_supported_is_not_reported() -> None:
    assert not list(support.find_experimental(["parallel.tensor", "model.quantise", "sampling"]))
