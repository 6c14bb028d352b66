"""The record of campaigns goes on where it ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from soak import record
from soak.__main__ import RECORD

TEXT = f"""# Proof

Before.

{record._BEGIN}

{record._HEAD}
{record._END}

After.
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "proof.md"
    file.write_text(TEXT)
    return file


def run(first: int, seeds: int, campaign: str = "register") -> record.Run:
    return record.Run(campaign, "2026-01-02", "make soak SEEDS=5", first, seeds, 0, 12.3)


def test_what_is_written_is_read_again_and_the_prose_stays(path: Path) -> None:
    assert record.read(path) == []
    record.write(path, [run(0, 100)])
    record.write(path, [*record.read(path), run(100, 50), run(0, 7, "other")])
    assert record.read(path) == [run(0, 100), run(100, 50), run(0, 7, "other")]
    text = path.read_text()
    assert text.startswith("# Proof\n\nBefore.\n")
    assert text.endswith("\nAfter.\n")


def test_a_campaign_goes_on_after_its_last_seed(path: Path) -> None:
    runs = [run(0, 100), run(100, 50), run(0, 7, "other")]
    assert record.next_seed(runs, "register") == 150
    assert record.next_seed(runs, "other") == 7
    assert record.next_seed(runs, "new") == 0


def test_a_file_without_the_table_is_refused(tmp_path: Path) -> None:
    (tmp_path / "proof.md").write_text("nothing here")
    with pytest.raises(ValueError, match="no table"):
        record.read(tmp_path / "proof.md")


def test_the_committed_record_can_be_read() -> None:
    assert all(run.violations == 0 for run in record.read(RECORD))
