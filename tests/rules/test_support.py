"""The table of levels is true: its tests exist and are in their tiers, and its page and the README follow it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import click
import msgspec
import pytest

from scripts.support import PAGE, render
from strata.base.support import CAPABILITIES, SupportRow
from strata.cli.main import strata
from strata.train.settings import ServerSettings
from tests.tiers import table
from tests.tiers.table import Tier

ROOT: Final = Path(__file__).parents[2]
ROWS: Final = [row for rows in CAPABILITIES.values() for row in rows]
PLATFORMS: Final = {
    "cuda",
    "nccl",
    "arm64",
    "windows",
    "macos",
    "gpus",
    "sampling",
    "router_replay",
    "in-flight samplers",
    "images",
}
"""Marks that are no setting."""


def help_of(mark: str) -> str:
    """The help of a command or of its option, as `strata … --help` prints it."""
    _, *words = mark.split()
    command: click.Command | None = strata
    for word in words:
        assert command is not None
        if word.startswith("--"):
            (option,) = [each for each in command.params if word in each.opts]
            assert isinstance(option, click.Option)
            return option.help or ""
        assert isinstance(command, click.Group)
        command = command.get_command(click.Context(command), word)
    assert command is not None
    return command.get_short_help_str(limit=200)


def test_the_page_is_written_from_the_tables() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert render(page) == page, "write it by `python -m scripts.support`"


def test_no_capability_has_two_rows() -> None:
    names = [row.name for row in ROWS]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_tests_of_a_row_exist_and_run_in_its_tier(row: SupportRow) -> None:
    if row.tier == "none":
        assert not row.tests
        return
    files = [file for file in table.list_files() if Path(file).is_relative_to(row.tests)]
    assert files, f"there are no tests at {row.tests}"
    assert table.select_tier(Tier(row.tier), files, table.read_durations()), f"none of {row.tests} is in {row.tier}"


def test_whatever_uses_a_device_is_experimental_on_cuda() -> None:
    """No test has run on a CUDA device."""
    assert {row.cuda for row in ROWS} <= {None, "experimental"}


def test_core_rows_have_tests_that_run_at_every_landing_or_within_a_cycle() -> None:
    assert {row.tier for row in ROWS if row.level == "core"} <= {"unit", "pr", "merge"}


def test_the_readme_promises_nothing_that_is_experimental() -> None:
    """It may say so where it says what is not proven."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    promises = re.sub(r"## What is proven, and what is not\n.*?(?=\n## )", "", text, flags=re.DOTALL)
    # For whom another tool is better.
    promises = re.sub(r"(?m)^- \*\*Not if\*\* .*$", "", promises)
    words = ("CUDA", "NCCL", "GPU", "Windows", "macOS", "systemd", "NVML", "ROCm", "torch.compile", "offload")
    assert [word for word in words if re.search(rf"\b{re.escape(word)}", promises)] == []


def test_marks_name_settings_features_commands_or_platforms() -> None:
    sections = {field.name: field.type for field in msgspec.structs.fields(ServerSettings)}
    settings = {f"{name}.{field}" for name, section in sections.items() for field in section.__struct_fields__}
    for mark in (mark for row in ROWS for mark in row.marks):
        assert mark in settings | PLATFORMS or (mark.startswith("strata ") and help_of(mark)), mark


def test_the_help_of_what_is_experimental_says_so() -> None:
    for row in ROWS:
        for mark in row.marks:
            if mark.startswith("strata "):
                assert ("(experimental)" in help_of(mark)) == (row.level == "experimental"), mark
