"""A page answers one question: none is longer than its kind allows, and blocks of how-to pages run or say why not."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tests.e2e import how_to
from tests.e2e.how_to import pages

ROOT: Final = Path(__file__).parents[2]
DOCS: Final = ROOT / "docs"
LONGEST: Final = 2500
LONGEST_HOW_TO: Final = 600
FEWEST_FOLLOWED: Final = 30
GENERATED: Final = ("reference/",)
"""Folders of pages that are written from the code."""
TABLES: Final[Mapping[str, str]] = {
    "campaign-record.md": "one row for each run of a campaign, written by `python -m soak`",
    "families.md": "one row for each family, written by `make families`",
    "glossary.md": "one row for each term",
    "proof.md": "one row for each promise, of which `make ledger` writes a part",
    "support.md": "one row for each capability and each combination, written by `scripts/support.py`",
}
"""Pages of rows that are looked up, not read."""


def words(text: str) -> int:
    return len(text.split())


def lengths() -> dict[str, int]:
    """The words of every page that is written by hand."""
    found = {str(page.relative_to(DOCS)): words(page.read_text(encoding="utf-8")) for page in DOCS.rglob("*.md")}
    return {name: count for name, count in found.items() if not name.startswith(GENERATED) and name not in TABLES}


def longest(name: str) -> int:
    return LONGEST_HOW_TO if name.startswith("how-to/") else LONGEST


def test_no_page_is_longer_than_its_kind_allows() -> None:
    found = lengths()
    assert len(found) > 50
    too_long = {name: count for name, count in found.items() if count > longest(name)}
    assert too_long == {}, "cut the page by task, or shorten it"


def test_every_page_of_rows_is_there() -> None:
    assert TABLES.keys() <= {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}


def test_every_block_is_run_or_has_a_reason_on_its_page() -> None:
    assert len([page for page in pages() if how_to.runs(page.read_text(encoding="utf-8"))]) >= FEWEST_FOLLOWED
    found = {page.name: how_to.unexplained(page.read_text(encoding="utf-8")) for page in pages()}
    assert {name: problems for name, problems in found.items() if problems} == {}


def test_a_page_that_another_test_runs_is_read_by_it() -> None:
    elsewhere = {page: how_to.RUN_BY.search(page.read_text(encoding="utf-8")) for page in pages()}
    tests = {page.name: match[1] for page, match in elsewhere.items() if match}
    assert {name for name, test in tests.items() if name not in (ROOT / test).read_text(encoding="utf-8")} == set()


def test_a_block_without_a_use_is_found() -> None:
    text = (
        '```toml title="a.toml"\nx = 1\n```\n```bash\nstrata list\n```\nNot run by the tests: it needs a GPU.\n'
        "\n```bash\nmake gpu\n```\n```sh\nls b.toml\n```\n```text\nb.toml\n```\n"
        '```toml title="b.toml"\n```\n1. x\n   ```sh\n'
    )
    assert [part.use.value for part in how_to.parts(text)] == ["file", "none", "reason", "commands", "output", "file"]
    assert how_to.unexplained(text) == ["bash: strata list", "a.toml is written and never used", "indented:    ```sh"]
