"""The index lists all decisions, and those that a later one replaced apart; the navigation leads to it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
FOLDER: Final = ROOT / "docs" / "decisions"
INDEX: Final = (FOLDER / "index.md").read_text(encoding="utf-8")
MKDOCS: Final = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


def replaced() -> dict[str, str]:
    """The files of decisions that begin with the one that replaced them, and that one's file."""
    texts = {path.name: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("[0-9]*.md"))}
    found = {name: re.match(r"# .*\n\n\*\*Replaced by \[\d{4}\]\(([\w.-]+)\)", text) for name, text in texts.items()}
    return {name: match[1] for name, match in found.items() if match is not None}


def decisions() -> list[str]:
    return sorted(path.name for path in FOLDER.glob("[0-9]*.md"))


def test_the_navigation_has_the_index_alone() -> None:
    assert re.findall(r"decisions/([\w.-]+\.md)", MKDOCS.partition("\nnav:\n")[2]) == ["index.md"]


def test_the_index_lists_replaced_decisions_apart() -> None:
    holding, _, gone = INDEX.partition("\n## Replaced\n")
    assert re.findall(r"(?m)^\| \[\d{4}\]\(([\w.-]+)\)", holding) == [n for n in decisions() if n not in replaced()]
    assert dict(re.findall(r"(?m)^\| \[\d{4}\]\(([\w.-]+)\) \| .* \| \[\d{4}\]\(([\w.-]+)\) \|$", gone)) == replaced()
