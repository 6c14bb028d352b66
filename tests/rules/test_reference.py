"""The pages of docs/reference are what the code declares, and every setting, route and option says what it is."""

from __future__ import annotations

import re

import pytest

from tests.rules import reference


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return reference.pages()


def test_the_pages_are_those_of_the_code(pages: dict[str, str]) -> None:
    written = {path.name: path.read_text(encoding="utf-8") for path in reference.FOLDER.glob("*.md")}
    assert written == pages, "make reference"


def test_the_reference_of_the_skill_is_that_of_the_code() -> None:
    assert reference.SKILL.read_text(encoding="utf-8") == reference.skill_page(), "make reference"


@pytest.mark.parametrize("name", ["settings.md", "routes.md", "commands.md", "metrics.md"])
def test_everything_that_is_declared_has_a_meaning(pages: dict[str, str], name: str) -> None:
    rows = [line for line in pages[name].splitlines() if line.startswith("| `") and "| section [" not in line]
    assert len(rows) > 50
    assert [row for row in rows if re.search(r"\|\s*\|$", row)] == []
