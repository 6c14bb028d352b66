from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from hypothesis import given
from hypothesis import strategies as st

from strata.fleet.core.report import MAX_LINE_BYTES, MetricsReport, ProgressReport, parse_lines

TRAINER: Final = """
import os
from strata.fleet.trainer import progress, report
class Tensor:
    def __float__(self): return 0.5
report(step=1, loss=Tensor(), accuracy=1)
report(loss=float("nan"), worst=float("-inf"))
progress(2.0, "x" * 300)
"""


def run(*, metrics: str | None, pass_fds: tuple[int, ...] = ()) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("STRATA_")}  # noqa: TID251
    subprocess.run(
        [sys.executable, "-c", TRAINER],
        env=environ | ({} if metrics is None else {"STRATA_METRICS": metrics}),
        pass_fds=pass_fds,
        check=True,
        timeout=60,
    )


def check(text: bytes) -> None:
    reports, refused = parse_lines(text.splitlines())
    assert refused == 0
    first, second, last = reports
    assert isinstance(first, MetricsReport)
    assert (first.step, first.values) == (1, {"loss": 0.5, "accuracy": 1.0})
    assert isinstance(second, MetricsReport)
    assert (second.step, second.values) == (None, {"loss": "nan", "worst": "-inf"})
    assert isinstance(last, ProgressReport)
    assert (last.fraction, len(last.note)) == (1.0, 256)


def test_what_a_trainer_reports_into_a_file_can_be_read(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    run(metrics=str(file))
    check(file.read_bytes())


def test_what_a_trainer_reports_into_a_descriptor_can_be_read() -> None:
    reading, writing = os.pipe()
    run(metrics=f"fd:{writing}", pass_fds=(writing,))
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        check(pipe.read())


def test_without_an_agent_a_trainer_reports_nothing_and_runs() -> None:
    run(metrics=None)


@given(st.lists(st.binary(max_size=40).map(lambda line: line.replace(b"\n", b""))))
def test_lines_that_are_no_reports_are_counted_and_left_alone(lines: list[bytes]) -> None:
    mine = b'{"type":"progress","at_s":1.5,"fraction":0.5}'
    reports, refused = parse_lines([*lines, mine, b'{"type":"progress"}', b"{" * (MAX_LINE_BYTES + 1), b'["' * 9999])
    assert reports[-1:] == [ProgressReport(at_s=1.5, fraction=0.5)]
    assert refused == 3 + sum(bool(line.strip()) for line in lines)
