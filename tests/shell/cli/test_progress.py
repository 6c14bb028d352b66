"""A progress line: on a terminal alone, with a time that comes from the pace."""

from __future__ import annotations

import pytest

from strata.cli.progress import ProgressLine, RemainingTime


def test_the_rest_takes_as_long_as_the_pace_since_the_first_report_says() -> None:
    eta = RemainingTime()
    assert eta.estimate(100, 1000, 10.0) is None
    assert eta.estimate(100, 1000, 12.0) is None, "nothing is done yet"
    assert eta.estimate(400, 1000, 16.0) == pytest.approx(12.0)
    assert eta.estimate(1000, 1000, 28.0) == 0.0


def test_nothing_is_printed_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressLine("uploading") as report:
        report(1, 2)
        report.waiting("soon")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_a_terminal_gets_one_line_that_is_removed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    with ProgressLine("uploading", lambda amount: f"{amount:.0f} B") as report:
        report(0, 10)
        report(10, 10)
    drawn = capsys.readouterr().err.split("\r\x1b[K")
    assert drawn[1].startswith("uploading  ....................   0%  0 B of 10 B")
    assert drawn[2].startswith("uploading  #################### 100%  10 B of 10 B")
    assert drawn[-1] == ""
    assert all(len(line) < 60 for line in drawn)
