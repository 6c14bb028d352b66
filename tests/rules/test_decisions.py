"""A decision is in the navigation until a later one replaces it; the index lists those that were replaced apart."""

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


def test_the_navigation_has_the_decisions_that_hold_in_their_order() -> None:
    holding = [name for name in decisions() if name not in replaced()]
    hidden, _, shown = MKDOCS.partition("\nnav:\n")
    assert re.findall(r"decisions/([\d][\w.-]+\.md)", shown) == holding
    assert re.findall(r"decisions/([\d][\w.-]+\.md)", hidden) == list(replaced())


def test_the_index_lists_replaced_decisions_apart() -> None:
    holding, _, gone = INDEX.partition("\n## Replaced\n")
    assert re.findall(r"(?m)^\| \[\d{4}\]\(([\w.-]+)\)", holding) == [n for n in decisions() if n not in replaced()]
    assert dict(re.findall(r"(?m)^\| \[\d{4}\]\(([\w.-]+)\) \| .* \| \[\d{4}\]\(([\w.-]+)\) \|$", gone)) == replaced()
