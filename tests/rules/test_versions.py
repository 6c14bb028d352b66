"""What scripts/versions.py says of a run, and which lowest versions it asks for. It needs an index to run whole."""

from __future__ import annotations

import tomllib
from typing import Final

import pytest

from scripts.versions import (
    LOWEST,
    PAGE,
    PARTS,
    ROOT,
    Result,
    lowest_requirements,
    pinned_versions,
    record,
    result_rows,
    variable_of,
)

HEAD: Final = "# Tested versions\n\nText.\n\n| package | version | result | date |\n|---|---|---|---|\n"


def test_a_result_says_how_many_passed_what_failed_and_which_check() -> None:
    assert str(Result(7)) == "7 tests passed"
    assert str(Result(7, ["a", "b", "c", "d"])) == "4 of 11 tests failed: a, b, c"
    assert str(Result(7, checks=["table --check"])) == "7 tests passed; table --check failed"
    assert Result(7).good
    assert not Result(7, ["a"]).good
    assert not Result(7, checks=["table --check"]).good


def test_a_row_replaces_that_of_the_same_version_and_stands_before_older_ones() -> None:
    page = record(HEAD, {("b", "1.9.0"): "1 of 2 tests failed: x", ("a", "2.0"): "3 tests passed"}, "2026-01-01")
    page = record(page, {("b", "1.10.0"): "4 tests passed"}, "2026-01-02")
    page = record(page, {("b", "1.9.0"): "2 tests passed"}, "2026-01-03")
    assert page == HEAD + (
        "| `a` | 2.0 | 3 tests passed | 2026-01-01 |\n"
        "| `b` | 1.10.0 | 4 tests passed | 2026-01-02 |\n"
        "| `b` | 1.9.0 | 2 tests passed | 2026-01-03 |\n"
    )


def test_the_committed_page_is_one_that_the_lanes_write() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert record(page, {}, "2026-01-01") == page


def test_what_tests_install_themselves_has_one_row_that_names_the_others() -> None:
    assert result_rows(Result(2), {"tinker": "0.38.0"}, {}) == {("tinker", "0.38.0"): "2 tests passed"}
    assert result_rows(Result(2), {}, {"tinker-cookbook": "0.6.1", "tinker": "0.38.0"}) == {
        ("tinker-cookbook", "0.6.1"): "2 tests passed, with tinker 0.38.0"
    }


def test_a_pin_of_dev_gives_way_to_the_lowest_version_of_an_extra_and_tools_are_pinned() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    pins = pinned_versions((ROOT / "constraints.txt").read_text(encoding="utf-8"))
    wanted = lowest_requirements(project, pins)
    (transformers,) = [each for each in wanted if each.startswith("transformers")]
    assert "==" not in transformers
    assert any(each.startswith("accelerate>=") for each in wanted)
    assert {f"{each}=={pins[each]}" for each in ("schemathesis", "hypothesis", "pytest", "tinker")} <= set(wanted)


@pytest.mark.parametrize("name", [*PARTS, "lowest"])
def test_every_test_of_a_lane_exists_and_reads_its_versions(name: str) -> None:
    tests = LOWEST if name == "lowest" else PARTS[name].tests
    assert [test for test in tests if not (ROOT / test).exists()] == []
    sources = "".join(each.read_text(encoding="utf-8") for each in (ROOT / "tests" / "engines").glob("*.py"))
    versions = [] if name == "lowest" else PARTS[name].versions
    assert [each for each in versions if f'"{variable_of(each)}"' not in sources] == []
