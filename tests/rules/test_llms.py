"""llms.txt and llms-full.txt, which the build of the documents writes, have every page of the navigation."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest
from mkdocs.config import load_config
from mkdocs.structure.files import get_files
from mkdocs.structure.nav import get_navigation

from scripts.llms import documents, first_sentence

ROOT: Final = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def written() -> dict[str, str]:
    config = load_config(str(ROOT / "mkdocs.yml"))
    files = config.plugins.on_files(get_files(config), config=config)
    return documents(config, get_navigation(files, config))


def test_the_build_runs_the_hooks() -> None:
    assert {"scripts/llms.py", "scripts/api_pages.py"} <= {*load_config(str(ROOT / "mkdocs.yml"))["hooks"]}


def test_every_page_of_the_navigation_has_a_line_that_says_what_it_is_about(written: dict[str, str]) -> None:
    named = re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2])
    lines = re.findall(r"(?m)^- \[(.+)\]\((\S+)\): (.*)$", written["llms.txt"])
    assert [url.replace(".html", ".md") for _, url, _ in lines] == named
    assert [url for title, url, sentence in lines if not title or not sentence] == []


def test_the_whole_text_has_every_page_and_what_it_includes(written: dict[str, str]) -> None:
    text = written["llms-full.txt"]
    for page in (ROOT / "docs").rglob("how-to/*.md"):
        assert page.read_text(encoding="utf-8").strip() in text
    assert (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").strip() in text
    assert "--8<-- " not in text


def test_a_sentence_is_the_first_of_the_prose() -> None:
    text = "# Title\n\n| a | b |\n\nIt [does](x.md) **one**\nthing. And more.\n"
    assert first_sentence(text) == "It does one thing."
