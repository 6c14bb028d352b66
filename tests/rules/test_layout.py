"""Every module and folder that the layout of ARCHITECTURE.md names exists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
_TOP: Final = re.compile(r"  ([a-z_]+)/?(?:  +(.*))?")
_HEAD: Final = re.compile(r"([a-z_]+/?(?:, [a-z_]+/?)*)  +\S.*")
"""Names, and at least two spaces before what they are for."""
_INNER: Final = 13
"""The column of what a layer holds; texts that go on are indented further or have no name."""
FEWEST: Final = 40


def named(text: str) -> Iterator[Path]:
    """What the layout names, relative to src/strata, without the suffix of a module."""
    layer = ""
    for line in text.splitlines():
        inner = line[_INNER:] if line.startswith(" " * _INNER) and line[_INNER : _INNER + 1].strip() else ""
        if not line.startswith(" " * 3) and (top := _TOP.fullmatch(line)):
            layer, inner = top[1], top[2] or ""
            yield Path(layer)
        if head := _HEAD.fullmatch(inner):
            yield from (Path(layer) / name.rstrip("/") for name in head[1].split(", "))


def missing(text: str) -> list[str]:
    source = ROOT / "src" / "strata"
    return [str(name) for name in named(text) if not (source / name).is_dir() and not (source / f"{name}.py").exists()]


def layout() -> str:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    return text.partition("```\nsrc/strata/\n")[2].partition("\ntests/ ")[0]


def test_every_name_of_the_layout_exists() -> None:
    assert len(list(named(layout()))) >= FEWEST
    assert missing(layout()) == []


def test_a_name_that_does_not_exist_is_found() -> None:
    assert missing("  train/     store/    copies\n             payload, archived  files\n  nothing    of it\n") == [
        "train/store",
        "train/archived",
        "nothing",
    ]
