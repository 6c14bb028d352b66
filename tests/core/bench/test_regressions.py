"""When a case is red beside the last release, and which losses docs/benchmarks.md explains."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from bench.regressions import (
    BENCHES,
    EXPLAINED,
    HEADING,
    NOT_COMPARED,
    Case,
    Release,
    compare_release,
    find_losses,
    find_red,
    read_explained,
)

CLAIM = Case("fleet", "http.sqlite.claim")
PASS = Case("train", "pass.lora")
TABLE = f"""# Benchmarks
{HEADING}
Why.

| bench | case | release | down to | why |
|---|---|---|---|---|
{{rows}}

## Another section

| not | of | this | table |
|---|---|---|---|
"""


def page(*rows: str) -> str:
    return TABLE.format(rows="\n".join(rows))


def test_a_case_that_lost_six_percent_in_two_runs_is_red() -> None:
    assert find_red([{CLAIM: 0.94, PASS: 1.0}, {CLAIM: 0.94, PASS: 1.0}], {}) == {CLAIM}


def test_a_case_that_lost_in_one_run_of_two_is_not_red() -> None:
    assert find_red([{CLAIM: 0.94, PASS: 1.0}, {CLAIM: 0.96, PASS: 0.94}], {}) == set()


def test_one_run_makes_nothing_red_but_has_losses_to_repeat() -> None:
    assert find_red([{CLAIM: 0.5}], {}) == set()
    assert find_losses({CLAIM: 0.5, PASS: 0.95}, {}) == {CLAIM}


def test_an_explained_loss_is_not_red_down_to_the_ratio_that_was_explained() -> None:
    explained = read_explained(page("| fleet | `http.sqlite.claim` | 0.2.0 | 0.90 | Claims count amounts. |"), "0.2.0")
    assert explained == {CLAIM: 0.9}
    assert find_red([{CLAIM: 0.94}, {CLAIM: 0.93}], explained) == set()
    assert find_red([{CLAIM: 0.89}, {CLAIM: 0.88}], explained) == {CLAIM}


def test_an_explanation_never_makes_the_limit_stricter() -> None:
    assert find_losses({CLAIM: 0.96}, {CLAIM: 0.99}) == set()


def test_a_loss_that_was_explained_beside_an_earlier_release_is_not_explained_beside_this_one() -> None:
    assert read_explained(page("| train | `pass.lora` | 0.2.0 | 0.90 | A reason. |"), "0.3.0") == {}


@pytest.mark.parametrize(
    "row",
    [
        "| train | `pass.lora` | 0.2.0 | 0.90 |  |",
        "| train | pass.lora | 0.2.0 | 0.90 | A reason. |",
        "| train | `pass.lora` | 0.2.0 | 1 | A reason. |",
        "| nothing | `pass.lora` | 0.2.0 | 0.90 | A reason. |",
    ],
)
def test_a_row_without_a_reason_or_with_a_wrong_field_is_refused(row: str) -> None:
    with pytest.raises(ValueError, match=r"docs/benchmarks\.md should have"):
        read_explained(page(row), "0.2.0")


def test_a_page_without_the_table_is_refused() -> None:
    with pytest.raises(ValueError, match="no section"):
        read_explained("# Benchmarks\n", "0.2.0")


def test_the_page_of_this_tree_can_be_read() -> None:
    assert {case.bench for case in read_explained(EXPLAINED.read_text(encoding="utf-8"), "0.2.0")} <= set(BENCHES)


def test_without_a_recorded_release_nothing_is_compared_and_nothing_is_green(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert compare_release(tmp_path / "released.toml") == NOT_COMPARED
    assert capsys.readouterr().out == "nothing was compared: bench/released.toml records no release yet\n"


def test_the_record_of_a_release_has_a_whole_commit_and_a_whole_digest() -> None:
    text = 'version = "0.2.0"\ncommit = "{commit}"\nwheel_sha256 = "{digest}"\n'
    whole = text.format(commit="1f" * 20, digest="a7" * 32)
    assert msgspec.toml.decode(whole, type=Release).commit == "1f" * 20
    with pytest.raises(msgspec.ValidationError, match="commit"):
        msgspec.toml.decode(text.format(commit="1f1f1f1f", digest="a7" * 32), type=Release)
