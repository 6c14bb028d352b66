"""The record of campaigns goes on where it ended."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from soak.__main__ import RECORD
from soak.record import RUNS, TRIALS, Run, Trials, next_number

TEXT = f"""# Proof

Before.

{RUNS.begin}

{RUNS.head}
{RUNS.end}

Between.

{TRIALS.begin}

{TRIALS.head}
{TRIALS.end}

After.
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "proof.md"
    file.write_text(TEXT)
    return file


def run(first: int, seeds: int, campaign: str = "register") -> Run:
    return Run(campaign, "2026-01-02", "make soak SEEDS=5", first, seeds, 0, 12.3)


def trials(first: int, times: int, figures: str = "first answer 0.5 / 0.9 / 1.1 s") -> Trials:
    return Trials("coordinator-kill (sqlite)", "2026-01-02", "make soak KILLS=5", first, times, 1, figures)


def test_a_campaign_that_goes_on_keeps_what_another_one_has_written_meanwhile(path: Path) -> None:
    TRIALS.put(path, trials(0, 3))
    other = msgspec.structs.replace(trials(0, 1), campaign="another")
    TRIALS.put(path, other)
    TRIALS.put(path, trials(0, 5))
    assert TRIALS.read(path) == [trials(0, 5), other]


def test_what_is_written_is_read_again_and_the_prose_stays(path: Path) -> None:
    assert RUNS.read(path) == []
    RUNS.write(path, [run(0, 100)])
    RUNS.write(path, [*RUNS.read(path), run(100, 50), run(0, 7, "other")])
    assert RUNS.read(path) == [run(0, 100), run(100, 50), run(0, 7, "other")]
    text = path.read_text()
    assert text.startswith("# Proof\n\nBefore.\n")
    assert text.endswith("\nAfter.\n")


def test_the_tables_do_not_disturb_each_other(path: Path) -> None:
    RUNS.write(path, [run(0, 100)])
    TRIALS.write(path, [trials(0, 3)])
    RUNS.write(path, [run(0, 100), run(100, 1)])
    assert RUNS.read(path) == [run(0, 100), run(100, 1)]
    assert TRIALS.read(path) == [trials(0, 3)]
    assert "\nBetween.\n" in path.read_text()


def test_figures_cannot_break_the_table(path: Path) -> None:
    TRIALS.write(path, [trials(0, 3, "a | b")])
    assert TRIALS.read(path) == [trials(0, 3, "a / b")]


def test_a_campaign_goes_on_after_its_last_seed() -> None:
    runs = [run(0, 100), run(100, 50), run(0, 7, "other")]
    assert next_number(runs, "register") == 150
    assert next_number(runs, "other") == 7
    assert next_number(runs, "new") == 0
    assert next_number([trials(0, 3), trials(3, 60)], "coordinator-kill (sqlite)") == 63


def test_a_file_without_the_table_is_refused(tmp_path: Path) -> None:
    (tmp_path / "proof.md").write_text("nothing here")
    with pytest.raises(ValueError, match="no table"):
        RUNS.read(tmp_path / "proof.md")


def test_the_committed_record_can_be_read() -> None:
    assert all(each.violations == 0 for each in RUNS.read(RECORD))
    assert all(each.violations == 0 for each in TRIALS.read(RECORD))
